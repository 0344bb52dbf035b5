//! Weight formats: how a matrix is stored where it is not stored as floats.
//!
//! A quantized matrix is words of 32 bits and scales:
//!
//! ```text
//! packed  [d_output, words of a row]
//! scales  [d_output * scales of a row]    f32, row after row
//! ```
//!
//! A format is a file in this folder, and a line in [`Format`], [`Format::ALL`] and
//! [`with_format`]. Each file says how a row is stored, quantizes and dequantizes it, multiplies it
//! on the CPU, and names the device kernels that read it as it is stored. Operations without such a
//! kernel dequantize the matrix first. [`blocks`] has the formats of GGUF files, which are
//! dequantized while they are read.

pub(crate) mod blocks;
pub(crate) mod int8;

use burn::module::Module;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor};

use crate::checked::{Part, part};
use crate::recorder::{self, Operand};

/// The formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// Signed bytes, with a scale for each row: its largest magnitude over 127.
    Int8,
}

/// Evaluates an expression with `$name` as the type of a format.
macro_rules! with_format {
    ($format:expr, $name:ident => $body:expr) => {
        match $format {
            $crate::quant::Format::Int8 => {
                type $name = $crate::quant::int8::Int8;
                $body
            }
        }
    };
}
pub(crate) use with_format;

/// How many words and scales a row takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowLayout {
    /// 32-bit words.
    pub words: usize,
    /// f32 scales.
    pub scales: usize,
}

/// A row of a quantized matrix on the host.
#[cfg(feature = "ndarray")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct QuantizedRow<'a> {
    pub(crate) words: &'a [i32],
    pub(crate) scales: &'a [f32],
}

/// Device kernels that may read a format as it is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reader {
    /// Projections of few rows in CubeCL.
    Skinny,
    /// Lookups of rows, and dequantization, in CubeCL.
    Rows,
    /// Whole decode steps in CUDA C++.
    DecodeStep,
}

/// A format, row by row.
pub(crate) trait RowFormat {
    /// As messages call it.
    const NAME: &'static str;
    /// The device kernels that read it as it is stored.
    #[cfg_attr(not(feature = "cubecl"), expect(dead_code, reason = "there is no device"))]
    const READERS: &'static [Reader];

    /// The layout of a row of `d_input` weights. None if rows of that length cannot be stored.
    fn layout(d_input: usize) -> Option<RowLayout>;

    /// The length of a row of so many words.
    fn row_length(words: usize) -> usize;

    /// Stores the nearest weights to `row` in `words` and `scales`. Where a value is NaN, so is
    /// what is read again.
    fn quantize(row: &[f32], words: &mut [i32], scales: &mut [f32]);

    /// The weights of a row.
    #[cfg(feature = "ndarray")]
    fn dequantize(row: QuantizedRow<'_>, out: &mut [f32]);

    /// The sum of products of `x` with the weights of a row.
    #[cfg(feature = "ndarray")]
    fn dot(x: &[f32], row: QuantizedRow<'_>) -> f32;

    /// The weights of all rows, f32 `[d_output, d_input]`, by Burn's operations: right on every
    /// backend.
    fn reference<B: Backend>(weight: QuantizedWeight<B>) -> Tensor<B, 2>;
}

impl Format {
    /// All of them.
    pub const ALL: [Self; 1] = [Self::Int8];

    /// As messages call it.
    pub fn name(self) -> &'static str {
        with_format!(self, F => F::NAME)
    }

    /// The layout of a row of `d_input` weights. None if rows of that length cannot be stored.
    pub fn layout(self, d_input: usize) -> Option<RowLayout> {
        with_format!(self, F => F::layout(d_input))
    }

    /// Whether a device kernel reads it as it is stored.
    #[cfg(feature = "cubecl")]
    pub(crate) fn is_read_by(self, reader: Reader) -> bool {
        with_format!(self, F => F::READERS.contains(&reader))
    }

    /// Weights in a word.
    #[cfg(feature = "cuda")]
    pub(crate) fn in_word(self) -> usize {
        self.row_length(1)
    }

    fn row_length(self, words: usize) -> usize {
        with_format!(self, F => F::row_length(words))
    }
}

/// A quantized matrix `[d_output, d_input]`.
#[derive(Module, Debug)]
pub struct QuantizedWeight<B: Backend> {
    /// 32-bit words, `[d_output, words of a row]`.
    pub packed: Tensor<B, 2, Int>,
    /// f32 `[d_output * scales of a row]`, row after row.
    pub scales: Tensor<B, 1>,
    /// How they are to be read.
    #[module(skip)]
    pub format: Format,
}

impl<B: Backend> QuantizedWeight<B> {
    /// `[d_output, d_input]`.
    pub fn dims(&self) -> [usize; 2] {
        let [d_output, words] = self.packed.dims();
        [d_output, self.format.row_length(words)]
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
        part(op, "scales", &self.scales).of(DType::F32).shaped(&[d_output * layout.scales], &packed);
        packed
    }
}

/// A matrix `[d_output, d_input]`, as an operation takes it. A tensor is one.
#[derive(Clone, Debug)]
pub enum Weight<B: Backend> {
    /// Floats of any dtype.
    Float(Tensor<B, 2>),
    /// Stored in a [`Format`]. Gradients flow through it, but it has none.
    Quantized(QuantizedWeight<B>),
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

impl<B: Backend> Weight<B> {
    /// `[d_output, d_input]`.
    pub fn dims(&self) -> [usize; 2] {
        match self {
            Self::Float(weight) => weight.dims(),
            Self::Quantized(weight) => weight.dims(),
        }
    }

    /// The format, where it is not stored as floats.
    pub fn format(&self) -> Option<Format> {
        match self {
            Self::Float(_) => None,
            Self::Quantized(weight) => Some(weight.format),
        }
    }

    /// For a recording.
    pub(crate) fn operand(&self) -> Operand {
        match self {
            Self::Float(weight) => recorder::operand(weight),
            Self::Quantized(weight) => recorder::operand(&weight.packed),
        }
    }

    /// Panics unless the parts of the weight fit each other, and `holds`, which says that it fits
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
        }
    }
}
