//! The paged KV cache.

mod pages;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::tensor::{Int, Tensor};

use fireclay_kernels::recorder::part;
use fireclay_kernels::{
    Backend, CacheDType, CachedRow, CachedTokens, Declined, DecodePlan, Decoded, LayerCache, MultiStep, PackedHeads,
    StepDraw, decode_step,
};

use self::pages::Pages;
use crate::config::TransformerConfig;

/// Tokens per page, except for models with a shorter context.
pub const PAGE_TOKENS: usize = 64;

/// The identity of a set of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Weights(u64);

impl Weights {
    /// A new identity.
    pub(crate) fn new() -> Self {
        static WEIGHTS: AtomicU64 = AtomicU64::new(0);
        Self(WEIGHTS.fetch_add(1, Ordering::Relaxed))
    }
}

/// A row of a [`Cache`]: the tokens of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RowId(u64);

/// The cache has too few free pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the cache is full: {wanted} pages are wanted, {left} are left")]
pub struct CacheFull {
    /// Pages needed.
    pub wanted: usize,
    /// Free pages.
    pub left: usize,
}

/// The keys and values of every layer, in pages that are allocated to rows as they grow. Rows with
/// a common prefix share its pages.
#[derive(Debug)]
pub struct Cache<B: Backend> {
    pub(crate) layers: Vec<LayerCache<B>>,
    /// The weights used to compute its keys and values.
    weights: Weights,
    pages: Pages,
    page_tokens: usize,
    rows: HashMap<RowId, Row>,
    window: Option<usize>,
    context_length: usize,
    /// The rows of the last pass, and the positions of their last tokens.
    last: Option<(Vec<RowId>, CachedTokens<B>)>,
    /// The plan of fused decode steps, if the backend supports them.
    plan: Option<DecodePlan<B>>,
    device: B::Device,
}

#[derive(Debug, Default)]
struct Row {
    pages: Arc<[u32]>,
    length: usize,
}

impl<B: Backend> Cache<B> {
    pub(crate) fn new(
        config: &TransformerConfig,
        weights: Weights,
        tokens: usize,
        dtype: CacheDType,
        device: &B::Device,
    ) -> Self {
        // A short context needs no large pages.
        let page_tokens = PAGE_TOKENS.min(config.context_length.next_power_of_two());
        let pages = tokens.div_ceil(page_tokens).max(1);
        let heads = PackedHeads { n_heads: config.n_heads, n_kv_heads: config.n_kv_heads, head_dim: config.head_dim };
        let layer = |_| LayerCache::new(pages, page_tokens, heads, dtype, device);
        Self {
            layers: (0..config.n_layers).map(layer).collect(),
            weights,
            pages: Pages::new(pages, page_tokens),
            page_tokens,
            rows: HashMap::new(),
            window: config.layer(0).window,
            context_length: config.context_length,
            last: None,
            plan: None,
            device: device.clone(),
        }
    }

    /// Panics unless it was computed with these weights.
    pub(crate) fn assert_of(&self, weights: Weights) {
        assert!(
            self.weights == weights,
            "the cache belongs to another model or other weights: make one with `Transformer::cache`"
        );
    }

    /// Tokens per page.
    pub fn page_tokens(&self) -> usize {
        self.page_tokens
    }

    /// Total and free pages.
    pub fn pages(&self) -> (usize, usize) {
        (self.pages.count(), self.pages.available())
    }

    /// A new, empty row.
    pub fn add_row(&mut self) -> RowId {
        self.add(Row::default())
    }

    /// A new row with the longest prefix of `tokens` in the cache: whole pages, and all but one
    /// token at most. See [`length`](Self::length).
    pub fn add_row_with_prefix(&mut self, tokens: &[u32]) -> RowId {
        let pages = self.pages.shared(tokens);
        let length = pages.len() * self.page_tokens;
        self.add(Row { pages: pages.into(), length })
    }

