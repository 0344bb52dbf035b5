//! Blocks of 32 weights with a scale `d` and, in some formats, a minimum `m`, both f16.
//!
//! ```text
//! Q4_0   d | nibbles [16]                       weight = d * (q - 8)
//! Q4_1   d | m | nibbles [16]                   weight = d * q + m
//! Q5_0   d | fifth bits [4] | nibbles [16]      weight = d * (q - 16)
//! Q5_1   d | m | fifth bits [4] | nibbles [16]  weight = d * q + m
//! Q8_0   d | signed bytes [32]                  weight = d * q
//! ```
//!
//! Byte i of the nibbles has weight i in its low half and weight i + 16 in its high half. The fifth
//! bits are a little-endian word; bit i belongs to weight i.

use super::{Block, half_at, put_half};
use crate::quant::search::half_nibbles;
use crate::quant::tiles::{Field, Fields};

const WEIGHTS: usize = 32;

/// The 4-bit codes of the weights.
fn nibbles(bytes: &[u8]) -> impl Iterator<Item = u8> {
    bytes.iter().map(|byte| byte & 15).chain(bytes.iter().map(|byte| byte >> 4))
}

/// The 5-bit codes of the weights, from a word of fifth bits and the nibbles after it.
fn five_bits(bytes: &[u8]) -> impl Iterator<Item = u8> {
    let (fifth, rest) = bytes.split_at(4);
    nibbles(rest).enumerate().map(|(i, low)| low | (fifth[i / 8] >> (i % 8) & 1) << 4)
}

fn centred(out: &mut [f32], scale: f32, quants: impl Iterator<Item = u8>, centre: i8) {
    out.iter_mut().zip(quants).for_each(|(out, q)| *out = scale * f32::from(q as i8 - centre));
}

fn shifted(out: &mut [f32], scale: f32, least: f32, quants: impl Iterator<Item = u8>) {
    out.iter_mut().zip(quants).for_each(|(out, q)| *out = scale * f32::from(q) + least);
}

/// The weight of the largest magnitude; of equal ones, the first.
fn extreme(weights: &[f32]) -> f32 {
    weights.iter().fold(0.0f32, |extreme, weight| if weight.abs() > extreme.abs() { *weight } else { extreme })
}

/// The inverse of a scale; 0 for a scale of 0.
fn inverse(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

/// Quantizes to levels from `-centre` to `centre - 1`; the weight of the largest magnitude gets the
/// lowest level. Writes the scale at the block's start. `put` stores the codes after it.
fn quantize_centred(weights: &[f32], block: &mut [u8], centre: u8, put: impl Fn(&[u8; WEIGHTS], &mut [u8])) {
    let scale = extreme(weights) / -f32::from(centre);
    let (by, largest) = (inverse(scale), 2 * centre - 1);
    let mut quants = [0; WEIGHTS];
    for (quant, weight) in quants.iter_mut().zip(weights) {
        *quant = ((weight * by + (f32::from(centre) + 0.5)) as u8).min(largest);
    }
    put_half(block, 0, scale);
    put(&quants, &mut block[2..]);
}

fn put_nibbles(quants: &[u8; WEIGHTS], bytes: &mut [u8]) {
    let (low, high) = quants.split_at(WEIGHTS / 2);
    bytes.iter_mut().zip(low.iter().zip(high)).for_each(|(byte, (low, high))| *byte = low & 15 | high << 4);
}

fn put_five_bits(quants: &[u8; WEIGHTS], bytes: &mut [u8]) {
    let (fifth, rest) = bytes.split_at_mut(4);
    fifth.fill(0);
    quants.iter().enumerate().for_each(|(i, quant)| fifth[i / 8] |= (quant >> 4) << (i % 8));
    put_nibbles(quants, rest);
}

fn quantize_bytes(weights: &[f32], block: &mut [u8]) {
    let scale = extreme(weights).abs() / 127.0;
    let by = inverse(scale);
    put_half(block, 0, scale);
    block[2..].iter_mut().zip(weights).for_each(|(byte, weight)| *byte = (weight * by).round() as i8 as u8);
}

/// Quantizes to levels from -8 to 7, with a scale found by search.
fn search_nibbles(weights: &[f32], block: &mut [u8]) {
    let mut quants = [0; WEIGHTS];
    put_half(block, 0, half_nibbles(weights, &mut quants));
    put_nibbles(&quants, &mut block[2..]);
}

fn quantize_nibbles(weights: &[f32], block: &mut [u8]) {
    quantize_centred(weights, block, 8, put_nibbles);
}

fn quantize_five_bits(weights: &[f32], block: &mut [u8]) {
    quantize_centred(weights, block, 16, put_five_bits);
}

macro_rules! block {
    ($type:ident, $name:literal, $bytes:literal, $tiles:expr, |$block:ident, $out:ident| $body:expr
        $(, $writes:ident = $by:expr)*) => {
        pub(crate) struct $type;

        impl Block for $type {
            const NAME: &'static str = $name;
            const WEIGHTS: usize = WEIGHTS;
            const BYTES: usize = $bytes;
            const TILES: Option<Fields> = $tiles;
            $(const $writes: Option<fn(&[f32], &mut [u8])> = Some($by);)*

            fn dequantize($block: &[u8], $out: &mut [f32]) {
                $body
            }
        }
    };
}

const SCALE: Field = Field { unit: 2, count: 1 };

block!(
    Q4_0,
    "Q4_0",
    18,
    Some(&[SCALE, Field { unit: 4, count: 4 }]),
    |block, out| centred(out, half_at(block, 0), nibbles(&block[2..]), 8),
    QUANTIZE = quantize_nibbles,
    SEARCH = search_nibbles
);
block!(Q4_1, "Q4_1", 20, None, |block, out| shifted(out, half_at(block, 0), half_at(block, 2), nibbles(&block[4..])));
block!(
    Q5_0,
    "Q5_0",
    22,
    None,
    |block, out| centred(out, half_at(block, 0), five_bits(&block[2..]), 16),
    QUANTIZE = quantize_five_bits
);
block!(Q5_1, "Q5_1", 24, None, |block, out| shifted(out, half_at(block, 0), half_at(block, 2), five_bits(&block[4..])));
block!(
    Q8_0,
    "Q8_0",
    34,
    Some(&[SCALE, Field { unit: 4, count: 8 }]),
    |block, out| centred(out, half_at(block, 0), block[2..].iter().copied(), 0),
    QUANTIZE = quantize_bytes
);
