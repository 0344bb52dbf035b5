//! Activations in the graph: the input is kept, nothing else.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::tensor::Tensor;

use super::Activation;
use crate::Backend;
use crate::autodiff::{float, inner, primitive};
use crate::recorder;

#[derive(Debug)]
struct ActivateNode;

impl<B: Backend> Backward<B, 1> for ActivateNode {
    type State = (Tensor<B, 2>, Activation);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let (x, activation) = ops.state;
        let _op = recorder::op("activate backward", || vec![recorder::operand(&x)]);
        unary::<B, _>(ops.parents, ops.node, grads, |grad| primitive(B::activate_backward(float(grad), x, activation)));
    }
}

pub(crate) fn activate<B: Backend, C: CheckpointStrategy>(
    x: Tensor<Autodiff<B, C>, 2>,
    activation: Activation,
) -> Tensor<Autodiff<B, C>, 2> {
    let input = inner(&x);
    let output = primitive(B::activate_forward(input.clone(), activation));
    float(match ActivateNode.prepare::<C>([primitive(x).node]).compute_bound().stateful() {
        OpsKind::Tracked(node) => node.finish((input, activation), output),
        OpsKind::UnTracked(node) => node.finish(output),
    })
}
