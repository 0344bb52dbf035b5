//! Weights of blocks in the kernels that look up and dequantize rows.

use cubecl::prelude::*;

use super::BlockFormat;
use crate::quant::halves::f16_of;

/// Byte `at` of the words.
#[cube]
fn byte(packed: &Array<u32>, at: u32) -> u32 {
    (packed[(at / 4) as usize] >> (at % 4 * 8)) & 0xff
}

/// The f16 at byte `at`, which is even.
#[cube]
fn half_at(packed: &Array<u32>, at: u32) -> f32 {
    f16_of((packed[(at / 4) as usize] >> (at % 4 * 8)) & 0xffff)
}

/// An unsigned code minus its offset.
#[cube]
fn counted(bits: u32, #[comptime] least: u32) -> f32 {
    f32::cast_from(bits) - comptime!(least as f32)
}

/// A signed byte.
#[cube]
fn signed(byte: u32) -> f32 {
    counted(byte ^ 0x80, 128u32)
}

/// Weight `at` of the row that begins at byte `row` of `packed`.
#[cube]
pub(crate) fn weight(packed: &Array<u32>, row: u32, at: u32, #[comptime] format: BlockFormat) -> f32 {
    let (weights, bytes) = comptime!((format.weights() as u32, format.bytes() as u32));
    let block = row + at / weights * bytes;
    let at = at % weights;
    if comptime!(matches!(
        format,
        BlockFormat::Q4_0 | BlockFormat::Q4_1 | BlockFormat::Q5_0 | BlockFormat::Q5_1 | BlockFormat::Q8_0
    )) {
        simple(packed, block, at, format)
    } else {
        of_256(packed, block, at, format)
    }
}

#[cube]
fn simple(packed: &Array<u32>, block: u32, at: u32, #[comptime] format: BlockFormat) -> f32 {
    let scale = half_at(packed, block);
    if comptime!(format == BlockFormat::Q8_0) {
        scale * signed(byte(packed, block + 2 + at))
    } else {
        let (has_least, has_fifth) = comptime!((
            matches!(format, BlockFormat::Q4_1 | BlockFormat::Q5_1),
            matches!(format, BlockFormat::Q5_0 | BlockFormat::Q5_1)
        ));
        let behind_scales = comptime!(if has_least { 4u32 } else { 2u32 });
        let nibbles = comptime!(behind_scales + if has_fifth { 4u32 } else { 0u32 });
        let mut quant = (byte(packed, block + nibbles + at % 16) >> (at / 16 * 4)) & 15;
        if has_fifth {
            quant |= ((byte(packed, block + behind_scales + at / 8) >> (at % 8)) & 1) << 4;
        }
        if has_least {
            scale * f32::cast_from(quant) + half_at(packed, block + 2)
        } else {
            scale * counted(quant, comptime!(if has_fifth { 16u32 } else { 8u32 }))
        }
    }
}

/// The 6-bit scale and minimum of 32 weights of Q4_K and Q5_K.
#[cube]
fn scale_and_least(packed: &Array<u32>, scales: u32, group: u32) -> (f32, f32) {
    let low = group < 4;
    let at = scales + group % 4;
    let (scale, least, more) = (byte(packed, at), byte(packed, at + 4), byte(packed, at + 8));
    let of_scale = select(low, scale & 63, (more & 15) | ((scale >> 6) << 4));
    let of_least = select(low, least & 63, (more >> 4) | ((least >> 6) << 4));
    (f32::cast_from(of_scale), f32::cast_from(of_least))
}

#[cube]
fn of_256(packed: &Array<u32>, block: u32, at: u32, #[comptime] format: BlockFormat) -> f32 {
    // In planes of four, two and one bits, a byte has the bits of weights that are 32 apart.
    let pairs = block + at / 128 * 32 + at % 32;
    let pair_shift = at / 32 % 4 * 2;
    if comptime!(format == BlockFormat::Q2K) {
        let of_group = byte(packed, block + at / 16);
        let quant = (byte(packed, pairs + 16) >> pair_shift) & 3;
        let (d, dmin) = (half_at(packed, block + 80), half_at(packed, block + 82));
        d * f32::cast_from(of_group & 15) * f32::cast_from(quant) - dmin * f32::cast_from(of_group >> 4)
    } else if comptime!(format == BlockFormat::Q3K) {
        let group = at / 16;
        let low = (byte(packed, block + 96 + group % 8) >> (group / 8 * 4)) & 15;
        let high = (byte(packed, block + 104 + group % 4) >> (group / 4 * 2)) & 3;
        let quant = (byte(packed, pairs + 32) >> pair_shift) & 3;
        let third = (byte(packed, block + at % 32) >> (at / 32)) & 1;
        half_at(packed, block + 108) * counted(low | (high << 4), 32u32) * counted(quant | (third << 2), 4u32)
    } else if comptime!(format == BlockFormat::Q6K) {
        let low = (byte(packed, block + at / 128 * 64 + at % 64) >> (at / 64 % 2 * 4)) & 15;
        let high = (byte(packed, pairs + 128) >> pair_shift) & 3;
        let scale = signed(byte(packed, block + 192 + at / 16));
        half_at(packed, block + 208) * scale * counted(low | (high << 4), 32u32)
    } else {
        let fifth = comptime!(format == BlockFormat::Q5K);
        let low = comptime!(if fifth { 48u32 } else { 16 });
        let mut quant = (byte(packed, block + low + at / 64 * 32 + at % 32) >> (at / 32 % 2 * 4)) & 15;
        if fifth {
            quant |= ((byte(packed, block + 16 + at % 32) >> (at / 32)) & 1) << 4;
        }
        let (scale, least) = scale_and_least(packed, block + 4, at / 32);
        half_at(packed, block) * scale * f32::cast_from(quant) - half_at(packed, block + 2) * least
    }
}
