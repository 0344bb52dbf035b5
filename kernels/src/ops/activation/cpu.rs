//! Activations on the CPU, with their slopes in the same pass.

use burn::tensor::Tensor;
use burn_ndarray::NdArray;

use super::{ActivateBackward, ActivateForward, Activation, ActivationKind, ActivationOps};
use crate::checked::Checked;
use crate::cpu::{Values, exp, for_lanes, for_rows, new_rows, new_rows_beside, sigmoid, tensor};

/// Calls a function with a kind's function `f(x)` and its slope.
macro_rules! with_kind {
    ($activation:expr, $call:ident($($argument:expr),*)) => {
        match $activation.kind {
            ActivationKind::GeluErf => $call($($argument,)* $activation.gated, gelu_erf),
            ActivationKind::GeluTanh => $call($($argument,)* $activation.gated, gelu_tanh),
            ActivationKind::Relu => $call($($argument,)* $activation.gated, relu),
            ActivationKind::Silu => $call($($argument,)* $activation.gated, silu),
            ActivationKind::QuickGelu => $call($($argument,)* $activation.gated, quick_gelu),
            ActivationKind::ReluSquared => $call($($argument,)* $activation.gated, relu_squared),
        }
    };
}

impl ActivationOps for NdArray {
    fn activate_forward(operands: Checked<ActivateForward<Self>>) -> Tensor<Self, 2> {
        let ActivateForward { x, activation } = operands.into_inner();
        with_kind!(activation, forward(x))
    }

    fn activate_backward(operands: Checked<ActivateBackward<Self>>) -> Tensor<Self, 2> {
        let ActivateBackward { grad, x, activation } = operands.into_inner();
        with_kind!(activation, backward(grad, x))
    }
}

/// The activation of `x` `[rows, width]`, which is overwritten with the slopes for
/// [`activate_by_slopes`].
pub(crate) fn activate_keeping_slopes(x: &mut [f32], shape: [usize; 2], activation: Activation) -> Tensor<NdArray, 2> {
    with_kind!(activation, forward_keeping_slopes(x, shape))
}

/// The gradient of an input from the `slopes` left by [`activate_keeping_slopes`].
pub(crate) fn activate_by_slopes(
    grad: Tensor<NdArray, 2>,
    slopes: Tensor<NdArray, 2>,
    activation: Activation,
) -> Tensor<NdArray, 2> {
    let [rows, width] = slopes.dims();
    let slopes = Values::rows(slopes);
    if !activation.gated {
        let mut d_x = Values::rows(grad).into_vec();
        for_rows(
            &mut d_x,
            width,
            #[inline(always)]
            |first, d_x| {
                d_x.iter_mut().zip(&slopes[first * width..]).for_each(|(d_x, slope)| *d_x *= slope);
            },
        );
        return tensor(d_x, [rows, width]);
    }
    let (columns, grad) = (width / 2, Values::rows(grad));
    let [d_x] = new_rows(
        rows,
        [width],
        #[inline(always)]
        |first, [d_x]| {
            for (row, d_x) in (first..).zip(d_x.chunks_exact_mut(width)) {
                let grad = &grad[row * columns..][..columns];
                for (d_x, slopes) in d_x.chunks_exact_mut(columns).zip(slopes[row * width..].chunks_exact(columns)) {
                    d_x.iter_mut().zip(slopes.iter().zip(grad)).for_each(|(d_x, (slope, grad))| *d_x = grad * slope);
                }
            }
        },
    );
    tensor(d_x, [rows, width])
}

fn forward_keeping_slopes(
    x: &mut [f32],
    [rows, width]: [usize; 2],
    gated: bool,
    f: impl Fn(f32) -> (f32, f32) + Sync,
) -> Tensor<NdArray, 2> {
    let columns = if gated { width / 2 } else { width };
    let [out] = new_rows_beside(
        rows,
        (x, width),
        [columns],
        #[inline(always)]
        |_, x, [out]| {
            for (x, out) in x.chunks_exact_mut(width).zip(out.chunks_exact_mut(columns)) {
                let (gate, up) = x.split_at_mut(columns);
                if gated {
                    for_lanes([gate, up, out], |[gate, up, _]| {
                        let (value, slope) = f(gate);
                        [up * slope, value, value * up]
                    });
                } else {
                    for_lanes([gate, out], |[x, _]| {
                        let (value, slope) = f(x);
                        [slope, value]
                    });
                }
            }
        },
    );
    tensor(out, [rows, columns])
}

