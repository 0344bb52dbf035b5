//! GEMM in f32 without tensor cores: on Vulkan and WebGPU, and on CUDA if TF32 is not requested and
//! no Hopper kernel supports the product.
//!
//! ```text
//!             n: EDGE = 128                    k: DEPTH = 16 per step
//!           +--------------+   a unit:
//! m: EDGE   | tile of out, |   8 x 8 sums in   a_tile [DEPTH, EDGE] and b_tile [DEPTH, EDGE] in
//!           | 256 units    |   registers       shared memory, double-buffered: registers receive
//!           +--------------+                   the next step while one buffer is multiplied
//! ```
//!
//! Either side may be K-major or not: it is transposed between registers and shared memory. With
//! few tiles, K is split.

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use crate::cubecl::{array, cast, empty, grid, launch, sum_pieces};

/// Edge of a cube's tile of the result.
pub(crate) const EDGE: usize = 128;
/// Inner dimension per step.
pub(crate) const DEPTH: usize = 16;
const UNITS: usize = 256;
/// Four-element vectors per tile edge, and per side and step.
const QUADS: usize = EDGE / 4;
const PART: usize = DEPTH * QUADS;
/// Shared memory: two steps of both sides.
pub(crate) const SHARED_BYTES: usize = 2 * 2 * PART * 16;
/// Four adjacent elements.
type Quad = Vector<f32, Const<4>>;

/// Layout of a side.
#[derive(Clone, Copy, Debug)]
struct Side {
    /// M-major or N-major instead of K-major.
    transposed: bool,
    /// Elements between runs.
    stride: usize,
    /// Elements per load.
    width: usize,
}

/// Compile-time values of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Variant {
    a_transposed: bool,
    b_transposed: bool,
    /// The inner dimension is a whole number of steps.
    whole: bool,
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
}

/// `a * b` for f32 matrices `[m, k]` and `[k, n]`, each with one stride of 1, with K in `split_k`
/// slices, as `[m, n]` of `dtype`.
pub(super) fn simt_product<R: CubeRuntime>(
    a: &CubeTensor<R>,
    b: &CubeTensor<R>,
    split_k: usize,
    dtype: DType,
) -> CubeTensor<R> {
    let [m, k, n] = [a.meta.shape()[0], a.meta.shape()[1], b.meta.shape()[1]];
    let tiles = m.div_ceil(EDGE) * n.div_ceil(EDGE);
    let piece = k / split_k;
    let (a_side, b_side) = (side(a, 1, piece), side(b, 0, piece));
    let out = empty(a, [split_k, m, n], DType::F32);
    let written = if n.is_multiple_of(4) { 4 } else { 1 };
    let sizes = [m, n, piece, split_k, a_side.stride, b_side.stride].map(|size| size as u32);
    let [rows, columns, inner, count, a_stride, b_stride] = sizes;
    let variant = Variant {
        a_transposed: a_side.transposed,
        b_transposed: b_side.transposed,
        whole: piece.is_multiple_of(DEPTH),
    };
    // SAFETY: a cube writes its own tile of the result, guarded by its sizes. Reads stay within the
    // sides: outputs are clamped to the last one, and the inner dimension is guarded unless it is
    // whole steps. Vectors do not pass the end, because they are wide only if runs, strides and
    // offsets are multiples of their width.
    unsafe {
        launch!(
            simt_product_kernel::SimtProductKernel,
            &a.client,
            grid(tiles * split_k),
            CubeDim::new_1d(UNITS as u32),
            [NA = a_side.width, NB = b_side.width, NO = written],
            [],
            [
                a: Array<Vector<f32, simt_product_kernel::NA>> = array(a),
                b: Array<Vector<f32, simt_product_kernel::NB>> = array(b),
                out: Array<Vector<f32, simt_product_kernel::NO>> = array(&out),
                sizes: Sizes = SizesLaunch::new(rows, columns, inner, count, a_stride, b_stride),
            ],
            [variant: Variant = variant]
        );
    }
    cast(sum_pieces(out, [m, n]), dtype)
}

