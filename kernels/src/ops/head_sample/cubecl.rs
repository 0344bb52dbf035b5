//! Sampling in CubeCL, without a sort: words are looked at by many cubes in groups, and chosen by one cube for each row.
//!
//! The cut of top-k and top-p is looked for among few candidates: all words above a bound that enough units' largest words
//! reach, which lie in the groups with such a word and no other. Each candidate then counts the candidates above it,
//! and adds up their probabilities. Where the candidates are too many for the cube, or too few for the cut, the
//! interval around it is halved over all words.

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::Sampling;
use crate::cubecl::reduce::{Team, exclusive_sum, team_max, team_sum};
use crate::cubecl::{array, contiguous, empty, grid};
use crate::random::RANGE;
use crate::random::cubecl::{Rounds, column_bits, row_bits};

/// Stands for no word at all.
const NOTHING: f32 = -1e30;
/// Halvings until the interval around a bound is far below the spacing of logits.
const HALVINGS: u32 = 40;
/// Halvings until few more words lie above a bound than have to.
const ROUGH_HALVINGS: u32 = 14;
/// Units that choose a row's word, where the device allows them.
const UNITS: u32 = 512;
/// Groups of words that one of them has at the most.
const MOST_GROUPS: usize = 32;
/// Units that each look at a group of words: those as many words apart as there are units.
const GROUPERS: u32 = 256;
/// The least words of a group.
const WORDS: usize = 16;
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
    /// Words of a group.
    words: u32,
    /// Groups that a unit chooses among.
    each: usize,
}

impl Plan {
    /// Whether some words are left out of the draw.
    fn cuts(&self) -> bool {
        self.top_k || self.top_p || self.min_p
    }

    /// Whether the bound above which words are candidates is not known beforehand.
    fn searches(&self) -> bool {
        self.top_k || self.top_p
    }

    /// Units that look for that bound together: those of a plane, or all where there are none.
    fn searchers(&self) -> Team {
        let units = if self.team.plane > 1 { self.team.plane.min(self.team.units) } else { self.team.units };
        Team { units, ..self.team }
    }

    /// Whether the probability of all words together is needed.
    fn weighs(&self) -> bool {
        self.top_p && !self.top_k
    }
}

