//! Projections, with fused norms before and epilogues after them.
//!
//! Weights are stored as on the hub, `[d_output, d_input]`. The product runs in the dtype of the
//! input: a weight of another dtype is cast, and parameter gradients are f32. Gradients flow
//! through quantized weights, which have none.

mod autodiff;
#[cfg(feature = "ndarray")]
pub(crate) mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod cubecl;
#[cfg(feature = "cuda")]
mod cuda;
pub(crate) mod reference;
#[cfg(feature = "cubecl")]
pub(crate) mod route;

use burn::tensor::backend::Backend;
use burn::tensor::{DType, FloatDType, Tensor};

#[cfg(feature = "cuda")]
pub(crate) use self::cuda::{FewRowsWeight, ampere_sources, few_rows_product, hopper_sources};
use super::activation::{Activation, ActivationOps};
use super::dropout::{Dropout, DropoutOps};
use super::norm::{Norm, NormOps, norm_rows};
use super::reshape::{as_dims, as_rows};
use super::weight::WeightOps;
use crate::checked::{Checked, Operands, Part, part};
use crate::mutation::{call, parts};
use crate::quant::Weight;
use crate::recorder::{self, Call};
use crate::selection::dispatch;

/// What [`linear`], [`norm_linear`], [`linear_add`] and [`norm_gate_up`] compute with:
/// `residual + dropout(activation(norm(x) * weight^T + bias))`, as far as these are there.
#[derive(Clone, Debug)]
pub struct LinearForward<B: Backend> {
    /// `[rows, d_input]`.
    pub x: Tensor<B, 2>,
    /// Norm of the rows of `x`, its weights `[d_input]`.
    pub norm: Option<Norm<B>>,
    /// `[d_output, d_input]`.
    pub weight: Weight<B>,
    /// `[d_output]`.
    pub bias: Option<Tensor<B, 1>>,
    /// Nonlinearity of the product; the last part there is.
    pub activation: Option<Activation>,
    /// Dropout of the product.
    pub dropout: Option<Dropout>,
    /// What is added, `[rows, d_output]`.
    pub residual: Option<Tensor<B, 2>>,
    /// Whether a backward pass follows, so that what it needs is kept. Then there is no norm.
    pub keeps: bool,
}

impl<B: Backend> LinearForward<B> {
    /// The product alone.
    pub fn new(x: Tensor<B, 2>, weight: impl Into<Weight<B>>, bias: Option<Tensor<B, 1>>) -> Self {
        let weight = weight.into();
        Self { x, norm: None, weight, bias, activation: None, dropout: None, residual: None, keeps: false }
    }

    /// The operation of which these are the operands.
    fn op(&self) -> &'static str {
        match self {
            Self { activation: Some(_), .. } => "norm_gate_up",
            Self { residual: Some(_), .. } => "linear_add",
            Self { norm: Some(_), .. } => "norm_linear",
            _ => "linear",
        }
    }

    /// What it moves and computes.
    fn call(&self) -> Call {
        let ([rows, d_input], [d_output, _]) = (self.x.dims(), self.weight.dims());
        let result = rows * self.outputs() * self.x.dtype().size();
        let residual = if self.residual.is_some() { result } else { 0 };
        let call = Call::reads([recorder::operand(&self.x), self.weight.operand()]).and((result + residual) as u64);
        call.computes(2 * (rows * d_input * d_output) as u64)
    }

    /// Columns of the result.
    fn outputs(&self) -> usize {
        let [d_output, _] = self.weight.dims();
        self.activation.map_or(d_output, |activation| activation.output_width(d_output))
    }
}