/// The layout of a matrix whose axis `inner` is the product's inner dimension, split into slices of
/// `piece`.
fn side<R: CubeRuntime>(x: &CubeTensor<R>, inner: usize, piece: usize) -> Side {
    let (shape, strides) = (x.meta.shape(), x.meta.strides());
    let run = if strides[inner] == 1 { inner } else { 1 - inner };
    // An axis of length 1 may have any stride.
    let stride = if shape[1 - run] == 1 { shape[run] } else { strides[1 - run] };
    let length = if run == inner { piece } else { shape[run] };
    let begin = x.handle.offset_start.unwrap_or(0);
    let whole = length.is_multiple_of(4) && stride.is_multiple_of(4) && begin.is_multiple_of(16);
    Side { transposed: run != inner, stride, width: if whole { 4 } else { 1 } }
}

#[cube(launch_unchecked)]
fn simt_product_kernel<NA: Size, NB: Size, NO: Size>(
    a: &Array<Vector<f32, NA>>,
    b: &Array<Vector<f32, NB>>,
    out: &mut Array<Vector<f32, NO>>,
    sizes: &Sizes,
    #[comptime] variant: Variant,
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

    let mut a_tile = SharedMemory::<Quad>::new(comptime!(2 * PART));
    let mut b_tile = SharedMemory::<Quad>::new(comptime!(2 * PART));
    let mut part = Array::<Quad>::new(4usize);
    let mut sums = Array::<Quad>::new(16usize);
    #[unroll]
    for at in 0..16usize {
        sums[at] = Quad::new(0.0f32);
    }
    // A plane has 32 rows and 64 columns of the tile, a unit two quads along each.
    let lane = UNIT_POS % 32;
    let plane = UNIT_POS / 32;
    let row = plane / 2 * 8 + lane / 8;
    let column = plane % 2 * 16 + lane % 8;
    let brings_a = UNIT_POS < comptime!(UNITS as u32 / 2);

    let steps = sizes.k.div_ceil(comptime!(DEPTH as u32));
    for step in 0..steps + 1 {
        // The first iteration multiplies nothing, the last loads nothing.
        let next = begin + step * comptime!(DEPTH as u32);
        let half = step % 2 * comptime!(PART as u32);
        if next < end {
            if brings_a {
                fetch::<NA>(
                    a,
                    &mut part,
                    first_row,
                    sizes.m,
                    next,
                    end,
                    sizes.a_stride,
                    variant.a_transposed,
                    variant.whole,
                );
            } else {
                fetch::<NB>(
                    b,
                    &mut part,
                    first_column,
                    sizes.n,
                    next,
                    end,
                    sizes.b_stride,
                    variant.b_transposed,
                    variant.whole,
                );
            }
        }
        if step > 0 {
            multiply(&a_tile, &b_tile, &mut sums, comptime!(PART as u32) - half, row, column);
        }
        if next < end {
            if brings_a {
                put(&part, &mut a_tile, half, variant.a_transposed);
            } else {
                put(&part, &mut b_tile, half, variant.b_transposed);
            }
        }
        sync_cube();
    }

    let width = NO::value();
    #[unroll]
    for i in 0..8u32 {
        let row = first_row + 4 * row + comptime!(i / 4 * 16 + i % 4);
        if row < sizes.m {
            let line = (piece * sizes.m + row) * sizes.n;
            #[unroll]
            for block in 0..2u32 {
                let quad = sums[comptime!((2 * i + block) as usize)];
                let column = first_column + 4 * column + comptime!(32 * block);
                #[unroll]
                for group in 0..comptime!(4 / width) {
                    let column = column + comptime!((group * width) as u32);
                    if column < sizes.n {
                        let mut vector = Vector::<f32, NO>::empty();
                        #[unroll]
                        for element in 0..width {
                            vector[element] = quad[comptime!(group * width + element)];
                        }
                        out[((line + column) / comptime!(width as u32)) as usize] = vector;
                    }
                }
            }
        }
    }
}

