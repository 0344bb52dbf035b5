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

#[derive(Clone, Debug)]
struct State<B: NormOps> {
    x: Tensor<B, 2>,
    mean: Option<Tensor<B, 2>>,
    inverse_deviation: Tensor<B, 2>,
    norm: Norm<B>,
}

impl NormNode {
    fn gradients<B: NormOps, const N: usize>(self, ops: &Ops<State<B>, N>, grads: &mut Gradients) -> NormGradients<B> {
        let _forward = self.0.enter();
        let grad = float(grads.consume::<B>(&ops.node));
        let State { x, mean, inverse_deviation, norm } = ops.state.clone();
        let trained = ops.parents.iter().skip(1).any(Option::is_some);
        let _op = recorder::op("norm backward", || Call::reads([recorder::operand(&x)]).and_first(2));
        let residual = take_gradient(ops, 0, &x, grads);
        let operands = NormBackward { grad, x, mean, inverse_deviation, norm, residual, trained };
        norm_backward::<B>(Checked::new(operands))
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
        if let (Some(node), Some(gamma)) = (gamma, gradients.gamma) {
            grads.register::<B>(node.id, primitive(gamma));
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
        if let (Some(node), Some(gamma)) = (gamma, gradients.gamma) {
            grads.register::<B>(node.id, primitive(gamma));
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
        let NormOutput { output, mean, inverse_deviation } = forward;
        let output = primitive(output);
        let state = State { x: input, mean, inverse_deviation, norm: weights };
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
