//! K-quants: blocks of 256 weights. Each group of 16 or 32 weights has a quantized scale, and in
//! some formats a quantized minimum. The block has f16 factors of these: `d`, and `dmin`.
//!
//! ```text
//! Q2_K   scales [16] | low bits [64] | d | dmin                       weight = d s q - dmin m
//! Q3_K   high bits [32] | low bits [64] | scales [12] | d             weight = d (s - 32) (q - 4)
//! Q4_K   d | dmin | scales [12] | low bits [128]                      weight = d s q - dmin m
//! Q5_K   d | dmin | scales [12] | high bits [32] | low bits [128]     weight = d s q - dmin m
//! Q6_K   low bits [128] | high bits [64] | scales [16] | d            weight = d s (q - 32)
//! ```
//!
//! Bits of weights are stored in planes: a byte has the bits of weights that are 32 apart (64 in
//! the low bits of Q6_K), the first of them lowest.

use super::search::{Affine, Fit, scaled, shifted as fit_shifted};
use super::{Block, half_at, put_half};
use crate::quant::tiles::{Field, Fields};

const WEIGHTS: usize = 256;

/// The `BITS`-bit fields from weight `at` to the end of its plane. A byte has the fields of weights
/// that are `APART` apart.
#[inline(always)]
fn plane<const BITS: usize, const APART: usize>(bytes: &[u8], at: usize) -> impl Iterator<Item = u8> {
    let in_byte = 8 / BITS;
    let (group, plane, column) = (at / (APART * in_byte), at / APART % in_byte, at % APART);
    let fields = &bytes[group * APART + column..(group + 1) * APART];
    fields.iter().map(move |byte| byte >> (plane * BITS) & ((1 << BITS) - 1))
}

/// The scale of a group of Q3_K: four low bits and two high bits, packed in twelve bytes.
fn scale_of_six_bits(bytes: &[u8], group: usize) -> i8 {
    let (low, high) = (bytes[group % 8] >> (group / 8 * 4) & 15, bytes[8 + group % 4] >> (group / 4 * 2) & 3);
    (low | high << 4) as i8 - 32
}

/// The scale and minimum of 32 weights, 6 bits each, packed in the twelve bytes of Q4_K and Q5_K.
///
/// Groups 0 to 3 have theirs in the low bits of bytes 0 to 7. Groups 4 to 7 have the low four bits
/// in bytes 8 to 11, and the upper two bits on top of bytes 0 to 7.
fn scale_and_least(bytes: &[u8], group: usize) -> (f32, f32) {
    let (scale, least) = match group.checked_sub(4) {
        None => (bytes[group] & 63, bytes[group + 4] & 63),
        Some(i) => (bytes[8 + i] & 15 | bytes[i] >> 6 << 4, bytes[8 + i] >> 4 | bytes[4 + i] >> 6 << 4),
    };
    (f32::from(scale), f32::from(least))
}

/// Inverse of [`scale_and_least`].
fn put_scales_and_leasts(scales: &[i32; 8], leasts: &[i32; 8], bytes: &mut [u8]) {
    for i in 0..4 {
        let [scale, least, further, further_least] =
            [scales[i], leasts[i], scales[4 + i], leasts[4 + i]].map(|x| x as u8);
        bytes[i] = scale | further >> 4 << 6;
        bytes[4 + i] = least | further_least >> 4 << 6;
        bytes[8 + i] = further & 15 | further_least << 4;
    }
}

/// Inverse of [`plane`]; `bytes` must be zero.
fn put_plane<const BITS: usize, const APART: usize>(quants: impl Iterator<Item = u8>, bytes: &mut [u8]) {
    let in_byte = 8 / BITS;
    for (at, quant) in quants.enumerate() {
        let (group, plane, column) = (at / (APART * in_byte), at / APART % in_byte, at % APART);
        bytes[group * APART + column] |= (quant & ((1 << BITS) - 1)) << (plane * BITS);
    }
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
    const QUANTIZE: Option<fn(&[f32], &mut [u8])> = Some(|weights, block| {
        let Fit { factors: [d, dmin], scales, leasts, quants } =
            fit_shifted::<8, 32>(weights, Affine { bits: 4, code_bits: 6 });
        block.fill(0);
        put_half(block, 0, d);
        put_half(block, 2, dmin);
        put_scales_and_leasts(&scales, &leasts, &mut block[4..16]);
        put_plane::<4, 32>(quants.into_iter().map(|quant| quant as u8), &mut block[16..]);
    });
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
    const QUANTIZE: Option<fn(&[f32], &mut [u8])> = Some(|weights, block| {
        let Fit { factors: [d, _], scales, quants, .. } = scaled::<16, 16>(weights, 6);
        block.fill(0);
        let stored = quants.map(|quant| (quant + 32) as u8);
        put_plane::<4, 64>(stored.into_iter(), &mut block[..128]);
        put_plane::<2, 32>(stored.into_iter().map(|quant| quant >> 4), &mut block[128..192]);
        block[192..208].iter_mut().zip(scales).for_each(|(byte, scale)| *byte = scale as i8 as u8);
        put_half(block, 208, d);
    });
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
