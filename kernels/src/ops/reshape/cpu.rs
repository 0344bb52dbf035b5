//! Reshaping on the CPU, without copying contiguous data.

use burn::tensor::Tensor;
use burn_ndarray::NdArray;

use super::ReshapeOps;
use crate::cpu::Values;

impl ReshapeOps for NdArray {
    fn reshape<const D: usize, const E: usize>(x: Tensor<Self, D>, shape: [usize; E]) -> Tensor<Self, E> {
        Values::strided(x).reshaped(shape)
    }
}
