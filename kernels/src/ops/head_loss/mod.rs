//! Output projection and cross entropy in one, so that the logits of a whole batch are never held.

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
use crate::checked::{Checked, Operands, part};
use crate::mutation::{call, parts};
use crate::recorder::{self, Call};
use crate::selection::dispatch;

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

parts!(HeadLossOutput { loss, gradients });

/// What [`head_loss`] computes with.
#[derive(Clone, Debug)]
pub struct HeadLossForward<B: Backend> {
    /// `[rows, d_model]`.
    pub hidden: Tensor<B, 2>,
    /// `[vocabulary, d_model]`.
    pub weight: Tensor<B, 2>,
    /// `[rows]`.
    pub targets: Tensor<B, 1, Int>,
    /// Smoothing, weight and chunk.
    pub options: HeadLossOptions,
    /// Whether the gradients for an upstream gradient of one are wanted, too: one pass over the vocabulary gives both,
    /// and the backward pass scales them, and adds them to what there is.
    pub gradients: bool,
}

impl<B: Backend> Operands for HeadLossForward<B> {
    fn check(&self) {
        let op = "head_loss";
        let hidden = part(op, "hidden", &self.hidden).float();
        let ([rows, d_model], [_, columns]) = (self.hidden.dims(), self.weight.dims());
        part(op, "weight", &self.weight).float().fits(columns == d_model, &hidden);
        part(op, "targets", &self.targets).integer().shaped(&[rows], &hidden);
    }
}

/// What the gradients of [`head_loss`] are scaled with.
#[derive(Clone, Debug)]
pub struct HeadLossBackward<B: Backend> {
    /// Gradient of the loss, `[1]`.
    pub grad: Tensor<B, 1>,
    /// Gradient of the hidden states for an upstream gradient of one.
    pub d_hidden: Tensor<B, 2>,
    /// That of the weight, f32.
    pub d_weight: Tensor<B, 2>,
    /// What the gradient of the weight is added to, f32 of its shape: in its place, where nothing else holds it.
    pub sum: Option<Tensor<B, 2>>,
}

impl<B: Backend> Operands for HeadLossBackward<B> {
    fn check(&self) {
        let op = "head_loss backward";
        let hidden = part(op, "gradient of hidden", &self.d_hidden).float();
        let weight = part(op, "gradient of weight", &self.d_weight).of(DType::F32).fits(true, &hidden);
        if let Some(sum) = &self.sum {
            part(op, "sum", sum).of(DType::F32).shaped(&self.d_weight.dims(), &weight);
        }
        part(op, "grad", &self.grad).of(DType::F32).shaped(&[1], &hidden);
    }
}

/// Output projection and cross entropy on a backend.
pub trait HeadLossOps: ReshapeOps {
    /// Body of [`head_loss`]; [`Autodiff`](burn::backend::Autodiff) ties forward and backward together here.
    fn head_loss(operands: Checked<HeadLossForward<Self>>) -> Tensor<Self, 1> {
        head_loss_forward(operands).loss
    }
    /// Forward of [`head_loss`].
    fn head_loss_forward(operands: Checked<HeadLossForward<Self>>) -> HeadLossOutput<Self> {
        reference::head_loss_forward(operands.into_inner())
    }
    /// Backward of [`head_loss`]: the gradients of the hidden states and of the weight, the latter with what it was to be added to.
    fn head_loss_backward(operands: Checked<HeadLossBackward<Self>>) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        reference::head_loss_backward(operands.into_inner())
    }
}

/// Mean cross entropy, times the options' weight, `[1]` f32 in nats, of `softmax(hidden * weight^T)` against `targets`.
///
/// - `hidden`: `[.., d_model]`, any float dtype; the product runs in it, statistics and loss in f32;
/// - `weight`: `[vocabulary, d_model]`;
/// - `targets`: one for each row of `hidden`, in `0..vocabulary`. Any other, [`IGNORED_TARGET`] among them, does not
///   count, on every backend.
///
/// # Panics
/// If the number of targets and of rows differ, or `d_model` of `hidden` and of `weight`.
pub fn head_loss<B: HeadLossOps, const D: usize, const T: usize>(
    hidden: Tensor<B, D>,
    weight: Tensor<B, 2>,
    targets: Tensor<B, T, Int>,
    options: HeadLossOptions,
) -> Tensor<B, 1> {
    let _op = recorder::op("head_loss", || {
        let flops = 2 * hidden.dims().iter().product::<usize>() * weight.dims()[0];
        Call::reads([recorder::operand(&hidden), recorder::operand(&weight)]).computes(flops as u64)
    });
    let targets = targets.flatten::<1>(0, T - 1);
    let hidden = as_rows(hidden);
    call!(B: HeadLossOps::head_loss(Checked::new(HeadLossForward {
        hidden,
        weight,
        targets,
        options,
        gradients: false
    })))
}

pub(crate) fn head_loss_forward<B: HeadLossOps>(operands: Checked<HeadLossForward<B>>) -> HeadLossOutput<B> {
    dispatch!(B: HeadLossOps::head_loss_forward(operands))
}

pub(crate) fn head_loss_backward<B: HeadLossOps>(
    operands: Checked<HeadLossBackward<B>>,
) -> (Tensor<B, 2>, Tensor<B, 2>) {
    dispatch!(B: HeadLossOps::head_loss_backward(operands))
}
