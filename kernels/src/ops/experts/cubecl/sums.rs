//! The sums of each expert's rows, the gradients of biases: first over each tile of rows, then over
//! an expert's tiles, each in order.

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::sort::Order;
use crate::cubecl::{array, contiguous, empty, grid, launch, rows, vector_width};

const UNITS: u32 = 128;

/// Of each expert the sum over its slots of the rows `slot / share` of `x`, each times the slot's
/// weight if given: f32 `[n_experts * columns]`. Rows are those of places if there is no share.
pub(super) fn grouped_sums<R: CubeRuntime>(
    (x, share): (CubeTensor<R>, Option<usize>),
    weights: Option<CubeTensor<R>>,
    order: &Order<R>,
) -> CubeTensor<R> {
    let (x, stride) = rows(x);
    let (columns, n_experts) = (x.meta.shape()[1], order.starts.meta.shape()[0] - 1);
    let partial = empty(&x, [order.most_tiles, columns], DType::F32);
    let weighted = weights.is_some();
    let weights = weights.map_or_else(|| x.clone(), contiguous);
    let vector = vector_width(&[&x, &partial], &[columns, stride]).min(4);
    let across = (columns / vector).div_ceil(UNITS as usize);
    // SAFETY: a unit writes its own columns of its tile, guarded by their numbers, and reads rows of
    // the slots or places of that tile.
    unsafe {
        launch!(
            sum_tiles_kernel::SumTilesKernel,
            &x.client,
            grid(order.most_tiles * across),
            CubeDim::new_1d(UNITS),
            [N = vector],
            [F = x.dtype, U = weights.dtype],
            [
                x: Array<Vector<sum_tiles_kernel::F, sum_tiles_kernel::N>> = array(&x),
                weights: Array<sum_tiles_kernel::U> = array(&weights),
                order: Array<u32> = array(&order.slots),
                starts: Array<u32> = array(&order.starts),
                tiles: Array<u32> = array(&order.tiles),
                partial: Array<Vector<f32, sum_tiles_kernel::N>> = array(&partial),
                n_experts: u32 = n_experts as u32,
                most_tiles: u32 = order.most_tiles as u32,
                tile_rows: u32 = order.tile_rows as u32,
                columns: u32 = (columns / vector) as u32,
                stride: u32 = (stride / vector) as u32,
                share: u32 = share.unwrap_or(1) as u32,
            ],
            [weighted: bool = weighted, sorted: bool = share.is_none()]
        );
    }
    let out = empty(&x, [n_experts * columns], DType::F32);
    // SAFETY: a unit writes its own column of its expert, and reads those of the expert's tiles, of
    // which each was written.
    unsafe {
        sum_experts_kernel::launch_unchecked(
            &x.client,
            grid((n_experts * columns).div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            array(&partial),
            array(&order.starts),
            array(&out),
            n_experts as u32,
            order.tile_rows as u32,
            columns as u32,
        );
    }
    out
}

#[cube(launch_unchecked)]
fn sum_tiles_kernel<F: Float, U: Float, N: Size>(
    x: &Array<Vector<F, N>>,
    weights: &Array<U>,
    order: &Array<u32>,
    starts: &Array<u32>,
    tiles: &Array<u32>,
    partial: &mut Array<Vector<f32, N>>,
    n_experts: u32,
    most_tiles: u32,
    tile_rows: u32,
    columns: u32,
    stride: u32,
    share: u32,
    #[comptime] weighted: bool,
    #[comptime] sorted: bool,
    #[define(F)] _dtype: StorageType,
    #[define(U)] _weights_dtype: StorageType,
) {
    let across = columns.div_ceil(UNITS);
    let tile = CUBE_POS as u32 / across;
    let column = CUBE_POS as u32 % across * UNITS + UNIT_POS;
    if tile >= most_tiles || column >= columns {
        terminate!();
    }
    let expert = tiles[(4 * tile) as usize];
    if expert >= n_experts {
        terminate!();
    }
    let first = tiles[(4 * tile + 1) as usize];
    let end = min(first + tile_rows, starts[(expert + 1) as usize]);
    let mut sum = Vector::<f32, N>::new(0.0f32);
    for place in first..end {
        let mut row = place;
        let mut slot = place;
        if comptime!(weighted || !sorted) {
            slot = order[place as usize];
        }
        if comptime!(!sorted) {
            row = slot / share;
        }
        let mut value = Vector::<f32, N>::cast_from(x[(row * stride + column) as usize]);
        if weighted {
            value *= Vector::new(f32::cast_from(weights[slot as usize]));
        }
        sum += value;
    }
    partial[(tile * columns + column) as usize] = sum;
}

#[cube(launch_unchecked)]
fn sum_experts_kernel(
    partial: &Array<f32>,
    starts: &Array<u32>,
    out: &mut Array<f32>,
    n_experts: u32,
    tile_rows: u32,
    columns: u32,
) {
    let at = ABSOLUTE_POS as u32;
    if at >= n_experts * columns {
        terminate!();
    }
    let expert = at / columns;
    let mut first = 0u32;
    for before in 0..expert {
        first += (starts[(before + 1) as usize] - starts[before as usize]).div_ceil(tile_rows);
    }
    let tiles = (starts[(expert + 1) as usize] - starts[expert as usize]).div_ceil(tile_rows);
    let mut sum = 0.0f32;
    for tile in first..first + tiles {
        sum += partial[(tile * columns + at % columns) as usize];
    }
    out[at as usize] = sum;
}
