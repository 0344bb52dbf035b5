//! Output projection and sampling in one operation: only the sampled tokens leave it, and stay on
//! the device.

mod autodiff;
mod counts;
#[cfg(feature = "ndarray")]
pub(crate) mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod cubecl;
#[cfg(feature = "cuda")]
mod cuda;
pub(crate) mod reference;

use self::counts::NUMBERS;
pub use counts::{SampledRow, SampledRows, TokenCounts};
#[cfg(feature = "cuda")]
pub(crate) use cuda::{draw_source, hopper_sources};

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor};

use super::linear::LinearOps;
use crate::checked::{Checked, Operands, part};
use crate::mutation;
use crate::quant::Weight;
use crate::random::RandomKey;
use crate::recorder::{self, Call};
use crate::rehearsal;
use crate::selection::dispatch;

/// Maximum vocabulary size: kernels compare token ids in f32, where these are exact.
const MOST_TOKENS: usize = 1 << 24;

/// Penalties of tokens that a sequence already has. The default has no effect.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Penalties {
    /// Repetition penalty: divides positive logits of tokens in the prompt or the output, and
    /// multiplies negative ones (Keskar et al., 2019, "CTRL"). One has no effect.
    pub repetition: f64,
    /// Presence penalty: subtracted from the logit of every token already generated.
    pub presence: f64,
    /// Frequency penalty: subtracted from a token's logit for each time it was already generated.
    pub frequency: f64,
}

impl Penalties {
    /// Whether they have no effect.
    pub fn are_none(&self) -> bool {
        *self == Self::default()
    }
}

impl Default for Penalties {
    fn default() -> Self {
        Self { repetition: 1.0, presence: 0.0, frequency: 0.0 }
    }
}

/// Sampling parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Temperature: divides the logits; zero is greedy.
    pub temperature: f64,
    /// Top-k sampling, including ties with the last.
    pub top_k: Option<usize>,
    /// Top-p sampling: the smallest set of top tokens with this total probability (Holtzman et al.,
    /// 2020).
    pub top_p: Option<f64>,
    /// Min-p sampling: tokens with at least this share of the top token's probability (Nguyen et
    /// al., 2024).
    pub min_p: Option<f64>,
    /// Penalties, applied to the logits first, if token counts are known.
    pub penalties: Penalties,
    /// Its random stream.
    pub stream: u32,
}

impl Sampling {
    /// Greedy sampling.
    pub fn greedy() -> Self {
        let penalties = Penalties::default();
        Self { temperature: 0.0, top_k: None, top_p: None, min_p: None, penalties, stream: 0 }
    }

    /// With a temperature.
    pub fn with_temperature(mut self, temperature: f64) -> Self {
        self.temperature = temperature;
        self
    }

    /// With the random stream of a sequence: the same for the same seed and index, in any batch.
    pub fn with_seed(mut self, seed: u64, text: u64) -> Self {
        self.stream = RandomKey::new(seed).fold(text).word();
        self
    }

    /// With top-k.
    pub fn with_top_k(mut self, top_k: Option<usize>) -> Self {
        self.top_k = top_k;
        self
    }

    /// With top-p.
    pub fn with_top_p(mut self, top_p: Option<f64>) -> Self {
        self.top_p = top_p;
        self
    }

    /// With min-p.
    pub fn with_min_p(mut self, min_p: Option<f64>) -> Self {
        self.min_p = min_p;
        self
    }

    /// With penalties.
    pub fn with_penalties(mut self, penalties: Penalties) -> Self {
        self.penalties = penalties;
        self
    }

