//! Building blocks of the CPU's operations: tensors as slices, vectorised loops, products.
//!
//! The thread that fills new memory also clears it, a piece at a time: clearing all of it first
//! would be one more pass over memory, in one thread.

mod dot_products;
mod grouped;
mod stored;
mod team;
mod tile_products;
mod words;

use std::ops::Range;
use std::sync::Once;

use burn::tensor::{Int, Tensor, TensorPrimitive};
use burn_ndarray::{NdArray, NdArrayTensor, SharedArray};
use ndarray::IxDyn;
use rayon::prelude::*;

pub(crate) use self::dot_products::DotProducts;
pub(crate) use self::grouped::{GroupedMatrix, grouped_gradient, grouped_outer, grouped_product};
pub(crate) use self::stored::{DOT_PRODUCT_ROWS, Inputs, QuantizedRows, stored_gradient, stored_product};
pub(crate) use self::tile_products::Instructions;
pub(crate) use self::words::{Words, words_tensor};

/// Columns of a slab of a product: as many as `gemm`'s kernels have in registers, or two or three
/// times as many if the number of slabs stays even.
const SLAB: usize = 64;
const WIDE_SLABS: [usize; 2] = [3 * SLAB, 2 * SLAB];
/// Maximum number of slabs; larger products have wider slabs.
const SLABS: usize = 64;
/// With fewer slabs, each is also split by rows, into pieces of at least `TALL` rows.
const FEW_SLABS: usize = 12;
const TALL: usize = 256;
/// Products with fewer multiplications run on one thread.
const SMALL_PRODUCT: usize = 1 << 17;

/// Minimum number of elements per thread, below which starting a thread costs more than it saves.
const GRAIN: usize = 1 << 13;

/// A tensor's values in host memory, without a copy.
pub(crate) struct Values(SharedArray<f32>);

impl Values {
    /// The values with the tensor's strides.
    pub(crate) fn strided<const D: usize>(tensor: Tensor<NdArray, D>) -> Self {
        match tensor.into_primitive() {
            TensorPrimitive::Float(NdArrayTensor::F32(storage)) => Self(storage.into_shared()),
            _ => panic!("the CPU computes in f32: cast the tensor first"),
        }
    }

    /// The values in row-major order; copied only if they are not.
    pub(crate) fn rows<const D: usize>(tensor: Tensor<NdArray, D>) -> Self {
        let Self(array) = Self::strided(tensor);
        if array.is_standard_layout() {
            return Self(array);
        }
        Self(Self::in_rows(&array))
    }

    /// The values in row-major order, for writing; copied only if they are shared.
    pub(crate) fn into_vec(self) -> Vec<f32> {
        let size = self.0.len();
        match self.0.into_owned().into_raw_vec_and_offset() {
            (values, None | Some(0)) if values.len() == size => values,
            (values, offset) => values[offset.unwrap_or(0)..][..size].to_vec(),
        }
    }

    /// A tensor of the same values in another shape; copied only if they are not in row-major
    /// order.
    pub(crate) fn reshaped<const D: usize>(self, shape: [usize; D]) -> Tensor<NdArray, D> {
        let array = if self.0.is_standard_layout() { self.0 } else { Self::in_rows(&self.0) };
        from_array(array.into_shape_with_order(IxDyn(&shape)).expect("as many elements as before"))
    }

    fn in_rows(array: &SharedArray<f32>) -> SharedArray<f32> {
        array.as_standard_layout().into_owned().into_shared()
    }

    /// Strides in elements.
    pub(crate) fn strides(&self) -> &[isize] {
        self.0.strides()
    }

    /// Address of the first element.
    pub(crate) fn pointer(&self) -> *const f32 {
        self.0.as_ptr()
    }
}

impl std::ops::Deref for Values {
    type Target = [f32];

    /// Only for values in row-major order.
    fn deref(&self) -> &[f32] {
        self.0.as_slice().expect("values row after row")
    }
}

/// A tensor of the given values.
pub(crate) fn tensor<const D: usize>(values: Vec<f32>, shape: [usize; D]) -> Tensor<NdArray, D> {
    from_array(SharedArray::from_shape_vec(IxDyn(&shape), values).expect("as many values as the shape says"))
}

