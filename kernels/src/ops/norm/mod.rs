//! Layer norm and RMS norm.

mod autodiff;
#[cfg(feature = "ndarray")]
pub(crate) mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod cubecl;
#[cfg(feature = "cuda")]
mod cuda;
pub(crate) mod reference;

#[cfg(feature = "cuda")]
pub(crate) use self::cuda::{ampere_sources, hopper_sources};

use burn::tensor::DType;
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

use super::reshape::{ReshapeOps, as_dims, as_rows};
use serde::{Deserialize, Serialize};

use crate::checked::{Checked, Operands, Part, part};
use crate::mutation::{call, parts};
use crate::recorder::{self, Call};
use crate::selection::dispatch;

/// Which statistics a norm divides by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NormKind {
    /// Subtract the mean, divide by the standard deviation (Ba, Kiros and Hinton, 2016).
    LayerNorm,
    /// Divide by the root of the mean square (Zhang and Sennrich, 2019).
    RmsNorm,
}

/// A norm and its weights.
#[derive(Clone, Debug)]
pub struct Norm<B: Backend> {
    /// Layer or RMS.
    pub kind: NormKind,
    /// Scale, `[d_model]`.
    pub gamma: Tensor<B, 1>,
    /// Shift, `[d_model]`.
    pub beta: Option<Tensor<B, 1>>,
    /// Added to the variance or mean square.
    pub epsilon: f64,
}

impl<B: Backend> Norm<B> {
    /// A layer norm with scale `gamma` and optional shift `beta`.
    pub fn layer(gamma: Tensor<B, 1>, beta: Option<Tensor<B, 1>>, epsilon: f64) -> Self {
        Self { kind: NormKind::LayerNorm, gamma, beta, epsilon }
    }

    /// An RMS norm with scale `gamma`.
    pub fn rms(gamma: Tensor<B, 1>, epsilon: f64) -> Self {
        Self { kind: NormKind::RmsNorm, gamma, beta: None, epsilon }
    }
}

/// Result of a norm's forward pass.
#[derive(Clone, Debug)]
pub struct NormOutput<B: Backend> {
    /// `[rows, d_model]`, of the input's dtype.
    pub output: Tensor<B, 2>,
    /// Mean of each row, `[rows, 1]` f32, for layer norms.
    pub mean: Option<Tensor<B, 2>>,
    /// One over the standard deviation or root mean square of each row, `[rows, 1]` f32.
    pub inverse_deviation: Tensor<B, 2>,
}

parts!(NormOutput { output, mean, inverse_deviation });

/// Result of a norm's backward pass.
#[derive(Clone, Debug)]
pub struct NormGradients<B: Backend> {
    /// `[rows, d_model]`, of the input's dtype.
    pub x: Tensor<B, 2>,
    /// `[d_model]`, of gamma's dtype, if the weights are trained.
    pub gamma: Option<Tensor<B, 1>>,
    /// `[d_model]`, of beta's dtype, if the weights are trained and there is one.
    pub beta: Option<Tensor<B, 1>>,
}

parts!(NormGradients { x, gamma, beta });

impl<B: Backend> Norm<B> {
    /// Panics unless the weights have an element for each column of `x` `[.., d_model]`.
    #[track_caller]
    pub(crate) fn check(&self, op: &'static str, x: &Part<'_, B::Device>, d_model: usize) {
        part(op, "gamma", &self.gamma).float().shaped(&[d_model], x);
        if let Some(beta) = &self.beta {
            part(op, "beta", beta).float().shaped(&[d_model], x);
        }
    }
}

/// Operands of [`norm`].
#[derive(Clone, Debug)]
pub struct NormForward<B: Backend> {
    /// `[rows, d_model]`.
    pub x: Tensor<B, 2>,
    /// The norm, with weights `[d_model]`.
    pub norm: Norm<B>,
}

impl<B: Backend> Operands for NormForward<B> {
    fn check(&self) {
        let x = part("norm", "x", &self.x).float();
        self.norm.check("norm", &x, self.x.dims()[1]);
    }
}

