//! Random inputs, and how close results must be.

use burn::tensor::{DType, Tensor, TensorData};
use fireclay_kernels::{Backend, RandomKey};

/// Uniform values in (-1, 1), the same on every backend.
pub(crate) fn random<B: Backend, const D: usize>(seed: u64, shape: [usize; D], device: &B::Device) -> Tensor<B, D> {
    let key = RandomKey::new(seed);
    let size = shape.iter().product::<usize>() as u32;
    let values: Vec<f32> = (0..size).map(|at| (2.0 * key.uniform(at / 1024, at % 1024) - 1.0) as f32).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

/// How far a result may be from its reference, as a whole and in each row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tolerance {
    /// The largest relative error, `||a - b|| / ||b||`, of all rows together and of each row.
    pub(crate) relative: f64,
    /// What rounding leaves of numbers of order one. A row may be off by so much of an average row, since a small row may be
    /// the difference of large numbers.
    pub(crate) rounding: f64,
    /// The root mean square up to which a reference is rounding alone, where theory says zero.
    pub(crate) zero: f64,
    /// What an element of a row may be off by in any case.
    pub(crate) floor: f64,
}

/// Of sums of f32: some units of the last place.
const SINGLE: f64 = 64.0 / (1 << 24) as f64;

impl Tolerance {
    /// For results in `dtype`.
    pub(crate) fn new(relative: f64, dtype: DType) -> Self {
        // Numbers of 16 bits are summed in f32: they are rounded a few times only.
        let rounding = match dtype {
            DType::BF16 => 16.0 * 2f64.powi(-9),
            DType::F16 => 16.0 * 2f64.powi(-12),
            _ => SINGLE,
        };
        Self { relative, rounding, zero: SINGLE, floor: 0.0 }
    }

    /// For results of which some rows, or all, are zero in theory: of inputs and upstream gradients of order one.
    pub(crate) fn or_zero(self) -> Self {
        Self { zero: self.rounding, floor: self.rounding, ..self }
    }

    /// The same for numbers whose errors may be so many times larger.
    pub(crate) fn times(self, factor: f64) -> Self {
        Self { relative: self.relative * factor, rounding: self.rounding * factor, ..self }
    }

    /// At least so large an error.
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

/// How far f32 results may be from the reference's: on CUDA the reference's products are Burn's, which run in TF32.
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

/// `||a - b|| / ||b||`; infinite where `b` is zero and `a` is not, or a number is missing.
pub(crate) fn relative_error(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len(), "sizes differ");
    let [error, norm] = error_and_norm(a, b);
    if error == 0.0 {
        return 0.0;
    }
    let relative = error / norm;
    if relative.is_nan() { f64::INFINITY } else { relative }
}

/// Why `a`, in rows of `columns`, is not as close to `b` as it has to be.
pub(crate) fn difference(a: &[f32], b: &[f32], columns: usize, tolerance: Tolerance) -> Option<String> {
    assert_eq!(a.len(), b.len(), "sizes differ");
    if a == b {
        return None;
    }
    let Tolerance { relative, rounding, zero, floor } = tolerance;
    let [error, norm] = error_and_norm(a, b);
    // NaN is neither within a bound nor above it, and must not pass.
    let within = |error: f64, bound: f64| error <= bound;
    let elements = |count: usize| (count as f64).sqrt();
    // Of an element.
    let typical = norm / elements(b.len());
    if typical <= zero {
        // The reference is rounding alone, and so is this, of whatever size.
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

/// Asserts that two tensors of one shape are close, as a whole and in each row of their last axis.
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
