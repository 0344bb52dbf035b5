//! Projections in CubeCL: products with the operations before and after them.

pub(crate) mod gemm;
pub(crate) mod gemm_simt;
pub(crate) mod gemm_tensor_cores;
pub(crate) mod layout;
pub(crate) mod skinny;

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor};
use burn_cubecl::element::BoolElement;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement};
use cubecl::prelude::*;

use self::gemm::{Added, product, product_activate, product_add, product_and_row_sums, product_into};
use self::layout::transposed;
use self::skinny::{CubeWeight, Epilogue, norm_project_skinny, on_tensor_cores, project_skinny};
use super::route::SKINNY_ROWS;
use super::{
    LinearBackward, LinearForward, LinearGradients, LinearOps, LinearOutput, Saved, Wanted, float_weight, normed,
};
use crate::checked::Checked;
use crate::cubecl::reduce::{row_vector, sum_over_rows};
use crate::cubecl::{array, contiguous, empty, grid, launch, rows};
use crate::ops::activation::Activation;
use crate::ops::activation::cubecl::{activate, activate_backward, activate_by_slopes};
use crate::ops::dropout::cubecl::kept;
use crate::ops::dropout::{Dropout, dropout_rows};
#[cfg(feature = "cuda")]
#[cfg(feature = "cuda")]
use crate::ops::linear::{FewRowsWeight, few_rows_product};
use crate::ops::norm::cubecl::CubeNorm;
use crate::ops::norm::cubecl::cube_norm;
use crate::ops::norm::norm_rows;
use crate::ops::weight::WeightOps;
use crate::ops::weight::cubecl::cube_quantized;
#[cfg(feature = "cuda")]
use crate::quant::Format;
use crate::quant::{Reader, Weight};
use crate::random::RandomKey;
use crate::random::cubecl::{Rounds, row_bits};
use crate::tensor::{float, primitive};

const UNITS: u32 = 256;

impl<R, F, I, BT> LinearOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn linear_forward(operands: Checked<LinearForward<Self>>) -> LinearOutput<Self> {
        let operands = operands.into_inner();
        // Nothing is saved for the backward pass, and nothing is dropped.
        let plain = operands.dropout.is_none() && (!operands.keeps || operands.activation.is_none());
        if plain && let Some(output) = few_rows_linear(&operands) {
            return LinearOutput { output, saved: None };
        }
        if plain && operands.x.dims()[0] <= SKINNY_ROWS {
            return LinearOutput { output: skinny_linear(operands), saved: None };
        }
        let had_norm = operands.norm.is_some();
        let operands = normed(operands);
        if plain
            && had_norm
            && let Some(output) = few_rows_linear(&operands)
        {
            return LinearOutput { output, saved: None };
        }
        let LinearForward { x, weight, bias, activation, dropout, residual, keeps, .. } = operands;
        let weight = primitive(float_weight(weight, &x));
        let (x, bias) = (primitive(x), bias.map(primitive));
        if let Some(activation) = activation {
            let fused = product_activate(&x, &transposed(weight.clone()), None, bias.as_ref(), activation, keeps);
            if let Some((output, slopes)) = fused {
                return LinearOutput { output: float(output), saved: slopes.map(float).map(Saved::Slopes) };
            }
            let product = project(x, weight);
            let output = float(activate(product.clone(), bias, activation));
            return LinearOutput { output, saved: keeps.then(|| Saved::Product(float(product))) };
        }
        let output = float(project_add(x, weight, bias, dropout, residual.map(primitive)));
        LinearOutput { output, saved: None }
    }

    fn linear_backward(operands: Checked<LinearBackward<Self>>) -> LinearGradients<Self> {
        let LinearBackward { grad, x, weight, bias, wanted, activation, dropout, sum } = operands.into_inner();
        let mut grad = primitive(dropout_rows(grad, dropout));
        let wanted = Wanted { bias: wanted.bias && bias.is_some(), ..wanted };
        if let Some((activation, saved)) = activation {
            grad = activation_gradient(grad, saved, bias, activation);
        }
        let dtype = grad.dtype;
        let weight = primitive(weight.into_float(dtype.into()));
        let (d_weight, bias) = parameter_gradients(grad.clone(), x.map(primitive), sum.map(primitive), wanted);
        let d_x = product(grad, weight, dtype, dtype);
        LinearGradients { x: float(d_x), weight: d_weight.map(float), bias: bias.map(float) }
    }
}

/// The gradient before the activation, from the gradient after it.
pub(crate) fn activation_gradient<R, F, I, BT>(
    grad: CubeTensor<R>,
    saved: Saved<CubeBackend<R, F, I, BT>>,
    bias: Option<Tensor<CubeBackend<R, F, I, BT>, 1>>,
    activation: Activation,
) -> CubeTensor<R>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    match saved {
        Saved::Product(product) => activate_backward(grad, primitive(product), bias.map(primitive), activation),
        Saved::Slopes(slopes) => activate_by_slopes(grad, primitive(slopes), activation),
    }
}

