//! Norms in the graph.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::Tensor;

use super::{Norm, NormGradients, NormOutput};
use crate::Backend;
use crate::autodiff::{float, inner, primitive, take_gradient};
use crate::recorder;

/// The node of a norm: its parents are `[x, gamma]` or `[x, gamma, beta]`.
#[derive(Debug)]
struct NormNode;

type State<B> = (Tensor<B, 2>, NormOutput<B>, Norm<B>);

impl NormNode {
    fn gradients<B: Backend, const N: usize>(ops: &Ops<State<B>, N>, grads: &mut Gradients) -> NormGradients<B> {
        let grad = float(grads.consume::<B>(&ops.node));
        let (x, saved, norm) = ops.state.clone();
        let _op = recorder::op("norm backward", || vec![recorder::operand(&x)]);
        let residual = take_gradient(ops, 0, &x, grads);
        B::norm_backward(grad, x, saved, &norm, residual)
    }
}

impl<B: Backend> Backward<B, 2> for NormNode {
    type State = State<B>;

    fn backward(self, ops: Ops<State<B>, 2>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let gradients = Self::gradients(&ops, grads);
        let [x, gamma] = ops.parents;
        if let Some(node) = x {
            grads.register::<B>(node.id, primitive(gradients.x));
        }
        if let Some(node) = gamma {
            grads.register::<B>(node.id, primitive(gradients.gamma));
        }
    }
}

impl<B: Backend> Backward<B, 3> for NormNode {
    type State = State<B>;

    fn backward(self, ops: Ops<State<B>, 3>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let gradients = Self::gradients(&ops, grads);
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

pub(crate) fn norm<B: Backend, C: CheckpointStrategy>(
    x: Tensor<Autodiff<B, C>, 2>,
    norm: &Norm<Autodiff<B, C>>,
) -> Tensor<Autodiff<B, C>, 2> {
    let weights =
        Norm { kind: norm.kind, gamma: inner(&norm.gamma), beta: norm.beta.as_ref().map(inner), epsilon: norm.epsilon };
    let input = inner(&x);
    let forward = B::norm_forward(input.clone(), &weights);
    let output = primitive(forward.output.clone());
    let state = (input, forward, weights);
    let (x, gamma) = (primitive(x).node, primitive(norm.gamma.clone()).node);
    float(match norm.beta.clone() {
        None => match Backward::<B, 2>::prepare::<C>(NormNode, [x, gamma]).compute_bound().stateful() {
            OpsKind::Tracked(node) => node.finish(state, output),
            OpsKind::UnTracked(node) => node.finish(output),
        },
        Some(beta) => {
            let nodes = [x, gamma, primitive(beta).node];
            match Backward::<B, 3>::prepare::<C>(NormNode, nodes).compute_bound().stateful() {
                OpsKind::Tracked(node) => node.finish(state, output),
                OpsKind::UnTracked(node) => node.finish(output),
            }
        }
    })
}
