//! Reshaping in the graph: gradients are reshaped back.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::tensor::Tensor;

use super::ReshapeOps;
use crate::autodiff::inner;
use crate::tensor::{float, primitive};

/// From `E` dimensions back to `D`.
#[derive(Debug)]
struct ReshapeNode<const D: usize, const E: usize>;

impl<B: ReshapeOps, const D: usize, const E: usize> Backward<B, 1> for ReshapeNode<D, E> {
    type State = [usize; D];

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let shape = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |grad| primitive(B::reshape(float::<B, E>(grad), shape)));
    }
}

impl<B: ReshapeOps, C: CheckpointStrategy> ReshapeOps for Autodiff<B, C> {
    fn reshape<const D: usize, const E: usize>(x: Tensor<Self, D>, shape: [usize; E]) -> Tensor<Self, E> {
        let before = x.dims();
        let output = primitive(B::reshape(inner(&x), shape));
        let node = ReshapeNode::<D, E>;
        float(match Backward::<B, 1>::prepare::<C>(node, [primitive(x).node]).compute_bound().stateful() {
            OpsKind::Tracked(node) => node.finish(before, output),
            OpsKind::UnTracked(node) => node.finish(output),
        })
    }
}
