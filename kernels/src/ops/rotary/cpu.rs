//! The rotation on the CPU.

use burn::tensor::{Int, Tensor};
use burn_ndarray::NdArray;

use super::{PackedHeads, RotaryTable};
use crate::cpu::{Values, integers, new_rows, tensor};

pub(crate) fn rotary(
    x: Tensor<NdArray, 4>,
    table: &RotaryTable<NdArray>,
    positions: Tensor<NdArray, 2, Int>,
    inverse: bool,
) -> Tensor<NdArray, 4> {
    let [batch_size, heads, seq_length, head_dim] = x.dims();
    let half = head_dim / 2;
    // Tokens first: that is how heads lie when they come out of a projection, and how attention likes them.
    let x = Values::rows(x.swap_dims(1, 2));
    let (cos, sin) = (Values::rows(table.cos.clone()), Values::rows(table.sin.clone()));
    let positions = integers(positions);
    let sign = if inverse { -1.0 } else { 1.0 };
    let [out] = new_rows(batch_size * seq_length, [heads * head_dim], |first, [out]| {
        for (token, out) in (first..).zip(out.chunks_exact_mut(heads * head_dim)) {
            let at = positions[token] as usize * half;
            let (cos, sin) = (&cos[at..][..half], &sin[at..][..half]);
            let x = &x[token * heads * head_dim..][..heads * head_dim];
            for (x, out) in x.chunks_exact(head_dim).zip(out.chunks_exact_mut(head_dim)) {
                turn(x, out, cos, sin, sign);
            }
        }
    });
    tensor(out, [batch_size, seq_length, heads, head_dim]).swap_dims(1, 2)
}

pub(crate) fn qkv_rotary(
    qkv: Tensor<NdArray, 3>,
    heads: PackedHeads,
    table: &RotaryTable<NdArray>,
    positions: Tensor<NdArray, 2, Int>,
    inverse: bool,
) -> Tensor<NdArray, 3> {
    let shape = qkv.dims();
    let [width, head_dim] = [heads.width(), heads.head_dim];
    let half = head_dim / 2;
    let rotated = (heads.n_heads + heads.n_kv_heads) * head_dim;
    let qkv = Values::rows(qkv);
    let (cos, sin) = (Values::rows(table.cos.clone()), Values::rows(table.sin.clone()));
    let positions = integers(positions);
    let sign = if inverse { -1.0 } else { 1.0 };
    let [out] = new_rows(shape[0] * shape[1], [width], |first, [out]| {
        for (token, out) in (first..).zip(out.chunks_exact_mut(width)) {
            let at = positions[token] as usize * half;
            let (cos, sin) = (&cos[at..][..half], &sin[at..][..half]);
            let (turned, values) = qkv[token * width..][..width].split_at(rotated);
            for (x, out) in turned.chunks_exact(head_dim).zip(out.chunks_exact_mut(head_dim)) {
                turn(x, out, cos, sin, sign);
            }
            out[rotated..].copy_from_slice(values);
        }
    });
    tensor(out, shape)
}

/// Rotates one head.
#[inline(always)]
pub(crate) fn turn(x: &[f32], out: &mut [f32], cos: &[f32], sin: &[f32], sign: f32) {
    let half = cos.len();
    let (x_first, x_second) = x.split_at(half);
    let (out_first, out_second) = out.split_at_mut(half);
    for i in 0..half {
        let sin = sign * sin[i];
        out_first[i] = x_first[i] * cos[i] - x_second[i] * sin;
        out_second[i] = x_second[i] * cos[i] + x_first[i] * sin;
    }
}