fn forward(x: Tensor<NdArray, 2>, gated: bool, f: impl Fn(f32) -> (f32, f32) + Sync) -> Tensor<NdArray, 2> {
    let [rows, width] = x.dims();
    let columns = if gated { width / 2 } else { width };
    let x = Values::rows(x);
    let [out] = new_rows(
        rows,
        [columns],
        #[inline(always)]
        |first, [out]| {
            for (row, out) in (first..).zip(out.chunks_exact_mut(columns)) {
                let (x, up) = x[row * width..][..width].split_at(columns);
                out.iter_mut().zip(x).for_each(|(out, x)| *out = f(*x).0);
                // Empty without a gate.
                out.iter_mut().zip(up).for_each(|(out, up)| *out *= up);
            }
        },
    );
    tensor(out, [rows, columns])
}

fn backward(
    grad: Tensor<NdArray, 2>,
    x: Tensor<NdArray, 2>,
    gated: bool,
    f: impl Fn(f32) -> (f32, f32) + Sync,
) -> Tensor<NdArray, 2> {
    let [rows, width] = x.dims();
    let columns = if gated { width / 2 } else { width };
    let (grad, x) = (Values::rows(grad), Values::rows(x));
    let [d_x] = new_rows(
        rows,
        [width],
        #[inline(always)]
        |first, [d_x]| {
            for (row, d_x) in (first..).zip(d_x.chunks_exact_mut(width)) {
                let (gate, up) = x[row * width..][..width].split_at(columns);
                let grad = &grad[row * columns..][..columns];
                let (d_gate, d_up) = d_x.split_at_mut(columns);
                if gated {
                    for ((d_gate, d_up), ((gate, up), grad)) in
                        d_gate.iter_mut().zip(d_up).zip(gate.iter().zip(up).zip(grad))
                    {
                        let (value, slope) = f(*gate);
                        (*d_gate, *d_up) = (grad * up * slope, grad * value);
                    }
                } else {
                    d_gate.iter_mut().zip(gate.iter().zip(grad)).for_each(|(d_x, (x, grad))| *d_x = grad * f(*x).1);
                }
            }
        },
    );
    tensor(d_x, [rows, width])
}

#[inline(always)]
fn relu(x: f32) -> (f32, f32) {
    if x > 0.0 { (x, 1.0) } else { (x * 0.0, 0.0) }
}

#[inline(always)]
fn silu(x: f32) -> (f32, f32) {
    let s = sigmoid(x);
    (x * s, s * (1.0 + x * (1.0 - s)))
}

#[inline(always)]
fn quick_gelu(x: f32) -> (f32, f32) {
    let z = 1.702 * x;
    let s = sigmoid(z);
    (x * s, s * (1.0 + z * (1.0 - s)))
}

#[inline(always)]
fn relu_squared(x: f32) -> (f32, f32) {
    let (value, _) = relu(x);
    (value * value, 2.0 * value)
}

#[inline(always)]
fn gelu_tanh(x: f32) -> (f32, f32) {
    const ROOT: f32 = 0.797_884_6;
    const CUBIC: f32 = 0.044_715;
    // (1 + tanh(z)) / 2 is sigmoid(2 z).
    let s = sigmoid(2.0 * ROOT * x * (1.0 + CUBIC * x * x));
    let inner = 2.0 * ROOT * (1.0 + 3.0 * CUBIC * x * x);
    (x * s, s + x * s * (1.0 - s) * inner)
}

/// With the error function of Abramowitz and Stegun, 7.1.26, accurate to 1.5e-7.
#[inline(always)]
fn gelu_erf(x: f32) -> (f32, f32) {
    let z = x.abs() * std::f32::consts::FRAC_1_SQRT_2;
    let t = 1.0 / (1.0 + 0.327_591_1 * z);
    let p = ((((1.061_405_4 * t - 1.453_152) * t + 1.421_413_7) * t - 0.284_496_74) * t + 0.254_829_6) * t;
    let gauss = exp(-z * z);
    let tail = 0.5 * p * gauss;
    let cdf = if x > 0.0 { 1.0 - tail } else { tail };
    (x * cdf, cdf + x * gauss * 0.398_942_3)
}
