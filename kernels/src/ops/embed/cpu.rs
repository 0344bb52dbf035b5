//! The lookup on the CPU, and its gradient.

use burn::tensor::{FloatDType, Tensor};
use burn_ndarray::NdArray;

use super::{EmbedBackward, EmbedForward, EmbedOps};
use crate::checked::Checked;
use crate::cpu::{QuantizedRows, Values, clamp_index, integers, new_rows, tensor, vectorised, zeros};
use crate::quant::Weight;

impl EmbedOps for NdArray {
    fn embed_forward(operands: Checked<EmbedForward<Self>>) -> Tensor<Self, 3> {
        let EmbedForward { table, tokens, added, .. } = operands.into_inner();
        let [vocabulary, d_model] = table.dims();
        let [batch_size, seq_length] = tokens.dims();
        let tokens = integers(tokens);
        let looked_up = |row: &(dyn Fn(usize, &mut [f32]) + Sync)| {
            let [out] = new_rows(
                tokens.len(),
                [d_model],
                #[inline(always)]
                |first, [out]| {
                    for (token, out) in tokens[first..].iter().zip(out.chunks_exact_mut(d_model)) {
                        row(clamp_index(*token, vocabulary - 1), out);
                    }
                },
            );
            tensor(out, [batch_size, seq_length, d_model])
        };
        let rows: Tensor<Self, 3> = match table {
            Weight::Float(table) => {
                let table = Values::rows(table);
                looked_up(&|row, out| out.copy_from_slice(&table[row * d_model..][..d_model]))
            }
            Weight::Quantized(table) => {
                let rows = QuantizedRows::of(table);
                looked_up(&|row, out| rows.dequantize(row..row + 1, out))
            }
            stacked => {
                let table = Values::rows(stacked.into_float(FloatDType::F32));
                looked_up(&|row, out| out.copy_from_slice(&table[row * d_model..][..d_model]))
            }
        };
        match added {
            Some(x) => x + rows,
            None => rows,
        }
    }

    /// Sums the rows in order.
    fn embed_backward(operands: Checked<EmbedBackward<Self>>) -> Tensor<Self, 2> {
        let EmbedBackward { grad, tokens, vocabulary, sum } = operands.into_inner();
        let d_model = grad.dims()[1];
        let grad = Values::rows(grad);
        let mut out = zeros(vocabulary * d_model);
        vectorised(
            #[inline(always)]
            || {
                for (token, row) in integers(tokens).into_iter().zip(grad.chunks_exact(d_model)) {
                    let sums = &mut out[clamp_index(token, vocabulary - 1) * d_model..][..d_model];
                    sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
                }
            },
        );
        let rows = tensor(out, [vocabulary, d_model]);
        match sum {
            Some(sum) => sum + rows,
            None => rows,
        }
    }
}
