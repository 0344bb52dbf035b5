//! Keys and values of the tokens a model has read.

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

/// Tokens of a page, but for models of a shorter context.
pub const PAGE_TOKENS: usize = 64;

/// Which weights operations read: a number that no others have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Weights(u64);

impl Weights {
    /// Others than all before.
    pub(crate) fn new() -> Self {
        static WEIGHTS: AtomicU64 = AtomicU64::new(0);
        Self(WEIGHTS.fetch_add(1, Ordering::Relaxed))
    }
}

/// A row of a [`Cache`]: the tokens of one text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RowId(u64);

/// There are no pages left for a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the cache is full: {wanted} pages are wanted, {left} are left")]
pub struct CacheFull {
    /// Pages that the row needs.
    pub wanted: usize,
    /// Pages that no row has.
    pub left: usize,
}

/// The keys and values of every layer, in pages that rows take as they grow. Rows come and go, and those that begin with the
/// same tokens share the pages of these.
#[derive(Debug)]
pub struct Cache<B: Backend> {
    pub(crate) layers: Vec<LayerCache<B>>,
    /// The weights that its keys and values were computed with.
    weights: Weights,
    pages: Pages,
    page_tokens: usize,
    rows: HashMap<RowId, Row>,
    window: Option<usize>,
    context_length: usize,
    /// The rows of the last pass, and where their last tokens stand.
    last: Option<(Vec<RowId>, CachedTokens<B>)>,
    /// What whole decode steps need, where the backend has them.
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
        // A model of a short context needs no large pages.
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

    /// Panics unless it was made by a model of these weights.
    pub(crate) fn assert_of(&self, weights: Weights) {
        assert!(
            self.weights == weights,
            "a cache of another model, or of other weights: make one with `Transformer::cache`"
        );
    }

    /// Tokens of a page.
    pub fn page_tokens(&self) -> usize {
        self.page_tokens
    }

    /// All pages, and those that no row has.
    pub fn pages(&self) -> (usize, usize) {
        (self.pages.count(), self.pages.available())
    }

    /// A new row without tokens.
    pub fn add_row(&mut self) -> RowId {
        self.add(Row::default())
    }

    /// A new row that begins with those of `tokens` that the cache has, up to a page's end and all but one at the most: see
    /// [`length`](Self::length).
    pub fn add_row_with_prefix(&mut self, tokens: &[u32]) -> RowId {
        let pages = self.pages.shared(tokens);
        let length = pages.len() * self.page_tokens;
        self.add(Row { pages: pages.into(), length })
    }

    fn add(&mut self, row: Row) -> RowId {
        // Of all caches, so that no other one takes it for one of its own.
        static ROWS: AtomicU64 = AtomicU64::new(0);
        let id = RowId(ROWS.fetch_add(1, Ordering::Relaxed));
        self.rows.insert(id, row);
        id
    }

    /// Gives up a row, if it is there; its pages are free for others.
    pub fn remove_row(&mut self, row: RowId) {
        if let Some(row) = self.rows.remove(&row) {
            self.pages.free_pages(&row.pages);
        }
    }

    /// Tokens of a row; none where there is no such row.
    pub fn length(&self, row: RowId) -> usize {
        self.rows.get(&row).map_or(0, |row| row.length)
    }

    /// Pages that a row has.
    pub fn pages_of(&self, row: RowId) -> usize {
        self.rows.get(&row).map_or(0, |row| row.pages.len())
    }

    /// Takes pages for `tokens` more tokens of a row, so that passes need not.
    ///
    /// # Errors
    /// If too few are left. None is taken then.
    ///
    /// # Panics
    /// If there is no such row.
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

    /// Gives up the pages of a row that neither its tokens need nor `tokens` more.
    pub fn release(&mut self, row: RowId, tokens: usize) {
        if let Some(row) = self.rows.get_mut(&row) {
            let used = row.length.saturating_add(tokens).div_ceil(self.page_tokens);
            let (used, behind) = row.pages.split_at(used.min(row.pages.len()));
            self.pages.free_pages(behind);
            row.pages = used.into();
        }
    }

