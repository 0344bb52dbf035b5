//! A loss that is computed within a model, such as that which balances experts: the backward pass
//! starts at it where it passes its place.

mod autodiff;
#[cfg(feature = "ndarray")]
mod cpu;
#[cfg(feature = "cubecl")]
mod cubecl;

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor};

use crate::checked::{Checked, Operands, part};
use crate::mutation::call;
use crate::recorder;

/// Operands of [`side_loss`].
#[derive(Clone, Debug)]
pub struct SideLoss<B: Backend> {
    /// `[rows, columns]`.
    pub x: Tensor<B, 2>,
    /// `[1]`.
    pub loss: Tensor<B, 1>,
}

impl<B: Backend> Operands for SideLoss<B> {
    fn check(&self) {
        let x = part("side_loss", "x", &self.x).float();
        part("side_loss", "loss", &self.loss).of(DType::F32).shaped(&[1], &x);
    }
}

/// Side losses of a backend: without a graph there is nothing to compute.
pub trait SideLossOps: Backend {
    /// Body of [`side_loss`].
    fn side_loss(operands: Checked<SideLoss<Self>>) -> Tensor<Self, 2> {
        operands.into_inner().x
    }
}

/// `x` itself. In the graph, `loss` `[1]`, f32, is added to whatever loss is computed from `x`: the
/// backward pass gives it the gradient 1, and passes that of `x` on.
///
/// So a layer can have a loss of its own that no caller has to collect, and that is counted once if
/// activation checkpointing computes the layer twice.
///
/// ```
/// use burn::backend::{Autodiff, NdArray};
/// use burn::tensor::Tensor;
/// use fireclay_kernels::side_loss;
///
/// let device = Default::default();
/// let x = Tensor::<Autodiff<NdArray>, 2>::from_floats([[3.0]], &device).require_grad();
/// let own = (x.clone() * x.clone()).sum();
/// let gradients = (side_loss(x.clone(), own) * 10.0).sum().backward();
/// assert_eq!(x.grad(&gradients).expect("it is in the graph").into_scalar(), 10.0 + 2.0 * 3.0);
/// ```
///
/// # Panics
/// If the loss is not one f32.
pub fn side_loss<B: SideLossOps>(x: Tensor<B, 2>, loss: Tensor<B, 1>) -> Tensor<B, 2> {
    let _op = recorder::op("side_loss", Vec::new);
    call!(B: SideLossOps::side_loss(Checked::new(SideLoss { x, loss })))
}
