//! The largest token of every group, on many cubes.

use cubecl::prelude::*;

use super::{BROKEN, GROUPERS, Sizes, Variant, adjusted, first_of, noisy, numbers_of, place_bits};
use crate::cubecl::clamp_index;
use crate::masked::MASKED;
use crate::random::cubecl::Rounds;

/// The largest token of every group, with noise if nothing is truncated, and its sum of
/// exponentials.
#[cube(launch_unchecked)]
pub(super) fn group_kernel<I: Int, P: Int>(
    logits: &Array<f32>,
    members: &Array<I>,
    streams: &Array<I>,
    positions: &Array<P>,
    lines: &Array<I>,
    all_numbers: &Array<f32>,
    prompt: &Array<f32>,
    written: &Array<f32>,
    bias: &Array<f32>,
    largest: &mut Array<f32>,
    largest_token: &mut Array<u32>,
    masses: &mut Array<f32>,
    sizes: &Sizes,
    rounds: &Rounds,
    #[comptime] variant: Variant,
    #[define(I)] _stream_dtype: StorageType,
    #[define(P)] _position_dtype: StorageType,
) {
    let parts = sizes.groups / GROUPERS;
    let member = CUBE_POS as u32 / parts;
    if member >= sizes.rows {
        terminate!();
    }
    let row = clamp_index::<I>(members[(sizes.first + member) as usize], sizes.batch_size - 1);
    let numbers = &numbers_of::<I>(row, all_numbers, lines, sizes);
    let group = CUBE_POS as u32 % parts * GROUPERS + UNIT_POS;
    let first = first_of(group, variant);
    let start = row * numbers.vocabulary;
    let mut values = Array::<f32>::new(variant.tokens as usize);
    #[unroll]
    for i in 0..variant.tokens {
        values[i as usize] = logits[(start + min(first + i * GROUPERS, numbers.vocabulary - 1)) as usize];
    }
    #[unroll]
    for i in 0..variant.tokens {
        let at = start + min(first + i * GROUPERS, numbers.vocabulary - 1);
        values[i as usize] = adjusted(values[i as usize], prompt, written, bias, at, numbers, variant);
    }
    let mut best = MASKED.runtime();
    let mut token = first;
    let mut bits = 0u32;
    if comptime!(variant.draws && !variant.cuts()) {
        bits = place_bits::<I, P>(row, streams, positions, rounds);
    }
    #[unroll]
    for i in 0..variant.tokens {
        let at = first + i * GROUPERS;
        let mut value = values[i as usize];
        if comptime!(variant.draws && !variant.cuts()) {
            value = noisy(value, bits, at, rounds);
        }
        if value > best && at < numbers.vocabulary {
            best = value;
            token = at;
        }
    }
    let mut broken = 0u32;
    #[unroll]
    for i in 0..variant.tokens {
        broken |= select(values[i as usize].is_nan(), 1u32, 0u32);
    }
    let to = (row * numbers.groups + group) as usize;
    largest[to] = best;
    largest_token[to] = select(broken == 1u32, BROKEN, token);
    if comptime!(variant.weighs()) {
        let mut mass = 0.0f32;
        #[unroll]
        for i in 0..variant.tokens {
            mass += select(first + i * GROUPERS < numbers.vocabulary, (values[i as usize] - best).exp(), 0.0f32);
        }
        masses[to] = mass;
    }
}