    fn add(&mut self, row: Row) -> RowId {
        // Unique across caches, so that no cache takes a foreign row for its own.
        static ROWS: AtomicU64 = AtomicU64::new(0);
        let id = RowId(ROWS.fetch_add(1, Ordering::Relaxed));
        self.rows.insert(id, row);
        id
    }

    /// Removes a row, if it exists, and frees its pages.
    pub fn remove_row(&mut self, row: RowId) {
        if let Some(row) = self.rows.remove(&row) {
            self.pages.free_pages(&row.pages);
        }
    }

    /// Tokens of a row; 0 if it does not exist.
    pub fn length(&self, row: RowId) -> usize {
        self.rows.get(&row).map_or(0, |row| row.length)
    }

    /// Number of pages of a row.
    pub fn pages_of(&self, row: RowId) -> usize {
        self.rows.get(&row).map_or(0, |row| row.pages.len())
    }

    /// Allocates pages for `tokens` more tokens of a row ahead of the passes that need them.
    ///
    /// # Errors
    /// If too few pages are free; none is allocated then.
    ///
    /// # Panics
    /// If the row does not exist.
    pub fn reserve(&mut self, row: RowId, tokens: usize) -> Result<(), CacheFull> {
        let row = self.rows.get_mut(&row).expect("a row of the cache");
        let wanted = row.length.saturating_add(tokens).div_ceil(self.page_tokens).saturating_sub(row.pages.len());
        if wanted == 0 {
            return Ok(());
        }
        let left = self.pages.available();
        if wanted > left {
            return Err(CacheFull { wanted, left });
        }
        row.pages = row.pages.iter().copied().chain((0..wanted).filter_map(|_| self.pages.take())).collect();
        Ok(())
    }

    /// Frees the pages of a row beyond its tokens and `tokens` more.
    pub fn release(&mut self, row: RowId, tokens: usize) {
        if let Some(row) = self.rows.get_mut(&row) {
            let used = row.length.saturating_add(tokens).div_ceil(self.page_tokens);
            let (used, behind) = row.pages.split_at(used.min(row.pages.len()));
            self.pages.free_pages(behind);
            row.pages = used.into();
        }
    }

    /// Registers that a row begins with `tokens`, so that other rows can share its full pages.
    /// Ignores tokens beyond the row's length. A stop token at the end of a
    /// [`decode_multi_step`](crate::Transformer::decode_multi_step) must not be included: its keys
    /// may be missing.
    pub fn share_prefix(&mut self, row: RowId, tokens: &[u32]) {
        if let Some(row) = self.rows.get(&row) {
            self.pages.share_prefix(&row.pages, &tokens[..tokens.len().min(row.length)]);
        }
    }

    /// The positions of the next tokens of rows, given with their counts.
    ///
    /// # Panics
    /// If a row does not exist, is listed twice, would exceed the model's context, or lacks pages:
    /// reserve them.
    pub(crate) fn begin(&mut self, rows: &[(RowId, usize)]) -> CachedTokens<B> {
        let cached = |(id, tokens): &(RowId, usize)| {
            let reserved = self.reserve(*id, *tokens);
            reserved.unwrap_or_else(|full| panic!("{full}"));
            let row = &self.rows[id];
            let keys = row.length + tokens;
            assert!(keys <= self.context_length, "{keys} tokens exceed context_length {}", self.context_length);
            CachedRow { pages: row.pages.clone(), tokens: *tokens, keys }
        };
        let cached: Vec<CachedRow> = rows.iter().map(cached).collect();
        let ids: Vec<RowId> = rows.iter().map(|(id, _)| *id).collect();
        assert_once(&ids);
        let _in_cache = part("cache");
        let follows = |old: &CachedTokens<B>| {
            let one_more =
                |(old, new): (&CachedRow, &CachedRow)| old.tokens == 1 && new.tokens == 1 && new.keys == old.keys + 1;
            old.rows().iter().zip(&cached).all(one_more)
        };
        let at = match &self.last {
            // Sends nothing to the device.
            Some((last, at)) if *last == ids && follows(at) => at.next(cached),
            _ => CachedTokens::new(cached, self.window, &self.device),
        };
        self.last = Some((ids, at.last()));
        at
    }