fn from_array<const D: usize>(array: SharedArray<f32>) -> Tensor<NdArray, D> {
    Tensor::from_primitive(TensorPrimitive::Float(NdArrayTensor::F32(array.into())))
}

/// An integer tensor's values.
pub(crate) fn integers<const D: usize>(tensor: Tensor<NdArray, D, Int>) -> Vec<i64> {
    match tensor.into_primitive() {
        // Without a conversion to bytes.
        NdArrayTensor::I64(storage) => storage.into_shared().iter().copied().collect(),
        primitive => Tensor::<NdArray, D, Int>::from_primitive(primitive).into_data().iter::<i64>().collect(),
    }
}

/// Clamps an id or position to `0..=last`: values outside, on either side, become `last`.
pub(crate) fn clamp_index(id: i64, last: usize) -> usize {
    usize::try_from(id).unwrap_or(usize::MAX).min(last)
}

/// Runs `work` with the widest vectors that the processor has. Functions and closures called by it
/// must be `#[inline(always)]`: what is not inlined is compiled without these vectors.
#[inline(always)]
pub(crate) fn vectorised<R>(work: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(work)
}

/// Splits `out` into pieces of whole rows, and calls `work` with each piece and the index of its
/// first row. Uses all cores if that pays.
pub(crate) fn for_rows(out: &mut [f32], columns: usize, work: impl Fn(usize, &mut [f32]) + Sync) {
    let rows = (GRAIN / columns.max(1)).max(1);
    if out.len() <= rows * columns {
        return vectorised(
            #[inline(always)]
            || work(0, out),
        );
    }
    out.par_chunks_mut(rows * columns).enumerate().for_each(|(piece, out)| {
        vectorised(
            #[inline(always)]
            || work(piece * rows, out),
        )
    });
}

/// An address that threads share. Each thread writes elsewhere.
#[derive(Clone, Copy)]
struct Shared(*mut f32);

// SAFETY: its users ensure that no two threads write the same elements, and that no thread reads
// what another writes.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

/// New matrices of `rows` rows, with `columns` columns each. `work` gets the index of a piece's
/// first row and that piece of each matrix, cleared. Uses all cores if that pays.
pub(crate) fn new_rows<const N: usize>(
    rows: usize,
    columns: [usize; N],
    work: impl Fn(usize, [&mut [f32]; N]) + Sync,
) -> [Vec<f32>; N] {
    new_rows_beside(
        rows,
        (&mut [], 0),
        columns,
        #[inline(always)]
        |first, _, pieces| work(first, pieces),
    )
}

/// [`new_rows`] together with the rows of `x`, of `width` columns, which `work` may change.
pub(crate) fn new_rows_beside<const N: usize>(
    rows: usize,
    (x, width): (&mut [f32], usize),
    columns: [usize; N],
    work: impl Fn(usize, &mut [f32], [&mut [f32]; N]) + Sync,
) -> [Vec<f32>; N] {
    assert_eq!(x.len(), rows * width, "as many elements as rows of them");
    let mut out = columns.map(|columns| Vec::<f32>::with_capacity(rows * columns));
    let begin: [Shared; N] = std::array::from_fn(|i| Shared(out[i].as_mut_ptr()));
    let x = Shared(x.as_mut_ptr());
    let widest = columns.iter().max().map_or(1, |columns| (*columns).max(1));
    let piece = (GRAIN / widest).max(1);
    let fill = |index: usize| {
        let (first, x) = (index * piece, x);
        let size = piece.min(rows - first);
        // SAFETY: rows `first` to `first + size` are within each matrix's allocation, and no other
        // piece has them. Rows of new matrices are initialized before a slice of them is created.
        let (x, pieces) = unsafe {
            let pieces = std::array::from_fn(|i| {
                let at = begin[i].0.add(first * columns[i]);
                at.write_bytes(0, size * columns[i]);
                std::slice::from_raw_parts_mut(at, size * columns[i])
            });
            (std::slice::from_raw_parts_mut(x.0.add(first * width), size * width), pieces)
        };
        vectorised(
            #[inline(always)]
            || work(first, x, pieces),
        );
    };
    match rows.div_ceil(piece) {
        pieces @ 0..=1 => (0..pieces).for_each(fill),
        pieces => (0..pieces).into_par_iter().for_each(fill),
    }
    for (out, columns) in out.iter_mut().zip(columns) {
        // SAFETY: the pieces cover all rows.
        unsafe { out.set_len(rows * columns) };
    }
    out
}

