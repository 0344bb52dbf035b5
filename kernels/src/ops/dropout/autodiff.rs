//! Dropout in the graph: the mask is recomputed from its key.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::tensor::Tensor;

use super::{Dropout, DropoutForward, DropoutOps, dropout_forward};
use crate::checked::Checked;
use crate::products::Forward;
use crate::recorder::{self, Call};
use crate::tensor::{float, primitive};

#[derive(Debug)]
struct DropoutNode(Forward);

impl<B: DropoutOps> Backward<B, 1> for DropoutNode {
    type State = Dropout;

    fn backward(self, ops: Ops<Dropout, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let dropout = ops.state;
        let _forward = self.0.enter();
        unary::<B, _>(ops.parents, ops.node, grads, |grad| {
            let x = float(grad);
            let _op = recorder::op("dropout backward", || Call::reads([recorder::operand(&x)]).and_first(1));
            primitive(dropout_forward::<B>(Checked::new(DropoutForward { x, dropout })))
        });
    }
}

impl<B: DropoutOps, C: CheckpointStrategy> DropoutOps for Autodiff<B, C> {
    fn dropout(operands: Checked<DropoutForward<Self>>) -> Tensor<Self, 2> {
        let _products = operands.products().enter();
        let DropoutForward { x, dropout } = operands.into_inner();
        let x = primitive(x);
        let output = dropout_forward::<B>(Checked::new(DropoutForward { x: float(x.primitive), dropout }));
        float(match DropoutNode(Forward::current()).prepare::<C>([x.node]).compute_bound().stateful() {
            OpsKind::Tracked(node) => node.finish(dropout, primitive(output)),
            OpsKind::UnTracked(node) => node.finish(primitive(output)),
        })
    }
}
