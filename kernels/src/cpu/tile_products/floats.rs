//! Products of floats: 16-bit tiles with f32 inputs.

#![allow(clippy::needless_range_loop, reason = "registers are arrays, of which several have the same index")]

use super::lanes::Lanes;
use crate::quant::tiles::TILE;

/// How sixteen weights are read.
pub(super) trait FloatTile {
    /// # Safety
    /// As for [`Lanes`]: 32 bytes must be readable at `at`.
    unsafe fn sixteen<L: Lanes>(lanes: L, at: *const u8) -> L::Floats;
}

/// [`Format::F16`](crate::Format).
pub(super) struct Half;

impl FloatTile for Half {
    #[inline(always)]
    unsafe fn sixteen<L: Lanes>(lanes: L, at: *const u8) -> L::Floats {
        // SAFETY: guaranteed by the caller.
        unsafe { lanes.halves(at) }
    }
}

/// [`Format::Bf16`](crate::Format).
pub(super) struct Brain;

impl FloatTile for Brain {
    #[inline(always)]
    unsafe fn sixteen<L: Lanes>(lanes: L, at: *const u8) -> L::Floats {
        // SAFETY: guaranteed by the caller.
        unsafe { lanes.brains(at) }
    }
}

/// Bytes of sixteen weights.
const SIXTEEN: usize = 2 * TILE;
/// Running sums of a single row, because each addition waits for the one before.
const APART: usize = 4;

/// Stores rows of inputs, `[rows, d_input]`, as a panel of `panel_rows` rows, column-major and
/// padded with zeros.
#[inline(always)]
pub(super) fn fill_panel(x: &[f32], d_input: usize, panel_rows: usize, panel: &mut [f32]) {
    for (row, x) in x.chunks_exact(d_input).enumerate() {
        panel[row..].iter_mut().step_by(panel_rows).zip(x).for_each(|(panel, x)| *panel = *x);
    }
}

/// The products of `TILES` tiles with a panel, `[TILES, ROWS, 16]`, stored at `out`.
///
/// # Safety
/// The processor must have the instructions of `L`. At `tile` must be tiles of `columns` columns, a
/// multiple of four, `apart` bytes from each other. The panel must have as many columns of `ROWS`
/// rows. `out` must have room for the result.
#[inline(always)]
pub(super) unsafe fn product<L: Lanes, F: FloatTile, const ROWS: usize, const TILES: usize>(
    lanes: L,
    tile: *const u8,
    apart: usize,
    columns: usize,
    panel: *const f32,
    out: *mut f32,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if ROWS == 1 {
            for of_tile in 0..TILES {
                let tile = tile.add(of_tile * apart);
                let mut sums = [lanes.floats(0.0); APART];
                for column in (0..columns).step_by(APART) {
                    for part in 0..APART {
                        let weights = F::sixteen(lanes, tile.add((column + part) * SIXTEEN));
                        sums[part] = lanes.mul_add(weights, lanes.floats(*panel.add(column + part)), sums[part]);
                    }
                }
                let sum = lanes.add(lanes.add(sums[0], sums[1]), lanes.add(sums[2], sums[3]));
                lanes.store(sum, out.add(of_tile * TILE));
            }
            return;
        }
        let mut sums = [[lanes.floats(0.0); ROWS]; TILES];
        for column in 0..columns {
            let mut weights = [lanes.floats(0.0); TILES];
            for of_tile in 0..TILES {
                weights[of_tile] = F::sixteen(lanes, tile.add(of_tile * apart + column * SIXTEEN));
            }
            for row in 0..ROWS {
                let inputs = lanes.floats(*panel.add(column * ROWS + row));
                for of_tile in 0..TILES {
                    sums[of_tile][row] = lanes.mul_add(weights[of_tile], inputs, sums[of_tile][row]);
                }
            }
        }
        for of_tile in 0..TILES {
            for row in 0..ROWS {
                lanes.store(sums[of_tile][row], out.add((of_tile * ROWS + row) * TILE));
            }
        }
    }
}
