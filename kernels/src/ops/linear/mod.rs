//! Projections, alone and with what stands before and after them in a transformer.
//!
//! Weights lie as on the hub, `[d_output, d_input]`. The product runs in the dtype of the input: a weight stored in
//! another one is cast, and parameter gradients are f32. Weights of bytes have no gradient.

pub(crate) mod autodiff;
#[cfg(feature = "ndarray")]
pub(crate) mod cpu;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) mod cubecl;
pub(crate) mod reference;

use burn::tensor::Tensor;

use crate::autodiff::{as_dims, as_rows};
use crate::{Activation, Backend, Dropout, Norm, Weight, recorder};

/// What the backward pass of a projection gives.
#[derive(Clone, Debug)]
pub struct LinearGradients<B: Backend> {
    /// `[rows, d_input]`, of the input's dtype.
    pub x: Tensor<B, 2>,
    /// `[d_output, d_input]`, f32.
    pub weight: Tensor<B, 2>,
    /// `[d_output]` f32, where there is a bias.
    pub bias: Option<Tensor<B, 1>>,
}

/// What the forward pass of a projection with an activation gives.
#[derive(Clone, Debug)]
pub struct LinearActivateOutput<B: Backend> {
    /// `[rows, width]` behind the activation, of the input's dtype.
    pub output: Tensor<B, 2>,
    /// `[rows, d_output]` before it, with the bias or without as the backend's backward needs it.
    pub saved: Tensor<B, 2>,
}

/// `x * weight^T + bias`: `x` `[.., d_input]`, `weight` `[d_output, d_input]`, `bias` `[d_output]`, the result
/// `[.., d_output]` in the dtype of `x`.
///
/// # Panics
/// If `d_input` of `x` and of `weight` differ.
pub fn linear<B: Backend, const D: usize>(
    x: Tensor<B, D>,
    weight: impl Into<Weight<B>>,
    bias: Option<Tensor<B, 1>>,
) -> Tensor<B, D> {
    let weight = weight.into();
    let _op = recorder::op("linear", || vec![recorder::operand(&x), weight.operand()]);
    let dims = output_dims(&x, &weight, "linear");
    let output = match weight {
        Weight::Float(weight) => <B as Backend>::linear(as_rows(x), weight, bias),
        Weight::Int8(weight) => B::int8_linear(as_rows(x), None, &weight, bias, None, None),
    };
    as_dims(output, dims)
}

/// Normalises `x` `[.., d_input]` where there is a norm, and projects it: `[.., d_output]`.
///
/// The residual stream itself is `x`, which stays as it was.
///
/// # Panics
/// If `d_input` of `x` and of `weight` differ.
pub fn norm_linear<B: Backend, const D: usize>(
    x: Tensor<B, D>,
    norm: Option<&Norm<B>>,
    weight: impl Into<Weight<B>>,
    bias: Option<Tensor<B, 1>>,
) -> Tensor<B, D> {
    let weight = weight.into();
    let _op = recorder::op("norm_linear", || vec![recorder::operand(&x), weight.operand()]);
    let dims = output_dims(&x, &weight, "norm_linear");
    let output = match weight {
        Weight::Float(weight) => B::norm_linear(as_rows(x), norm, weight, bias),
        Weight::Int8(weight) => B::int8_linear(as_rows(x), norm, &weight, bias, None, None),
    };
    as_dims(output, dims)
}

/// `residual + dropout(x * weight^T + bias)`: the end of a transformer's sub-layer. `x` is `[.., d_input]`,
/// `residual` and the result are `[.., d_output]`.
///
/// # Panics
/// If `d_input` of `x` and of `weight` differ, or there is dropout with a weight of bytes.
pub fn linear_add<B: Backend, const D: usize>(
    x: Tensor<B, D>,
    weight: impl Into<Weight<B>>,
    bias: Option<Tensor<B, 1>>,
    dropout: Option<Dropout>,
    residual: Tensor<B, D>,
) -> Tensor<B, D> {
    let weight = weight.into();
    let _op = recorder::op("linear_add", || vec![recorder::operand(&x), weight.operand()]);
    let dims = output_dims(&x, &weight, "linear_add");
    let dropout = dropout.filter(|dropout| dropout.probability > 0.0);
    let (x, residual) = (as_rows(x), as_rows(residual));
    let output = match weight {
        Weight::Float(weight) => B::linear_add(x, weight, bias, dropout, residual),
        Weight::Int8(_) if dropout.is_some() => {
            panic!("linear_add: a weight of bytes is for inference, without dropout")
        }
        Weight::Int8(weight) => B::int8_linear(x, None, &weight, bias, None, Some(residual)),
    };
    as_dims(output, dims)
}

/// Normalises `x` `[.., d_model]` where there is a norm, projects it by `weight` `[d_ff, d_model]`, or by gate and up
/// in one `[2 * d_ff, d_model]`, and applies `activation`: `[.., d_ff]`.
///
/// # Panics
/// If `d_model` of `x` and of `weight` differ.
pub fn norm_gate_up<B: Backend, const D: usize>(
    x: Tensor<B, D>,
    norm: Option<&Norm<B>>,
    weight: impl Into<Weight<B>>,
    bias: Option<Tensor<B, 1>>,
    activation: Activation,
) -> Tensor<B, D> {
    let weight = weight.into();
    let _op = recorder::op("norm_gate_up", || vec![recorder::operand(&x), weight.operand()]);
    let mut dims = output_dims(&x, &weight, "norm_gate_up");
    dims[D - 1] = activation.output_width(dims[D - 1]);
    let output = match weight {
        Weight::Float(weight) => B::norm_gate_up(as_rows(x), norm, weight, bias, activation),
        Weight::Int8(weight) => B::int8_linear(as_rows(x), norm, &weight, bias, Some(activation), None),
    };
    as_dims(output, dims)
}

fn output_dims<B: Backend, const D: usize>(x: &Tensor<B, D>, weight: &Weight<B>, op: &str) -> [usize; D] {
    let mut dims = x.dims();
    let [d_output, d_input] = weight.dims();
    assert_eq!(dims[D - 1], d_input, "{op}: the input's last dimension and the weight's differ");
    dims[D - 1] = d_output;
    dims
}
