//! A mixture of experts: each token goes through a few of many feed-forward layers (Shazeer et
//! al., 2017), and none is dropped, however many choose the same expert (Gale et al., 2022,
//! "MegaBlocks").
//!
//! ```text
//! scores [tokens, n_experts] -> choose_experts -> chosen [tokens, k]       slot t * k + i: choice i of token t
//!
//! slots sorted by expert    |  expert 0  |expert 1|    expert 3      | ..   in order within an expert
//! x                      -> one product per expert over its rows: inner [slots, width] -> activation
//! output                 <- one product per expert, each row times its token's weight, summed per token
//! ```
//!
//! Everything stays on the device: no size depends on the routing.

mod autodiff;
#[cfg(feature = "ndarray")]
mod cpu;
#[cfg(feature = "cubecl")]
mod cubecl;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod few_rows;
pub(crate) mod reference;

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor};

use super::activation::{Activation, ActivationOps};
use super::linear::Wanted;
use super::weight::WeightOps;
use crate::checked::{Checked, Operands, Part, part};
use crate::mutation::{call, parts};
use crate::quant::Weight;
use crate::recorder::{self, Call};
use crate::selection::dispatch;

/// The kernels of training and decoding in bf16: their names and sources.
#[cfg(feature = "cuda")]
pub(crate) fn hopper_sources() -> impl Iterator<Item = (String, String)> {
    cuda::hopper_sources().chain(few_rows::hopper_sources())
}

/// The weights of all experts, one after another, and their activation.
#[derive(Clone, Debug)]
pub struct ExpertsLayer<B: Backend> {
    /// First projections, `[n_experts * d_ff, d_model]`; of each expert gate, then up, `[n_experts *
    /// 2 * d_ff, d_model]`, if gated.
    pub up: Weight<B>,
    /// Their biases, with an element per row of `up`.
    pub up_bias: Option<Tensor<B, 1>>,
    /// The activation.
    pub activation: Activation,
    /// Limits what a gated activation gets, and adds one to what it gates: `kind(min(gate, limit))
    /// * (clamp(up, -limit, limit) + 1)` (gpt-oss).
    pub limit: Option<f64>,
    /// Second projections, `[n_experts * d_model, d_ff]`.
    pub down: Weight<B>,
    /// Their biases, `[n_experts * d_model]`.
    pub down_bias: Option<Tensor<B, 1>>,
}

/// The sizes of a mixture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub(crate) tokens: usize,
    /// Experts per token.
    pub(crate) k: usize,
    pub(crate) n_experts: usize,
    pub(crate) d_model: usize,
    /// Rows of an expert's first projection.
    pub(crate) width: usize,
    pub(crate) d_ff: usize,
}

impl Sizes {
    pub(crate) fn slots(&self) -> usize {
        self.tokens * self.k
    }
}

#[cfg(feature = "cubecl")]
/// What a pass consists of.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only CUDA kernels ask"))]
enum Pass {
    /// Whether the first and second projections have biases; and whether what the activation gets is
    /// saved.
    Forward { biased: [bool; 2], activation: Activation, keeps: bool },
    /// Whether there are earlier gradients of the projections.
    Backward { adds: [bool; 2] },
}

impl<B: Backend> ExpertsLayer<B> {
    fn sizes(&self, d_model: usize, chosen: &Tensor<B, 2, Int>) -> Sizes {
        let ([tokens, k], [rows, d_ff]) = (chosen.dims(), self.down.dims());
        let n_experts = rows / d_model;
        Sizes { tokens, k, n_experts, d_model, width: self.up.dims()[0] / n_experts.max(1), d_ff }
    }

    #[track_caller]
    fn check(&self, op: &'static str, d_model: usize, x: &Part<'_, B::Device>) {
        let Self { up, up_bias, activation, limit, down, down_bias } = self;
        let ([up_rows, up_columns], [down_rows, d_ff]) = (up.dims(), down.dims());
        let n_experts = down_rows / d_model;
        let width = if activation.gated { 2 * d_ff } else { d_ff };
        down.check(op, "down", n_experts > 0 && down_rows == n_experts * d_model, x);
        up.check(op, "up", up_columns == d_model && up_rows == n_experts * width, x);
        for (name, bias, weight) in [("up's bias", up_bias, up), ("down's bias", down_bias, down)] {
            if let Some(bias) = bias {
                part(op, name, bias).float().fits(bias.dims() == [weight.dims()[0]], x);
            }
        }
        let fits = limit.is_none_or(|limit| limit > 0.0 && activation.gated);
        assert!(fits, "{op}: a limit of {limit:?} is above 0, and of a gated activation");
    }
}

