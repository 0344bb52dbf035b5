//! Formats with groups: a row stores 4- or 8-bit codes in its words, and separately an f32 scale,
//! or a scale and a zero, per group of consecutive weights. Quantized checkpoints keep their bits
//! in these formats; some are also targets for quantizing floats while loading.
//!
//! ```text
//! word      eight nibbles or four bytes, the lowest first
//! scales    INT4, NF4, FP4, FP8, INT8   scale of each group
//!           4 bits with zeros           scale, zero of each group
//! weight    INT4    scale * (code - 8)
//!           zeros   scale * (code - zero)
//!           NF4     scale * table[code]      quantiles of a normal distribution (Dettmers et al., 2023)
//!           FP4     scale * table[code]      bitsandbytes' 4-bit float
//!           FP8     scale * E4M3(code)       (Micikevicius et al., 2022)
//!           INT8    scale * signed code
//! ```

#[cfg(feature = "cubecl")]
pub(crate) mod cubecl;

use super::e4m3::e4m3_value;
use super::row::{Quantize, QuantizedRow, Reader, RowFormat, RowLayout};
use super::search;

/// A format with groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GroupedFormat {
    /// Nibbles from -8 to 7, one scale per 32.
    Int4x32,
    /// Nibbles from -8 to 7, one scale per 64.
    Int4x64,
    /// Nibbles from -8 to 7, one scale per 128.
    Int4x128,
    /// Nibbles, one scale and one zero per 32.
    Zeros4x32,
    /// Nibbles, one scale and one zero per 64.
    Zeros4x64,
    /// Nibbles, one scale and one zero per 128.
    Zeros4x128,
    /// NF4 nibbles, one scale per 64.
    Nf4,
    /// FP4 nibbles, one scale per 64.
    Fp4,
    /// E4M3 bytes, one scale per 128.
    Fp8,
    /// Signed bytes, one scale per 128.
    Int8x128,
}

/// Evaluates an expression with `$name` as the type of a format with groups.
macro_rules! with_grouped {
    ($format:expr, $name:ident => $body:expr) => {
        $crate::quant::grouped::with_grouped!(@ $format, $name, $body, Int4x32 (Int4, 32), Int4x64 (Int4, 64),
            Int4x128 (Int4, 128), Zeros4x32 (Zeros4, 32), Zeros4x64 (Zeros4, 64), Zeros4x128 (Zeros4, 128),
            Nf4 (Nf4, 64), Fp4 (Fp4, 64), Fp8 (Fp8, 128), Int8x128 (Int8, 128))
    };
    (@ $format:expr, $name:ident, $body:expr, $($variant:ident ($code:ident, $group:literal)),*) => {
        match $format {
            $($crate::quant::grouped::GroupedFormat::$variant => {
                type $name = $crate::quant::grouped::Grouped<$crate::quant::grouped::$code, $group>;
                $body
            })*
        }
    };
}
pub(crate) use with_grouped;

impl GroupedFormat {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::Int4x32,
        Self::Int4x64,
        Self::Int4x128,
        Self::Zeros4x32,
        Self::Zeros4x64,
        Self::Zeros4x128,
        Self::Nf4,
        Self::Fp4,
        Self::Fp8,
        Self::Int8x128,
    ];

    /// Weights per group.
    pub fn group(self) -> usize {
        with_grouped!(self, F => F::GROUP)
    }

    /// Bits per code.
    pub fn bits(self) -> usize {
        with_grouped!(self, F => F::BITS)
    }
}

/// Stores a group's weights as codes and numbers.
type StoreGroup = fn(&[f32], &mut [u8], &mut [f32]);

