//! Blocks: the formats of GGUF files. A block stores a fixed number of weights of a row, and their
//! scales, in a fixed number of bytes.
//!
//! A family of formats is a file here. It defines how a block is stored; dequantized weights are
//! bit for bit those of the reference implementation (`gguf.quants.dequantize`). Some formats can
//! also be written: [`search`] finds their scales. A row's blocks fill consecutive words, the first
//! byte lowest; the last word is padded with zeros.

#[cfg(feature = "cubecl")]
pub(crate) mod cubecl;
pub(crate) mod k;
mod search;
pub(crate) mod simple;

use half::f16;

use super::row::{Quantize, QuantizedRow, Reader, RowFormat, RowLayout};
use super::tiles::{Fields, bytes_of};

/// A block format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockFormat {
    /// 4 bits per weight, a scale per 32.
    Q4_0,
    /// 4 bits per weight, a scale and a minimum per 32.
    Q4_1,
    /// 5 bits per weight, a scale per 32.
    Q5_0,
    /// 5 bits per weight, a scale and a minimum per 32.
    Q5_1,
    /// 8 bits per weight, a scale per 32.
    Q8_0,
    /// 2 bits per weight, 4-bit scales and minimums per 16.
    Q2K,
    /// 3 bits per weight, 6-bit scales per 16.
    Q3K,
    /// 4 bits per weight, 6-bit scales and minimums per 32.
    Q4K,
    /// 5 bits per weight, 6-bit scales and minimums per 32.
    Q5K,
    /// 6 bits per weight, 8-bit scales per 16.
    Q6K,
}

/// Quantizes weights to a block.
type StoreBlock = fn(&[f32], &mut [u8]);

/// A block format.
pub(crate) trait Block {
    /// Its name in files.
    const NAME: &'static str;
    /// Weights per block.
    const WEIGHTS: usize;
    /// Bytes per block.
    const BYTES: usize;
    /// The fields of a block in tiles, if the CPU has a kernel for the format. The kernel
    /// multiplies integers.
    const TILES: Option<Fields> = None;

    /// Quantizes a block for a GGUF file. `None` if the format is only read.
    const QUANTIZE: Option<StoreBlock> = None;
    /// Quantizes a block while a model is loaded, with a search for the scale.
    const SEARCH: Option<StoreBlock> = None;

    /// Dequantizes a block.
    fn dequantize(block: &[u8], out: &mut [f32]);
}

/// Bytes per word.
const WORD: usize = 4;

impl<T: Block> RowFormat for T {
    const NAME: &'static str = T::NAME;
    const READERS: &'static [Reader] = &[Reader::Rows];
    const QUANTIZE: Option<Quantize> = match T::SEARCH {
        None => None,
        Some(_) => Some(|row, words, _| {
            let Some(search) = T::SEARCH else { return };
            let mut bytes = vec![0; WORD * words.len()];
            let blocks = row.chunks_exact(T::WEIGHTS).zip(bytes.chunks_exact_mut(T::BYTES));
            blocks.for_each(|(weights, block)| search(weights, block));
            let bytes = bytes.chunks_exact(WORD).map(|x| i32::from_ne_bytes([x[0], x[1], x[2], x[3]]));
            words.iter_mut().zip(bytes).for_each(|(word, bytes)| *word = bytes);
        }),
    };
    const TILES: Option<Fields> = T::TILES;
    const ROUNDS_INPUTS: bool = T::TILES.is_some();

    fn layout(d_input: usize) -> Option<RowLayout> {
        let whole = d_input > 0 && d_input.is_multiple_of(T::WEIGHTS);
        whole.then(|| RowLayout { words: (d_input / T::WEIGHTS * T::BYTES).div_ceil(WORD), scales: 0 })
    }

    // The padding of the last word is smaller than a block.
    fn row_length(words: usize) -> usize {
        words * WORD / T::BYTES * T::WEIGHTS
    }

    #[inline(always)]
    fn dequantize(row: QuantizedRow<'_>, out: &mut [f32]) {
        let blocks = bytes_of(row.words).chunks_exact(T::BYTES);
        blocks.zip(out.chunks_exact_mut(T::WEIGHTS)).for_each(|(block, out)| T::dequantize(block, out));
    }
}

