//! Blocks of 256 weights whose own scales, and least values, of 16 or 32 weights each are
//! quantized, too: with an f16 `d`, and an f16 `dmin`, of the block.
//!
//! ```text
//! Q2_K   scales [16] | low bits [64] | d | dmin                       weight = d s q - dmin m
//! Q3_K   high bits [32] | low bits [64] | scales [12] | d             weight = d (s - 32) (q - 4)
//! Q4_K   d | dmin | scales [12] | low bits [128]                      weight = d s q - dmin m
//! Q5_K   d | dmin | scales [12] | high bits [32] | low bits [128]     weight = d s q - dmin m
//! Q6_K   low bits [128] | high bits [64] | scales [16] | d            weight = d s (q - 32)
//! ```
//!
//! Bits of weights lie in planes: a byte has those of weights that are 32 apart (64 in the low bits
//! of Q6_K), the first of them lowest.

use super::{Block, half_at};
use crate::quant::tiles::{Field, Fields};

const WEIGHTS: usize = 256;

/// The fields of `BITS` bits from weight `at` on, up to the end of its plane, where bytes hold
/// weights that are `APART` from each other.
#[inline(always)]
fn plane<const BITS: usize, const APART: usize>(bytes: &[u8], at: usize) -> impl Iterator<Item = u8> {
    let in_byte = 8 / BITS;
    let (group, plane, column) = (at / (APART * in_byte), at / APART % in_byte, at % APART);
    let fields = &bytes[group * APART + column..(group + 1) * APART];
    fields.iter().map(move |byte| byte >> (plane * BITS) & ((1 << BITS) - 1))
}

/// One field of four bits and one of two above it, from each of a Q3_K block's twelve bytes of
/// scales.
fn scale_of_six_bits(bytes: &[u8], group: usize) -> i8 {
    let (low, high) = (bytes[group % 8] >> (group / 8 * 4) & 15, bytes[8 + group % 4] >> (group / 4 * 2) & 3);
    (low | high << 4) as i8 - 32
}

/// The scale and the least value of 32 weights, 6 bits each, of the twelve bytes of Q4_K and Q5_K.
///
/// The first four groups have theirs in the low bits of bytes 0 to 7. The others have the low four
/// bits in bytes 8 to 11, and the upper two on top of bytes 0 to 7.
fn scale_and_least(bytes: &[u8], group: usize) -> (f32, f32) {
    let (scale, least) = match group.checked_sub(4) {
        None => (bytes[group] & 63, bytes[group + 4] & 63),
        Some(i) => (bytes[8 + i] & 15 | bytes[i] >> 6 << 4, bytes[8 + i] >> 4 | bytes[4 + i] >> 6 << 4),
    };
    (f32::from(scale), f32::from(least))
}

/// `d s q - dmin m` for each group of `GROUP` weights.
#[inline(always)]
fn shifted<const GROUP: usize, Q: Iterator<Item = u8>>(
    out: &mut [f32],
    [d, dmin]: [f32; 2],
    scale_and_least: impl Fn(usize) -> (f32, f32),
    quants: impl Fn(usize) -> Q,
) {
    for (group, out) in out.chunks_exact_mut(GROUP).enumerate() {
        let (scale, least) = scale_and_least(group);
        let (scale, least) = (d * scale, dmin * least);
        out.iter_mut().zip(quants(group * GROUP)).for_each(|(out, q)| *out = scale * f32::from(q) - least);
    }
}

/// `d s q` for each group of 16 weights.
#[inline(always)]
fn centred<Q: Iterator<Item = i8>>(out: &mut [f32], d: f32, scale: impl Fn(usize) -> i8, quants: impl Fn(usize) -> Q) {
    for (group, out) in out.chunks_exact_mut(16).enumerate() {
        let scale = d * f32::from(scale(group));
        out.iter_mut().zip(quants(group * 16)).for_each(|(out, q)| *out = scale * f32::from(q));
    }
}

pub(crate) struct Q2K;

impl Block for Q2K {
    const NAME: &'static str = "Q2_K";
    const WEIGHTS: usize = WEIGHTS;
    const BYTES: usize = 84;

    fn dequantize(block: &[u8], out: &mut [f32]) {
        let (scales, rest) = block.split_at(16);
        let nibbles = |group: usize| (f32::from(scales[group] & 15), f32::from(scales[group] >> 4));
        shifted::<16, _>(out, [half_at(block, 80), half_at(block, 82)], nibbles, |at| plane::<2, 32>(&rest[..64], at));
    }
}

pub(crate) struct Q3K;

impl Block for Q3K {
    const NAME: &'static str = "Q3_K";
    const WEIGHTS: usize = WEIGHTS;
    const BYTES: usize = 110;

    fn dequantize(block: &[u8], out: &mut [f32]) {
        let (high, low, scales) = (&block[..32], &block[32..96], &block[96..108]);
        let quants = |at: usize| {
            let bits = plane::<2, 32>(low, at).zip(plane::<1, 32>(high, at));
            bits.map(|(low, high)| low as i8 - 4 * (1 - high as i8))
        };
        centred(out, half_at(block, 108), |group| scale_of_six_bits(scales, group), quants);
    }
}

pub(crate) struct Q4K;

impl Block for Q4K {
    const NAME: &'static str = "Q4_K";
    const WEIGHTS: usize = WEIGHTS;
    const BYTES: usize = 144;
    const TILES: Option<Fields> =
        Some(&[Field { unit: 2, count: 2 }, Field { unit: 1, count: 12 }, Field { unit: 4, count: 32 }]);

    fn dequantize(block: &[u8], out: &mut [f32]) {
        let (scales, low) = (&block[4..16], &block[16..]);
        let scale = |group| scale_and_least(scales, group);
        shifted::<32, _>(out, [half_at(block, 0), half_at(block, 2)], scale, |at| plane::<4, 32>(low, at));
    }
}

pub(crate) struct Q5K;

impl Block for Q5K {
    const NAME: &'static str = "Q5_K";
    const WEIGHTS: usize = WEIGHTS;
    const BYTES: usize = 176;

    fn dequantize(block: &[u8], out: &mut [f32]) {
        let (scales, high, low) = (&block[4..16], &block[16..48], &block[48..]);
        let quants = |at: usize| {
            let bits = plane::<4, 32>(low, at).zip(plane::<1, 32>(high, at));
            bits.map(|(low, high)| low | high << 4)
        };
        shifted::<32, _>(out, [half_at(block, 0), half_at(block, 2)], |group| scale_and_least(scales, group), quants);
    }
}

pub(crate) struct Q6K;

impl Block for Q6K {
    const NAME: &'static str = "Q6_K";
    const WEIGHTS: usize = WEIGHTS;
    const BYTES: usize = 210;
    const TILES: Option<Fields> =
        Some(&[Field { unit: 4, count: 48 }, Field { unit: 1, count: 16 }, Field { unit: 2, count: 1 }]);

    fn dequantize(block: &[u8], out: &mut [f32]) {
        let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
        let quants = |at: usize| {
            let bits = plane::<4, 64>(low, at).zip(plane::<2, 32>(high, at));
            bits.map(|(low, high)| (low | high << 4) as i8 - 32)
        };
        centred(out, half_at(block, 208), |group| scales[group] as i8, quants);
    }
}
