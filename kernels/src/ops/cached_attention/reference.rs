//! Cached attention from the operations it is made of.

use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};

use super::{CachedAttention, CachedAttentionOps, CachedTokens};
use crate::checked::clamp_index;
use crate::ops::attention::{AttentionForward, AttentionOptions, attention_heads};
use crate::ops::norm::{Norm, norm_rows};
use crate::ops::reshape::{as_dims, as_rows};
use crate::ops::rotary::rotary_heads;

/// Reference body of [`cached_attention`](crate::cached_attention()): `[batch_size, seq_length, n_heads, head_dim]`.
pub fn cached_attention<B: CachedAttentionOps>(operands: CachedAttention<'_, B>) -> Tensor<B, 4> {
    let CachedAttention { qkv, heads, placement, at, cache } = operands;
    let at = CachedTokens { positions: clamp_index(at.positions.clone(), at.keys - 1), ..at.clone() };
    let [query, key, value] = heads.split(qkv);
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
    cache.keys.inplace(|cached| written(cached, key, &at));
    cache.values.inplace(|cached| written(cached, value, &at));
    let [key, value] = [&cache.keys, &cache.values].map(|cached| cached.clone().narrow(2, 0, at.keys));
    attention_heads(AttentionForward {
        query,
        key,
        value,
        mask: at.mask(),
        options: AttentionOptions::new(heads.head_dim),
    })
}

/// `held` with `new` at the tokens' positions.
fn written<B: Backend>(held: Tensor<B, 4>, new: Tensor<B, 4>, at: &CachedTokens<B>) -> Tensor<B, 4> {
    let [batch_size, n_kv_heads, capacity, head_dim] = held.dims();
    let seq_length = new.dims()[2];
    if at.aligned {
        let place = [0..batch_size, 0..n_kv_heads, at.keys - seq_length..at.keys, 0..head_dim];
        return held.slice_assign(place, new);
    }
    // Which of the new tokens belongs in each place, and whether any does.
    let shape = [batch_size, 1, capacity, 1];
    let first = at.positions.clone().narrow(1, 0, 1).reshape([batch_size, 1, 1, 1]).expand(shape);
    let place = Tensor::<B, 1, Int>::arange(0..capacity as i64, &held.device()).reshape([1, 1, capacity, 1]);
    let token = place.expand(shape) - first;
    let all = [batch_size, n_kv_heads, capacity, head_dim];
    let outside = token.clone().lower_elem(0).bool_or(token.clone().greater_equal_elem(seq_length as i32));
    let token = token.clamp(0, seq_length as i32 - 1).expand(all);
    new.gather(2, token).mask_where(outside.expand(all), held)
}
