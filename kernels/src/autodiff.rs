//! What the nodes of Burn's [`Autodiff`] share: tensors in and out of the graph, and gradients taken from it.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::Ops;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};

use crate::tensor::{float, primitive};

/// The wrapped backend's view of a float tensor, out of the graph.
pub(crate) fn inner<B: Backend, C: CheckpointStrategy, const D: usize>(
    tensor: &Tensor<Autodiff<B, C>, D>,
) -> Tensor<B, D> {
    tensor.clone().inner()
}

/// The wrapped backend's view of an integer tensor.
pub(crate) fn inner_int<B: Backend, C: CheckpointStrategy, const D: usize>(
    tensor: Tensor<Autodiff<B, C>, D, Int>,
) -> Tensor<B, D, Int> {
    Tensor::from_primitive(tensor.into_primitive())
}

/// Takes out the gradient that a parent of an operation has so far, from other uses of it, so that the operation's own
/// kernel adds the two. `None` where it has none yet. `like` is any tensor of the wrapped backend: gradients are looked
/// up by a tensor of the graph, of which only the node counts.
pub(crate) fn take_gradient<B: Backend, S, const N: usize, const D: usize>(
    ops: &Ops<S, N>,
    parent: usize,
    like: &Tensor<B, D>,
    grads: &mut Gradients,
) -> Option<Tensor<B, D>> {
    let node = ops.parents[parent].clone()?;
    let mut tracked = primitive(Tensor::<Autodiff<B>, D>::from_inner(like.clone()));
    tracked.node = node;
    grads.remove::<B>(&tracked).map(float)
}
