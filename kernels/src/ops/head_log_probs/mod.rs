//! Log-probabilities of given tokens, from hidden states and the output projection, without storing
//! the logits of a whole batch.

mod autodiff;
#[cfg(feature = "ndarray")]
mod cpu;
#[cfg(feature = "cubecl")]
mod cubecl;
pub(crate) mod reference;

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor};

use super::reshape::{ReshapeOps, as_rows};
use super::weight::WeightOps;
use crate::checked::{Checked, Operands, part};
use crate::mutation::{call, parts};
use crate::quant::Weight;
use crate::recorder::{self, Call};
use crate::selection::dispatch;

/// Operands of [`head_log_probs`].
#[derive(Clone, Debug)]
pub struct HeadLogProbsForward<B: Backend> {
    /// `[rows, d_model]`.
    pub hidden: Tensor<B, 2>,
    /// `[vocabulary, d_model]`.
    pub weight: Weight<B>,
    /// `[rows]`.
    pub targets: Tensor<B, 1, Int>,
    /// Rows of logits per chunk; by default about 256 MB of them.
    pub chunk: Option<usize>,
}

impl<B: Backend> Operands for HeadLogProbsForward<B> {
    fn check(&self) {
        let op = "head_log_probs";
        let hidden = part(op, "hidden", &self.hidden).float();
        let ([rows, d_model], [_, columns]) = (self.hidden.dims(), self.weight.dims());
        self.weight.check(op, "weight", columns == d_model, &hidden);
        part(op, "targets", &self.targets).integer().shaped(&[rows], &hidden);
    }
}

/// Operands of the backward pass.
#[derive(Clone, Debug)]
pub struct HeadLogProbsBackward<B: Backend> {
    /// Gradient of the log-probabilities, f32 `[rows]`.
    pub grad: Tensor<B, 1>,
    /// The forward pass's operands: its logits are computed again.
    pub forward: HeadLogProbsForward<B>,
    /// Whether the weight's gradient is wanted; never of a quantized one.
    pub trained: bool,
    /// The weight's earlier gradient, f32 of its shape.
    pub sum: Option<Tensor<B, 2>>,
}

impl<B: Backend> Operands for HeadLogProbsBackward<B> {
    fn check(&self) {
        let op = "head_log_probs backward";
        self.forward.check();
        let hidden = part(op, "hidden", &self.forward.hidden).float();
        part(op, "grad", &self.grad).of(DType::F32).shaped(&self.forward.targets.dims(), &hidden);
        let quantized = self.forward.weight.format().filter(|_| self.trained);
        assert!(quantized.is_none(), "{op}: weight is quantized, and has no gradient");
        if let Some(sum) = &self.sum {
            part(op, "sum", sum).of(DType::F32).shaped(&self.forward.weight.dims(), &hidden);
        }
    }
}

/// What the backward pass gives.
#[derive(Clone, Debug)]
pub struct HeadLogProbsGradients<B: Backend> {
    /// Of the hidden states, `[rows, d_model]`, in their dtype.
    pub hidden: Tensor<B, 2>,
    /// Of the weight, f32 `[vocabulary, d_model]`, if it is wanted; with its earlier one.
    pub weight: Option<Tensor<B, 2>>,
}

parts!(HeadLogProbsGradients { hidden, weight });

/// Log-probabilities of tokens on a backend.
pub trait HeadLogProbsOps: ReshapeOps + WeightOps {
    /// [`head_log_probs`]; [`Autodiff`](burn::backend::Autodiff) ties forward and backward together
    /// here.
    fn head_log_probs(operands: Checked<HeadLogProbsForward<Self>>) -> Tensor<Self, 1> {
        head_log_probs_forward(operands)
    }
    /// Forward of [`head_log_probs`].
    fn head_log_probs_forward(operands: Checked<HeadLogProbsForward<Self>>) -> Tensor<Self, 1> {
        reference::head_log_probs_forward(operands.into_inner())
    }
    /// Backward of [`head_log_probs`].
    fn head_log_probs_backward(operands: Checked<HeadLogProbsBackward<Self>>) -> HeadLogProbsGradients<Self> {
        reference::head_log_probs_backward(operands.into_inner())
    }
}

/// The log-probability of each row's target, f32 `[rows]` in nats: `log softmax(hidden *
/// weight^T)[target]`.
///
/// - `hidden`: `[.., d_model]`, any float dtype; the product runs in it, the rest in f32;
/// - `weight`: `[vocabulary, d_model]`;
/// - `targets`: one per row of `hidden`, in `0..vocabulary`. Others, such as
///   [`IGNORED_TARGET`](crate::IGNORED_TARGET), have the log-probability 0, and no gradient;
/// - `chunk`: rows whose logits are computed at a time; by default about 256 MB of them.
///
/// The backward pass computes the logits again.
///
/// # Panics
/// If the numbers of targets and rows differ, or `d_model` of `hidden` and of `weight`.
pub fn head_log_probs<B: HeadLogProbsOps, const D: usize, const T: usize>(
    hidden: Tensor<B, D>,
    weight: impl Into<Weight<B>>,
    targets: Tensor<B, T, Int>,
    chunk: Option<usize>,
) -> Tensor<B, 1> {
    let weight = weight.into();
    let _op = recorder::op("head_log_probs", || {
        let flops = 2 * hidden.dims().iter().product::<usize>() * weight.dims()[0];
        Call::reads([recorder::operand(&hidden), weight.operand()]).computes(flops as u64)
    });
    let targets = targets.flatten::<1>(0, T - 1);
    let operands = HeadLogProbsForward { hidden: as_rows(hidden), weight, targets, chunk };
    call!(B: HeadLogProbsOps::head_log_probs(Checked::new(operands)))
}

pub(crate) fn head_log_probs_forward<B: HeadLogProbsOps>(operands: Checked<HeadLogProbsForward<B>>) -> Tensor<B, 1> {
    dispatch!(B: HeadLogProbsOps::head_log_probs_forward(operands))
}

pub(crate) fn head_log_probs_backward<B: HeadLogProbsOps>(
    operands: Checked<HeadLogProbsBackward<B>>,
) -> HeadLogProbsGradients<B> {
    dispatch!(B: HeadLogProbsOps::head_log_probs_backward(operands))
}
