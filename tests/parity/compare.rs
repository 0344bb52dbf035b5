//! Random inputs, and how close results must be.

use burn::tensor::{Tensor, TensorData};
use fireclay_kernels::{Backend, RandomKey};

/// Uniform values in (-1, 1), the same on every backend.
pub(crate) fn random<B: Backend, const D: usize>(seed: u64, shape: [usize; D], device: &B::Device) -> Tensor<B, D> {
    let key = RandomKey::new(seed);
    let size = shape.iter().product::<usize>() as u32;
    let values: Vec<f32> = (0..size).map(|at| (2.0 * key.uniform(at / 1024, at % 1024) - 1.0) as f32).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

/// How far f32 results may be from the reference's: CUDA's products run in TF32 where a kernel is Burn's own.
pub(crate) fn tolerance<B: Backend>(device: &B::Device) -> f64 {
    if B::name(device).contains("cuda") { 5e-3 } else { 1e-4 }
}

/// `||a - b|| / ||b||`, at least against a norm of one hundredth of a unit an element; NaN never passes.
pub(crate) fn relative_error(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len(), "sizes differ");
    let square = |x: f64| x * x;
    let error: f64 = a.iter().zip(b).map(|(a, b)| square(f64::from(*a) - f64::from(*b))).sum();
    let norm: f64 = b.iter().map(|b| square(f64::from(*b))).sum();
    let error = error.sqrt() / norm.sqrt().max(1e-2 * (b.len() as f64).sqrt()).max(1e-12);
    if error.is_nan() { f64::INFINITY } else { error }
}

/// The values of a tensor.
pub(crate) fn values<B: Backend, const D: usize>(tensor: &Tensor<B, D>) -> Vec<f32> {
    tensor.to_data().iter::<f32>().collect()
}

/// Asserts that two tensors of one shape are close.
#[track_caller]
pub(crate) fn assert_close<B: Backend, const D: usize>(what: &str, a: &Tensor<B, D>, b: &Tensor<B, D>, tolerance: f64) {
    assert_eq!(a.dims(), b.dims(), "{what}: shapes differ");
    let error = relative_error(&values(a), &values(b));
    assert!(error <= tolerance, "{what}: relative error {error:.2e} above {tolerance:.0e}");
}
