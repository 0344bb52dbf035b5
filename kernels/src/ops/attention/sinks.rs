//! Attention sinks: a score per head that takes part in the softmax and contributes no value (Xiao
//! et al., 2023; gpt-oss learns them).
//!
//! ```text
//! lse: log-sum-exp of a row's scores      share = sigmoid(lse - sink)
//! output with a sink = share * output     its log-sum-exp = log(exp(lse) + exp(sink))
//! ```
//!
//! With both of these saved, the backward pass of attention is that without sinks.

use burn::tensor::activation::sigmoid;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor};

use super::{
    AttentionForward, AttentionMask, AttentionOps, AttentionOptions, AttentionOutput, attention_forward, check_heads,
};
use crate::checked::{Checked, Operands, Part, part};
use crate::mutation::call;
use crate::recorder::{self, Call};

/// Operands of [`sink_attention`].
#[derive(Clone, Debug)]
pub struct SinkAttention<B: Backend> {
    /// `[batch_size, n_heads, seq_length, head_dim]`.
    pub query: Tensor<B, 4>,
    /// `[batch_size, n_kv_heads, keys, head_dim]`.
    pub key: Tensor<B, 4>,
    /// As `key`.
    pub value: Tensor<B, 4>,
    /// A score per head, `[n_heads]`.
    pub sinks: Tensor<B, 1>,
    /// Which keys a query sees.
    pub mask: AttentionMask<B>,
    /// Scale, soft-capping and dropout of the scores of keys.
    pub options: AttentionOptions,
}

/// Panics unless there is a sink for each of `n_heads`.
#[track_caller]
pub(crate) fn check_sinks<B: Backend>(op: &'static str, sinks: &Tensor<B, 1>, n_heads: usize, x: &Part<'_, B::Device>) {
    part(op, "sinks", sinks).float().fits(sinks.dims() == [n_heads], x);
}

impl<B: Backend> Operands for SinkAttention<B> {
    fn check(&self) {
        let op = "sink_attention";
        let query = check_heads(op, [&self.query, &self.key, &self.value], &self.mask);
        self.options.check(op);
        check_sinks(op, &self.sinks, self.query.dims()[1], &query);
    }
}

/// [`attention`](crate::attention()) with a sink in each row of scores: `exp(sink)` is added to the
/// sum that the softmax divides by.
///
/// `sinks` `[n_heads]` are neither scaled nor soft-capped; the other operands and the result are
/// those of [`attention`](crate::attention()). The gradient is that of `query`, `key`, `value` and
/// `sinks`.
///
/// # Panics
/// As [`attention`](crate::attention()) does, and unless there is a sink for each head.
pub fn sink_attention<B: AttentionOps>(
    query: Tensor<B, 4>,
    key: Tensor<B, 4>,
    value: Tensor<B, 4>,
    sinks: Tensor<B, 1>,
    mask: &AttentionMask<B>,
    options: AttentionOptions,
) -> Tensor<B, 3> {
    let [batch_size, n_heads, seq_length, head_dim] = query.dims();
    let _op = recorder::op("sink_attention", || {
        let flops = mask.products(2, [batch_size, n_heads, seq_length, key.dims()[2], head_dim]);
        let inputs = [recorder::operand(&query), recorder::operand(&key), recorder::operand(&value)];
        Call::reads(inputs).and_first(1).computes(flops)
    });
    let output = sink_attention_heads(SinkAttention { query, key, value, sinks, mask: mask.clone(), options });
    B::reshape(output, [batch_size, seq_length, n_heads * head_dim])
}

/// [`sink_attention`] with separate heads, as a part of another operation.
pub(crate) fn sink_attention_heads<B: AttentionOps>(operands: SinkAttention<B>) -> Tensor<B, 4> {
    call!(B: AttentionOps::sink_attention(Checked::new(operands)))
}

/// Output and log-sum-exp of attention with sinks.
pub(super) fn forward<B: AttentionOps>(operands: SinkAttention<B>) -> AttentionOutput<B> {
    let SinkAttention { query, key, value, sinks, mask, options } = operands;
    let forward = AttentionForward { query, key, value, mask, options };
    with_sinks(attention_forward(Checked::new(forward)), sinks)
}

/// The results of attention as they are with sinks.
pub(crate) fn with_sinks<B: Backend>(without: AttentionOutput<B>, sinks: Tensor<B, 1>) -> AttentionOutput<B> {
    let AttentionOutput { output, log_sum_exp } = without;
    let dtype = output.dtype();
    let sinks = by_row(sinks, log_sum_exp.dims());
    let above = log_sum_exp.clone() - sinks.clone();
    let share = sigmoid(above.clone()).swap_dims(1, 2);
    let larger = (log_sum_exp + sinks + above.clone().abs()).mul_scalar(0.5);
    AttentionOutput {
        output: (output.cast(DType::F32) * share).cast(dtype),
        log_sum_exp: larger + above.abs().neg().exp().add_scalar(1.0).log(),
    }
}

/// The gradient of the sinks, in their dtype, from that of the output `grad`.
pub(super) fn gradient<B: Backend>(
    grad: &Tensor<B, 4>,
    saved: &AttentionOutput<B>,
    sinks: Tensor<B, 1>,
) -> Tensor<B, 1> {
    let dtype = sinks.dtype();
    let dims @ [batch_size, n_heads, seq_length, _] = saved.log_sum_exp.dims();
    let along = (grad.clone().cast(DType::F32) * saved.output.clone().cast(DType::F32)).sum_dim(3).swap_dims(1, 2);
    let share = (by_row(sinks, dims) - saved.log_sum_exp.clone()).exp();
    let each = (share * along).swap_dims(0, 1).reshape([n_heads, batch_size * seq_length]);
    each.sum_dim(1).reshape([n_heads]).neg().cast(dtype)
}

/// The sink of each row of scores, f32.
fn by_row<B: Backend>(sinks: Tensor<B, 1>, dims: [usize; 4]) -> Tensor<B, 4> {
    sinks.cast(DType::F32).reshape([1, dims[1], 1, 1]).expand(dims)
}
