//! A transformer's feed-forward layer: two projections with an activation in between, added to the
//! residual stream.
//!
//! It is one graph node, so that the gradient after the activation is never stored: the product
//! that computes it is multiplied by the slopes at once, if a kernel fuses both.

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
use super::linear::{LinearOps, Saved, Wanted, check_input};
use super::norm::Norm;
use super::reshape::{as_dims, as_rows};
use crate::checked::{Checked, Operands, part};
use crate::mutation::{call, parts};
use crate::quant::Weight;
use crate::recorder::{self, Call};
use crate::selection::dispatch;

/// The weights of a feed-forward layer, and its activation.
#[derive(Clone, Debug)]
pub struct FeedForwardLayer<B: Backend> {
    /// First projection, `[d_ff, d_model]`; gate, then up, `[2 * d_ff, d_model]` if gated.
    pub up: Weight<B>,
    /// Its bias, with an element per row of `up`.
    pub up_bias: Option<Tensor<B, 1>>,
    /// The activation.
    pub activation: Activation,
    /// Second projection, `[d_model, d_ff]`.
    pub down: Weight<B>,
    /// Its bias, `[d_model]`.
    pub down_bias: Option<Tensor<B, 1>>,
}

/// Operands of [`feed_forward`].
#[derive(Clone, Debug)]
pub struct FeedForwardForward<B: Backend> {
    /// `[rows, d_model]`.
    pub x: Tensor<B, 2>,
    /// Norm of the rows of `x` before the first projection, its weights `[d_model]`.
    pub norm: Option<Norm<B>>,
    /// The residual stream, `[rows, d_model]`: `x` before any norm.
    pub residual: Tensor<B, 2>,
    /// The weights.
    pub layer: FeedForwardLayer<B>,
    /// Dropout of the layer's output.
    pub dropout: Option<Dropout>,
}

impl<B: Backend> FeedForwardForward<B> {
    /// Bytes and FLOP: the intermediate activations are written and read, and the residual stream
    /// is read, too.
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

/// Results of the forward pass, for a backward pass.
#[derive(Clone, Debug)]
pub struct FeedForwardOutput<B: Backend> {
    /// `[rows, d_model]`, in the dtype of `x`.
    pub output: Tensor<B, 2>,
    /// Saved for the activation's gradient, as wide as the rows of `up`.
    pub saved: Saved<B>,
    /// Input of the second projection, `[rows, d_ff]`.
    pub hidden: Tensor<B, 2>,
}

parts!(FeedForwardOutput { output, saved, hidden });

/// Operands of the gradients.
#[derive(Clone, Debug)]
pub struct FeedForwardBackward<B: Backend> {
    /// Gradient of the output, `[rows, d_model]`, in the dtype of the input; also that of the
    /// residual stream.
    pub grad: Tensor<B, 2>,
    /// Input of the first projection, after the norm, `[rows, d_model]`: only the gradient of `up`
    /// needs it.
    pub x: Option<Tensor<B, 2>>,
    /// Saved by the forward pass for the activation.
    pub saved: Saved<B>,
    /// Input of the second projection, `[rows, d_ff]`: only the gradient of `down` needs it.
    pub hidden: Option<Tensor<B, 2>>,
    /// The weights, in the dtype of the input or quantized.
    pub layer: FeedForwardLayer<B>,
    /// The requested gradients of `up` and `down`.
    pub wanted: [Wanted; 2],
    /// The forward pass's dropout.
    pub dropout: Option<Dropout>,
    /// The earlier gradients of `up` and `down`, f32 of their shapes: added to in place, if not
    /// shared.
    pub sums: [Option<Tensor<B, 2>>; 2],
}

impl<B: Backend> Operands for FeedForwardBackward<B> {
    fn check(&self) {
        let op = "feed_forward backward";
        let FeedForwardLayer { up, up_bias, activation, down, down_bias } = &self.layer;
        let x = part(op, "grad", &self.grad).float();
        let [rows, d_model] = self.grad.dims();
        let [width, _] = up.dims();
        check_width(op, *activation, width);
        let d_ff = activation.output_width(width);
        let [up_wanted, down_wanted] = self.wanted;
        check_input(op, "x", self.x.as_ref(), up_wanted, [rows, d_model], &x);
        part(op, "saved", self.saved.tensor()).shaped(&[rows, width], &x).alike(&x);
        check_input(op, "hidden", self.hidden.as_ref(), down_wanted, [rows, d_ff], &x);
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

/// Results of the backward pass.
#[derive(Clone, Debug)]
pub struct FeedForwardGradients<B: Backend> {
    /// Of the input of the first projection, `[rows, d_model]`, in its dtype.
    pub x: Tensor<B, 2>,
    /// Gradient of the first projection, f32, if requested, including its earlier one.
    pub up: Option<Tensor<B, 2>>,
    /// Gradient of its bias, f32, if requested and present.
    pub up_bias: Option<Tensor<B, 1>>,
    /// Gradient of the second projection, f32, if requested, including its earlier one.
    pub down: Option<Tensor<B, 2>>,
    /// Gradient of its bias, f32, if requested and present.
    pub down_bias: Option<Tensor<B, 1>>,
}

parts!(FeedForwardGradients { x, up, up_bias, down, down_bias });

/// Feed-forward layers of a backend.
pub trait FeedForwardOps: LinearOps {
    /// [`feed_forward`]; [`Autodiff`](burn::backend::Autodiff) ties forward and backward together
    /// here.
    fn feed_forward(operands: Checked<FeedForwardForward<Self>>) -> Tensor<Self, 2> {
        reference::feed_forward(operands.into_inner())
    }
    /// Forward of [`feed_forward`] for a backward pass; without a norm.
    fn feed_forward_forward(operands: Checked<FeedForwardForward<Self>>) -> FeedForwardOutput<Self> {
        reference::feed_forward_forward(operands.into_inner())
    }
    /// Backward of [`feed_forward`].
    fn feed_forward_backward(operands: Checked<FeedForwardBackward<Self>>) -> FeedForwardGradients<Self> {
        reference::feed_forward_backward(operands.into_inner())
    }
}

/// `x + dropout(activation(norm(x) * up^T + up_bias) * down^T + down_bias)`, with optional parts: a
/// feed-forward layer added to the residual stream `x` `[.., d_model]`, in its dtype. With a gated
/// activation it is of SwiGLU's kind (Shazeer, 2020).
///
/// # Panics
/// If sizes do not fit, or the activation is gated and `up` has an odd number of rows.
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
