//! The word of a row among the largest of its groups, by one cube.

use cubecl::prelude::*;

use super::cut::{bound, halved_cut};
use super::{BROKEN, GROUPERS, NOTHING, Numbers, Plan, READS, first_of, logit, noisy, several};
use crate::cubecl::reduce::{exclusive_sum, team_max, team_sum};
use crate::random::cubecl::{Rounds, row_bits};

/// A cube chooses a row's word.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(super) fn draw_kernel<I: Int>(
    logits: &Array<f32>,
    streams: &Array<I>,
    prompt: &Array<f32>,
    written: &mut Array<f32>,
    largest: &Array<f32>,
    largest_word: &Array<u32>,
    masses: &Array<f32>,
    out: &mut Array<i32>,
    rows: u32,
    numbers: &Numbers,
    rounds: &Rounds,
    #[comptime] plan: Plan,
    #[define(I)] _stream_dtype: StorageType,
) {
    let team = comptime!(plan.team);
    let units = comptime!(plan.team.units);
    let row = CUBE_POS as u32;
    if row >= rows {
        terminate!();
    }
    let start = row * numbers.vocabulary;

    // The unit's groups.
    let mut tops = Array::<f32>::new(plan.each);
    let mut best = NOTHING.runtime();
    let mut word = 0u32;
    let mut broken = 0u32;
    #[unroll]
    for i in 0..plan.each {
        let group = comptime!(i as u32 * plan.team.units) + UNIT_POS_X;
        let at = (row * numbers.groups + min(group, numbers.groups - 1)) as usize;
        tops[i] = select(group < numbers.groups, largest[at], NOTHING);
        let own = largest_word[at];
        broken |= select(own == BROKEN, 1u32, 0u32);
        if tops[i] > best || (tops[i] == best && own < word) {
            best = tops[i];
            word = own;
        }
    }
    if comptime!(plan.cuts()) {
        let top = team_max(best, team);
        let bits = row_bits(u32::cast_from(streams[row as usize]), rounds);
        let mut mass = 0.0f32;
        if comptime!(plan.weighs()) {
            #[unroll]
            for i in 0..plan.each {
                let group = comptime!(i as u32 * plan.team.units) + UNIT_POS_X;
                let at = (row * numbers.groups + min(group, numbers.groups - 1)) as usize;
                mass += select(group < numbers.groups, masses[at] * (tops[i] - top).exp(), 0.0f32);
            }
            mass = team_sum(mass, team);
        }
        let low = bound(best, top, numbers, plan);

        // The groups with a word above the bound, and then these words.
        let mut own = 0u32;
        #[unroll]
        for i in 0..plan.each {
            own += select(tops[i] >= low, 1u32, 0u32);
        }
        let (before, groups) = exclusive_sum(own, team);
        let mut place = before;
        let few = groups <= units;
        let mut list = SharedMemory::<u32>::new(comptime!(units as usize));
        #[unroll]
        for i in 0..plan.each {
            if few && tops[i] >= low {
                list[place as usize] = comptime!(i as u32 * plan.team.units) + UNIT_POS_X;
                place += 1u32;
            }
        }
        sync_cube();
        let looked_at = select(few, groups * plan.words, 0u32);
        let mut own = 0u32;
        for at in range_stepped(UNIT_POS_X, looked_at, units) {
            let column = first_of(list[(at / plan.words) as usize], plan) + at % plan.words * GROUPERS;
            let value = candidate(logits, prompt, written, start, column, numbers, plan);
            own += select(value >= low, 1u32, 0u32);
        }
        let (before, count) = exclusive_sum(own, team);
        let mut place = before;
        // All units go through every exchange, whether there is something to do or not: some drivers do not take a
        // barrier under a condition. With more candidates than units, none is kept.
        let fits = few && count <= units;
        let held = select(fits, count, 0u32);
        let mut values = SharedMemory::<f32>::new(comptime!(units as usize));
        let mut words = SharedMemory::<u32>::new(comptime!(units as usize));
        if fits && own > 0 {
            for at in range_stepped(UNIT_POS_X, looked_at, units) {
                let column = first_of(list[(at / plan.words) as usize], plan) + at % plan.words * GROUPERS;
                let value = candidate(logits, prompt, written, start, column, numbers, plan);
                if value >= low {
                    values[place as usize] = value;
                    words[place as usize] = column;
                    place += 1u32;
                }
            }
        }
        sync_cube();

        // What lies above the unit's candidate says whether it is kept.
        let mut value = NOTHING.runtime();
        let mut own_word = 0u32;
        if UNIT_POS_X < held {
            value = values[UNIT_POS_X as usize];
            own_word = words[UNIT_POS_X as usize];
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
        if comptime!(plan.top_k) {
            kept = kept && above < numbers.top_k;
            found = found && count >= min(numbers.top_k, numbers.vocabulary);
        }
        if comptime!(plan.top_p) {
            let reached = team_sum(select(kept, (value - top).exp(), 0.0f32), team);
            if comptime!(plan.top_k) {
                mass = reached;
            } else {
                found = found && (reached >= numbers.top_p * mass || count == numbers.vocabulary);
            }
            kept = kept && mass_above < numbers.top_p * mass;
        }
        if comptime!(plan.min_p) {
            kept = kept && value >= top + numbers.min_p_ln;
        }
        best = NOTHING.runtime();
        if found && kept {
            best = noisy(value, bits, own_word, rounds);
            word = own_word;
        }

        // What follows goes over no words, and halves nothing, where the cut is found.
        let end = select(found, start, start + numbers.vocabulary);
        let cut = halved_cut(logits, prompt, written, start, end, top, numbers, plan);
        for first in range_stepped(start + UNIT_POS_X, end, comptime!(units * READS)) {
            let values = several(logits, prompt, written, first, end, numbers, plan);
            #[unroll]
            for i in 0..READS {
                let column = first + comptime!(i * units) - start;
                if values[i as usize] >= cut && column < numbers.vocabulary {
                    let value = noisy(values[i as usize], bits, column, rounds);
                    if value > best {
                        best = value;
                        word = column;
                    }
                }
            }
        }
    }

    // The first of the largest: words are numbers that f32 holds exactly. What is not a number comes before them all.
    let most = team_max(best, team);
    let own = select(best == most, 0.0f32 - f32::cast_from(min(word, numbers.vocabulary - 1)), NOTHING);
    let first = 0.0f32 - team_max(select(broken == 1u32, 1.0f32, own), team);
    if UNIT_POS_X == 0 {
        out[row as usize] = i32::cast_from(first);
        let counts = first >= 0.0f32;
        if comptime!(plan.penalised) && counts {
            written[(start + u32::cast_from(first)) as usize] += 1.0;
        }
    }
}

/// The logit of a word of a group, which may have fewer words than others.
#[cube]
fn candidate(
    logits: &Array<f32>,
    prompt: &Array<f32>,
    written: &Array<f32>,
    start: u32,
    column: u32,
    numbers: &Numbers,
    #[comptime] plan: Plan,
) -> f32 {
    let at = start + min(column, numbers.vocabulary - 1);
    select(column < numbers.vocabulary, logit(logits, prompt, written, at, numbers, plan), NOTHING)
}
