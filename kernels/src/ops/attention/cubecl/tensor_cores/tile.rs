//! Tiles between memory, shared memory and a plane's registers, and their products.

use cubecl::prelude::*;

use super::super::mask::{Sizes, sees};
use super::super::parts::{OUTSIDE, Rows};
use super::{UNITS, Variant};
use crate::cubecl::tensor_cores::{Half, Pair, Wide, left_rows, multiply, right_columns, right_rows};
use crate::masked::MASKED;

/// Masks scores of a plane's queries: keys outside of a row's range `begin` to `last`, and keys
/// past the end. `first_key` is the key of the lane's first column.
#[cube]
pub(super) fn hide(
    scores: &mut Array<Pair>,
    begin: &Array<i32>,
    last: &Array<i32>,
    first_key: u32,
    sizes: &Sizes,
    #[comptime] variant: Variant,
) {
    let blocks = comptime!(variant.columns / 8);
    #[unroll]
    for i in 0..comptime!(2 * variant.bands) {
        #[unroll]
        for block in 0..blocks {
            let index = comptime!(((i / 2) * blocks + block) * 2 + i % 2);
            let mut pair = scores[index];
            #[unroll]
            for j in 0..2usize {
                let key = first_key + comptime!((block * 8 + j) as u32);
                let score = select(sees(key, begin[i], last[i]), pair[j], MASKED);
                pair[j] = select(key < sizes.keys, score, OUTSIDE);
            }
            scores[index] = pair;
        }
    }
}

