//! The activation between the two projections of a feed-forward layer, plain or gated.

mod autodiff;
#[cfg(feature = "ndarray")]
pub(crate) mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod cubecl;
pub(crate) mod reference;

use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

use super::reshape::{ReshapeOps, as_dims, as_rows};
use serde::{Deserialize, Serialize};

use crate::checked::{Checked, Operands, part};
use crate::mutation::call;
use crate::recorder::{self, Call};
use crate::selection::dispatch;

/// An elementwise function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ActivationKind {
    /// `x * Phi(x)`, exact (Hendrycks and Gimpel, 2016); BERT's.
    GeluErf,
    /// Its tanh approximation; GPT-2's.
    GeluTanh,
    /// `max(x, 0)`.
    Relu,
    /// `x * sigmoid(x)`; gated, it is SwiGLU.
    Silu,
    /// `x * sigmoid(1.702 x)`, an approximation of GELU; CLIP's.
    QuickGelu,
    /// `max(x, 0)^2` (So et al., 2021).
    ReluSquared,
}

#[cfg(feature = "cuda")]
impl ActivationKind {
    /// Its number in `numbers.cuh`.
    pub(crate) fn number(self) -> usize {
        match self {
            Self::GeluErf => 0,
            Self::GeluTanh => 1,
            Self::Relu => 2,
            Self::Silu => 3,
            Self::QuickGelu => 4,
            Self::ReluSquared => 5,
        }
    }
}

impl ActivationKind {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::GeluErf, Self::GeluTanh, Self::Relu, Self::Silu, Self::QuickGelu, Self::ReluSquared];
}

/// An activation: a function, optionally as a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Activation {
    /// The function.
    pub kind: ActivationKind,
    /// Gated (Shazeer, 2020): the input holds gate and up halves, and the output is `kind(gate) *
    /// up`.
    pub gated: bool,
}

impl Activation {
    /// The function without a gate.
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

/// Operands of [`activate`].
#[derive(Clone, Debug)]
pub struct ActivateForward<B: Backend> {
    /// `[rows, width]`.
    pub x: Tensor<B, 2>,
    /// The activation; if it is gated, `width` is even.
    pub activation: Activation,
}

impl<B: Backend> Operands for ActivateForward<B> {
    fn check(&self) {
        part("activate", "x", &self.x).float();
        check_width("activate", self.activation, self.x.dims());
    }
}

/// Operands of the gradient of [`activate`].
#[derive(Clone, Debug)]
pub struct ActivateBackward<B: Backend> {
    /// Gradient of the output, `[rows, width]` or `[rows, width / 2]`, in the dtype of `x`.
    pub grad: Tensor<B, 2>,
    /// The input of the forward pass.
    pub x: Tensor<B, 2>,
    /// The nonlinearity.
    pub activation: Activation,
}

impl<B: Backend> Operands for ActivateBackward<B> {
    fn check(&self) {
        let x = part("activate backward", "x", &self.x).float();
        let [rows, width] = self.x.dims();
        check_width("activate backward", self.activation, [rows, width]);
        let wanted = [rows, self.activation.output_width(width)];
        part("activate backward", "grad", &self.grad).shaped(&wanted, &x).alike(&x);
    }
}

fn check_width(op: &str, activation: Activation, dims: [usize; 2]) {
    assert!(
        !activation.gated || dims[1].is_multiple_of(2),
        "{op}: a gated activation needs an even width, x is {dims:?}"
    );
}

/// Activations of a backend.
pub trait ActivationOps: ReshapeOps {
    /// [`activate`]; [`Autodiff`](burn::backend::Autodiff) ties forward and backward together here.
    fn activate(operands: Checked<ActivateForward<Self>>) -> Tensor<Self, 2> {
        activate_forward(operands)
    }
    /// Forward of [`activate`].
    fn activate_forward(operands: Checked<ActivateForward<Self>>) -> Tensor<Self, 2> {
        reference::activate_forward(operands.into_inner())
    }
    /// Backward of [`activate`]: the gradient of the input.
    fn activate_backward(operands: Checked<ActivateBackward<Self>>) -> Tensor<Self, 2> {
        reference::activate_backward(operands.into_inner())
    }
}

/// Applies `activation` to `x` `[.., width]`. The output is `[.., width]`, or `[.., width / 2]` if
/// gated, with the gate in the first half of `x`. Computes in f32 and returns the dtype of `x`.
///
/// # Panics
/// If it is gated and `width` is odd, or `x` is empty.
pub fn activate<B: ActivationOps, const D: usize>(x: Tensor<B, D>, activation: Activation) -> Tensor<B, D> {
    let _op = recorder::op("activate", || {
        let x = recorder::operand(&x);
        let written = if activation.gated { x.bytes() / 2 } else { x.bytes() };
        Call::reads([x]).and(written)
    });
    let mut dims = x.dims();
    let operands = Checked::new(ActivateForward { x: as_rows(x), activation });
    dims[D - 1] = activation.output_width(dims[D - 1]);
    as_dims(call!(B: ActivationOps::activate(operands)), dims)
}

/// The backward pass reads the input and the gradient of the output, and writes that of the input.
fn activate_backward_call<B: Backend>(x: &Tensor<B, 2>, activation: Activation) -> Call {
    let x = recorder::operand(x);
    let upstream = if activation.gated { x.bytes() / 2 } else { x.bytes() };
    Call::reads([x]).and_first(1).and(upstream)
}

/// [`activate`] of rows, as a part of another operation.
pub(crate) fn activate_rows<B: ActivationOps>(x: Tensor<B, 2>, activation: Activation) -> Tensor<B, 2> {
    call!(B: ActivationOps::activate(Checked::new(ActivateForward { x, activation })))
}

pub(crate) fn activate_forward<B: ActivationOps>(operands: Checked<ActivateForward<B>>) -> Tensor<B, 2> {
    dispatch!(B: ActivationOps::activate_forward(operands))
}

pub(crate) fn activate_backward<B: ActivationOps>(operands: Checked<ActivateBackward<B>>) -> Tensor<B, 2> {
    dispatch!(B: ActivationOps::activate_backward(operands))
}
