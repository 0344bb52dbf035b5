//! Random inputs, and tolerances of results.

use burn::tensor::{DType, Tensor, TensorData};
use fireclay_kernels::{Backend, RandomKey};

/// Uniform values in (-1, 1), the same on every backend.
pub(crate) fn random<B: Backend, const D: usize>(seed: u64, shape: [usize; D], device: &B::Device) -> Tensor<B, D> {
    let key = RandomKey::new(seed);
    let size = shape.iter().product::<usize>() as u32;
    let values: Vec<f32> = (0..size).map(|at| (2.0 * key.uniform(at / 1024, at % 1024) - 1.0) as f32).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

/// The tolerance of a result, as a whole and per row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tolerance {
    /// Maximum relative error, `||a - b|| / ||b||`, of all rows together and of each row.
    pub(crate) relative: f64,
    /// Rounding error of values of order one. A row may deviate by this share of an average row,
    /// since a small row may be the difference of large values.
    pub(crate) rounding: f64,
    /// Maximum root mean square of a reference that is only rounding, where theory says zero.
    pub(crate) zero: f64,
    /// Absolute tolerance of an element.
    pub(crate) floor: f64,
}

/// For f32 sums: a few units in the last place.
const SINGLE: f64 = 64.0 / (1 << 24) as f64;

impl Tolerance {
    /// For results in `dtype`.
    pub(crate) fn new(relative: f64, dtype: DType) -> Self {
        // 16-bit values are summed in f32 and rounded only a few times.
        let rounding = match dtype {
            DType::BF16 => 16.0 * 2f64.powi(-9),
            DType::F16 => 16.0 * 2f64.powi(-12),
            _ => SINGLE,
        };
        Self { relative, rounding, zero: SINGLE, floor: 0.0 }
    }

    /// For results with rows that are zero in theory, from inputs and upstream gradients of order
    /// one.
    pub(crate) fn or_zero(self) -> Self {
        Self { zero: self.rounding, floor: self.rounding, ..self }
    }

    /// With errors this many times larger.
    pub(crate) fn times(self, factor: f64) -> Self {
        Self { relative: self.relative * factor, rounding: self.rounding * factor, ..self }
    }

    /// With at least this error.
    pub(crate) fn at_least(self, relative: f64) -> Self {
        Self { relative: self.relative.max(relative), ..self }
    }
}

/// For results in f32.
impl From<f64> for Tolerance {
    fn from(relative: f64) -> Self {
        Self::new(relative, DType::F32)
    }
}

/// The tolerance of f32 results: on CUDA the reference uses Burn's products, which run in TF32.
pub(crate) fn tolerance<B: Backend>(device: &B::Device) -> Tolerance {
    if B::name(device).contains("cuda") {
        Tolerance { rounding: 8.0 * 2f64.powi(-12), ..Tolerance::from(5e-3) }
    } else {
        Tolerance::from(1e-4)
    }
}

fn norm(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|value| value * value).sum::<f64>().sqrt()
}

/// `||a - b||` and `||b||`.
fn error_and_norm(a: &[f32], b: &[f32]) -> [f64; 2] {
    let differences = a.iter().zip(b).map(|(a, b)| f64::from(*a) - f64::from(*b));
    [norm(differences), norm(b.iter().copied().map(f64::from))]
}

/// `||a - b|| / ||b||`; infinite if `b` is zero and `a` is not, or if a value is NaN.
pub(crate) fn relative_error(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len(), "sizes differ");
    let [error, norm] = error_and_norm(a, b);
    if error == 0.0 {
        return 0.0;
    }
    let relative = error / norm;
    if relative.is_nan() { f64::INFINITY } else { relative }
}

/// Why `a`, in rows of `columns`, is not close enough to `b`.
pub(crate) fn difference(a: &[f32], b: &[f32], columns: usize, tolerance: Tolerance) -> Option<String> {
    assert_eq!(a.len(), b.len(), "sizes differ");
    if a == b {
        return None;
    }
    let Tolerance { relative, rounding, zero, floor } = tolerance;
    let [error, norm] = error_and_norm(a, b);
    // NaN compares false with every bound, and must not pass.
    let within = |error: f64, bound: f64| error <= bound;
    let elements = |count: usize| (count as f64).sqrt();
    // Per element.
    let typical = norm / elements(b.len());
    if typical <= zero {
        // Both are only rounding.
        let bound = 4.0 * zero * elements(b.len());
        return (!within(error, bound)).then(|| format!("error {error:.2e} above {bound:.2e}, of zeros"));
    }
    if !within(error, relative * norm) {
        return Some(format!("relative error {:.2e} above {relative:.0e}", error / norm));
    }
    let row_norm = typical * elements(columns);
    let mut rows = a.chunks(columns).zip(b.chunks(columns)).enumerate();
    rows.find_map(|(row, (a, b))| {
        let [error, norm] = error_and_norm(a, b);
        let bound = (relative * norm).max(rounding * row_norm).max(floor * elements(columns));
        (!within(error, bound)).then(|| {
            format!("row {row}: error {error:.2e} above {bound:.2e}; its norm is {norm:.2e}, of others {row_norm:.2e}")
        })
    })
}

/// The values of a tensor.
pub(crate) fn values<B: Backend, const D: usize>(tensor: &Tensor<B, D>) -> Vec<f32> {
    tensor.to_data().iter::<f32>().collect()
}

/// Asserts that two tensors of one shape are close, as a whole and per row of their last axis.
#[track_caller]
pub(crate) fn assert_close<B: Backend, const D: usize>(
    what: &str,
    a: &Tensor<B, D>,
    b: &Tensor<B, D>,
    tolerance: impl Into<Tolerance>,
) {
    assert_eq!(a.dims(), b.dims(), "{what}: shapes differ");
    let difference = difference(&values(a), &values(b), a.dims()[D - 1], tolerance.into());
    assert!(difference.is_none(), "{what}: {}", difference.unwrap_or_default());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(count: usize) -> Vec<f32> {
        (0..count * 16).map(|at| (at as f32 * 0.37).sin() + 0.1).collect()
    }

    #[test]
    fn one_wrong_row_of_many_is_a_difference() {
        let wanted = rows(40_000);
        for changed in [|x: f32| -x, |_| 0.0, |x: f32| 1.05 * x] {
            let mut got = wanted.clone();
            got[39_998 * 16..39_999 * 16].iter_mut().for_each(|x| *x = changed(*x));
            let tolerance = Tolerance::new(2e-2, DType::BF16);
            assert!(difference(&got, &wanted, 16, tolerance).is_some_and(|why| why.starts_with("row 39998")));
        }
    }

    #[test]
    fn small_numbers_are_compared_with_small_numbers() {
        let wanted: Vec<f32> = rows(10).iter().map(|x| x * 1e-5).collect();
        let zeros = vec![0.0; wanted.len()];
        assert!(difference(&zeros, &wanted, 16, Tolerance::new(3e-2, DType::BF16)).is_some());
        assert!(difference(&rows(10), &zeros, 16, 1e-4.into()).is_some());
        assert!(difference(&wanted, &wanted, 16, 0.0.into()).is_none());
    }

    #[test]
    fn nan_and_infinity_never_pass() {
        for bad in [f32::NAN, f32::INFINITY] {
            let mut got = rows(3);
            got[20] = bad;
            assert!(difference(&got, &rows(3), 16, 1e3.into()).is_some());
            assert!(difference(&[bad; 4], &[0.0; 4], 4, 1e3.into()).is_some());
            assert!(relative_error(&[bad], &[1.0]).is_infinite());
        }
    }
}