/// Evaluates an expression with `$name` as the type of a block format.
macro_rules! with_block {
    ($format:expr, $name:ident => $body:expr) => {
        $crate::quant::blocks::with_block!(@ $format, $name, $body, Q4_0 simple, Q4_1 simple, Q5_0 simple,
            Q5_1 simple, Q8_0 simple, Q2K k, Q3K k, Q4K k, Q5K k, Q6K k)
    };
    (@ $format:expr, $name:ident, $body:expr, $($variant:ident $family:ident),*) => {
        match $format {
            $($crate::quant::blocks::BlockFormat::$variant => {
                type $name = $crate::quant::blocks::$family::$variant;
                $body
            })*
        }
    };
}
pub(crate) use with_block;

impl BlockFormat {
    /// All block formats.
    pub const ALL: [Self; 10] = [
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
    ];

    /// Its name in files.
    pub fn name(self) -> &'static str {
        with_block!(self, F => <F as Block>::NAME)
    }

    /// Weights per block.
    pub fn weights(self) -> usize {
        with_block!(self, F => F::WEIGHTS)
    }

    /// Bytes per block.
    pub fn bytes(self) -> usize {
        with_block!(self, F => F::BYTES)
    }

    /// Whether Fireclay can quantize to it. Other formats are only read.
    pub fn is_written(self) -> bool {
        with_block!(self, F => <F as Block>::QUANTIZE.is_some())
    }

    /// Quantizes `weights`, finite and below 65504 in magnitude, to consecutive `blocks`. Blocks of
    /// Q8_0, Q5_0 and Q4_0 are bit for bit those of the reference implementation
    /// (`gguf.quants.quantize`).
    ///
    /// # Panics
    /// If the format [is not written](Self::is_written), or `weights` do not fill `blocks`.
    pub fn quantize(self, weights: &[f32], blocks: &mut [u8]) {
        let name = self.name();
        assert!(
            weights.len().is_multiple_of(self.weights())
                && weights.len() / self.weights() * self.bytes() == blocks.len(),
            "quantize: {} weights fill no {} bytes of {name}",
            weights.len(),
            blocks.len(),
        );
        with_block!(self, F => {
            let Some(quantize) = <F as Block>::QUANTIZE else { panic!("quantize: {name} is only read") };
            let blocks = blocks.chunks_exact_mut(F::BYTES);
            weights.chunks_exact(F::WEIGHTS).zip(blocks).for_each(|(weights, block)| quantize(weights, block));
        });
    }

    /// Dequantizes consecutive `blocks`.
    ///
    /// # Panics
    /// Unless `blocks` are whole and `out` has exactly as many elements as they have weights.
    pub fn dequantize(self, blocks: &[u8], out: &mut [f32]) {
        let (bytes, weights) = (self.bytes(), self.weights());
        assert!(
            blocks.len().is_multiple_of(bytes) && out.len() == blocks.len() / bytes * weights,
            "dequantize: {} bytes are no {} weights of {}",
            blocks.len(),
            out.len(),
            self.name()
        );
        with_block!(self, F => blocks
            .chunks_exact(F::BYTES)
            .zip(out.chunks_exact_mut(F::WEIGHTS))
            .for_each(|(block, out)| <F as Block>::dequantize(block, out)));
    }
}

/// The f16 at a byte offset of a block.
fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Stores `value` as f16 at a byte offset of a block.
fn put_half(block: &mut [u8], at: usize, value: f32) {
    block[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_take_as_many_bits_as_their_files_say() {
        let bits = |format: BlockFormat| 8.0 * format.bytes() as f64 / format.weights() as f64;
        let bits: Vec<f64> = BlockFormat::ALL.into_iter().map(bits).collect();
        assert_eq!(bits, [4.5, 5.0, 5.5, 6.0, 8.5, 2.625, 3.4375, 4.5, 5.5, 6.5625]);
    }

    #[test]
    #[should_panic(expected = "are no 31 weights of Q8_0")]
    fn a_block_in_part_is_refused() {
        BlockFormat::Q8_0.dequantize(&[0; 34], &mut [0.0; 31]);
    }
}
