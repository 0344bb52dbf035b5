//! Bytes as floats, from small operations.

use burn::tensor::backend::Backend;
use burn::tensor::{DType, ElementConversion, Int, Tensor};

use super::{Int8ToFloat, PACKED};

/// The weight `[d_output, d_input]` in `dtype`.
pub fn int8_to_float<B: Backend>(Int8ToFloat { weight, dtype }: Int8ToFloat<B>) -> Tensor<B, 2> {
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
