//! Reshaping.

mod autodiff;
#[cfg(feature = "ndarray")]
mod cpu;
#[cfg(feature = "cubecl")]
mod cubecl;

use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

use crate::mutation;

/// Reshaping of a backend.
pub trait ReshapeOps: Backend {
    /// [`reshape`](crate::reshape()): panics if the numbers of elements differ.
    fn reshape<const D: usize, const E: usize>(x: Tensor<Self, D>, shape: [usize; E]) -> Tensor<Self, E> {
        x.reshape(shape)
    }
}

/// `x` in `shape`, with as many elements in row-major order.
///
/// Like Burn's own method, which copies on the CPU; this one does not copy contiguous data.
///
/// # Panics
/// If the numbers of elements differ.
pub fn reshape<B: ReshapeOps, const D: usize, const E: usize>(x: Tensor<B, D>, shape: [usize; E]) -> Tensor<B, E> {
    let dims: [usize; D] = x.dims();
    let count = |sizes: &[usize]| sizes.iter().try_fold(1usize, |count, size| count.checked_mul(*size));
    assert!(count(&dims) == count(&shape), "reshape: shape {shape:?} does not fit x {dims:?}");
    mutation::result("reshape", B::reshape(x, shape))
}

/// `[rows, columns]` as `[.., columns]`; for a matrix, the same graph node.
pub(crate) fn as_dims<B: ReshapeOps, const D: usize>(rows: Tensor<B, 2>, dims: [usize; D]) -> Tensor<B, D> {
    if D == 2 { Tensor::from_primitive(rows.into_primitive()) } else { B::reshape(rows, dims) }
}

/// `[.., columns]` as `[rows, columns]`; for a matrix, the same graph node.
pub(crate) fn as_rows<B: ReshapeOps, const D: usize>(tensor: Tensor<B, D>) -> Tensor<B, 2> {
    if D == 2 {
        return Tensor::from_primitive(tensor.into_primitive());
    }
    let dims: [usize; D] = tensor.dims();
    B::reshape(tensor, [dims[..D - 1].iter().product(), dims[D - 1]])
}
