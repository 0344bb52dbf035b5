//! Chooses a row's token among the largest of its groups, in one cube.

use cubecl::prelude::*;

use super::cut::{bound, halved_cut};
use super::{
    BROKEN, GROUPERS, Numbers, READS, Sizes, Variant, first_of, logit, noisy, numbers_of, place_bits, several,
};
use crate::cubecl::clamp_index;
use crate::cubecl::reduce::{exclusive_sum, row_max, row_sum};
use crate::masked::MASKED;
use crate::random::cubecl::Rounds;

/// A cube chooses a row's token.
#[cube(launch_unchecked)]
pub(super) fn draw_kernel<I: Int, P: Int>(
    logits: &Array<f32>,
    members: &Array<I>,
    streams: &Array<I>,
    positions: &Array<P>,
    lines: &Array<I>,
    all_numbers: &Array<f32>,
    prompt: &Array<f32>,
    written: &mut Array<f32>,
    bias: &Array<f32>,
    largest: &Array<f32>,
    largest_token: &Array<u32>,
    masses: &Array<f32>,
    out: &mut Array<i32>,
    sizes: &Sizes,
    rounds: &Rounds,
    #[comptime] variant: Variant,
    #[define(I)] _stream_dtype: StorageType,
    #[define(P)] _position_dtype: StorageType,
) {
    let row_units = comptime!(variant.row_units);
    let units = comptime!(variant.row_units.units);
    let member = CUBE_POS as u32;
    if member >= sizes.rows {
        terminate!();
    }
    let row = clamp_index::<I>(members[(sizes.first + member) as usize], sizes.batch_size - 1);
    let numbers = &numbers_of::<I>(row, all_numbers, lines, sizes);
    let start = row * numbers.vocabulary;

    // The unit's groups.
    let mut tops = Array::<f32>::new(variant.each);
    let mut best = MASKED.runtime();
    let mut token = 0u32;
    let mut broken = 0u32;
    #[unroll]
    for i in 0..variant.each {
        let group = comptime!(i as u32 * variant.row_units.units) + UNIT_POS_X;
        let at = (row * numbers.groups + min(group, numbers.groups - 1)) as usize;
        tops[i] = select(group < numbers.groups, largest[at], MASKED);
        let own = largest_token[at];
        broken |= select(own == BROKEN, 1u32, 0u32);
        if tops[i] > best || (tops[i] == best && own < token) {
            best = tops[i];
            token = own;
        }
    }
    if comptime!(variant.cuts()) {
        let top = row_max(best, row_units);
        let bits = place_bits::<I, P>(row, streams, positions, rounds);
        let mut mass = 0.0f32;
        if comptime!(variant.weighs()) {
            #[unroll]
            for i in 0..variant.each {
                let group = comptime!(i as u32 * variant.row_units.units) + UNIT_POS_X;
                let at = (row * numbers.groups + min(group, numbers.groups - 1)) as usize;
                mass += select(group < numbers.groups, masses[at] * (tops[i] - top).exp(), 0.0f32);
            }
            mass = row_sum(mass, row_units);
        }
        let low = bound(best, top, numbers, variant);

        // The groups with a token above the bound, then these tokens.
        let mut own = 0u32;
        #[unroll]
        for i in 0..variant.each {
            own += select(tops[i] >= low, 1u32, 0u32);
        }
        let (before, groups) = exclusive_sum(own, row_units);
        let mut place = before;
        let few = groups <= units;
        let mut list = SharedMemory::<u32>::new(comptime!(units as usize));
        #[unroll]
        for i in 0..variant.each {
            if few && tops[i] >= low {
                list[place as usize] = comptime!(i as u32 * variant.row_units.units) + UNIT_POS_X;
                place += 1u32;
            }
        }
        sync_cube();
        let looked_at = select(few, groups * variant.tokens, 0u32);
        let mut own = 0u32;
        for at in range_stepped(UNIT_POS_X, looked_at, units) {
            let column = first_of(list[(at / variant.tokens) as usize], variant) + at % variant.tokens * GROUPERS;
            let value = candidate(logits, prompt, written, bias, start, column, numbers, variant);
            own += select(value >= low, 1u32, 0u32);
        }
        let (before, count) = exclusive_sum(own, row_units);
        let mut place = before;
        // All units take part in every exchange, even without work: some drivers do not support
        // conditional barriers. With more candidates than units, none is kept.
        let fits = few && count <= units;
        let held = select(fits, count, 0u32);
        let mut values = SharedMemory::<f32>::new(comptime!(units as usize));
        let mut tokens = SharedMemory::<u32>::new(comptime!(units as usize));
        if fits && own > 0 {
            for at in range_stepped(UNIT_POS_X, looked_at, units) {
                let column = first_of(list[(at / variant.tokens) as usize], variant) + at % variant.tokens * GROUPERS;
                let value = candidate(logits, prompt, written, bias, start, column, numbers, variant);
                if value >= low {
                    values[place as usize] = value;
                    tokens[place as usize] = column;
                    place += 1u32;
                }
            }
        }
        sync_cube();

        // The tokens above a unit's candidate decide whether it is kept.
        let mut value = MASKED.runtime();
        let mut own_token = 0u32;
        if UNIT_POS_X < held {
            value = values[UNIT_POS_X as usize];
            own_token = tokens[UNIT_POS_X as usize];
        }
        let mut above = 0u32;
        let mut mass_above = 0.0f32;
        for other in 0..held {
            let other = values[other as usize];
            if other > value {
                above += 1u32;
                mass_above += (other - top).exp();
            }
        }
        let mut kept = UNIT_POS_X < held;
        let mut found = fits;
        if comptime!(variant.top_k) {
            kept = kept && above < numbers.top_k;
            found = found && count >= min(numbers.top_k, numbers.vocabulary);
        }
        if comptime!(variant.top_p) {
            let reached = row_sum(select(kept, (value - top).exp(), 0.0f32), row_units);
            if comptime!(variant.top_k) {
                mass = reached;
            } else {
                found = found && (reached >= numbers.top_p * mass || count == numbers.vocabulary);
            }
            kept = kept && mass_above < numbers.top_p * mass;
        }
        if comptime!(variant.min_p) {
            kept = kept && value >= top + numbers.min_p_ln;
        }
        best = MASKED.runtime();
        if found && kept {
            best = noisy(value, bits, own_token, rounds);
            token = own_token;
        }

        // Once the cut is found, the following loops do nothing.
        let end = select(found, start, start + numbers.vocabulary);
        let cut = halved_cut(logits, prompt, written, bias, start, end, top, numbers, variant);
        for first in range_stepped(start + UNIT_POS_X, end, comptime!(units * READS)) {
            let values = several(logits, prompt, written, bias, first, end, numbers, variant);
            #[unroll]
            for i in 0..READS {
                let column = first + comptime!(i * units) - start;
                if values[i as usize] >= cut && column < numbers.vocabulary {
                    let value = noisy(values[i as usize], bits, column, rounds);
                    if value > best {
                        best = value;
                        token = column;
                    }
                }
            }
        }
    }

    // The first of the largest: token numbers are exact in f32. NaN comes before all.
    let most = row_max(best, row_units);
    let own = select(best == most, 0.0f32 - f32::cast_from(min(token, numbers.vocabulary - 1)), MASKED);
    let first = 0.0f32 - row_max(select(broken == 1u32, 1.0f32, own), row_units);
    if UNIT_POS_X == 0 {
        out[row as usize] = i32::cast_from(first);
        let counts = first >= 0.0f32;
        if comptime!(variant.counted) && counts {
            written[(start + u32::cast_from(first) + numbers.to_counts) as usize] += 1.0;
        }
    }
}

/// The logit of a token of a group, which may be smaller than others.
#[cube]
fn candidate(
    logits: &Array<f32>,
    prompt: &Array<f32>,
    written: &Array<f32>,
    bias: &Array<f32>,
    start: u32,
    column: u32,
    numbers: &Numbers,
    #[comptime] variant: Variant,
) -> f32 {
    let at = start + min(column, numbers.vocabulary - 1);
    select(column < numbers.vocabulary, logit(logits, prompt, written, bias, at, numbers, variant), MASKED)
}
