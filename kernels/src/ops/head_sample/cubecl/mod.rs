//! Sampling in CubeCL without a sort, in two launches.
//!
//! ```text
//! group_kernel   many cubes: the vocabulary in groups of tokens -> each group's largest logit and
//!                token (and its sum of exponentials, for top-p alone)
//! draw_kernel    a cube per row: a unit takes the largest of its groups; the bound is what top_k of
//!                these reach (a quarter of the units for top-p alone; the largest plus ln(min_p) for
//!                min-p alone)
//!                -> candidates: the tokens above it, from the groups whose largest is above it
//!                -> each counts the candidates above it and adds up their probabilities: the cut of top-k and top-p
//!                -> the largest logit plus Gumbel noise above the cut is the draw
//! ```
//!
//! If the candidates are too many for the cube, or too few for the cut, bisection over all tokens
//! narrows the interval.

mod cut;
mod group;
mod pick;
pub(crate) mod sampling_params;

use burn::tensor::{DType, FloatDType, Tensor};
use burn_cubecl::element::BoolElement;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement};
use cubecl::prelude::*;

use self::group::group_kernel;
use self::pick::draw_kernel;
use self::sampling_params::{SamplingParams, own_counts};
use super::counts::{Kind, NUMBERS};
use super::{Draw, HeadSampleOps, Logits, draws_key};
use crate::checked::Checked;
use crate::cubecl::reduce::RowUnits;
use crate::cubecl::{array, clamp_index, contiguous, empty, grid};
use crate::masked::MASKED;
use crate::ops::linear::cubecl::cube_weight;
use crate::ops::linear::cubecl::few_rows_product_of;
use crate::ops::linear::cubecl::gemm::product;
use crate::ops::linear::cubecl::layout::transposed;
use crate::ops::linear::cubecl::skinny::{Epilogue, project_skinny};
use crate::ops::linear::route::SKINNY_ROWS;
use crate::random::RANGE;
use crate::random::cubecl::{Rounds, column_bits, row_bits};
use crate::tensor::{float, primitive};

/// Stands for the largest token of a group with a NaN logit.
const BROKEN: u32 = u32::MAX;
/// Bisection steps until the interval around a bound is far below the spacing of logits.
const HALVINGS: u32 = 40;
/// Bisection steps until few more tokens than necessary exceed a bound.
const ROUGH_HALVINGS: u32 = 14;
/// Units per row's choice, if the device supports them.
const UNITS: u32 = 512;
/// Maximum groups of tokens per unit.
const MOST_GROUPS: usize = 32;
/// Units that each process a group of tokens: those with a stride of the number of units.
const GROUPERS: u32 = 256;
/// Minimum tokens per group.
const TOKENS_A_GROUP: usize = 16;
/// Tokens that a unit loads together.
const READS: u32 = 8;

/// Compile-time values of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Variant {
    row_units: RowUnits,
    counted: bool,
    draws: bool,
    top_k: bool,
    top_p: bool,
    min_p: bool,
    /// Tokens per group.
    tokens: u32,
    /// Groups that a unit chooses among.
    each: usize,
}

impl Variant {
    /// Whether some tokens are truncated.
    fn cuts(&self) -> bool {
        self.top_k || self.top_p || self.min_p
    }

    /// Whether the bound of candidates has to be searched.
    fn searches(&self) -> bool {
        self.top_k || self.top_p
    }

    /// Units that search for that bound together: those of a plane, or all without planes.
    fn searchers(&self) -> RowUnits {
        let units = if self.row_units.plane > 1 {
            self.row_units.plane.min(self.row_units.units)
        } else {
            self.row_units.units
        };
        RowUnits { units, ..self.row_units }
    }

    /// Whether the total probability of all tokens is needed.
    fn weighs(&self) -> bool {
        self.top_p && !self.top_k
    }
}

/// The parameters of a row.
#[derive(CubeType, Clone, Copy)]
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
    /// Offset from a logit to its token's counts, modulo 2^32.
    to_counts: u32,
}

/// Sizes shared by all rows of a launch.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    /// Rows of the launch, and the first of them among the members.
    rows: u32,
    first: u32,
    /// Rows of the batch, and lines of counts.
    batch_size: u32,
    lines: u32,
    vocabulary: u32,
    groups: u32,
}

