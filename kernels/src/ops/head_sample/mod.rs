//! Output projection and sampling in one: only the chosen tokens leave, and they stay on the device.

mod counts;
#[cfg(feature = "ndarray")]
pub(crate) mod cpu;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) mod cubecl;
pub(crate) mod reference;

pub use counts::{SampledRows, TokenCounts};

use burn::tensor::{Int, Tensor};

use crate::{Backend, RandomKey, Weight, recorder};

/// What words that a text has already lose. The default takes nothing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Penalties {
    /// Positive logits of words in the prompt or behind it are divided by it, negative ones multiplied (Keskar et al.,
    /// 2019, "CTRL"). One takes nothing.
    pub repetition: f64,
    /// Taken from the logit of each word written so far.
    pub presence: f64,
    /// Taken from the logit of a word for each time that it was written so far.
    pub frequency: f64,
}

impl Penalties {
    /// Whether nothing is taken.
    pub fn are_none(&self) -> bool {
        *self == Self::default()
    }
}

impl Default for Penalties {
    fn default() -> Self {
        Self { repetition: 1.0, presence: 0.0, frequency: 0.0 }
    }
}

/// How a token is chosen from the logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Zero takes the likeliest token; above zero, logits are divided by it.
    pub temperature: f64,
    /// Only this many likeliest tokens are drawn from, ties with the last included.
    pub top_k: Option<usize>,
    /// Only the likeliest tokens whose probabilities first reach this sum are drawn from (Holtzman et al., 2020).
    pub top_p: Option<f64>,
    /// Only words at least this likely, as a share of the likeliest one's probability, are drawn from (Nguyen et al.,
    /// 2024).
    pub min_p: Option<f64>,
    /// Taken from logits before anything else, where the tokens so far are known.
    pub penalties: Penalties,
    /// Seed and step of the draw.
    pub key: RandomKey,
}

impl Sampling {
    /// The likeliest token.
    pub fn greedy() -> Self {
        let penalties = Penalties::default();
        Self { temperature: 0.0, top_k: None, top_p: None, min_p: None, penalties, key: RandomKey::new(0) }
    }

    /// A draw at `temperature` by the bits of `key`.
    pub fn with_temperature(mut self, temperature: f64, key: RandomKey) -> Self {
        (self.temperature, self.key) = (temperature, key);
        self
    }

    /// Among the `top_k` likeliest.
    pub fn with_top_k(mut self, top_k: Option<usize>) -> Self {
        self.top_k = top_k;
        self
    }

    /// Among the likeliest that make up `top_p`.
    pub fn with_top_p(mut self, top_p: Option<f64>) -> Self {
        self.top_p = top_p;
        self
    }

    /// Among those at least `min_p` times as likely as the likeliest.
    pub fn with_min_p(mut self, min_p: Option<f64>) -> Self {
        self.min_p = min_p;
        self
    }

    /// After penalties.
    pub fn with_penalties(mut self, penalties: Penalties) -> Self {
        self.penalties = penalties;
        self
    }
}

/// A token for each row of `hidden` `[batch_size, d_model]`, drawn from `softmax(hidden * weight^T / temperature)`,
/// `weight` being `[vocabulary, d_model]`: `[batch_size]` integers on the device.
///
/// Penalties come first, for words that a row has; then temperature, top-k, top-p to what that leaves, and min-p. The
/// draw is Gumbel's (the arg max of logits plus noise), and the noise at (stream, word) a pure function of
/// [`Sampling::key`]: a row draws the same alone and in any batch.
///
/// # Panics
/// If there are not as many streams as rows.
pub fn head_sample<B: Backend>(
    hidden: Tensor<B, 2>,
    weight: impl Into<Weight<B>>,
    sampling: &Sampling,
    rows: &mut SampledRows<B>,
) -> Tensor<B, 1, Int> {
    let weight = weight.into();
    let _op = recorder::op("head_sample", || vec![recorder::operand(&hidden), weight.operand()]);
    assert_eq!(rows.streams.dims()[0], hidden.dims()[0], "head_sample: a stream for each row");
    B::draw(B::logits(hidden, &weight), sampling, rows)
}