/// The most experts that there may be.
pub const MOST_EXPERTS: usize = 1024;

/// Panics unless `chosen` has an expert, and `weights` a number, for each choice of each token.
#[track_caller]
fn check_choices<B: Backend>(
    op: &'static str,
    tokens: usize,
    sizes: Sizes,
    chosen: &Tensor<B, 2, Int>,
    weights: &Tensor<B, 2>,
    x: &Part<'_, B::Device>,
) {
    let Sizes { n_experts, k, .. } = sizes;
    assert!(n_experts <= MOST_EXPERTS, "{op}: {n_experts} experts are too many, {MOST_EXPERTS} are the most");
    assert!(k <= n_experts, "{op}: {k} of {n_experts} experts per token");
    part(op, "chosen", chosen).integer().shaped(&[tokens, k], x);
    part(op, "weights", weights).float().shaped(&[tokens, k], x);
}

/// Operands of [`experts`].
#[derive(Clone, Debug)]
pub struct ExpertsForward<B: Backend> {
    /// `[tokens, d_model]`.
    pub x: Tensor<B, 2>,
    /// The experts of each token, `[tokens, k]`. Values outside of `0..n_experts` count as the
    /// last.
    pub chosen: Tensor<B, 2, Int>,
    /// What each expert's output is multiplied by, `[tokens, k]`.
    pub weights: Tensor<B, 2>,
    /// The experts.
    pub layer: ExpertsLayer<B>,
    /// Whether the backward pass's tensor is saved.
    pub keeps: bool,
}

impl<B: Backend> ExpertsForward<B> {
    pub(crate) fn sizes(&self) -> Sizes {
        self.layer.sizes(self.x.dims()[1], &self.chosen)
    }

    /// Bytes and FLOP: of weights, as many experts as there are slots, at most all.
    fn call(&self) -> Call {
        let Sizes { n_experts, d_model, width, d_ff, .. } = self.sizes();
        let slots = self.sizes().slots();
        let read = |weight: &Weight<B>| weight.operand().bytes() * slots.min(n_experts) as u64 / n_experts as u64;
        let x = recorder::operand(&self.x);
        let between = slots * (d_model + 2 * d_ff) * self.x.dtype().size();
        let bytes = 2 * x.bytes() + between as u64 + read(&self.layer.up) + read(&self.layer.down);
        let inputs = vec![x, self.layer.up.operand(), self.layer.down.operand()];
        Call { bytes, flops: 2 * (slots * d_model * (width + d_ff)) as u64, inputs }
    }
}

impl<B: Backend> Operands for ExpertsForward<B> {
    fn check(&self) {
        let op = "experts";
        let x = part(op, "x", &self.x).float();
        let [tokens, d_model] = self.x.dims();
        self.layer.check(op, d_model, &x);
        check_choices(op, tokens, self.sizes(), &self.chosen, &self.weights, &x);
    }
}

/// Results of the forward pass.
#[derive(Clone, Debug)]
pub struct ExpertsOutput<B: Backend> {
    /// `[tokens, d_model]`, in the dtype of `x`.
    pub output: Tensor<B, 2>,
    /// What the activation gets, `[tokens * k, width]`, in the order of `chosen`, if it was to be
    /// saved.
    pub inner: Option<Tensor<B, 2>>,
}

parts!(ExpertsOutput { output, inner });

/// Operands of the gradients of [`experts`].
#[derive(Clone, Debug)]
pub struct ExpertsBackward<B: Backend> {
    /// Gradient of the output, `[tokens, d_model]`, in the dtype of the input.
    pub grad: Tensor<B, 2>,
    /// As in the forward pass.
    pub x: Tensor<B, 2>,
    /// As in the forward pass.
    pub chosen: Tensor<B, 2, Int>,
    /// As in the forward pass.
    pub weights: Tensor<B, 2>,
    /// From the forward pass.
    pub inner: Tensor<B, 2>,
    /// The weights, in the dtype of the input or quantized.
    pub layer: ExpertsLayer<B>,
    /// The requested gradients of `up` and `down`.
    pub wanted: [Wanted; 2],
    /// The earlier gradients of `up` and `down`, f32 of their shapes.
    pub sums: [Option<Tensor<B, 2>>; 2],
}

impl<B: Backend> ExpertsBackward<B> {
    pub(crate) fn sizes(&self) -> Sizes {
        self.layer.sizes(self.x.dims()[1], &self.chosen)
    }

