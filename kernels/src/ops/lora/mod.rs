//! A projection with a low-rank adapter (LoRA; Hu et al., 2021), whose weight is frozen.
//!
//! It is one graph node, so that a GEMM adds the adapter's product to that of the weight before
//! either is stored, in the forward pass and in the gradient of the input. Adapters on a weight of
//! several modules, such as queries, keys and values, are one: their `a` are stacked, and their `b`
//! are blocks of one matrix.

mod autodiff;
#[cfg(feature = "ndarray")]
mod cpu;
#[cfg(feature = "cubecl")]
mod cubecl;
mod projections;
pub(crate) mod reference;

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor};

use super::activation::Activation;
use super::linear::{LinearOps, Saved};
use super::reshape::{as_dims, as_rows};
use crate::checked::{Checked, Operands, part};
use crate::mutation::{call, parts};
use crate::quant::Weight;
use crate::recorder::{self, Call};
use crate::selection::dispatch;

/// A weight with its adapter, and what follows their product.
#[derive(Clone, Debug)]
pub struct LoraLayer<B: Backend> {
    /// `[d_output, d_input]`; gets no gradient.
    pub weight: Weight<B>,
    /// `[d_output]`; gets no gradient.
    pub bias: Option<Tensor<B, 1>>,
    /// `[rank, d_input]`.
    pub a: Weight<B>,
    /// `[d_output, rank]`.
    pub b: Weight<B>,
    /// What the adapter's product is multiplied by.
    pub scale: f64,
    /// Nonlinearity of the result.
    pub activation: Option<Activation>,
}

impl<B: Backend> LoraLayer<B> {
    /// Columns of the result.
    fn outputs(&self) -> usize {
        let [d_output, _] = self.weight.dims();
        self.activation.map_or(d_output, |activation| activation.output_width(d_output))
    }

    /// Checks its parts for inputs of `d_input` columns.
    #[track_caller]
    fn check(&self, op: &'static str, x: &crate::checked::Part<'_, B::Device>, d_input: usize) {
        let ([d_output, columns], [rank, _]) = (self.weight.dims(), self.a.dims());
        self.weight.check(op, "weight", columns == d_input, x);
        self.a.check(op, "a", self.a.dims() == [rank, d_input], x);
        self.b.check(op, "b", self.b.dims() == [d_output, rank], x);
        for (name, weight) in [("a", &self.a), ("b", &self.b)] {
            assert!(weight.format().is_none(), "{op}: {name} is quantized, and has no gradient");
        }
        if let Some(bias) = &self.bias {
            part(op, "bias", bias).float().fits(bias.dims() == [d_output], x);
        }
        if let Some(activation) = self.activation {
            let even = !activation.gated || d_output.is_multiple_of(2);
            assert!(even, "{op}: a gated activation needs an even width, weight is {:?}", self.weight.dims());
        }
    }

    /// Multiplications and additions per row of a product with each matrix.
    fn flop(&self) -> usize {
        let ([d_output, d_input], [rank, _]) = (self.weight.dims(), self.a.dims());
        2 * (d_output * d_input + rank * (d_input + d_output))
    }
}

/// Operands of [`lora`].
#[derive(Clone, Debug)]
pub struct LoraForward<B: Backend> {
    /// `[rows, d_input]`.
    pub x: Tensor<B, 2>,
    /// Weight and adapter.
    pub layer: LoraLayer<B>,
    /// What is added, `[rows, d_output]`; not with an activation.
    pub residual: Option<Tensor<B, 2>>,
    /// Whether a backward pass follows, so that what it needs is saved.
    pub keeps: bool,
}

impl<B: Backend> LoraForward<B> {
    /// What it moves and computes.
    fn call(&self) -> Call {
        let LoraLayer { weight, a, b, .. } = &self.layer;
        let [rows, _] = self.x.dims();
        let result = rows * self.layer.outputs() * self.x.dtype().size();
        let residual = if self.residual.is_some() { result } else { 0 };
        let call = Call::reads([recorder::operand(&self.x), weight.operand(), a.operand(), b.operand()]);
        call.and((result + residual) as u64).computes((rows * self.layer.flop()) as u64)
    }
}

impl<B: Backend> Operands for LoraForward<B> {
    fn check(&self) {
        let op = "lora";
        let x = part(op, "x", &self.x).float();
        let [rows, d_input] = self.x.dims();
        self.layer.check(op, &x, d_input);
        if let Some(residual) = &self.residual {
            part(op, "residual", residual).float().fits(residual.dims() == [rows, self.layer.outputs()], &x);
            assert!(self.layer.activation.is_none(), "{op}: an activation is the last part, without a residual");
        }
    }
}

/// Results of the forward pass.
#[derive(Clone, Debug)]
pub struct LoraOutput<B: Backend> {
    /// `[rows, d_output]`, or half as wide behind a gate, in the dtype of the input.
    pub output: Tensor<B, 2>,
    /// `scale * x a^T`, `[rows, rank]`, in the dtype of the input.
    pub inner: Tensor<B, 2>,
    /// Saved for the activation's gradient, if there is one and it was asked for.
    pub saved: Option<Saved<B>>,
}

parts!(LoraOutput { output, inner, saved });

