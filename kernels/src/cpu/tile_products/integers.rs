//! Products of integers: tiles of 8, 6 and 4 bits with inputs of 8.
//!
//! Of each group of 32 weights of a row, their bytes are multiplied with those of the inputs and
//! summed exactly; the sum is then multiplied by both scales. A format whose weights count from an
//! offset has it times the sum of the inputs taken away first, and one that adds a least value has
//! that times the same sum added.

#![allow(clippy::needless_range_loop, reason = "registers are arrays, of which several have the same index")]

use super::lanes::Lanes;
use crate::quant::tiles::TILE;

/// Weights of a group.
pub(super) const GROUP: usize = 32;
/// Groups of a block whose products are written out one after the other.
const TOGETHER: usize = 4;
/// Weights that are multiplied at once.
const FOUR: usize = 4;
const FOURS: usize = GROUP / FOUR;

/// How the blocks of a tile are read.
pub(super) trait IntegerTile {
    /// Bytes of a block of all rows.
    const BYTES: usize;
    /// Groups of a block.
    const GROUPS: usize;
    /// What the bytes of weights count from.
    const OFFSET: i32;
    /// Scales of a group: of 32 weights, or of 16 each.
    const SCALES: usize;
    /// Whether weights have a least value.
    const LEAST: bool = false;

    /// Weights `4 fours` to `4 fours + 3` of a group, plus the offset.
    ///
    /// # Safety
    /// As [`Lanes`] has it: there is a block at `block`.
    unsafe fn four<L: Lanes>(lanes: L, block: *const u8, group: usize, fours: usize) -> L::Bytes;

    /// What a part of a group is multiplied by.
    ///
    /// # Safety
    /// As [`four`](Self::four).
    unsafe fn scale<L: Lanes>(lanes: L, block: *const u8, group: usize, part: usize) -> L::Floats;

    /// What is taken away from each weight of a group.
    ///
    /// # Safety
    /// As [`four`](Self::four).
    unsafe fn least<L: Lanes>(lanes: L, _block: *const u8, _group: usize) -> L::Floats {
        // SAFETY: the caller's.
        unsafe { lanes.floats(0.0) }
    }
}

/// Bytes of 16 units.
const fn of_tile(bytes: usize) -> usize {
    TILE * bytes
}

/// [`BlockFormat::Q8_0`](crate::BlockFormat): a scale, 32 signed bytes.
pub(super) struct Q8_0;

impl IntegerTile for Q8_0 {
    const BYTES: usize = of_tile(34);
    const GROUPS: usize = 1;
    const OFFSET: i32 = 128;
    const SCALES: usize = 1;

    #[inline(always)]
    unsafe fn four<L: Lanes>(lanes: L, block: *const u8, _group: usize, fours: usize) -> L::Bytes {
        // SAFETY: the caller's; the units of four bytes follow the scales.
        unsafe { lanes.xor(lanes.bytes(block.add(of_tile(2 + FOUR * fours))), 0x80) }
    }

    #[inline(always)]
    unsafe fn scale<L: Lanes>(lanes: L, block: *const u8, _group: usize, _part: usize) -> L::Floats {
        // SAFETY: the caller's.
        unsafe { lanes.halves(block) }
    }
}

/// [`BlockFormat::Q4_0`](crate::BlockFormat): a scale, 16 bytes of which each has a weight in its low half, and one 16 further on
/// in its high one.
pub(super) struct Q4_0;

impl IntegerTile for Q4_0 {
    const BYTES: usize = of_tile(18);
    const GROUPS: usize = 1;
    const OFFSET: i32 = 8;
    const SCALES: usize = 1;

    #[inline(always)]
    unsafe fn four<L: Lanes>(lanes: L, block: *const u8, _group: usize, fours: usize) -> L::Bytes {
        // SAFETY: the caller's.
        unsafe {
            let bytes = lanes.bytes(block.add(of_tile(2 + FOUR * (fours % 4))));
            lanes.and(if fours < 4 { bytes } else { lanes.shifted_down(bytes, 4) }, 15)
        }
    }

    #[inline(always)]
    unsafe fn scale<L: Lanes>(lanes: L, block: *const u8, _group: usize, _part: usize) -> L::Floats {
        // SAFETY: the caller's.
        unsafe { lanes.halves(block) }
    }
}

/// [`BlockFormat::Q4K`](crate::BlockFormat): `d`, `dmin`, 12 bytes of scales and least values, 128 bytes of which each has a weight
/// in its low half, and one 32 further on in its high one.
pub(super) struct Q4K;

impl Q4K {
    const SCALES_AT: usize = of_tile(4);
    const WEIGHTS_AT: usize = of_tile(16);

