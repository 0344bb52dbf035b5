//! Dropout on the CPU.

use burn::tensor::Tensor;
use burn_ndarray::NdArray;

use super::{DropoutForward, DropoutOps};
use crate::checked::Checked;
use crate::cpu::{Values, for_rows, tensor};

impl DropoutOps for NdArray {
    fn dropout_forward(operands: Checked<DropoutForward<Self>>) -> Tensor<Self, 2> {
        let DropoutForward { x, dropout } = operands.into_inner();
        let shape = x.dims();
        let columns = shape[1];
        let mut values = Values::rows(x).into_vec();
        let (threshold, scale) = (dropout.threshold(), dropout.scale() as f32);
        for_rows(
            &mut values,
            columns,
            #[inline(always)]
            |first, rows| {
                for (row, values) in (first..).zip(rows.chunks_exact_mut(columns)) {
                    dropout.key.row(row as u32).drop(0, values, threshold, scale);
                }
            },
        );
        tensor(values, shape)
    }
}