/// A new matrix of few rows, filled in pieces of columns. `work` gets a range of columns and the
/// piece `[rows, columns]` to fill. `cost` is the work per column, in elements. Uses all cores if
/// that pays.
pub(crate) fn new_columns(
    rows: usize,
    columns: usize,
    cost: usize,
    work: impl Fn(Range<usize>, &mut [f32]) + Sync,
) -> Vec<f32> {
    let piece = (4 * GRAIN / cost.max(1)).clamp(1, columns.max(1));
    let mut out = Vec::<f32>::with_capacity(rows * columns);
    let begin = Shared(out.as_mut_ptr());
    let fill = |index: usize| {
        let (range, begin) = (index * piece..columns.min((index + 1) * piece), begin);
        let width = range.len();
        let mut own = vec![0.0; rows * width];
        vectorised(
            #[inline(always)]
            || work(range.clone(), &mut own),
        );
        for (row, own) in own.chunks_exact(width).enumerate() {
            // SAFETY: the allocation has room for [rows, columns], and no other piece has these
            // columns.
            unsafe { begin.0.add(row * columns + range.start).copy_from_nonoverlapping(own.as_ptr(), width) };
        }
    };
    match columns.div_ceil(piece) {
        pieces @ 0..=1 => (0..pieces).for_each(fill),
        pieces => (0..pieces).into_par_iter().for_each(fill),
    }
    // SAFETY: the pieces cover all columns of all rows.
    unsafe { out.set_len(rows * columns) };
    out
}

/// A vector of `size` zeros.
pub(crate) fn zeros(size: usize) -> Vec<f32> {
    let [zeros] = new_rows(size, [1], |_, _| {});
    zeros
}

/// Sums `[width]` vectors over all rows. `work` fills the sum over a range of rows. The ranges do
/// not depend on the machine.
pub(crate) fn sum_over_rows(rows: usize, width: usize, work: impl Fn(Range<usize>, &mut [f32]) + Sync) -> Vec<f32> {
    const PIECE: usize = 128;
    let pieces: Vec<Vec<f32>> = (0..rows.div_ceil(PIECE))
        .into_par_iter()
        .map(|piece| {
            let mut sums = vec![0.0; width];
            vectorised(
                #[inline(always)]
                || work(piece * PIECE..rows.min((piece + 1) * PIECE), &mut sums),
            );
            sums
        })
        .collect();
    let mut total = vec![0.0; width];
    for piece in pieces {
        total.iter_mut().zip(piece).for_each(|(total, sum)| *total += sum);
    }
    total
}

const LANES: usize = 16;

/// The sum of `f` over pairs of elements, in sixteen running sums.
#[inline(always)]
pub(crate) fn sum_of(a: &[f32], b: &[f32], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (a_lanes, b_lanes) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest: f32 = a_lanes.remainder().iter().zip(b_lanes.remainder()).map(|(a, b)| f(*a, *b)).sum();
    for (a, b) in a_lanes.zip(b_lanes) {
        for lane in 0..LANES {
            lanes[lane] += f(a[lane], b[lane]);
        }
    }
    lanes.iter().sum::<f32>() + rest
}

/// Updates equal-length slices elementwise, sixteen elements at a time, so that loops are
/// vectorised although the slices might overlap.
#[inline(always)]
pub(crate) fn for_lanes<const N: usize>(slices: [&mut [f32]; N], f: impl Fn([f32; N]) -> [f32; N]) {
    let slices = slices.map(|slice| slice.as_chunks_mut::<LANES>());
    let chunks = slices.iter().map(|(chunks, _)| chunks.len()).min().unwrap_or(0);
    for at in 0..chunks {
        let mut values: [[f32; LANES]; N] = std::array::from_fn(|i| slices[i].0[at]);
        #[expect(clippy::needless_range_loop, reason = "a place of every slice, which the lint takes for one")]
        for lane in 0..LANES {
            let new = f(std::array::from_fn(|i| values[i][lane]));
            for i in 0..N {
                values[i][lane] = new[i];
            }
        }
        for i in 0..N {
            slices[i].0[at] = values[i];
        }
    }
    let rest = slices.iter().map(|(_, rest)| rest.len()).min().unwrap_or(0);
    for at in 0..rest {
        let new = f(std::array::from_fn(|i| slices[i].1[at]));
        for i in 0..N {
            slices[i].1[at] = new[i];
        }
    }
}

