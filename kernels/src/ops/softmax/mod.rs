//! Softmax over rows.

pub(crate) mod autodiff;
#[cfg(feature = "ndarray")]
pub(crate) mod cpu;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) mod cubecl;
pub(crate) mod reference;

use burn::tensor::Tensor;

use crate::Backend;
use crate::autodiff::{as_dims, as_rows};
use crate::recorder;

/// Softmax over the last dimension of `x` `[.., columns]`, any float dtype: `exp(x - max)` over its sum. Computes in f32
/// and returns the dtype of `x`.
pub fn softmax<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    let _op = recorder::op("softmax", || vec![recorder::operand(&x)]);
    let dims = x.dims();
    as_dims(<B as Backend>::softmax(as_rows(x)), dims)
}
