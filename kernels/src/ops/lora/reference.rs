//! Projections with adapters from small operations.

use burn::tensor::{DType, FloatDType, Tensor};

use super::{LoraBackward, LoraForward, LoraGradients, LoraLayer, LoraOps, LoraOutput};
use crate::ops::activation::activate_rows;
use crate::ops::linear::Saved;
use crate::ops::linear::reference::{activation_gradient, add_bias};

/// Reference forward of [`lora`](crate::lora()).
pub fn lora_forward<B: LoraOps>(operands: LoraForward<B>) -> LoraOutput<B> {
    let LoraForward { x, layer, residual, .. } = operands;
    let LoraLayer { weight, bias, a, b, scale, activation } = layer;
    let dtype = x.dtype();
    let [weight, a, b] = [weight, a, b].map(|weight| weight.into_float(FloatDType::from(dtype)).cast(dtype));
    let inner = x.clone().matmul(a.transpose()).mul_scalar(scale);
    let product = x.matmul(weight.transpose()) + inner.clone().matmul(b.transpose());
    let projected = add_bias(product.clone(), bias);
    if let Some(activation) = activation {
        return LoraOutput {
            output: activate_rows(projected, activation),
            inner,
            saved: Some(Saved::Product(product)),
        };
    }
    let output = match residual {
        Some(residual) => residual.cast(dtype) + projected,
        None => projected,
    };
    LoraOutput { output, inner, saved: None }
}

/// Reference backward of [`lora`](crate::lora()).
pub fn lora_backward<B: LoraOps>(operands: LoraBackward<B>) -> LoraGradients<B> {
    let LoraBackward { grad, x, inner, layer, saved, wanted, sums } = operands;
    let LoraLayer { weight, bias, a, b, scale, activation } = layer;
    let dtype = grad.dtype();
    let grad = match activation.zip(saved) {
        Some((activation, saved)) => activation_gradient(grad, saved, bias, activation),
        None => grad,
    };
    let [weight, a, b] = [weight, a, b].map(|weight| weight.into_float(FloatDType::from(dtype)).cast(dtype));
    let inner_grad = grad.clone().matmul(b).mul_scalar(scale);
    let product = |grad: &Tensor<B, 2>, x: Tensor<B, 2>, sum: Option<Tensor<B, 2>>| {
        let gradient = grad.clone().transpose().matmul(x).cast(DType::F32);
        match sum {
            Some(sum) => sum + gradient,
            None => gradient,
        }
    };
    let [a_sum, b_sum] = sums;
    LoraGradients {
        a: wanted.a.then(|| product(&inner_grad, x, a_sum)),
        b: wanted.b.then(|| product(&grad, inner, b_sum)),
        x: wanted.x.then(|| grad.matmul(weight) + inner_grad.matmul(a)),
    }
}
