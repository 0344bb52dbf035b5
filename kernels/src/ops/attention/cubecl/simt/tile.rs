//! Tiles between memory, shared memory and the registers of a unit, and their products.

use cubecl::prelude::*;

use super::super::mask::Sizes;
use super::super::parts::{Rows, kept};
use super::super::softcap::{capped, slope};
use super::{Quad, Variant};
use crate::masked::MASKED;
use crate::random::cubecl::Rounds;

/// From a score and the gradient of its dropped probability: the dropped probability, and the
/// score's gradient.
#[cube]
pub(super) fn score_gradient(
    score: f32,
    d_dropped: f32,
    visible: bool,
    inside: bool,
    log_sum_exp: f32,
    delta: f32,
    bits: u32,
    key: u32,
    sizes: &Sizes,
    rounds: &Rounds,
    #[comptime] drops: bool,
) -> (f32, f32) {
    let limited = capped(score * sizes.scale, sizes.softcap);
    let score = select(visible, limited, MASKED);
    let probability = select(inside, (score - log_sum_exp).exp(), 0.0f32);
    let mut dropped = probability;
    let mut d_probability = d_dropped;
    if drops {
        let factor = kept(bits, key, sizes, rounds);
        dropped *= factor;
        d_probability *= factor;
    }
    (dropped, probability * (d_probability - delta) * sizes.scale * slope(limited, sizes.softcap))
}

#[cube]
pub(super) fn clear(scores: &mut Array<f32>) {
    #[unroll]
    for at in 0..16usize {
        scores[at] = 0.0f32;
    }
}

/// Accumulators: four rows of four elements of each slice.
#[cube]
pub(super) fn zeroed(#[comptime] slices: usize) -> Array<Quad> {
    let mut sums = Array::<Quad>::new(comptime!(slices * 4));
    #[unroll]
    for at in 0..comptime!(slices * 4) {
        sums[at] = Quad::new(0.0f32);
    }
    sums
}

/// The position of a slice's row in shared memory. Columns of a unit's block come from four rows of
/// a slice, spread so that neighbouring units read neighbouring rows, whose padding avoids bank
/// conflicts.
#[cube]
pub(super) fn slot(row: u32, #[comptime] spread: bool, #[comptime] variant: Variant) -> u32 {
    let side = comptime!(variant.side as u32);
    if spread { (row % 4 * side + row / 4) * (side + 1) } else { row * (side + 1) }
}

/// Loads a slice of a tile's rows, from row `first` on, with zeros after the last row and the
/// head's last element.
#[cube]
pub(super) fn load<F: Float, N: Size>(
    from: &Array<Vector<F, N>>,
    rows: &Rows,
    first: u32,
    to: &mut SharedMemory<Quad>,
    slice: u32,
    #[comptime] spread: bool,
    #[comptime] variant: Variant,
) {
    let side = comptime!(variant.side as u32);
    let head_dim = comptime!(variant.head_dim as u32);
    let lanes = N::value();
    let width = comptime!(lanes as u32);
    let x = UNIT_POS % side;
    let y = UNIT_POS / side;
    let column = slice * comptime!(4 * side) + x * 4;
    #[unroll]
    for step in 0..4u32 {
        let row = y + step * side;
        let mut quad = Quad::new(0.0f32);
        if first + row < rows.end {
            let at = rows.at + (first + row) * rows.stride + column / width;
            #[unroll]
            for part in 0..comptime!(4 / width) {
                if column + part * width < head_dim {
                    let vector = from[(at + part) as usize];
                    #[unroll]
                    for lane in 0..width {
                        quad[comptime!((part * width + lane) as usize)] = f32::cast_from(vector[lane as usize]);
                    }
                }
            }
        }
        to[(slot(row, spread, variant) + x) as usize] = quad;
    }
}

