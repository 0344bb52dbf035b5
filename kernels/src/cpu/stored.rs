//! Products with quantized matrices: with the format's kernel, or by dequantizing a few rows at a
//! time into memory that each thread reuses.

use std::cell::RefCell;
use std::ops::Range;

use burn::tensor::Tensor;
use burn_ndarray::NdArray;
use rayon::prelude::*;

use super::team::for_pieces;
use super::tile_products::Packed;
use super::{DotProducts, Matrix, SLAB, Shared, Values, Words, product, vectorised, wide_product};
use crate::quant::tiles::{self, Fields, TILE};
use crate::quant::{Format, QuantizedRow, QuantizedWeight, RowFormat, RowOrder, Weight, with_format};

/// Up to this many rows of inputs, each element of a product is one dot product.
pub(crate) const DOT_PRODUCT_ROWS: usize = 16;
/// Columns per piece for few rows, if weights are dequantized.
const FEW_ROWS_PIECE: usize = 2 * TILE;
/// Size of a piece of tiles: for few rows, in words, with a maximum number of tiles; for many rows,
/// in tiles.
const FEW_ROWS_WORDS: usize = 1 << 15;
const MOST_TILES: usize = 16;
const TILES: usize = 4;
/// Rows dequantized at a time for a gradient.
const GRADIENT_ROWS: usize = 256;