/// A kind of code.
pub(crate) trait Code {
    /// Its name in messages, for groups of 32, 64 and 128.
    const NAMES: [&'static str; 3];
    /// Bits per code.
    const BITS: usize;
    /// Numbers per group.
    const NUMBERS: usize = 1;
    /// Quantizes a group to codes and numbers, if floats can be quantized to it.
    const QUANTIZE: Option<StoreGroup> = None;

    /// The weight of a code, from the numbers of its group.
    fn value(code: u8, numbers: &[f32]) -> f32;
}

/// Nibbles from -8 to 7.
pub(crate) struct Int4;

impl Code for Int4 {
    const NAMES: [&'static str; 3] = ["INT4 in groups of 32", "INT4 in groups of 64", "INT4 in groups of 128"];
    const BITS: usize = 4;
    const QUANTIZE: Option<StoreGroup> = Some(|group, codes, numbers| numbers[0] = search::nibbles(group, codes));

    #[inline(always)]
    fn value(code: u8, numbers: &[f32]) -> f32 {
        numbers[0] * (f32::from(code) - 8.0)
    }
}

/// Nibbles with the code of 0 per group.
pub(crate) struct Zeros4;

impl Code for Zeros4 {
    const NAMES: [&'static str; 3] =
        ["4 bits with zeros, groups of 32", "4 bits with zeros, groups of 64", "4 bits with zeros, groups of 128"];
    const BITS: usize = 4;
    const NUMBERS: usize = 2;

    #[inline(always)]
    fn value(code: u8, numbers: &[f32]) -> f32 {
        numbers[0] * (f32::from(code) - numbers[1])
    }
}

/// The values of NF4: quantiles of a normal distribution.
pub(crate) const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The values of bitsandbytes' FP4.
pub(crate) const FP4: [f32; 16] = [
    0.0,
    0.005_208_333_5,
    0.666_666_7,
    1.0,
    0.333_333_34,
    0.5,
    0.166_666_67,
    0.25,
    0.0,
    -0.005_208_333_5,
    -0.666_666_7,
    -1.0,
    -0.333_333_34,
    -0.5,
    -0.166_666_67,
    -0.25,
];

macro_rules! table_code {
    ($type:ident, $name:literal, $table:ident) => {
        /// Table nibbles.
        pub(crate) struct $type;

        impl Code for $type {
            const NAMES: [&'static str; 3] = [$name; 3];
            const BITS: usize = 4;
            const QUANTIZE: Option<StoreGroup> =
                Some(|group, codes, numbers| numbers[0] = search::of_table(&$table, group, codes));

            #[inline(always)]
            fn value(code: u8, numbers: &[f32]) -> f32 {
                numbers[0] * $table[usize::from(code & 15)]
            }
        }
    };
}

table_code!(Nf4, "NF4", NF4);
table_code!(Fp4, "FP4", FP4);

/// E4M3 bytes.
pub(crate) struct Fp8;

impl Code for Fp8 {
    const NAMES: [&'static str; 3] = ["FP8"; 3];
    const BITS: usize = 8;
    const QUANTIZE: Option<StoreGroup> = Some(|group, codes, numbers| numbers[0] = search::e4m3(group, codes));

    #[inline(always)]
    fn value(code: u8, numbers: &[f32]) -> f32 {
        numbers[0] * e4m3_value(code)
    }
}

/// Signed bytes.
pub(crate) struct Int8;

impl Code for Int8 {
    const NAMES: [&'static str; 3] = ["INT8 in groups"; 3];
    const BITS: usize = 8;

    #[inline(always)]
    fn value(code: u8, numbers: &[f32]) -> f32 {
        numbers[0] * f32::from(code as i8)
    }
}

/// Codes in groups of `GROUP`.
pub(crate) struct Grouped<C, const GROUP: usize>(std::marker::PhantomData<C>);

impl<C: Code, const GROUP: usize> Grouped<C, GROUP> {
    const GROUP: usize = GROUP;
    const BITS: usize = C::BITS;
    /// Codes per word.
    const IN_WORD: usize = 32 / C::BITS;
}

impl<C: Code, const GROUP: usize> RowFormat for Grouped<C, GROUP> {
    const NAME: &'static str = C::NAMES[GROUP.trailing_zeros() as usize - 5];
    const READERS: &'static [Reader] = &[Reader::Rows];
    const QUANTIZE: Option<Quantize> = match C::QUANTIZE {
        None => None,
        Some(_) => Some(|row, words, scales| {
            let Some(quantize) = C::QUANTIZE else { return };
            let mut codes = [0u8; GROUP];
            let groups = row.chunks(GROUP).zip(scales.chunks_exact_mut(C::NUMBERS));
            for ((group, numbers), words) in groups.zip(words.chunks_mut(GROUP / Self::IN_WORD)) {
                quantize(group, &mut codes[..group.len()], numbers);
                for (word, codes) in words.iter_mut().zip(codes.chunks_exact(Self::IN_WORD)) {
                    *word = pack::<C>(codes);
                }
            }
        }),
    };

    /// The last group of bytes may be partial.
    fn layout(d_input: usize) -> Option<RowLayout> {
        let whole = d_input > 0 && d_input.is_multiple_of(if C::BITS == 8 { Self::IN_WORD } else { GROUP });
        let scales = d_input.div_ceil(GROUP) * C::NUMBERS;
        whole.then_some(RowLayout { words: d_input / Self::IN_WORD, scales })
    }

    fn row_length(words: usize) -> usize {
        words * Self::IN_WORD
    }

    #[inline(always)]
    fn dequantize(row: QuantizedRow<'_>, out: &mut [f32]) {
        let groups = row.words.chunks(GROUP / Self::IN_WORD).zip(row.scales.chunks_exact(C::NUMBERS));
        for ((words, numbers), out) in groups.zip(out.chunks_mut(GROUP)) {
            for (word, out) in words.iter().zip(out.chunks_exact_mut(Self::IN_WORD)) {
                for (at, out) in out.iter_mut().enumerate() {
                    let code = (*word as u32 >> (at * C::BITS)) as u8;
                    *out = C::value(if C::BITS == 4 { code & 15 } else { code }, numbers);
                }
            }
        }
    }
}

/// Packs codes into a word, the first lowest.
pub(crate) fn pack<C: Code>(codes: &[u8]) -> i32 {
    codes.iter().rev().fold(0u32, |word, code| word << C::BITS | u32::from(*code)) as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trip<C: Code, const GROUP: usize>(row: &[f32]) -> Vec<f32> {
        let layout = Grouped::<C, GROUP>::layout(row.len()).expect("a row");
        let (mut words, mut scales) = (vec![0; layout.words], vec![0.0; layout.scales]);
        let quantize = <Grouped<C, GROUP> as RowFormat>::QUANTIZE.expect("a search");
        quantize(row, &mut words, &mut scales);
        let mut out = vec![0.0; row.len()];
        Grouped::<C, GROUP>::dequantize(QuantizedRow { words: &words, scales: &scales }, &mut out);
        out
    }

    /// Pseudo-random numbers, most of them small.
    fn row(length: usize) -> Vec<f32> {
        let mut state = 7u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32 - 0.5
        };
        (0..length).map(|_| (next() + next() + next()) * 0.1).collect()
    }

    fn relative(row: &[f32], own: &[f32]) -> f32 {
        let squares = |values: &mut dyn Iterator<Item = f32>| values.map(|x| x * x).sum::<f32>();
        (squares(&mut row.iter().zip(own).map(|(a, b)| a - b)) / squares(&mut row.iter().copied())).sqrt()
    }

    #[test]
    fn quantized_groups_are_near_what_they_stand_for() {
        let row = row(512);
        for (name, own, most) in [
            ("INT4 32", round_trip::<Int4, 32>(&row), 0.085),
            ("INT4 128", round_trip::<Int4, 128>(&row), 0.105),
            ("NF4", round_trip::<Nf4, 64>(&row), 0.1),
            ("FP4", round_trip::<Fp4, 64>(&row), 0.13),
            ("FP8", round_trip::<Fp8, 128>(&row), 0.03),
        ] {
            let off = relative(&row, &own);
            assert!((0.005..most).contains(&off), "{name}: {off}");
        }
        // The last group of bytes is partial.
        assert!(relative(&row[..132], &round_trip::<Fp8, 128>(&row[..132])) < 0.03);
        assert_eq!(round_trip::<Int4, 32>(&[0.0; 32]), [0.0; 32]);
        assert!(round_trip::<Int4, 32>(&[f32::NAN; 32]).iter().all(|x| x.is_nan()));
        assert!(round_trip::<Fp8, 128>(&[f32::NAN; 128]).iter().all(|x| x.is_nan()));
        assert_eq!(Grouped::<Int4, 32>::layout(48), None);
        assert_eq!(Grouped::<Fp8, 128>::layout(132), Some(RowLayout { words: 33, scales: 2 }));
    }

    #[test]
    fn the_search_for_a_scale_beats_the_largest_magnitude() {
        let row = row(4096);
        let plain = |group: &[f32]| {
            let scale = group.iter().fold(0f32, |most, x| most.max(x.abs())) / 7.0;
            group.iter().map(|x| (x / scale).round().clamp(-8.0, 7.0) * scale).collect::<Vec<_>>()
        };
        let naive: Vec<f32> = row.chunks(32).flat_map(plain).collect();
        let (searched, naive) = (relative(&row, &round_trip::<Int4, 32>(&row)), relative(&row, &naive));
        assert!(searched < 0.9 * naive, "{searched}, and {naive} without a search");
    }
}
