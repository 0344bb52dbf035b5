//! Norms of packed heads from the [norms](crate::norm()) of their queries and keys.

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor};

use super::{QkvNormBackward, QkvNormForward, QkvNormGradients, QkvNormOps, QkvNormOutput};
use crate::ops::norm::{NormBackward, NormForward, NormGradients, NormOutput, reference};
use crate::packed_heads::PackedHeads;

/// Reference forward of [`qkv_norm`](crate::qkv_norm()).
pub fn qkv_norm_forward<B: QkvNormOps>(operands: QkvNormForward<B>) -> QkvNormOutput<B> {
    forward_with(operands, reference::norm_forward)
}

/// Reference backward of [`qkv_norm`](crate::qkv_norm()).
pub fn qkv_norm_backward<B: QkvNormOps>(operands: QkvNormBackward<B>) -> QkvNormGradients<B> {
    backward_with(operands, reference::norm_backward)
}

/// Some heads of packed rows `[.., width]`, `[tokens * count, columns]`, of `columns` each.
fn rows_of<B: Backend, const D: usize>(x: &Tensor<B, D>, columns: usize, [first, count]: [usize; 2]) -> Tensor<B, 2> {
    let part = x.clone().narrow(D - 1, first * columns, count * columns);
    let rows = part.dims().iter().product::<usize>() / columns;
    part.reshape([rows, columns])
}

/// First head and number of heads of queries, keys and values.
fn parts(heads: PackedHeads) -> [[usize; 2]; 3] {
    let PackedHeads { n_heads, n_kv_heads, .. } = heads;
    [[0, n_heads], [n_heads, n_kv_heads], [n_heads + n_kv_heads, n_kv_heads]]
}

/// The inverse of [`rows_of`] for all three parts.
fn packed<B: Backend>(parts: [Tensor<B, 2>; 3], [batch_size, seq_length, _]: [usize; 3]) -> Tensor<B, 3> {
    let columns = parts.map(|rows| {
        let width = rows.dims().iter().product::<usize>() / (batch_size * seq_length);
        rows.reshape([batch_size, seq_length, width])
    });
    Tensor::cat(columns.into(), 2)
}

/// The forward pass with these norms of rows.
pub(super) fn forward_with<B: Backend>(
    operands: QkvNormForward<B>,
    norm_forward: impl Fn(NormForward<B>) -> NormOutput<B>,
) -> QkvNormOutput<B> {
    let QkvNormForward { qkv, heads, norms } = operands;
    let dims = qkv.dims();
    let [query, key, value] = parts(heads).map(|part| rows_of(&qkv, heads.head_dim, part));
    let none = Tensor::zeros([value.dims()[0], 1], (&qkv.device(), DType::F32));
    let query = norm_forward(NormForward { x: query, norm: norms.query });
    let key = norm_forward(NormForward { x: key, norm: norms.key });
    let inverses = packed([query.inverse_deviation, key.inverse_deviation, none], dims);
    let rows = dims.iter().product::<usize>() / heads.head_dim;
    QkvNormOutput {
        output: packed([query.output, key.output, value], dims),
        inverse_deviation: inverses.reshape([rows, 1]),
    }
}

/// The backward pass with these gradients of norms of rows.
pub(super) fn backward_with<B: Backend>(
    operands: QkvNormBackward<B>,
    norm_backward: impl Fn(NormBackward<B>) -> NormGradients<B>,
) -> QkvNormGradients<B> {
    let QkvNormBackward { grad, qkv, inverse_deviation, heads, norms, trained } = operands;
    let dims = qkv.dims();
    let [query, key, value] = parts(heads);
    let inverses = inverse_deviation.reshape([dims[0] * dims[1], dims[2] / heads.head_dim]);
    let gradients = |part: [usize; 2], norm| {
        let [grad, x] = [&grad, &qkv].map(|x| rows_of(x, heads.head_dim, part));
        let inverse_deviation = rows_of(&inverses, 1, part);
        norm_backward(NormBackward { grad, x, mean: None, inverse_deviation, norm, trained, residual: None })
    };
    let (query, key) = (gradients(query, norms.query), gradients(key, norms.key));
    QkvNormGradients {
        qkv: packed([query.x, key.x, rows_of(&grad, heads.head_dim, value)], dims),
        query: query.gamma,
        key: key.gamma,
    }
}
