//! Cached attention on the CPU.

use burn::tensor::Tensor;
use burn_ndarray::NdArray;

use super::{CachedAttention, CachedAttentionOps};
use crate::checked::Checked;
use crate::cpu::{Values, clamp_index, integers, sum_of, tensor, vectorised};
use crate::ops::attention::AttentionOptions;
use crate::ops::attention::cpu::attention_over;
use crate::ops::rotary::cpu::rotate;
use crate::packed_heads::PackedHeads;

impl CachedAttentionOps for NdArray {
    fn cached_attention(operands: Checked<CachedAttention<'_, Self>>) -> Tensor<Self, 4> {
        cached_attention(operands.into_inner())
    }
}

fn cached_attention(operands: CachedAttention<'_, NdArray>) -> Tensor<NdArray, 4> {
    let CachedAttention { qkv, heads, placement, at, cache } = operands;
    let shape = qkv.dims();
    let PackedHeads { n_heads, n_kv_heads, head_dim } = heads;
    let positions: Vec<usize> =
        integers(at.positions.clone()).into_iter().map(|place| clamp_index(place, at.keys - 1)).collect();
    let mut qkv = Values::rows(qkv).into_vec();
    let table = placement.rotary.as_ref().map(|table| [&table.cos, &table.sin].map(|x| Values::rows(x.clone())));
    let gammas = [&placement.query_norm, &placement.key_norm]
        .map(|norm| norm.as_ref().map(|norm| (Values::rows(norm.gamma.clone()), norm.epsilon as f32)));
    vectorised(|| {
        let mut rotated = vec![0.0; head_dim];
        for (token, row) in qkv.chunks_exact_mut(shape[2]).enumerate() {
            for (head, x) in row.chunks_exact_mut(head_dim).take(n_heads + n_kv_heads).enumerate() {
                if let Some((gamma, epsilon)) = &gammas[usize::from(head >= n_heads)] {
                    let square = sum_of(x, x, |x, _| x * x) / head_dim as f32;
                    let inverse = 1.0 / (square + epsilon).sqrt();
                    x.iter_mut().zip(&gamma[..]).for_each(|(x, gamma)| *x *= inverse * gamma);
                }
                if let Some([cos, sin]) = &table {
                    let half = head_dim / 2;
                    let at = positions[token].min(cos.len() / half - 1) * half;
                    rotate(x, &mut rotated, &cos[at..][..half], &sin[at..][..half], 1.0);
                    x.copy_from_slice(&rotated);
                }
            }
        }
    });
    for (first, held) in [(n_heads, &mut cache.keys), (n_heads + n_kv_heads, &mut cache.values)] {
        held.inplace(|held| {
            let dims = held.dims();
            let capacity = dims[2];
            let mut values = Values::rows(held).into_vec();
            for (token, row) in qkv.chunks_exact(shape[2]).enumerate() {
                let batch = token / shape[1];
                for head in 0..n_kv_heads {
                    let place = ((batch * n_kv_heads + head) * capacity + positions[token]) * head_dim;
                    let new = &row[(first + head) * head_dim..][..head_dim];
                    values[place..][..head_dim].copy_from_slice(new);
                }
            }
            tensor(values, dims)
        });
    }
    let [keys, values] = [&cache.keys, &cache.values].map(|held| Values::rows(held.clone()));
    attention_over(&qkv, shape, heads, [&keys, &values], at.keys, &at.mask(), AttentionOptions::new(head_dim))
}