/// The requested gradients of a weight, f32 and added to `sum`, and of a bias, from the outputs'
/// gradient `[rows, d_output]` and the inputs `[rows, d_input]`.
pub(crate) fn parameter_gradients<R: CubeRuntime>(
    grad: CubeTensor<R>,
    x: Option<CubeTensor<R>>,
    sum: Option<CubeTensor<R>>,
    wanted: Wanted,
) -> (Option<CubeTensor<R>>, Option<CubeTensor<R>>) {
    let Some(x) = x.filter(|_| wanted.weight) else {
        return (None, wanted.bias.then(|| sum_over_rows(grad)));
    };
    let (dtype, columns) = (x.dtype, transposed(grad));
    if wanted.bias {
        let [weight, bias] = product_and_row_sums(sum, columns, x, dtype);
        return (Some(weight), Some(bias));
    }
    let weight = match sum {
        Some(sum) => product_into(sum, columns, x, dtype),
        None => product(columns, x, dtype, DType::F32),
    };
    (Some(weight), None)
}

/// A projection of few rows in one launch on Hopper, without dropout and without saving for the
/// backward pass. `None` if another kernel is faster.
fn few_rows_linear<R, F, I, BT>(
    operands: &LinearForward<CubeBackend<R, F, I, BT>>,
) -> Option<Tensor<CubeBackend<R, F, I, BT>, 2>>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let LinearForward { x, norm, weight, bias, activation, residual, .. } = operands;
    let x = primitive(x.clone());
    let norm = norm.clone().map(cube_norm);
    let [bias, residual] = [bias.clone().map(primitive), residual.clone().map(primitive)];
    let epilogue = Epilogue { bias, activation: *activation, residual, dtype: x.dtype };
    few_rows_product_of(&x, norm.as_ref(), weight, &epilogue).map(float)
}

/// The product of few rows on Hopper with a weight as it is stored. `None` if there is no kernel
/// for it, as without CUDA.
pub(crate) fn few_rows_product_of<R, B>(
    x: &CubeTensor<R>,
    norm: Option<&CubeNorm<R>>,
    weight: &Weight<B>,
    epilogue: &Epilogue<R>,
) -> Option<CubeTensor<R>>
where
    R: CubeRuntime,
    B: WeightOps + Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    #[cfg(feature = "cuda")]
    return match weight.clone() {
        Weight::Float(weight) => few_rows_product(x, norm, FewRowsWeight::Float(&primitive(weight)), epilogue),
        Weight::Quantized(weight) if weight.format == Format::Int8 => {
            few_rows_product(x, norm, FewRowsWeight::Int8(&cube_quantized(weight)), epilogue)
        }
        _ => None,
    };
    #[cfg(not(feature = "cuda"))]
    {
        let _ = (x, norm, weight, epilogue);
        None
    }
}

/// A skinny projection, in one launch if the kernel also computes the norm before it.
fn skinny_linear<R, F, I, BT>(operands: LinearForward<CubeBackend<R, F, I, BT>>) -> Tensor<CubeBackend<R, F, I, BT>, 2>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let LinearForward { x, norm, weight, bias, activation, residual, .. } = operands;
    let (weight, x) = (cube_weight(weight, x.dtype()), primitive(x));
    let (bias, residual) = (bias.map(primitive), residual.map(primitive));
    let epilogue = Epilogue { bias, activation, residual, dtype: x.dtype };
    float(match norm {
        Some(norm) if on_tensor_cores(&x, &weight) => norm_project_skinny(x, cube_norm(norm), weight, epilogue),
        Some(norm) => {
            let x = norm_rows::<CubeBackend<R, F, I, BT>>(float(x), norm);
            project_skinny(primitive(x), weight, epilogue)
        }
        None => project_skinny(x, weight, epilogue),
    })
}

/// A weight for skinny products: as stored if they support its format, otherwise dequantized to
/// `dtype`.
pub(crate) fn cube_weight<R, B>(weight: Weight<B>, dtype: DType) -> CubeWeight<R>
where
    R: CubeRuntime,
    B: WeightOps + Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    match weight {
        Weight::Quantized(weight) if weight.format.is_read_by(Reader::Skinny) => {
            CubeWeight::Quantized(cube_quantized(weight))
        }
        weight => CubeWeight::Float(primitive(weight.into_float(dtype.into()))),
    }
}

/// `x * weight^T` in the dtype of `x`.
fn project<R: CubeRuntime>(x: CubeTensor<R>, weight: CubeTensor<R>) -> CubeTensor<R> {
    let dtype = x.dtype;
    product(x, transposed(weight), dtype, dtype)
}

