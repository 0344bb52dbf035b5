//! The rotation on the CPU.

use burn::tensor::Tensor;
use burn_ndarray::NdArray;

use super::{QkvRotaryForward, RotaryForward, RotaryOps};
use crate::checked::Checked;
use crate::cpu::{Values, clamp_index, integers, new_rows, tensor};

impl RotaryOps for NdArray {
    fn rotary_forward(operands: Checked<RotaryForward<Self>>) -> Tensor<Self, 4> {
        let RotaryForward { x, table, positions, inverse } = operands.into_inner();
        let [batch_size, heads, seq_length, head_dim] = x.dims();
        let ([positions_known, half], sign) = (table.cos.dims(), if inverse { -1.0 } else { 1.0 });
        let last = positions_known - 1;
        // Tokens first: the layout of projections' outputs, and of attention's inputs.
        let x = Values::rows(x.swap_dims(1, 2));
        let (cos, sin) = (Values::rows(table.cos), Values::rows(table.sin));
        let positions = integers(positions);
        let [out] = new_rows(
            batch_size * seq_length,
            [heads * head_dim],
            #[inline(always)]
            |first, [out]| {
                for (token, out) in (first..).zip(out.chunks_exact_mut(heads * head_dim)) {
                    let at = clamp_index(positions[token], last) * half;
                    let (cos, sin) = (&cos[at..][..half], &sin[at..][..half]);
                    let x = &x[token * heads * head_dim..][..heads * head_dim];
                    for (x, out) in x.chunks_exact(head_dim).zip(out.chunks_exact_mut(head_dim)) {
                        rotate(x, out, cos, sin, sign);
                    }
                }
            },
        );
        tensor(out, [batch_size, seq_length, heads, head_dim]).swap_dims(1, 2)
    }

    fn qkv_rotary_forward(operands: Checked<QkvRotaryForward<Self>>) -> Tensor<Self, 3> {
        let QkvRotaryForward { qkv, heads, table, positions, inverse } = operands.into_inner();
        let shape = qkv.dims();
        let [width, head_dim] = [heads.width(), heads.head_dim];
        let ([positions_known, half], sign) = (table.cos.dims(), if inverse { -1.0 } else { 1.0 });
        let last = positions_known - 1;
        let rotated = (heads.n_heads + heads.n_kv_heads) * head_dim;
        let qkv = Values::rows(qkv);
        let (cos, sin) = (Values::rows(table.cos), Values::rows(table.sin));
        let positions = integers(positions);
        let [out] = new_rows(
            shape[0] * shape[1],
            [width],
            #[inline(always)]
            |first, [out]| {
                for (token, out) in (first..).zip(out.chunks_exact_mut(width)) {
                    let at = clamp_index(positions[token], last) * half;
                    let (cos, sin) = (&cos[at..][..half], &sin[at..][..half]);
                    let (rotated_heads, values) = qkv[token * width..][..width].split_at(rotated);
                    for (x, out) in rotated_heads.chunks_exact(head_dim).zip(out.chunks_exact_mut(head_dim)) {
                        rotate(x, out, cos, sin, sign);
                    }
                    out[rotated..].copy_from_slice(values);
                }
            },
        );
        tensor(out, shape)
    }
}

/// Rotates the first elements of one head, and copies the others.
#[inline(always)]
pub(crate) fn rotate(x: &[f32], out: &mut [f32], cos: &[f32], sin: &[f32], sign: f32) {
    let half = cos.len();
    let (x, x_rest) = x.split_at(2 * half);
    let (out, out_rest) = out.split_at_mut(2 * half);
    out_rest.copy_from_slice(x_rest);
    let (x_first, x_second) = x.split_at(half);
    let (out_first, out_second) = out.split_at_mut(half);
    for i in 0..half {
        let sin = sign * sin[i];
        out_first[i] = x_first[i] * cos[i] - x_second[i] * sin;
        out_second[i] = x_second[i] * cos[i] + x_first[i] * sin;
    }
}
