//! The same elements in another shape.

mod autodiff;
#[cfg(feature = "ndarray")]
mod cpu;
#[cfg(feature = "cubecl")]
mod cubecl;

use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

use crate::mutation;

/// Reshaping on a backend.
pub trait ReshapeOps: Backend {
    /// Body of [`reshape`](crate::reshape()): panics if the numbers of elements differ.
    fn reshape<const D: usize, const E: usize>(x: Tensor<Self, D>, shape: [usize; E]) -> Tensor<Self, E> {
        x.reshape(shape)
    }
}

/// `x` in `shape`, of as many elements, which lie row after row as before.
///
/// Burn's own method does the same, but copies on the CPU; this one copies nothing that lies row after row.
///
/// # Panics
/// If the numbers of elements differ.
pub fn reshape<B: ReshapeOps, const D: usize, const E: usize>(x: Tensor<B, D>, shape: [usize; E]) -> Tensor<B, E> {
    let dims: [usize; D] = x.dims();
    let count = |sizes: &[usize]| sizes.iter().try_fold(1usize, |count, size| count.checked_mul(*size));
    assert!(count(&dims) == count(&shape), "reshape: shape {shape:?} does not fit x {dims:?}");
    mutation::result("reshape", B::reshape(x, shape))
}

/// `[rows, columns]` as `[.., columns]`; a matrix stays the same node of the graph.
pub(crate) fn as_dims<B: ReshapeOps, const D: usize>(rows: Tensor<B, 2>, dims: [usize; D]) -> Tensor<B, D> {
    if D == 2 { Tensor::from_primitive(rows.into_primitive()) } else { B::reshape(rows, dims) }
}

/// `[.., columns]` as `[rows, columns]`; a matrix stays the same node of the graph.
pub(crate) fn as_rows<B: ReshapeOps, const D: usize>(tensor: Tensor<B, D>) -> Tensor<B, 2> {
    if D == 2 {
        return Tensor::from_primitive(tensor.into_primitive());
    }
    let dims: [usize; D] = tensor.dims();
    B::reshape(tensor, [dims[..D - 1].iter().product(), dims[D - 1]])
}
