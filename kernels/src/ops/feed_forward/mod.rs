//! A transformer's feed-forward layer: two projections with a nonlinearity between them, added to the residual stream.
//!
//! In the graph it is one node, so that the gradient behind the nonlinearity is never held: the product that makes it multiplies it by the
//! slopes at once, where a kernel does both.

mod autodiff;
#[cfg(feature = "ndarray")]
mod cpu;
#[cfg(feature = "cubecl")]
mod cubecl;
pub(crate) mod reference;

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor};

use super::activation::Activation;
use super::dropout::Dropout;
use super::linear::{LinearOps, Saved, Wanted};
use super::norm::Norm;
use super::reshape::{as_dims, as_rows};
use crate::checked::{Checked, Operands, part};
use crate::mutation::{call, parts};
use crate::quant::Weight;
use crate::recorder::{self, Call};
use crate::selection::dispatch;

/// The weights of a feed-forward layer, and its nonlinearity.
#[derive(Clone, Debug)]
pub struct FeedForwardLayer<B: Backend> {
    /// First projection, `[d_ff, d_model]`; gate, then up, `[2 * d_ff, d_model]` where the activation gates.
    pub up: Weight<B>,
    /// Its bias, as long as `up` has rows.
    pub up_bias: Option<Tensor<B, 1>>,
    /// What stands between the projections.
    pub activation: Activation,
    /// Second projection, `[d_model, d_ff]`.
    pub down: Weight<B>,
    /// Its bias, `[d_model]`.
    pub down_bias: Option<Tensor<B, 1>>,
}

/// What [`feed_forward`] computes with.
#[derive(Clone, Debug)]
pub struct FeedForwardForward<B: Backend> {
    /// `[rows, d_model]`.
    pub x: Tensor<B, 2>,
    /// Norm of the rows of `x` before the first projection, its weights `[d_model]`.
    pub norm: Option<Norm<B>>,
    /// The residual stream, `[rows, d_model]`, which is `x` as it was before any norm.
    pub residual: Tensor<B, 2>,
    /// The weights.
    pub layer: FeedForwardLayer<B>,
    /// Dropout of what is added to the residual stream.
    pub dropout: Option<Dropout>,
}

impl<B: Backend> FeedForwardForward<B> {
    /// What it moves and computes: what stands between the projections is written and read, and the residual stream is read, too.
    fn call(&self) -> Call {
        let FeedForwardLayer { up, down, .. } = &self.layer;
        let ([rows, d_model], [up_width, _], [_, d_ff]) = (self.x.dims(), up.dims(), down.dims());
        let between = 2 * rows * d_ff * self.x.dtype().size();
        let x = recorder::operand(&self.x);
        let moved = 2 * x.bytes() + between as u64;
        let call = Call::reads([x, up.operand(), down.operand()]).and(moved);
        call.computes(2 * (rows * d_model * (up_width + d_ff)) as u64)
    }
}

impl<B: Backend> Operands for FeedForwardForward<B> {
    fn check(&self) {
        let op = "feed_forward";
        let FeedForwardLayer { up, up_bias, activation, down, down_bias } = &self.layer;
        let x = part(op, "x", &self.x).float();
        let [_, d_model] = self.x.dims();
        if let Some(norm) = &self.norm {
            norm.check(op, &x, d_model);
        }
        part(op, "residual", &self.residual).float().shaped(&self.x.dims(), &x);
        up.check(op, "up", up.dims()[1] == d_model, &x);
        check_width(op, *activation, up.dims()[0]);
        down.check(op, "down", down.dims() == [d_model, activation.output_width(up.dims()[0])], &x);
        for (name, bias, weight) in [("up's bias", up_bias, up), ("down's bias", down_bias, down)] {
            if let Some(bias) = bias {
                part(op, name, bias).float().fits(bias.dims() == [weight.dims()[0]], &x);
            }
        }
    }
}

fn check_width(op: &str, activation: Activation, width: usize) {
    let even = !activation.gated || width.is_multiple_of(2);
    assert!(even, "{op}: a gated activation needs an even width, up has {width} rows");
}

/// What the forward pass of a feed-forward layer gives, where a backward pass follows.
#[derive(Clone, Debug)]
pub struct FeedForwardOutput<B: Backend> {
    /// `[rows, d_model]`, in the dtype of `x`.
    pub output: Tensor<B, 2>,
    /// What the gradient of the activation needs, as long as `up` has rows.
    pub saved: Saved<B>,
    /// What the second projection was computed from, `[rows, d_ff]`.
    pub hidden: Tensor<B, 2>,
}

parts!(FeedForwardOutput { output, saved, hidden });

/// What the gradients of a feed-forward layer are computed with.
#[derive(Clone, Debug)]
pub struct FeedForwardBackward<B: Backend> {
    /// Gradient of the output, `[rows, d_model]`, in the dtype of `x`. That of the residual stream is the same.
    pub grad: Tensor<B, 2>,
    /// Input of the first projection, behind the norm, `[rows, d_model]`.
    pub x: Tensor<B, 2>,
    /// What the forward pass saved of the activation.
    pub saved: Saved<B>,
    /// Input of the second projection, `[rows, d_ff]`.
    pub hidden: Tensor<B, 2>,
    /// The weights, in the dtype of `x` or quantized.
    pub layer: FeedForwardLayer<B>,
    /// Which gradients of the parameters of `up` and `down` are wanted.
    pub wanted: [Wanted; 2],
    /// The dropout of the forward pass.
    pub dropout: Option<Dropout>,
    /// What the gradients of `up` and `down` are added to, f32 of their shapes: in their place, where nothing else holds them.
    pub sums: [Option<Tensor<B, 2>>; 2],
}

