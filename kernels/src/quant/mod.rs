//! Weight formats: how a matrix is stored if not as a float tensor.
//!
//! A quantized matrix consists of 32-bit words, and of scales if its format stores them separately:
//!
//! ```text
//! packed  [d_output, words per row]
//! scales  [d_output * scales per row]    f32, row-major
//! ```
//!
//! A format is a file in this folder, and a line in [`Format`], [`Format::ALL`] and
//! [`with_format`]. The file defines how a row is stored, dequantized and, for some formats,
//! quantized, and lists the device kernels that read it as stored. [`blocks`] has the formats of
//! GGUF files, [`halves`] 16-bit floats, and [`grouped`] 4- and 8-bit codes with group scales, to
//! which [`packed`] checkpoints are converted. Operations without a kernel for a format dequantize
//! rows of one matrix at a time; none has a whole model in f32.

pub(crate) mod blocks;
mod e4m3;
pub(crate) mod grouped;
pub(crate) mod halves;
pub(crate) mod int8;
pub(crate) mod packed;
mod row;
pub(crate) mod search;
pub(crate) mod tiles;

use burn::module::Module;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor, TensorData};

use self::blocks::BlockFormat;
pub use self::e4m3::e4m3_value;
use self::grouped::GroupedFormat;
#[cfg(feature = "cubecl")]
pub(crate) use self::row::Reader;
pub use self::row::RowLayout;
pub(crate) use self::row::{QuantizedRow, RowFormat};
use self::tiles::Fields;
use crate::checked::{Part, part};
use crate::recorder::{self, Operand};

/// The formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// Signed bytes, one scale per row: its largest magnitude over 127.
    Int8,
    /// f16 in 32-bit words, for devices without f16.
    F16,
    /// bf16 in 32-bit words, for devices without bf16.
    Bf16,
    /// Blocks of a GGUF file.
    Blocks(BlockFormat),
    /// Codes with group scales.
    Grouped(GroupedFormat),
}

/// Evaluates an expression with `$name` as the type of a format.
macro_rules! with_format {
    ($format:expr, $name:ident => $body:expr) => {
        match $format {
            $crate::quant::Format::Int8 => {
                type $name = $crate::quant::int8::Int8;
                $body
            }
            $crate::quant::Format::F16 => {
                type $name = $crate::quant::halves::Half;
                $body
            }
            $crate::quant::Format::Bf16 => {
                type $name = $crate::quant::halves::Brain;
                $body
            }
            $crate::quant::Format::Blocks(format) => $crate::quant::blocks::with_block!(format, $name => $body),
            $crate::quant::Format::Grouped(format) => $crate::quant::grouped::with_grouped!(format, $name => $body),
        }
    };
}
pub(crate) use with_format;

/// The words and scales of a matrix on the host.
struct HostRows {
    words: Vec<i32>,
    scales: Vec<f32>,
    words_each: usize,
    scales_each: usize,
}

impl HostRows {
    fn of<B: Backend>(weight: QuantizedWeight<B>) -> Self {
        let ([d_output, words_each], scales_each) = (weight.packed.dims(), weight.scales_of_row());
        let QuantizedWeight { packed, scales, format, order } = weight;
        let mut words: Vec<i32> = packed.into_data().iter::<i32>().collect();
        if let (RowOrder::Tiles, Some(fields)) = (order, format.tiles()) {
            tiles::untile(fields, &mut words, [d_output, words_each]);
        }
        let scales = scales.map_or_else(Vec::new, |scales| scales.into_data().iter::<f32>().collect());
        Self { words, scales, words_each, scales_each }
    }

    fn row(&self, at: usize) -> QuantizedRow<'_> {
        QuantizedRow {
            words: &self.words[at * self.words_each..][..self.words_each],
            scales: &self.scales[at * self.scales_each..][..self.scales_each],
        }
    }
}

impl Format {
    /// All formats.
    pub const ALL: [Self; 3 + BlockFormat::ALL.len() + GroupedFormat::ALL.len()] = {
        let mut all = [Self::Int8; 3 + BlockFormat::ALL.len() + GroupedFormat::ALL.len()];
        all[1] = Self::F16;
        all[2] = Self::Bf16;
        let mut at = 0;
        while at < BlockFormat::ALL.len() {
            all[3 + at] = Self::Blocks(BlockFormat::ALL[at]);
            at += 1;
        }
        let mut at = 0;
        while at < GroupedFormat::ALL.len() {
            all[3 + BlockFormat::ALL.len() + at] = Self::Grouped(GroupedFormat::ALL[at]);
            at += 1;
        }
        all
    };

