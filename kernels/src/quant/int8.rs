//! INT8: signed bytes, with a scale for each row.
//!
//! ```text
//! word     | byte 0 | byte 1 | byte 2 | byte 3 |    lowest byte first, columns 4i to 4i + 3
//! weight   = byte * scale of the row                scale = largest magnitude of the row / 127
//! ```

use burn::tensor::backend::Backend;
use burn::tensor::{DType, ElementConversion, Int, Tensor};
#[cfg(feature = "cubecl")]
use cubecl::prelude::*;

use super::row::{Quantize, QuantizedRow, Reader, RowFormat, RowLayout};

/// Weights per word.
pub(crate) const PACKED: usize = 4;

/// The format.
pub(crate) struct Int8;

impl RowFormat for Int8 {
    const NAME: &'static str = "INT8";
    const READERS: &'static [Reader] = &[Reader::Skinny, Reader::Rows, Reader::DecodeStep];
    const QUANTIZE: Option<Quantize> = Some(|row, words, scales| scales[0] = quantize_row(row, words));

    fn layout(d_input: usize) -> Option<RowLayout> {
        (d_input > 0 && d_input.is_multiple_of(PACKED)).then_some(RowLayout { words: d_input / PACKED, scales: 1 })
    }

    fn row_length(words: usize) -> usize {
        words * PACKED
    }

    #[inline(always)]
    fn dequantize(row: QuantizedRow<'_>, out: &mut [f32]) {
        dequantize_row(row.words, row.scales[0], out);
    }

    #[cfg(feature = "ndarray")]
    #[inline(always)]
    fn dots(x: &[f32], row: QuantizedRow<'_>, out: &mut [f32]) -> bool {
        for (x, out) in x.chunks_exact(row.words.len() * PACKED).zip(out) {
            *out = dot_bytes(x, row.words) * row.scales[0];
        }
        true
    }

    fn reference<B: Backend>(packed: &Tensor<B, 2, Int>, scales: Option<&Tensor<B, 1>>) -> Option<Tensor<B, 2>> {
        let [d_output, words] = packed.dims();
        let byte = |at: usize| {
            let shifted = packed.clone().bitwise_right_shift_scalar((8 * at as i32).elem());
            let byte: Tensor<B, 2, Int> = shifted.bitwise_and_scalar(0xff.elem());
            // Bytes of 128 and more are negative.
            let negative = byte.clone().greater_elem(127).int().cast(byte.dtype()).mul_scalar(256);
            (byte - negative).reshape([d_output, words, 1])
        };
        let bytes = Tensor::cat((0..PACKED).map(byte).collect(), 2).reshape([d_output, words * PACKED]);
        Some(bytes.float().cast(DType::F32) * scales?.clone().reshape([d_output, 1]))
    }
}

/// Number of running sums.
#[cfg(feature = "ndarray")]
const LANES: usize = 16;

/// The dot product of `x` with a row's bytes.
#[cfg(feature = "ndarray")]
#[inline(always)]
fn dot_bytes(x: &[f32], words: &[i32]) -> f32 {
    let bytes: &[i8] = pulp::bytemuck::cast_slice(words);
    let mut lanes = [0.0f32; LANES];
    let (x_lanes, byte_lanes) = (x.chunks_exact(LANES), bytes.chunks_exact(LANES));
    let rest: f32 = x_lanes.remainder().iter().zip(byte_lanes.remainder()).map(|(x, byte)| x * f32::from(*byte)).sum();
    for (x, bytes) in x_lanes.zip(byte_lanes) {
        for lane in 0..LANES {
            lanes[lane] += x[lane] * f32::from(bytes[lane]);
        }
    }
    lanes.iter().sum::<f32>() + rest
}

/// Quantizes a row to bytes in `words`, and returns the scale: NaN if the row contains NaN.
#[inline(always)]
pub(crate) fn quantize_row(row: &[f32], words: &mut [i32]) -> f32 {
    let (largest, sum) =
        row.iter().fold((0.0f32, 0.0), |(largest, sum), value| (largest.max(value.abs()), sum + value.abs()));
    let scale = match largest {
        _ if sum.is_nan() => f32::NAN,
        0.0 => 1.0,
        _ => largest / 127.0,
    };
    let byte = |value: f32| (value / scale).round().clamp(-127.0, 127.0) as i8;
    for (four, word) in row.chunks_exact(PACKED).zip(words) {
        *word = i32::from_le_bytes([0, 1, 2, 3].map(|i| byte(four[i]) as u8));
    }
    scale
}

/// Multiplies a row's bytes by its scale.
#[inline(always)]
pub(crate) fn dequantize_row(words: &[i32], scale: f32, out: &mut [f32]) {
    for (word, out) in words.iter().zip(out.chunks_exact_mut(PACKED)) {
        for (byte, out) in word.to_le_bytes().into_iter().zip(out) {
            *out = f32::from(byte as i8) * scale;
        }
    }
}

/// The four bytes of a word, as floats, not scaled.
#[cfg(feature = "cubecl")]
#[cube]
pub(crate) fn unpack(word: u32) -> Vector<f32, Const<4>> {
    let mut four = Vector::<f32, Const<4>>::new(0.0);
    #[unroll]
    for i in 0..4usize {
        // Flipping the sign bit adds 128.
        let byte = ((word >> comptime!(8 * i as u32)) & 0xff) ^ 0x80;
        four[i] = f32::cast_from(byte) - 128.0f32;
    }
    four
}
