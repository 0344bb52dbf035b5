//! Bytes as floats, from small operations.

use burn::tensor::{DType, ElementConversion, FloatDType, Int, Tensor};

use super::{Int8Weight, PACKED};
use crate::{Activation, Backend, Norm};

/// The weight `[d_output, d_input]` in `dtype`.
pub fn int8_to_float<B: Backend>(weight: &Int8Weight<B>, dtype: FloatDType) -> Tensor<B, 2> {
    let [d_output, words] = weight.packed.dims();
    let byte = |at: usize| {
        let shifted = weight.packed.clone().bitwise_right_shift_scalar((8 * at as i32).elem());
        let byte: Tensor<B, 2, Int> = shifted.bitwise_and_scalar(0xff.elem());
        // Of the upper half of the bytes, 256 is taken.
        let negative = byte.clone().greater_elem(127).int().cast(byte.dtype()).mul_scalar(256);
        (byte - negative).reshape([d_output, words, 1])
    };
    let bytes = Tensor::cat((0..PACKED).map(byte).collect(), 2).reshape([d_output, words * PACKED]);
    let scales = weight.scales.clone().reshape([d_output, 1]);
    (bytes.float().cast(DType::F32) * scales).cast(dtype)
}

/// `residual + activation(norm(x) * weight^T + bias)`, as far as these are there, by the operations on floats.
pub(crate) fn int8_linear<B: Backend>(
    x: Tensor<B, 2>,
    norm: Option<&Norm<B>>,
    weight: &Int8Weight<B>,
    bias: Option<Tensor<B, 1>>,
    activation: Option<Activation>,
    residual: Option<Tensor<B, 2>>,
) -> Tensor<B, 2> {
    let weight = B::int8_to_float(weight, FloatDType::from(x.dtype()));
    match (activation, residual) {
        (Some(activation), _) => B::norm_gate_up(x, norm, weight, bias, activation),
        (None, Some(residual)) => B::linear_add(x, weight, bias, None, residual),
        (None, None) => B::norm_linear(x, norm, weight, bias),
    }
}

/// Rows of a table of bytes, as `tokens` `[batch_size, seq_length]` name them.
pub(crate) fn int8_embed<B: Backend>(
    table: &Int8Weight<B>,
    tokens: Tensor<B, 2, Int>,
    dtype: FloatDType,
) -> Tensor<B, 3> {
    let [batch_size, seq_length] = tokens.dims();
    let [_, words] = table.packed.dims();
    let tokens = tokens.reshape([batch_size * seq_length]);
    let rows = Int8Weight {
        packed: table.packed.clone().select(0, tokens.clone()),
        scales: table.scales.clone().select(0, tokens),
    };
    int8_to_float(&rows, dtype).reshape([batch_size, seq_length, words * PACKED])
}
