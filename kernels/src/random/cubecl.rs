//! Random bits in CubeCL kernels, equal to [`RandomKey::bits`].

use burn_cubecl::CubeRuntime;
use cubecl::prelude::*;

use super::{MULTIPLIERS, RandomKey};

/// The keys of the five rounds: in each word the low half is for rows, the high half for columns.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Rounds {
    first: u32,
    second: u32,
    third: u32,
    fourth: u32,
    fifth: u32,
    /// Added to the number of a row.
    first_row: u32,
}

impl RandomKey {
    /// The key as a kernel argument.
    pub(crate) fn rounds<R: CubeRuntime>(self) -> RoundsLaunch<R> {
        let (rows, columns) = self.round_keys();
        let word = |at: usize| rows[at] | (columns[at] << 16);
        RoundsLaunch::new(word(0), word(1), word(2), word(3), word(4), self.first_row)
    }
}

/// The encrypted row index, two halves in one word, shared by the row's columns.
#[cube]
pub(crate) fn row_bits(row: u32, rounds: &Rounds) -> u32 {
    let mut state = row + rounds.first_row;
    state = round(state, rounds.first & 0xffff, MULTIPLIERS[0]);
    state = round(state, rounds.second & 0xffff, MULTIPLIERS[1]);
    state = round(state, rounds.third & 0xffff, MULTIPLIERS[2]);
    state = round(state, rounds.fourth & 0xffff, MULTIPLIERS[3]);
    round(state, rounds.fifth & 0xffff, MULTIPLIERS[4])
}

/// The 24 bits at `column` of a row with these [`row_bits`].
#[cube]
pub(crate) fn column_bits(row: u32, column: u32, rounds: &Rounds) -> u32 {
    let state = column_halves(row, column, rounds);
    ((state & 0xffff) << 8) | (state >> 24)
}

/// Two 16-bit values at `column`, the first in the low half.
#[cube]
pub(crate) fn column_halves(row: u32, column: u32, rounds: &Rounds) -> u32 {
    let mut state = column ^ row;
    state = round(state, rounds.first >> 16, MULTIPLIERS[0]);
    state = round(state, rounds.second >> 16, MULTIPLIERS[1]);
    state = round(state, rounds.third >> 16, MULTIPLIERS[2]);
    state = round(state, rounds.fourth >> 16, MULTIPLIERS[3]);
    round(state, rounds.fifth >> 16, MULTIPLIERS[4])
}

/// One Feistel round; the left half is in the low bits.
#[cube]
fn round(state: u32, key: u32, #[comptime] multiplier: u32) -> u32 {
    let right = state >> 16;
    let product = (right ^ key) * multiplier;
    let left = (state ^ product ^ (product >> 15)) & 0xffff;
    right | (left << 16)
}
