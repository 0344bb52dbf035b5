//! Tiles between memory, shared memory and the registers of a plane, and their products.

use cubecl::prelude::*;

use super::super::mask::{HIDDEN, Sizes, sees};
use super::super::parts::{OUTSIDE, Rows};
use super::{Plan, UNITS};
use crate::cubecl::tensor_cores::{Half, Pair, Wide, left_rows, multiply, right_columns, right_rows};

/// Hides scores of a plane's queries: those of keys that a row, of which `last` holds the last keys, does not see, and
/// those of keys past the last one. `first_key` is that of the lane's first column.
#[cube]
pub(super) fn hide(scores: &mut Array<Pair>, last: &Array<i32>, first_key: u32, sizes: &Sizes, #[comptime] plan: Plan) {
    let blocks = comptime!(plan.columns / 8);
    #[unroll]
    for i in 0..comptime!(2 * plan.bands) {
        #[unroll]
        for block in 0..blocks {
            let index = comptime!(((i / 2) * blocks + block) * 2 + i % 2);
            let mut pair = scores[index];
            #[unroll]
            for j in 0..2usize {
                let key = first_key + comptime!((block * 8 + j) as u32);
                let score = select(sees(key, last[i], sizes), pair[j], HIDDEN);
                pair[j] = select(key < sizes.keys, score, OUTSIDE);
            }
            scores[index] = pair;
        }
    }
}

/// Reads a unit's share of a tile's rows, from row `first` on, with zeros after the last row.
#[cube]
pub(super) fn fetch<F: Float>(
    from: &Array<Wide<F>>,
    rows: &Rows,
    first: u32,
    part: &mut Array<Wide<F>>,
    #[comptime] count: usize,
    #[comptime] plan: Plan,
) {
    let wide = comptime!(plan.wide() as u32);
    #[unroll]
    for step in 0..comptime!(plan.share(count)) {
        let at = UNIT_POS + comptime!((step * UNITS) as u32);
        let row = first + at / wide;
        part[step] = Wide::<F>::cast_from(0.0f32);
        if row < rows.end {
            part[step] = from[(rows.at + row * rows.stride + at % wide) as usize];
        }
    }
}

/// Copies a tile from memory to shared memory.
#[cube]
pub(super) fn load<F: Float>(
    from: &Array<Wide<F>>,
    rows: &Rows,
    first: u32,
    tile: &mut SharedMemory<Wide<F>>,
    #[comptime] count: usize,
    #[comptime] plan: Plan,
) {
    let mut part = Array::<Wide<F>>::new(comptime!(plan.share(count)));
    fetch::<F>(from, rows, first, &mut part, count, plan);
    put::<F>(&part, tile, count, plan);
}

/// Writes a unit's share of a tile to shared memory.
#[cube]
pub(super) fn put<F: Float>(
    part: &Array<Wide<F>>,
    tile: &mut SharedMemory<Wide<F>>,
    #[comptime] count: usize,
    #[comptime] plan: Plan,
) {
    let wide = comptime!(plan.wide() as u32);
    let vectors = comptime!((count * plan.wide()) as u32);
    #[unroll]
    for step in 0..comptime!(plan.share(count)) {
        let at = UNIT_POS + comptime!((step * UNITS) as u32);
        let index = (at / wide * comptime!(plan.stride() as u32) + at % wide) as usize;
        // Every unit has its share but in the last round.
        if comptime!((step + 1) * UNITS <= vectors as usize) || at < vectors {
            tile[index] = part[step];
        }
    }
}

/// A plane's rows of a tile in registers, where they are kept there.
#[cube]
pub(super) fn hold<F: Float>(tile: &SharedMemory<Wide<F>>, plane_row: u32, #[comptime] plan: Plan) -> Array<Half<F>> {
    let blocks = comptime!(if plan.holds { plan.bands * plan.depth() } else { 0 });
    let mut held = Array::<Half<F>>::new(comptime!((4 * blocks).max(1)));
    #[unroll]
    for block in 0..blocks {
        let (band, column) = comptime!((block / plan.depth(), block % plan.depth()));
        let side = left_rows::<F>(tile, plane_row + comptime!(16 * band as u32), column, comptime!(plan.stride()));
        #[unroll]
        for i in 0..4usize {
            held[comptime!(4 * block + i)] = side[i];
        }
    }
    held
}

