//! Output projection and sampling in one: only the chosen tokens leave, and they stay on the device.

pub(crate) mod reference;

use burn::tensor::{Int, Tensor};

use crate::{Backend, RandomKey, recorder};

/// How a token is chosen from the logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Zero takes the likeliest token; above zero, logits are divided by it.
    pub temperature: f64,
    /// Only this many likeliest tokens are drawn from, ties with the last included.
    pub top_k: Option<usize>,
    /// Only the likeliest tokens whose probabilities first reach this sum are drawn from (Holtzman et al., 2020).
    pub top_p: Option<f64>,
    /// Seed and step of the draw.
    pub key: RandomKey,
}

impl Sampling {
    /// The likeliest token.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, top_k: None, top_p: None, key: RandomKey::new(0) }
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
}

/// A token for each row of `hidden` `[batch_size, d_model]`, drawn from `softmax(hidden * weight^T / temperature)`,
/// `weight` being `[vocabulary, d_model]`: `[batch_size]` integers on the device.
///
/// top-k is applied first, then top-p to what it leaves. The draw is Gumbel's (the arg max of logits plus noise), and
/// the noise at (row, word) a pure function of [`Sampling::key`].
pub fn head_sample<B: Backend>(hidden: Tensor<B, 2>, weight: Tensor<B, 2>, sampling: &Sampling) -> Tensor<B, 1, Int> {
    let _op = recorder::op("head_sample", || vec![recorder::operand(&hidden), recorder::operand(&weight)]);
    B::head_sample(hidden, weight, sampling)
}
