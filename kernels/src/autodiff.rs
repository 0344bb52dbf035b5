//! What the nodes of Burn's [`Autodiff`] share: tensors in and out of the graph, and gradients taken from it.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor};

use crate::quant::{QuantizedWeight, Weight};
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

/// The wrapped backend's view of a quantized weight.
fn inner_quantized<B: Backend, C: CheckpointStrategy>(weight: QuantizedWeight<Autodiff<B, C>>) -> QuantizedWeight<B> {
    let QuantizedWeight { packed, scales, format, order } = weight;
    QuantizedWeight { packed: inner_int(packed), scales: scales.as_ref().map(inner), format, order }
}

/// What is stored as floats, or the wrapped backend's view of a quantized weight.
pub(crate) fn inner_stored<B: Backend, C: CheckpointStrategy>(
    weight: Weight<Autodiff<B, C>>,
) -> Result<Tensor<Autodiff<B, C>, 2>, Weight<B>> {
    match weight {
        Weight::Float(weight) => Ok(weight),
        Weight::Quantized(weight) => Err(Weight::Quantized(inner_quantized(weight))),
        Weight::Stacked(parts) => Err(Weight::Stacked(parts.into_iter().map(inner_quantized).collect())),
    }
}

impl<B: Backend> QuantizedWeight<B> {
    /// The same weight as the operations of [`Autodiff`] take it, which track nothing of it.
    pub fn tracked<C: CheckpointStrategy>(self) -> QuantizedWeight<Autodiff<B, C>> {
        let Self { packed, scales, format, order } = self;
        QuantizedWeight { packed: Tensor::from_inner(packed), scales: scales.map(Tensor::from_inner), format, order }
    }
}

/// A weight as the operations of the wrapped backend take it, and the tensor of the graph that its gradient goes to, which a
/// quantized one does not have. Floats are in `dtype`, cast once for the forward and the backward pass.
pub(crate) fn inner_weight<B: Backend, C: CheckpointStrategy>(
    weight: Weight<Autodiff<B, C>>,
    dtype: DType,
) -> (Weight<B>, Option<Tensor<Autodiff<B, C>, 2>>) {
    match inner_stored(weight) {
        Ok(weight) => (Weight::Float(inner(&weight).cast(dtype)), Some(weight)),
        Err(weight) => (weight, None),
    }
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

/// Takes out what the gradient of a parameter comes to so far, as [`take_gradient`] does, in f32, as the gradients of parameters are that this crate's
/// operations make. What Burn's operations add behind it has to be f32, too.
pub(crate) fn take_sum<B: Backend, S, const N: usize, const D: usize>(
    ops: &Ops<S, N>,
    parent: usize,
    like: &Tensor<B, D>,
    grads: &mut Gradients,
) -> Option<Tensor<B, D>> {
    take_gradient(ops, parent, like, grads).map(|sum| sum.cast(DType::F32))
}

/// A number that depends on a tensor, whose gradient is known. A pass that begins at it goes on from the gradients of an earlier one.
struct Known {
    earlier: Gradients,
}

impl std::fmt::Debug for Known {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Known")
    }
}

impl<B: Backend> Backward<B, 1> for Known {
    type State = B::FloatTensorPrimitive;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        // What is replaced is the number's own gradient, which is all that there is yet.
        *grads = self.earlier;
        let [parent] = ops.parents;
        if let Some(node) = parent {
            grads.register::<B>(node.id, ops.state);
        }
    }
}

