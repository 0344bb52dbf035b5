//! Attention of new tokens over all tokens so far, with keys and values in pages on the device.
//!
//! ```text
//! the cache of a layer    page 0     page 1     page 2     page 3       page_tokens keys and values each
//!                        [........] [........] [........] [........]
//! row 0: pages 2, 0       8 .. 13                0 .. 7                 14 tokens
//! row 1: page 3                                            0 .. 4        5 tokens
//! ```
//!
//! A row takes a page when its last one is full, so that rows of all lengths share one cache. Rows
//! with a common prefix can share its pages (Kwon et al., 2023, "PagedAttention").

mod autodiff;
mod cache;
#[cfg(feature = "ndarray")]
pub(crate) mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod cubecl;
#[cfg(feature = "cubecl")]
mod lists;
pub(crate) mod reference;

use std::sync::{Arc, OnceLock};

use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};

pub(crate) use self::cache::KvStorage;
pub use self::cache::{CacheDType, LayerCache};
use super::attention::{AttentionOps, AttentionOptions, check_sinks};
use super::norm::{Norm, NormKind, NormOps};
use super::rotary::{RotaryOps, RotaryTable, next_positions};
use crate::checked::{Checked, Operands, part};
use crate::mutation;
use crate::packed_heads::PackedHeads;
use crate::recorder::{self, Call};
use crate::rehearsal;
use crate::selection::dispatch;
use crate::tensor::{padded_rows, row_after_row};

/// New tokens per tile of a kernel.
#[cfg(feature = "cuda")]
pub(crate) const TILE: usize = 128;

/// A layer's parameters of attention: processing of queries and keys before it, and sinks.
#[derive(Clone, Debug)]
pub struct Placement<B: Backend> {
    /// RMS norm of each query head, over `head_dim`.
    pub query_norm: Option<Norm<B>>,
    /// RMS norm of each key head.
    pub key_norm: Option<Norm<B>>,
    /// The rotation by a token's position, of a head or of its first elements.
    pub rotary: Option<RotaryTable<B>>,
    /// A score per query head that takes part in the softmax, `[n_heads]`: see
    /// [`sink_attention`](crate::sink_attention).
    pub sinks: Option<Tensor<B, 1>>,
}

impl<B: Backend> Placement<B> {
    /// Without norms, rotation and sinks.
    pub fn none() -> Self {
        Self { query_norm: None, key_norm: None, rotary: None, sinks: None }
    }
}

/// A row of the cache in one pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedRow {
    /// Its pages, in the order of its tokens.
    pub pages: Arc<[u32]>,
    /// Number of new tokens, which follow all earlier ones.
    pub tokens: usize,
    /// Number of tokens, the new ones included.
    pub keys: usize,
}

/// Positions of a pass's new tokens, concatenated by row.
#[derive(Clone, Debug)]
pub struct CachedTokens<B: Backend> {
    pub(crate) rows: Vec<CachedRow>,
    /// Index of each new token in its row, `[1, tokens]`.
    pub(crate) positions: Tensor<B, 2, Int>,
    /// The pages of each row, `[rows, most]`, padded with the first page.
    pub(crate) pages: Tensor<B, 2, Int>,
    pub(crate) window: Option<usize>,
    /// Positions of the next token of each row, `[1, rows]`, if computed.
    following: Option<Tensor<B, 2, Int>>,
    /// The page size for which written pages were checked to be unshared.
    apart: OnceLock<usize>,
    #[cfg(feature = "cubecl")]
    lists: lists::Lists<B>,
}

impl<B: Backend> CachedTokens<B> {
    fn of(rows: Vec<CachedRow>, positions: Tensor<B, 2, Int>, pages: Tensor<B, 2, Int>, window: Option<usize>) -> Self {
        Self {
            rows,
            positions,
            pages,
            window,
            following: None,
            apart: OnceLock::new(),
            #[cfg(feature = "cubecl")]
            lists: lists::Lists::default(),
        }
    }