/// Reads a unit's share of a tile's rows, from row `first` on, with zeros past the last row.
#[cube]
pub(super) fn fetch<F: Float>(
    from: &Array<Wide<F>>,
    rows: &Rows,
    first: u32,
    part: &mut Array<Wide<F>>,
    #[comptime] count: usize,
    #[comptime] variant: Variant,
) {
    let wide = comptime!(variant.wide() as u32);
    #[unroll]
    for step in 0..comptime!(variant.share(count)) {
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
    #[comptime] variant: Variant,
) {
    let mut part = Array::<Wide<F>>::new(comptime!(variant.share(count)));
    fetch::<F>(from, rows, first, &mut part, count, variant);
    put::<F>(&part, tile, count, variant);
}

/// Writes a unit's share of a tile to shared memory.
#[cube]
pub(super) fn put<F: Float>(
    part: &Array<Wide<F>>,
    tile: &mut SharedMemory<Wide<F>>,
    #[comptime] count: usize,
    #[comptime] variant: Variant,
) {
    let wide = comptime!(variant.wide() as u32);
    let vectors = comptime!((count * variant.wide()) as u32);
    #[unroll]
    for step in 0..comptime!(variant.share(count)) {
        let at = UNIT_POS + comptime!((step * UNITS) as u32);
        let index = (at / wide * comptime!(variant.stride() as u32) + at % wide) as usize;
        // All units have a share, except in the last round.
        if comptime!((step + 1) * UNITS <= vectors as usize) || at < vectors {
            tile[index] = part[step];
        }
    }
}

/// A plane's rows of a tile, if kept in registers.
#[cube]
pub(super) fn hold<F: Float>(
    tile: &SharedMemory<Wide<F>>,
    plane_row: u32,
    #[comptime] variant: Variant,
) -> Array<Half<F>> {
    let blocks = comptime!(if variant.holds { variant.bands * variant.depth() } else { 0 });
    let mut held = Array::<Half<F>>::new(comptime!((4 * blocks).max(1)));
    #[unroll]
    for block in 0..blocks {
        let (band, column) = comptime!((block / variant.depth(), block % variant.depth()));
        let side = left_rows::<F>(tile, plane_row + comptime!(16 * band as u32), column, comptime!(variant.stride()));
        #[unroll]
        for i in 0..4usize {
            held[comptime!(4 * block + i)] = side[i];
        }
    }
    held
}

/// Adds the products of a plane's rows, held or in `left`, with the rows of `right` to a tile of
/// scores.
#[cube]
pub(super) fn dots<F: Float>(
    held: &Array<Half<F>>,
    left: &SharedMemory<Wide<F>>,
    plane_row: u32,
    right: &SharedMemory<Wide<F>>,
    scores: &mut Array<Pair>,
    #[comptime] variant: Variant,
) {
    let mut sides = Array::<Half<F>>::new(comptime!(4 * variant.bands));
    #[unroll]
    for block in 0..comptime!(variant.depth()) {
        #[unroll]
        for band in 0..comptime!(variant.bands) {
            if comptime!(variant.holds) {
                #[unroll]
                for i in 0..4usize {
                    sides[comptime!(4 * band + i)] = held[comptime!(4 * (band * variant.depth() + block) + i)];
                }
            } else {
                let side =
                    left_rows::<F>(left, plane_row + comptime!(16 * band as u32), block, comptime!(variant.stride()));
                #[unroll]
                for i in 0..4usize {
                    sides[comptime!(4 * band + i)] = side[i];
                }
            }
        }
        #[unroll]
        for row in 0..comptime!(variant.columns / 16) {
            let rows = right_rows::<F>(right, comptime!(16 * row), block, comptime!(variant.stride()));
            #[unroll]
            for band in 0..comptime!(variant.bands) {
                multiply::<F>(&sides, &rows, scores, band, comptime!((band * variant.columns / 8 + 2 * row) * 2));
            }
        }
    }
}

/// Adds the product of a plane's tile of scores with columns of `right`, from block `first_block`
/// on, to its accumulators.
#[cube]
pub(super) fn accumulate<F: Float>(
    scores: &Array<Pair>,
    right: &SharedMemory<Wide<F>>,
    sums: &mut Array<Pair>,
    first_block: u32,
    #[comptime] variant: Variant,
) {
    let mut sides = Array::<Half<F>>::new(comptime!(4 * variant.bands));
    #[unroll]
    for row in 0..comptime!(variant.columns / 16) {
        #[unroll]
        for i in 0..comptime!(4 * variant.bands) {
            let pair = scores[comptime!((i / 4 * variant.columns / 8 + 2 * row) * 2 + i % 4)];
            sides[i] = Half::<F>::cast_from(pair);
        }
        #[unroll]
        for column in 0..comptime!(variant.width()) {
            let block = first_block + comptime!(column as u32);
            // The last cube of a tile may have fewer columns.
            if comptime!(variant.width() * variant.slices == variant.depth())
                || block < comptime!(variant.depth() as u32)
            {
                let columns = right_columns::<F>(right, comptime!(16 * row), block, comptime!(variant.stride()));
                #[unroll]
                for band in 0..comptime!(variant.bands) {
                    multiply::<F>(&sides, &columns, sums, band, comptime!((band * variant.width() + column) * 4));
                }
            }
        }
    }
}

/// Stores a plane's accumulators, each row times its factor, to rows from `first` on and columns
/// from block `first_block` on.
#[cube]
pub(super) fn store<F: Float>(
    to: &mut Array<Half<F>>,
    rows: &Rows,
    first: u32,
    sums: &Array<Pair>,
    factors: &Array<f32>,
    first_block: u32,
    #[comptime] variant: Variant,
) {
    let lane = UNIT_POS % 32;
    #[unroll]
    for i in 0..comptime!(2 * variant.bands) {
        let (band, side) = comptime!((i / 2, i % 2));
        let row = first + lane / 4 + comptime!(i as u32 * 8);
        let factor = Pair::new(factors[i]);
        if row < rows.end {
            #[unroll]
            for block in 0..comptime!(2 * variant.width()) {
                let sum = sums[comptime!((band * 2 * variant.width() + block) * 2 + side)];
                let column = first_block * 8 + comptime!(4 * block as u32) + lane % 4;
                if column < comptime!(variant.head_dim as u32 / 2) {
                    to[(rows.at + row * rows.stride + column) as usize] = Half::<F>::cast_from(sum * factor);
                }
            }
        }
    }
}