    /// Prepares [`whole_step`](Self::whole_step), if the backend supports the model; backend notes
    /// are printed now, not during generation.
    pub(crate) fn planned(mut self, plan: impl FnOnce(&[LayerCache<B>]) -> Result<DecodePlan<B>, Declined>) -> Self {
        self.plan = plan(&self.layers).ok();
        self
    }

    /// Whether [`decode_multi_step`](crate::Transformer::decode_multi_step) supports this many
    /// rows, which sample or not.
    pub fn supports_multi_step(&self, rows: usize, draws: bool) -> bool {
        self.plan.as_ref().is_some_and(|plan| plan.supports_multi_step(rows, draws))
    }

    /// Whether a fused decode step supports this many rows.
    pub(crate) fn takes_whole_step(&self, rows: usize) -> bool {
        self.plan.as_ref().is_some_and(|plan| (1..=plan.rows()).contains(&rows))
    }

    /// Number of decode steps to run at once for these rows, at most `most`, with pages reserved;
    /// one unless the plan supports more.
    ///
    /// # Panics
    /// If a row does not exist.
    pub(crate) fn whole_steps(&mut self, rows: &[RowId], draws: bool, most: usize) -> usize {
        let Some(plan) = &self.plan else { return 1 };
        let keys = rows.iter().map(|row| self.length(*row) + 1);
        let longest = keys.clone().max().unwrap_or(0);
        let room = (self.context_length + 1).saturating_sub(longest);
        let steps = plan.steps(keys, draws).min(most).min(room).max(1);
        let reserved = rows.iter().all(|row| self.reserve(*row, steps).is_ok());
        if reserved { steps } else { 1 }
    }

    /// Runs one or several fused decode steps, if there is a plan for them.
    pub(crate) fn whole_step(
        &mut self,
        tokens: &Tensor<B, 1, Int>,
        at: &CachedTokens<B>,
        draw: Option<StepDraw<'_, B>>,
        ahead: MultiStep<'_, B>,
    ) -> Option<Decoded<B>> {
        if !self.takes_whole_step(at.rows().len()) {
            return None;
        }
        let Self { plan, layers, last, .. } = self;
        let made = plan.as_ref()?;
        let Ok((decoded, at)) = decode_step(made, tokens.clone(), at, layers, draw, ahead) else {
            *plan = None;
            return None;
        };
        *last = last.take().map(|(ids, _)| (ids, at));
        Some(decoded)
    }

    /// Adds the tokens of a pass to the rows' lengths.
    pub(crate) fn advance(&mut self, rows: &[(RowId, usize)]) {
        for (id, tokens) in rows {
            if let Some(row) = self.rows.get_mut(id) {
                row.length += tokens;
            }
        }
    }

    /// Treats the last passes, over disjoint subsets of these rows, as one pass over all of them.
    ///
    /// # Panics
    /// If a row does not exist, is listed twice, or is empty.
    pub(crate) fn join_passes(&mut self, rows: Vec<RowId>) {
        assert_once(&rows);
        let last = |id: &RowId| CachedRow { pages: self.rows[id].pages.clone(), tokens: 1, keys: self.rows[id].length };
        let at = CachedTokens::new(rows.iter().map(last).collect(), self.window, &self.device);
        self.last = Some((rows, at));
    }

    /// Positions of the last tokens of the last pass, `[rows]`.
    ///
    /// # Panics
    /// If there was no pass.
    pub fn last_positions(&self) -> Tensor<B, 1, Int> {
        let (_, at) = self.last.as_ref().expect("a pass that wrote into the cache");
        at.positions().clone().reshape([at.rows().len()])
    }
}

fn assert_once(rows: &[RowId]) {
    let mut sorted = rows.to_vec();
    sorted.sort_unstable();
    assert!(sorted.windows(2).all(|pair| pair[0] != pair[1]), "a row is listed twice");
}
