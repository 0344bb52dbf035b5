//! Grouped GEMM: each row times its expert's matrix, with the rows of an expert wherever they are.
//!
//! ```text
//! a tile: rows of one expert, 16 or 64            a unit: 1 or 4 rows x 4 columns of sums
//!         x 64 columns, 256 units                 16 of the inner dimension per step, in shared memory
//! ```
//!
//! Sums are f32. A row is gathered by its slot when it is loaded, and stored at its slot.

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::sort::Order;
use crate::cubecl::{array, contiguous, empty, grid, launch, rows, vector_width};
use crate::ops::weight::cubecl::{CubeQuantized, four_weights};
use crate::quant::Format;

const UNITS: u32 = 256;
/// Columns of a tile.
const COLUMNS: u32 = 64;
/// Inner dimension per step.
const DEPTH: u32 = 16;

/// The stacked matrices of all experts, `[n_experts * rows, columns]`.
#[expect(clippy::large_enum_variant, reason = "made and taken apart within one call")]
#[derive(Clone, Debug)]
pub(super) enum CubeMatrix<R: CubeRuntime> {
    Float(CubeTensor<R>),
    Quantized(CubeQuantized<R>),
}

impl<R: CubeRuntime> CubeMatrix<R> {
    fn dims(&self) -> [usize; 2] {
        match self {
            Self::Float(weight) => [weight.meta.shape()[0], weight.meta.shape()[1]],
            Self::Quantized(weight) => weight.dims,
        }
    }
}

/// Compile-time values of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Variant {
    /// Rows of a unit.
    rows: u32,
    /// Whether rows are multiplied by the matrix itself, and not by its transpose.
    back: bool,
    biased: bool,
    /// Whether rows are multiplied by their weights.
    weighted: bool,
    /// How the matrix is stored, if not as floats.
    format: Option<Format>,
}

/// What [`grouped_product`] computes besides the product.
#[derive(Clone, Debug)]
pub(super) struct Extra<R: CubeRuntime> {
    /// Added to each row, `[n_experts * outputs]`, by its expert.
    pub(super) bias: Option<CubeTensor<R>>,
    /// Multiplies each row, `[slots]`, by its slot.
    pub(super) weights: Option<CubeTensor<R>>,
}

/// For each slot the row `slot / share` of `x`, times the matrix of its expert, transposed unless
/// `back`: `[slots, outputs]` in the dtype of `x`, in the order of slots.
pub(super) fn grouped_product<R: CubeRuntime>(
    (x, share): (CubeTensor<R>, usize),
    order: &Order<R>,
    (matrix, n_experts, back): (CubeMatrix<R>, usize, bool),
    extra: Extra<R>,
) -> CubeTensor<R> {
    let (x, x_stride) = rows(x);
    let slots = order.slots.meta.shape()[0];
    let [all, columns] = matrix.dims();
    let each = all / n_experts;
    let (inner, outputs) = if back { (each, columns) } else { (columns, each) };
    let out = empty(&x, [slots, outputs], x.dtype);
    let (weight, scales, format, words, numbers) = match matrix {
        CubeMatrix::Float(weight) => {
            let weight = contiguous(weight);
            (weight.clone(), weight, None, 0, 0)
        }
        CubeMatrix::Quantized(CubeQuantized { packed, scales, format, .. }) => {
            let packed = contiguous(packed);
            let words = packed.meta.shape()[1];
            let numbers = format.layout(columns).map_or(0, |layout| layout.scales);
            (packed.clone(), scales.map_or(packed, contiguous), Some(format), words, numbers)
        }
    };
    // Units load and store four elements, in vectors of at most as many.
    let wide = |x: &CubeTensor<R>, lengths: &[usize]| vector_width(&[x], lengths).min(4);
    let (x_width, out_width) = (wide(&x, &[inner, x_stride]), wide(&out, &[outputs]));
    let weight_width = if format.is_some() { 1 } else { wide(&weight, &[columns]) };
    let (biased, weighted) = (extra.bias.is_some(), extra.weights.is_some());
    let bias = extra.bias.map_or_else(|| out.clone(), contiguous);
    let weights = extra.weights.map_or_else(|| out.clone(), contiguous);
    // Without a format the words stand for nothing, and with one the floats do.
    let floats = if format.is_some() { out.clone() } else { weight.clone() };
    let variant = Variant { rows: order.tile_rows as u32 / 16, back, biased, weighted, format };
    let across = outputs.div_ceil(COLUMNS as usize);
    // SAFETY: a tile has the places of one expert, and writes the rows of their slots, which no
    // other tile has, guarded by the expert's last place and the number of outputs. Reads stay
    // within the rows of slots and experts, and are guarded along the inner dimension.
    unsafe {
        launch!(
            grouped_product_kernel::GroupedProductKernel,
            &x.client,
            grid(order.most_tiles * across),
            CubeDim::new_1d(UNITS),
            [NA = x_width, NB = weight_width, NO = out_width],
            [F = x.dtype, W = floats.dtype, V = bias.dtype, U = weights.dtype],
            [
                x: Array<Vector<grouped_product_kernel::F, grouped_product_kernel::NA>> = array(&x),
                weight: Array<Vector<grouped_product_kernel::W, grouped_product_kernel::NB>> = array(&floats),
                packed: Array<u32> = array(&weight),
                scales: Array<f32> = array(&scales),
                bias: Array<grouped_product_kernel::V> = array(&bias),
                weights: Array<grouped_product_kernel::U> = array(&weights),
                order: Array<u32> = array(&order.slots),
                starts: Array<u32> = array(&order.starts),
                tiles: Array<u32> = array(&order.tiles),
                out: Array<Vector<grouped_product_kernel::F, grouped_product_kernel::NO>> = array(&out),
                most_tiles: u32 = order.most_tiles as u32,
                n_experts: u32 = n_experts as u32,
                share: u32 = share as u32,
                inner: u32 = inner as u32,
                outputs: u32 = outputs as u32,
                x_stride: u32 = x_stride as u32,
                words: u32 = words as u32,
                numbers: u32 = numbers as u32,
            ],
            [variant: Variant = variant]
        );
    }
    out
}