    /// Panics unless the pages that each row writes are its own: kernels write all tokens of a pass
    /// concurrently. Checked once for these tokens, and still valid as rows grow within their
    /// pages.
    #[track_caller]
    pub(crate) fn assert_apart(&self, op: &'static str, page_tokens: usize) {
        if self.apart.get() == Some(&page_tokens) {
            return;
        }
        let all = || self.rows.iter().flat_map(|row| row.pages.iter());
        let mut owners = vec![0u8; all().max().map_or(0, |last| *last as usize + 1)];
        for page in all() {
            let owners = &mut owners[*page as usize];
            *owners = owners.saturating_add(1);
        }
        for row in &self.rows {
            let first = ((row.keys - row.tokens) / page_tokens).min(row.pages.len());
            for page in &row.pages[first..] {
                assert!(owners[*page as usize] == 1, "{op}: page {page}, which a row writes into, is listed twice");
            }
        }
        let _ = self.apart.set(page_tokens);
    }

    /// For these rows, whose tokens see at most `window` keys, their own included. Uploads
    /// positions and pages.
    ///
    /// # Panics
    /// If there are no rows, or a row has no new tokens, more new tokens than tokens, or no pages.
    pub fn new(rows: Vec<CachedRow>, window: Option<usize>, device: &B::Device) -> Self {
        assert_rows(&rows);
        let places = rows.iter().flat_map(|row| row.keys - row.tokens..row.keys).map(|place| place as i32);
        let places: Vec<i32> = places.collect();
        let shape = [1, places.len()];
        let positions = row_after_row(places, shape, device);
        let pages = page_table(&rows, device);
        Self::of(rows, positions, pages, window)
    }

    /// The same rows with one more token each. Uploads nothing if their pages are the same.
    ///
    /// # Panics
    /// If these are not single tokens, or `rows` are not the same rows with one more.
    pub fn next(&self, rows: Vec<CachedRow>) -> Self
    where
        B: RotaryOps,
    {
        assert_rows(&rows);
        let follows = |(old, new): (&CachedRow, &CachedRow)| [old.tokens, new.tokens, new.keys] == [1, 1, old.keys + 1];
        let all = self.rows.len() == rows.len() && self.rows.iter().zip(&rows).all(follows);
        assert!(all, "cached_attention: one token more in each row of one new token");
        let same = self.rows.iter().zip(&rows).all(|(old, new)| old.pages == new.pages);
        let pages = if same { self.pages.clone() } else { page_table(&rows, &self.pages.device()) };
        let positions = match &self.following {
            Some(positions) => positions.clone(),
            None => next_positions(self.positions.clone(), i32::MAX as usize),
        };
        let apart = if same { self.apart.clone() } else { OnceLock::new() };
        Self { apart, ..Self::of(rows, positions, pages, self.window) }
    }

    /// The last tokens after `steps` single-token steps that started with these: their positions,
    /// and those for [`next`](Self::next), `[1, rows]` each, as computed by the backend.
    pub(crate) fn after(&self, steps: usize, [positions, following]: [Tensor<B, 2, Int>; 2]) -> Self {
        let count = self.rows.len();
        let fits = positions.dims() == [1, count] && following.dims() == [1, count];
        assert!(fits, "cached_attention: a position for each of {count} rows");
        let rows = self.rows.iter().map(|row| CachedRow { keys: row.keys + steps - 1, ..row.clone() }).collect();
        Self {
            following: Some(following),
            apart: self.apart.clone(),
            ..Self::of(rows, positions, self.pages.clone(), self.window)
        }
    }

    /// Only the last token of each row, for [`next`](Self::next).
    pub fn last(&self) -> Self {
        if self.rows.iter().all(|row| row.tokens == 1) {
            return self.clone();
        }
        let rows: Vec<CachedRow> = self.rows.iter().map(|row| CachedRow { tokens: 1, ..row.clone() }).collect();
        let positions: Vec<i32> = rows.iter().map(|row| row.keys as i32 - 1).collect();
        let shape = [1, rows.len()];
        let positions = row_after_row(positions, shape, &self.positions.device());
        Self { apart: self.apart.clone(), ..Self::of(rows, positions, self.pages.clone(), self.window) }
    }

