//! Dequantization on the CPU.

use burn::tensor::Tensor;
use burn_ndarray::NdArray;

use super::{Dequantize, WeightOps};
use crate::checked::Checked;
use crate::cpu::{QuantizedRows, new_rows, tensor};
use crate::quant::{RowFormat, with_format};

impl WeightOps for NdArray {
    fn dequantize(operands: Checked<Dequantize<Self>>) -> Tensor<Self, 2> {
        let weight = operands.into_inner().weight;
        let ([d_output, d_input], format) = (weight.dims(), weight.format);
        let rows = QuantizedRows::of(weight);
        let [out] = with_format!(format, F => new_rows(
            d_output,
            [d_input],
            #[inline(always)]
            |first, [out]| {
                for (row, out) in (first..).zip(out.chunks_exact_mut(d_input)) {
                    F::dequantize(rows.row(row), out);
                }
            },
        ));
        tensor(out, [d_output, d_input])
    }
}