/// Stores a tile's accumulators in its rows, from row `first` on.
#[cube]
pub(super) fn store<F: Float, N: Size>(
    to: &mut Array<Vector<F, N>>,
    rows: &Rows,
    first: u32,
    sums: &Array<Quad>,
    #[comptime] variant: Variant,
) {
    let side = comptime!(variant.side as u32);
    let head_dim = comptime!(variant.head_dim as u32);
    let lanes = N::value();
    let width = comptime!(lanes as u32);
    let x = UNIT_POS % side;
    let y = UNIT_POS / side;
    #[unroll]
    for i in 0..4u32 {
        let row = first + y * 4 + i;
        if row < rows.end {
            #[unroll]
            for slice in 0..comptime!(variant.slices() as u32) {
                let column = slice * comptime!(4 * side) + x * 4;
                let at = rows.at + row * rows.stride + column / width;
                let quad = sums[comptime!((slice * 4 + i) as usize)];
                #[unroll]
                for part in 0..comptime!(4 / width) {
                    if column + part * width < head_dim {
                        let mut vector = Vector::<F, N>::empty();
                        #[unroll]
                        for lane in 0..width {
                            vector[lane as usize] = F::cast_from(quad[comptime!((part * width + lane) as usize)]);
                        }
                        to[(at + part) as usize] = vector;
                    }
                }
            }
        }
    }
}

/// Adds to a unit's block of scores the products of its rows, with the unit's columns, over a
/// slice.
#[cube]
pub(super) fn dots(
    rows: &SharedMemory<Quad>,
    columns: &SharedMemory<Quad>,
    scores: &mut Array<f32>,
    slice: u32,
    #[comptime] variant: Variant,
) {
    let side = comptime!(variant.side as u32);
    let depth = min(comptime!(variant.head_dim.div_ceil(4) as u32) - slice * side, side);
    let x = UNIT_POS % side;
    let y = UNIT_POS / side;
    let mut right = Array::<Quad>::new(4usize);
    for at in 0..depth {
        #[unroll]
        for j in 0..4usize {
            right[j] = columns[(slot(x * 4 + j as u32, true, variant) + at) as usize];
        }
        #[unroll]
        for i in 0..4usize {
            let left = rows[(slot(y * 4 + i as u32, false, variant) + at) as usize];
            #[unroll]
            for j in 0..4usize {
                let other = right[j];
                let mut sum = scores[i * 4 + j];
                #[unroll]
                for lane in 0..4usize {
                    sum += left[lane] * other[lane];
                }
                scores[i * 4 + j] = sum;
            }
        }
    }
}

/// Writes a unit's block to the tile that all units read.
#[cube]
pub(super) fn write_tile(block: &Array<f32>, tile: &mut SharedMemory<Quad>, #[comptime] variant: Variant) {
    let side = comptime!(variant.side as u32);
    let x = UNIT_POS % side;
    let y = UNIT_POS / side;
    #[unroll]
    for i in 0..4usize {
        let mut quad = Quad::new(0.0f32);
        #[unroll]
        for j in 0..4usize {
            quad[j] = block[i * 4 + j];
        }
        tile[((y * 4 + i as u32) * side + x) as usize] = quad;
    }
}

/// Adds to a unit's accumulators of a slice the product of its rows of the tile with the slice.
#[cube]
pub(super) fn accumulate(
    tile: &SharedMemory<Quad>,
    columns: &SharedMemory<Quad>,
    sums: &mut Array<Quad>,
    #[comptime] slice: usize,
    #[comptime] variant: Variant,
) {
    let side = comptime!(variant.side as u32);
    let x = UNIT_POS % side;
    let y = UNIT_POS / side;
    let mut left = Array::<Quad>::new(4usize);
    for at in 0..side {
        #[unroll]
        for i in 0..4usize {
            left[i] = tile[((y * 4 + i as u32) * side + at) as usize];
        }
        #[unroll]
        for j in 0..4usize {
            let right = columns[(slot(at * 4 + j as u32, true, variant) + x) as usize];
            #[unroll]
            for i in 0..4usize {
                let factors = left[i];
                sums[slice * 4 + i] += Quad::new(factors[j]) * right;
            }
        }
    }
}