    /// Its name in messages.
    pub fn name(self) -> &'static str {
        with_format!(self, F => F::NAME)
    }

    /// The layout of a row of `d_input` weights. `None` if the format cannot store rows of that
    /// length.
    pub fn layout(self, d_input: usize) -> Option<RowLayout> {
        with_format!(self, F => F::layout(d_input))
    }

    /// Whether Fireclay can quantize floats to this format. Other formats come from files.
    pub fn quantizes(self) -> bool {
        with_format!(self, F => F::QUANTIZE.is_some())
    }

    /// Whether the CPU kernel multiplies integers, with inputs quantized to bytes and one scale per
    /// block.
    pub fn rounds_inputs(self) -> bool {
        with_format!(self, F => F::ROUNDS_INPUTS)
    }

    /// The fields of a block in tiles, if the CPU has a kernel for the format.
    pub(crate) fn tiles(self) -> Option<Fields> {
        with_format!(self, F => F::TILES)
    }

    /// Whether a device kernel reads the format as it is stored.
    #[cfg(feature = "cubecl")]
    pub(crate) fn is_read_by(self, reader: Reader) -> bool {
        with_format!(self, F => F::READERS.contains(&reader))
    }

    /// Weights per word.
    #[cfg(feature = "cuda")]
    pub(crate) fn in_word(self) -> usize {
        self.row_length(1)
    }

    fn row_length(self, words: usize) -> usize {
        with_format!(self, F => F::row_length(words))
    }
}

/// Order of the words of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowOrder {
    /// Row-major.
    Rows,
    /// Rows in tiles, as the CPU kernels read them; on the CPU only.
    Tiles,
}

/// A quantized matrix `[d_output, d_input]`.
#[derive(Module, Debug)]
pub struct QuantizedWeight<B: Backend> {
    /// 32-bit words, `[d_output, words per row]`.
    pub packed: Tensor<B, 2, Int>,
    /// f32 `[d_output * scales per row]`, row-major; `None` if the words contain the scales.
    pub scales: Option<Tensor<B, 1>>,
    /// The format.
    #[module(skip)]
    pub format: Format,
    /// The order of the words.
    #[module(skip)]
    pub order: RowOrder,
}

impl<B: Backend> QuantizedWeight<B> {
    /// `[d_output, d_input]`.
    pub fn dims(&self) -> [usize; 2] {
        let [d_output, words] = self.packed.dims();
        [d_output, self.format.row_length(words)]
    }

    /// Bytes of words and scales.
    pub fn bytes(&self) -> u64 {
        let scales = self.scales.as_ref().map_or(0, |scales| scales.dims()[0]);
        4 * (self.packed.dims().iter().product::<usize>() + scales) as u64
    }

    /// The weights, f32 `[d_output, d_input]`, correct on every backend.
    pub(crate) fn reference(self) -> Tensor<B, 2> {
        let Self { packed, scales, format, order } = &self;
        let by_operations = match order {
            RowOrder::Rows => with_format!(*format, F => F::reference(packed, scales.as_ref())),
            RowOrder::Tiles => None,
        };
        by_operations.unwrap_or_else(|| self.dequantized_by_host())
    }

    fn dequantized_by_host(self) -> Tensor<B, 2> {
        let ([d_output, d_input], device, format) = (self.dims(), self.packed.device(), self.format);
        let rows = HostRows::of(self);
        let mut values = vec![0.0; d_output * d_input];
        for (row, out) in values.chunks_exact_mut(d_input).enumerate() {
            with_format!(format, F => F::dequantize(rows.row(row), out));
        }
        Tensor::from_data(TensorData::new(values, [d_output, d_input]), (&device, DType::F32))
    }

    pub(crate) fn scales_of_row(&self) -> usize {
        self.scales.as_ref().map_or(0, |scales| scales.dims()[0] / self.packed.dims()[0])
    }

    /// Panics unless words and scales fit the format and each other.
    #[track_caller]
    pub(crate) fn check<'a>(&self, op: &'static str, name: &'a str) -> Part<'a, B::Device> {
        let packed = part(op, name, &self.packed).integer();
        let dtype = self.packed.dtype();
        assert!(dtype.size() == 4, "{op}: {name} has {dtype:?} words instead of 32-bit ones");
        let ([d_output, words], [_, d_input], format) = (self.packed.dims(), self.dims(), self.format.name());
        let Some(layout) = self.format.layout(d_input).filter(|layout| layout.words == words) else {
            panic!("{op}: {name} has rows of {words} words, which {format} cannot have");
        };
        match &self.scales {
            Some(scales) => {
                part(op, "scales", scales).of(DType::F32).shaped(&[d_output * layout.scales], &packed);
            }
            None => assert!(layout.scales == 0, "{op}: {name} has no scales, which {format} keeps apart"),
        }
        packed
    }
}