/// The largest element.
#[inline(always)]
pub(crate) fn max_of(values: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = values.chunks_exact(LANES);
    let rest = chunks.remainder().iter().fold(f32::NEG_INFINITY, |max, value| max.max(*value));
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] = if chunk[lane] > lanes[lane] { chunk[lane] } else { lanes[lane] };
        }
    }
    lanes.iter().fold(rest, |max, value| max.max(*value))
}

/// `e^x` to about one unit in the last place: Cephes' polynomial around the nearest power of two.
/// NaN stays NaN.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // Adding it rounds to an integer, which is then in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let x = x.clamp(-87.0, 88.0);
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let whole = shifted - ROUND;
    let power = shifted.to_bits().wrapping_sub(ROUND.to_bits());
    let r = x - whole * 0.693_359_4 + whole * 2.121_944_4e-4;
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_2e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 0.5;
    (p * r * r + r + 1.0) * f32::from_bits(power.wrapping_add(127) << 23)
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// A matrix: address and strides.
#[derive(Clone, Copy)]
pub(crate) struct Matrix {
    pointer: *mut f32,
    row: isize,
    column: isize,
}

// SAFETY: a matrix is only an address and two strides. `product`, which dereferences it, is unsafe.
unsafe impl Send for Matrix {}
// SAFETY: as above.
unsafe impl Sync for Matrix {}

impl Matrix {
    /// A row-major matrix of `columns` columns, for reading.
    pub(crate) fn of(values: &[f32], columns: usize) -> Self {
        Self { pointer: values.as_ptr().cast_mut(), row: columns as isize, column: 1 }
    }

    /// A row-major matrix of `columns` columns, for writing.
    pub(crate) fn of_mut(values: &mut [f32], columns: usize) -> Self {
        Self { pointer: values.as_mut_ptr(), row: columns as isize, column: 1 }
    }

    /// A matrix that starts at `pointer`.
    pub(crate) fn at(pointer: *mut f32, row: isize, column: isize) -> Self {
        Self { pointer, row, column }
    }

    /// The submatrix from `row` and `column` on.
    fn from(self, row: usize, column: usize) -> Self {
        let steps = row as isize * self.row + column as isize * self.column;
        Self { pointer: self.pointer.wrapping_offset(steps), ..self }
    }

    /// The transposed matrix.
    pub(crate) fn transposed(self) -> Self {
        Self { row: self.column, column: self.row, ..self }
    }
}

