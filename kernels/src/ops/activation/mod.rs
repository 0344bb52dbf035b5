//! The nonlinearity between the two products of a feed-forward layer, plain or gated.

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

/// A nonlinearity of one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ActivationKind {
    /// `x * Phi(x)`, exact (Hendrycks and Gimpel, 2016); BERT's.
    GeluErf,
    /// Its tanh approximation; GPT-2's.
    GeluTanh,
    /// `max(x, 0)`.
    Relu,
    /// `x * sigmoid(x)`; gated, it is SwiGLU.
    Silu,
}

/// A nonlinearity, and whether it gates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Activation {
    /// The function.
    pub kind: ActivationKind,
    /// Gated (Shazeer, 2020): the input holds gate and up halves, and the output is `kind(gate) * up`.
    pub gated: bool,
}

impl Activation {
    /// The function alone.
    pub fn plain(kind: ActivationKind) -> Self {
        Self { kind, gated: false }
    }

    /// The function as a gate: with [`ActivationKind::Silu`], SwiGLU.
    pub fn gated(kind: ActivationKind) -> Self {
        Self { kind, gated: true }
    }

    /// Columns of the output for an input of `width` columns.
    pub fn output_width(&self, width: usize) -> usize {
        if self.gated { width / 2 } else { width }
    }
}

/// Applies `activation` to `x` `[.., width]`: the output is `[.., width]`, or `[.., width / 2]` where it gates, the
/// first half of `x` being the gate. Computes in f32 and returns the dtype of `x`.
///
/// # Panics
/// If it gates and `width` is odd.
pub fn activate<B: Backend, const D: usize>(x: Tensor<B, D>, activation: Activation) -> Tensor<B, D> {
    let _op = recorder::op("activate", || vec![recorder::operand(&x)]);
    let mut dims = x.dims();
    assert!(!activation.gated || dims[D - 1].is_multiple_of(2), "activate: a gated activation needs an even width");
    dims[D - 1] = activation.output_width(dims[D - 1]);
    as_dims(B::activate(as_rows(x), activation), dims)
}
