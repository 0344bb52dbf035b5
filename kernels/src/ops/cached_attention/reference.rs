//! Cached attention from the operations it is made of.

use burn::tensor::{Int, Tensor};

use super::{CachedTokens, LayerCache, Placement};
use crate::{AttentionOptions, Backend, Norm, PackedHeads};

/// Reference body of [`cached_attention`](crate::cached_attention): `[batch_size, seq_length, n_heads, head_dim]`.
pub fn cached_attention<B: Backend>(
    qkv: Tensor<B, 3>,
    heads: PackedHeads,
    placement: Placement<B>,
    at: &CachedTokens<B>,
    cache: &mut LayerCache<B>,
) -> Tensor<B, 4> {
    let query = B::rotary_append(qkv, heads, placement, at, cache);
    let [keys, values] = [&cache.keys, &cache.values].map(|held| held.clone().narrow(2, 0, at.keys));
    <B as Backend>::attention(query, keys, values, &at.mask(), AttentionOptions::new(heads.head_dim))
}

/// Places queries and keys and writes keys and values into the cache: the queries
/// `[batch_size, n_heads, seq_length, head_dim]`.
pub fn rotary_append<B: Backend>(
    qkv: Tensor<B, 3>,
    heads: PackedHeads,
    placement: Placement<B>,
    at: &CachedTokens<B>,
    cache: &mut LayerCache<B>,
) -> Tensor<B, 4> {
    let [query, key, value] = heads.split(qkv);
    let place = |x: Tensor<B, 4>, norm: &Option<Norm<B>>| {
        let x = match norm {
            Some(norm) => crate::norm(x, norm),
            None => x,
        };
        match &placement.rotary {
            Some(table) => B::rotary(x, table, at.positions.clone(), false),
            None => x,
        }
    };
    let (query, key) = (place(query, &placement.query_norm), place(key, &placement.key_norm));
    cache.keys.inplace(|held| written(held, key, at));
    cache.values.inplace(|held| written(held, value, at));
    query
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
