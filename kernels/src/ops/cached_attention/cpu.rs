//! Cached attention on the CPU.

use burn::tensor::Tensor;
use burn_ndarray::NdArray;

use super::{CachedAttention, CachedAttentionOps, CachedRow};
use crate::checked::Checked;
use crate::cpu::{Values, clamp_index, integers, sum_of, tensor, vectorised};
use crate::ops::attention::AttentionOptions;
use crate::ops::attention::cpu::{Pages, RowOfPages, attention_over};
use crate::ops::rotary::cpu::rotate;
use crate::packed_heads::PackedHeads;

impl CachedAttentionOps for NdArray {
    fn cached_attention(operands: Checked<CachedAttention<'_, Self>>) -> Tensor<Self, 3> {
        cached_attention(operands.into_inner())
    }
}

fn cached_attention(operands: CachedAttention<'_, NdArray>) -> Tensor<NdArray, 3> {
    let CachedAttention { qkv, heads, placement, at, cache } = operands;
    let [tokens, width] = qkv.dims();
    let PackedHeads { n_heads, n_kv_heads, head_dim } = heads;
    let positions = integers(at.positions.clone());
    let mut qkv = Values::rows(qkv).into_vec();
    let table = placement.rotary.as_ref().map(|table| [&table.cos, &table.sin].map(|x| Values::rows(x.clone())));
    let gammas = [&placement.query_norm, &placement.key_norm]
        .map(|norm| norm.as_ref().map(|norm| (Values::rows(norm.gamma.clone()), norm.epsilon as f32)));
    vectorised(|| {
        let mut rotated = vec![0.0; head_dim];
        for (position, row) in positions.iter().zip(qkv.chunks_exact_mut(width)) {
            for (head, x) in row.chunks_exact_mut(head_dim).take(n_heads + n_kv_heads).enumerate() {
                if let Some((gamma, epsilon)) = &gammas[usize::from(head >= n_heads)] {
                    let square = sum_of(x, x, |x, _| x * x) / head_dim as f32;
                    let inverse = 1.0 / (square + epsilon).sqrt();
                    x.iter_mut().zip(&gamma[..]).for_each(|(x, gamma)| *x *= inverse * gamma);
                }
                if let Some([cos, sin]) = &table {
                    let half = head_dim / 2;
                    let at = clamp_index(*position, cos.len() / half - 1) * half;
                    rotate(x, &mut rotated, &cos[at..][..half], &sin[at..][..half], 1.0);
                    x.copy_from_slice(&rotated);
                }
            }
        }
    });
    for (first, held) in [(n_heads, &mut cache.keys), (n_heads + n_kv_heads, &mut cache.values)] {
        held.inplace(|held| {
            let dims = held.dims();
            let page_tokens = dims[2];
            let mut values = Values::rows(held).into_vec();
            let places =
                at.rows.iter().flat_map(|row| (row.keys - row.tokens..row.keys).map(move |place| (row, place)));
            for ((CachedRow { pages, .. }, place), token) in places.zip(qkv.chunks_exact(width)) {
                let page = pages[place / page_tokens] as usize;
                for head in 0..n_kv_heads {
                    let to = ((page * n_kv_heads + head) * page_tokens + place % page_tokens) * head_dim;
                    let new = &token[(first + head) * head_dim..][..head_dim];
                    values[to..][..head_dim].copy_from_slice(new);
                }
            }
            tensor(values, dims)
        });
    }
    let page_tokens = cache.keys.dims()[2];
    let [keys, values] = [&cache.keys, &cache.values].map(|held| Values::rows(held.clone()));
    let held = Pages { keys: &keys, values: &values, page_tokens };
    let rows: Vec<_> =
        at.rows.iter().map(|row| RowOfPages { pages: &row.pages, tokens: row.tokens, keys: row.keys }).collect();
    let output = attention_over(&qkv, heads, held, &rows, at.window, AttentionOptions::new(head_dim));
    tensor(output, [tokens, n_heads, head_dim])
}