/// Operands of the backward pass of [`norm`].
#[derive(Clone, Debug)]
pub struct NormBackward<B: Backend> {
    /// Gradient of the output, `[rows, d_model]`.
    pub grad: Tensor<B, 2>,
    /// The input of the forward pass.
    pub x: Tensor<B, 2>,
    /// Mean of each row, `[rows, 1]` f32, for layer norms.
    pub mean: Option<Tensor<B, 2>>,
    /// One over the standard deviation or root mean square of each row, `[rows, 1]` f32.
    pub inverse_deviation: Tensor<B, 2>,
    /// The norm.
    pub norm: Norm<B>,
    /// Whether its weights are trained, so that they have gradients.
    pub trained: bool,
    /// The gradient of `x` through a residual connection around the norm, `[rows, d_model]`: added
    /// to the gradient of `x`.
    pub residual: Option<Tensor<B, 2>>,
}

impl<B: Backend> Operands for NormBackward<B> {
    fn check(&self) {
        let op = "norm backward";
        let x = part(op, "x", &self.x).float();
        let [rows, d_model] = self.x.dims();
        self.norm.check(op, &x, d_model);
        part(op, "grad", &self.grad).float().shaped(&[rows, d_model], &x);
        part(op, "inverse deviation", &self.inverse_deviation).of(DType::F32).shaped(&[rows, 1], &x);
        let means = self.mean.is_some();
        assert!(
            means == (self.norm.kind == NormKind::LayerNorm),
            "{op}: means are saved of layer norms, and only of those"
        );
        if let Some(mean) = &self.mean {
            part(op, "mean", mean).of(DType::F32).shaped(&[rows, 1], &x);
        }
        if let Some(residual) = &self.residual {
            part(op, "residual", residual).float().shaped(&[rows, d_model], &x);
        }
    }
}

/// Norms on a backend.
pub trait NormOps: ReshapeOps {
    /// Body of [`norm`]; [`Autodiff`](burn::backend::Autodiff) ties forward and backward together
    /// here.
    fn norm(operands: Checked<NormForward<Self>>) -> Tensor<Self, 2> {
        norm_forward(operands).output
    }
    /// Forward of [`norm`], with the statistics that its backward needs.
    fn norm_forward(operands: Checked<NormForward<Self>>) -> NormOutput<Self> {
        reference::norm_forward(operands.into_inner())
    }
    /// Backward of [`norm`]: gradients of the input and, if they are trained, of the weights.
    fn norm_backward(operands: Checked<NormBackward<Self>>) -> NormGradients<Self> {
        reference::norm_backward(operands.into_inner())
    }
}

/// Normalizes the last dimension of `x` `[.., d_model]`. Statistics are f32, whatever the dtype of
/// `x`.
///
/// # Panics
/// If the last dimension and the norm's weights differ in size, or `x` is empty.
pub fn norm<B: NormOps, const D: usize>(x: Tensor<B, D>, norm: &Norm<B>) -> Tensor<B, D> {
    let _op = recorder::op("norm", || Call::reads([recorder::operand(&x)]).and_first(1));
    let dims = x.dims();
    as_dims(norm_rows(as_rows(x), norm.clone()), dims)
}

/// [`norm`] of rows, as a part of another operation.
pub(crate) fn norm_rows<B: NormOps>(x: Tensor<B, 2>, norm: Norm<B>) -> Tensor<B, 2> {
    call!(B: NormOps::norm(Checked::new(NormForward { x, norm })))
}

pub(crate) fn norm_forward<B: NormOps>(operands: Checked<NormForward<B>>) -> NormOutput<B> {
    dispatch!(B: NormOps::norm_forward(operands))
}

pub(crate) fn norm_backward<B: NormOps>(operands: Checked<NormBackward<B>>) -> NormGradients<B> {
    dispatch!(B: NormOps::norm_backward(operands))
}
