//! Layer norm and RMS norm.

pub(crate) mod autodiff;
#[cfg(feature = "ndarray")]
pub(crate) mod cpu;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) mod cubecl;
pub(crate) mod reference;

use burn::tensor::Tensor;

use crate::Backend;
use crate::autodiff::{as_dims, as_rows};
use crate::recorder;

/// Which statistics a norm divides by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// Subtract the mean, divide by the standard deviation (Ba, Kiros and Hinton, 2016).
    Layer,
    /// Divide by the root of the mean square (Zhang and Sennrich, 2019).
    Rms,
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
    /// A layer norm with scale `gamma` and, where there is one, shift `beta`.
    pub fn layer(gamma: Tensor<B, 1>, beta: Option<Tensor<B, 1>>, epsilon: f64) -> Self {
        Self { kind: NormKind::Layer, gamma, beta, epsilon }
    }

    /// An RMS norm with scale `gamma`.
    pub fn rms(gamma: Tensor<B, 1>, epsilon: f64) -> Self {
        Self { kind: NormKind::Rms, gamma, beta: None, epsilon }
    }
}

/// What the forward pass of a norm gives.
#[derive(Clone, Debug)]
pub struct NormOutput<B: Backend> {
    /// `[rows, d_model]`, of the input's dtype.
    pub output: Tensor<B, 2>,
    /// Mean of each row, `[rows, 1]` f32, for layer norms.
    pub mean: Option<Tensor<B, 2>>,
    /// One over the standard deviation or root mean square of each row, `[rows, 1]` f32.
    pub inverse_deviation: Tensor<B, 2>,
}

/// What the backward pass of a norm gives.
#[derive(Clone, Debug)]
pub struct NormGradients<B: Backend> {
    /// `[rows, d_model]`, of the input's dtype.
    pub x: Tensor<B, 2>,
    /// `[d_model]`, of gamma's dtype.
    pub gamma: Tensor<B, 1>,
    /// `[d_model]`, of beta's dtype, where there is one.
    pub beta: Option<Tensor<B, 1>>,
}

/// Normalises the last dimension of `x` `[.., d_model]`. Statistics are f32, whatever the dtype of `x`.
///
/// # Panics
/// If the last dimension and the norm's weights differ in size.
pub fn norm<B: Backend, const D: usize>(x: Tensor<B, D>, norm: &Norm<B>) -> Tensor<B, D> {
    let _op = recorder::op("norm", || vec![recorder::operand(&x)]);
    let dims = x.dims();
    assert_eq!(dims[D - 1], norm.gamma.dims()[0], "norm: the input's last dimension and the weights differ");
    as_dims(B::norm(as_rows(x), norm), dims)
}