    /// Makes it known that a row begins with `tokens`, so that others may share the pages that these fill. Tokens that it does
    /// not have are left out. A token that ended the text in [`decode_multi_step`](crate::Transformer::decode_multi_step) is not to be
    /// among them: its keys need not be there.
    pub fn share_prefix(&mut self, row: RowId, tokens: &[u32]) {
        if let Some(row) = self.rows.get(&row) {
            self.pages.share_prefix(&row.pages, &tokens[..tokens.len().min(row.length)]);
        }
    }

    /// Where new tokens of rows stand, of each row as many as are said beside it.
    ///
    /// # Panics
    /// If a row is not there, twice, or longer than the model's context then, or there are no pages for it: reserve them.
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
            // Nothing goes to the device.
            Some((last, at)) if *last == ids && follows(at) => at.next(cached),
            _ => CachedTokens::new(cached, self.window, &self.device),
        };
        self.last = Some((ids, at.last()));
        at
    }

    /// With what [`whole_step`](Self::whole_step) needs, where the backend has such an operation for the model. What the backend has to say of it
    /// does not come between a text's tokens.
    pub(crate) fn planned(mut self, plan: impl FnOnce(&[LayerCache<B>]) -> Result<DecodePlan<B>, Declined>) -> Self {
        self.plan = plan(&self.layers).ok();
        self
    }

    /// Whether so many rows, which draw or not, may be given several tokens at once: see [`decode_multi_step`](crate::Transformer::decode_multi_step).
    pub fn supports_multi_step(&self, rows: usize, draws: bool) -> bool {
        self.plan.as_ref().is_some_and(|plan| plan.supports_multi_step(rows, draws))
    }

    /// Whether one operation reads a token more of each of so many rows.
    pub(crate) fn takes_whole_step(&self, rows: usize) -> bool {
        self.plan.as_ref().is_some_and(|plan| (1..=plan.rows()).contains(&rows))
    }

    /// Tokens more of each of these rows that one operation reads, `most` at the most, with pages for them: one, but where there is a
    /// plan for more.
    ///
    /// # Panics
    /// If a row is not there.
    pub(crate) fn whole_steps(&mut self, rows: &[RowId], draws: bool, most: usize) -> usize {
        let Some(plan) = &self.plan else { return 1 };
        let keys = rows.iter().map(|row| self.length(*row) + 1);
        let longest = keys.clone().max().unwrap_or(0);
        let room = (self.context_length + 1).saturating_sub(longest);
        let steps = plan.steps(keys, draws).min(most).min(room).max(1);
        let reserved = rows.iter().all(|row| self.reserve(*row, steps).is_ok());
        if reserved { steps } else { 1 }
    }

    /// What follows from one token more of each row, and steps `ahead`, in one operation, where there is a plan for it.
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

    /// Counts the tokens that a pass has written.
    pub(crate) fn advance(&mut self, rows: &[(RowId, usize)]) {
        for (id, tokens) in rows {
            if let Some(row) = self.rows.get_mut(id) {
                row.length += tokens;
            }
        }
    }

    /// Takes the last passes, which were of some of these rows each, for one of all of them.
    ///
    /// # Panics
    /// If a row is not there, or twice, or has no tokens.
    pub(crate) fn join_passes(&mut self, rows: Vec<RowId>) {
        assert_once(&rows);
        let last = |id: &RowId| CachedRow { pages: self.rows[id].pages.clone(), tokens: 1, keys: self.rows[id].length };
        let at = CachedTokens::new(rows.iter().map(last).collect(), self.window, &self.device);
        self.last = Some((rows, at));
    }

    /// Where the last token of each row of the last pass stands, `[rows]`.
    ///
    /// # Panics
    /// If there was none.
    pub fn last_positions(&self) -> Tensor<B, 1, Int> {
        let (_, at) = self.last.as_ref().expect("a pass that wrote into the cache");
        at.positions().clone().reshape([at.rows().len()])
    }
}

fn assert_once(rows: &[RowId]) {
    let mut sorted = rows.to_vec();
    sorted.sort_unstable();
    assert!(sorted.windows(2).all(|pair| pair[0] != pair[1]), "a row is there once");
}
