//! A format, row by row.

use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};

use super::tiles::Fields;

/// Words and scales per row.
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
    /// Products of few rows in CubeCL.
    Skinny,
    /// Row lookup and dequantization in CubeCL.
    Rows,
    /// Whole decode steps in CUDA C++.
    DecodeStep,
}

/// Quantizes a row to words and scales. NaN stays NaN.
pub(crate) type Quantize = fn(&[f32], &mut [i32], &mut [f32]);

/// A format, row by row.
pub(crate) trait RowFormat {
    /// Its name in messages.
    const NAME: &'static str;
    /// The device kernels that read it as it is stored.
    #[cfg_attr(not(feature = "cubecl"), expect(dead_code, reason = "there is no device"))]
    const READERS: &'static [Reader] = &[];
    /// Quantizes a row. `None` for formats that only come from files.
    const QUANTIZE: Option<Quantize> = None;
    /// The fields of a block in tiles, if the CPU has a kernel for the format.
    const TILES: Option<Fields> = None;
    /// Whether that kernel multiplies integers.
    const ROUNDS_INPUTS: bool = false;

    /// The layout of a row of `d_input` weights. `None` if the format cannot store rows of that
    /// length.
    fn layout(d_input: usize) -> Option<RowLayout>;

    /// The number of weights in a row of `words` words.
    fn row_length(words: usize) -> usize;

    /// Dequantizes a row.
    fn dequantize(row: QuantizedRow<'_>, out: &mut [f32]);

    /// Computes the dot product of each row of `x` with `row`. Returns false if the format has no
    /// faster way than dequantizing.
    #[cfg(feature = "ndarray")]
    #[inline(always)]
    fn dots(_x: &[f32], _row: QuantizedRow<'_>, _out: &mut [f32]) -> bool {
        false
    }

    /// All weights, f32 `[d_output, d_input]`, in Burn operations. `None` if the host has to
    /// dequantize.
    fn reference<B: Backend>(_packed: &Tensor<B, 2, Int>, _scales: Option<&Tensor<B, 1>>) -> Option<Tensor<B, 2>> {
        None
    }
}