/// [`Sampling`]'s numbers.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Numbers {
    vocabulary: u32,
    groups: u32,
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
    let words = WORDS.max(vocabulary.div_ceil(MOST_GROUPS * team.units as usize).next_power_of_two());
    let parts = vocabulary.div_ceil(GROUPERS as usize * words);
    let groups = parts * GROUPERS as usize;
    let plan = Plan {
        team,
        penalised: counts.is_some(),
        draws,
        top_k: draws && sampling.top_k.is_some_and(|top_k| top_k < vocabulary),
        top_p: draws && sampling.top_p.is_some_and(|top_p| top_p < 1.0),
        min_p: draws && sampling.min_p.is_some_and(|min_p| min_p > 0.0),
        words: words as u32,
        each: groups.div_ceil(team.units as usize),
    };
    let largest = empty(&logits, [batch_size, groups], DType::F32);
    let largest_word = empty(&logits, [batch_size, groups], DType::U32);
    let masses = if plan.weighs() { empty(&logits, [batch_size, groups], DType::F32) } else { largest.clone() };
    let streams = contiguous(streams);
    let [prompt, written] = counts.unwrap_or_else(|| [logits.clone(), logits.clone()]);
    let penalties = sampling.penalties;
    let numbers = || {
        NumbersLaunch::new(
            vocabulary as u32,
            groups as u32,
            sampling.temperature as f32,
            sampling.top_k.map_or(0, |top_k| top_k.clamp(1, vocabulary) as u32),
            sampling.top_p.unwrap_or(1.0) as f32,
            sampling.min_p.map_or(0.0, |min_p| min_p.ln() as f32),
            penalties.repetition as f32,
            penalties.presence as f32,
            penalties.frequency as f32,
        )
    };
    // SAFETY: a unit reads words below `vocabulary` of a row below `batch_size`, and writes its own group of it; without
    // penalties the counts are not touched, and without top-p masses are not.
    unsafe {
        group_kernel::launch_unchecked(
            &logits.client,
            grid(batch_size * parts),
            CubeDim::new_1d(GROUPERS),
            array(&logits),
            array(&streams),
            array(&prompt),
            array(&written),
            array(&largest),
            array(&largest_word),
            array(&masses),
            batch_size as u32,
            numbers(),
            sampling.key.rounds(),
            plan,
            streams.dtype.into(),
        );
    }
    // SAFETY: a cube reads and counts in its own row, below `batch_size`, words below `vocabulary`; without penalties
    // the counts are not touched.
    unsafe {
        draw_kernel::launch_unchecked(
            &logits.client,
            grid(batch_size),
            team.cube_dim(),
            array(&logits),
            array(&streams),
            array(&prompt),
            array(&written),
            array(&largest),
            array(&largest_word),
            array(&masses),
            array(&out),
            batch_size as u32,
            numbers(),
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
    adjusted(logits[at as usize], prompt, written, at, numbers, plan)
}

/// A word's logit after penalties and temperature. Where there are several, all are read before the first comes here: what
/// a division does with small numbers is a branch, which no read is moved across.
#[cube]
fn adjusted(
    logit: f32,
    prompt: &Array<f32>,
    written: &Array<f32>,
    at: u32,
    numbers: &Numbers,
    #[comptime] plan: Plan,
) -> f32 {
    let mut value = logit;
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
fn several(
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
        values[i as usize] = logits[min(first + comptime!(i * plan.team.units), end - 1) as usize];
    }
    #[unroll]
    for i in 0..READS {
        let at = first + comptime!(i * plan.team.units);
        let value = adjusted(values[i as usize], prompt, written, min(at, end - 1), numbers, plan);
        values[i as usize] = select(at < end, value, NOTHING);
    }
    values
}

/// A logit with the noise of its word, the largest of which is a draw.
#[cube]
fn noisy(value: f32, bits: u32, word: u32, rounds: &Rounds) -> f32 {
    let uniform = (f32::cast_from(column_bits(bits, word, rounds)) + 0.5) / comptime!(RANGE as f32);
    value - (0.0f32 - uniform.ln()).ln()
}

/// The first of a group's words; its others are each as many words further as there are groups in a part.
#[cube]
fn first_of(group: u32, #[comptime] plan: Plan) -> u32 {
    group / GROUPERS * comptime!(GROUPERS * plan.words) + group % GROUPERS
}

/// The largest word of every group, with noise where nothing is left out of the draw, and its exponentials' sum.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn group_kernel<I: Int>(
    logits: &Array<f32>,
    streams: &Array<I>,
    prompt: &Array<f32>,
    written: &Array<f32>,
    largest: &mut Array<f32>,
    largest_word: &mut Array<u32>,
    masses: &mut Array<f32>,
    rows: u32,
    numbers: &Numbers,
    rounds: &Rounds,
    #[comptime] plan: Plan,
    #[define(I)] _stream_dtype: StorageType,
) {
    let parts = numbers.groups / GROUPERS;
    let row = CUBE_POS as u32 / parts;
    if row >= rows {
        terminate!();
    }
    let group = CUBE_POS as u32 % parts * GROUPERS + UNIT_POS;
    let first = first_of(group, plan);
    let start = row * numbers.vocabulary;
    let mut values = Array::<f32>::new(plan.words as usize);
    #[unroll]
    for i in 0..plan.words {
        values[i as usize] = logits[(start + min(first + i * GROUPERS, numbers.vocabulary - 1)) as usize];
    }
    #[unroll]
    for i in 0..plan.words {
        let at = start + min(first + i * GROUPERS, numbers.vocabulary - 1);
        values[i as usize] = adjusted(values[i as usize], prompt, written, at, numbers, plan);
    }
    let mut best = NOTHING.runtime();
    let mut word = first;
    let mut bits = 0u32;
    if comptime!(plan.draws && !plan.cuts()) {
        bits = row_bits(u32::cast_from(streams[row as usize]), rounds);
    }
    #[unroll]
    for i in 0..plan.words {
        let at = first + i * GROUPERS;
        let mut value = values[i as usize];
        if comptime!(plan.draws && !plan.cuts()) {
            value = noisy(value, bits, at, rounds);
        }
        if value > best && at < numbers.vocabulary {
            best = value;
            word = at;
        }
    }
    let to = (row * numbers.groups + group) as usize;
    largest[to] = best;
    largest_word[to] = word;
    if comptime!(plan.weighs()) {
        let mut mass = 0.0f32;
        #[unroll]
        for i in 0..plan.words {
            mass += select(first + i * GROUPERS < numbers.vocabulary, (values[i as usize] - best).exp(), 0.0f32);
        }
        masses[to] = mass;
    }
}

