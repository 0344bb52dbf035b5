//! What the nodes of Burn's [`Autodiff`] share: tensors in and out of the graph, and gradients taken from it.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
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

/// A number that depends on a tensor, whose gradient is known.
#[derive(Debug)]
struct Known;

impl<B: Backend> Backward<B, 1> for Known {
    type State = B::FloatTensorPrimitive;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let Ops { parents, node, state } = ops;
        unary::<B, _>(parents, node, grads, |_| state);
    }
}

/// The gradients of all that `output` was computed from, where `grad` is its own: a backward pass that begins in the middle. None
/// where nothing of it is tracked.
///
/// ```
/// use burn::backend::{Autodiff, NdArray};
/// use burn::tensor::Tensor;
/// use fireclay_kernels::backward_from;
///
/// let device = Default::default();
/// let x = Tensor::<Autodiff<NdArray>, 1>::from_floats([1.0, 2.0], &device).require_grad();
/// let output = x.clone() * x.clone();
/// let gradients = backward_from(output, Tensor::from_floats([1.0, 10.0], &device)).expect("x is tracked");
/// let gradient: Vec<f32> = x.grad(&gradients).expect("it is in the graph").into_data().to_vec().expect("f32");
/// assert_eq!(gradient, [2.0, 40.0]);
/// ```
///
/// # Panics
/// If the two differ in shape.
pub fn backward_from<B: Backend, C: CheckpointStrategy, const D: usize>(
    output: Tensor<Autodiff<B, C>, D>,
    grad: Tensor<B, D>,
) -> Option<Gradients> {
    assert_eq!(output.dims(), grad.dims(), "backward_from: the gradient is of the output's shape");
    let number = primitive(Tensor::<B, 1>::zeros([1], &grad.device()));
    let prepared = Backward::<B, 1>::prepare::<C>(Known, [primitive(output).node]).compute_bound().stateful();
    let number: Tensor<Autodiff<B, C>, 1> = float(match prepared {
        OpsKind::Tracked(node) => node.finish(primitive(grad), number),
        OpsKind::UnTracked(_) => return None,
    });
    Some(number.backward())
}
