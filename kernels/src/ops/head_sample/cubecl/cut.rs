//! The threshold of logits for top-k, top-p and min-p.

use cubecl::prelude::*;

use super::{HALVINGS, Numbers, ROUGH_HALVINGS, Variant, logit};
use crate::cubecl::reduce::{row_max, row_sum};
use crate::masked::MASKED;

/// A lower bound of the kept tokens, exceeded by the largest tokens of enough units. Every plane
/// searches for it alone, without barriers; without planes, all units search together.
#[cube]
pub(super) fn bound(best: f32, top: f32, numbers: &Numbers, #[comptime] variant: Variant) -> f32 {
    if comptime!(variant.searches()) {
        let searchers = comptime!(variant.searchers());
        let each = comptime!((variant.row_units.units / searchers.units) as usize);
        // As in an exchange, others may still read this memory.
        sync_cube();
        let mut bests = SharedMemory::<f32>::new(comptime!(variant.row_units.units as usize));
        bests[UNIT_POS_X as usize] = best;
        sync_cube();
        let mut values = Array::<f32>::new(each);
        let mut least = top;
        #[unroll]
        for i in 0..each {
            let unit = UNIT_POS_X % searchers.units + comptime!(i as u32 * searchers.units);
            values[i] = bests[unit as usize];
            least = select(values[i] > MASKED, min(least, values[i]), least);
        }
        let wanted =
            if comptime!(variant.top_k) { numbers.top_k } else { comptime!(variant.row_units.units / 4).runtime() };
        let mut low = 0.0f32 - row_max(0.0f32 - least, searchers);
        let mut high = top;
        for _ in 0..ROUGH_HALVINGS {
            let middle = (low + high) * 0.5;
            let mut above = 0.0f32;
            #[unroll]
            for i in 0..each {
                above += select(values[i] >= middle, 1.0f32, 0.0f32);
            }
            let enough = row_sum(above, searchers) >= f32::cast_from(wanted);
            low = select(enough, middle, low);
            high = select(enough, high, middle);
        }
        low
    } else {
        top + numbers.min_p_ln
    }
}

/// The smallest kept logit, by bisection over all tokens.
#[cube]
pub(super) fn halved_cut(
    logits: &Array<f32>,
    prompt: &Array<f32>,
    written: &Array<f32>,
    bias: &Array<f32>,
    start: u32,
    end: u32,
    top: f32,
    numbers: &Numbers,
    #[comptime] variant: Variant,
) -> f32 {
    let row_units = comptime!(variant.row_units);
    let halvings = select(start < end, HALVINGS, 0u32);
    let mut floor = MASKED.runtime();
    if comptime!(variant.top_k) {
        let wanted = f32::cast_from(numbers.top_k);
        floor =
            halved(logits, prompt, written, bias, start, end, floor, top, wanted, halvings, false, numbers, variant);
    }
    if comptime!(variant.top_p) {
        let mut above_floor = 0.0f32;
        for at in range_stepped(start + UNIT_POS_X, end, comptime!(variant.row_units.units)) {
            let value = logit(logits, prompt, written, bias, at, numbers, variant);
            above_floor += select(value >= floor, (value - top).exp(), 0.0f32);
        }
        let wanted = row_sum(above_floor, row_units) * numbers.top_p;
        floor = halved(logits, prompt, written, bias, start, end, floor, top, wanted, halvings, true, numbers, variant);
    }
    if comptime!(variant.min_p) {
        floor = max(floor, top + numbers.min_p_ln);
    }
    floor
}

/// The largest bound, at least `floor`, above which tokens have total weight `wanted`: one each, or
/// their probabilities.
#[cube]
fn halved(
    logits: &Array<f32>,
    prompt: &Array<f32>,
    written: &Array<f32>,
    bias: &Array<f32>,
    start: u32,
    end: u32,
    floor: f32,
    top: f32,
    wanted: f32,
    halvings: u32,
    #[comptime] by_mass: bool,
    numbers: &Numbers,
    #[comptime] variant: Variant,
) -> f32 {
    let row_units = comptime!(variant.row_units);
    let units = comptime!(variant.row_units.units);
    let mut least = top;
    for at in range_stepped(start + UNIT_POS_X, end, units) {
        least = min(least, logit(logits, prompt, written, bias, at, numbers, variant));
    }
    let mut low = max(0.0f32 - row_max(0.0f32 - least, row_units), floor);
    let mut high = top;
    for _ in 0..halvings {
        let middle = (low + high) * 0.5;
        let mut weight = 0.0f32;
        for at in range_stepped(start + UNIT_POS_X, end, units) {
            let value = logit(logits, prompt, written, bias, at, numbers, variant);
            if value >= middle {
                if comptime!(by_mass) {
                    weight += (value - top).exp();
                } else {
                    weight += 1.0f32;
                }
            }
        }
        let enough = row_sum(weight, row_units) >= wanted;
        low = select(enough, middle, low);
        high = select(enough, high, middle);
    }
    low
}