/// Which gradients of [`lora`] are wanted; others are not computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoraWanted {
    /// Of the input.
    pub x: bool,
    /// Of `a`.
    pub a: bool,
    /// Of `b`.
    pub b: bool,
}

impl LoraWanted {
    /// All of them.
    pub const ALL: Self = Self { x: true, a: true, b: true };
}

/// Operands of the gradients.
#[derive(Clone, Debug)]
pub struct LoraBackward<B: Backend> {
    /// Gradient of the output, in the dtype of the input; also that of the residual.
    pub grad: Tensor<B, 2>,
    /// The input, `[rows, d_input]`.
    pub x: Tensor<B, 2>,
    /// `scale * x a^T`, `[rows, rank]`, of the forward pass.
    pub inner: Tensor<B, 2>,
    /// Weight and adapter, in the dtype of the input or, the weight, quantized.
    pub layer: LoraLayer<B>,
    /// Saved by the forward pass for the activation.
    pub saved: Option<Saved<B>>,
    /// Which gradients are wanted.
    pub wanted: LoraWanted,
    /// The earlier gradients of `a` and `b`, f32 of their shapes: added to in place, if not shared.
    pub sums: [Option<Tensor<B, 2>>; 2],
}

impl<B: Backend> Operands for LoraBackward<B> {
    fn check(&self) {
        let op = "lora backward";
        let Self { grad, x, inner, layer, saved, sums, .. } = self;
        let grad = part(op, "grad", grad).float();
        let ([rows, d_input], [d_output, _], [rank, _]) = (x.dims(), layer.weight.dims(), layer.a.dims());
        layer.check(op, &grad, d_input);
        grad_fits(op, self.grad.dims(), [rows, layer.outputs()]);
        part(op, "x", x).shaped(&[rows, d_input], &grad).alike(&grad);
        part(op, "inner", inner).shaped(&[rows, rank], &grad).alike(&grad);
        assert!(saved.is_some() == layer.activation.is_some(), "{op}: an activation has what was saved for it");
        if let Some(saved) = saved {
            part(op, "saved", saved.tensor()).shaped(&[rows, d_output], &grad).alike(&grad);
        }
        for ((name, shape), sum) in [("a's sum", [rank, d_input]), ("b's sum", [d_output, rank])].into_iter().zip(sums)
        {
            if let Some(sum) = sum {
                part(op, name, sum).of(DType::F32).shaped(&shape, &grad);
            }
        }
    }
}

#[track_caller]
fn grad_fits(op: &str, grad: [usize; 2], outputs: [usize; 2]) {
    assert!(grad == outputs, "{op}: grad {grad:?} does not fit an output of {outputs:?}");
}

/// Results of the backward pass.
#[derive(Clone, Debug)]
pub struct LoraGradients<B: Backend> {
    /// `[rows, d_input]`, in the input's dtype, if wanted.
    pub x: Option<Tensor<B, 2>>,
    /// `[rank, d_input]` f32, if wanted, including the earlier one.
    pub a: Option<Tensor<B, 2>>,
    /// `[d_output, rank]` f32, if wanted, including the earlier one.
    pub b: Option<Tensor<B, 2>>,
}

parts!(LoraGradients { x, a, b });

/// Projections with adapters on a backend.
pub trait LoraOps: LinearOps {
    /// [`lora`]; [`Autodiff`](burn::backend::Autodiff) ties forward and backward together here.
    fn lora(operands: Checked<LoraForward<Self>>) -> Tensor<Self, 2> {
        lora_forward(operands).output
    }
    /// Forward of [`lora`].
    fn lora_forward(operands: Checked<LoraForward<Self>>) -> LoraOutput<Self> {
        reference::lora_forward(operands.into_inner())
    }
    /// Backward of [`lora`].
    fn lora_backward(operands: Checked<LoraBackward<Self>>) -> LoraGradients<Self> {
        reference::lora_backward(operands.into_inner())
    }
}

/// `residual + activation(x weight^T + scale * (x a^T) b^T + bias)`, with optional parts: a projection
/// with a low-rank adapter (Hu et al., 2021). `x` is `[.., d_input]`, the result `[.., d_output]`, or
/// half as wide with a gated activation, in the dtype of `x`. Gradients go to `x`, `a`, `b` and the
/// residual; a weight or bias that is trained gets its own, with separate products.
///
/// # Panics
/// If sizes do not fit, `a` or `b` is quantized, or both an activation and a residual are given.
pub fn lora<B: LoraOps, const D: usize>(
    x: Tensor<B, D>,
    layer: LoraLayer<B>,
    residual: Option<Tensor<B, D>>,
) -> Tensor<B, D> {
    let mut dims = x.dims();
    let residual = residual.map(as_rows);
    let operands = Checked::new(LoraForward { x: as_rows(x), layer, residual, keeps: false });
    let _op = recorder::op("lora", || operands.call());
    dims[D - 1] = operands.layer.outputs();
    as_dims(call!(B: LoraOps::lora(operands)), dims)
}

pub(crate) fn lora_forward<B: LoraOps>(operands: Checked<LoraForward<B>>) -> LoraOutput<B> {
    dispatch!(B: LoraOps::lora_forward(operands))
}

pub(crate) fn lora_backward<B: LoraOps>(operands: Checked<LoraBackward<B>>) -> LoraGradients<B> {
    dispatch!(B: LoraOps::lora_backward(operands))
}