    /// Bytes and FLOP: two products of each projection, and one more of a trained one.
    fn call(&self) -> Call {
        let Sizes { d_model, width, d_ff, .. } = self.sizes();
        let slots = self.sizes().slots();
        let inputs: Vec<_> = [&self.x, &self.grad, &self.inner].map(recorder::operand).into_iter().collect();
        let of_weights = [&self.layer.up, &self.layer.down].map(Weight::operand);
        let products = self.wanted.map(|wanted| if wanted.weight { 2 } else { 1 });
        let moved = slots * (2 * d_model + 3 * width) * self.x.dtype().size();
        let call = Call::reads(inputs.into_iter().chain(of_weights).collect::<Vec<_>>()).and(moved as u64);
        call.computes(2 * (slots * d_model * (products[0] * width + products[1] * d_ff)) as u64)
    }
}

impl<B: Backend> Operands for ExpertsBackward<B> {
    fn check(&self) {
        let op = "experts backward";
        let x = part(op, "x", &self.x).float();
        let [tokens, d_model] = self.x.dims();
        part(op, "grad", &self.grad).shaped(&[tokens, d_model], &x).alike(&x);
        self.layer.check(op, d_model, &x);
        let sizes = self.sizes();
        check_choices(op, tokens, sizes, &self.chosen, &self.weights, &x);
        part(op, "inner", &self.inner).shaped(&[sizes.slots(), sizes.width], &x).alike(&x);
        let weights = [("up", &self.layer.up), ("down", &self.layer.down)];
        for (((name, weight), sum), wanted) in weights.into_iter().zip(&self.sums).zip(self.wanted) {
            wanted.check(op, name, weight);
            if let Weight::Float(weight) = weight {
                part(op, name, weight).alike(&x);
            }
            if let Some(sum) = sum {
                part(op, &format!("{name}'s sum"), sum).of(DType::F32).shaped(&weight.dims(), &x);
            }
        }
    }
}

/// Results of the backward pass.
#[derive(Clone, Debug)]
pub struct ExpertsGradients<B: Backend> {
    /// Of the input, `[tokens, d_model]`, in its dtype.
    pub x: Tensor<B, 2>,
    /// Of the weights of experts' outputs, `[tokens, k]`, in their dtype.
    pub weights: Tensor<B, 2>,
    /// Of the first projections, f32, if requested, including the earlier one; zeros for experts
    /// without tokens.
    pub up: Option<Tensor<B, 2>>,
    /// Of their biases, f32, if requested and present.
    pub up_bias: Option<Tensor<B, 1>>,
    /// Of the second projections.
    pub down: Option<Tensor<B, 2>>,
    /// Of their biases.
    pub down_bias: Option<Tensor<B, 1>>,
}

parts!(ExpertsGradients { x, weights, up, up_bias, down, down_bias });

/// Operands of [`choose_experts`].
#[derive(Clone, Debug)]
pub struct ChooseExperts<B: Backend> {
    /// `[tokens, n_experts]`.
    pub scores: Tensor<B, 2>,
    /// Experts per token.
    pub k: usize,
}

impl<B: Backend> Operands for ChooseExperts<B> {
    fn check(&self) {
        let op = "choose_experts";
        part(op, "scores", &self.scores).float();
        let ([_, n_experts], k) = (self.scores.dims(), self.k);
        assert!(n_experts <= MOST_EXPERTS, "{op}: {n_experts} experts are too many, {MOST_EXPERTS} are the most");
        assert!(k > 0 && k <= n_experts, "{op}: {k} of {n_experts} experts per token");
    }
}

/// Operands of [`expert_loads`].
#[derive(Clone, Debug)]
pub struct ExpertLoads<B: Backend> {
    /// `[tokens, k]`.
    pub chosen: Tensor<B, 2, Int>,
    /// Number of experts.
    pub n_experts: usize,
}

impl<B: Backend> Operands for ExpertLoads<B> {
    fn check(&self) {
        part("expert_loads", "chosen", &self.chosen).integer();
        assert!(self.n_experts > 0, "expert_loads: no experts");
    }
}

