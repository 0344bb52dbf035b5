//! Products of integers: tiles of 8-, 6- and 4-bit weights with 8-bit inputs.
//!
//! For each group of 32 weights of a row, products of bytes are summed exactly, and the sum is
//! multiplied by both scales. If weights are stored with an offset, the offset times the sum of the
//! inputs is subtracted first. If weights have a minimum, the minimum times the same sum is
//! subtracted, too.

#![allow(clippy::needless_range_loop, reason = "registers are arrays, of which several have the same index")]

use super::lanes::Lanes;
use crate::quant::tiles::TILE;

/// Weights per group.
pub(super) const GROUP: usize = 32;
/// Groups unrolled together.
const TOGETHER: usize = 4;
/// Weights multiplied at once.
const FOUR: usize = 4;
const FOURS: usize = GROUP / FOUR;

/// How the blocks of a tile are read.
pub(super) trait IntegerTile {
    /// Bytes of one block of all rows.
    const BYTES: usize;
    /// Groups per block.
    const GROUPS: usize;
    /// Offset of the stored weights.
    const OFFSET: i32;
    /// Scales per group: one for 32 weights, or one for each 16.
    const SCALES: usize;
    /// Whether weights have a minimum.
    const LEAST: bool = false;

    /// Weights `4 * fours` to `4 * fours + 3` of a group, plus the offset.
    ///
    /// # Safety
    /// As for [`Lanes`]: `block` must point to a block.
    unsafe fn four<L: Lanes>(lanes: L, block: *const u8, group: usize, fours: usize) -> L::Bytes;

    /// The scale of a part of a group.
    ///
    /// # Safety
    /// As for [`four`](Self::four).
    unsafe fn scale<L: Lanes>(lanes: L, block: *const u8, group: usize, part: usize) -> L::Floats;

    /// The minimum of a group, which is subtracted from each weight.
    ///
    /// # Safety
    /// As for [`four`](Self::four).
    unsafe fn least<L: Lanes>(lanes: L, _block: *const u8, _group: usize) -> L::Floats {
        // SAFETY: guaranteed by the caller.
        unsafe { lanes.floats(0.0) }
    }
}

/// Size of a field of 16 rows that has `bytes` bytes per row.
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
        // SAFETY: guaranteed by the caller; the units of four bytes follow the scales.
        unsafe { lanes.xor(lanes.bytes(block.add(of_tile(2 + FOUR * fours))), 0x80) }
    }

    #[inline(always)]
    unsafe fn scale<L: Lanes>(lanes: L, block: *const u8, _group: usize, _part: usize) -> L::Floats {
        // SAFETY: guaranteed by the caller.
        unsafe { lanes.halves(block) }
    }
}

/// [`BlockFormat::Q4_0`](crate::BlockFormat): a scale, 16 bytes. Byte i has weight i in its low
/// half and weight i + 16 in its high half.
pub(super) struct Q4_0;

impl IntegerTile for Q4_0 {
    const BYTES: usize = of_tile(18);
    const GROUPS: usize = 1;
    const OFFSET: i32 = 8;
    const SCALES: usize = 1;

    #[inline(always)]
    unsafe fn four<L: Lanes>(lanes: L, block: *const u8, _group: usize, fours: usize) -> L::Bytes {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let bytes = lanes.bytes(block.add(of_tile(2 + FOUR * (fours % 4))));
            lanes.and(if fours < 4 { bytes } else { lanes.shifted_down(bytes, 4) }, 15)
        }
    }

    #[inline(always)]
    unsafe fn scale<L: Lanes>(lanes: L, block: *const u8, _group: usize, _part: usize) -> L::Floats {
        // SAFETY: guaranteed by the caller.
        unsafe { lanes.halves(block) }
    }
}

/// [`BlockFormat::Q4K`](crate::BlockFormat): `d`, `dmin`, 12 bytes of scales and minimums, 128
/// bytes of nibbles. Weights in the low and high half of a byte are 32 apart.
pub(super) struct Q4K;

impl Q4K {
    const SCALES_AT: usize = of_tile(4);
    const WEIGHTS_AT: usize = of_tile(16);

