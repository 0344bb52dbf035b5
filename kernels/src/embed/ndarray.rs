//! The gradient of the lookup on the CPU.

use burn::tensor::{Int, Tensor};
use burn_ndarray::NdArray;

use crate::host::{Values, integers, tensor, vectorised, zeros};

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
