//! Products of small 16-bit matrices. A small model spends most launches on them, and is bound by
//! the launching thread. This kernel's definition is built only when it is compiled; `cubek` builds
//! its definitions at every launch. The epilogue adds bias and residual in the same launch.
//!
//! ```text
//!            n: EDGE = 64             a cube: one tile of `out`, four planes
//!          +-------------+
//!   plane 0| 16 rows     |            k in steps of EDGE: one tile of `a` and one of `b` in shared
//!   plane 1| 16 rows     |  m: EDGE   memory, the next ones in registers meanwhile. Either side
//!   plane 2| 16 rows     |            may be K-major or not: tensor cores load from shared memory
//!   plane 3| 16 rows     |            (`ldmatrix`, which transposes a side that is not K-major)
//!          +-------------+
//! ```

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use crate::cubecl::tensor_cores::{
    Half, Pair, Wide, left_columns, left_rows, multiply, right_columns, right_rows, zeroed,
};
use crate::cubecl::{array, cast, contiguous, dtype_of, empty, grid, launch, optional, rows, sum_pieces};
use crate::ops::dropout::Dropout;

/// Edge of a cube's tile of the result, and of the tiles of both sides.
const EDGE: usize = 64;
const PLANES: usize = 4;
const UNITS: usize = 32 * PLANES;
/// 16-byte vectors per row of a tile, and the row stride.
const WIDE: usize = EDGE / 8;
const STRIDE: usize = WIDE + 1;
/// Vectors of a tile per unit.
const SHARE: usize = EDGE * WIDE / UNITS;
/// Layout of a side.
#[derive(Clone, Copy, Debug)]
struct Side {
    /// M-major or N-major instead of K-major.
    transposed: bool,
    /// Vectors between runs.
    stride: usize,
}

/// Compile-time values of the kernel, besides dtypes: transposed sides, and what the epilogue adds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Variant {
    a_transposed: bool,
    b_transposed: bool,
    biased: bool,
    adds: bool,
}

/// Epilogue of a product `[m, n]`, in f32: a bias, and after dropout a residual.
#[derive(Clone)]
pub(crate) struct Added<R: CubeRuntime> {
    /// `[n]`.
    pub(crate) bias: Option<CubeTensor<R>>,
    /// Dropout of product and bias; only in the Hopper GEMM.
    pub(crate) dropout: Option<Dropout>,
    /// `[m, n]`.
    pub(crate) residual: Option<CubeTensor<R>>,
    /// A second product, of `[m, rank]` and `[rank, n]`; only in the Hopper GEMM.
    pub(crate) low_rank: Option<[CubeTensor<R>; 2]>,
}

impl<R: CubeRuntime> Added<R> {
    /// No epilogue.
    pub(crate) fn none() -> Self {
        Self { bias: None, dropout: None, residual: None, low_rank: None }
    }
}

#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    m: u32,
    n: u32,
    /// Length of a slice of the inner dimension.
    k: u32,
    pieces: u32,
    a_stride: u32,
    b_stride: u32,
    residual_stride: u32,
}

/// Whether the kernel supports these matrices `[m, k]` and `[k, n]`, with K in `split_k` slices.
/// Their 16-bit dtype must be one that the device's tensor cores support.
pub(crate) fn supports<R: CubeRuntime>(a: &CubeTensor<R>, b: &CubeTensor<R>, split_k: usize) -> bool {
    let [m, k, n] = [a.meta.shape()[0], a.meta.shape()[1], b.meta.shape()[1]];
    let whole = k > 0 && n.is_multiple_of(2) && (split_k == 1 || (k / split_k).is_multiple_of(EDGE));
    m * n > 0 && whole && a.dtype == b.dtype && side(a, 1).is_some() && side(b, 0).is_some()
}

/// Whether rows of the bias and the residual are aligned to pairs of elements.
pub(crate) fn can_add<R: CubeRuntime>(added: &Added<R>) -> bool {
    let begins = |x: &CubeTensor<R>| x.handle.offset_start.unwrap_or(0).is_multiple_of(2 * x.dtype.size() as u64);
    let residual = added.residual.as_ref().is_none_or(|residual| {
        let (shape, strides) = (residual.meta.shape(), residual.meta.strides());
        // Otherwise it is copied, with a row stride that is even, because the product's is.
        let copied = strides[1] != 1 && shape[1] != 1;
        copied || (shape[0] == 1 || strides[0].is_multiple_of(2)) && begins(residual)
    });
    let alone = added.dropout.is_none() && added.low_rank.is_none();
    alone && residual && added.bias.as_ref().is_none_or(|bias| !bias.is_contiguous() || begins(bias))
}

