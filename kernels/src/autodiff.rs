//! Shared parts of the nodes of Burn's [`Autodiff`]: tensors in and out of the graph, and
//! gradients.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor};

use crate::quant::{QuantizedWeight, Weight};
use crate::tensor::{float, primitive};

/// The inner backend's view of a float tensor, out of the graph.
pub(crate) fn inner<B: Backend, C: CheckpointStrategy, const D: usize>(
    tensor: &Tensor<Autodiff<B, C>, D>,
) -> Tensor<B, D> {
    tensor.clone().inner()
}

/// The inner backend's view of an integer tensor.
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

/// A weight for the inner backend's operations, and the graph tensor of its gradient, which a
/// quantized one does not have. Floats are cast to `dtype` once, for the forward and the backward
/// pass.
pub(crate) fn inner_weight<B: Backend, C: CheckpointStrategy>(
    weight: Weight<Autodiff<B, C>>,
    dtype: DType,
) -> (Weight<B>, Option<Tensor<Autodiff<B, C>, 2>>) {
    match inner_stored(weight) {
        Ok(weight) => (Weight::Float(inner(&weight).cast(dtype)), Some(weight)),
        Err(weight) => (weight, None),
    }
}

/// Takes a parent's gradient so far, from its other uses, so that the operation's kernel can add to
/// it. `None` if there is none yet. `like` is any tensor of the inner backend: gradients are looked
/// up by graph node.
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

/// Takes a parameter's gradient so far, like [`take_gradient`], in f32, the dtype of all parameter
/// gradients of this crate's operations. Gradients that Burn's operations add later have to be f32,
/// too.
pub(crate) fn take_sum<B: Backend, S, const N: usize, const D: usize>(
    ops: &Ops<S, N>,
    parent: usize,
    like: &Tensor<B, D>,
    grads: &mut Gradients,
) -> Option<Tensor<B, D>> {
    take_gradient(ops, parent, like, grads).map(|sum| sum.cast(DType::F32))
}

/// A scalar that depends on a tensor with a known gradient. A pass that starts at it continues from
/// the gradients of an earlier one.
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
        // Replaces the scalar's own gradient, the only one so far.
        *grads = self.earlier;
        let [parent] = ops.parents;
        if let Some(node) = parent {
            grads.register::<B>(node.id, ops.state);
        }
    }
}

/// The gradients of a loss, added to those of an `earlier` pass over the same parameters, if given,
/// as in gradient accumulation. This crate's projections and head loss, and on devices its
/// embeddings, accumulate parameter gradients in place.
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
/// If nothing in the loss's graph is tracked.
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

/// Starts a backward pass at `output` with its gradient `grad`, and adds to the gradients of an
/// `earlier` pass like [`backward`]. Returns these unchanged if nothing in `output`'s graph is
/// tracked.
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

/// Whether a tensor requires a gradient, or was computed from one that does.
pub(crate) fn is_tracked<B: Backend, C: CheckpointStrategy, const D: usize>(
    tensor: &Tensor<Autodiff<B, C>, D>,
) -> bool {
    !primitive(tensor.clone()).node.requirement.is_none()
}

#[cfg(all(test, feature = "ndarray"))]
mod tests {
    use burn::backend::NdArray;
    use burn::tensor::Distribution;
    use burn_ndarray::NdArrayTensor;

    use super::*;
    use crate::{Activation, ActivationKind, FeedForwardLayer, Norm, feed_forward, linear, norm};

    type A = Autodiff<NdArray>;

    #[test]
    #[should_panic(expected = "nothing of what the loss was computed from is tracked")]
    fn a_loss_of_nothing_tracked_is_refused() {
        let device = Default::default();
        let x = Tensor::<A, 1>::from_floats([3.0], &device).require_grad();
        let first = backward(x * 2.0, None);
        backward(Tensor::<A, 1>::from_floats([1.0], &device) * 2.0, Some(first));
    }

    /// Whether nothing else holds a tensor's values.
    fn is_alone(tensor: Tensor<NdArray, 2>) -> bool {
        match primitive(tensor) {
            NdArrayTensor::F32(storage) => storage.is_unique(),
            other => panic!("f32 is asked for: {other:?}"),
        }
    }

    #[test]
    fn frozen_weights_keep_no_input_and_have_no_gradient() {
        let device = Default::default();
        let random = |shape: [usize; 2]| Tensor::<A, 2>::random(shape, Distribution::Default, &device);
        let input = || random([5, 8]).require_grad() * 2.0;
        let activation = Activation { kind: ActivationKind::Silu, gated: true };
        for trained in [false, true] {
            let weight = |shape: [usize; 2]| random(shape).set_require_grad(trained);
            let x = input();
            let held = inner(&x);
            let square = weight([8, 8]);
            let output = linear(x, square.clone(), None);
            assert_eq!(is_alone(held), !trained, "linear, trained: {trained}");
            let gradients = output.sum().backward();
            assert_eq!(square.grad(&gradients).is_some(), trained, "linear");

            let (up, down) = (weight([12, 8]), weight([8, 6]));
            let layer = FeedForwardLayer {
                up: up.clone().into(),
                up_bias: None,
                activation,
                down: down.clone().into(),
                down_bias: None,
            };
            let gamma = Tensor::<A, 1>::ones([8], &device).set_require_grad(trained);
            let normed = norm(input(), &Norm::rms(gamma.clone(), 1e-6));
            let held = inner(&normed);
            let output = feed_forward(normed, None, layer, None);
            assert_eq!(is_alone(held), !trained, "feed_forward, trained: {trained}");
            let gradients = output.sum().backward();
            for weight in [up, down] {
                assert_eq!(weight.grad(&gradients).is_some(), trained, "feed_forward");
            }
            assert_eq!(gamma.grad(&gradients).is_some(), trained, "norm");
        }
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
