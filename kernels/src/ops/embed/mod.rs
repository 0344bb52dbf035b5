//! Embedding lookup.

mod autodiff;
#[cfg(feature = "ndarray")]
pub(crate) mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod cubecl;
pub(crate) mod reference;

use burn::tensor::backend::Backend;
use burn::tensor::{DType, FloatDType, Int, Tensor};

use super::reshape::ReshapeOps;
use super::weight::{WeightOps, assert_float};
use crate::checked::{Checked, Operands, part};
use crate::mutation::call;
use crate::quant::Weight;
use crate::recorder::{self, Call};
use crate::selection::dispatch;

/// Operands of [`embed`] and [`embed_add`].
#[derive(Clone, Debug)]
pub struct EmbedForward<B: Backend> {
    /// `[vocabulary, d_model]`.
    pub table: Weight<B>,
    /// `[batch_size, seq_length]`.
    pub tokens: Tensor<B, 2, Int>,
    /// Dtype of the result.
    pub dtype: FloatDType,
    /// Added to the rows, `[batch_size, seq_length, d_model]` of `dtype`.
    pub added: Option<Tensor<B, 3>>,
}

impl<B: Backend> Operands for EmbedForward<B> {
    fn check(&self) {
        let op = if self.added.is_some() { "embed_add" } else { "embed" };
        let tokens = part(op, "tokens", &self.tokens).integer();
        self.table.check(op, "table", true, &tokens);
        assert_float(op, self.dtype);
        if let Some(added) = &self.added {
            let ([batch_size, seq_length], [_, d_model]) = (self.tokens.dims(), self.table.dims());
            let dtype = self.dtype.into();
            part(op, "x", added).of(dtype).shaped(&[batch_size, seq_length, d_model], &tokens);
        }
    }
}

/// Operands of the table's gradient.
#[derive(Clone, Debug)]
pub struct EmbedBackward<B: Backend> {
    /// Gradient of the looked up rows, `[rows, d_model]`.
    pub grad: Tensor<B, 2>,
    /// The token of each row, `[batch_size, seq_length]` of as many.
    pub tokens: Tensor<B, 2, Int>,
    /// Rows of the table.
    pub vocabulary: usize,
    /// The table's gradient from other uses, to add to: f32 `[vocabulary, d_model]`.
    pub sum: Option<Tensor<B, 2>>,
}

impl<B: Backend> Operands for EmbedBackward<B> {
    fn check(&self) {
        let op = "embed backward";
        let grad = part(op, "grad", &self.grad).float();
        let [batch_size, seq_length] = self.tokens.dims();
        let rows = self.grad.dims()[0];
        part(op, "tokens", &self.tokens).integer().shaped(&[batch_size, seq_length], &grad);
        assert_eq!(batch_size * seq_length, rows, "{op}: tokens [{batch_size}, {seq_length}] for {rows} rows of grad");
        assert!(self.vocabulary > 0, "{op}: a table without rows");
        if let Some(sum) = &self.sum {
            part(op, "sum", sum).of(DType::F32).shaped(&[self.vocabulary, self.grad.dims()[1]], &grad);
        }
    }
}

/// Embeddings of a backend.
pub trait EmbedOps: ReshapeOps + WeightOps {
    /// [`embed`] and [`embed_add`]; [`Autodiff`](burn::backend::Autodiff) ties forward and backward
    /// together here.
    fn embed(operands: Checked<EmbedForward<Self>>) -> Tensor<Self, 3> {
        embed_forward(operands)
    }
    /// Forward of [`embed`] and [`embed_add`].
    fn embed_forward(operands: Checked<EmbedForward<Self>>) -> Tensor<Self, 3> {
        reference::embed_forward(operands.into_inner())
    }
    /// Backward of [`embed`]: the gradient of the table, f32, including its earlier one.
    fn embed_backward(operands: Checked<EmbedBackward<Self>>) -> Tensor<Self, 2> {
        reference::embed_backward(operands.into_inner())
    }
}

/// The rows of `table` `[vocabulary, d_model]` at `tokens` `[batch_size, seq_length]`, as
/// `[batch_size, seq_length, d_model]` of `dtype`.
///
/// A token outside of `0..vocabulary` counts as the last one, on every backend. The table's
/// gradient is f32, like that of all parameters, and is summed in the order of tokens on the CPU
/// and in a fixed order by other kernels.
///
/// # Panics
/// If an operand is empty, or they are on different devices.
pub fn embed<B: EmbedOps>(table: impl Into<Weight<B>>, tokens: Tensor<B, 2, Int>, dtype: FloatDType) -> Tensor<B, 3> {
    let table = table.into();
    let _op = recorder::op("embed", || rows_read(&table, &tokens, dtype.into(), 1));
    call!(B: EmbedOps::embed(Checked::new(EmbedForward { table, tokens, dtype, added: None })))
}

/// `x` `[batch_size, seq_length, d_model]` plus [`embed`] of `tokens`.
///
/// # Panics
/// If `x` has another shape.
pub fn embed_add<B: EmbedOps>(table: impl Into<Weight<B>>, tokens: Tensor<B, 2, Int>, x: Tensor<B, 3>) -> Tensor<B, 3> {
    let table = table.into();
    let _op = recorder::op("embed_add", || rows_read(&table, &tokens, x.dtype(), 2));
    let dtype = FloatDType::from(x.dtype());
    call!(B: EmbedOps::embed(Checked::new(EmbedForward { table, tokens, dtype, added: Some(x) })))
}

/// Reads a row of the table per token, and reads or writes `outputs` rows of `dtype`.
fn rows_read<B: Backend>(table: &Weight<B>, tokens: &Tensor<B, 2, Int>, dtype: DType, outputs: u64) -> Call {
    let (table, tokens) = (table.operand(), recorder::operand(tokens));
    let rows: usize = tokens.dims.iter().product();
    let row = table.bytes() / table.dims.first().map_or(1, |rows| *rows as u64).max(1);
    let width = table.dims.last().map_or(0, |width| width * dtype.size());
    let bytes = tokens.bytes() + rows as u64 * (row + outputs * width as u64);
    Call { inputs: vec![table, tokens], bytes, flops: 0 }
}

pub(crate) fn embed_forward<B: EmbedOps>(operands: Checked<EmbedForward<B>>) -> Tensor<B, 3> {
    dispatch!(B: EmbedOps::embed_forward(operands))
}

pub(crate) fn embed_backward<B: EmbedOps>(operands: Checked<EmbedBackward<B>>) -> Tensor<B, 2> {
    dispatch!(B: EmbedOps::embed_backward(operands))
}