    /// Checks that the parameters are valid in f32, as used on the device.
    ///
    /// # Errors
    /// Names the value: a temperature that is negative, not finite, or above zero but zero in f32;
    /// a top-p outside of (0, 1]; a min-p outside of [0, 1]; a repetition penalty that is not above
    /// zero, or a penalty that is not finite.
    pub fn validate(&self) -> Result<(), String> {
        let Self { temperature, top_p, min_p, penalties, .. } = *self;
        let as_f32 = temperature as f32;
        if !as_f32.is_finite() || temperature < 0.0 || (as_f32 > 0.0) != (temperature > 0.0) {
            return Err(format!("a temperature of {temperature}"));
        }
        if let Some(top_p) = top_p.filter(|top_p| !(*top_p > 0.0 && *top_p <= 1.0)) {
            return Err(format!("a top-p of {top_p}"));
        }
        if let Some(min_p) = min_p.filter(|min_p| !(0.0..=1.0).contains(min_p)) {
            return Err(format!("a min-p of {min_p}"));
        }
        let Penalties { repetition, presence, frequency } = penalties;
        let finite = [repetition, presence, frequency].iter().all(|penalty| (*penalty as f32).is_finite());
        if !finite || repetition as f32 <= 0.0 {
            return Err(format!("penalties of {repetition}, {presence} and {frequency}"));
        }
        Ok(())
    }

    /// Its parameters on the device.
    fn numbers(&self) -> [f32; NUMBERS] {
        let Penalties { repetition, presence, frequency } = self.penalties;
        [
            self.temperature as f32,
            self.top_k.map_or(MOST_TOKENS, |top_k| top_k.clamp(1, MOST_TOKENS)) as f32,
            // If it underflows to zero in f32, only the top token is kept, like for any tiny value.
            (self.top_p.unwrap_or(1.0) as f32).max(f32::MIN_POSITIVE),
            self.min_p.map_or(f32::NEG_INFINITY, |min_p| min_p.ln() as f32),
            repetition as f32,
            presence as f32,
            frequency as f32,
        ]
    }
}

/// Operands of the logits.
#[derive(Clone, Debug)]
pub struct Logits<B: Backend> {
    /// `[batch_size, d_model]`.
    pub hidden: Tensor<B, 2>,
    /// `[vocabulary, d_model]`.
    pub weight: Weight<B>,
}

impl<B: Backend> Operands for Logits<B> {
    fn check(&self) {
        let hidden = part("head_sample", "hidden", &self.hidden).float();
        let fits = self.hidden.dims()[1] == self.weight.dims()[1];
        self.weight.check("head_sample", "weight", fits, &hidden);
    }
}

/// Operands of sampling.
#[derive(Debug)]
pub struct Draw<'a, B: Backend> {
    /// `[batch_size, vocabulary]`, f32.
    pub logits: Tensor<B, 2>,
    /// Sampling parameters of each row.
    pub rows: &'a SampledRows<B>,
    /// Position of the last token of each row, `[batch_size]`.
    pub positions: Tensor<B, 1, Int>,
    /// Token counts of rows with lines; sampled tokens are added.
    pub counts: Option<&'a mut TokenCounts<B>>,
}

impl<B: Backend> Operands for Draw<'_, B> {
    fn check(&self) {
        let op = "head_sample";
        let logits = part(op, "logits", &self.logits).of(DType::F32);
        let [batch_size, vocabulary] = self.logits.dims();
        self.rows.check(op, self.counts.as_deref(), [batch_size, vocabulary], &logits);
        part(op, "positions", &self.positions).integer().shaped(&[batch_size], &logits);
    }
}

/// Output projection and sampling of a backend. They have no gradient.
pub trait HeadSampleOps: LinearOps {
    /// The first half of [`head_sample`]: logits `[batch_size, vocabulary]`, f32.
    fn logits(operands: Checked<Logits<Self>>) -> Tensor<Self, 2> {
        reference::logits(operands.into_inner())
    }
    /// The second half of [`head_sample`]: a token for each row of f32 logits.
    fn draw(operands: Checked<Draw<'_, Self>>) -> Tensor<Self, 1, Int> {
        reference::draw(operands.into_inner())
    }
}

