//! Dropout whose mask is a pure function of a key, recomputed in the backward pass and never
//! stored.

mod autodiff;
#[cfg(feature = "ndarray")]
pub(crate) mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod cubecl;
pub(crate) mod reference;

use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

use super::reshape::{ReshapeOps, as_dims, as_rows};
use crate::checked::{Checked, Operands, part};
use crate::mutation::call;
use crate::random::RandomKey;
use crate::recorder::{self, Call};
use crate::selection::dispatch;

/// Which elements to drop: with `probability`, by the bits of `key`.
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

    /// Factor on kept elements, which preserves the mean.
    pub fn scale(&self) -> f64 {
        1.0 / (1.0 - self.probability)
    }

    /// Optional dropout as the words of a `DropoutInfo` in CUDA C++.
    #[cfg(feature = "cuda")]
    pub(crate) fn words(dropout: Option<Self>) -> impl Iterator<Item = u32> {
        let threshold = dropout.map_or(0, |dropout| dropout.threshold());
        let scale = dropout.map_or(1.0, |dropout| dropout.scale() as f32).to_bits();
        let key = dropout.map_or(RandomKey::new(0), |dropout| dropout.key);
        let (rows, columns) = key.round_keys();
        [threshold, scale, key.first_row()].into_iter().chain(rows).chain(columns)
    }
}

/// Operands of [`dropout`].
#[derive(Clone, Debug)]
pub struct DropoutForward<B: Backend> {
    /// `[rows, columns]`.
    pub x: Tensor<B, 2>,
    /// Which elements to drop.
    pub dropout: Dropout,
}

impl<B: Backend> Operands for DropoutForward<B> {
    fn check(&self) {
        part("dropout", "x", &self.x).float();
    }
}

/// Dropout of a backend.
pub trait DropoutOps: ReshapeOps {
    /// [`dropout`]; [`Autodiff`](burn::backend::Autodiff) ties forward and backward together here.
    fn dropout(operands: Checked<DropoutForward<Self>>) -> Tensor<Self, 2> {
        dropout_forward(operands)
    }
    /// Forward of [`dropout`], which is linear and so its own backward.
    fn dropout_forward(operands: Checked<DropoutForward<Self>>) -> Tensor<Self, 2> {
        reference::dropout_forward(operands.into_inner())
    }
}

/// Dropout (Srivastava et al., 2014) over `[.., columns]`, any float dtype: elements become zero
/// with the given probability, and others are scaled by `1 / (1 - probability)`.
///
/// Leading dimensions are flattened to rows. Element (r, c) uses half of the 32 bits at (r, c / 2)
/// of the cipher behind [`RandomKey::bits`], the left half for even c, and is dropped if these are
/// below [`Dropout::threshold`], on every backend alike.
///
/// # Panics
/// If `x` is empty.
pub fn dropout<B: DropoutOps, const D: usize>(x: Tensor<B, D>, dropout: Dropout) -> Tensor<B, D> {
    if dropout.probability == 0.0 {
        return x;
    }
    let _op = recorder::op("dropout", || Call::reads([recorder::operand(&x)]).and_first(1));
    let dims = x.dims();
    as_dims(call!(B: DropoutOps::dropout(Checked::new(DropoutForward { x: as_rows(x), dropout }))), dims)
}

pub(crate) fn dropout_forward<B: DropoutOps>(operands: Checked<DropoutForward<B>>) -> Tensor<B, 2> {
    dispatch!(B: DropoutOps::dropout_forward(operands))
}

/// Dropout of rows, if any.
pub(crate) fn dropout_rows<B: DropoutOps>(x: Tensor<B, 2>, dropout: Option<Dropout>) -> Tensor<B, 2> {
    match dropout {
        Some(dropout) => call!(B: DropoutOps::dropout(Checked::new(DropoutForward { x, dropout }))),
        None => x,
    }
}
