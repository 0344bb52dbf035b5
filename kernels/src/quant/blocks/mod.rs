//! Blocks: the formats of GGUF files, each of which stores so many weights of a row in so many
//! bytes, scales among them.
//!
//! A family of formats is a file here. Each says how a block is stored, and gives its weights back bit
//! for bit as the format's own package (`gguf.quants.dequantize`) does. Some are written, too:
//! [`search`] looks for their scales. A row's blocks fill words one after the other, the first byte
//! lowest, and the last word with zeros.

#[cfg(feature = "cubecl")]
pub(crate) mod cubecl;
pub(crate) mod k;
mod search;
pub(crate) mod simple;

use half::f16;

use super::row::{Quantize, QuantizedRow, Reader, RowFormat, RowLayout};
use super::tiles::{Fields, bytes_of};

/// A format of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockFormat {
    /// 4 bits a weight, and a scale for 32.
    Q4_0,
    /// 4 bits a weight, a scale and a least value for 32.
    Q4_1,
    /// 5 bits a weight, and a scale for 32.
    Q5_0,
    /// 5 bits a weight, a scale and a least value for 32.
    Q5_1,
    /// 8 bits a weight, and a scale for 32.
    Q8_0,
    /// 2 bits a weight, scales and least values of 4 bits for 16.
    Q2K,
    /// 3 bits a weight, scales of 6 bits for 16.
    Q3K,
    /// 4 bits a weight, scales and least values of 6 bits for 32.
    Q4K,
    /// 5 bits a weight, scales and least values of 6 bits for 32.
    Q5K,
    /// 6 bits a weight, scales of 8 bits for 16.
    Q6K,
}

/// Stores weights in a block.
type StoreBlock = fn(&[f32], &mut [u8]);

/// How a block is read.
pub(crate) trait Block {
    /// As files call it.
    const NAME: &'static str;
    /// Weights in a block.
    const WEIGHTS: usize;
    /// Bytes of a block.
    const BYTES: usize;
    /// A block in tiles, where the CPU has a kernel for them, which multiplies integers.
    const TILES: Option<Fields> = None;

    /// Stores the nearest weights to the given ones in a block; none where the format is only read.
    const QUANTIZE: Option<StoreBlock> = None;
    /// The same for matrices that are quantized while they are loaded, by a search of the program's own.
    const SEARCH: Option<StoreBlock> = None;

    /// The weights of one block.
    fn dequantize(block: &[u8], out: &mut [f32]);
}

/// Bytes of a word.
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

    // A block is larger than what fills the last word.
    fn row_length(words: usize) -> usize {
        words * WORD / T::BYTES * T::WEIGHTS
    }

    #[inline(always)]
    fn dequantize(row: QuantizedRow<'_>, out: &mut [f32]) {
        let blocks = bytes_of(row.words).chunks_exact(T::BYTES);
        blocks.zip(out.chunks_exact_mut(T::WEIGHTS)).for_each(|(block, out)| T::dequantize(block, out));
    }
}

/// Evaluates an expression with `$name` as the type of a format of blocks.
macro_rules! with_block {
    ($format:expr, $name:ident => $body:expr) => {
        $crate::quant::blocks::with_block!(@ $format, $name, $body, Q4_0 simple, Q4_1 simple, Q5_0 simple, Q5_1 simple, Q8_0 simple,
            Q2K k, Q3K k, Q4K k, Q5K k, Q6K k)
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
    /// All of them.
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

    /// As files call it.
    pub fn name(self) -> &'static str {
        with_block!(self, F => <F as Block>::NAME)
    }

    /// Weights in a block.
    pub fn weights(self) -> usize {
        with_block!(self, F => F::WEIGHTS)
    }

    /// Bytes of a block.
    pub fn bytes(self) -> usize {
        with_block!(self, F => F::BYTES)
    }

    /// Whether weights can be stored in it; others are only read.
    pub fn is_written(self) -> bool {
        with_block!(self, F => <F as Block>::QUANTIZE.is_some())
    }

    /// Stores the nearest weights to `weights`, which are finite and below 65504 in magnitude, in
    /// `blocks`, one block after the other. Q8_0, Q5_0 and Q4_0 are bit for bit those of the
    /// format's own package (`gguf.quants.quantize`).
    ///
    /// # Panics
    /// If the format [is not written](Self::is_written), or unless `weights` fill `blocks`.
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

    /// The weights of `blocks`, one block after the other.
    ///
    /// # Panics
    /// Unless `blocks` are whole, and `out` has room for their weights and no more.
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

/// The f16 at a byte of a block.
fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Stores the nearest f16 at a byte of a block.
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
