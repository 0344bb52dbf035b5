//! Sampling in CubeCL: a cube for each row of logits, and no sort.
//!
//! The cut of top-k and top-p is looked for among few candidates: all words above a bound that at least as many units'
//! largest words reach. Each candidate then counts the candidates above it, and adds up their probabilities. Where the
//! candidates are too many for the cube, or too few for the cut, the interval around it is halved over all words.

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::Sampling;
use crate::cube::{array, contiguous, empty, grid};
use crate::random::RANGE;
use crate::random::cube::{Rounds, column_bits, row_bits};
use crate::team::{Team, team_max, team_sum};

/// Stands for no word at all.
const NOTHING: f32 = -1e30;
/// Halvings until the interval around a bound is far below the spacing of logits.
const HALVINGS: u32 = 40;
/// Halvings until few more words lie above a bound than have to.
const ROUGH_HALVINGS: u32 = 14;
/// Units that share a row, where the device allows them.
const UNITS: u32 = 1024;
/// Words that a unit reads together.
const READS: u32 = 8;

/// What the kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Plan {
    team: Team,
    penalised: bool,
    draws: bool,
    top_k: bool,
    top_p: bool,
    min_p: bool,
}

/// [`Sampling`]'s numbers.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Numbers {
    vocabulary: u32,
    temperature: f32,
    top_k: u32,
    top_p: f32,
    min_p_ln: f32,
    repetition: f32,
    presence: f32,
    frequency: f32,
}

/// A word for each row of `logits`, f32 `[batch_size, vocabulary]`: `[batch_size]` 32-bit integers. `counts` are those of
/// the prompts and those of the words behind them, which the chosen ones are added to.
pub(crate) fn draw<R: CubeRuntime>(
    logits: CubeTensor<R>,
    sampling: &Sampling,
    streams: CubeTensor<R>,
    counts: Option<[CubeTensor<R>; 2]>,
) -> CubeTensor<R> {
    let logits = contiguous(logits);
    let [batch_size, vocabulary] = [logits.meta.shape()[0], logits.meta.shape()[1]];
    let out = empty(&logits, [batch_size], DType::I32);
    let hardware = &logits.client.properties().hardware;
    let team = Team::new(&logits.client, 32, 1, 32);
    // Without planes each exchange takes shared memory for all units, and there are a dozen of them.
    let most = if team.plane == 1 { UNITS / 4 } else { UNITS };
    let units = most.min(hardware.max_units_per_cube).min(hardware.max_cube_dim.0);
    let team = Team { units: 1 << units.ilog2(), rows: 1, ..team };
    let draws = sampling.temperature > 0.0;
    let plan = Plan {
        team,
        penalised: counts.is_some(),
        draws,
        top_k: draws && sampling.top_k.is_some_and(|top_k| top_k < vocabulary),
        top_p: draws && sampling.top_p.is_some_and(|top_p| top_p < 1.0),
        min_p: draws && sampling.min_p.is_some_and(|min_p| min_p > 0.0),
    };
    let [prompt, written] = counts.unwrap_or_else(|| [logits.clone(), logits.clone()]);
    let penalties = sampling.penalties;
    // SAFETY: a cube reads and counts in its own row, below `batch_size`, words below `vocabulary`; without penalties
    // the counts are not touched.
    unsafe {
        draw_kernel::launch_unchecked(
            &logits.client,
            grid(batch_size),
            team.cube_dim(),
            array(&logits),
            array(&contiguous(streams.clone())),
            array(&prompt),
            array(&written),
            array(&out),
            batch_size as u32,
            NumbersLaunch::new(
                vocabulary as u32,
                sampling.temperature as f32,
                sampling.top_k.map_or(0, |top_k| top_k.clamp(1, vocabulary) as u32),
                sampling.top_p.unwrap_or(1.0) as f32,
                sampling.min_p.map_or(0.0, |min_p| min_p.ln() as f32),
                penalties.repetition as f32,
                penalties.presence as f32,
                penalties.frequency as f32,
            ),
            sampling.key.rounds(),
            plan,
            streams.dtype.into(),
        );
    }
    out
}

/// The logit of a word, after penalties and temperature.
#[cube]
fn logit(
    logits: &Array<f32>,
    prompt: &Array<f32>,
    written: &Array<f32>,
    at: u32,
    numbers: &Numbers,
    #[comptime] plan: Plan,
) -> f32 {
    let mut value = logits[at as usize];
    if comptime!(plan.penalised) {
        let behind = written[at as usize];
        if prompt[at as usize] + behind > 0.0 {
            value = select(value < 0.0, value * numbers.repetition, value / numbers.repetition);
        }
        if behind > 0.0 {
            value -= numbers.presence + behind * numbers.frequency;
        }
    }
    if comptime!(plan.draws) {
        value /= numbers.temperature;
    }
    value
}

