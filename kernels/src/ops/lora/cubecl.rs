//! Projections with adapters in CubeCL: one product for weight and adapter, if a GEMM adds a second
//! product to the first, as Hopper's does.

use burn::tensor::Tensor;
use burn_cubecl::element::BoolElement;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement};

use super::projections::{self, scaled};
use super::{LoraBackward, LoraForward, LoraGradients, LoraLayer, LoraOps, LoraOutput};
use crate::checked::Checked;
use crate::ops::linear::cubecl::gemm::{product, product_activate, product_add};
use crate::ops::linear::cubecl::gemm_tensor_cores::Added;
use crate::ops::linear::cubecl::layout::transposed;
use crate::ops::linear::cubecl::{activation_gradient, parameter_gradients};
use crate::ops::linear::{Saved, Wanted, float_weight};
use crate::tensor::{float, primitive};

impl<R, F, I, BT> LoraOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn lora_forward(operands: Checked<LoraForward<Self>>) -> LoraOutput<Self> {
        let operands = operands.into_inner();
        let LoraLayer { a, scale, .. } = operands.layer.clone();
        let inner = projections::inner(operands.x.clone(), a, scale);
        match fused_forward(&operands, &inner) {
            Some((output, saved)) => LoraOutput { output, inner, saved },
            None => projections::forward(operands, inner),
        }
    }

    fn lora_backward(operands: Checked<LoraBackward<Self>>) -> LoraGradients<Self> {
        let LoraBackward { grad, x, inner, layer, saved, wanted, sums } = operands.into_inner();
        let LoraLayer { weight, bias, a, b, scale, activation } = layer;
        let mut grad = primitive(grad);
        if let Some((activation, saved)) = activation.zip(saved) {
            grad = activation_gradient(grad, saved, bias, activation);
        }
        let dtype = grad.dtype;
        let [x, inner] = [x, inner].map(primitive);
        let [a, b] = [a, b].map(|weight| primitive(weight.into_float(dtype.into())));
        let [a_sum, b_sum] = sums.map(|sum| sum.map(primitive));
        let weight_only = |weight| Wanted { weight, bias: false };
        let (d_b, _) = parameter_gradients(grad.clone(), Some(inner), b_sum, weight_only(wanted.b));
        let d_inner = scaled::<Self>(float(product(grad.clone(), b, dtype, dtype)), scale);
        let d_inner = primitive(d_inner);
        let (d_a, _) = parameter_gradients(d_inner.clone(), Some(x), a_sum, weight_only(wanted.a));
        if !wanted.x {
            return LoraGradients { x: None, a: d_a.map(float), b: d_b.map(float) };
        }
        let weight = primitive(weight.into_float(dtype.into()));
        let both = Added { low_rank: Some([d_inner.clone(), a.clone()]), ..Added::none() };
        let d_x = product_add(&grad, &weight, &both).unwrap_or_else(|| {
            let of_weight = product(grad, weight, dtype, dtype);
            let added = Added { residual: Some(of_weight.clone()), ..Added::none() };
            product_add(&d_inner, &a, &added)
                .unwrap_or_else(|| burn_cubecl::ops::numeric::add(of_weight, product(d_inner, a, dtype, dtype)))
        });
        LoraGradients { x: Some(float(d_x)), a: d_a.map(float), b: d_b.map(float) }
    }
}

/// The result and what is saved of it, in one launch after that of `inner`, `scale * x a^T`. `None`
/// if there is no such kernel for the operands.
#[expect(clippy::type_complexity, reason = "an output and what is saved of it")]
fn fused_forward<R, F, I, BT>(
    operands: &LoraForward<CubeBackend<R, F, I, BT>>,
    inner: &Tensor<CubeBackend<R, F, I, BT>, 2>,
) -> Option<(Tensor<CubeBackend<R, F, I, BT>, 2>, Option<Saved<CubeBackend<R, F, I, BT>>>)>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let LoraForward { x, layer, residual, keeps } = operands;
    let LoraLayer { weight, bias, b, activation, .. } = layer;
    // A weight of another format is dequantized for these only, as a product of few rows reads it as
    // it is stored.
    let rows = primitive(x.clone());
    if x.dims()[0] < FEWEST_ROWS || !has_kernel(&rows, inner.dims()[1]) {
        return None;
    }
    let [weight, b] = [weight, b].map(|weight| transposed(primitive(float_weight(weight.clone(), x))));
    let low_rank = [primitive(inner.clone()), b];
    let (x, bias) = (rows, bias.clone().map(primitive));
    if let Some(activation) = activation {
        let (output, slopes) = product_activate(&x, &weight, Some(&low_rank), bias.as_ref(), *activation, *keeps)?;
        return Some((float(output), slopes.map(float).map(Saved::Slopes)));
    }
    let added = Added { bias, residual: residual.clone().map(primitive), low_rank: Some(low_rank), dropout: None };
    Some((float(product_add(&x, &weight, &added)?), None))
}

/// Whether the device has a GEMM with a second product, whose rows TMA reads.
#[cfg(feature = "cuda")]
fn has_kernel<R: CubeRuntime>(x: &CubeTensor<R>, rank: usize) -> bool {
    let is_half = crate::cuda::half_name(x.dtype.into()).is_some();
    is_half && rank.is_multiple_of(8) && crate::cuda::takes(x, crate::cuda::Arch::Sm90)
}

#[cfg(not(feature = "cuda"))]
fn has_kernel<R: CubeRuntime>(_x: &CubeTensor<R>, _rank: usize) -> bool {
    false
}

/// Fewest rows of a product with both matrices: a tile of the GEMM.
const FEWEST_ROWS: usize = 128;