/// Mixtures of experts of a backend.
pub trait ExpertsOps: ActivationOps + WeightOps {
    /// [`experts`]; [`Autodiff`](burn::backend::Autodiff) ties forward and backward together here.
    fn experts(operands: Checked<ExpertsForward<Self>>) -> Tensor<Self, 2> {
        experts_forward(operands).output
    }
    /// Forward of [`experts`].
    fn experts_forward(operands: Checked<ExpertsForward<Self>>) -> ExpertsOutput<Self> {
        reference::experts_forward(operands.into_inner())
    }
    /// Backward of [`experts`].
    fn experts_backward(operands: Checked<ExpertsBackward<Self>>) -> ExpertsGradients<Self> {
        reference::experts_backward(operands.into_inner())
    }
    /// Body of [`choose_experts`].
    fn choose_experts(operands: Checked<ChooseExperts<Self>>) -> Tensor<Self, 2, Int> {
        reference::choose_experts(operands.into_inner())
    }
    /// Body of [`expert_loads`].
    fn expert_loads(operands: Checked<ExpertLoads<Self>>) -> Tensor<Self, 1> {
        reference::expert_loads(operands.into_inner())
    }
}

/// The sum over a token's `chosen` experts of `weight * (activation(x * up^T + up_bias) * down^T +
/// down_bias)`: `[tokens, d_model]`, in the dtype of `x` `[tokens, d_model]`.
///
/// Reads the weights of the chosen experts only, each once for all its tokens. The gradient is that
/// of `x`, of `weights` and of the experts' parameters; `chosen` has none.
///
/// # Panics
/// If sizes do not fit, a token has more choices than there are experts, there are more than
/// [`MOST_EXPERTS`], or there is a limit without a gate.
pub fn experts<B: ExpertsOps>(
    x: Tensor<B, 2>,
    chosen: Tensor<B, 2, Int>,
    weights: Tensor<B, 2>,
    layer: ExpertsLayer<B>,
) -> Tensor<B, 2> {
    let operands = Checked::new(ExpertsForward { x, chosen, weights, layer, keeps: false });
    let _op = recorder::op("experts", || operands.call());
    call!(B: ExpertsOps::experts(operands))
}

/// The `k` experts of each token with the largest `scores` `[tokens, n_experts]`, the largest
/// first, of equal ones the first: `[tokens, k]`. It has no gradient.
///
/// # Panics
/// If `k` is 0 or above the number of experts, or there are more than [`MOST_EXPERTS`].
pub fn choose_experts<B: ExpertsOps>(scores: Tensor<B, 2>, k: usize) -> Tensor<B, 2, Int> {
    let operands = Checked::new(ChooseExperts { scores, k });
    let _op = recorder::op("choose_experts", || Call::reads([recorder::operand(&operands.scores)]));
    dispatch!(B: ExpertsOps::choose_experts(operands))
}

/// How many of the choices `[tokens, k]` each expert got, f32 `[n_experts]`, without a gradient.
///
/// # Panics
/// If there are no experts.
pub fn expert_loads<B: ExpertsOps>(chosen: Tensor<B, 2, Int>, n_experts: usize) -> Tensor<B, 1> {
    let operands = Checked::new(ExpertLoads { chosen, n_experts });
    let _op = recorder::op("expert_loads", || Call::reads([recorder::operand(&operands.chosen)]));
    dispatch!(B: ExpertsOps::expert_loads(operands))
}

pub(crate) fn experts_forward<B: ExpertsOps>(operands: Checked<ExpertsForward<B>>) -> ExpertsOutput<B> {
    dispatch!(B: ExpertsOps::experts_forward(operands))
}

pub(crate) fn experts_backward<B: ExpertsOps>(operands: Checked<ExpertsBackward<B>>) -> ExpertsGradients<B> {
    dispatch!(B: ExpertsOps::experts_backward(operands))
}

/// `inner` within its limit, as its activation gets it: the gate, and what it gates, plus one.
fn limited<B: Backend>(inner: Tensor<B, 2>, limit: Option<f64>) -> Tensor<B, 2> {
    let Some(limit) = limit else { return inner };
    let [_, width] = inner.dims();
    let gate = inner.clone().narrow(1, 0, width / 2).clamp_max(limit);
    let up = inner.narrow(1, width / 2, width / 2).clamp(-limit, limit).add_scalar(1.0);
    Tensor::cat(vec![gate, up], 1)
}

/// The gradient of `inner` from that of what is [`limited`].
fn limited_gradient<B: Backend>(grad: Tensor<B, 2>, inner: Tensor<B, 2>, limit: Option<f64>) -> Tensor<B, 2> {
    let Some(limit) = limit else { return grad };
    let [_, width] = inner.dims();
    let beyond = |x: Tensor<B, 2>, low: f64| {
        let [gate, up] = [0, width / 2].map(|first| x.clone().narrow(1, first, width / 2));
        Tensor::cat(vec![gate.greater_elem(limit), up.clone().greater_elem(limit).bool_or(up.lower_elem(low))], 1)
    };
    grad.mask_fill(beyond(inner, -limit), 0.0)
}
