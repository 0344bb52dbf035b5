//! The node of a side loss.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::Tensor;

use super::{SideLoss, SideLossOps};
use crate::autodiff::inner;
use crate::checked::Checked;
use crate::tensor::{float, primitive};

/// Parents `[x, loss]`.
#[derive(Debug)]
struct SideLossNode;

impl<B: SideLossOps> Backward<B, 2> for SideLossNode {
    /// The gradient of the loss.
    type State = Tensor<B, 1>;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let one = primitive(ops.state);
        for (parent, gradient) in ops.parents.into_iter().zip([grad, one]) {
            if let Some(node) = parent {
                grads.register::<B>(node.id, gradient);
            }
        }
    }
}

impl<B: SideLossOps, C: CheckpointStrategy> SideLossOps for Autodiff<B, C> {
    fn side_loss(operands: Checked<SideLoss<Self>>) -> Tensor<Self, 2> {
        let SideLoss { x, loss } = operands.into_inner();
        let (output, one) = (primitive(inner(&x)), inner(&loss).ones_like());
        let nodes = [primitive(x).node, primitive(loss).node];
        float(match SideLossNode.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(node) => node.finish(one, output),
            OpsKind::UnTracked(node) => node.finish(output),
        })
    }
}
