//! RMS norms of the query and key heads of a joint projection, as Qwen3 and its like have them, in
//! place within the packed heads: neither is copied out of them for its norm.

mod autodiff;
#[cfg(feature = "ndarray")]
mod cpu;
#[cfg(feature = "cubecl")]
mod cubecl;
pub(crate) mod reference;

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor};

use super::norm::{Norm, NormKind, NormOps};
use crate::checked::{Checked, Operands, Part, part};
use crate::mutation::{call, parts};
use crate::packed_heads::PackedHeads;
use crate::recorder::{self, Call};
use crate::selection::dispatch;

/// The norms of query and key heads.
#[derive(Clone, Debug)]
pub struct HeadNorms<B: Backend> {
    /// Of each query head, its scale `[head_dim]`.
    pub query: Norm<B>,
    /// Of each key head, its scale `[head_dim]`.
    pub key: Norm<B>,
}

impl<B: Backend> HeadNorms<B> {
    /// Whether [`qkv_norm`] computes them: RMS norms without a shift.
    pub fn are_supported(&self) -> bool {
        [&self.query, &self.key].iter().all(|norm| norm.kind == NormKind::RmsNorm && norm.beta.is_none())
    }

    #[track_caller]
    fn check(&self, op: &'static str, x: &Part<'_, B::Device>, head_dim: usize) {
        assert!(self.are_supported(), "{op}: heads have RMS norms without a shift");
        self.query.check(op, x, head_dim);
        self.key.check(op, x, head_dim);
    }
}

/// Operands of [`qkv_norm`].
#[derive(Clone, Debug)]
pub struct QkvNormForward<B: Backend> {
    /// `[batch_size, seq_length, width]`.
    pub qkv: Tensor<B, 3>,
    /// The layout of its heads.
    pub heads: PackedHeads,
    /// Their norms.
    pub norms: HeadNorms<B>,
}

impl<B: Backend> Operands for QkvNormForward<B> {
    fn check(&self) {
        let op = "qkv_norm";
        let x = part(op, "qkv", &self.qkv).float();
        self.heads.check(op, "qkv", self.qkv.dims());
        self.norms.check(op, &x, self.heads.head_dim);
    }
}

/// Results of the forward pass.
#[derive(Clone, Debug)]
pub struct QkvNormOutput<B: Backend> {
    /// `[batch_size, seq_length, width]`, of the dtype of the input.
    pub output: Tensor<B, 3>,
    /// One over the root mean square of each head, 0 for value heads, f32 `[batch_size * seq_length *
    /// heads, 1]`.
    pub inverse_deviation: Tensor<B, 2>,
}

parts!(QkvNormOutput { output, inverse_deviation });

/// Operands of the gradients.
#[derive(Clone, Debug)]
pub struct QkvNormBackward<B: Backend> {
    /// Gradient of the output, in the dtype of the input.
    pub grad: Tensor<B, 3>,
    /// The input.
    pub qkv: Tensor<B, 3>,
    /// Of the forward pass.
    pub inverse_deviation: Tensor<B, 2>,
    /// The layout of the heads.
    pub heads: PackedHeads,
    /// Their norms.
    pub norms: HeadNorms<B>,
    /// Whether the norms' weights are trained, so that they have gradients.
    pub trained: bool,
}

impl<B: Backend> Operands for QkvNormBackward<B> {
    fn check(&self) {
        let op = "qkv_norm backward";
        let x = part(op, "qkv", &self.qkv).float();
        self.heads.check(op, "qkv", self.qkv.dims());
        self.norms.check(op, &x, self.heads.head_dim);
        let dims = self.qkv.dims();
        part(op, "grad", &self.grad).shaped(&dims, &x).alike(&x);
        let rows = dims.iter().product::<usize>() / self.heads.head_dim;
        part(op, "inverse deviation", &self.inverse_deviation).of(DType::F32).shaped(&[rows, 1], &x);
    }
}

/// Results of the backward pass.
#[derive(Clone, Debug)]
pub struct QkvNormGradients<B: Backend> {
    /// `[batch_size, seq_length, width]`, of the dtype of the input.
    pub qkv: Tensor<B, 3>,
    /// Of the scale of queries, `[head_dim]` in its dtype, if the weights are trained.
    pub query: Option<Tensor<B, 1>>,
    /// Of the scale of keys, `[head_dim]` in its dtype, if the weights are trained.
    pub key: Option<Tensor<B, 1>>,
}

parts!(QkvNormGradients { qkv, query, key });

/// Norms of packed heads on a backend.
pub trait QkvNormOps: NormOps {
    /// [`qkv_norm`]; [`Autodiff`](burn::backend::Autodiff) ties forward and backward together here.
    fn qkv_norm(operands: Checked<QkvNormForward<Self>>) -> Tensor<Self, 3> {
        qkv_norm_forward(operands).output
    }
    /// Forward of [`qkv_norm`].
    fn qkv_norm_forward(operands: Checked<QkvNormForward<Self>>) -> QkvNormOutput<Self> {
        reference::qkv_norm_forward(operands.into_inner())
    }
    /// Backward of [`qkv_norm`].
    fn qkv_norm_backward(operands: Checked<QkvNormBackward<Self>>) -> QkvNormGradients<Self> {
        reference::qkv_norm_backward(operands.into_inner())
    }
}

/// Normalizes each query head and each key head of packed `qkv` `[batch_size, seq_length, width]` by
/// its root mean square (Zhang and Sennrich, 2019), and scales it; the value heads stay unchanged.
/// Statistics are f32, the result has the dtype of `qkv`.
///
/// # Panics
/// If `width` does not match `heads`, or the norms are no RMS norms with `head_dim` weights.
pub fn qkv_norm<B: QkvNormOps>(qkv: Tensor<B, 3>, heads: PackedHeads, norms: HeadNorms<B>) -> Tensor<B, 3> {
    let _op = recorder::op("qkv_norm", || Call::reads([recorder::operand(&qkv)]).and_first(1));
    call!(B: QkvNormOps::qkv_norm(Checked::new(QkvNormForward { qkv, heads, norms })))
}

pub(crate) fn qkv_norm_forward<B: QkvNormOps>(operands: Checked<QkvNormForward<B>>) -> QkvNormOutput<B> {
    dispatch!(B: QkvNormOps::qkv_norm_forward(operands))
}

pub(crate) fn qkv_norm_backward<B: QkvNormOps>(operands: Checked<QkvNormBackward<B>>) -> QkvNormGradients<B> {
    dispatch!(B: QkvNormOps::qkv_norm_backward(operands))
}