/// `out = a * b`, or `out += a * b` with `add`, for `[m, k]` times `[k, n]`, on the calling thread.
///
/// # Safety
/// All three matrices must be within live allocations for these sizes, and nothing else may access
/// `out` meanwhile.
pub(crate) unsafe fn product([m, k, n]: [usize; 3], out: Matrix, a: Matrix, b: Matrix, add: bool) {
    static PACKING: Once = Once::new();
    // The threshold counts tiles of six columns. Packing the left matrix does not pay for a slab of
    // 64 columns, but does for wider ones.
    PACKING.call_once(|| gemm::set_lhs_packing_threshold_single_thread(16));
    // SAFETY: guaranteed by the caller.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.pointer,
            out.column,
            out.row,
            add,
            a.pointer,
            a.column,
            a.row,
            b.pointer,
            b.column,
            b.row,
            1.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

/// [`product`] on all cores, one slab of columns at a time.
///
/// # Safety
/// As for [`product`].
pub(crate) unsafe fn wide_product(sizes: [usize; 3], out: Matrix, a: Matrix, b: Matrix, add: bool) {
    // SAFETY: guaranteed by the caller.
    for_slabs(sizes, |rows, columns| unsafe {
        let out = out.from(rows.start, columns.start);
        product([rows.len(), sizes[1], columns.len()], out, a.from(rows.start, 0), b.from(0, columns.start), add);
    });
}

/// Calls `work` with the rows and columns of each slab of a product.
fn for_slabs([m, k, n]: [usize; 3], work: impl Fn(Range<usize>, Range<usize>) + Sync) {
    let width = WIDE_SLABS.into_iter().find(|width| n.is_multiple_of(2 * width)).unwrap_or(SLAB);
    let width = width * n.div_ceil(width * SLABS).max(1);
    let slabs = n.div_ceil(width);
    // Split few slabs by rows, too, unless `b` would be packed again for too few rows.
    let height = m.div_ceil((FEW_SLABS / slabs.max(1)).clamp(1, (m / TALL).max(1))).max(1);
    let slab = |index: usize| {
        let (row, column) = (index / slabs * height, index % slabs * width);
        work(row..m.min(row + height), column..n.min(column + width));
    };
    match slabs * m.div_ceil(height) {
        slabs if slabs > 1 && m * k * n > SMALL_PRODUCT => (0..slabs).into_par_iter().with_max_len(1).for_each(slab),
        slabs => (0..slabs).for_each(slab),
    }
}

/// `a * b` in a new matrix, computed as in [`wide_product`], without clearing it first. `then` gets
/// each piece of a row, with the row and the first column, while the piece is in the cache.
///
/// # Safety
/// Both matrices must be within live allocations for these sizes.
pub(crate) unsafe fn new_product(
    sizes: [usize; 3],
    a: Matrix,
    b: Matrix,
    then: impl Fn(usize, usize, &mut [f32]) + Sync,
) -> Vec<f32> {
    let [m, k, n] = sizes;
    let mut out = Vec::with_capacity(m * n);
    let matrix = Matrix::at(out.as_mut_ptr(), n as isize, 1);
    for_slabs(sizes, |rows, columns| {
        let at = matrix.from(rows.start, columns.start);
        // SAFETY: the allocation has room for [m, n]. Without `add`, a product writes its whole
        // slab before anything reads it, and slabs do not overlap. The caller guarantees `a` and
        // `b`.
        unsafe {
            let (a, b) = (a.from(rows.start, 0), b.from(0, columns.start));
            product([rows.len(), k, columns.len()], at, a, b, false);
            vectorised(
                #[inline(always)]
                || {
                    for (index, row) in rows.enumerate() {
                        let piece = std::slice::from_raw_parts_mut(at.pointer.add(index * n), columns.len());
                        then(row, columns.start, piece);
                    }
                },
            );
        }
    });
    // SAFETY: the slabs cover all columns.
    unsafe { out.set_len(m * n) };
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_everywhere_and_keeps_nan() {
        for step in -86_000..88_000 {
            let x = step as f32 * 1e-3;
            let exact = f64::from(x).exp();
            assert!((f64::from(exp(x)) / exact - 1.0).abs() < 3e-7, "exp({x}) = {}", exp(x));
        }
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(-1e30) < 1e-37);
    }

    #[test]
    fn lanes_are_replaced_place_by_place() {
        for size in [0, 1, 15, 16, 17, 100] {
            let mut x: Vec<f32> = (0..size).map(|i| i as f32).collect();
            let mut y: Vec<f32> = x.iter().map(|x| 2.0 * x + 1.0).collect();
            for_lanes([&mut x, &mut y], |[x, y]| [y - x, x * y]);
            for i in 0..size {
                let (was_x, was_y) = (i as f32, 2.0 * i as f32 + 1.0);
                assert_eq!([x[i], y[i]], [was_y - was_x, was_x * was_y]);
            }
        }
    }

    #[test]
    fn products_of_odd_sizes_and_strides_are_right() {
        for [m, k, n] in [[1, 1, 1], [3, 5, 2], [17, 33, 9], [65, 64, 63], [40, 31, 130], [2, 3, 4200]] {
            let a: Vec<f32> = (0..m * k).map(|i| (i % 13) as f32 - 6.0).collect();
            let b: Vec<f32> = (0..n * k).map(|i| (i % 7) as f32 - 3.0).collect();
            let mut out = vec![1.0; m * n];
            // SAFETY: the slices have [m, k], [n, k] and [m, n] elements.
            unsafe {
                let b = Matrix::of(&b, k).transposed();
                wide_product([m, k, n], Matrix::of_mut(&mut out, n), Matrix::of(&a, k), b, true);
            }
            for row in 0..m {
                for column in 0..n {
                    let exact: f32 = (0..k).map(|i| a[row * k + i] * b[column * k + i]).sum();
                    assert_eq!(out[row * n + column], exact + 1.0, "{m}x{k}x{n} at {row}, {column}");
                }
            }
        }
    }
}
