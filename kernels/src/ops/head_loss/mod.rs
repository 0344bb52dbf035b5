//! Output projection and cross entropy in one operation, without storing the logits of a whole
//! batch.

mod autodiff;
#[cfg(feature = "ndarray")]
pub(crate) mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod cubecl;
#[cfg(feature = "cuda")]
mod cuda;
pub(crate) mod reference;

#[cfg(feature = "cuda")]
pub(crate) use self::cuda::hopper_sources;

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor};

use super::reshape::{ReshapeOps, as_rows};
use super::weight::WeightOps;
use crate::checked::{Checked, Operands, part};
use crate::mutation::{call, parts};
use crate::quant::Weight;
use crate::recorder::{self, Call};
use crate::selection::dispatch;

/// The target of an ignored position, as in PyTorch.
pub const IGNORED_TARGET: i32 = -100;

/// Options of the cross entropy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadLossOptions {
    /// Label smoothing: the share of probability spread over the vocabulary (Szegedy et al., 2016).
    pub label_smoothing: f64,
    /// Factor on the loss.
    pub weight: f64,
    /// Rows of logits per chunk; by default about 256 MB of them.
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

    /// With a factor, for a sum of losses.
    pub fn with_weight(mut self, weight: f64) -> Self {
        self.weight = weight;
        self
    }

    /// With this many rows of logits per chunk.
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

/// Results of the forward pass.
#[derive(Clone, Debug)]
pub struct HeadLossOutput<B: Backend> {
    /// Mean over the targets that count, times the options' weight, `[1]` f32, nats; zero if none
    /// counts.
    pub loss: Tensor<B, 1>,
    /// If requested, the gradients for an upstream gradient of one.
    pub gradients: Option<HeadLossGradients<B>>,
}

parts!(HeadLossOutput { loss, gradients });

/// The gradients of the head's loss.
#[derive(Clone, Debug)]
pub struct HeadLossGradients<B: Backend> {
    /// Of the hidden states, `[rows, d_model]`, in their dtype.
    pub hidden: Tensor<B, 2>,
    /// Of the weight, f32 `[vocabulary, d_model]`, if requested.
    pub weight: Option<Tensor<B, 2>>,
}

parts!(HeadLossGradients { hidden, weight });

/// The requested gradients of the head's loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadLossWanted {
    /// None.
    Nothing,
    /// Of the hidden states, for a frozen weight.
    Hidden,
    /// Of the hidden states and of the float weight.
    Both,
}

/// Operands of [`head_loss`].
#[derive(Clone, Debug)]
pub struct HeadLossForward<B: Backend> {
    /// `[rows, d_model]`.
    pub hidden: Tensor<B, 2>,
    /// `[vocabulary, d_model]`.
    pub weight: Weight<B>,
    /// `[rows]`.
    pub targets: Tensor<B, 1, Int>,
    /// Smoothing, weight and chunk size.
    pub options: HeadLossOptions,
    /// The gradients to compute for an upstream gradient of one: a single pass over the vocabulary
    /// computes all; the backward pass scales and accumulates them.
    pub wanted: HeadLossWanted,
}

impl<B: Backend> Operands for HeadLossForward<B> {
    fn check(&self) {
        let op = "head_loss";
        let hidden = part(op, "hidden", &self.hidden).float();
        let ([rows, d_model], [_, columns]) = (self.hidden.dims(), self.weight.dims());
        self.weight.check(op, "weight", columns == d_model, &hidden);
        if let (HeadLossWanted::Both, Some(format)) = (self.wanted, self.weight.format()) {
            panic!("{op}: weight is {}, and has no gradient", format.name());
        }
        part(op, "targets", &self.targets).integer().shaped(&[rows], &hidden);
    }
}

/// Operands of the backward pass.
#[derive(Clone, Debug)]
pub struct HeadLossBackward<B: Backend> {
    /// Gradient of the loss, `[1]`.
    pub grad: Tensor<B, 1>,
    /// The gradients for an upstream gradient of one.
    pub gradients: HeadLossGradients<B>,
    /// The weight's earlier gradient, f32 of its shape: added to in place, if not shared.
    pub sum: Option<Tensor<B, 2>>,
}

impl<B: Backend> Operands for HeadLossBackward<B> {
    fn check(&self) {
        let op = "head_loss backward";
        let hidden = part(op, "gradient of hidden", &self.gradients.hidden).float();
        if let Some(weight) = &self.gradients.weight {
            let dims = weight.dims();
            let weight = part(op, "gradient of weight", weight).of(DType::F32).fits(true, &hidden);
            if let Some(sum) = &self.sum {
                part(op, "sum", sum).of(DType::F32).shaped(&dims, &weight);
            }
        }
        part(op, "grad", &self.grad).of(DType::F32).shaped(&[1], &hidden);
    }
}

/// Output projection and cross entropy of a backend.
pub trait HeadLossOps: ReshapeOps + WeightOps {
    /// [`head_loss`]; [`Autodiff`](burn::backend::Autodiff) ties forward and backward together
    /// here.
    fn head_loss(operands: Checked<HeadLossForward<Self>>) -> Tensor<Self, 1> {
        head_loss_forward(operands).loss
    }
    /// Forward of [`head_loss`].
    fn head_loss_forward(operands: Checked<HeadLossForward<Self>>) -> HeadLossOutput<Self> {
        reference::head_loss_forward(operands.into_inner())
    }
    /// Backward of [`head_loss`]: the gradients, that of the weight including its earlier one.
    fn head_loss_backward(operands: Checked<HeadLossBackward<Self>>) -> HeadLossGradients<Self> {
        reference::head_loss_backward(operands.into_inner())
    }
}

/// Mean cross entropy, times the options' weight, `[1]` f32 in nats, of
/// `softmax(hidden * weight^T)` against `targets`.
///
/// - `hidden`: `[.., d_model]`, any float dtype; the product runs in it, statistics and loss in
///   f32;
/// - `weight`: `[vocabulary, d_model]`;
/// - `targets`: one per row of `hidden`, in `0..vocabulary`. Others, such as [`IGNORED_TARGET`], do
/// not count, on every backend.
///
/// # Panics
/// If the numbers of targets and rows differ, or `d_model` of `hidden` and of `weight`.
pub fn head_loss<B: HeadLossOps, const D: usize, const T: usize>(
    hidden: Tensor<B, D>,
    weight: impl Into<Weight<B>>,
    targets: Tensor<B, T, Int>,
    options: HeadLossOptions,
) -> Tensor<B, 1> {
    let weight = weight.into();
    let _op = recorder::op("head_loss", || {
        let flops = 2 * hidden.dims().iter().product::<usize>() * weight.dims()[0];
        Call::reads([recorder::operand(&hidden), weight.operand()]).computes(flops as u64)
    });
    let targets = targets.flatten::<1>(0, T - 1);
    let hidden = as_rows(hidden);
    call!(B: HeadLossOps::head_loss(Checked::new(HeadLossForward {
        hidden,
        weight,
        targets,
        options,
        wanted: HeadLossWanted::Nothing,
    })))
}

pub(crate) fn head_loss_forward<B: HeadLossOps>(operands: Checked<HeadLossForward<B>>) -> HeadLossOutput<B> {
    dispatch!(B: HeadLossOps::head_loss_forward(operands))
}

pub(crate) fn head_loss_backward<B: HeadLossOps>(operands: Checked<HeadLossBackward<B>>) -> HeadLossGradients<B> {
    dispatch!(B: HeadLossOps::head_loss_backward(operands))
}