/// A row's parameters in the array, [`NUMBERS`] per row.
#[cube]
fn numbers_of<I: Int>(row: u32, numbers: &Array<f32>, lines: &Array<I>, sizes: &Sizes) -> Numbers {
    let first = row * comptime!(NUMBERS as u32);
    let line = clamp_index::<I>(lines[row as usize], sizes.lines - 1);
    Numbers {
        vocabulary: sizes.vocabulary,
        groups: sizes.groups,
        temperature: numbers[first as usize],
        top_k: min(u32::cast_from(numbers[(first + 1) as usize]), sizes.vocabulary),
        top_p: numbers[(first + 2) as usize],
        min_p_ln: numbers[(first + 3) as usize],
        repetition: numbers[(first + 4) as usize],
        presence: numbers[(first + 5) as usize],
        frequency: numbers[(first + 6) as usize],
        to_counts: (line - row) * sizes.vocabulary,
    }
}

impl<R, F, I, BT> HeadSampleOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn logits(operands: Checked<Logits<Self>>) -> Tensor<Self, 2> {
        let Logits { hidden, weight } = operands.into_inner();
        let rows = primitive(hidden.clone());
        if let Some(logits) = few_rows_product_of(&rows, None, &weight, &Epilogue::none(DType::F32)) {
            return float(logits);
        }
        if hidden.dims()[0] <= SKINNY_ROWS {
            let weight = cube_weight(weight, hidden.dtype());
            return float(project_skinny(primitive(hidden), weight, Epilogue::none(DType::F32)));
        }
        let dtype = hidden.dtype();
        let weight = primitive(weight.into_float(FloatDType::from(dtype)));
        float(product(primitive(hidden), transposed(weight), dtype, DType::F32))
    }

    fn draw(operands: Checked<Draw<'_, Self>>) -> Tensor<Self, 1, burn::tensor::Int> {
        let Draw { logits, rows, positions, counts } = operands.into_inner();
        let counts = counts.map(own_counts);
        let positions = contiguous(positions.into_primitive());
        let params = SamplingParams::new(rows);
        let logits = contiguous(primitive(logits));
        let out = empty(&logits, [logits.meta.shape()[0]], DType::I32);
        #[cfg(feature = "cuda")]
        if super::cuda::draw(&logits, &params, &positions, counts.as_ref(), &out) {
            return Tensor::from_primitive(out);
        }
        let mut first = 0;
        for (kind, count) in &rows.kinds {
            draw(
                &logits,
                *kind,
                [first, *count],
                (&params, &positions),
                counts.as_ref().filter(|_| kind.counted),
                &out,
            );
            first += count;
        }
        Tensor::from_primitive(out)
    }
}

/// Samples a token for each of `count` members of one kind, from `first` on, into `out`
/// `[batch_size]`. `counts` are those of the prompts, those of the generated tokens, which are
/// updated, and biases.
fn draw<R: CubeRuntime>(
    logits: &CubeTensor<R>,
    kind: Kind,
    [first, count]: [usize; 2],
    (params, positions): (&SamplingParams<R>, &CubeTensor<R>),
    counts: Option<&[CubeTensor<R>; 3]>,
    out: &CubeTensor<R>,
) {
    let [batch_size, vocabulary] = [logits.meta.shape()[0], logits.meta.shape()[1]];
    let hardware = &logits.client.properties().hardware;
    let row_units = RowUnits::new(&logits.client, 32, 1, 32);
    // Without planes each exchange takes shared memory for all units, and there are a dozen of
    // them.
    let most = if row_units.plane == 1 { UNITS / 4 } else { UNITS };
    let units = most.min(hardware.max_units_per_cube).min(hardware.max_cube_dim.0);
    let row_units = RowUnits { units: 1 << units.ilog2(), rows: 1, ..row_units };
    let tokens = TOKENS_A_GROUP.max(vocabulary.div_ceil(MOST_GROUPS * row_units.units as usize).next_power_of_two());
    let parts = vocabulary.div_ceil(GROUPERS as usize * tokens);
    let groups = parts * GROUPERS as usize;
    let variant = Variant {
        row_units,
        counted: counts.is_some(),
        draws: kind.draws,
        top_k: kind.top_k,
        top_p: kind.top_p,
        min_p: kind.min_p,
        tokens: tokens as u32,
        each: groups.div_ceil(row_units.units as usize),
    };
    let largest = empty(logits, [batch_size, groups], DType::F32);
    let largest_token = empty(logits, [batch_size, groups], DType::U32);
    let masses = if variant.weighs() { empty(logits, [batch_size, groups], DType::F32) } else { largest.clone() };
    let none = [(); 3].map(|()| logits.clone());
    let [prompt, written, bias] = counts.unwrap_or(&none);
    let lines = if variant.counted { prompt.meta.shape()[0] } else { 1 };
    let sizes = || {
        let [rows, first, batch_size] = [count, first, batch_size].map(|count| count as u32);
        SizesLaunch::new(rows, first, batch_size, lines as u32, vocabulary as u32, groups as u32)
    };
    let SamplingParams { members, streams, lines, numbers } = params;
    // SAFETY: a unit reads tokens below `vocabulary` of a row below `batch_size`, and writes its
    // own group of it; without lines the counts are not touched, and without top-p masses are not.
    unsafe {
        group_kernel::launch_unchecked(
            &logits.client,
            grid(count * parts),
            CubeDim::new_1d(GROUPERS),
            array(logits),
            array(members),
            array(streams),
            array(positions),
            array(lines),
            array(numbers),
            array(prompt),
            array(written),
            array(bias),
            array(&largest),
            array(&largest_token),
            array(&masses),
            sizes(),
            draws_key().rounds(),
            variant,
            streams.dtype.into(),
            positions.dtype.into(),
        );
    }
    // SAFETY: a cube reads and counts in its own row, below `batch_size`, tokens below
    // `vocabulary`; without lines the counts are not touched.
    unsafe {
        draw_kernel::launch_unchecked(
            &logits.client,
            grid(count),
            row_units.cube_dim(),
            array(logits),
            array(members),
            array(streams),
            array(positions),
            array(lines),
            array(numbers),
            array(prompt),
            array(written),
            array(bias),
            array(&largest),
            array(&largest_token),
            array(&masses),
            array(out),
            sizes(),
            draws_key().rounds(),
            variant,
            streams.dtype.into(),
            positions.dtype.into(),
        );
    }
}