#[cube(launch_unchecked)]
fn grouped_product_kernel<F: Float, W: Float, V: Float, U: Float, NA: Size, NB: Size, NO: Size>(
    x: &Array<Vector<F, NA>>,
    weight: &Array<Vector<W, NB>>,
    packed: &Array<u32>,
    scales: &Array<f32>,
    bias: &Array<V>,
    weights: &Array<U>,
    order: &Array<u32>,
    starts: &Array<u32>,
    tiles: &Array<u32>,
    out: &mut Array<Vector<F, NO>>,
    most_tiles: u32,
    n_experts: u32,
    share: u32,
    inner: u32,
    outputs: u32,
    x_stride: u32,
    words: u32,
    numbers: u32,
    #[comptime] variant: Variant,
    #[define(F)] _dtype: StorageType,
    #[define(W)] _weight_dtype: StorageType,
    #[define(V)] _bias_dtype: StorageType,
    #[define(U)] _weights_dtype: StorageType,
) {
    let across = outputs.div_ceil(COLUMNS);
    let tile = CUBE_POS as u32 / across;
    if tile >= most_tiles {
        terminate!();
    }
    let expert = tiles[(4 * tile) as usize];
    if expert >= n_experts {
        terminate!();
    }
    let first_column = CUBE_POS as u32 % across * COLUMNS;
    let first = tiles[(4 * tile + 1) as usize];
    let end = starts[(expert + 1) as usize];
    let tile_rows = comptime!(16 * variant.rows);

    let mut a_tile = SharedMemory::<f32>::new(comptime!((DEPTH * tile_rows) as usize));
    let mut b_tile = SharedMemory::<f32>::new(comptime!((DEPTH * COLUMNS) as usize));
    let mut sums = Array::<f32>::new(comptime!((4 * variant.rows) as usize));
    #[unroll]
    for at in 0..comptime!((4 * variant.rows) as usize) {
        sums[at] = 0.0f32;
    }
    // The row that a unit loads; past the expert's last one, that one again.
    let load_row = UNIT_POS / 4;
    let loads_a = load_row < tile_rows;
    let load_place = min(first + min(load_row, tile_rows - 1), end - 1);
    let x_row = order[load_place as usize] / share * x_stride;
    // A unit's rows and columns of the tile.
    let row = UNIT_POS / 16 * variant.rows;
    let column = UNIT_POS % 16 * 4;

    for step in range_stepped(0u32, inner, DEPTH) {
        if loads_a {
            let depth = UNIT_POS % 4 * 4;
            let quad = fetch::<F, NA>(x, x_row, step + depth, inner);
            #[unroll]
            for i in 0..4u32 {
                a_tile[((depth + i) * tile_rows + load_row) as usize] = quad[i as usize];
            }
        }
        if comptime!(variant.back) {
            let depth = UNIT_POS / 16;
            let at = step + depth;
            let mut quad = Vector::<f32, Const<4>>::new(0.0f32);
            if at < inner {
                let line = expert * inner + at;
                quad = weights_of::<W, NB>(
                    weight,
                    packed,
                    scales,
                    line,
                    first_column + column,
                    outputs,
                    words,
                    numbers,
                    variant.format,
                );
            }
            #[unroll]
            for i in 0..4u32 {
                b_tile[(depth * COLUMNS + column + i) as usize] = quad[i as usize];
            }
        } else {
            let depth = UNIT_POS % 4 * 4;
            let own = UNIT_POS / 4;
            let line = expert * outputs + min(first_column + own, outputs - 1);
            let quad =
                weights_of::<W, NB>(weight, packed, scales, line, step + depth, inner, words, numbers, variant.format);
            #[unroll]
            for i in 0..4u32 {
                b_tile[((depth + i) * COLUMNS + own) as usize] = quad[i as usize];
            }
        }
        sync_cube();
        multiply(&a_tile, &b_tile, &mut sums, row, column, tile_rows, variant.rows);
        sync_cube();
    }

    #[unroll]
    for i in 0..variant.rows {
        let place = first + row + i;
        if place < end {
            let slot = order[place as usize];
            let mut scale = 1.0f32;
            if comptime!(variant.weighted) {
                scale = f32::cast_from(weights[slot as usize]);
            }
            let width = NO::value();
            #[unroll]
            for group in 0..comptime!(4 / width) {
                let begin = first_column + column + comptime!((group * width) as u32);
                if begin < outputs {
                    let mut vector = Vector::<F, NO>::empty();
                    #[unroll]
                    for lane in 0..width {
                        let mut value = sums[comptime!((4 * i) as usize + group * width + lane)];
                        if comptime!(variant.biased) {
                            value += f32::cast_from(bias[(expert * outputs + begin + comptime!(lane as u32)) as usize]);
                        }
                        vector[lane] = F::cast_from(value * scale);
                    }
                    out[((slot * outputs + begin) / comptime!(width as u32)) as usize] = vector;
                }
            }
        }
    }
}

