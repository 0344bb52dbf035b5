//! Weights of grouped formats in the kernels that look up and dequantize rows.

use cubecl::prelude::*;

use super::{FP4, GroupedFormat, NF4};

/// A table entry.
#[cube]
fn of_table(code: u32, #[comptime] table: [f32; 16]) -> f32 {
    let mut value = f32::new(0.0);
    #[unroll]
    #[allow(clippy::needless_range_loop, reason = "kernels have no iterators")]
    for at in 0..16usize {
        value = select(code == comptime!(at as u32), f32::new(comptime!(table[at])), value);
    }
    value
}

/// The value of an E4M3 float.
#[cube]
fn e4m3(code: u32) -> f32 {
    let (exponent, fraction) = ((code >> 3) & 15, code & 7);
    // Normal numbers get f32's exponent bias; subnormals are multiples of 2^-9.
    let bits = ((exponent + 120) << 23) | (fraction << 20);
    // CUDA cannot reinterpret a constant.
    let bits = select((code & 127) == 127, u32::new(0x7fc0_0000), bits);
    let normal = f32::reinterpret(bits);
    let magnitude = select(exponent == 0, f32::cast_from(fraction) * comptime!(1.0f32 / 512.0), normal);
    select((code & 128) != 0, -magnitude, magnitude)
}

/// Weight `at` of a row whose words begin at `row` and whose numbers begin at `numbers`.
#[cube]
pub(crate) fn weight(
    packed: &Array<u32>,
    scales: &Array<f32>,
    row: u32,
    numbers: u32,
    at: u32,
    #[comptime] format: GroupedFormat,
) -> f32 {
    let (bits, group) = comptime!((format.bits() as u32, format.group() as u32));
    let in_word = comptime!(32 / bits);
    let code = (packed[(row + at / in_word) as usize] >> (at % in_word * bits)) & comptime!((1u32 << bits) - 1);
    let zeros =
        comptime!(matches!(format, GroupedFormat::Zeros4x32 | GroupedFormat::Zeros4x64 | GroupedFormat::Zeros4x128));
    if zeros {
        let of = (numbers + at / group * 2) as usize;
        scales[of] * (f32::cast_from(code) - scales[of + 1])
    } else {
        let scale = scales[(numbers + at / group) as usize];
        if comptime!(format == GroupedFormat::Nf4) {
            scale * of_table(code, NF4)
        } else if comptime!(format == GroupedFormat::Fp4) {
            scale * of_table(code, FP4)
        } else if comptime!(format == GroupedFormat::Fp8) {
            scale * e4m3(code)
        } else if comptime!(format == GroupedFormat::Int8x128) {
            scale * (f32::cast_from(code ^ 0x80) - 128.0f32)
        } else {
            scale * (f32::cast_from(code) - 8.0f32)
        }
    }
}
