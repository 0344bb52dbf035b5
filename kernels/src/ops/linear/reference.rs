//! Projections from small operations.

use burn::tensor::{DType, Tensor};

use super::{LinearActivateOutput, LinearGradients};
use crate::{Activation, Backend, Dropout, Norm};

/// Reference forward of [`linear`](crate::linear) over `[rows, d_input]`.
pub fn linear_forward<B: Backend>(x: Tensor<B, 2>, weight: Tensor<B, 2>, bias: Option<Tensor<B, 1>>) -> Tensor<B, 2> {
    let dtype = x.dtype();
    let product = x.matmul(weight.cast(dtype).transpose());
    match bias {
        Some(bias) => product + bias.cast(dtype).unsqueeze(),
        None => product,
    }
}

/// Reference backward of [`linear`](crate::linear).
pub fn linear_backward<B: Backend>(
    grad: Tensor<B, 2>,
    x: Tensor<B, 2>,
    weight: Tensor<B, 2>,
    has_bias: bool,
) -> LinearGradients<B> {
    let bias = has_bias.then(|| grad.clone().cast(DType::F32).sum_dim(0).squeeze_dim::<1>(0));
    LinearGradients {
        weight: grad.clone().transpose().matmul(x.clone()).cast(DType::F32),
        x: grad.matmul(weight.cast(x.dtype())),
        bias,
    }
}

pub(crate) fn norm_linear<B: Backend>(
    x: Tensor<B, 2>,
    norm: Option<&Norm<B>>,
    weight: Tensor<B, 2>,
    bias: Option<Tensor<B, 1>>,
) -> Tensor<B, 2> {
    let x = match norm {
        Some(norm) => B::norm(x, norm),
        None => x,
    };
    <B as Backend>::linear(x, weight, bias)
}

pub(crate) fn linear_add_forward<B: Backend>(
    x: Tensor<B, 2>,
    weight: Tensor<B, 2>,
    bias: Option<Tensor<B, 1>>,
    dropout: Option<Dropout>,
    residual: Tensor<B, 2>,
) -> Tensor<B, 2> {
    let projected = B::linear_forward(x, weight, bias);
    residual
        + match dropout {
            Some(dropout) => B::dropout(projected, dropout),
            None => projected,
        }
}

pub(crate) fn linear_add_backward<B: Backend>(
    grad: Tensor<B, 2>,
    x: Tensor<B, 2>,
    weight: Tensor<B, 2>,
    has_bias: bool,
    dropout: Option<Dropout>,
) -> LinearGradients<B> {
    let grad = match dropout {
        Some(dropout) => B::dropout(grad, dropout),
        None => grad,
    };
    B::linear_backward(grad, x, weight, has_bias)
}

pub(crate) fn norm_gate_up<B: Backend>(
    x: Tensor<B, 2>,
    norm: Option<&Norm<B>>,
    weight: Tensor<B, 2>,
    bias: Option<Tensor<B, 1>>,
    activation: Activation,
) -> Tensor<B, 2> {
    let x = match norm {
        Some(norm) => B::norm(x, norm),
        None => x,
    };
    B::linear_activate(x, weight, bias, activation)
}

pub(crate) fn linear_activate_forward<B: Backend>(
    x: Tensor<B, 2>,
    weight: Tensor<B, 2>,
    bias: Option<Tensor<B, 1>>,
    activation: Activation,
) -> LinearActivateOutput<B> {
    let projected = B::linear_forward(x, weight, bias);
    LinearActivateOutput { output: B::activate_forward(projected.clone(), activation), saved: projected }
}

pub(crate) fn linear_activate_backward<B: Backend>(
    grad: Tensor<B, 2>,
    x: Tensor<B, 2>,
    weight: Tensor<B, 2>,
    bias: Option<Tensor<B, 1>>,
    saved: Tensor<B, 2>,
    activation: Activation,
) -> LinearGradients<B> {
    B::linear_backward(B::activate_backward(grad, saved, activation), x, weight, bias.is_some())
}
