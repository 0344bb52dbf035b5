//! Norms in the graph.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::Tensor;

use super::{Norm, NormBackward, NormForward, NormGradients, NormOps, NormOutput, norm_backward, norm_forward};
use crate::autodiff::{inner, take_gradient};
use crate::checked::Checked;
use crate::products::Forward;
use crate::recorder::{self, Call};
use crate::tensor::{float, primitive};

/// The node of a norm: its parents are `[x, gamma]` or `[x, gamma, beta]`.
#[derive(Debug)]
struct NormNode(Forward);

type State<B> = (Tensor<B, 2>, NormOutput<B>, Norm<B>);

impl NormNode {
    fn gradients<B: NormOps, const N: usize>(self, ops: &Ops<State<B>, N>, grads: &mut Gradients) -> NormGradients<B> {
        let _forward = self.0.enter();
        let grad = float(grads.consume::<B>(&ops.node));
        let (x, saved, norm) = ops.state.clone();
        let _op = recorder::op("norm backward", || Call::reads([recorder::operand(&x)]).and_first(2));
        let residual = take_gradient(ops, 0, &x, grads);
        norm_backward::<B>(Checked::new(NormBackward { grad, x, saved, norm, residual }))
    }
}

impl<B: NormOps> Backward<B, 2> for NormNode {
    type State = State<B>;

    fn backward(self, ops: Ops<State<B>, 2>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let gradients = self.gradients(&ops, grads);
        let [x, gamma] = ops.parents;
        if let Some(node) = x {
            grads.register::<B>(node.id, primitive(gradients.x));
        }
        if let Some(node) = gamma {
            grads.register::<B>(node.id, primitive(gradients.gamma));
        }
    }
}

impl<B: NormOps> Backward<B, 3> for NormNode {
    type State = State<B>;

    fn backward(self, ops: Ops<State<B>, 3>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let gradients = self.gradients(&ops, grads);
        let [x, gamma, beta] = ops.parents;
        if let Some(node) = x {
            grads.register::<B>(node.id, primitive(gradients.x));
        }
        if let Some(node) = gamma {
            grads.register::<B>(node.id, primitive(gradients.gamma));
        }
        if let (Some(node), Some(beta)) = (beta, gradients.beta) {
            grads.register::<B>(node.id, primitive(beta));
        }
    }
}

impl<B: NormOps, C: CheckpointStrategy> NormOps for Autodiff<B, C> {
    fn norm(operands: Checked<NormForward<Self>>) -> Tensor<Self, 2> {
        let _products = operands.products().enter();
        let NormForward { x, norm: Norm { kind, gamma, beta, epsilon } } = operands.into_inner();
        let weights = Norm { kind, gamma: inner(&gamma), beta: beta.as_ref().map(inner), epsilon };
        let input = inner(&x);
        let forward = norm_forward::<B>(Checked::new(NormForward { x: input.clone(), norm: weights.clone() }));
        let output = primitive(forward.output.clone());
        let state = (input, forward, weights);
        let (x, gamma) = (primitive(x).node, primitive(gamma).node);
        float(match beta {
            None => match Backward::<B, 2>::prepare::<C>(NormNode(Forward::current()), [x, gamma])
                .compute_bound()
                .stateful()
            {
                OpsKind::Tracked(node) => node.finish(state, output),
                OpsKind::UnTracked(node) => node.finish(output),
            },
            Some(beta) => {
                let nodes = [x, gamma, primitive(beta).node];
                match Backward::<B, 3>::prepare::<C>(NormNode(Forward::current()), nodes).compute_bound().stateful() {
                    OpsKind::Tracked(node) => node.finish(state, output),
                    OpsKind::UnTracked(node) => node.finish(output),
                }
            }
        })
    }
}
