//! Dequantization from basic operations.

use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

use super::Dequantize;

/// The weight `[d_output, d_input]` in `dtype`.
pub fn dequantize<B: Backend>(Dequantize { weight, dtype }: Dequantize<B>) -> Tensor<B, 2> {
    weight.reference().cast(dtype)
}