    /// The same tokens in a layer where each sees at most `window` keys, its own included. Uploads
    /// nothing.
    pub fn with_window(&self, window: Option<usize>) -> Self {
        if window == self.window {
            return self.clone();
        }
        Self {
            following: self.following.clone(),
            apart: self.apart.clone(),
            ..Self::of(self.rows.clone(), self.positions.clone(), self.pages.clone(), window)
        }
    }

    /// The rows.
    pub fn rows(&self) -> &[CachedRow] {
        &self.rows
    }

    /// Index of each new token in its row, `[1, tokens]`.
    pub fn positions(&self) -> &Tensor<B, 2, Int> {
        &self.positions
    }
}

fn assert_rows(rows: &[CachedRow]) {
    assert!(!rows.is_empty(), "cached_attention: no rows");
    for CachedRow { pages, tokens, keys } in rows {
        let there = *tokens > 0 && tokens <= keys && !pages.is_empty();
        assert!(there, "cached_attention: {tokens} new tokens of {keys} in {} pages", pages.len());
        assert!(i32::try_from(*keys).is_ok(), "cached_attention: {keys} tokens are too many");
    }
}

fn page_table<B: Backend>(rows: &[CachedRow], device: &B::Device) -> Tensor<B, 2, Int> {
    let pages: Vec<&[u32]> = rows.iter().map(|row| &row.pages[..]).collect();
    padded_rows(&pages, 0, device)
}

/// Operands of [`cached_attention`].
#[derive(Debug)]
pub struct CachedAttention<'a, B: Backend> {
    /// `[tokens, width]`.
    pub qkv: Tensor<B, 2>,
    /// The layout of its heads.
    pub heads: PackedHeads,
    /// Processing of queries and keys, and sinks.
    pub placement: Placement<B>,
    /// Scale and soft-capping; no dropout.
    pub options: AttentionOptions,
    /// Positions of the new tokens.
    pub at: &'a CachedTokens<B>,
    /// The layer's cache.
    pub cache: &'a mut LayerCache<B>,
}

impl<B: Backend> Operands for CachedAttention<'_, B> {
    fn check(&self) {
        let op = "cached_attention";
        let qkv = part(op, "qkv", &self.qkv).float();
        let [tokens, width] = self.qkv.dims();
        let PackedHeads { n_kv_heads, head_dim, .. } = self.heads;
        self.heads.check(op, "qkv", [1, tokens, width]);
        self.options.check(op);
        assert!(self.options.dropout.is_none(), "{op}: dropout, which a cache is never used with");
        let [pages, _, page_tokens, _] = self.cache.dims();
        self.cache.check(op, [n_kv_heads, head_dim], &qkv);
        for held in [&self.cache.keys, &self.cache.values] {
            if let KvStorage::Float(floats) = held {
                part(op, "cache", floats).alike(&qkv);
            }
        }

        let norms = [&self.placement.query_norm, &self.placement.key_norm].map(Option::as_ref);
        assert!(norms[0].is_some() == norms[1].is_some(), "{op}: norms of queries and keys, or none");
        for norm in norms.into_iter().flatten() {
            norm.check(op, &qkv, head_dim);
            assert!(norm.kind == NormKind::RmsNorm && norm.beta.is_none(), "{op}: norms of heads are RMS norms");
        }
        if let [Some(query), Some(key)] = norms {
            let alike = (query.epsilon, query.gamma.dtype()) == (key.epsilon, key.gamma.dtype());
            assert!(alike, "{op}: norms of queries and keys differ in epsilon or dtype");
        }
        if let Some(table) = &self.placement.rotary {
            table.check_part(op, &qkv, head_dim);
        }
        if let Some(sinks) = &self.placement.sinks {
            check_sinks(op, sinks, self.heads.n_heads, &qkv);
        }

        let CachedTokens { rows, positions, pages: table, window, .. } = self.at;
        let positions = part(op, "positions", positions).integer().shaped(&[1, tokens], &qkv);
        part(op, "pages", table).fits(table.dims()[0] == rows.len(), &qkv).alike(&positions);
        for row in rows {
            let room = row.pages.len().saturating_mul(page_tokens);
            assert!(row.keys <= room, "{op}: {} keys in {} pages of {page_tokens}", row.keys, row.pages.len());
            let furthest = row.pages.iter().max().map_or(0, |page| *page as usize);
            assert!(furthest < pages, "{op}: page {furthest} of a cache of {pages}");
        }
        self.at.assert_apart(op, page_tokens);
        assert!(*window != Some(0), "{op}: a window of no keys");
    }
}