/// Samples a token for each row of `hidden` `[batch_size, d_model]` from `softmax(hidden * weight^T
/// / temperature)`, with `weight` `[vocabulary, d_model]`: `[batch_size]` integers on the device.
///
/// Each row has its own parameters. If it has a line in `counts`, biases and penalties come first;
/// then temperature, top-k, top-p over the rest, and min-p. Sampling is Gumbel's (the argmax of
/// logits plus noise), and a token's noise is a pure function of the row's
/// [`stream`](Sampling::stream) and its position: a row samples the same alone and in any batch.
///
/// A row with a NaN logit samples -1, on every backend, and counts nothing.
///
/// # Panics
/// If the numbers of rows or positions differ from that of `hidden`, or sizes do not fit.
pub fn head_sample<B: HeadSampleOps>(
    hidden: Tensor<B, 2>,
    weight: impl Into<Weight<B>>,
    rows: &SampledRows<B>,
    positions: Tensor<B, 1, Int>,
    counts: Option<&mut TokenCounts<B>>,
) -> Tensor<B, 1, Int> {
    let weight = weight.into();
    let _op = recorder::op("head_sample", || operands_of(&hidden, &weight));
    drawn(logits_of(hidden, weight), rows, positions, counts)
}

/// [`head_sample`] that also returns the logits, f32 `[batch_size, vocabulary]`, before biases and
/// penalties.
///
/// # Panics
/// As [`head_sample`].
pub fn head_sample_logits<B: HeadSampleOps>(
    hidden: Tensor<B, 2>,
    weight: impl Into<Weight<B>>,
    rows: &SampledRows<B>,
    positions: Tensor<B, 1, Int>,
    counts: Option<&mut TokenCounts<B>>,
) -> (Tensor<B, 1, Int>, Tensor<B, 2>) {
    let weight = weight.into();
    let _op = recorder::op("head_sample", || operands_of(&hidden, &weight));
    let logits = logits_of(hidden, weight);
    (drawn(logits.clone(), rows, positions, counts), logits)
}

/// The first half of [`head_sample`]: logits of `hidden` `[batch_size, d_model]`, f32 `[batch_size,
/// vocabulary]`.
///
/// # Panics
/// If sizes do not fit.
pub fn head_logits<B: HeadSampleOps>(hidden: Tensor<B, 2>, weight: impl Into<Weight<B>>) -> Tensor<B, 2> {
    let weight = weight.into();
    let _op = recorder::op("head_logits", || operands_of(&hidden, &weight));
    logits_of(hidden, weight)
}

/// The second half of [`head_sample`]: samples a token for each row of `logits` `[batch_size,
/// vocabulary]`, f32.
///
/// # Panics
/// As [`head_sample`].
pub fn draw<B: HeadSampleOps>(
    logits: Tensor<B, 2>,
    rows: &SampledRows<B>,
    positions: Tensor<B, 1, Int>,
    counts: Option<&mut TokenCounts<B>>,
) -> Tensor<B, 1, Int> {
    let _op = recorder::op("draw", || Call::reads([recorder::operand(&logits)]));
    drawn(logits, rows, positions, counts)
}

fn drawn<B: HeadSampleOps>(
    logits: Tensor<B, 2>,
    rows: &SampledRows<B>,
    positions: Tensor<B, 1, Int>,
    mut counts: Option<&mut TokenCounts<B>>,
) -> Tensor<B, 1, Int> {
    if counts.is_some() {
        rehearsal::refuse("draw");
    }
    let draw = Draw { logits, rows, positions, counts: counts.as_deref_mut() };
    let tokens = dispatch!(B: HeadSampleOps::draw(Checked::new(draw)));
    if let Some(counts) = counts {
        mutation::state("draw", "written", &mut counts.written);
    }
    tokens
}

fn logits_of<B: HeadSampleOps>(hidden: Tensor<B, 2>, weight: Weight<B>) -> Tensor<B, 2> {
    dispatch!(B: HeadSampleOps::logits(Checked::new(Logits { hidden, weight })))
}

fn operands_of<B: Backend>(hidden: &Tensor<B, 2>, weight: &Weight<B>) -> Call {
    let weight = weight.operand();
    let flops = 2 * hidden.dims()[0] * weight.dims.iter().product::<usize>();
    Call::reads([recorder::operand(hidden), weight]).computes(flops as u64)
}

/// The base key of all sampling.
pub(crate) fn draws_key() -> RandomKey {
    RandomKey::new(0)
}