/// A cube chooses a row's word.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn draw_kernel<I: Int>(
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
    #[unroll]
    for i in 0..plan.each {
        let group = comptime!(i as u32 * plan.team.units) + UNIT_POS_X;
        let at = (row * numbers.groups + min(group, numbers.groups - 1)) as usize;
        tops[i] = select(group < numbers.groups, largest[at], NOTHING);
        let own = largest_word[at];
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

    // The first of the largest: words are numbers that f32 holds exactly.
    let most = team_max(best, team);
    let first = 0.0f32 - team_max(select(best == most, 0.0f32 - f32::cast_from(word), NOTHING), team);
    if UNIT_POS_X == 0 {
        let chosen = u32::cast_from(first);
        out[row as usize] = i32::cast_from(chosen);
        if comptime!(plan.penalised) {
            written[(start + chosen) as usize] += 1.0;
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

/// A bound that the words lie above which may be kept: so many units' largest words do. Every plane looks for it by itself,
/// without a barrier for each halving; where there are no planes, all units do together.
#[cube]
fn bound(best: f32, top: f32, numbers: &Numbers, #[comptime] plan: Plan) -> f32 {
    if comptime!(plan.searches()) {
        let searchers = comptime!(plan.searchers());
        let each = comptime!((plan.team.units / searchers.units) as usize);
        // As in an exchange, nobody still reads what may lie here.
        sync_cube();
        let mut bests = SharedMemory::<f32>::new(comptime!(plan.team.units as usize));
        bests[UNIT_POS_X as usize] = best;
        sync_cube();
        let mut values = Array::<f32>::new(each);
        let mut least = top;
        #[unroll]
        for i in 0..each {
            let unit = UNIT_POS_X % searchers.units + comptime!(i as u32 * searchers.units);
            values[i] = bests[unit as usize];
            least = select(values[i] > NOTHING, min(least, values[i]), least);
        }
        let wanted = if comptime!(plan.top_k) { numbers.top_k } else { comptime!(plan.team.units / 4).runtime() };
        let mut low = 0.0f32 - team_max(0.0f32 - least, searchers);
        let mut high = top;
        for _ in 0..ROUGH_HALVINGS {
            let middle = (low + high) * 0.5;
            let mut above = 0.0f32;
            #[unroll]
            for i in 0..each {
                above += select(values[i] >= middle, 1.0f32, 0.0f32);
            }
            let enough = team_sum(above, searchers) >= f32::cast_from(wanted);
            low = select(enough, middle, low);
            high = select(enough, high, middle);
        }
        low
    } else {
        top + numbers.min_p_ln
    }
}

/// The least logit that is kept, by halving over all words.
#[cube]
#[allow(clippy::too_many_arguments)]
fn halved_cut(
    logits: &Array<f32>,
    prompt: &Array<f32>,
    written: &Array<f32>,
    start: u32,
    end: u32,
    top: f32,
    numbers: &Numbers,
    #[comptime] plan: Plan,
) -> f32 {
    let team = comptime!(plan.team);
    let halvings = select(start < end, HALVINGS, 0u32);
    let mut floor = NOTHING.runtime();
    if comptime!(plan.top_k) {
        let wanted = f32::cast_from(numbers.top_k);
        floor = halved(logits, prompt, written, start, end, floor, top, wanted, halvings, false, numbers, plan);
    }
    if comptime!(plan.top_p) {
        let mut above_floor = 0.0f32;
        for at in range_stepped(start + UNIT_POS_X, end, comptime!(plan.team.units)) {
            let value = logit(logits, prompt, written, at, numbers, plan);
            above_floor += select(value >= floor, (value - top).exp(), 0.0f32);
        }
        let wanted = team_sum(above_floor, team) * numbers.top_p;
        floor = halved(logits, prompt, written, start, end, floor, top, wanted, halvings, true, numbers, plan);
    }
    if comptime!(plan.min_p) {
        floor = max(floor, top + numbers.min_p_ln);
    }
    floor
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
