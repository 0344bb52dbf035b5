//! Dequantization from basic operations.

use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

use super::Dequantize;
use crate::quant::{RowFormat, with_format};

/// The weight `[d_output, d_input]` in `dtype`.
pub fn dequantize<B: Backend>(Dequantize { weight, dtype }: Dequantize<B>) -> Tensor<B, 2> {
    with_format!(weight.format, F => F::reference(weight)).cast(dtype)
}