impl<B: Backend> Operands for LinearForward<B> {
    fn check(&self) {
        let op = self.op();
        let x = part(op, "x", &self.x).float();
        let ([rows, d_input], [d_output, columns]) = (self.x.dims(), self.weight.dims());
        self.weight.check(op, "weight", columns == d_input, &x);
        if let Some(norm) = &self.norm {
            norm.check(op, &x, d_input);
        }
        if let Some(bias) = &self.bias {
            let holds = bias.dims() == [d_output];
            assert!(holds, "{op}: bias {:?} does not fit weight {:?}", bias.dims(), self.weight.dims());
            part(op, "bias", bias).float().fits(holds, &x);
        }
        if let Some(activation) = self.activation {
            let even = !activation.gated || d_output.is_multiple_of(2);
            assert!(even, "{op}: a gated activation needs an even width, weight is {:?}", self.weight.dims());
            let last = self.dropout.is_none() && self.residual.is_none();
            assert!(last, "{op}: an activation is the last part, without dropout and residual");
        }
        if let Some(residual) = &self.residual {
            part(op, "residual", residual).float().fits(residual.dims() == [rows, d_output], &x);
        }
        assert!(!self.keeps || self.norm.is_none(), "{op}: the norm has a backward pass of its own");
    }
}

/// What the forward pass of a projection gives.
#[derive(Clone, Debug)]
pub struct LinearOutput<B: Backend> {
    /// `[rows, d_output]`, or half as wide behind a gate, of the input's dtype.
    pub output: Tensor<B, 2>,
    /// With an activation, what its gradient needs; there where it was asked for.
    pub saved: Option<Saved<B>>,
}

parts!(LinearOutput { output, saved });

/// What a projection's activation is kept as for its gradient, `[rows, d_output]`.
#[derive(Clone, Debug)]
pub enum Saved<B: Backend> {
    /// The product without the bias.
    Product(Tensor<B, 2>),
    /// What the gradient of the output is multiplied by: the slopes of the activation; where that
    /// gates, `up * kind'(gate)` and then `kind(gate)`.
    Slopes(Tensor<B, 2>),
}

#[cfg(feature = "mutation")]
impl<B: Backend> crate::mutation::Corrupt for Saved<B> {
    fn corrupt(self, spot: &crate::mutation::Spot) -> Self {
        match self {
            Self::Product(saved) => Self::Product(saved.corrupt(spot)),
            Self::Slopes(saved) => Self::Slopes(saved.corrupt(spot)),
        }
    }
}

impl<B: Backend> Saved<B> {
    pub(crate) fn tensor(&self) -> &Tensor<B, 2> {
        match self {
            Self::Product(saved) | Self::Slopes(saved) => saved,
        }
    }
}

/// Which gradients of a projection's parameters are wanted: those of frozen ones are not computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Of the weight; never of a quantized one.
    pub weight: bool,
    /// Of the bias, if there is one.
    pub bias: bool,
}

impl Wanted {
    /// All of them.
    pub const ALL: Self = Self { weight: true, bias: true };

    /// Panics if a quantized weight is to have a gradient.
    #[track_caller]
    pub(crate) fn check<B: Backend>(self, op: &str, name: &str, weight: &Weight<B>) {
        let quantized = weight.format().filter(|_| self.weight);
        assert!(quantized.is_none(), "{op}: {name} is quantized, and has no gradient");
    }
}

/// What the gradients of a projection are computed with.
#[derive(Clone, Debug)]
pub struct LinearBackward<B: Backend> {
    /// Gradient of the output, in the dtype of the input. That of a residual is the same.
    pub grad: Tensor<B, 2>,
    /// The input, `[rows, d_input]`: only the gradient of the weight needs it.
    pub x: Option<Tensor<B, 2>>,
    /// `[d_output, d_input]`, in the dtype of the input or quantized.
    pub weight: Weight<B>,
    /// `[d_output]`.
    pub bias: Option<Tensor<B, 1>>,
    /// Which gradients of parameters are wanted.
    pub wanted: Wanted,
    /// The activation, and what the forward pass saved of it.
    pub activation: Option<(Activation, Saved<B>)>,
    /// The dropout of the forward pass.
    pub dropout: Option<Dropout>,
    /// What the gradient of the weight is added to, f32 `[d_output, d_input]`: in its place, where
    /// nothing else holds it.
    pub sum: Option<Tensor<B, 2>>,
}

