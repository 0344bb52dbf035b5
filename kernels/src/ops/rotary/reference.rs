//! Rotation from basic operations.

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor};

use super::{NextPositions, QkvRotaryForward, RotaryForward};
use crate::checked::clamp_index;
use crate::packed_heads::PackedHeads;
use crate::tensor::rows_of;

/// Reference forward of [`rotary`](crate::rotary()).
pub fn rotary_forward<B: Backend>(operands: RotaryForward<B>) -> Tensor<B, 4> {
    let RotaryForward { x, table, positions, inverse } = operands;
    let [batch_size, _, seq_length, head_dim] = x.dims();
    let [_, half] = table.cos.dims();
    let dtype = x.dtype();
    let x = x.cast(DType::F32);
    let rows = |table: Tensor<B, 2>| {
        let positions = clamp_index(positions.clone(), table.dims()[0] - 1).reshape([batch_size * seq_length]);
        rows_of(table.cast(DType::F32), positions).reshape([batch_size, 1, seq_length, half])
    };
    let cos = rows(table.cos);
    let sin = if inverse { rows(table.sin).neg() } else { rows(table.sin) };
    let (first, second) = (x.clone().narrow(3, 0, half), x.clone().narrow(3, half, half));
    let rotated_first = first.clone() * cos.clone() - second.clone() * sin.clone();
    let rotated_second = second * cos + first * sin;
    let mut parts = vec![rotated_first, rotated_second];
    if 2 * half < head_dim {
        parts.push(x.narrow(3, 2 * half, head_dim - 2 * half));
    }
    Tensor::cat(parts, 3).cast(dtype)
}

/// Reference forward of [`qkv_rotary`](crate::qkv_rotary).
pub fn qkv_rotary_forward<B: Backend>(operands: QkvRotaryForward<B>) -> Tensor<B, 3> {
    let QkvRotaryForward { qkv, heads, table, positions, inverse } = operands;
    let [batch_size, seq_length, _] = qkv.dims();
    let PackedHeads { n_heads, n_kv_heads, head_dim } = heads;
    let rotated = n_heads + n_kv_heads;
    let packed = qkv.clone().narrow(2, 0, rotated * head_dim);
    let x = packed.reshape([batch_size, seq_length, rotated, head_dim]).swap_dims(1, 2);
    let rotated_heads = rotary_forward(RotaryForward { x, table, positions, inverse }).swap_dims(1, 2);
    let rotated_heads = rotated_heads.reshape([batch_size, seq_length, rotated * head_dim]);
    Tensor::cat(vec![rotated_heads, qkv.narrow(2, rotated * head_dim, n_kv_heads * head_dim)], 2)
}

/// Reference of [`next_positions`](crate::next_positions).
pub fn next_positions<B: Backend>(NextPositions { positions, last }: NextPositions<B>) -> Tensor<B, 2, Int> {
    positions.add_scalar(1).clamp_max(last as i32)
}