/// `a * b` plus `added`, for small matrices `[m, k]` and `[k, n]` that the kernel [`supports`],
/// with K in `split_k` slices, as `[m, n]` of `dtype`. An epilogue requires a single slice and
/// [`can_add`].
pub(super) fn small_product<R: CubeRuntime>(
    a: &CubeTensor<R>,
    b: &CubeTensor<R>,
    added: Added<R>,
    split_k: usize,
    dtype: DType,
) -> CubeTensor<R> {
    let [m, k, n] = [a.meta.shape()[0], a.meta.shape()[1], b.meta.shape()[1]];
    let (a_side, b_side) = match (side(a, 1), side(b, 0)) {
        (Some(a_side), Some(b_side)) => (a_side, b_side),
        _ => panic!("linear: {:?} by {:?} has no such kernel", a.meta, b.meta),
    };
    assert!(split_k == 1 || (added.bias.is_none() && added.residual.is_none()), "linear: something is added to slices");
    let (residual, residual_stride) = added.residual.map(rows).unzip();
    let residual_stride = residual_stride.unwrap_or(n);
    let bias = added.bias.map(contiguous);
    let variant = Variant {
        a_transposed: a_side.transposed,
        b_transposed: b_side.transposed,
        biased: bias.is_some(),
        adds: residual.is_some(),
    };
    let sums = if split_k == 1 { dtype } else { DType::F32 };
    let out = empty(a, [split_k, m, n], sums);
    let sizes = [m, n, k / split_k, split_k, a_side.stride, b_side.stride, residual_stride].map(|size| size as u32);
    let [rows, columns, inner, pieces, a_stride, b_stride, residual_stride] = sizes;
    // SAFETY: reads are guarded by both sizes of each side, writes by those of the result. Each
    // cube has its own tile. A bias has `n` elements, a residual the result's shape.
    unsafe {
        launch!(
            small_product_kernel::SmallProductKernel,
            &a.client,
            grid(m.div_ceil(EDGE) * n.div_ceil(EDGE) * pieces as usize),
            CubeDim::new_1d(UNITS as u32),
            [],
            [F = a.dtype, V = dtype_of(&bias, a), S = dtype_of(&residual, a), O = sums],
            [
                a: Array<Wide<small_product_kernel::F>> = array(a),
                b: Array<Wide<small_product_kernel::F>> = array(b),
                bias: ComptimeOption<Array<Half<small_product_kernel::V>>> = optional(&bias),
                residual: ComptimeOption<Array<Half<small_product_kernel::S>>> = optional(&residual),
                out: Array<Half<small_product_kernel::O>> = array(&out),
                sizes: Sizes = SizesLaunch::new(rows, columns, inner, pieces, a_stride, b_stride, residual_stride),
            ],
            [variant: Variant = variant]
        );
    }
    let out = sum_pieces(out, [m, n]);
    cast(out, dtype)
}

/// The layout of a matrix whose axis `inner` is the product's inner dimension, if runs are whole
/// vectors.
fn side<R: CubeRuntime>(x: &CubeTensor<R>, inner: usize) -> Option<Side> {
    let strides = x.meta.strides();
    let begin = x.handle.offset_start.unwrap_or(0);
    let run = if strides[inner] == 1 { inner } else { 1 - inner };
    // An axis of length 1 may have any stride.
    let stride = if x.meta.shape()[1 - run] == 1 { x.meta.shape()[run] } else { strides[1 - run] };
    let whole = [x.meta.shape()[run], stride].iter().all(|length| length.is_multiple_of(8));
    (strides[run] == 1 && whole && begin.is_multiple_of(16))
        .then_some(Side { transposed: run != inner, stride: stride / 8 })
}