/// Four elements of a row that begins at `row`, from `begin` on; those from `end` on are zero.
#[cube]
fn fetch<F: Float, N: Size>(from: &Array<Vector<F, N>>, row: u32, begin: u32, end: u32) -> Vector<f32, Const<4>> {
    let width = N::value();
    let mut quad = Vector::<f32, Const<4>>::new(0.0f32);
    #[unroll]
    for group in 0..comptime!(4 / width) {
        let at = begin + comptime!((group * width) as u32);
        if at < end {
            let vector = from[((row + at) / comptime!(width as u32)) as usize];
            #[unroll]
            for lane in 0..width {
                quad[comptime!(group * width + lane)] = f32::cast_from(vector[lane]);
            }
        }
    }
    quad
}

/// Four weights of row `line`, from column `begin` on; those from `end` on are zero.
#[cube]
fn weights_of<W: Float, N: Size>(
    weight: &Array<Vector<W, N>>,
    packed: &Array<u32>,
    scales: &Array<f32>,
    line: u32,
    begin: u32,
    end: u32,
    words: u32,
    numbers: u32,
    #[comptime] format: Option<Format>,
) -> Vector<f32, Const<4>> {
    if comptime!(format.is_some()) {
        let mut quad = Vector::<f32, Const<4>>::new(0.0f32);
        if begin < end {
            quad = four_weights(packed, scales, line, begin / 4, words, numbers, comptime!(format.expect("a format")));
        }
        quad
    } else {
        fetch::<W, N>(weight, line * end, begin, end)
    }
}

/// Adds the products of a step to a unit's sums.
#[cube]
fn multiply(
    a_tile: &SharedMemory<f32>,
    b_tile: &SharedMemory<f32>,
    sums: &mut Array<f32>,
    row: u32,
    column: u32,
    #[comptime] tile_rows: u32,
    #[comptime] unit_rows: u32,
) {
    #[unroll]
    for depth in 0..DEPTH {
        let mut b = Array::<f32>::new(4usize);
        #[unroll]
        for j in 0..4u32 {
            b[j as usize] = b_tile[(depth * COLUMNS + column + j) as usize];
        }
        #[unroll]
        for i in 0..unit_rows {
            let a = a_tile[(depth * tile_rows + row + i) as usize];
            #[unroll]
            for j in 0..4usize {
                let at = comptime!((4 * i) as usize + j);
                sums[at] = fma(a, b[j], sums[at]);
            }
        }
    }
}