    /// Scales (`which` 0) or least values (4) of a group, as numbers: the upper bits of the later ones are on top of the
    /// earlier ones.
    #[inline(always)]
    unsafe fn numbers<L: Lanes>(lanes: L, block: *const u8, group: usize, which: usize) -> L::Floats {
        let mut own = [0u8; TILE];
        // SAFETY: the caller's: 12 units of a byte each.
        unsafe {
            let unit = |at: usize| block.add(Self::SCALES_AT + of_tile(at)).cast::<[u8; TILE]>().read_unaligned();
            if group < 4 {
                let all = unit(group + which);
                for row in 0..TILE {
                    own[row] = all[row] & 63;
                }
            } else {
                let (low, high) = (unit(group + 4), unit(group - 4 + which));
                for row in 0..TILE {
                    own[row] = (low[row] >> which) & 15 | (high[row] >> 6) << 4;
                }
            }
            lanes.converted(lanes.unsigned(own.as_ptr()))
        }
    }
}

impl IntegerTile for Q4K {
    const BYTES: usize = of_tile(144);
    const GROUPS: usize = 8;
    const OFFSET: i32 = 0;
    const SCALES: usize = 1;
    const LEAST: bool = true;

    #[inline(always)]
    unsafe fn four<L: Lanes>(lanes: L, block: *const u8, group: usize, fours: usize) -> L::Bytes {
        // SAFETY: the caller's.
        unsafe {
            let bytes = lanes.bytes(block.add(Self::WEIGHTS_AT + of_tile(GROUP * (group / 2) + FOUR * fours)));
            lanes.and(lanes.shifted_down(bytes, (group % 2 * 4) as u32), 15)
        }
    }

    #[inline(always)]
    unsafe fn scale<L: Lanes>(lanes: L, block: *const u8, group: usize, _part: usize) -> L::Floats {
        // SAFETY: the caller's.
        unsafe { lanes.mul(lanes.halves(block), Self::numbers(lanes, block, group, 0)) }
    }

    #[inline(always)]
    unsafe fn least<L: Lanes>(lanes: L, block: *const u8, group: usize) -> L::Floats {
        // SAFETY: the caller's.
        unsafe { lanes.mul(lanes.halves(block.add(of_tile(2))), Self::numbers(lanes, block, group, 4)) }
    }
}

/// [`BlockFormat::Q6K`](crate::BlockFormat): the low four bits of weights in 128 bytes, in their halves those of weights 64 apart, the
/// upper two in 64 bytes, with those of weights 32 apart; 16 signed scales, `d`.
pub(super) struct Q6K;

impl Q6K {
    const HIGH_AT: usize = of_tile(128);
    const SCALES_AT: usize = of_tile(192);
    const D_AT: usize = of_tile(208);
}

impl IntegerTile for Q6K {
    const BYTES: usize = of_tile(210);
    const GROUPS: usize = 8;
    const OFFSET: i32 = 32;
    const SCALES: usize = 2;

    #[inline(always)]
    unsafe fn four<L: Lanes>(lanes: L, block: *const u8, group: usize, fours: usize) -> L::Bytes {
        let (half, part) = (group / 4, group % 4);
        // SAFETY: the caller's.
        unsafe {
            let low = lanes.bytes(block.add(of_tile(64 * half + GROUP * (part % 2) + FOUR * fours)));
            let low = lanes.and(lanes.shifted_down(low, (part / 2 * 4) as u32), 15);
            let high = lanes.bytes(block.add(Self::HIGH_AT + of_tile(GROUP * half + FOUR * fours)));
            let high = lanes.and(lanes.shifted_down(high, (part * 2) as u32), 3);
            lanes.or(low, lanes.shifted_up(high, 4))
        }
    }

    #[inline(always)]
    unsafe fn scale<L: Lanes>(lanes: L, block: *const u8, group: usize, part: usize) -> L::Floats {
        // SAFETY: the caller's.
        unsafe {
            let scale = lanes.signed(block.add(Self::SCALES_AT + of_tile(2 * group + part)));
            lanes.mul(lanes.halves(block.add(Self::D_AT)), lanes.converted(scale))
        }
    }
}

/// Bytes of a group of a row in a panel, which has group after group: of each the bytes of all rows, their scales, for each scale of
/// the weights the sums of bytes times what the offset takes away, and the sums times the scale.
pub(super) const fn panel_bytes(scales: usize, least: bool) -> usize {
    GROUP + 4 + 4 * scales + if least { 4 } else { 0 }
}

/// Where the numbers behind a group's bytes begin.
const fn scale_at(rows: usize) -> usize {
    rows * GROUP
}

