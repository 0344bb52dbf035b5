//! Between tensors and the primitives that a backend computes with.

use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorPrimitive};

/// The tensor of a float primitive.
pub(crate) fn float<B: Backend, const D: usize>(primitive: B::FloatTensorPrimitive) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}

/// The float primitive under a tensor.
pub(crate) fn primitive<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> B::FloatTensorPrimitive {
    tensor.into_primitive().tensor()
}
