//! Activations from basic operations.

use std::f64::consts::{FRAC_1_SQRT_2, PI};

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor, activation as burn_activation};

use super::{ActivateBackward, ActivateForward, ActivationKind};

/// Reference body of [`activate`](crate::activate()) over `[rows, width]`.
pub fn activate_forward<B: Backend>(ActivateForward { x, activation }: ActivateForward<B>) -> Tensor<B, 2> {
    let dtype = x.dtype();
    let x = x.cast(DType::F32);
    let output = if activation.gated {
        let (gate, up) = halves(x);
        value(gate, activation.kind) * up
    } else {
        value(x, activation.kind)
    };
    output.cast(dtype)
}

/// Reference backward of [`activate`](crate::activate()), from its input.
pub fn activate_backward<B: Backend>(operands: ActivateBackward<B>) -> Tensor<B, 2> {
    let ActivateBackward { grad, x, activation } = operands;
    let dtype = x.dtype();
    let (grad, x) = (grad.cast(DType::F32), x.cast(DType::F32));
    let d_x = if activation.gated {
        let (gate, up) = halves(x);
        let d_up = grad.clone() * value(gate.clone(), activation.kind);
        let d_gate = grad * up * slope(gate, activation.kind);
        Tensor::cat(vec![d_gate, d_up], 1)
    } else {
        grad * slope(x, activation.kind)
    };
    d_x.cast(dtype)
}

fn halves<B: Backend>(x: Tensor<B, 2>) -> (Tensor<B, 2>, Tensor<B, 2>) {
    let width = x.dims()[1] / 2;
    (x.clone().narrow(1, 0, width), x.narrow(1, width, width))
}

fn value<B: Backend>(x: Tensor<B, 2>, kind: ActivationKind) -> Tensor<B, 2> {
    match kind {
        ActivationKind::GeluErf => x.clone() * normal_cdf(x),
        ActivationKind::GeluTanh => x.clone() * sigmoid_of_gelu(x),
        ActivationKind::Relu => burn_activation::relu(x),
        ActivationKind::Silu => x.clone() * burn_activation::sigmoid(x),
        ActivationKind::QuickGelu => x.clone() * burn_activation::sigmoid(x.mul_scalar(QUICK)),
        ActivationKind::ReluSquared => burn_activation::relu(x).powi_scalar(2),
    }
}

fn slope<B: Backend>(x: Tensor<B, 2>, kind: ActivationKind) -> Tensor<B, 2> {
    match kind {
        ActivationKind::GeluErf => {
            let density = x.clone().powi_scalar(2).mul_scalar(-0.5).exp().mul_scalar(1.0 / (2.0 * PI).sqrt());
            normal_cdf(x.clone()) + x * density
        }
        ActivationKind::GeluTanh => {
            let s = sigmoid_of_gelu(x.clone());
            let inner = x.clone().powi_scalar(2).mul_scalar(3.0 * CUBIC).add_scalar(1.0).mul_scalar(2.0 * ROOT);
            s.clone() + x * s.clone() * (s.neg().add_scalar(1.0)) * inner
        }
        ActivationKind::Relu => x.greater_elem(0.0).float(),
        ActivationKind::Silu => {
            let s = burn_activation::sigmoid(x.clone());
            s.clone() * (x * s.neg().add_scalar(1.0)).add_scalar(1.0)
        }
        ActivationKind::QuickGelu => {
            let z = x.mul_scalar(QUICK);
            let s = burn_activation::sigmoid(z.clone());
            s.clone() * (z * s.neg().add_scalar(1.0)).add_scalar(1.0)
        }
        ActivationKind::ReluSquared => burn_activation::relu(x).mul_scalar(2.0),
    }
}

/// `sqrt(2 / pi)`.
const ROOT: f64 = 0.797_884_560_802_865_4;
const CUBIC: f64 = 0.044_715;
const QUICK: f64 = 1.702;

/// `(1 + tanh(z)) / 2`, which is `sigmoid(2 z)`, of the approximation's `z`.
fn sigmoid_of_gelu<B: Backend>(x: Tensor<B, 2>) -> Tensor<B, 2> {
    let cubic = x.clone().powi_scalar(2).mul_scalar(CUBIC).add_scalar(1.0);
    burn_activation::sigmoid((x * cubic).mul_scalar(2.0 * ROOT))
}

fn normal_cdf<B: Backend>(x: Tensor<B, 2>) -> Tensor<B, 2> {
    x.mul_scalar(FRAC_1_SQRT_2).erf().add_scalar(1.0).mul_scalar(0.5)
}
