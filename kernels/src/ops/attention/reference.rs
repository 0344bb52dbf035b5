//! Attention from basic operations, with stored scores.

use burn::tensor::backend::Backend;
use burn::tensor::{Bool, DType, Int, Tensor};

use super::{
    AttentionBackward, AttentionForward, AttentionGradients, AttentionMask, AttentionOps, AttentionOptions,
    AttentionOutput, QkvAttentionBackward, QkvAttentionForward, attention_backward as backward_entry,
    attention_forward as forward_entry,
};
use crate::checked::{Checked, clamp_index};
use crate::masked::MASKED;
use crate::ops::dropout::reference::dropped;

/// Reference forward of [`attention`](crate::attention()).
pub fn attention_forward<B: Backend>(operands: AttentionForward<B>) -> AttentionOutput<B> {
    let AttentionForward { query, key, value, mask, options } = operands;
    let [batch_size, n_heads, seq_length, head_dim] = query.dims();
    let dtype = query.dtype();
    let scores = scores(query, key, &mask, options);
    let max = scores.clone().max_dim(3);
    let exponentials = (scores - max.clone()).exp();
    let sum = exponentials.clone().sum_dim(3);
    let probabilities = drop(exponentials / sum.clone(), options);
    let output = grouped(probabilities.cast(dtype), value.dims()[1]).matmul(value);
    AttentionOutput {
        output: output.reshape([batch_size, n_heads, seq_length, head_dim]).swap_dims(1, 2),
        log_sum_exp: max + sum.log(),
    }
}

/// The weights that [`attention`](crate::attention()) gives each key, before dropout: f32
/// `[batch_size, n_heads, seq_length, keys]`.
pub(super) fn attention_weights<B: Backend>(
    operands: AttentionForward<B>,
    sinks: Option<Tensor<B, 1>>,
) -> Tensor<B, 4> {
    let AttentionForward { query, key, mask, options, .. } = operands;
    let scores = scores(query, key, &mask, options);
    let sinks = sinks.map(|sinks| {
        let [batch_size, n_heads, seq_length, _] = scores.dims();
        sinks.cast(DType::F32).reshape([1, n_heads, 1, 1]).expand([batch_size, n_heads, seq_length, 1])
    });
    let max = scores.clone().max_dim(3);
    let max = sinks.clone().map_or(max.clone(), |sinks| max.max_pair(sinks));
    let exponentials = (scores - max.clone()).exp();
    let sum = exponentials.clone().sum_dim(3);
    exponentials / sinks.map_or(sum.clone(), |sinks| sum + (sinks - max).exp())
}

/// Reference backward of [`attention`](crate::attention()): recomputes the probabilities from the
/// log-sum-exp.
pub fn attention_backward<B: Backend>(operands: AttentionBackward<B>) -> AttentionGradients<B> {
    let AttentionBackward { grad, query, key, value, saved, mask, options } = operands;
    let dims = query.dims();
    let [batch_size, n_heads, seq_length, _] = dims;
    let [_, n_kv_heads, keys, _] = key.dims();
    let dtype = query.dtype();
    let scores = scores(query.clone(), key.clone(), &mask, options);
    let probabilities = (scores.clone() - saved.log_sum_exp).exp();

    let delta = (grad.clone().cast(DType::F32) * saved.output.cast(DType::F32)).sum_dim(3).swap_dims(1, 2);
    let grad = grouped(grad.swap_dims(1, 2), n_kv_heads);
    let d_dropped = grad.clone().matmul(value.transpose()).cast(DType::F32);
    let d_probabilities = drop(d_dropped.reshape([batch_size, n_heads, seq_length, keys]), options);
    let d_scores = (probabilities.clone() * (d_probabilities - delta)).mul_scalar(options.scale);
    let d_scores = match options.softcap {
        // The derivative of the cap is 1 - tanh^2. Masked scores, whose gradient is zero, are
        // beyond it.
        Some(cap) => d_scores * scores.div_scalar(cap).clamp(-1.0, 1.0).square().neg().add_scalar(1.0),
        None => d_scores,
    };
    let d_scores = grouped(d_scores.cast(dtype), n_kv_heads);
    let dropped = grouped(drop(probabilities, options).cast(dtype), n_kv_heads);

    AttentionGradients {
        query: d_scores.clone().matmul(key).reshape(dims),
        key: d_scores.transpose().matmul(grouped(query, n_kv_heads)),
        value: dropped.transpose().matmul(grad),
    }
}

/// Reference forward of [`qkv_attention`](crate::qkv_attention), by
/// [`attention`](crate::attention()).
pub fn qkv_attention_forward<B: AttentionOps>(operands: QkvAttentionForward<B>) -> AttentionOutput<B> {
    let QkvAttentionForward { qkv, heads, mask, options } = operands;
    let [query, key, value] = heads.split(qkv);
    forward_entry(Checked::new(AttentionForward { query, key, value, mask, options }))
}

/// Reference backward of [`qkv_attention`](crate::qkv_attention), by
/// [`attention`](crate::attention()).
pub fn qkv_attention_backward<B: AttentionOps>(operands: QkvAttentionBackward<B>) -> Tensor<B, 3> {
    let QkvAttentionBackward { grad, qkv, heads, saved, mask, options } = operands;
    let [query, key, value] = heads.split(qkv);
    let gradients = backward_entry(Checked::new(AttentionBackward { grad, query, key, value, saved, mask, options }));
    heads.join([gradients.query, gradients.key, gradients.value])
}