/// Cached attention of a backend. It has no gradient.
pub trait CachedAttentionOps: AttentionOps + NormOps + RotaryOps {
    /// Body of [`cached_attention`]: `[tokens, n_heads, head_dim]`.
    fn cached_attention(operands: Checked<CachedAttention<'_, Self>>) -> Tensor<Self, 3> {
        reference::cached_attention(operands.into_inner())
    }
}

/// Causal [`attention`](crate::attention()) of new tokens, packed in `qkv` `[tokens, width]`, each
/// over itself and the earlier tokens of its row in `cache`: `[tokens, n_heads * head_dim]`.
///
/// Places queries and keys, and writes keys and values to the pages of their rows, on the device.
/// Rows may have any number of new tokens and any length.
///
/// # Panics
/// If sizes do not fit, `options` has dropout, a row has more tokens than its pages hold, or a page
/// that a row writes is listed twice; or in a rehearsal of
/// [`compile_ahead`](crate::compile_ahead()), which would corrupt the cache.
pub fn cached_attention<B: CachedAttentionOps>(
    qkv: Tensor<B, 2>,
    heads: PackedHeads,
    placement: Placement<B>,
    options: AttentionOptions,
    at: &CachedTokens<B>,
    cache: &mut LayerCache<B>,
) -> Tensor<B, 2> {
    let [tokens, _] = qkv.dims();
    let _op = recorder::op("cached_attention", || {
        let (qkv, keys) = (recorder::operand(&qkv), cache.keys.operand());
        let PackedHeads { n_heads, n_kv_heads, head_dim } = heads;
        let seen = |row: &CachedRow| at.window.map_or(row.keys, |window| window.min(row.keys));
        let read: usize = at.rows.iter().map(seen).sum();
        let pairs: usize = at.rows.iter().map(|row| row.tokens * seen(row)).sum();
        // Visible keys and values, and the output besides the heads.
        let cached = 2 * n_kv_heads * read * cache.head_bytes();
        let output = qkv.bytes() * n_heads as u64 / (n_heads + 2 * n_kv_heads) as u64;
        let flops = 4 * n_heads * pairs * head_dim;
        Call { bytes: qkv.bytes() + output + cached as u64, flops: flops as u64, inputs: vec![qkv, keys] }
    });
    rehearsal::refuse("cached_attention");
    let operands = Checked::new(CachedAttention { qkv, heads, placement, options, at, cache });
    let output = dispatch!(B: CachedAttentionOps::cached_attention(operands));
    for (part, scale, held) in [("keys", "key_scales", &mut cache.keys), ("values", "value_scales", &mut cache.values)]
    {
        match held {
            KvStorage::Float(floats) => mutation::state("cached_attention", part, floats),
            KvStorage::Int8 { packed, scales } => {
                mutation::state("cached_attention", part, packed);
                mutation::state("cached_attention", scale, scales);
            }
        }
    }
    B::reshape(output, [tokens, heads.n_heads * heads.head_dim])
}
