//! Cached attention from basic operations.

use burn::tensor::backend::Backend;
use burn::tensor::{BasicOps, DType, FloatDType, Int, Tensor};

use super::{CachedAttention, CachedAttentionOps, CachedRow, KvStorage};
use crate::ops::attention::{AttentionForward, AttentionMask, SinkAttention, attention_heads, sink_attention_heads};
use crate::ops::norm::{Norm, norm_rows};
use crate::ops::reshape::{as_dims, as_rows};
use crate::ops::rotary::rotary_heads;
use crate::ops::weight::Dequantize;
use crate::ops::weight::reference::dequantize;
use crate::quant::int8::PACKED;
use crate::quant::{Format, QuantizedWeight, RowOrder};

/// Reference body of [`cached_attention`](crate::cached_attention()): `[tokens, n_heads,
/// head_dim]`.
pub fn cached_attention<B: CachedAttentionOps>(operands: CachedAttention<'_, B>) -> Tensor<B, 3> {
    let CachedAttention { qkv, heads, placement, options, at, cache } = operands;
    let dtype = FloatDType::from(qkv.dtype());
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
    // Rounds to INT8 only once.
    let key = if matches!(cache.keys, KvStorage::Int8 { .. }) { key.cast(DType::F32) } else { key };
    let (query, key) = (place(query, placement.query_norm.clone()), place(key, placement.key_norm.clone()));
    let mut first = 0;
    let output = at.rows.iter().map(|row| {
        let [query, key, value] = [&query, &key, &value].map(|x| x.clone().narrow(2, first, row.tokens));
        first += row.tokens;
        write(&mut cache.keys, key, row);
        write(&mut cache.values, value, row);
        let [key, value] = [&cache.keys, &cache.values].map(|held| all_of(held, row, dtype));
        let mask = AttentionMask::Causal { window: at.window };
        match placement.sinks.clone() {
            Some(sinks) => sink_attention_heads(SinkAttention { query, key, value, sinks, mask, options }),
            None => attention_heads(AttentionForward { query, key, value, mask, options }),
        }
    });
    Tensor::cat(output.collect(), 1).squeeze_dim(0)
}

/// Appends the keys or values `new` `[1, n_kv_heads, tokens, head_dim]` to a row.
fn write<B: Backend>(held: &mut KvStorage<B>, new: Tensor<B, 4>, row: &CachedRow) {
    match held {
        KvStorage::Float(floats) => floats.inplace(|floats| written(floats, new, row)),
        KvStorage::Int8 { packed, scales } => {
            let (words, scale) = quantized(new);
            packed.inplace(|packed| written(packed, words, row));
            scales.inplace(|scales| written(scales.unsqueeze_dim(3), scale, row).squeeze_dim(3));
        }
    }
}

/// The pages `held` with `new` `[1, n_kv_heads, tokens, columns]` appended to a row.
fn written<B: Backend, K: BasicOps<B>>(
    mut held: Tensor<B, 4, K>,
    new: Tensor<B, 4, K>,
    row: &CachedRow,
) -> Tensor<B, 4, K> {
    let [_, n_kv_heads, page_tokens, columns] = held.dims();
    let first = row.keys - row.tokens;
    let mut place = first;
    while place < row.keys {
        let (page, within) = (row.pages[place / page_tokens] as usize, place % page_tokens);
        let count = (page_tokens - within).min(row.keys - place);
        let part = new.clone().narrow(2, place - first, count);
        held = held.slice_assign([page..page + 1, 0..n_kv_heads, within..within + count, 0..columns], part);
        place += count;
    }
    held
}

/// Heads `[.., head_dim]` as packed bytes, with the scale of each, `[.., 1]`.
fn quantized<B: Backend>(heads: Tensor<B, 4>) -> (Tensor<B, 4, Int>, Tensor<B, 4>) {
    let [rows, n_heads, tokens, head_dim] = heads.dims();
    let heads = heads.cast(DType::F32);
    let largest = heads.clone().abs().max_dim(3);
    let scales = (largest.clone() / 127.0).mask_fill(largest.equal_elem(0.0), 1.0);
    let bytes = (heads / scales.clone()).round().clamp(-127.0, 127.0).int().cast(DType::I32);
    let bytes = bytes.reshape([rows * n_heads, tokens, head_dim / PACKED, PACKED]);
    // The highest byte has the sign of the word; the others are 0 to 255.
    let words = (0..PACKED).map(|at| {
        let byte = bytes.clone().narrow(3, at, 1);
        let below = byte.clone().lower_elem(0);
        let byte = if at + 1 < PACKED { byte.clone().mask_where(below, byte + 256) } else { byte };
        byte * (1i32 << (8 * at))
    });
    let words = words.reduce(|sum, word| sum + word).expect("four bytes a word");
    (words.reshape([rows, n_heads, tokens, head_dim / PACKED]), scales)
}

/// All keys or values of a row in `dtype`, `[1, n_kv_heads, keys, head_dim]`.
fn all_of<B: Backend>(held: &KvStorage<B>, row: &CachedRow, dtype: FloatDType) -> Tensor<B, 4> {
    match held {
        KvStorage::Float(floats) => side_by_side(floats, row),
        KvStorage::Int8 { packed, scales } => {
            let (packed, scales) = (side_by_side(packed, row), side_by_side(&scales.clone().unsqueeze_dim(3), row));
            let [_, n_kv_heads, keys, words] = packed.dims();
            let lines = n_kv_heads * keys;
            let (packed, scales) = (packed.reshape([lines, words]), scales.reshape([lines]));
            let weight = QuantizedWeight { packed, scales: Some(scales), format: Format::Int8, order: RowOrder::Rows };
            dequantize(Dequantize { weight, dtype }).reshape([1, n_kv_heads, keys, words * PACKED])
        }
    }
}

/// The used part of a row in the pages `held`, `[1, n_kv_heads, keys, columns]`.
fn side_by_side<B: Backend, K: BasicOps<B>>(held: &Tensor<B, 4, K>, row: &CachedRow) -> Tensor<B, 4, K> {
    let used = row.keys.div_ceil(held.dims()[2]);
    let pages = row.pages[..used].iter().map(|page| held.clone().narrow(0, *page as usize, 1)).collect();
    Tensor::cat(pages, 2).narrow(2, 0, row.keys)
}
