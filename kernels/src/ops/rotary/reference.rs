//! The rotation from small operations.

use burn::tensor::{DType, Int, Tensor};

use super::{PackedHeads, RotaryTable};
use crate::Backend;

/// Reference body of [`rotary`](crate::rotary).
pub fn rotary<B: Backend>(
    x: Tensor<B, 4>,
    table: &RotaryTable<B>,
    positions: Tensor<B, 2, Int>,
    inverse: bool,
) -> Tensor<B, 4> {
    let [batch_size, _, seq_length, head_dim] = x.dims();
    let half = head_dim / 2;
    let dtype = x.dtype();
    let x = x.cast(DType::F32);
    let rows = |table: &Tensor<B, 2>| {
        let rows = table.clone().select(0, positions.clone().reshape([batch_size * seq_length]));
        rows.reshape([batch_size, 1, seq_length, half])
    };
    let cos = rows(&table.cos);
    let sin = if inverse { rows(&table.sin).neg() } else { rows(&table.sin) };
    let (first, second) = (x.clone().narrow(3, 0, half), x.narrow(3, half, half));
    let turned_first = first.clone() * cos.clone() - second.clone() * sin.clone();
    let turned_second = second * cos + first * sin;
    Tensor::cat(vec![turned_first, turned_second], 3).cast(dtype)
}

/// Reference body of [`qkv_rotary`](crate::qkv_rotary).
pub fn qkv_rotary<B: Backend>(
    qkv: Tensor<B, 3>,
    heads: PackedHeads,
    table: &RotaryTable<B>,
    positions: Tensor<B, 2, Int>,
    inverse: bool,
) -> Tensor<B, 3> {
    let [batch_size, seq_length, _] = qkv.dims();
    let PackedHeads { n_heads, n_kv_heads, head_dim } = heads;
    let rotated = n_heads + n_kv_heads;
    let packed = qkv.clone().narrow(2, 0, rotated * head_dim);
    let packed = packed.reshape([batch_size, seq_length, rotated, head_dim]).swap_dims(1, 2);
    let turned = rotary(packed, table, positions, inverse).swap_dims(1, 2);
    let turned = turned.reshape([batch_size, seq_length, rotated * head_dim]);
    Tensor::cat(vec![turned, qkv.narrow(2, rotated * head_dim, n_kv_heads * head_dim)], 2)
}
