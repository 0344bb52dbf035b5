//! Products of groups of rows, each with its own matrix of a stack: those of a mixture of experts.
//!
//! Only matrices with rows are read, and each once, in pieces that all cores share.

use std::ops::Range;
use std::sync::OnceLock;

use burn_ndarray::NdArray;

use super::stored::with_scratch;
use super::team::for_pieces;
use super::tile_products::Packed;
use super::{DOT_PRODUCT_ROWS, DotProducts, Inputs, Matrix, QuantizedRows, SLAB, Shared, Values, product, vectorised};
use crate::quant::Weight;
use crate::quant::tiles::TILE;

/// Columns of a piece if a group has many rows.
const WIDE: usize = 3 * SLAB;
/// Columns of a piece if weights are dequantized.
const STORED: usize = 4 * TILE;

/// A stack of matrices of one shape.
pub(crate) struct GroupedMatrix {
    stored: Stored,
    /// Number of matrices.
    count: usize,
    /// Rows and columns of each.
    rows: usize,
    columns: usize,
}

enum Stored {
    Float(Values),
    Quantized(Vec<QuantizedRows>),
}

/// A piece of a group's product: columns `first..` are rows `range` of a part of the stack.
struct Piece {
    group: usize,
    part: usize,
    range: Range<usize>,
    first: usize,
}

impl GroupedMatrix {
    /// The `count` matrices that are stacked in a weight.
    pub(crate) fn of(weight: Weight<NdArray>, count: usize) -> Self {
        let [rows, columns] = weight.dims();
        let stored = match QuantizedRows::parts(weight) {
            Ok(parts) => Stored::Quantized(parts),
            Err(floats) => Stored::Float(Values::rows(floats)),
        };
        Self { stored, count, rows: rows / count, columns }
    }

    /// Panics unless `starts` divides all of `rows` among the matrices, in order.
    fn check(&self, starts: &[usize], rows: usize) {
        assert_eq!(starts.len(), self.count + 1, "a group for each matrix");
        assert!(
            starts[0] == 0 && starts[self.count] == rows && starts.is_sorted(),
            "groups of all {rows} rows, in order"
        );
    }

    /// The pieces of groups that have rows.
    fn pieces(&self, starts: &[usize]) -> Vec<Piece> {
        let lengths: Vec<usize> = match &self.stored {
            Stored::Float(values) => vec![values.len() / self.columns],
            Stored::Quantized(parts) => parts.iter().map(QuantizedRows::count).collect(),
        };
        let mut pieces = Vec::new();
        for (group, ends) in starts.windows(2).enumerate().filter(|(_, ends)| ends[0] < ends[1]) {
            let width = match self.stored {
                Stored::Float(_) if ends[1] - ends[0] > DOT_PRODUCT_ROWS => WIDE,
                Stored::Float(_) => SLAB,
                Stored::Quantized(_) => STORED,
            };
            let own = group * self.rows..(group + 1) * self.rows;
            let mut before = 0;
            for (part, length) in lengths.iter().enumerate() {
                let (mut first, end) = (own.start.max(before), own.end.min(before + length));
                while first < end {
                    let next = end.min(first + width);
                    pieces.push(Piece { group, part, range: first - before..next - before, first: first - own.start });
                    first = next;
                }
                before += length;
            }
        }
        pieces
    }

    /// All values of one matrix.
    fn floats(&self, group: usize) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.columns];
        let own = group * self.rows..(group + 1) * self.rows;
        match &self.stored {
            Stored::Float(values) => out.copy_from_slice(&values[own.start * self.columns..own.end * self.columns]),
            Stored::Quantized(parts) => {
                let (mut before, mut done) = (0, 0);
                for part in parts {
                    let range = own.start.max(before)..own.end.min(before + part.count());
                    if range.start < range.end {
                        let size = range.len() * self.columns;
                        let own = &mut out[done..done + size];
                        vectorised(
                            #[inline(always)]
                            || part.dequantize(range.start - before..range.end - before, own),
                        );
                        done += size;
                    }
                    before += part.count();
                }
            }
        }
        out
    }
}