/// Stores rows of inputs, `[rows, d_input]`, as a panel of `panel_rows`, of which those behind them are zeros.
#[inline(always)]
pub(super) fn fill_panel<F: IntegerTile>(x: &[f32], d_input: usize, panel_rows: usize, panel: &mut [u8]) {
    let each = panel_rows * panel_bytes(F::SCALES, F::LEAST);
    for (row, x) in x.chunks_exact(d_input).enumerate() {
        for (x, panel) in x.chunks_exact(GROUP).zip(panel.chunks_exact_mut(each)) {
            let x: &[f32; GROUP] = x.try_into().expect("a group");
            let mut largest = 0.0f32;
            let mut sum = 0.0f32;
            for value in x {
                largest = largest.max(value.abs());
                sum += value * 0.0;
            }
            let (scale, inverse) = (largest / 127.0, if largest > 0.0 { 127.0 / largest } else { 0.0 });
            // A number that is none makes the whole group such, as an infinite one does.
            let scale = scale + sum;
            let mut own = [0i8; GROUP];
            for (own, value) in own.iter_mut().zip(x) {
                *own = (value * inverse).round_ties_even() as i8;
            }
            let (bytes, rest) = panel.split_at_mut(scale_at(panel_rows));
            for (byte, own) in bytes[row * GROUP..][..GROUP].iter_mut().zip(own) {
                *byte = own as u8;
            }
            let mut put = |at: usize, four: [u8; 4]| rest[4 * (at * panel_rows + row)..][..4].copy_from_slice(&four);
            put(0, scale.to_ne_bytes());
            let mut total = 0;
            for (part, own) in own.chunks_exact(GROUP / F::SCALES).enumerate() {
                let sum: i32 = own.iter().map(|byte| i32::from(*byte)).sum();
                put(1 + part, (-F::OFFSET * sum).to_ne_bytes());
                total += sum;
            }
            if F::LEAST {
                put(1 + F::SCALES, (scale * total as f32).to_ne_bytes());
            }
        }
    }
}

/// The products of a tile's rows with those of a panel, `[ROWS, 16]` at `out`.
///
/// # Safety
/// The processor has the instructions of `L`, a tile of `blocks` blocks is at `tile`, the panel has as many groups of `ROWS` rows, and
/// there is room at `out`.
#[inline(always)]
pub(super) unsafe fn product<L: Lanes, F: IntegerTile, const ROWS: usize>(
    lanes: L,
    tile: *const u8,
    blocks: usize,
    panel: *const u8,
    out: *mut f32,
) {
    let each = ROWS * panel_bytes(F::SCALES, F::LEAST);
    // SAFETY: the caller's: nothing is read but what the panel and the tile have.
    unsafe {
        let mut sums = [lanes.floats(0.0); ROWS];
        for block in 0..blocks {
            let own = tile.add(block * F::BYTES);
            let panel = panel.add(block * F::GROUPS * each);
            if F::GROUPS == 1 {
                add_group::<L, F, ROWS>(lanes, own, 0, panel, &mut sums);
                continue;
            }
            // So that shifts are by constants.
            for group in (0..F::GROUPS).step_by(TOGETHER) {
                let panel = |at: usize| panel.add((group + at) * each);
                add_group::<L, F, ROWS>(lanes, own, group, panel(0), &mut sums);
                add_group::<L, F, ROWS>(lanes, own, group + 1, panel(1), &mut sums);
                add_group::<L, F, ROWS>(lanes, own, group + 2, panel(2), &mut sums);
                add_group::<L, F, ROWS>(lanes, own, group + 3, panel(3), &mut sums);
            }
        }
        for row in 0..ROWS {
            lanes.store(sums[row], out.add(row * TILE));
        }
    }
}

/// Adds the products of a group of a block with those of a panel.
///
/// # Safety
/// As for [`product`]: the block is at `block`, and the group's inputs are at `panel`.
#[inline(always)]
unsafe fn add_group<L: Lanes, F: IntegerTile, const ROWS: usize>(
    lanes: L,
    block: *const u8,
    group: usize,
    panel: *const u8,
    sums: &mut [L::Floats; ROWS],
) {
    // SAFETY: the caller's.
    unsafe {
        let rest = panel.add(scale_at(ROWS));
        let number = |at: usize, row: usize| rest.add(4 * (at * ROWS + row));
        for part in 0..F::SCALES {
            let mut products = [lanes.ints(0); ROWS];
            for row in 0..ROWS {
                products[row] = lanes.ints(number(1 + part, row).cast::<i32>().read_unaligned());
            }
            let fours = FOURS / F::SCALES;
            for four in part * fours..(part + 1) * fours {
                let weights = F::four(lanes, block, group, four);
                for row in 0..ROWS {
                    let inputs = panel.add(row * GROUP + FOUR * four).cast::<i32>().read_unaligned();
                    products[row] = lanes.dot(products[row], weights, inputs);
                }
            }
            let scale = F::scale(lanes, block, group, part);
            for row in 0..ROWS {
                let of_inputs = lanes.floats(number(0, row).cast::<f32>().read_unaligned());
                let product = lanes.mul(lanes.converted(products[row]), lanes.mul(scale, of_inputs));
                sums[row] = lanes.add(sums[row], product);
            }
        }
        if F::LEAST {
            let least = F::least(lanes, block, group);
            for row in 0..ROWS {
                let sum = lanes.floats(number(1 + F::SCALES, row).cast::<f32>().read_unaligned());
                sums[row] = lanes.sub(sums[row], lanes.mul(least, sum));
            }
        }
    }
}
