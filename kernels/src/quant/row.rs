//! What a format says of a row.

use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};

use super::tiles::Fields;

/// How many words and scales a row takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowLayout {
    /// 32-bit words.
    pub words: usize,
    /// f32 scales.
    pub scales: usize,
}

/// A row of a quantized matrix on the host.
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

/// Stores the nearest weights to a row in words and scales. Where a value is NaN, so is what is read again.
pub(crate) type Quantize = fn(&[f32], &mut [i32], &mut [f32]);

/// A format, row by row.
pub(crate) trait RowFormat {
    /// As messages call it.
    const NAME: &'static str;
    /// The device kernels that read it as it is stored.
    #[cfg_attr(not(feature = "cubecl"), expect(dead_code, reason = "there is no device"))]
    const READERS: &'static [Reader] = &[];
    /// How a row is quantized, where that is done here: other formats come from files.
    const QUANTIZE: Option<Quantize> = None;
    /// A row's blocks in tiles, where the CPU has a kernel for them.
    const TILES: Option<Fields> = None;
    /// Whether that kernel multiplies integers.
    const ROUNDS_INPUTS: bool = false;

    /// The layout of a row of `d_input` weights. None if rows of that length cannot be stored.
    fn layout(d_input: usize) -> Option<RowLayout>;

    /// The length of a row of so many words.
    fn row_length(words: usize) -> usize;

    /// The weights of a row.
    fn dequantize(row: QuantizedRow<'_>, out: &mut [f32]);

    /// The sums of products of each row of `x` with the weights of a row, where the format does not leave that to the weights
    /// as floats: then whether it did.
    #[cfg(feature = "ndarray")]
    #[inline(always)]
    fn dots(_x: &[f32], _row: QuantizedRow<'_>, _out: &mut [f32]) -> bool {
        false
    }

    /// The weights of all rows, f32 `[d_output, d_input]`, by Burn's operations, where the format has them so: elsewhere the host
    /// dequantizes them.
    fn reference<B: Backend>(_packed: &Tensor<B, 2, Int>, _scales: Option<&Tensor<B, 1>>) -> Option<Tensor<B, 2>> {
        None
    }
}