/// `residual + dropout(x * weight^T + bias)` in the dtype of `x`, for `x` `[rows, d_input]` and
/// `residual` `[rows, d_output]`. Bias, dropout and residual are optional.
fn project_add<R: CubeRuntime>(
    x: CubeTensor<R>,
    weight: CubeTensor<R>,
    bias: Option<CubeTensor<R>>,
    dropout: Option<Dropout>,
    residual: Option<CubeTensor<R>>,
) -> CubeTensor<R> {
    if bias.is_some() || dropout.is_some() || residual.is_some() {
        let added = Added { bias: bias.clone(), dropout, residual: residual.clone(), low_rank: None };
        if let Some(out) = product_add(&x, &transposed(weight.clone()), &added) {
            return out;
        }
    }
    bias_add(project(x, weight), bias, dropout, residual)
}

/// `residual + dropout(product + bias)` for `product` and `residual` `[rows, columns]` and `bias`
/// `[columns]`. Computed in f32, rounded to the dtype of `product`, in place if `product` is not
/// shared.
fn bias_add<R: CubeRuntime>(
    product: CubeTensor<R>,
    bias: Option<CubeTensor<R>>,
    dropout: Option<Dropout>,
    residual: Option<CubeTensor<R>>,
) -> CubeTensor<R> {
    if bias.is_none() && dropout.is_none() && residual.is_none() {
        return product;
    }
    let (product, stride) = rows(product);
    let [n_rows, columns] = [product.meta.shape()[0], product.meta.shape()[1]];
    let in_place = product.can_mut();
    let (biased, adds) = (bias.is_some(), residual.is_some());
    let bias = bias.map_or_else(|| product.clone(), contiguous);
    let (residual, residual_stride) = residual.map_or_else(|| (product.clone(), stride), rows);
    let (out, out_stride) = match in_place {
        true => (product.clone(), stride),
        false => (empty(&product, [n_rows, columns], product.dtype), columns),
    };
    let vector = row_vector(&[&product, &residual, &bias, &out], &[columns, stride, residual_stride, out_stride]);
    let units = n_rows * columns / vector;
    let drops = dropout.is_some();
    let dropout = dropout.unwrap_or(Dropout { probability: 0.0, key: RandomKey::new(0) });
    // SAFETY: each unit below `units` reads and writes its own vector of [rows, columns] matrices.
    unsafe {
        launch!(
            bias_add_kernel::BiasAddKernel,
            &product.client,
            grid(units.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            [N = vector],
            [F = product.dtype, W = bias.dtype, V = residual.dtype],
            [
                product: Array<Vector<bias_add_kernel::F, bias_add_kernel::N>> = array(&product),
                bias: Array<Vector<bias_add_kernel::W, bias_add_kernel::N>> = array(&bias),
                residual: Array<Vector<bias_add_kernel::V, bias_add_kernel::N>> = array(&residual),
                out: Array<Vector<bias_add_kernel::F, bias_add_kernel::N>> = array(&out),
                units: u32 = units as u32,
                columns: u32 = (columns / vector) as u32,
                stride: u32 = (stride / vector) as u32,
                residual_stride: u32 = (residual_stride / vector) as u32,
                out_stride: u32 = (out_stride / vector) as u32,
                threshold: u32 = dropout.threshold(),
                scale: f32 = dropout.scale() as f32,
                rounds: Rounds = dropout.key.rounds(),
            ],
            [biased: bool = biased, drops: bool = drops, adds: bool = adds]
        );
    }
    out
}

#[cube(launch_unchecked)]
fn bias_add_kernel<F: Float, W: Float, V: Float, N: Size>(
    product: &Array<Vector<F, N>>,
    bias: &Array<Vector<W, N>>,
    residual: &Array<Vector<V, N>>,
    out: &mut Array<Vector<F, N>>,
    units: u32,
    columns: u32,
    stride: u32,
    residual_stride: u32,
    out_stride: u32,
    threshold: u32,
    scale: f32,
    rounds: &Rounds,
    #[comptime] biased: bool,
    #[comptime] drops: bool,
    #[comptime] adds: bool,
    #[define(F)] _dtype: StorageType,
    #[define(W)] _bias_dtype: StorageType,
    #[define(V)] _residual_dtype: StorageType,
) {
    let at = ABSOLUTE_POS as u32;
    if at >= units {
        terminate!();
    }
    let row = at / columns;
    let column = at % columns;
    let mut value = Vector::<f32, N>::cast_from(product[(row * stride + column) as usize]);
    if biased {
        value += Vector::cast_from(bias[column as usize]);
    }
    if drops {
        value *= kept::<N>(row_bits(row, rounds), column, threshold, scale, rounds);
    }
    if adds {
        value += Vector::cast_from(residual[(row * residual_stride + column) as usize]);
    }
    out[(row * out_stride + column) as usize] = Vector::cast_from(value);
}
