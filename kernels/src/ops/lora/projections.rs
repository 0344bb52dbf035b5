//! Projections with adapters as separate [projections](crate::linear()), where no kernel fuses
//! them.

use burn::tensor::Tensor;

use super::{LoraBackward, LoraForward, LoraGradients, LoraLayer, LoraOps, LoraOutput};
use crate::checked::Checked;
use crate::ops::activation::activate_rows;
use crate::ops::linear::reference::{activation_gradient, add_bias};
use crate::ops::linear::{
    LinearBackward, LinearForward, LinearOps, Saved, Wanted, linear_backward, linear_forward, linear_rows,
};
use crate::quant::Weight;

/// `factor * x`.
pub(super) fn scaled<B: LinearOps>(x: Tensor<B, 2>, factor: f64) -> Tensor<B, 2> {
    if factor == 1.0 { x } else { x.mul_scalar(factor) }
}

/// `scale * x a^T`.
pub(super) fn inner<B: LoraOps>(x: Tensor<B, 2>, a: Weight<B>, scale: f64) -> Tensor<B, 2> {
    scaled(linear_forward(Checked::new(LinearForward::new(x, a, None))).output, scale)
}

/// The forward pass from `inner`, `scale * x a^T`.
pub(super) fn forward<B: LoraOps>(operands: LoraForward<B>, inner: Tensor<B, 2>) -> LoraOutput<B> {
    let LoraForward { x, layer, residual, keeps } = operands;
    let LoraLayer { weight, bias, b, activation, .. } = layer;
    let project = |operands: LinearForward<B>| linear_forward(Checked::new(operands)).output;
    let own_bias = bias.clone().filter(|_| activation.is_none());
    // What a backward pass follows is as exact as its gradients.
    let base = project(LinearForward { residual, keeps, ..LinearForward::new(x, weight, own_bias) });
    let output = project(LinearForward { residual: Some(base), ..LinearForward::new(inner.clone(), b, None) });
    match activation {
        None => LoraOutput { output, inner, saved: None },
        Some(activation) => {
            let saved = keeps.then(|| Saved::Product(output.clone()));
            LoraOutput { output: activate_rows(add_bias(output, bias), activation), inner, saved }
        }
    }
}

/// The backward pass.
pub(super) fn backward<B: LoraOps>(operands: LoraBackward<B>) -> LoraGradients<B> {
    let LoraBackward { grad, x, inner, layer, saved, wanted, sums } = operands;
    let LoraLayer { weight, bias, a, b, scale, activation } = layer;
    let grad = match activation.zip(saved) {
        Some((activation, saved)) => activation_gradient(grad, saved, bias, activation),
        None => grad,
    };
    let gradients = |grad: Tensor<B, 2>, weight: Weight<B>, x: Option<Tensor<B, 2>>, sum: Option<Tensor<B, 2>>| {
        let wanted = Wanted { weight: x.is_some(), bias: false };
        let (bias, activation, dropout) = (None, None, None);
        linear_backward(Checked::new(LinearBackward { grad, x, weight, bias, wanted, activation, dropout, sum }))
    };
    let [a_sum, b_sum] = sums;
    let of_b = gradients(grad.clone(), b, wanted.b.then_some(inner), b_sum);
    let of_a = gradients(scaled(of_b.x, scale), a, wanted.a.then_some(x), a_sum);
    let x = wanted.x.then(|| gradients(grad, weight, None, None).x + of_a.x);
    LoraGradients { x, a: of_a.weight, b: of_b.weight }
}

/// The projection as separate operations, each with a gradient of its own.
pub(super) fn separate<B: LoraOps>(operands: LoraForward<B>) -> Tensor<B, 2> {
    let LoraForward { x, layer, residual, .. } = operands;
    let LoraLayer { weight, bias, a, b, scale, activation } = layer;
    let own_bias = bias.clone().filter(|_| activation.is_none());
    let inner = scaled(linear_rows(LinearForward::new(x.clone(), a, None)), scale);
    let base = linear_rows(LinearForward { residual, ..LinearForward::new(x, weight, own_bias) });
    let output = linear_rows(LinearForward { residual: Some(base), ..LinearForward::new(inner, b, None) });
    match activation {
        None => output,
        Some(activation) => activate_rows(add_bias(output, bias), activation),
    }
}
