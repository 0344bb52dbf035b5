//! Projections in CubeCL.

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;

use crate::cube::cast;
use crate::cube::product::product;

/// `x * weight^T` in the dtype of `x`.
pub(crate) fn project<R: CubeRuntime>(x: CubeTensor<R>, weight: CubeTensor<R>) -> CubeTensor<R> {
    let dtype = x.dtype;
    product(x, transposed(cast(weight, dtype)), dtype)
}

/// The gradients of `x`, in its dtype, and of `weight`, in f32.
pub(crate) fn project_backward<R: CubeRuntime>(
    grad: CubeTensor<R>,
    x: CubeTensor<R>,
    weight: CubeTensor<R>,
) -> (CubeTensor<R>, CubeTensor<R>) {
    let dtype = x.dtype;
    let d_weight = product(transposed(grad.clone()), x, DType::F32);
    (product(grad, cast(weight, dtype), dtype), d_weight)
}

fn transposed<R: CubeRuntime>(mut x: CubeTensor<R>) -> CubeTensor<R> {
    x.meta.swap(0, 1);
    x
}
