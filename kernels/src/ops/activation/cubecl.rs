//! Activations in CubeCL, with an optional bias before them in the same pass.

use burn::tensor::Tensor;
use burn_cubecl::element::BoolElement;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement};
use cubecl::prelude::*;

use super::{ActivateBackward, ActivateForward, Activation, ActivationKind, ActivationOps};
use crate::checked::Checked;
use crate::cubecl::{array, contiguous, empty, grid, launch, rows, vector_width};
use crate::tensor::{float, primitive};

const UNITS: u32 = 256;

/// `sqrt(2 / pi)`.
const ROOT: f32 = 0.797_884_6;
const QUICK: f32 = 1.702;
const CUBIC: f32 = 0.044_715;
/// `1 / sqrt(2 pi)`.
const DENSITY: f32 = 0.398_942_3;

impl<R, F, I, BT> ActivationOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn activate_forward(operands: Checked<ActivateForward<Self>>) -> Tensor<Self, 2> {
        let ActivateForward { x, activation } = operands.into_inner();
        float(activate(primitive(x), None, activation))
    }

    fn activate_backward(operands: Checked<ActivateBackward<Self>>) -> Tensor<Self, 2> {
        let ActivateBackward { grad, x, activation } = operands.into_inner();
        float(activate_backward(primitive(grad), primitive(x), None, activation))
    }
}