impl<B: Backend> Operands for FeedForwardBackward<B> {
    fn check(&self) {
        let op = "feed_forward backward";
        let FeedForwardLayer { up, up_bias, activation, down, down_bias } = &self.layer;
        let x = part(op, "x", &self.x).float();
        let [rows, d_model] = self.x.dims();
        let [width, _] = up.dims();
        check_width(op, *activation, width);
        let d_ff = activation.output_width(width);
        part(op, "grad", &self.grad).shaped(&[rows, d_model], &x).alike(&x);
        part(op, "saved", self.saved.tensor()).shaped(&[rows, width], &x).alike(&x);
        part(op, "hidden", &self.hidden).shaped(&[rows, d_ff], &x).alike(&x);
        let weights = [("up", up, up_bias, [width, d_model]), ("down", down, down_bias, [d_model, d_ff])];
        for (((name, weight, bias, shape), sum), wanted) in weights.into_iter().zip(&self.sums).zip(self.wanted) {
            weight.check(op, name, weight.dims() == shape, &x);
            wanted.check(op, name, weight);
            if let Weight::Float(weight) = weight {
                part(op, name, weight).alike(&x);
            }
            if let Some(bias) = bias {
                part(op, &format!("{name}'s bias"), bias).float().fits(bias.dims() == [shape[0]], &x);
            }
            if let Some(sum) = sum {
                part(op, &format!("{name}'s sum"), sum).of(DType::F32).shaped(&shape, &x);
            }
        }
    }
}

/// What the backward pass of a feed-forward layer gives.
#[derive(Clone, Debug)]
pub struct FeedForwardGradients<B: Backend> {
    /// Of the input of the first projection, `[rows, d_model]`, in its dtype.
    pub x: Tensor<B, 2>,
    /// Of the first projection, f32, if it is wanted, with what it was to be added to.
    pub up: Option<Tensor<B, 2>>,
    /// Of its bias, f32, if it is wanted and there is one.
    pub up_bias: Option<Tensor<B, 1>>,
    /// Of the second projection, f32, if it is wanted, with what it was to be added to.
    pub down: Option<Tensor<B, 2>>,
    /// Of its bias, f32, if it is wanted and there is one.
    pub down_bias: Option<Tensor<B, 1>>,
}

parts!(FeedForwardGradients { x, up, up_bias, down, down_bias });

/// Feed-forward layers on a backend.
pub trait FeedForwardOps: LinearOps {
    /// Body of [`feed_forward`]; [`Autodiff`](burn::backend::Autodiff) ties forward and backward together here.
    fn feed_forward(operands: Checked<FeedForwardForward<Self>>) -> Tensor<Self, 2> {
        reference::feed_forward(operands.into_inner())
    }
    /// Forward of [`feed_forward`] where a backward pass follows; without a norm.
    fn feed_forward_forward(operands: Checked<FeedForwardForward<Self>>) -> FeedForwardOutput<Self> {
        reference::feed_forward_forward(operands.into_inner())
    }
    /// Backward of [`feed_forward`].
    fn feed_forward_backward(operands: Checked<FeedForwardBackward<Self>>) -> FeedForwardGradients<Self> {
        reference::feed_forward_backward(operands.into_inner())
    }
}

/// `x + dropout(activation(norm(x) * up^T + up_bias) * down^T + down_bias)`, as far as these are there: a feed-forward layer added to the residual
/// stream `x` `[.., d_model]`, in its dtype. Where the activation gates, it is SwiGLU's like (Shazeer, 2020).
///
/// # Panics
/// If the sizes do not fit each other, or the activation gates and `up` has an odd number of rows.
pub fn feed_forward<B: FeedForwardOps, const D: usize>(
    x: Tensor<B, D>,
    norm: Option<&Norm<B>>,
    layer: FeedForwardLayer<B>,
    dropout: Option<Dropout>,
) -> Tensor<B, D> {
    let dims = x.dims();
    let dropout = dropout.filter(|dropout| dropout.probability > 0.0);
    let x = as_rows(x);
    let operands = FeedForwardForward { x: x.clone(), norm: norm.cloned(), residual: x, layer, dropout };
    let operands = Checked::new(operands);
    let _op = recorder::op("feed_forward", || operands.call());
    as_dims(call!(B: FeedForwardOps::feed_forward(operands)), dims)
}

pub(crate) fn feed_forward_forward<B: FeedForwardOps>(
    operands: Checked<FeedForwardForward<B>>,
) -> FeedForwardOutput<B> {
    dispatch!(B: FeedForwardOps::feed_forward_forward(operands))
}

pub(crate) fn feed_forward_backward<B: FeedForwardOps>(
    operands: Checked<FeedForwardBackward<B>>,
) -> FeedForwardGradients<B> {
    dispatch!(B: FeedForwardOps::feed_forward_backward(operands))
}
