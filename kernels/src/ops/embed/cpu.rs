//! The lookup on the CPU, and its gradient.

use burn::tensor::{Int, Tensor};
use burn_ndarray::NdArray;

use crate::cpu::{Values, integers, new_rows, tensor, vectorised, zeros};

pub(crate) fn embed_forward(table: Tensor<NdArray, 2>, tokens: Tensor<NdArray, 2, Int>) -> Tensor<NdArray, 3> {
    let [batch_size, seq_length] = tokens.dims();
    let d_model = table.dims()[1];
    let (table, tokens) = (Values::rows(table), integers(tokens));
    let [out] = new_rows(tokens.len(), [d_model], |first, [out]| {
        for (token, out) in tokens[first..].iter().zip(out.chunks_exact_mut(d_model)) {
            out.copy_from_slice(&table[*token as usize * d_model..][..d_model]);
        }
    });
    tensor(out, [batch_size, seq_length, d_model])
}

/// Adds the rows up in their order.
pub(crate) fn embed_backward(
    grad: Tensor<NdArray, 2>,
    tokens: Tensor<NdArray, 1, Int>,
    vocabulary: usize,
) -> Tensor<NdArray, 2> {
    let d_model = grad.dims()[1];
    let grad = Values::rows(grad);
    let mut out = zeros(vocabulary * d_model);
    vectorised(|| {
        for (token, row) in integers(tokens).into_iter().zip(grad.chunks_exact(d_model)) {
            let sums = &mut out[token as usize * d_model..][..d_model];
            sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
        }
    });
    tensor(out, [vocabulary, d_model])
}
