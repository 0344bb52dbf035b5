//! Blocks of 32 weights with a scale `d`, and some with a least value `m`, both f16.
//!
//! ```text
//! Q4_0   d | nibbles [16]                       weight = d * (q - 8)
//! Q4_1   d | m | nibbles [16]                   weight = d * q + m
//! Q5_0   d | fifth bits [4] | nibbles [16]      weight = d * (q - 16)
//! Q5_1   d | m | fifth bits [4] | nibbles [16]  weight = d * q + m
//! Q8_0   d | signed bytes [32]                  weight = d * q
//! ```
//!
//! Byte i of the nibbles holds weight i in its low half and weight i + 16 in its high one. Bit i of
//! the fifth bits, a little-endian word, is weight i's.

use super::{Block, half_at};
use crate::quant::tiles::{Field, Fields};

const WEIGHTS: usize = 32;

/// Each weight's four bits.
fn nibbles(bytes: &[u8]) -> impl Iterator<Item = u8> {
    bytes.iter().map(|byte| byte & 15).chain(bytes.iter().map(|byte| byte >> 4))
}

/// Each weight's five bits: the nibbles lie behind a word with the fifth bits.
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

macro_rules! block {
    ($type:ident, $name:literal, $bytes:literal, $tiles:expr, |$block:ident, $out:ident| $body:expr) => {
        pub(crate) struct $type;

        impl Block for $type {
            const NAME: &'static str = $name;
            const WEIGHTS: usize = WEIGHTS;
            const BYTES: usize = $bytes;
            const TILES: Option<Fields> = $tiles;

            fn dequantize($block: &[u8], $out: &mut [f32]) {
                $body
            }
        }
    };
}

const SCALE: Field = Field { unit: 2, count: 1 };

block!(Q4_0, "Q4_0", 18, Some(&[SCALE, Field { unit: 4, count: 4 }]), |block, out| centred(
    out,
    half_at(block, 0),
    nibbles(&block[2..]),
    8
));
block!(Q4_1, "Q4_1", 20, None, |block, out| shifted(out, half_at(block, 0), half_at(block, 2), nibbles(&block[4..])));
block!(Q5_0, "Q5_0", 22, None, |block, out| centred(out, half_at(block, 0), five_bits(&block[2..]), 16));
block!(Q5_1, "Q5_1", 24, None, |block, out| shifted(out, half_at(block, 0), half_at(block, 2), five_bits(&block[4..])));
block!(Q8_0, "Q8_0", 34, Some(&[SCALE, Field { unit: 4, count: 8 }]), |block, out| centred(
    out,
    half_at(block, 0),
    block[2..].iter().copied(),
    0
));