/// The gradients of a loss, added to those of an `earlier` pass over the same parameters, where there was one, as a batch in parts has several. The
/// backward of this crate's projections and of its head's loss adds to a parameter's gradient in its place, and on devices that of its lookups.
///
/// ```
/// use burn::backend::{Autodiff, NdArray};
/// use burn::tensor::Tensor;
/// use fireclay_kernels::backward;
///
/// let device = Default::default();
/// let x = Tensor::<Autodiff<NdArray>, 1>::from_floats([3.0], &device).require_grad();
/// let first = backward(x.clone() * 2.0, None);
/// let both = backward(x.clone() * x.clone(), Some(first));
/// assert_eq!(x.grad(&both).expect("it is in both graphs").into_scalar(), 2.0 + 6.0);
/// ```
///
/// # Panics
/// If nothing of what the loss was computed from is tracked.
pub fn backward<B: Backend, C: CheckpointStrategy>(
    loss: Tensor<Autodiff<B, C>, 1>,
    earlier: Option<Gradients>,
) -> Gradients {
    assert!(is_tracked(&loss), "backward: nothing of what the loss was computed from is tracked");
    match earlier {
        None => loss.backward(),
        Some(earlier) => {
            let one = inner(&loss).ones_like();
            backward_from(loss, one, earlier)
        }
    }
}

/// A backward pass that begins in the middle: the gradients of all that `output` was computed from, where `grad` is its own, added to those of an
/// `earlier` pass as [`backward`] adds them. Where nothing of `output` is tracked, these as they are.
///
/// ```
/// use burn::backend::{Autodiff, NdArray};
/// use burn::tensor::Tensor;
/// use fireclay_kernels::{backward, backward_from};
///
/// let device = Default::default();
/// let x = Tensor::<Autodiff<NdArray>, 1>::from_floats([3.0], &device).require_grad();
/// let middle = x.clone() * x.clone();
/// let cut = middle.clone().detach().require_grad();
/// let mut gradients = backward(cut.clone() * 10.0, None);
/// let grad = cut.grad_remove(&mut gradients).expect("the loss is computed from it");
/// let gradients = backward_from(middle, grad, gradients);
/// assert_eq!(x.grad(&gradients).expect("it is in the graph").into_scalar(), 10.0 * 2.0 * 3.0);
/// ```
///
/// # Panics
/// If the output and its gradient differ in shape.
pub fn backward_from<B: Backend, C: CheckpointStrategy, const D: usize>(
    output: Tensor<Autodiff<B, C>, D>,
    grad: Tensor<B, D>,
    earlier: Gradients,
) -> Gradients {
    assert_eq!(output.dims(), grad.dims(), "backward_from: the gradient is of the output's shape");
    if !is_tracked(&output) {
        return earlier;
    }
    let number = primitive(Tensor::<B, 1>::zeros([1], &grad.device()));
    let nodes = [primitive(output).node];
    let prepared = Backward::<B, 1>::prepare::<C>(Known { earlier }, nodes).compute_bound().stateful();
    let number: Tensor<Autodiff<B, C>, 1> = float(match prepared {
        OpsKind::Tracked(node) => node.finish(primitive(grad), number),
        OpsKind::UnTracked(_) => unreachable!("its parent is tracked"),
    });
    number.backward()
}

/// Whether a tensor was computed from one that is to have a gradient, or is such itself.
pub(crate) fn is_tracked<B: Backend, C: CheckpointStrategy, const D: usize>(
    tensor: &Tensor<Autodiff<B, C>, D>,
) -> bool {
    !primitive(tensor.clone()).node.requirement.is_none()
}

#[cfg(all(test, feature = "ndarray"))]
mod tests {
    use burn::backend::NdArray;

    use super::*;

    type A = Autodiff<NdArray>;

    #[test]
    #[should_panic(expected = "nothing of what the loss was computed from is tracked")]
    fn a_loss_of_nothing_tracked_is_refused() {
        let device = Default::default();
        let x = Tensor::<A, 1>::from_floats([3.0], &device).require_grad();
        let first = backward(x * 2.0, None);
        backward(Tensor::<A, 1>::from_floats([1.0], &device) * 2.0, Some(first));
    }

    #[test]
    fn gradients_stay_as_they_are_where_nothing_of_an_output_is_tracked() {
        let device = Default::default();
        let x = Tensor::<A, 1>::from_floats([3.0], &device).require_grad();
        let first = backward(x.clone() * 2.0, None);
        let one = Tensor::from_floats([1.0], &device);
        let same = backward_from(Tensor::<A, 1>::from_floats([1.0], &device), one, first);
        assert_eq!(x.grad(&same).expect("that of the first pass").into_scalar(), 2.0);
    }
}
