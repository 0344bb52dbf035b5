//! [`Backend`] for CubeCL's runtimes, CUDA and WGPU: kernels written once. The bodies stand beside their operations,
//! in `cube.rs`.

use burn::tensor::{DType, Int, Tensor};
use burn_cubecl::element::BoolElement;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement};

use crate::activation::{self, Activation};
use crate::autodiff::{float, primitive};
use crate::cube::contiguous;
use crate::dropout::{self, Dropout};
use crate::head_loss::{self, HeadLossOptions, HeadLossOutput};
use crate::linear::{self, LinearGradients};
use crate::norm::cube::CubeNorm;
use crate::norm::{self, Norm, NormGradients, NormKind, NormOutput};
use crate::softmax;
use crate::team::sum_over_rows;
use crate::{Backend, RandomKey};

impl<R, F, I, BT> Backend for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn random_bits(rows: usize, columns: usize, key: RandomKey, device: &Self::Device) -> Tensor<Self, 2, Int> {
        let bits = Tensor::<Self, 2, Int>::empty([rows, columns], (device, DType::I32)).into_primitive();
        Tensor::from_primitive(dropout::cube::random_bits(contiguous(bits), key))
    }

    fn dropout(x: Tensor<Self, 2>, dropout: Dropout) -> Tensor<Self, 2> {
        float(dropout::cube::dropout(primitive(x), dropout))
    }

    fn norm_forward(x: Tensor<Self, 2>, norm: &Norm<Self>) -> NormOutput<Self> {
        match norm::cube::norm_forward(primitive(x.clone()), cube_norm(norm)) {
            Some((output, mean, inverse_deviation)) => {
                NormOutput { output: float(output), mean: mean.map(float), inverse_deviation: float(inverse_deviation) }
            }
            None => norm::reference::norm_forward(x, norm),
        }
    }

    fn norm_backward(
        grad: Tensor<Self, 2>,
        x: Tensor<Self, 2>,
        saved: NormOutput<Self>,
        norm: &Norm<Self>,
        residual: Option<Tensor<Self, 2>>,
    ) -> NormGradients<Self> {
        let residual = residual.map(|residual| residual.cast(x.dtype()));
        let inputs = [grad.clone().cast(x.dtype()), x.clone()].map(primitive);
        let mean = saved.mean.clone().map(primitive);
        let inverse = primitive(saved.inverse_deviation.clone());
        let [d_y, input] = inputs;
        let around = residual.clone().map(primitive);
        match norm::cube::norm_backward(d_y, input, mean, inverse, cube_norm(norm), around) {
            Some((d_x, d_gamma, d_beta)) => NormGradients {
                x: float(d_x),
                gamma: float(d_gamma),
                beta: norm.beta.as_ref().zip(d_beta).map(|(beta, d_beta)| {
                    let d_beta: Tensor<Self, 1> = float(d_beta);
                    d_beta.cast(beta.dtype())
                }),
            },
            None => norm::reference::norm_backward(grad, x, saved, norm, residual),
        }
    }

    fn linear_forward(x: Tensor<Self, 2>, weight: Tensor<Self, 2>, bias: Option<Tensor<Self, 1>>) -> Tensor<Self, 2> {
        let product = linear::reference::linear_forward(x, weight, None);
        float(linear::cube::bias_add(primitive(product), bias.map(primitive), None, None))
    }

    fn linear_backward(
        grad: Tensor<Self, 2>,
        x: Tensor<Self, 2>,
        weight: Tensor<Self, 2>,
        has_bias: bool,
    ) -> LinearGradients<Self> {
        let bias = has_bias.then(|| float(sum_over_rows(primitive(grad.clone()))));
        LinearGradients { bias, ..linear::reference::linear_backward(grad, x, weight, false) }
    }

    fn linear_add(
        x: Tensor<Self, 2>,
        weight: Tensor<Self, 2>,
        bias: Option<Tensor<Self, 1>>,
        dropout: Option<Dropout>,
        residual: Tensor<Self, 2>,
    ) -> Tensor<Self, 2> {
        let product = linear::reference::linear_forward(x, weight, None);
        float(linear::cube::bias_add(primitive(product), bias.map(primitive), dropout, Some(primitive(residual))))
    }

    fn softmax_forward(x: Tensor<Self, 2>) -> Tensor<Self, 2> {
        float(softmax::cube::softmax(primitive(x)))
    }

    fn softmax_backward(grad: Tensor<Self, 2>, output: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let grad = grad.cast(output.dtype());
        float(softmax::cube::softmax_backward(primitive(grad), primitive(output)))
    }

    fn head_loss_forward(
        hidden: Tensor<Self, 2>,
        weight: Tensor<Self, 2>,
        targets: Tensor<Self, 1, Int>,
        options: HeadLossOptions,
        gradients: bool,
    ) -> HeadLossOutput<Self> {
        head_loss::cube::head_loss_forward(hidden, weight, targets, options, gradients)
    }

    fn activate_forward(x: Tensor<Self, 2>, activation: Activation) -> Tensor<Self, 2> {
        float(activation::cube::activate(primitive(x), None, activation))
    }

    fn activate_backward(grad: Tensor<Self, 2>, x: Tensor<Self, 2>, activation: Activation) -> Tensor<Self, 2> {
        float(activation::cube::activate_backward(primitive(grad), primitive(x), None, activation))
    }
}

/// The norm's weights as primitives.
fn cube_norm<R, F, I, BT>(norm: &Norm<CubeBackend<R, F, I, BT>>) -> CubeNorm<R>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    CubeNorm {
        layer: norm.kind == NormKind::Layer,
        gamma: primitive(norm.gamma.clone()),
        beta: norm.beta.clone().map(primitive),
        epsilon: norm.epsilon,
    }
}
