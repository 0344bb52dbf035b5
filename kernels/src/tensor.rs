//! Between tensors and the primitives that a backend computes with.

use burn::tensor::backend::Backend;
use burn::tensor::{Int, Numeric, Tensor, TensorPrimitive};

/// The tensor of a float primitive.
pub(crate) fn float<B: Backend, const D: usize>(primitive: B::FloatTensorPrimitive) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}

/// The float primitive under a tensor.
pub(crate) fn primitive<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> B::FloatTensorPrimitive {
    tensor.into_primitive().tensor()
}

/// The rows of `table` `[rows, width]` that `indices` `[count]`, below `rows`, name: `[count, width]`.
///
/// On CUDA and WGPU Burn's `select` reads `indices` at the numbers of columns, too, and drops what it read: beyond their end
/// where a table is wider than they are many.
pub(crate) fn rows_of<B: Backend, K: Numeric<B>>(
    table: Tensor<B, 2, K>,
    indices: Tensor<B, 1, Int>,
) -> Tensor<B, 2, K> {
    let [_, width] = table.dims();
    let [count] = indices.dims();
    table.gather(0, indices.reshape([count, 1]).expand([count, width]))
}