/// Shared random bits of a row's tokens at a position.
#[cube]
fn place_bits<I: Int, P: Int>(row: u32, streams: &Array<I>, positions: &Array<P>, rounds: &Rounds) -> u32 {
    let stream = row_bits(u32::cast_from(streams[row as usize]), rounds);
    row_bits(stream ^ u32::cast_from(positions[row as usize]), rounds)
}

/// The logit of a token, after penalties and temperature.
#[cube]
fn logit(
    logits: &Array<f32>,
    prompt: &Array<f32>,
    written: &Array<f32>,
    bias: &Array<f32>,
    at: u32,
    numbers: &Numbers,
    #[comptime] variant: Variant,
) -> f32 {
    adjusted(logits[at as usize], prompt, written, bias, at, numbers, variant)
}

/// A token's logit after penalties and temperature. Several tokens are loaded first: division
/// branches on small numbers, and loads are not moved across branches.
#[cube]
fn adjusted(
    logit: f32,
    prompt: &Array<f32>,
    written: &Array<f32>,
    bias: &Array<f32>,
    at: u32,
    numbers: &Numbers,
    #[comptime] variant: Variant,
) -> f32 {
    let mut value = logit;
    if comptime!(variant.counted) {
        let known = (at + numbers.to_counts) as usize;
        value += bias[known];
        let behind = written[known];
        if prompt[known] + behind > 0.0 {
            value = select(value < 0.0, value * numbers.repetition, value / numbers.repetition);
        }
        if behind > 0.0 {
            value -= numbers.presence + behind * numbers.frequency;
        }
    }
    if comptime!(variant.draws) {
        value /= numbers.temperature;
    }
    value
}

/// The logits of some of a unit's tokens, from `first` on, up to the row's end; all are loaded
/// before any is used.
#[cube]
fn several(
    logits: &Array<f32>,
    prompt: &Array<f32>,
    written: &Array<f32>,
    bias: &Array<f32>,
    first: u32,
    end: u32,
    numbers: &Numbers,
    #[comptime] variant: Variant,
) -> Array<f32> {
    let mut values = Array::<f32>::new(READS as usize);
    #[unroll]
    for i in 0..READS {
        values[i as usize] = logits[min(first + comptime!(i * variant.row_units.units), end - 1) as usize];
    }
    #[unroll]
    for i in 0..READS {
        let at = first + comptime!(i * variant.row_units.units);
        let value = adjusted(values[i as usize], prompt, written, bias, min(at, end - 1), numbers, variant);
        values[i as usize] = select(at < end, value, MASKED);
    }
    values
}

/// A logit with its token's noise; the largest is sampled.
#[cube]
fn noisy(value: f32, bits: u32, token: u32, rounds: &Rounds) -> f32 {
    let uniform = (f32::cast_from(column_bits(bits, token, rounds)) + 0.5) / comptime!(RANGE as f32);
    value - (0.0f32 - uniform.ln()).ln()
}

/// The first token of a group; the others follow with a stride of the number of groups in a part.
#[cube]
fn first_of(group: u32, #[comptime] variant: Variant) -> u32 {
    group / GROUPERS * comptime!(GROUPERS * variant.tokens) + group % GROUPERS
}
