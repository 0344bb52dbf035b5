//! Conversions between tensors and backend primitives.

use burn::tensor::backend::Backend;
use burn::tensor::{BasicOps, Element, Int, Numeric, Tensor, TensorData, TensorPrimitive};

/// The tensor of a float primitive.
pub(crate) fn float<B: Backend, const D: usize>(primitive: B::FloatTensorPrimitive) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}

/// The float primitive of a tensor.
pub(crate) fn primitive<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> B::FloatTensorPrimitive {
    tensor.into_primitive().tensor()
}

/// Uploads values in row-major order. An uploaded matrix has padded rows on some devices, even with
/// one row, which each kernel without padding would copy first.
pub(crate) fn row_after_row<B: Backend, const D: usize, K: BasicOps<B>>(
    values: Vec<impl Element>,
    shape: [usize; D],
    device: &B::Device,
) -> Tensor<B, D, K> {
    let count = values.len();
    Tensor::<B, 1, K>::from_data(TensorData::new(values, [count]), device).reshape(shape)
}

/// Rows of integers `[rows, most]`, at least one column, padded with `padding`.
pub(crate) fn padded_rows<B: Backend>(rows: &[&[u32]], padding: i32, device: &B::Device) -> Tensor<B, 2, Int> {
    let most = rows.iter().map(|row| row.len()).max().unwrap_or(0).max(1);
    let padded = |row: &&[u32]| {
        let values = row.iter().map(|value| *value as i32);
        values.chain(std::iter::repeat(padding)).take(most).collect::<Vec<i32>>()
    };
    row_after_row(rows.iter().flat_map(padded).collect(), [rows.len(), most], device)
}

/// The rows of `table` `[rows, width]` at `indices` `[count]`, below `rows`: `[count, width]`.
///
/// On CUDA and WGPU, Burn's `select` also reads `indices` at column numbers and drops the result:
/// out of bounds if a table is wider than there are indices.
pub(crate) fn rows_of<B: Backend, K: Numeric<B>>(
    table: Tensor<B, 2, K>,
    indices: Tensor<B, 1, Int>,
) -> Tensor<B, 2, K> {
    let [_, width] = table.dims();
    let [count] = indices.dims();
    table.gather(0, indices.reshape([count, 1]).expand([count, width]))
}
