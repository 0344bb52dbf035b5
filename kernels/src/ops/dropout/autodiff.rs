//! Dropout in the graph: the mask is made again from its key.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::tensor::Tensor;

use super::Dropout;
use crate::Backend;
use crate::autodiff::{float, primitive};
use crate::recorder;

#[derive(Debug)]
struct DropoutNode;

impl<B: Backend> Backward<B, 1> for DropoutNode {
    type State = Dropout;

    fn backward(self, ops: Ops<Dropout, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let dropout = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |grad| {
            let grad = float(grad);
            let _op = recorder::op("dropout backward", || vec![recorder::operand(&grad)]);
            primitive(B::dropout(grad, dropout))
        });
    }
}

pub(crate) fn dropout<B: Backend, C: CheckpointStrategy>(
    x: Tensor<Autodiff<B, C>, 2>,
    dropout: Dropout,
) -> Tensor<Autodiff<B, C>, 2> {
    let x = primitive(x);
    let output = primitive(B::dropout(float(x.primitive), dropout));
    float(match DropoutNode.prepare::<C>([x.node]).compute_bound().stateful() {
        OpsKind::Tracked(node) => node.finish(dropout, output),
        OpsKind::UnTracked(node) => node.finish(output),
    })
}
