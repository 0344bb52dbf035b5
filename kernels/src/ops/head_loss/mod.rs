//! Output projection and cross entropy in one, so that the logits of a whole batch are never held.

pub(crate) mod autodiff;
#[cfg(feature = "ndarray")]
pub(crate) mod cpu;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) mod cubecl;
pub(crate) mod reference;

use burn::tensor::{Int, Tensor};

use crate::Backend;
use crate::autodiff::as_rows;
use crate::recorder;

/// The target of a position that does not count, as PyTorch has it.
pub const IGNORED_TARGET: i32 = -100;

/// The numbers of a cross entropy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadLossOptions {
    /// Share of the target's probability that is spread evenly over the vocabulary (Szegedy et al., 2016).
    pub label_smoothing: f64,
    /// Factor on the loss.
    pub weight: f64,
    /// Rows of logits held at a time; the default holds about 256 MB of them.
    pub chunk: Option<usize>,
}

impl HeadLossOptions {
    /// Plain cross entropy.
    pub fn new() -> Self {
        Self { label_smoothing: 0.0, weight: 1.0, chunk: None }
    }

    /// With label smoothing.
    pub fn with_label_smoothing(mut self, label_smoothing: f64) -> Self {
        self.label_smoothing = label_smoothing;
        self
    }

    /// With a factor on the loss, where it is one of several.
    pub fn with_weight(mut self, weight: f64) -> Self {
        self.weight = weight;
        self
    }

    /// With this many rows of logits at a time.
    pub fn with_chunk(mut self, chunk: usize) -> Self {
        self.chunk = Some(chunk.max(1));
        self
    }
}

impl Default for HeadLossOptions {
    fn default() -> Self {
        Self::new()
    }
}

/// What the forward pass of the head's loss gives.
#[derive(Clone, Debug)]
pub struct HeadLossOutput<B: Backend> {
    /// Mean over the targets that count, times the options' weight, `[1]` f32, nats; zero where none counts.
    pub loss: Tensor<B, 1>,
    /// Where asked for, the gradients for an upstream gradient of one: of the hidden states, in their dtype, and of
    /// the weight, f32.
    pub gradients: Option<(Tensor<B, 2>, Tensor<B, 2>)>,
}

/// Mean cross entropy, times the options' weight, `[1]` f32 in nats, of `softmax(hidden * weight^T)` against `targets`.
///
/// - `hidden`: `[.., d_model]`, any float dtype; the product runs in it, statistics and loss in f32;
/// - `weight`: `[vocabulary, d_model]`;
/// - `targets`: one for each row of `hidden`, in `0..vocabulary`, or [`IGNORED_TARGET`].
///
/// # Panics
/// If the number of targets and of rows differ.
pub fn head_loss<B: Backend, const D: usize, const T: usize>(
    hidden: Tensor<B, D>,
    weight: Tensor<B, 2>,
    targets: Tensor<B, T, Int>,
    options: HeadLossOptions,
) -> Tensor<B, 1> {
    let _op = recorder::op("head_loss", || vec![recorder::operand(&hidden), recorder::operand(&weight)]);
    let hidden = as_rows(hidden);
    let targets = targets.flatten::<1>(0, T - 1);
    assert_eq!(hidden.dims()[0], targets.dims()[0], "head_loss: as many targets as rows are needed");
    B::head_loss(hidden, weight, targets, options)
}
