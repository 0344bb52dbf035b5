//! Projections in CubeCL: products, and what stands around them, the end of a sub-layer in one pass. Column sums, for the
//! gradient of the bias, are [`sum_over_rows`](crate::cubecl::reduce::sum_over_rows).

pub(crate) mod gemm;
mod gemm_simt;
mod gemm_tensor_cores;
pub(crate) mod skinny;

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use crate::Dropout;
use crate::RandomKey;
use crate::cubecl::reduce::row_vector;
use crate::cubecl::{array, contiguous, empty, grid, launch, rows};
use crate::ops::dropout::cubecl::kept;
use crate::ops::linear::cubecl::gemm::{Added, product, product_add, transposed};
use crate::random::cubecl::{Rounds, row_bits};

const UNITS: u32 = 256;

/// `x * weight^T` in the dtype of `x`.
pub(crate) fn project<R: CubeRuntime>(x: CubeTensor<R>, weight: CubeTensor<R>) -> CubeTensor<R> {
    let dtype = x.dtype;
    product(x, transposed(weight), dtype, dtype)
}

/// `residual + dropout(x * weight^T + bias)` in the dtype of `x`, of which bias, dropout and residual may be missing: `x`
/// `[rows, d_input]`, `residual` `[rows, d_output]`.
pub(crate) fn project_add<R: CubeRuntime>(
    x: CubeTensor<R>,
    weight: CubeTensor<R>,
    bias: Option<CubeTensor<R>>,
    dropout: Option<Dropout>,
    residual: Option<CubeTensor<R>>,
) -> CubeTensor<R> {
    if dropout.is_none() {
        let added = Added { bias: bias.clone(), residual: residual.clone() };
        if let Some(out) = product_add(&x, &transposed(weight.clone()), added) {
            return out;
        }
    }
    bias_add(project(x, weight), bias, dropout, residual)
}

/// The gradients of `x`, in its dtype, and of `weight`, in f32.
pub(crate) fn project_backward<R: CubeRuntime>(
    grad: CubeTensor<R>,
    x: CubeTensor<R>,
    weight: CubeTensor<R>,
) -> (CubeTensor<R>, CubeTensor<R>) {
    let dtype = x.dtype;
    let d_weight = product(transposed(grad.clone()), x, dtype, DType::F32);
    (product(grad, weight, dtype, dtype), d_weight)
}

/// `residual + dropout(product + bias)`: `product` and `residual` `[rows, columns]`, `bias` `[columns]`. In f32, then in
/// the dtype of `product`, and in its place where nothing else holds it.
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
#[allow(clippy::too_many_arguments)]
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
