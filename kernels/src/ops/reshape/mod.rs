//! The same elements in another shape.

pub(crate) mod autodiff;

use burn::tensor::Tensor;

use crate::Backend;

/// `x` in `shape`, of as many elements, which lie row after row as before.
///
/// Burn's own method does the same, but copies on the CPU; this one copies nothing that lies row after row.
///
/// # Panics
/// If the numbers of elements differ.
pub fn reshape<B: Backend, const D: usize, const E: usize>(x: Tensor<B, D>, shape: [usize; E]) -> Tensor<B, E> {
    B::reshape(x, shape)
}
