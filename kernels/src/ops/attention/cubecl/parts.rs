//! Shared parts of attention kernels: layout of heads, the cube's tile, dropout.

use cubecl::prelude::*;

use super::mask::Sizes;
use crate::random::cubecl::{Rounds, column_halves};

/// The score of a key past the end, and the maximum of no scores: below every score.
pub(super) const OUTSIDE: f32 = -3e38;

/// Layout of heads in an array, in vectors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Place {
    pub(super) first: u32,
    pub(super) batch: u32,
    pub(super) head: u32,
    pub(super) row: u32,
}

/// The rows of a head.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Rows {
    pub(super) at: u32,
    pub(super) stride: u32,
    pub(super) end: u32,
}

#[cube]
impl Place {
    pub(super) fn rows(&self, batch: u32, head: u32, end: u32) -> Rows {
        Rows { at: self.first + batch * self.batch + head * self.head, stride: self.row, end }
    }
}

/// The cube's tile index among those of `rows`, its head and its batch: heads of one tile are
/// neighbours.
#[cube]
pub(super) fn cube_place(rows: u32, heads: u32, sizes: &Sizes, #[comptime] tile: u32) -> (u32, u32, u32) {
    let at = CUBE_POS as u32;
    let lines = heads * sizes.batch_size;
    let number = at / lines;
    let line = at % lines;
    // Cubes past the end have no batch.
    let batch = select(number < rows.div_ceil(tile), line / heads, sizes.batch_size);
    (number, line % heads, batch)
}

/// The dropout factor of a probability; `bits` are those of its row.
#[cube]
pub(super) fn kept(bits: u32, key: u32, sizes: &Sizes, rounds: &Rounds) -> f32 {
    let pair = kept_pair(bits, key / 2, sizes, rounds);
    let half = key % 2;
    select(half == 0, pair[0usize], pair[1usize])
}

/// The dropout factors of keys `2 * pair` and `2 * pair + 1`, which share random bits.
#[cube]
pub(super) fn kept_pair(bits: u32, pair: u32, sizes: &Sizes, rounds: &Rounds) -> Vector<f32, Const<2>> {
    let halves = column_halves(bits, pair, rounds);
    let mut factors = Vector::<f32, Const<2>>::empty();
    factors[0usize] = select(halves & 0xffff < sizes.threshold, 0.0f32, sizes.kept);
    factors[1usize] = select(halves >> 16 < sizes.threshold, 0.0f32, sizes.kept);
    factors
}