    /// The scales (`which` 0) or minimums (`which` 4) of a group. The upper bits of groups 4 to 7
    /// are on top of groups 0 to 3.
    #[inline(always)]
    unsafe fn numbers<L: Lanes>(lanes: L, block: *const u8, group: usize, which: usize) -> L::Floats {
        let mut own = [0u8; TILE];
        // SAFETY: guaranteed by the caller: 12 units of one byte per row.
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
        // SAFETY: guaranteed by the caller.
        unsafe {
            let bytes = lanes.bytes(block.add(Self::WEIGHTS_AT + of_tile(GROUP * (group / 2) + FOUR * fours)));
            lanes.and(lanes.shifted_down(bytes, (group % 2 * 4) as u32), 15)
        }
    }

    #[inline(always)]
    unsafe fn scale<L: Lanes>(lanes: L, block: *const u8, group: usize, _part: usize) -> L::Floats {
        // SAFETY: guaranteed by the caller.
        unsafe { lanes.mul(lanes.halves(block), Self::numbers(lanes, block, group, 0)) }
    }

    #[inline(always)]
    unsafe fn least<L: Lanes>(lanes: L, block: *const u8, group: usize) -> L::Floats {
        // SAFETY: guaranteed by the caller.
        unsafe { lanes.mul(lanes.halves(block.add(of_tile(2))), Self::numbers(lanes, block, group, 4)) }
    }
}

/// [`BlockFormat::Q6K`](crate::BlockFormat): the low four bits of weights in 128 bytes, the upper
/// two in 64 bytes, 16 signed scales, `d`. Weights in a byte are 64 apart in the low bits, and 32
/// apart in the upper ones.
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
        // SAFETY: guaranteed by the caller.
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
        // SAFETY: guaranteed by the caller.
        unsafe {
            let scale = lanes.signed(block.add(Self::SCALES_AT + of_tile(2 * group + part)));
            lanes.mul(lanes.halves(block.add(Self::D_AT)), lanes.converted(scale))
        }
    }
}

/// Bytes per group and row of a panel. A panel stores group after group: the bytes of all rows;
/// their scales; for each scale of the weights, the sum of the bytes times the negative offset;
/// and, if weights have a minimum, the scaled sum.
pub(super) const fn panel_bytes(scales: usize, least: bool) -> usize {
    GROUP + 4 + 4 * scales + if least { 4 } else { 0 }
}

/// Offset of the scales, after a group's bytes.
const fn scale_at(rows: usize) -> usize {
    rows * GROUP
}

/// Quantizes rows of inputs, `[rows, d_input]`, to a panel of `panel_rows` rows, padded with zeros.
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
            // NaN or infinity makes the whole group NaN.
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

/// The products of a tile's rows with a panel, `[ROWS, 16]`, stored at `out`.
///
/// # Safety
/// The processor must have the instructions of `L`. At `tile` must be a tile of `blocks` blocks.
/// The panel must have as many groups of `ROWS` rows. `out` must have room for the result.
#[inline(always)]
pub(super) unsafe fn product<L: Lanes, F: IntegerTile, const ROWS: usize>(
    lanes: L,
    tile: *const u8,
    blocks: usize,
    panel: *const u8,
    out: *mut f32,
) {
    let each = ROWS * panel_bytes(F::SCALES, F::LEAST);
    // SAFETY: guaranteed by the caller: this reads only the panel and the tile.
    unsafe {
        let mut sums = [lanes.floats(0.0); ROWS];
        for block in 0..blocks {
            let own = tile.add(block * F::BYTES);
            let panel = panel.add(block * F::GROUPS * each);
            if F::GROUPS == 1 {
                add_group::<L, F, ROWS>(lanes, own, 0, panel, &mut sums);
                continue;
            }
            // Unrolled, so that shifts are by constants.
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

/// Adds the products of a group of a block with a panel.
///
/// # Safety
/// As for [`product`], with the block at `block` and the group's inputs at `panel`.
#[inline(always)]
unsafe fn add_group<L: Lanes, F: IntegerTile, const ROWS: usize>(
    lanes: L,
    block: *const u8,
    group: usize,
    panel: *const u8,
    sums: &mut [L::Floats; ROWS],
) {
    // SAFETY: guaranteed by the caller.
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