/// `[batch_size, n_heads, rows, columns]` with the heads of a group stacked, `[batch_size,
/// n_kv_heads, group * rows, columns]`, so that keys and values need no repetition.
fn grouped<B: Backend>(x: Tensor<B, 4>, n_kv_heads: usize) -> Tensor<B, 4> {
    let [batch_size, n_heads, rows, columns] = x.dims();
    if n_heads == n_kv_heads {
        return x;
    }
    x.reshape([batch_size, n_kv_heads, n_heads / n_kv_heads * rows, columns])
}

/// Scaled and capped scores, f32 `[batch_size, n_heads, seq_length, keys]`, masked ones at
/// [`MASKED`].
fn scores<B: Backend>(
    query: Tensor<B, 4>,
    key: Tensor<B, 4>,
    mask: &AttentionMask<B>,
    options: AttentionOptions,
) -> Tensor<B, 4> {
    let [batch_size, n_heads, seq_length, _] = query.dims();
    let [_, n_kv_heads, keys, _] = key.dims();
    let device = query.device();
    let shape = [batch_size, n_heads, seq_length, keys];
    let scores = grouped(query, n_kv_heads).matmul(key.transpose());
    let scores = scores.cast(DType::F32).mul_scalar(options.scale).reshape(shape);
    let scores = match options.softcap {
        Some(cap) => scores.div_scalar(cap).tanh().mul_scalar(cap),
        None => scores,
    };
    match hidden(mask, seq_length, keys, &device) {
        Some(hidden) => scores.mask_fill(hidden.expand(shape), MASKED),
        None => scores,
    }
}

/// The masked scores, `[batch_size or 1, 1, seq_length, keys]`, if any.
fn hidden<B: Backend>(
    mask: &AttentionMask<B>,
    seq_length: usize,
    keys: usize,
    device: &B::Device,
) -> Option<Tensor<B, 4, Bool>> {
    let key_at = Tensor::<B, 1, Int>::arange(0..keys as i64, device).reshape([1, 1, 1, keys]);
    let outside = |query_at: Tensor<B, 4, Int>, window: Option<usize>| {
        let [batch_size, ..] = query_at.dims();
        let shape = [batch_size, 1, seq_length, keys];
        let (key_at, query_at) = (key_at.clone().expand(shape), query_at.expand(shape));
        let ahead = key_at.clone().greater(query_at.clone());
        match window {
            Some(window) => {
                let window = i32::try_from(window).unwrap_or(i32::MAX);
                ahead.bool_or(key_at.lower_equal(query_at.sub_scalar(window)))
            }
            None => ahead,
        }
    };
    match mask {
        AttentionMask::None => None,
        // A single query at the last key sees all keys.
        AttentionMask::Causal { window: None } if seq_length == 1 => None,
        AttentionMask::Causal { window } => {
            let first = keys as i64 - seq_length as i64;
            let query_at = Tensor::<B, 1, Int>::arange(first..keys as i64, device);
            Some(outside(query_at.reshape([1, 1, seq_length, 1]), *window))
        }
        AttentionMask::Positions { positions, window } => {
            let [batch_size, _] = positions.dims();
            let positions = clamp_index(positions.clone(), keys - 1);
            Some(outside(positions.reshape([batch_size, 1, seq_length, 1]), *window))
        }
        AttentionMask::Documents { starts, window } => {
            let [batch_size, _] = starts.dims();
            let shape = [batch_size, 1, seq_length, keys];
            let query_at = Tensor::<B, 1, Int>::arange(0..keys as i64, device).reshape([1, seq_length]);
            let own = query_at.clone().expand([batch_size, seq_length]);
            let legal = starts.clone().greater_equal_elem(0).bool_and(starts.clone().lower_equal(own.clone()));
            let starts = own.mask_where(legal, starts.clone()).reshape([batch_size, 1, seq_length, 1]).expand(shape);
            let before = key_at.clone().expand(shape).lower(starts);
            Some(before.bool_or(outside(query_at.reshape([1, 1, seq_length, 1]), *window).expand(shape)))
        }
        AttentionMask::Ranges(ranges) => {
            let [batch_size, ..] = ranges.dims();
            let shape = [batch_size, 1, seq_length, keys];
            let end = |at: usize| ranges.clone().narrow(2, at, 1).reshape([batch_size, 1, seq_length, 1]);
            let last = end(1).clamp(0, keys as i32 - 1);
            let first = end(0).clamp_min(0);
            let first = first.clone().mask_where(first.greater(last.clone()), last.clone()).expand(shape);
            let key_at = key_at.expand(shape);
            Some(key_at.clone().lower(first).bool_or(key_at.greater(last.expand(shape))))
        }
        AttentionMask::Lengths(lengths) => {
            let [batch_size] = lengths.dims();
            let shape = [batch_size, 1, seq_length, keys];
            let lengths = lengths.clone().clamp(1, keys as i32).reshape([batch_size, 1, 1, 1]).expand(shape);
            Some(key_at.expand(shape).greater_equal(lengths))
        }
    }
}

fn drop<B: Backend>(x: Tensor<B, 4>, options: AttentionOptions) -> Tensor<B, 4> {
    let Some(dropout) = options.dropout else { return x };
    let shape = x.dims();
    let [batch_size, n_heads, seq_length, keys] = shape;
    let dropped = dropped::<B>(batch_size * n_heads * seq_length, keys, dropout, &x.device());
    x.mask_fill(dropped.reshape(shape), 0.0).mul_scalar(dropout.scale())
}