/// The logits of some of a unit's words, the first of them at `first`; nothing beyond the row's end. All are read before
/// any is used.
#[cube]
fn words(
    logits: &Array<f32>,
    prompt: &Array<f32>,
    written: &Array<f32>,
    first: u32,
    end: u32,
    numbers: &Numbers,
    #[comptime] plan: Plan,
) -> Array<f32> {
    let mut values = Array::<f32>::new(READS as usize);
    #[unroll]
    for i in 0..READS {
        let at = min(first + comptime!(i * plan.team.units), end - 1);
        values[i as usize] = logit(logits, prompt, written, at, numbers, plan);
    }
    #[unroll]
    for i in 0..READS {
        if first + comptime!(i * plan.team.units) >= end {
            values[i as usize] = NOTHING;
        }
    }
    values
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn draw_kernel<I: Int>(
    logits: &Array<f32>,
    streams: &Array<I>,
    prompt: &Array<f32>,
    written: &mut Array<f32>,
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
    let end = start + numbers.vocabulary;

    let mut largest = NOTHING.runtime();
    let mut word = 0u32;
    for first in range_stepped(start + UNIT_POS_X, end, comptime!(units * READS)) {
        let values = words(logits, prompt, written, first, end, numbers, plan);
        #[unroll]
        for i in 0..READS {
            if values[i as usize] > largest {
                largest = values[i as usize];
                word = first + comptime!(i * units) - start;
            }
        }
    }
    let top = team_max(largest, team);

    if comptime!(plan.draws) {
        let mut cut = NOTHING.runtime();
        if comptime!(plan.top_k || plan.top_p) {
            cut = nucleus(logits, prompt, written, start, end, largest, top, numbers, plan);
        }
        if comptime!(plan.min_p) {
            cut = max(cut, top + numbers.min_p_ln);
        }
        let bits = row_bits(u32::cast_from(streams[row as usize]), rounds);
        largest = NOTHING.runtime();
        for first in range_stepped(start + UNIT_POS_X, end, comptime!(units * READS)) {
            let values = words(logits, prompt, written, first, end, numbers, plan);
            #[unroll]
            for i in 0..READS {
                let value = values[i as usize];
                let at = first + comptime!(i * units);
                if value >= cut && at < end {
                    let column = at - start;
                    let uniform = (f32::cast_from(column_bits(bits, column, rounds)) + 0.5) / comptime!(RANGE as f32);
                    let noisy = value - (0.0f32 - uniform.ln()).ln();
                    if noisy > largest {
                        largest = noisy;
                        word = column;
                    }
                }
            }
        }
    }

    // The first of the largest: words are numbers that f32 holds exactly.
    let best = team_max(largest, team);
    let first = 0.0f32 - team_max(select(largest == best, 0.0f32 - f32::cast_from(word), NOTHING), team);
    if UNIT_POS_X == 0 {
        let chosen = u32::cast_from(first);
        out[row as usize] = i32::cast_from(chosen);
        if comptime!(plan.penalised) {
            written[(start + chosen) as usize] += 1.0;
        }
    }
}

/// The least logit that top-k and top-p keep.
#[cube]
#[allow(clippy::too_many_arguments)]
fn nucleus(
    logits: &Array<f32>,
    prompt: &Array<f32>,
    written: &Array<f32>,
    start: u32,
    end: u32,
    largest: f32,
    top: f32,
    numbers: &Numbers,
    #[comptime] plan: Plan,
) -> f32 {
    let team = comptime!(plan.team);
    let units = comptime!(plan.team.units);
    // Enough units' largest words lie above the bound, and so enough words.
    let wanted = if comptime!(plan.top_k) { numbers.top_k } else { comptime!(units / 4).runtime() };
    let has_words = start + UNIT_POS_X < end;
    let mut low = 0.0f32 - team_max(select(has_words, 0.0f32 - largest, NOTHING), team);
    let mut high = top;
    for _ in 0..ROUGH_HALVINGS {
        let middle = (low + high) * 0.5;
        let above = team_sum(select(has_words && largest >= middle, 1.0f32, 0.0f32), team);
        let enough = above >= f32::cast_from(wanted);
        low = select(enough, middle, low);
        high = select(enough, high, middle);
    }

    let mut own = 0u32;
    let mut mass = 0.0f32;
    for first in range_stepped(start + UNIT_POS_X, end, comptime!(units * READS)) {
        let values = words(logits, prompt, written, first, end, numbers, plan);
        #[unroll]
        for i in 0..READS {
            own += select(values[i as usize] >= low, 1u32, 0u32);
            if comptime!(!plan.top_k) {
                mass += (values[i as usize] - top).exp();
            }
        }
    }
    if comptime!(!plan.top_k) {
        mass = team_sum(mass, team);
    }
    // Where each unit's candidates begin.
    sync_cube();
    let mut sums = SharedMemory::<u32>::new(comptime!(units as usize));
    sums[UNIT_POS_X as usize] = own;
    sync_cube();
    #[unroll]
    for doubling in 0..comptime!(units.trailing_zeros()) {
        let step = comptime!(1u32 << doubling);
        let mut sum = sums[UNIT_POS_X as usize];
        if UNIT_POS_X >= step {
            sum += sums[(UNIT_POS_X - step) as usize];
        }
        sync_cube();
        sums[UNIT_POS_X as usize] = sum;
        sync_cube();
    }
    let count = sums[comptime!(units as usize - 1)];
    let mut place = sums[UNIT_POS_X as usize] - own;

    // All units go through every exchange, whether there is something to do or not: some drivers do not take a barrier
    // under a condition. With more candidates than units, none is kept.
    let fits = count <= units;
    let held = select(fits, count, 0u32);
    sync_cube();
    let mut candidates = SharedMemory::<f32>::new(comptime!(units as usize));
    if fits && own > 0 {
        for first in range_stepped(start + UNIT_POS_X, end, comptime!(units * READS)) {
            let values = words(logits, prompt, written, first, end, numbers, plan);
            #[unroll]
            for i in 0..READS {
                if values[i as usize] >= low {
                    candidates[place as usize] = values[i as usize];
                    place += 1u32;
                }
            }
        }
    }
    sync_cube();
    let mut value = NOTHING.runtime();
    if UNIT_POS_X < held {
        value = candidates[UNIT_POS_X as usize];
    }
    let mut above = 0u32;
    let mut mass_above = 0.0f32;
    for other in 0..held {
        let other = candidates[other as usize];
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
    let mut cut = 0.0f32 - team_max(select(kept, 0.0f32 - value, NOTHING), team);

    // What follows goes over no words, and halves nothing, where the cut is found.
    let last = select(found, start, end);
    let halvings = select(found, 0u32, HALVINGS);
    let mut floor = NOTHING.runtime();
    if comptime!(plan.top_k) {
        let wanted = f32::cast_from(numbers.top_k);
        floor = halved(logits, prompt, written, start, last, floor, top, wanted, halvings, false, numbers, plan);
    }
    if comptime!(plan.top_p) {
        let mut above_floor = 0.0f32;
        for at in range_stepped(start + UNIT_POS_X, last, units) {
            let value = logit(logits, prompt, written, at, numbers, plan);
            above_floor += select(value >= floor, (value - top).exp(), 0.0f32);
        }
        let wanted = team_sum(above_floor, team) * numbers.top_p;
        floor = halved(logits, prompt, written, start, last, floor, top, wanted, halvings, true, numbers, plan);
    }
    if !found {
        cut = floor;
    }
    cut
}

/// The largest bound, no lower than `floor`, above which words weigh `wanted`: one each, or by probability.
#[cube]
#[allow(clippy::too_many_arguments)]
fn halved(
    logits: &Array<f32>,
    prompt: &Array<f32>,
    written: &Array<f32>,
    start: u32,
    end: u32,
    floor: f32,
    top: f32,
    wanted: f32,
    halvings: u32,
    #[comptime] by_mass: bool,
    numbers: &Numbers,
    #[comptime] plan: Plan,
) -> f32 {
    let team = comptime!(plan.team);
    let units = comptime!(plan.team.units);
    let mut least = top;
    for at in range_stepped(start + UNIT_POS_X, end, units) {
        least = min(least, logit(logits, prompt, written, at, numbers, plan));
    }
    let mut low = max(0.0f32 - team_max(0.0f32 - least, team), floor);
    let mut high = top;
    for _ in 0..halvings {
        let middle = (low + high) * 0.5;
        let mut weight = 0.0f32;
        for at in range_stepped(start + UNIT_POS_X, end, units) {
            let value = logit(logits, prompt, written, at, numbers, plan);
            if value >= middle {
                if comptime!(by_mass) {
                    weight += (value - top).exp();
                } else {
                    weight += 1.0f32;
                }
            }
        }
        let enough = team_sum(weight, team) >= wanted;
        low = select(enough, middle, low);
        high = select(enough, high, middle);
    }
    low
}