/// Index in shared memory of four elements of a side, `quad` of them along the tile's edge and
/// `depth` along the inner dimension. Neighbours along the inner dimension use different banks.
#[cube]
fn slot(depth: u32, quad: u32) -> u32 {
    depth * comptime!(QUADS as u32) + (quad ^ (depth / 4 * 2))
}

/// Loads a unit's share of a side's step: four runs of four elements. The tile starts at `first` of
/// `outputs`. The step starts at `begin`; elements from `end` on are zero. Past the last output,
/// the last one is repeated: those sums are not stored.
#[cube]
fn fetch<N: Size>(
    from: &Array<Vector<f32, N>>,
    part: &mut Array<Quad>,
    first: u32,
    outputs: u32,
    begin: u32,
    end: u32,
    stride: u32,
    #[comptime] transposed: bool,
    #[comptime] whole: bool,
) {
    let width = N::value();
    let at = UNIT_POS % comptime!(UNITS as u32 / 2);
    #[unroll]
    for run in 0..4u32 {
        let mut quad = Quad::new(0.0f32);
        #[unroll]
        for group in 0..comptime!(4 / width) {
            let element = comptime!((group * width) as u32);
            let (inner, output) = if comptime!(transposed) {
                (begin + at / 32 * 4 + run, first + at % 32 * 4 + element)
            } else {
                (begin + at % 4 * 4 + element, first + at / 4 * 4 + run)
            };
            if comptime!(whole) || inner < end {
                let index = if comptime!(transposed) {
                    inner * stride + min(output, outputs - comptime!(width as u32))
                } else {
                    min(output, outputs - 1) * stride + inner
                };
                let vector = from[(index / comptime!(width as u32)) as usize];
                #[unroll]
                for lane in 0..width {
                    quad[comptime!(group * width + lane)] = vector[lane];
                }
            }
        }
        part[run as usize] = quad;
    }
}

/// Writes a unit's share to shared memory, as quads along the tile's edge.
#[cube]
fn put(part: &Array<Quad>, tile: &mut SharedMemory<Quad>, half: u32, #[comptime] transposed: bool) {
    let at = UNIT_POS % comptime!(UNITS as u32 / 2);
    #[unroll]
    for i in 0..4u32 {
        if comptime!(transposed) {
            tile[(half + slot(at / 32 * 4 + i, at % 32)) as usize] = part[i as usize];
        } else {
            let mut quad = Quad::new(0.0f32);
            #[unroll]
            for run in 0..4usize {
                let elements = part[run];
                quad[run] = elements[i as usize];
            }
            tile[(half + slot(at % 4 * 4 + i, at / 4)) as usize] = quad;
        }
    }
}

/// Adds the products of a step to a unit's sums.
#[cube]
fn multiply(
    a_tile: &SharedMemory<Quad>,
    b_tile: &SharedMemory<Quad>,
    sums: &mut Array<Quad>,
    half: u32,
    row: u32,
    column: u32,
) {
    #[unroll]
    for depth in 0..comptime!(DEPTH as u32) {
        let near = b_tile[(half + slot(depth, column)) as usize];
        let far = b_tile[(half + slot(depth, column + 8)) as usize];
        #[unroll]
        for band in 0..2u32 {
            let rows = a_tile[(half + slot(depth, row + comptime!(4 * band))) as usize];
            #[unroll]
            for i in 0..4usize {
                let factor = Quad::new(rows[i]);
                let at = comptime!(8 * band as usize + 2 * i);
                sums[at] = fma(factor, near, sums[at]);
                sums[comptime!(at + 1)] = fma(factor, far, sums[comptime!(at + 1)]);
            }
        }
    }
}
