//! Activations in the graph: only the input is saved.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::tensor::Tensor;

use super::{
    ActivateBackward, ActivateForward, Activation, ActivationOps, activate_backward, activate_backward_call,
    activate_forward,
};
use crate::autodiff::inner;
use crate::checked::Checked;
use crate::products::Forward;
use crate::recorder;
use crate::tensor::{float, primitive};

#[derive(Debug)]
struct ActivateNode(Forward);

impl<B: ActivationOps> Backward<B, 1> for ActivateNode {
    type State = (Tensor<B, 2>, Activation);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let (x, activation) = ops.state;
        let _forward = self.0.enter();
        let _op = recorder::op("activate backward", || activate_backward_call(&x, activation));
        unary::<B, _>(ops.parents, ops.node, grads, |grad| {
            primitive(activate_backward::<B>(Checked::new(ActivateBackward { grad: float(grad), x, activation })))
        });
    }
}

impl<B: ActivationOps, C: CheckpointStrategy> ActivationOps for Autodiff<B, C> {
    fn activate(operands: Checked<ActivateForward<Self>>) -> Tensor<Self, 2> {
        let _products = operands.products().enter();
        let ActivateForward { x, activation } = operands.into_inner();
        let input = inner(&x);
        let output = activate_forward::<B>(Checked::new(ActivateForward { x: input.clone(), activation }));
        float(match ActivateNode(Forward::current()).prepare::<C>([primitive(x).node]).compute_bound().stateful() {
            OpsKind::Tracked(node) => node.finish((input, activation), primitive(output)),
            OpsKind::UnTracked(node) => node.finish(primitive(output)),
        })
    }
}