impl<B: Backend> Operands for LinearBackward<B> {
    fn check(&self) {
        let op = "linear backward";
        let grad = part(op, "grad", &self.grad).float();
        let ([rows, width], [d_output, d_input]) = (self.grad.dims(), self.weight.dims());
        self.weight.check(op, "weight", true, &grad);
        self.wanted.check(op, "weight", &self.weight);
        check_input(op, "x", self.x.as_ref(), self.wanted, [rows, d_input], &grad);
        if let Some(bias) = &self.bias {
            part(op, "bias", bias).float().fits(bias.dims() == [d_output], &grad);
        }
        if let Some(sum) = &self.sum {
            part(op, "sum", sum).of(DType::F32).shaped(&self.weight.dims(), &grad);
        }
        let mut outputs = d_output;
        if let Some((activation, saved)) = &self.activation {
            assert!(!activation.gated || d_output.is_multiple_of(2), "{op}: a gated activation needs an even width");
            outputs = activation.output_width(d_output);
            let saved = saved.tensor();
            part(op, "saved", saved).fits(saved.dims() == [rows, d_output], &grad).alike(&grad);
        }
        assert!(width == outputs, "{op}: grad {:?} does not fit weight {:?}", self.grad.dims(), self.weight.dims());
    }
}

/// Panics unless the input of a projection, of `shape`, is given where the gradient of its weight
/// is wanted.
#[track_caller]
pub(crate) fn check_input<B: Backend>(
    op: &'static str,
    name: &'static str,
    input: Option<&Tensor<B, 2>>,
    wanted: Wanted,
    shape: [usize; 2],
    grad: &Part<'_, B::Device>,
) {
    assert!(input.is_some() || !wanted.weight, "{op}: {name} is missing, which the gradient of a weight needs");
    if let Some(input) = input {
        part(op, name, input).shaped(&shape, grad).alike(grad);
    }
}

/// What the backward pass of a projection gives.
#[derive(Clone, Debug)]
pub struct LinearGradients<B: Backend> {
    /// `[rows, d_input]`, of the input's dtype.
    pub x: Tensor<B, 2>,
    /// `[d_output, d_input]`, f32, if it is wanted; with what it was to be added to.
    pub weight: Option<Tensor<B, 2>>,
    /// `[d_output]` f32, if it is wanted and there is a bias.
    pub bias: Option<Tensor<B, 1>>,
}

parts!(LinearGradients { x, weight, bias });

/// Projections on a backend.
pub trait LinearOps: NormOps + ActivationOps + DropoutOps + WeightOps {
    /// Body of [`linear`], [`norm_linear`], [`linear_add`] and [`norm_gate_up`];
    /// [`Autodiff`](burn::backend::Autodiff) ties forward and backward together here.
    fn linear(operands: Checked<LinearForward<Self>>) -> Tensor<Self, 2> {
        linear_forward(operands).output
    }
    /// Forward of [`linear`].
    fn linear_forward(operands: Checked<LinearForward<Self>>) -> LinearOutput<Self> {
        reference::linear_forward(operands.into_inner())
    }
    /// Backward of [`linear`].
    fn linear_backward(operands: Checked<LinearBackward<Self>>) -> LinearGradients<Self> {
        reference::linear_backward(operands.into_inner())
    }
}

/// `x * weight^T + bias`: `x` `[.., d_input]`, `weight` `[d_output, d_input]`, `bias` `[d_output]`, the result
/// `[.., d_output]` in the dtype of `x`.
///
/// # Panics
/// If the sizes do not fit each other.
pub fn linear<B: LinearOps, const D: usize>(
    x: Tensor<B, D>,
    weight: impl Into<Weight<B>>,
    bias: Option<Tensor<B, 1>>,
) -> Tensor<B, D> {
    project("linear", x, weight.into(), |x, weight| LinearForward::new(x, weight, bias))
}

/// Normalises `x` `[.., d_input]` where there is a norm, and projects it: `[.., d_output]`.
///
/// The residual stream itself is `x`, which stays as it was.
///
/// # Panics
/// If the sizes do not fit each other.
pub fn norm_linear<B: LinearOps, const D: usize>(
    x: Tensor<B, D>,
    norm: Option<&Norm<B>>,
    weight: impl Into<Weight<B>>,
    bias: Option<Tensor<B, 1>>,
) -> Tensor<B, D> {
    project("norm_linear", x, weight.into(), |x, weight| LinearForward {
        norm: norm.cloned(),
        ..LinearForward::new(x, weight, bias)
    })
}