#[cube(launch_unchecked)]
fn small_product_kernel<F: Float, V: Float, S: Float, O: Float>(
    a: &Array<Wide<F>>,
    b: &Array<Wide<F>>,
    bias: &ComptimeOption<Array<Half<V>>>,
    residual: &ComptimeOption<Array<Half<S>>>,
    out: &mut Array<Half<O>>,
    sizes: &Sizes,
    #[comptime] variant: Variant,
    #[define(F)] _dtype: StorageType,
    #[define(V)] _bias_dtype: StorageType,
    #[define(S)] _residual_dtype: StorageType,
    #[define(O)] _out_dtype: StorageType,
) {
    let edge = comptime!(EDGE as u32);
    let across = sizes.n.div_ceil(edge);
    let tiles = across * sizes.m.div_ceil(edge);
    let tile = CUBE_POS as u32 % tiles;
    let piece = CUBE_POS as u32 / tiles;
    if piece >= sizes.pieces {
        terminate!();
    }
    let first_row = tile / across * edge;
    let first_column = tile % across * edge;
    let begin = piece * sizes.k;
    let end = begin + sizes.k;

    let mut a_tile = SharedMemory::<Wide<F>>::new(comptime!(EDGE * STRIDE));
    let mut b_tile = SharedMemory::<Wide<F>>::new(comptime!(EDGE * STRIDE));
    let mut a_part = Array::<Wide<F>>::new(SHARE);
    let mut b_part = Array::<Wide<F>>::new(SHARE);
    let mut sums = zeroed(comptime!(EDGE / 8 * 2));
    let plane = UNIT_POS / 32;

    fetch::<F>(a, &mut a_part, first_row, sizes.m, begin, end, sizes.a_stride, variant.a_transposed);
    fetch::<F>(b, &mut b_part, first_column, sizes.n, begin, end, sizes.b_stride, variant.b_transposed);
    for step in 0..sizes.k.div_ceil(edge) {
        put::<F>(&a_part, &mut a_tile);
        put::<F>(&b_part, &mut b_tile);
        sync_cube();
        // Loads the next tiles while these are multiplied. After the last one they are zeros.
        let next = begin + (step + 1) * edge;
        fetch::<F>(a, &mut a_part, first_row, sizes.m, next, end, sizes.a_stride, variant.a_transposed);
        fetch::<F>(b, &mut b_part, first_column, sizes.n, next, end, sizes.b_stride, variant.b_transposed);
        #[unroll]
        for block in 0..comptime!(EDGE / 16) {
            let left = if comptime!(variant.a_transposed) {
                left_columns::<F>(&a_tile, comptime!(16 * block), plane, STRIDE)
            } else {
                left_rows::<F>(&a_tile, 16 * plane, block, STRIDE)
            };
            #[unroll]
            for column in 0..comptime!(EDGE / 16) {
                let right = if comptime!(variant.b_transposed) {
                    right_columns::<F>(&b_tile, comptime!(16 * block), comptime!(column as u32).runtime(), STRIDE)
                } else {
                    right_rows::<F>(&b_tile, comptime!(16 * column), block, STRIDE)
                };
                multiply::<F>(&left, &right, &mut sums, 0usize, comptime!(4 * column));
            }
        }
        sync_cube();
    }

    let lane = UNIT_POS % 32;
    #[unroll]
    for half in 0..2usize {
        let row = first_row + 16 * plane + lane / 4 + comptime!(8 * half as u32);
        #[unroll]
        for block in 0..comptime!(EDGE / 8) {
            let column = first_column + comptime!(8 * block as u32) + lane % 4 * 2;
            if row < sizes.m && column < sizes.n {
                let mut pair = sums[comptime!(2 * block + half)];
                if comptime!(variant.biased) {
                    pair += Pair::cast_from(bias.as_ref().unwrap()[(column / 2) as usize]);
                }
                if comptime!(variant.adds) {
                    let at = (row * sizes.residual_stride + column) / 2;
                    pair += Pair::cast_from(residual.as_ref().unwrap()[at as usize]);
                }
                let at = ((piece * sizes.m + row) * sizes.n + column) / 2;
                out[at as usize] = Half::<O>::cast_from(pair);
            }
        }
    }
}

/// Loads a unit's share of a side's tile: outputs from `first` of `outputs` on, and the inner
/// dimension from `begin` to `end`. Elements outside are zero.
#[cube]
fn fetch<F: Float>(
    from: &Array<Wide<F>>,
    part: &mut Array<Wide<F>>,
    first: u32,
    outputs: u32,
    begin: u32,
    end: u32,
    stride: u32,
    #[comptime] transposed: bool,
) {
    let (first_run, runs) = if comptime!(transposed) { (begin, end) } else { (first, outputs) };
    let (first_element, elements) = if comptime!(transposed) { (first, outputs) } else { (begin, end) };
    #[unroll]
    for step in 0..SHARE {
        let at = UNIT_POS + comptime!((step * UNITS) as u32);
        let run = first_run + at / comptime!(WIDE as u32);
        let vector = first_element / 8 + at % comptime!(WIDE as u32);
        part[step] = Wide::<F>::cast_from(0.0f32);
        if run < runs && vector < elements / 8 {
            part[step] = from[(run * stride + vector) as usize];
        }
    }
}

/// Writes a unit's share of a tile to shared memory.
#[cube]
fn put<F: Float>(part: &Array<Wide<F>>, tile: &mut SharedMemory<Wide<F>>) {
    #[unroll]
    for step in 0..SHARE {
        let at = UNIT_POS + comptime!((step * UNITS) as u32);
        tile[(at / comptime!(WIDE as u32) * comptime!(STRIDE as u32) + at % comptime!(WIDE as u32)) as usize] =
            part[step];
    }
}