/// Each row of `x` `[rows, columns]` times the transposed matrix of its group, plus the group's
/// part of `bias`: `[rows, rows of a matrix]`. Group `g` has the rows `starts[g]..starts[g + 1]`.
pub(crate) fn grouped_product(
    x: &[f32],
    starts: &[usize],
    matrix: &GroupedMatrix,
    bias: Option<&[f32]>,
    inputs: Inputs,
) -> Vec<f32> {
    let (rows, size, width) = (x.len() / matrix.columns, matrix.columns, matrix.rows);
    matrix.check(starts, rows);
    let mut out = Vec::<f32>::with_capacity(rows * width);
    let begin = Shared(out.as_mut_ptr());
    let pieces = matrix.pieces(starts);
    let parts = match &matrix.stored {
        Stored::Float(_) => 0,
        Stored::Quantized(parts) => parts.len(),
    };
    let packed: Vec<OnceLock<Packed>> = (0..(starts.len() - 1) * parts).map(|_| OnceLock::new()).collect();
    for_pieces(pieces.len(), |index| {
        let Piece { group, part, range, first } = &pieces[index];
        let (start, end, columns, begin) = (starts[*group], starts[*group + 1], range.len(), begin);
        let (x, count) = (&x[start * size..end * size], end - start);
        // SAFETY: the allocation has room for [rows, width]; pieces are of other rows or columns.
        let at = unsafe { begin.0.add(start * width + first) };
        let put = |own: &[f32]| {
            for (row, own) in own.chunks_exact(columns).enumerate() {
                // SAFETY: as above.
                unsafe { at.add(row * width).copy_from_nonoverlapping(own.as_ptr(), columns) };
            }
        };
        let multiply = |weight: &[f32]| {
            if count <= DOT_PRODUCT_ROWS {
                with_scratch(count * columns, |own| {
                    DotProducts { a: x, b: weight, size, out: &mut *own }.compute();
                    put(own);
                });
            } else {
                let weight = Matrix::of(weight, size).transposed();
                // SAFETY: the slices have [count, size] and [columns, size] elements; the rest is
                // as above.
                unsafe {
                    let out = Matrix::at(at, width as isize, 1);
                    product([count, size, columns], out, Matrix::of(x, size), weight, false);
                }
            }
        };
        match &matrix.stored {
            Stored::Float(values) => multiply(&values[range.start * size..range.end * size]),
            Stored::Quantized(all) => {
                let rows_of = &all[*part];
                match rows_of.whole_tiles(range, inputs) {
                    Some(words) => {
                        let packed = packed[group * parts + part].get_or_init(|| rows_of.packed_inputs(x));
                        // SAFETY: as above: `count` rows of `columns` columns.
                        unsafe { packed.multiply(words, columns, at, width) };
                    }
                    None => {
                        let mut weight = vec![0.0; columns * size];
                        vectorised(
                            #[inline(always)]
                            || rows_of.dequantize(range.clone(), &mut weight),
                        );
                        multiply(&weight);
                    }
                }
            }
        }
        if let Some(bias) = bias {
            let bias = &bias[group * width + first..][..columns];
            for row in 0..count {
                // SAFETY: as above; this piece has written them.
                let own = unsafe { std::slice::from_raw_parts_mut(at.add(row * width), columns) };
                own.iter_mut().zip(bias).for_each(|(own, bias)| *own += bias);
            }
        }
    });
    // SAFETY: every row belongs to a group, and its pieces cover all columns.
    unsafe { out.set_len(rows * width) };
    out
}

/// Each row of `grad` `[rows, rows of a matrix]` times the matrix of its group: `[rows, columns]`.
pub(crate) fn grouped_gradient(grad: &[f32], starts: &[usize], matrix: &GroupedMatrix) -> Vec<f32> {
    let (rows, size, width) = (grad.len() / matrix.rows, matrix.rows, matrix.columns);
    matrix.check(starts, rows);
    let mut out = Vec::<f32>::with_capacity(rows * width);
    let begin = Shared(out.as_mut_ptr());
    let groups: Vec<usize> = (0..starts.len() - 1).filter(|group| starts[*group] < starts[group + 1]).collect();
    let across = width.div_ceil(WIDE);
    let dequantized: Vec<OnceLock<Vec<f32>>> = groups.iter().map(|_| OnceLock::new()).collect();
    for_pieces(groups.len() * across, |index| {
        let (group, first, begin) = (groups[index / across], index % across * WIDE, begin);
        let (start, count, columns) = (starts[group], starts[group + 1] - starts[group], WIDE.min(width - first));
        let weight = match &matrix.stored {
            Stored::Float(values) => &values[group * size * width..][..size * width],
            Stored::Quantized(_) => dequantized[index / across].get_or_init(|| matrix.floats(group)),
        };
        // SAFETY: the slices have [count, size] and [size, width] elements, of which this uses
        // `columns` columns; the allocation has room for [rows, width], and pieces are of other
        // rows or columns.
        unsafe {
            let out = Matrix::at(begin.0.add(start * width + first), width as isize, 1);
            let grad = Matrix::of(&grad[start * size..][..count * size], size);
            product([count, size, columns], out, grad, Matrix::of(weight, width).from(0, first), false);
        }
    });
    // SAFETY: every row belongs to a group, and its pieces cover all columns.
    unsafe { out.set_len(rows * width) };
    out
}

/// For each group `a^T * b` over its rows, of `a` `[rows, a's columns]` and `b` `[rows, b's
/// columns]`, stacked, and added to `sum` if given. Zeros for a group without rows.
pub(crate) fn grouped_outer(
    [a, b]: [&[f32]; 2],
    [rows, columns]: [usize; 2],
    starts: &[usize],
    sum: Option<Vec<f32>>,
) -> Vec<f32> {
    let adds = sum.is_some();
    let groups = starts.len() - 1;
    let mut out = sum.unwrap_or_else(|| vec![0.0; groups * rows * columns]);
    assert_eq!(out.len(), groups * rows * columns, "a matrix for each group");
    let begin = Shared(out.as_mut_ptr());
    let across = rows.div_ceil(WIDE);
    let filled: Vec<usize> = (0..groups).filter(|group| starts[*group] < starts[group + 1]).collect();
    for_pieces(filled.len() * across, |index| {
        let (group, first, begin) = (filled[index / across], index % across * WIDE, begin);
        let (start, count, own) = (starts[group], starts[group + 1] - starts[group], WIDE.min(rows - first));
        // SAFETY: the slices have [count, rows] and [count, columns] elements, and the output
        // [groups, rows, columns], of which each piece writes rows of its own.
        unsafe {
            let out = Matrix::at(begin.0.add((group * rows + first) * columns), columns as isize, 1).transposed();
            let a = Matrix::of(&a[start * rows..][..count * rows], rows).from(0, first);
            let b = Matrix::of(&b[start * columns..][..count * columns], columns).transposed();
            product([columns, count, own], out, b, a, adds);
        }
    });
    out
}
