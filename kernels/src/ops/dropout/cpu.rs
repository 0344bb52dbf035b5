//! Dropout on the CPU.

use burn::tensor::Tensor;
use burn_ndarray::NdArray;

use super::Dropout;
use crate::cpu::{Values, for_rows, tensor};

pub(crate) fn dropout(x: Tensor<NdArray, 2>, dropout: Dropout) -> Tensor<NdArray, 2> {
    let shape = x.dims();
    let columns = shape[1];
    let mut values = Values::rows(x).into_vec();
    let (threshold, scale) = (dropout.threshold(), dropout.scale() as f32);
    for_rows(&mut values, columns, |first, rows| {
        for (row, values) in (first..).zip(rows.chunks_exact_mut(columns)) {
            dropout.key.row(row as u32).drop(0, values, threshold, scale);
        }
    });
    tensor(values, shape)
}
