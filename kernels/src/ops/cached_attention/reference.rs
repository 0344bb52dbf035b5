//! Cached attention from the operations it is made of.

use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

use super::{CachedAttention, CachedAttentionOps, CachedRow};
use crate::ops::attention::{AttentionForward, AttentionMask, AttentionOptions, attention_heads};
use crate::ops::norm::{Norm, norm_rows};
use crate::ops::reshape::{as_dims, as_rows};
use crate::ops::rotary::rotary_heads;

/// Reference body of [`cached_attention`](crate::cached_attention()): `[tokens, n_heads, head_dim]`.
pub fn cached_attention<B: CachedAttentionOps>(operands: CachedAttention<'_, B>) -> Tensor<B, 3> {
    let CachedAttention { qkv, heads, placement, at, cache } = operands;
    let [query, key, value] = heads.split(qkv.unsqueeze());
    let place = |x: Tensor<B, 4>, norm: Option<Norm<B>>| {
        let dims = x.dims();
        let x = match norm {
            Some(norm) => as_dims(norm_rows(as_rows(x), norm), dims),
            None => x,
        };
        match &placement.rotary {
            Some(table) => rotary_heads(x, table, at.positions.clone()),
            None => x,
        }
    };
    let (query, key) = (place(query, placement.query_norm), place(key, placement.key_norm));
    let mut first = 0;
    let output = at.rows.iter().map(|row| {
        let [query, key, value] = [&query, &key, &value].map(|x| x.clone().narrow(2, first, row.tokens));
        first += row.tokens;
        cache.keys.inplace(|held| written(held, key, row));
        cache.values.inplace(|held| written(held, value, row));
        let [key, value] = [&cache.keys, &cache.values].map(|held| all_of(held, row));
        let (mask, options) = (AttentionMask::Causal { window: at.window }, AttentionOptions::new(heads.head_dim));
        attention_heads(AttentionForward { query, key, value, mask, options })
    });
    Tensor::cat(output.collect(), 1).squeeze_dim(0)
}

/// The pages `held` with the keys or values `new` `[1, n_kv_heads, tokens, head_dim]` at the end of a row.
fn written<B: Backend>(mut held: Tensor<B, 4>, new: Tensor<B, 4>, row: &CachedRow) -> Tensor<B, 4> {
    let [_, n_kv_heads, page_tokens, head_dim] = held.dims();
    let first = row.keys - row.tokens;
    let mut place = first;
    while place < row.keys {
        let (page, within) = (row.pages[place / page_tokens] as usize, place % page_tokens);
        let count = (page_tokens - within).min(row.keys - place);
        let part = new.clone().narrow(2, place - first, count);
        held = held.slice_assign([page..page + 1, 0..n_kv_heads, within..within + count, 0..head_dim], part);
        place += count;
    }
    held
}

/// All keys or values of a row, `[1, n_kv_heads, keys, head_dim]`.
fn all_of<B: Backend>(held: &Tensor<B, 4>, row: &CachedRow) -> Tensor<B, 4> {
    let used = row.keys.div_ceil(held.dims()[2]);
    let pages = row.pages[..used].iter().map(|page| held.clone().narrow(0, *page as usize, 1)).collect();
    Tensor::cat(pages, 2).narrow(2, 0, row.keys)
}