/// `residual + dropout(x * weight^T + bias)`: the end of a transformer's sub-layer. `x` is `[.., d_input]`,
/// `residual` and the result are `[.., d_output]`.
///
/// # Panics
/// If the sizes do not fit each other.
pub fn linear_add<B: LinearOps, const D: usize>(
    x: Tensor<B, D>,
    weight: impl Into<Weight<B>>,
    bias: Option<Tensor<B, 1>>,
    dropout: Option<Dropout>,
    residual: Tensor<B, D>,
) -> Tensor<B, D> {
    let dropout = dropout.filter(|dropout| dropout.probability > 0.0);
    project("linear_add", x, weight.into(), |x, weight| LinearForward {
        dropout,
        residual: Some(as_rows(residual)),
        ..LinearForward::new(x, weight, bias)
    })
}

/// Normalises `x` `[.., d_model]` where there is a norm, projects it by `weight` `[d_ff, d_model]`,
/// or by gate and up in one `[2 * d_ff, d_model]`, and applies `activation`: `[.., d_ff]`.
///
/// # Panics
/// If the sizes do not fit each other, or the activation gates and `weight` has an odd number of
/// rows.
pub fn norm_gate_up<B: LinearOps, const D: usize>(
    x: Tensor<B, D>,
    norm: Option<&Norm<B>>,
    weight: impl Into<Weight<B>>,
    bias: Option<Tensor<B, 1>>,
    activation: Activation,
) -> Tensor<B, D> {
    project("norm_gate_up", x, weight.into(), |x, weight| LinearForward {
        norm: norm.cloned(),
        activation: Some(activation),
        ..LinearForward::new(x, weight, bias)
    })
}

/// The projection of rows that `operands` puts together of `x` and `weight`, recorded as `name`.
fn project<B: LinearOps, const D: usize>(
    name: &'static str,
    x: Tensor<B, D>,
    weight: Weight<B>,
    operands: impl FnOnce(Tensor<B, 2>, Weight<B>) -> LinearForward<B>,
) -> Tensor<B, D> {
    let mut dims = x.dims();
    let operands = Checked::new(operands(as_rows(x), weight));
    let _op = recorder::op(name, || operands.call());
    dims[D - 1] = operands.outputs();
    as_dims(call!(B: LinearOps::linear(operands)), dims)
}

/// [`linear`] of rows, as a part of another operation.
pub(crate) fn linear_rows<B: LinearOps>(operands: LinearForward<B>) -> Tensor<B, 2> {
    call!(B: LinearOps::linear(Checked::new(operands)))
}

pub(crate) fn linear_forward<B: LinearOps>(operands: Checked<LinearForward<B>>) -> LinearOutput<B> {
    dispatch!(B: LinearOps::linear_forward(operands))
}

pub(crate) fn linear_backward<B: LinearOps>(operands: Checked<LinearBackward<B>>) -> LinearGradients<B> {
    dispatch!(B: LinearOps::linear_backward(operands))
}

/// The operands with the norm applied to `x`, for bodies that have none of their own.
fn normed<B: LinearOps>(operands: LinearForward<B>) -> LinearForward<B> {
    match operands.norm {
        Some(norm) => LinearForward { x: norm_rows(operands.x, norm), norm: None, ..operands },
        None => operands,
    }
}

/// A weight as floats; bytes in the dtype of `x`.
pub(crate) fn float_weight<B: WeightOps>(weight: Weight<B>, x: &Tensor<B, 2>) -> Tensor<B, 2> {
    weight.into_float(FloatDType::from(x.dtype()))
}

/// The input of a projection whose weight is to have a gradient, as the operands were checked.
pub(crate) fn kept_input<B: Backend>(x: Option<Tensor<B, 2>>) -> Tensor<B, 2> {
    x.expect("the operands were checked: the gradient of a weight has its input")
}