/// `activation(x + bias)` of `x` `[rows, width]`, bias `[width]`.
pub(crate) fn activate<R: CubeRuntime>(
    x: CubeTensor<R>,
    bias: Option<CubeTensor<R>>,
    activation: Activation,
) -> CubeTensor<R> {
    let (x, stride) = rows(x);
    let [n_rows, width] = [x.meta.shape()[0], x.meta.shape()[1]];
    let columns = activation.output_width(width);
    let out = empty(&x, [n_rows, columns], x.dtype);
    let bias = bias.map(contiguous);
    let biased = bias.is_some();
    let bias = bias.unwrap_or_else(|| x.clone());
    let vector = vector_width(&[&x, &out, &bias], &[columns, stride]);
    let units = n_rows * columns / vector;
    // SAFETY: each unit below `units` reads and writes its own vector of `out`'s shape, and `x` and
    // `bias` as wide.
    unsafe {
        launch!(
            activate_kernel::ActivateKernel,
            &x.client,
            grid(units.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            [N = vector],
            [F = x.dtype, W = bias.dtype],
            [
                x: Array<Vector<activate_kernel::F, activate_kernel::N>> = array(&x),
                bias: Array<Vector<activate_kernel::W, activate_kernel::N>> = array(&bias),
                out: Array<Vector<activate_kernel::F, activate_kernel::N>> = array(&out),
                units: u32 = units as u32,
                columns: u32 = (columns / vector) as u32,
                stride: u32 = (stride / vector) as u32,
            ],
            [kind: ActivationKind = activation.kind, gated: bool = activation.gated, biased: bool = biased]
        );
    }
    out
}

/// The gradient of `x` for `activation(x + bias)`.
pub(crate) fn activate_backward<R: CubeRuntime>(
    grad: CubeTensor<R>,
    x: CubeTensor<R>,
    bias: Option<CubeTensor<R>>,
    activation: Activation,
) -> CubeTensor<R> {
    backward(grad, x, bias, activation, false)
}

/// The gradient of an activation's input from its saved slopes: `[rows, width]`.
pub(crate) fn activate_by_slopes<R: CubeRuntime>(
    grad: CubeTensor<R>,
    slopes: CubeTensor<R>,
    activation: Activation,
) -> CubeTensor<R> {
    backward(grad, slopes, None, activation, true)
}

/// `x` holds the inputs, or if `by_slopes` the slopes.
fn backward<R: CubeRuntime>(
    grad: CubeTensor<R>,
    x: CubeTensor<R>,
    bias: Option<CubeTensor<R>>,
    activation: Activation,
    by_slopes: bool,
) -> CubeTensor<R> {
    let (x, stride) = rows(x);
    let (grad, grad_stride) = rows(grad);
    let [n_rows, width] = [x.meta.shape()[0], x.meta.shape()[1]];
    let columns = activation.output_width(width);
    let out = empty(&x, [n_rows, width], x.dtype);
    let bias = bias.map(contiguous);
    let biased = bias.is_some();
    let bias = bias.unwrap_or_else(|| x.clone());
    let vector = vector_width(&[&x, &grad, &out, &bias], &[columns, stride, grad_stride]);
    let units = n_rows * columns / vector;
    // SAFETY: each unit below `units` writes the vectors of `out` that its place in `grad` belongs
    // to.
    unsafe {
        launch!(
            activate_backward_kernel::ActivateBackwardKernel,
            &x.client,
            grid(units.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            [N = vector],
            [F = x.dtype, W = bias.dtype],
            [
                grad: Array<Vector<activate_backward_kernel::F, activate_backward_kernel::N>> = array(&grad),
                x: Array<Vector<activate_backward_kernel::F, activate_backward_kernel::N>> = array(&x),
                bias: Array<Vector<activate_backward_kernel::W, activate_backward_kernel::N>> = array(&bias),
                out: Array<Vector<activate_backward_kernel::F, activate_backward_kernel::N>> = array(&out),
                units: u32 = units as u32,
                columns: u32 = (columns / vector) as u32,
                stride: u32 = (stride / vector) as u32,
                grad_stride: u32 = (grad_stride / vector) as u32,
            ],
            [
                kind: ActivationKind = activation.kind,
                gated: bool = activation.gated,
                biased: bool = biased,
                by_slopes: bool = by_slopes,
            ]
        );
    }
    out
}

#[cube(launch_unchecked)]
fn activate_kernel<F: Float, W: Float, N: Size>(
    x: &Array<Vector<F, N>>,
    bias: &Array<Vector<W, N>>,
    out: &mut Array<Vector<F, N>>,
    units: u32,
    columns: u32,
    stride: u32,
    #[comptime] kind: ActivationKind,
    #[comptime] gated: bool,
    #[comptime] biased: bool,
    #[define(F)] _dtype: StorageType,
    #[define(W)] _bias_dtype: StorageType,
) {
    let at = ABSOLUTE_POS as u32;
    if at >= units {
        terminate!();
    }
    let row = at / columns;
    let column = at % columns;
    let gate = biased_value::<F, W, N>(x, bias, row * stride, column, biased);
    let mut value = value::<N>(gate, kind);
    if gated {
        value *= biased_value::<F, W, N>(x, bias, row * stride, column + columns, biased);
    }
    out[at as usize] = Vector::cast_from(value);
}

#[cube(launch_unchecked)]
fn activate_backward_kernel<F: Float, W: Float, N: Size>(
    grad: &Array<Vector<F, N>>,
    x: &Array<Vector<F, N>>,
    bias: &Array<Vector<W, N>>,
    out: &mut Array<Vector<F, N>>,
    units: u32,
    columns: u32,
    stride: u32,
    grad_stride: u32,
    #[comptime] kind: ActivationKind,
    #[comptime] gated: bool,
    #[comptime] biased: bool,
    #[comptime] by_slopes: bool,
    #[define(F)] _dtype: StorageType,
    #[define(W)] _bias_dtype: StorageType,
) {
    let at = ABSOLUTE_POS as u32;
    if at >= units {
        terminate!();
    }
    let row = at / columns;
    let column = at % columns;
    let grad = Vector::<f32, N>::cast_from(grad[(row * grad_stride + column) as usize]);
    let gate = biased_value::<F, W, N>(x, bias, row * stride, column, biased);
    if gated {
        let up = biased_value::<F, W, N>(x, bias, row * stride, column + columns, biased);
        let at = row * columns * 2 + column;
        if by_slopes {
            out[at as usize] = Vector::cast_from(grad * gate);
            out[(at + columns) as usize] = Vector::cast_from(grad * up);
        } else {
            out[at as usize] = Vector::cast_from(grad * up * slope::<N>(gate, kind));
            out[(at + columns) as usize] = Vector::cast_from(grad * value::<N>(gate, kind));
        }
    } else if by_slopes {
        out[at as usize] = Vector::cast_from(grad * gate);
    } else {
        out[at as usize] = Vector::cast_from(grad * slope::<N>(gate, kind));
    }
}

#[cube]
fn biased_value<F: Float, W: Float, N: Size>(
    x: &Array<Vector<F, N>>,
    bias: &Array<Vector<W, N>>,
    row: u32,
    column: u32,
    #[comptime] biased: bool,
) -> Vector<f32, N> {
    let mut value = Vector::<f32, N>::cast_from(x[(row + column) as usize]);
    if biased {
        value += Vector::cast_from(bias[column as usize]);
    }
    value
}

/// The nonlinearity.
#[cube]
pub(crate) fn value<N: Size>(x: Vector<f32, N>, #[comptime] kind: ActivationKind) -> Vector<f32, N> {
    match kind {
        ActivationKind::GeluErf => x * normal_cdf::<N>(x),
        ActivationKind::GeluTanh => x * sigmoid_of_gelu::<N>(x),
        ActivationKind::Relu => {
            let zero = Vector::<f32, N>::new(0.0);
            select_many(x.greater_than(zero), x, zero)
        }
        ActivationKind::Silu => x * sigmoid::<N>(x),
        ActivationKind::QuickGelu => x * sigmoid::<N>(x * Vector::new(QUICK)),
        ActivationKind::ReluSquared => {
            let zero = Vector::<f32, N>::new(0.0);
            select_many(x.greater_than(zero), x * x, zero)
        }
    }
}

/// Its derivative.
#[cube]
pub(crate) fn slope<N: Size>(x: Vector<f32, N>, #[comptime] kind: ActivationKind) -> Vector<f32, N> {
    let one = Vector::<f32, N>::new(1.0);
    match kind {
        ActivationKind::GeluErf => {
            let density = (x * x * Vector::new(-0.5f32)).exp() * Vector::new(DENSITY);
            normal_cdf::<N>(x) + x * density
        }
        ActivationKind::GeluTanh => {
            let s = sigmoid_of_gelu::<N>(x);
            let inner = (x * x * Vector::new(3.0 * CUBIC) + one) * Vector::new(2.0 * ROOT);
            s + x * s * (one - s) * inner
        }
        ActivationKind::Relu => {
            let zero = Vector::<f32, N>::new(0.0);
            select_many(x.greater_than(zero), one, zero)
        }
        ActivationKind::Silu => {
            let s = sigmoid::<N>(x);
            s * (one + x * (one - s))
        }
        ActivationKind::QuickGelu => {
            let z = x * Vector::new(QUICK);
            let s = sigmoid::<N>(z);
            s * (one + z * (one - s))
        }
        ActivationKind::ReluSquared => {
            let zero = Vector::<f32, N>::new(0.0);
            select_many(x.greater_than(zero), x * Vector::new(2.0f32), zero)
        }
    }
}

#[cube]
fn sigmoid<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    let one = Vector::<f32, N>::new(1.0);
    // CUDA lacks negation of vectors.
    one / (one + (Vector::new(0.0f32) - x).exp())
}

/// `(1 + tanh(z)) / 2`, which is `sigmoid(2 z)`, of the approximation's `z`.
#[cube]
fn sigmoid_of_gelu<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    let cubic = x * x * Vector::new(CUBIC) + Vector::new(1.0f32);
    sigmoid::<N>(x * cubic * Vector::new(2.0 * ROOT))
}

#[cube]
fn normal_cdf<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    (Vector::erf(x * Vector::new(0.707_106_77f32)) + Vector::new(1.0f32)) * Vector::new(0.5f32)
}
