//! Products of small half-precision matrices. In a small model they are most of a step's launches, and what bounds them is
//! the thread that launches: this kernel is put together only to be compiled, where `cubek`'s are each time.
//!
//! A cube has a tile of the result and four planes, each 16 rows of it. Either side may lie with its rows or with its
//! columns in one run: matrix units read both from shared memory.

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::matrix_units::{
    Half, Wide, has_matrix_units, left_columns, left_rows, multiply, right_columns, right_rows, zeroed,
};
use super::{array, empty, grid, launch, sum_pieces};

/// Edge of a cube's tile of the result, and of the tiles of both sides.
const EDGE: usize = 64;
const PLANES: usize = 4;
const UNITS: usize = 32 * PLANES;
/// Vectors of sixteen bytes in a row of a tile, and from one row to the next.
const WIDE: usize = EDGE / 8;
const STRIDE: usize = WIDE + 1;
/// Vectors of a tile that a unit carries.
const SHARE: usize = EDGE * WIDE / UNITS;
/// The most multiplications: larger products have better kernels.
const MOST: usize = 1 << 28;

/// How a side lies in memory.
#[derive(Clone, Copy, Debug)]
struct Side {
    /// Whether the inner dimension is not the inner one in memory.
    turned: bool,
    /// Vectors from one run to the next.
    stride: usize,
}

/// Which sides are turned, for the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Turned {
    a: bool,
    b: bool,
}

#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    m: u32,
    n: u32,
    /// Of a piece of the inner dimension.
    k: u32,
    pieces: u32,
    a_stride: u32,
    b_stride: u32,
}

/// `a * b` for small matrices `[m, k]` and `[k, n]` of one half-precision dtype, the inner dimension in as many `pieces`, as
/// `[m, n]` of `dtype`. `None` where the device or the sizes are not for it.
pub(super) fn small_product<R: CubeRuntime>(
    a: &CubeTensor<R>,
    b: &CubeTensor<R>,
    pieces: usize,
    dtype: DType,
) -> Option<CubeTensor<R>> {
    let [m, k, n] = [a.meta.shape()[0], a.meta.shape()[1], b.meta.shape()[1]];
    let whole = k > 0 && n.is_multiple_of(2) && (pieces == 1 || (k / pieces).is_multiple_of(EDGE));
    if m * n == 0 || m * n * k > MOST || !whole || !has_matrix_units(a) {
        return None;
    }
    let (a_side, b_side) = (side(a, 1)?, side(b, 0)?);
    let sums = if pieces == 1 { dtype } else { DType::F32 };
    let out = empty(a, [pieces, m, n], sums);
    let sizes = [m, n, k / pieces, pieces, a_side.stride, b_side.stride].map(|size| size as u32);
    let [rows, columns, inner, pieces, a_stride, b_stride] = sizes;
    // SAFETY: reads are guarded by both sizes of each side, writes by those of the result, of which a cube has its own tile.
    unsafe {
        launch!(
            small_product_kernel::SmallProductKernel,
            &a.client,
            grid(m.div_ceil(EDGE) * n.div_ceil(EDGE) * pieces as usize),
            CubeDim::new_1d(UNITS as u32),
            [],
            [F = a.dtype, O = sums],
            [
                a: Array<Wide<small_product_kernel::F>> = array(a),
                b: Array<Wide<small_product_kernel::F>> = array(b),
                out: Array<Half<small_product_kernel::O>> = array(&out),
                sizes: Sizes = SizesLaunch::new(rows, columns, inner, pieces, a_stride, b_stride),
            ],
            [turned: Turned = Turned { a: a_side.turned, b: b_side.turned }]
        );
    }
    let out = sum_pieces(out, [m, n]);
    Some(super::cast(out, dtype))
}

/// How a matrix lies of which `inner` is the inner axis of the product, if its runs are whole vectors.
fn side<R: CubeRuntime>(x: &CubeTensor<R>, inner: usize) -> Option<Side> {
    let strides = x.meta.strides();
    let begin = x.handle.offset_start.unwrap_or(0);
    let run = if strides[inner] == 1 { inner } else { 1 - inner };
    // The stride of an axis of one may be anything.
    let stride = if x.meta.shape()[1 - run] == 1 { x.meta.shape()[run] } else { strides[1 - run] };
    let whole = [x.meta.shape()[run], stride].iter().all(|length| length.is_multiple_of(8));
    (strides[run] == 1 && whole && begin.is_multiple_of(16))
        .then_some(Side { turned: run != inner, stride: stride / 8 })
}

#[cube(launch_unchecked)]
fn small_product_kernel<F: Float, O: Float>(
    a: &Array<Wide<F>>,
    b: &Array<Wide<F>>,
    out: &mut Array<Half<O>>,
    sizes: &Sizes,
    #[comptime] turned: Turned,
    #[define(F)] _dtype: StorageType,
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

    fetch::<F>(a, &mut a_part, first_row, sizes.m, begin, end, sizes.a_stride, turned.a);
    fetch::<F>(b, &mut b_part, first_column, sizes.n, begin, end, sizes.b_stride, turned.b);
    for step in 0..sizes.k.div_ceil(edge) {
        put::<F>(&a_part, &mut a_tile);
        put::<F>(&b_part, &mut b_tile);
        sync_cube();
        // The next tiles are under way while these are multiplied; behind the last there are zeros.
        let next = begin + (step + 1) * edge;
        fetch::<F>(a, &mut a_part, first_row, sizes.m, next, end, sizes.a_stride, turned.a);
        fetch::<F>(b, &mut b_part, first_column, sizes.n, next, end, sizes.b_stride, turned.b);
        #[unroll]
        for block in 0..comptime!(EDGE / 16) {
            let left = if comptime!(turned.a) {
                left_columns::<F>(&a_tile, comptime!(16 * block), plane, STRIDE)
            } else {
                left_rows::<F>(&a_tile, 16 * plane, block, STRIDE)
            };
            #[unroll]
            for column in 0..comptime!(EDGE / 16) {
                let right = if comptime!(turned.b) {
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
                let at = ((piece * sizes.m + row) * sizes.n + column) / 2;
                out[at as usize] = Half::<O>::cast_from(sums[comptime!(2 * block + half)]);
            }
        }
    }
}

/// Reads a unit's share of a side's tile: outputs from `first` of `outputs` on, and the inner dimension from `begin` to `end`.
/// Zeros stand for what lies outside.
#[cube]
#[allow(clippy::too_many_arguments)]
fn fetch<F: Float>(
    from: &Array<Wide<F>>,
    part: &mut Array<Wide<F>>,
    first: u32,
    outputs: u32,
    begin: u32,
    end: u32,
    stride: u32,
    #[comptime] turned: bool,
) {
    let (first_run, runs) = if comptime!(turned) { (begin, end) } else { (first, outputs) };
    let (first_element, elements) = if comptime!(turned) { (first, outputs) } else { (begin, end) };
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