thread_local! {
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Calls `work` with `size` floats of scratch memory of this thread, not cleared.
pub(super) fn with_scratch<R>(size: usize, work: impl FnOnce(&mut [f32]) -> R) -> R {
    // Taken out, because rayon may run another piece of work within `work`: that one allocates its
    // own.
    let mut scratch = SCRATCH.take();
    if scratch.len() < size {
        scratch.resize(size, 0.0);
    }
    let result = work(&mut scratch[..size]);
    SCRATCH.set(scratch);
    result
}

/// The rows of a quantized matrix.
pub(crate) struct QuantizedRows {
    packed: Words,
    scales: Option<Values>,
    words_each: usize,
    scales_each: usize,
    format: Format,
    rows: usize,
    d_input: usize,
    /// The fields of a block, if rows are in tiles.
    tiles: Option<Fields>,
}

impl QuantizedRows {
    /// From a weight that has been checked.
    pub(crate) fn of(weight: QuantizedWeight<NdArray>) -> Self {
        let ([rows, d_input], scales_each) = (weight.dims(), weight.scales_of_row());
        let QuantizedWeight { packed, scales, format, order } = weight;
        let [_, words_each] = packed.dims();
        let tiles = format.tiles().filter(|_| order == RowOrder::Tiles);
        let (packed, scales) = (Words::of(packed), scales.map(Values::rows));
        Self { packed, scales, words_each, scales_each, format, rows, d_input, tiles }
    }

    /// From all parts of a weight. A float weight is returned as the error.
    #[allow(clippy::result_large_err, reason = "it is the weight as it came, and no error")]
    pub(crate) fn parts(weight: Weight<NdArray>) -> Result<Vec<Self>, Tensor<NdArray, 2>> {
        match weight {
            Weight::Float(weight) => Err(weight),
            Weight::Quantized(weight) => Ok(vec![Self::of(weight)]),
            Weight::Stacked(parts) => Ok(parts.into_iter().map(Self::of).collect()),
        }
    }

    /// Number of rows.
    pub(super) fn count(&self) -> usize {
        self.rows
    }

    /// The words of a range of whole tiles, if the format's kernel multiplies with them.
    pub(super) fn whole_tiles(&self, range: &Range<usize>, inputs: Inputs) -> Option<&[i32]> {
        let reads = self.tiles.is_some() && (inputs == Inputs::Quantized || !self.format.rounds_inputs());
        let whole = range.start.is_multiple_of(TILE) && range.len().is_multiple_of(TILE);
        let within = range.end <= self.rows / TILE * TILE;
        (reads && whole && within).then(|| &self.packed[range.start * self.words_each..range.end * self.words_each])
    }

    /// Rows of inputs as the format's kernel reads them.
    pub(super) fn packed_inputs(&self, x: &[f32]) -> Packed {
        Packed::new(self.format, x, self.d_input)
    }

    /// Calls `work` with rows as they are stored.
    #[inline(always)]
    fn for_stored(&self, range: Range<usize>, mut work: impl FnMut(usize, QuantizedRow<'_>)) {
        let whole = self.rows / TILE * TILE;
        let scales = |at: usize| match &self.scales {
            Some(scales) => &scales[at * self.scales_each..][..self.scales_each],
            None => &[],
        };
        let mut own = Vec::new();
        for at in range {
            let words = match self.tiles.filter(|_| at < whole) {
                None => &self.packed[at * self.words_each..][..self.words_each],
                Some(fields) => {
                    own.resize(self.words_each, 0);
                    let tile = &self.packed[at / TILE * TILE * self.words_each..][..TILE * self.words_each];
                    tiles::row_of_tile(fields, tile, at % TILE, &mut own);
                    &own
                }
            };
            work(at, QuantizedRow { words, scales: scales(at) });
        }
    }

    /// Dequantizes a range of rows.
    #[inline(always)]
    pub(crate) fn dequantize(&self, range: Range<usize>, out: &mut [f32]) {
        let first = range.start;
        with_format!(self.format, F => self.for_stored(range, |at, row| {
            F::dequantize(row, &mut out[(at - first) * self.d_input..][..self.d_input]);
        }));
    }

    /// The products of all rows of `x` with a range of rows, `[rows of x, rows]`.
    #[inline(always)]
    fn dots(&self, x: &[f32], range: Range<usize>, scratch: &mut [f32], out: &mut [f32]) {
        let (first, width) = (range.start, range.len());
        let mut sums = [0.0; DOT_PRODUCT_ROWS];
        let sums = &mut sums[..x.len() / self.d_input];
        with_format!(self.format, F => self.for_stored(range, |at, row| {
            if !F::dots(x, row, sums) {
                F::dequantize(row, scratch);
                DotProducts { a: x, b: &*scratch, size: self.d_input, out: &mut *sums }.compute();
            }
            sums.iter().enumerate().for_each(|(row, sum)| out[row * width + at - first] = *sum);
        }));
    }
}

/// How a product with a quantized matrix reads its inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Inputs {
    /// As they are.
    Exact,
    /// As bytes with a scale per block, if the format's kernel multiplies integers.
    Quantized,
}

/// A matrix that is filled piece by piece.
#[derive(Clone, Copy)]
struct Destination {
    begin: Shared,
    /// Columns of the whole matrix.
    columns: usize,
}

impl Destination {
    /// Calls `then` with each row's piece of a range of columns.
    ///
    /// # Safety
    /// The matrix must have `rows` rows. These columns must be written, and nothing else may access
    /// them.
    unsafe fn finish(self, rows: usize, columns: Range<usize>, then: &impl Fn(usize, usize, &mut [f32])) {
        vectorised(
            #[inline(always)]
            || {
                for row in 0..rows {
                    // SAFETY: guaranteed by the caller.
                    let own = unsafe {
                        let at = self.begin.0.add(row * self.columns + columns.start);
                        std::slice::from_raw_parts_mut(at, columns.len())
                    };
                    then(row, columns.start, own);
                }
            },
        );
    }
}

/// `x * weight^T` in a new matrix, for `x` `[rows, d_input]` and the concatenated parts of the
/// weight. `then` gets each piece of a row, with the row and the first column, while the piece is
/// in the cache.
pub(crate) fn stored_product(
    x: &[f32],
    rows: usize,
    parts: &[QuantizedRows],
    inputs: Inputs,
    then: impl Fn(usize, usize, &mut [f32]) + Sync,
) -> Vec<f32> {
    let columns: usize = parts.iter().map(|part| part.rows).sum();
    let mut out = Vec::<f32>::with_capacity(rows * columns);
    let destination = Destination { begin: Shared(out.as_mut_ptr()), columns };
    let mut before = 0;
    for part in parts {
        // SAFETY: the allocation has room for [rows, columns], and no other part has these columns.
        unsafe {
            match part.tiles {
                Some(fields) if inputs == Inputs::Quantized || !part.format.rounds_inputs() => {
                    part.tiles_product(fields, x, rows, destination, before, &then);
                }
                _ => part.rows_product(x, rows, destination, before, &then),
            }
        }
        before += part.rows;
    }
    // SAFETY: the parts cover all columns of all rows.
    unsafe { out.set_len(rows * columns) };
    out
}

impl QuantizedRows {
    /// The products of all rows of `x`, with the format's kernel, stored from column `before` on.
    ///
    /// # Safety
    /// The destination must have room for them, and nothing else may access these columns.
    unsafe fn tiles_product(
        &self,
        fields: Fields,
        x: &[f32],
        rows: usize,
        out: Destination,
        before: usize,
        then: &(impl Fn(usize, usize, &mut [f32]) + Sync),
    ) {
        let packed = Packed::new(self.format, x, self.d_input);
        let (tile_words, whole) = (TILE * self.words_each, self.rows / TILE);
        let each = match rows <= DOT_PRODUCT_ROWS {
            true => (FEW_ROWS_WORDS / tile_words).clamp(1, MOST_TILES),
            false => TILES,
        };
        // Rows after the last whole tile become a tile that is padded with zeros.
        let mut last = Vec::new();
        if whole * TILE < self.rows {
            last.extend_from_slice(&self.packed[whole * tile_words..]);
            last.resize(tile_words, 0);
            tiles::tile_rows(fields, &mut last, &mut Vec::new());
        }
        let pieces = whole.div_ceil(each);
        for_pieces(pieces + usize::from(!last.is_empty()), |piece| {
            let (tiles, columns) = match piece < pieces {
                true => {
                    let tiles = piece * each..whole.min((piece + 1) * each);
                    let words = &self.packed[tiles.start * tile_words..tiles.end * tile_words];
                    (words, tiles.start * TILE..tiles.end * TILE)
                }
                false => (&last[..], whole * TILE..self.rows),
            };
            let columns = before + columns.start..before + columns.end;
            let begin = out.begin;
            // SAFETY: guaranteed by the caller; pieces have disjoint columns.
            unsafe {
                packed.multiply(tiles, columns.len(), begin.0.add(columns.start), out.columns);
                out.finish(rows, columns, then);
            }
        });
    }

    /// The products of all rows of `x` with dequantized rows, stored from column `before` on.
    ///
    /// # Safety
    /// As for [`tiles_product`](Self::tiles_product).
    unsafe fn rows_product(
        &self,
        x: &[f32],
        rows: usize,
        out: Destination,
        before: usize,
        then: &(impl Fn(usize, usize, &mut [f32]) + Sync),
    ) {
        let d_input = self.d_input;
        let few = rows <= DOT_PRODUCT_ROWS;
        let each = if few { FEW_ROWS_PIECE } else { SLAB };
        for_pieces(self.rows.div_ceil(each), |piece| {
            let range = piece * each..self.rows.min((piece + 1) * each);
            let (first, width) = (before + range.start, range.len());
            let begin = out.begin;
            if few {
                with_scratch(d_input + rows * width, |scratch| {
                    let (scratch, own) = scratch.split_at_mut(d_input);
                    vectorised(
                        #[inline(always)]
                        || self.dots(x, range.clone(), scratch, own),
                    );
                    for (row, own) in own.chunks_exact(width).enumerate() {
                        // SAFETY: guaranteed by the caller; pieces have disjoint columns.
                        unsafe {
                            let at = begin.0.add(row * out.columns + first);
                            at.copy_from_nonoverlapping(own.as_ptr(), width);
                        }
                    }
                });
            } else {
                with_scratch(width * d_input, |weights| {
                    vectorised(
                        #[inline(always)]
                        || self.dequantize(range.clone(), weights),
                    );
                    let at = Matrix::at(begin.0, out.columns as isize, 1).from(0, first);
                    let weights = Matrix::of(weights, d_input).transposed();
                    // SAFETY: the slices have [rows, d_input] and [width, d_input] elements; the
                    // rest is as above.
                    unsafe { product([rows, d_input, width], at, Matrix::of(x, d_input), weights, false) };
                });
            }
            // SAFETY: as above; all rows of these columns are written.
            unsafe { out.finish(rows, first..first + width, then) };
        });
    }
}

/// `grad * weight`, the gradient of the inputs, for `grad` `[rows, d_output]`.
pub(crate) fn stored_gradient(grad: &[f32], rows: usize, parts: &[QuantizedRows]) -> Vec<f32> {
    let columns: usize = parts.iter().map(|part| part.rows).sum();
    let d_input = parts.first().map_or(0, |part| part.d_input);
    let mut out = vec![0.0; rows * d_input];
    let mut before = 0;
    with_scratch(GRADIENT_ROWS * d_input, |weights| {
        for part in parts {
            for first in (0..part.rows).step_by(GRADIENT_ROWS) {
                let count = GRADIENT_ROWS.min(part.rows - first);
                let weights = &mut weights[..count * d_input];
                weights.par_chunks_mut(TILE * d_input).enumerate().for_each(|(index, weights)| {
                    let first = first + index * TILE;
                    vectorised(
                        #[inline(always)]
                        || part.dequantize(first..first + weights.len() / d_input, weights),
                    );
                });
                let grad = Matrix::of(grad, columns).from(0, before + first);
                // SAFETY: `grad` has [rows, columns] elements, of which this uses `count` columns;
                // the other slices have [count, d_input] and [rows, d_input].
                unsafe {
                    let out = Matrix::of_mut(&mut out, d_input);
                    wide_product([rows, count, d_input], out, grad, Matrix::of(weights, d_input), true);
                }
            }
            before += part.rows;
        }
    });
    out
}