/// A weight matrix `[d_output, d_input]`, the operand of an operation.
#[derive(Clone, Debug)]
pub enum Weight<B: Backend> {
    /// Floats of any dtype.
    Float(Tensor<B, 2>),
    /// Stored in a [`Format`]. Gradients of inputs flow through it; it has no gradient itself.
    Quantized(QuantizedWeight<B>),
    /// Quantized matrices with the same `d_input`, concatenated along rows: parts of one matrix in
    /// several formats. Gradients of inputs flow through them; they have no gradients themselves.
    Stacked(Vec<QuantizedWeight<B>>),
}

impl<B: Backend> From<Tensor<B, 2>> for Weight<B> {
    fn from(weight: Tensor<B, 2>) -> Self {
        Self::Float(weight)
    }
}

impl<B: Backend> From<QuantizedWeight<B>> for Weight<B> {
    fn from(weight: QuantizedWeight<B>) -> Self {
        Self::Quantized(weight)
    }
}

impl<B: Backend> From<Vec<QuantizedWeight<B>>> for Weight<B> {
    fn from(mut parts: Vec<QuantizedWeight<B>>) -> Self {
        match parts.len() {
            1 => Self::Quantized(parts.remove(0)),
            _ => Self::Stacked(parts),
        }
    }
}

impl<B: Backend> Weight<B> {
    /// `[d_output, d_input]`.
    pub fn dims(&self) -> [usize; 2] {
        match self {
            Self::Float(weight) => weight.dims(),
            Self::Quantized(weight) => weight.dims(),
            Self::Stacked(parts) => {
                let width = parts.first().map_or(0, |part| part.dims()[1]);
                [parts.iter().map(|part| part.dims()[0]).sum(), width]
            }
        }
    }

    /// The format of a quantized weight; of several parts, the format of the first.
    pub fn format(&self) -> Option<Format> {
        match self {
            Self::Float(_) => None,
            Self::Quantized(weight) => Some(weight.format),
            Self::Stacked(parts) => parts.first().map(|part| part.format),
        }
    }

    /// For the recorder.
    pub(crate) fn operand(&self) -> Operand {
        match self {
            Self::Float(weight) => recorder::operand(weight),
            Self::Quantized(weight) => recorder::operand(&weight.packed),
            Self::Stacked(parts) => {
                let words: usize = parts.iter().map(|part| part.packed.dims().iter().product::<usize>()).sum();
                Operand::new([words], DType::I32)
            }
        }
    }

    /// Panics unless the parts fit each other and `holds` is true, which says that the weight fits
    /// `other`.
    #[track_caller]
    pub(crate) fn check(&self, op: &'static str, name: &'static str, holds: bool, other: &Part<'_, B::Device>) {
        match self {
            Self::Float(weight) => {
                part(op, name, weight).float().fits(holds, other);
            }
            Self::Quantized(weight) => {
                weight.check(op, name).fits(holds, other);
            }
            Self::Stacked(parts) => {
                assert!(!parts.is_empty(), "{op}: {name} is a stack of nothing");
                let width = self.dims()[1];
                for part in parts {
                    let alike = part.dims()[1] == width;
                    assert!(alike, "{op}: {name} has parts of {width} and of {} columns", part.dims()[1]);
                    part.check(op, name).fits(holds, other);
                }
            }
        }
    }
}

#[cfg(all(test, feature = "ndarray"))]
mod tests {
    use super::tiles::{TILE, block_bytes, bytes_of, row_of_tile, tile_rows, untile};
    use super::*;

    #[test]
    fn tiles_hold_their_rows_and_give_them_back() {
        for format in Format::ALL {
            let Some(fields) = format.tiles() else { continue };
            let words_each = format.layout(768).expect("rows of any format").words;
            let rows: Vec<i32> =
                (0..TILE * words_each).map(|at| (at as i32).wrapping_mul(0x9e37_79b9u32 as i32)).collect();
            let mut tile = rows.clone();
            tile_rows(fields, &mut tile, &mut Vec::new());
            assert_ne!(tile, rows, "{format:?}");
            let blocks = words_each * 4 / block_bytes(fields) * block_bytes(fields);
            for (at, row) in rows.chunks_exact(words_each).enumerate() {
                let mut own = vec![0; words_each];
                row_of_tile(fields, &tile, at, &mut own);
                let [own, row] = [&own, row].map(|words| &bytes_of(words)[..blocks]);
                assert_eq!(own, row, "{format:?}, row {at}");
            }
            untile(fields, &mut tile, [TILE, words_each]);
            for (own, row) in tile.chunks_exact(words_each).zip(rows.chunks_exact(words_each)) {
                let [own, row] = [own, row].map(|words| &bytes_of(words)[..blocks]);
                assert_eq!(own, row, "{format:?}");
            }
        }
    }
}
