//! Dropout whose mask is a pure function of a key, recomputed in the backward pass and never stored.

pub(crate) mod autodiff;
#[cfg(feature = "ndarray")]
pub(crate) mod cpu;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) mod cubecl;
pub(crate) mod reference;

use burn::tensor::Tensor;

use crate::autodiff::{as_dims, as_rows};
use crate::{Backend, RandomKey, recorder};

/// Which elements to drop: each with `probability`, as the bits of `key` say.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// Probability of an element to become zero, in [0, 1).
    pub probability: f64,
    /// Seed, step, layer and site of this mask.
    pub key: RandomKey,
}

impl Dropout {
    /// Elements whose 16 random bits are below this are dropped.
    pub fn threshold(&self) -> u32 {
        (self.probability * f64::from(1 << 16)).round() as u32
    }

    /// The factor on the elements that stay, which keeps the mean.
    pub fn scale(&self) -> f64 {
        1.0 / (1.0 - self.probability)
    }
}

/// Dropout (Srivastava et al., 2014) over `[.., columns]`, any float dtype: an element becomes zero with the given
/// probability, and what stays is scaled by `1 / (1 - probability)`.
///
/// Leading dimensions are flattened to rows: element (r, c) has half of the 32 bits at (r, c / 2) of the cipher behind
/// [`RandomKey::bits`], its left half where c is even, and is dropped where this lies below [`Dropout::threshold`], on
/// every backend alike.
pub fn dropout<B: Backend, const D: usize>(x: Tensor<B, D>, dropout: Dropout) -> Tensor<B, D> {
    if dropout.probability == 0.0 {
        return x;
    }
    let _op = recorder::op("dropout", || vec![recorder::operand(&x)]);
    let dims = x.dims();
    as_dims(B::dropout(as_rows(x), dropout), dims)
}
