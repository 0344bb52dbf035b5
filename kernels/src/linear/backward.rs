//! Projections in the graph.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::Tensor;

use super::LinearGradients;
use crate::Backend;
use crate::autodiff::{float, inner, primitive};
use crate::recorder;

/// The node of a projection: its parents are `[x, weight]` or `[x, weight, bias]`.
#[derive(Debug)]
struct LinearNode;

type State<B> = (Tensor<B, 2>, Tensor<B, 2>);

impl LinearNode {
    fn gradients<B: Backend, const N: usize>(ops: &Ops<State<B>, N>, grads: &mut Gradients) -> LinearGradients<B> {
        let grad = float(grads.consume::<B>(&ops.node));
        let (x, weight) = ops.state.clone();
        let _op = recorder::op("linear backward", || vec![recorder::operand(&x), recorder::operand(&weight)]);
        B::linear_backward(grad, x, weight, N == 3)
    }
}

impl<B: Backend> Backward<B, 2> for LinearNode {
    type State = State<B>;

    fn backward(self, ops: Ops<State<B>, 2>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let gradients = Self::gradients(&ops, grads);
        let [x, weight] = ops.parents;
        if let Some(node) = x {
            grads.register::<B>(node.id, primitive(gradients.x));
        }
        if let Some(node) = weight {
            grads.register::<B>(node.id, primitive(gradients.weight));
        }
    }
}

impl<B: Backend> Backward<B, 3> for LinearNode {
    type State = State<B>;

    fn backward(self, ops: Ops<State<B>, 3>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let gradients = Self::gradients(&ops, grads);
        let [x, weight, bias] = ops.parents;
        if let Some(node) = x {
            grads.register::<B>(node.id, primitive(gradients.x));
        }
        if let Some(node) = weight {
            grads.register::<B>(node.id, primitive(gradients.weight));
        }
        if let (Some(node), Some(bias)) = (bias, gradients.bias) {
            grads.register::<B>(node.id, primitive(bias));
        }
    }
}

pub(crate) fn linear<B: Backend, C: CheckpointStrategy>(
    x: Tensor<Autodiff<B, C>, 2>,
    weight: Tensor<Autodiff<B, C>, 2>,
    bias: Option<Tensor<Autodiff<B, C>, 1>>,
) -> Tensor<Autodiff<B, C>, 2> {
    let state = (inner(&x), inner(&weight));
    let output = primitive(B::linear_forward(state.0.clone(), state.1.clone(), bias.as_ref().map(inner)));
    let (x, weight) = (primitive(x).node, primitive(weight).node);
    float(match bias {
        None => match Backward::<B, 2>::prepare::<C>(LinearNode, [x, weight]).compute_bound().stateful() {
            OpsKind::Tracked(node) => node.finish(state, output),
            OpsKind::UnTracked(node) => node.finish(output),
        },
        Some(bias) => {
            let nodes = [x, weight, primitive(bias).node];
            match Backward::<B, 3>::prepare::<C>(LinearNode, nodes).compute_bound().stateful() {
                OpsKind::Tracked(node) => node.finish(state, output),
                OpsKind::UnTracked(node) => node.finish(output),
            }
        }
    })
}