/// Adds to a tile of scores the products of a plane's rows, held or in `left`, with the rows of `right`.
#[cube]
pub(super) fn dots<F: Float>(
    held: &Array<Half<F>>,
    left: &SharedMemory<Wide<F>>,
    plane_row: u32,
    right: &SharedMemory<Wide<F>>,
    scores: &mut Array<Pair>,
    #[comptime] plan: Plan,
) {
    let mut sides = Array::<Half<F>>::new(comptime!(4 * plan.bands));
    #[unroll]
    for block in 0..comptime!(plan.depth()) {
        #[unroll]
        for band in 0..comptime!(plan.bands) {
            if comptime!(plan.holds) {
                #[unroll]
                for i in 0..4usize {
                    sides[comptime!(4 * band + i)] = held[comptime!(4 * (band * plan.depth() + block) + i)];
                }
            } else {
                let side =
                    left_rows::<F>(left, plane_row + comptime!(16 * band as u32), block, comptime!(plan.stride()));
                #[unroll]
                for i in 0..4usize {
                    sides[comptime!(4 * band + i)] = side[i];
                }
            }
        }
        #[unroll]
        for row in 0..comptime!(plan.columns / 16) {
            let rows = right_rows::<F>(right, comptime!(16 * row), block, comptime!(plan.stride()));
            #[unroll]
            for band in 0..comptime!(plan.bands) {
                multiply::<F>(&sides, &rows, scores, band, comptime!((band * plan.columns / 8 + 2 * row) * 2));
            }
        }
    }
}

/// Adds to a plane's accumulators the product of its tile of scores with the columns of `right`, from block
/// `first_block` on.
#[cube]
pub(super) fn accumulate<F: Float>(
    scores: &Array<Pair>,
    right: &SharedMemory<Wide<F>>,
    sums: &mut Array<Pair>,
    first_block: u32,
    #[comptime] plan: Plan,
) {
    let mut sides = Array::<Half<F>>::new(comptime!(4 * plan.bands));
    #[unroll]
    for row in 0..comptime!(plan.columns / 16) {
        #[unroll]
        for i in 0..comptime!(4 * plan.bands) {
            let pair = scores[comptime!((i / 4 * plan.columns / 8 + 2 * row) * 2 + i % 4)];
            sides[i] = Half::<F>::cast_from(pair);
        }
        #[unroll]
        for column in 0..comptime!(plan.width()) {
            let block = first_block + comptime!(column as u32);
            // The last cube of a tile may have fewer columns.
            if comptime!(plan.width() * plan.slices == plan.depth()) || block < comptime!(plan.depth() as u32) {
                let columns = right_columns::<F>(right, comptime!(16 * row), block, comptime!(plan.stride()));
                #[unroll]
                for band in 0..comptime!(plan.bands) {
                    multiply::<F>(&sides, &columns, sums, band, comptime!((band * plan.width() + column) * 4));
                }
            }
        }
    }
}

/// Stores a plane's accumulators, each row times its factor, in the rows from `first` on and the columns from block
/// `first_block` on.
#[cube]
pub(super) fn store<F: Float>(
    to: &mut Array<Half<F>>,
    rows: &Rows,
    first: u32,
    sums: &Array<Pair>,
    factors: &Array<f32>,
    first_block: u32,
    #[comptime] plan: Plan,
) {
    let lane = UNIT_POS % 32;
    #[unroll]
    for i in 0..comptime!(2 * plan.bands) {
        let (band, side) = comptime!((i / 2, i % 2));
        let row = first + lane / 4 + comptime!(i as u32 * 8);
        let factor = Pair::new(factors[i]);
        if row < rows.end {
            #[unroll]
            for block in 0..comptime!(2 * plan.width()) {
                let sum = sums[comptime!((band * 2 * plan.width() + block) * 2 + side)];
                let column = first_block * 8 + comptime!(4 * block as u32) + lane % 4;
                if column < comptime!(plan.head_dim as u32 / 2) {
                    to[(rows.at + row * rows.stride + column) as usize] = Half::<F>::cast_from(sum * factor);
                }
            }
        }
    }
}
