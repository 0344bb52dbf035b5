//! 16-bit floats, two per word, for backends without such a dtype.
//!
//! ```text
//! word   | weight 2 i | weight 2 i + 1 |    the first in the low half
//! ```

#[cfg(feature = "cubecl")]
use cubecl::prelude::*;
use half::{bf16, f16};

use super::row::{Quantize, QuantizedRow, Reader, RowFormat, RowLayout};
use super::tiles::{Field, Fields};

/// Weights per word.
const PACKED: usize = 2;
/// Row lengths are multiples of this.
const STEP: usize = 4;

fn layout(d_input: usize) -> Option<RowLayout> {
    (d_input > 0 && d_input.is_multiple_of(STEP)).then_some(RowLayout { words: d_input / PACKED, scales: 0 })
}

#[inline(always)]
fn halves(words: &[i32]) -> impl Iterator<Item = u16> {
    words.iter().flat_map(|word| [*word as u16, (*word as u32 >> 16) as u16])
}

fn pack(row: &[f32], words: &mut [i32], bits: impl Fn(f32) -> u16) {
    for (pair, word) in row.chunks_exact(PACKED).zip(words) {
        *word = (u32::from(bits(pair[0])) | u32::from(bits(pair[1])) << 16) as i32;
    }
}

macro_rules! half_format {
    ($type:ident, $name:literal, $half:ty) => {
        /// The format.
        pub(crate) struct $type;

        impl RowFormat for $type {
            const NAME: &'static str = $name;
            const READERS: &'static [Reader] = &[Reader::Rows];
            const TILES: Option<Fields> = Some(&[Field { unit: 2, count: 1 }]);
            const QUANTIZE: Option<Quantize> =
                Some(|row, words, _| pack(row, words, |value| <$half>::from_f32(value).to_bits()));

            fn layout(d_input: usize) -> Option<RowLayout> {
                layout(d_input)
            }

            fn row_length(words: usize) -> usize {
                words * PACKED
            }

            #[inline(always)]
            fn dequantize(row: QuantizedRow<'_>, out: &mut [f32]) {
                out.iter_mut().zip(halves(row.words)).for_each(|(out, bits)| *out = <$half>::from_bits(bits).to_f32());
            }
        }
    };
}

half_format!(Half, "F16", f16);
half_format!(Brain, "BF16", bf16);

/// The value of an f16, from its bits.
#[cfg(feature = "cubecl")]
#[cube]
pub(crate) fn f16_of(bits: u32) -> f32 {
    let exponent = (bits >> 10) & 31;
    let fraction = bits & 1023;
    // Normal numbers get f32's exponent bias; subnormals are multiples of the smallest one.
    let mut magnitude = f32::reinterpret(((bits & 0x7fff) << 13) + 0x3800_0000);
    if exponent == 0 {
        magnitude = f32::cast_from(fraction) * comptime!(1.0f32 / 16_777_216.0);
    }
    if exponent == 31 {
        magnitude = f32::reinterpret(((bits & 0x7fff) << 13) + 0x7000_0000);
    }
    select(bits & 0x8000 != 0, -magnitude, magnitude)
}