/// Of each expert, over its slots, `grad^T * x` with the rows `slot / share` of each: f32
/// `[n_experts * rows, columns]`, added to `sum` if given, in place if it is not shared.
pub(super) fn grouped_outer<R: CubeRuntime>(
    (grad, grad_share): (CubeTensor<R>, usize),
    (x, x_share): (CubeTensor<R>, usize),
    order: &Order<R>,
    sum: Option<CubeTensor<R>>,
) -> CubeTensor<R> {
    let ((grad, grad_stride), (x, x_stride)) = (rows(grad), rows(x));
    let (outputs, columns) = (grad.meta.shape()[1], x.meta.shape()[1]);
    let n_experts = order.starts.meta.shape()[0] - 1;
    let adds = sum.is_some();
    let out = match sum.map(contiguous) {
        Some(sum) if sum.can_mut() => sum,
        // A copy may have padded rows.
        Some(sum) => contiguous(sum.copy()),
        None => empty(&grad, [n_experts * outputs, columns], DType::F32),
    };
    let tiles = n_experts * outputs.div_ceil(COLUMNS as usize) * columns.div_ceil(COLUMNS as usize);
    // SAFETY: a cube writes its own tile of an expert's matrix, guarded by its sizes, and reads rows
    // of slots at columns that are guarded, too.
    unsafe {
        launch!(
            grouped_outer_kernel::GroupedOuterKernel,
            &grad.client,
            grid(tiles),
            CubeDim::new_1d(UNITS),
            [],
            [F = grad.dtype, G = x.dtype],
            [
                grad: Array<grouped_outer_kernel::F> = array(&grad),
                x: Array<grouped_outer_kernel::G> = array(&x),
                order: Array<u32> = array(&order.slots),
                starts: Array<u32> = array(&order.starts),
                out: Array<f32> = array(&out),
                n_experts: u32 = n_experts as u32,
                outputs: u32 = outputs as u32,
                columns: u32 = columns as u32,
                grad_stride: u32 = grad_stride as u32,
                x_stride: u32 = x_stride as u32,
                grad_share: u32 = grad_share as u32,
                x_share: u32 = x_share as u32,
            ],
            [adds: bool = adds]
        );
    }
    out
}

#[cube(launch_unchecked)]
fn grouped_outer_kernel<F: Float, G: Float>(
    grad: &Array<F>,
    x: &Array<G>,
    order: &Array<u32>,
    starts: &Array<u32>,
    out: &mut Array<f32>,
    n_experts: u32,
    outputs: u32,
    columns: u32,
    grad_stride: u32,
    x_stride: u32,
    grad_share: u32,
    x_share: u32,
    #[comptime] adds: bool,
    #[define(F)] _dtype: StorageType,
    #[define(G)] _x_dtype: StorageType,
) {
    let (down, across) = (outputs.div_ceil(COLUMNS), columns.div_ceil(COLUMNS));
    let expert = CUBE_POS as u32 / (down * across);
    if expert >= n_experts {
        terminate!();
    }
    let first_row = CUBE_POS as u32 / across % down * COLUMNS;
    let first_column = CUBE_POS as u32 % across * COLUMNS;
    let (begin, end) = (starts[expert as usize], starts[(expert + 1) as usize]);

    let mut a_tile = SharedMemory::<f32>::new(comptime!((DEPTH * COLUMNS) as usize));
    let mut b_tile = SharedMemory::<f32>::new(comptime!((DEPTH * COLUMNS) as usize));
    let mut sums = Array::<f32>::new(16usize);
    #[unroll]
    for at in 0..16usize {
        sums[at] = 0.0f32;
    }
    let row = UNIT_POS / 16 * 4;
    let column = UNIT_POS % 16 * 4;
    for step in range_stepped(begin, end, DEPTH) {
        let depth = UNIT_POS / COLUMNS;
        let own = UNIT_POS % COLUMNS;
        #[unroll]
        for part in 0..comptime!(DEPTH * COLUMNS / UNITS) {
            let depth = depth + comptime!(part * UNITS / COLUMNS);
            let place = step + depth;
            let slot = order[min(place, end - 1) as usize];
            let mut a = 0.0f32;
            let mut b = 0.0f32;
            if place < end && first_row + own < outputs {
                a = f32::cast_from(grad[(slot / grad_share * grad_stride + first_row + own) as usize]);
            }
            if place < end && first_column + own < columns {
                b = f32::cast_from(x[(slot / x_share * x_stride + first_column + own) as usize]);
            }
            a_tile[(depth * COLUMNS + own) as usize] = a;
            b_tile[(depth * COLUMNS + own) as usize] = b;
        }
        sync_cube();
        multiply(&a_tile, &b_tile, &mut sums, row, column, COLUMNS, 4u32);
        sync_cube();
    }
    #[unroll]
    for i in 0..4u32 {
        let row = first_row + row + i;
        if row < outputs {
            #[unroll]
            for j in 0..4u32 {
                let column = first_column + column + j;
                if column < columns {
                    let at = ((expert * outputs + row) * columns + column) as usize;
                    let mut value = sums[comptime!((4 * i + j) as usize)];
                    if comptime!(adds) {
                        value += out[at];
                    }
                    out[at] = value;
                }
            }
        }
    }
}
