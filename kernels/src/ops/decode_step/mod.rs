//! One token more of each row through all blocks at once, or several one after another, where a backend has a kernel for the model.
//!
//! There is no reference beside it: a backend that declines leaves the blocks to be computed operation by operation, and that is
//! what the result is compared with.

mod autodiff;
#[cfg(feature = "ndarray")]
mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod cubecl;
#[cfg(feature = "cuda")]
mod cuda;

use std::any::Any;

use burn::tensor::backend::Backend;
use burn::tensor::{FloatDType, Int, Tensor};

#[cfg(feature = "cuda")]
pub(crate) use self::cuda::hopper_sources;

use super::activation::Activation;
use super::cached_attention::{CachedAttentionOps, CachedTokens, LayerCache, Placement};
use super::head_sample::{SampledRows, TokenCounts};
use super::norm::Norm;
use crate::checked::{Checked, Operands, part};
use crate::mutation::{call, parts};
use crate::packed_heads::PackedHeads;
use crate::quant::Weight;
use crate::recorder::{self, Call};
use crate::rehearsal;
use crate::selection::reference_only;
use crate::tensor::padded_rows;

/// Why a backend leaves a model's blocks to be computed operation by operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Declined(String);

impl std::fmt::Display for Declined {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Declined {}

impl Declined {
    /// For a reason.
    pub fn new(reason: impl Into<String>) -> Self {
        Self(reason.into())
    }
}

/// A block whose norms stand before its layers.
#[derive(Clone, Debug)]
pub struct DecodeBlock<B: Backend> {
    /// Before attention.
    pub attention_norm: Norm<B>,
    /// Queries, keys and values, `[(n_heads + 2 * n_kv_heads) * head_dim, d_model]`.
    pub qkv: Weight<B>,
    /// Their bias.
    pub qkv_bias: Option<Tensor<B, 1>>,
    /// What happens to queries and keys; the rotation is the same in each block.
    pub placement: Placement<B>,
    /// Output projection, `[d_model, n_heads * head_dim]`.
    pub output: Weight<B>,
    /// Its bias.
    pub output_bias: Option<Tensor<B, 1>>,
    /// Before the feed-forward layer.
    pub feed_forward_norm: Norm<B>,
    /// First projection, `[d_ff, d_model]`; gate, then up, `[2 * d_ff, d_model]` where the activation gates.
    pub up: Weight<B>,
    /// Its bias.
    pub up_bias: Option<Tensor<B, 1>>,
    /// Second projection, `[d_model, d_ff]`.
    pub down: Weight<B>,
    /// Its bias.
    pub down_bias: Option<Tensor<B, 1>>,
}

/// What [`decode_step`] computes with, but for the tokens and the cache.
#[derive(Clone, Debug)]
pub struct DecodeModel<B: Backend> {
    /// `[vocab_size, d_model]`.
    pub embedding: Weight<B>,
    /// A row for each position, `[positions, d_model]`.
    pub position_embedding: Option<Tensor<B, 2>>,
    /// Output projection, `[vocab_size, d_model]`.
    pub head: Weight<B>,
    /// From the first to the last.
    pub blocks: Vec<DecodeBlock<B>>,
    /// After the last.
    pub final_norm: Norm<B>,
    /// How queries, keys and values lie in their projection.
    pub heads: PackedHeads,
    /// Between the projections of the feed-forward layers.
    pub activation: Activation,
    /// The dtype of hidden states.
    pub activations: FloatDType,
    /// Keys that a token sees at the most, its own included.
    pub window: Option<usize>,
}

impl<B: Backend> DecodeModel<B> {
    /// Positions that its tables have.
    fn positions(&self) -> usize {
        let rotary = self.blocks.iter().filter_map(|block| block.placement.rotary.as_ref());
        let rotary = rotary.map(|table| table.cos.dims()[0]);
        rotary.chain(self.position_embedding.as_ref().map(|table| table.dims()[0])).min().unwrap_or(usize::MAX)
    }
}

/// What a backend has made ready for a model and a cache. It holds both: as long as it is there, their memory is theirs.
#[derive(Debug)]
pub struct DecodePlan<B: Backend> {
    model: DecodeModel<B>,
    body: DecodeBody,
    /// Of the cache of each layer.
    cache_dims: [usize; 4],
    /// The caches, whose addresses the body may have.
    cache_ids: Vec<u64>,
}

/// A backend's own part of a plan.
#[derive(Debug)]
pub struct DecodeBody {
    /// The most rows of a step.
    pub most_rows: usize,
    /// The most rows of a step that has the head in it.
    pub head_rows: usize,
    /// The most steps of a launch, by its rows and whether they draw.
    pub most_steps: fn(usize, bool) -> usize,
    /// What the backend made ready.
    pub body: Box<dyn Any + Send>,
}

impl<B: DecodeStepOps> DecodePlan<B> {
    /// Makes ready what [`decode_step`] needs for a model and the cache of its layers.
    ///
    /// # Errors
    /// Why it is left to be computed operation by operation.
    ///
    /// # Panics
    /// If there is not one cache for each block, or their sizes do not fit the model's.
    pub fn new(model: DecodeModel<B>, caches: &[LayerCache<B>]) -> Result<Self, Declined> {
        if reference_only() {
            return Err(Declined::new("the references are asked for"));
        }
        let planned = Checked::new(DecodePlanned { model: &model, caches });
        let cache_dims = caches.first().ok_or_else(|| Declined::new("there are no blocks"))?.dims();
        let body = B::decode_plan(planned)?;
        Ok(Self { model, body, cache_dims, cache_ids: caches.iter().map(|cache| cache.id).collect() })
    }
}

impl<B: Backend> DecodePlan<B> {
    /// The most rows that a step takes.
    pub fn rows(&self) -> usize {
        self.body.most_rows
    }

    /// Whether a launch for so many rows, which draw or not, may take several steps, and so looks for tokens that end texts.
    pub fn supports_multi_step(&self, rows: usize, draws: bool) -> bool {
        (self.body.most_steps)(rows, draws) > 1
    }

    /// The most steps of a launch for rows that have so many tokens with those of the first step, and draw or not: all of them see
    /// the pages that the first one sees. One at least.
    pub fn steps(&self, keys: impl ExactSizeIterator<Item = usize>, draws: bool) -> usize {
        let [_, _, page_tokens, _] = self.cache_dims;
        let most = (self.body.most_steps)(keys.len(), draws);
        // Before a row's first page there is nothing to see.
        let on_page = |keys: usize| page_tokens - (keys + page_tokens - 2) % page_tokens;
        keys.map(on_page).fold(most, usize::min).max(1)
    }
}

/// What a plan is made of.
#[derive(Debug)]
pub struct DecodePlanned<'a, B: Backend> {
    /// The model.
    pub model: &'a DecodeModel<B>,
    /// A cache for each of its blocks.
    pub caches: &'a [LayerCache<B>],
}

impl<B: Backend> Operands for DecodePlanned<'_, B> {
    fn check(&self) {
        let op = "decode_step";
        let DecodeModel { embedding, position_embedding, head, blocks, final_norm, heads, activation, window, .. } =
            self.model;
        assert!(*window != Some(0), "{op}: a window of no keys");
        let [_, d_model] = embedding.dims();
        let gamma = part(op, "gamma", &final_norm.gamma).float();
        embedding.check(op, "embedding", final_norm.gamma.dims() == [d_model], &gamma);
        head.check(op, "head", head.dims() == embedding.dims(), &gamma);
        if let Some(table) = position_embedding {
            part(op, "position_embedding", table).float().fits(table.dims()[1] == d_model, &gamma);
        }
        assert!(blocks.len() == self.caches.len(), "{op}: a cache for each block");
        let PackedHeads { n_heads, n_kv_heads, head_dim } = *heads;
        let width = heads.width();
        for (block, cache) in blocks.iter().zip(self.caches) {
            block.attention_norm.check(op, &gamma, d_model);
            block.feed_forward_norm.check(op, &gamma, d_model);
            heads.check(op, "qkv", [1, 1, block.qkv.dims()[0]]);
            let [up_width, _] = block.up.dims();
            let whole = !activation.gated || up_width.is_multiple_of(2);
            for (name, weight, shape, bias) in [
                ("qkv", &block.qkv, [width, d_model], &block.qkv_bias),
                ("output", &block.output, [d_model, n_heads * head_dim], &block.output_bias),
                ("up", &block.up, [up_width, d_model], &block.up_bias),
                ("down", &block.down, [d_model, activation.output_width(up_width)], &block.down_bias),
            ] {
                weight.check(op, name, weight.dims() == shape && whole, &gamma);
                if let Some(bias) = bias {
                    part(op, "bias", bias).float().shaped(&shape[..1], &gamma);
                }
            }
            let norms = [&block.placement.query_norm, &block.placement.key_norm].map(Option::as_ref);
            norms.into_iter().flatten().for_each(|norm| norm.check(op, &gamma, head_dim));
            if let Some(table) = &block.placement.rotary {
                table.check(op, &gamma, head_dim);
            }
            cache.check(op, [n_kv_heads, head_dim], &gamma);
            assert!(cache.dims() == self.caches[0].dims(), "{op}: caches of one size");
        }
        final_norm.check(op, &gamma, d_model);
    }
}

/// What [`decode_step`] computes with.
#[derive(Debug)]
pub struct DecodeStep<'a, B: Backend> {
    /// The model, and what the backend made ready.
    pub plan: &'a DecodePlan<B>,
    /// `[rows]`.
    pub tokens: Tensor<B, 1, Int>,
    /// Where they stand.
    pub at: &'a CachedTokens<B>,
    /// The caches that the plan was made with.
    pub caches: &'a mut [LayerCache<B>],
    /// How the tokens behind these are drawn, if the step is to draw them.
    pub draw: Option<StepDraw<'a, B>>,
    /// How many follow each other.
    pub ahead: MultiStep<'a, B>,
}

/// Steps one after another, each with the tokens that the one before predicts.
#[derive(Debug)]
pub struct MultiStep<'a, B: Backend> {
    /// How many: one at least.
    pub steps: usize,
    /// Tokens that end the text of each row, `[rows, most]`, -1 where it has fewer, and up to [`MAX_STOP_TOKENS`](Self::MAX_STOP_TOKENS) of them. Where the plan
    /// [goes ahead](DecodePlan::supports_multi_step), a row that reads one of these keeps it, and where all rows do so as the steps begin, nothing is computed: hidden
    /// states and logits are not to be used then.
    pub stop_tokens: Option<&'a Tensor<B, 2, Int>>,
}

impl<B: Backend> MultiStep<'_, B> {
    /// Tokens that end a row's text, at the most.
    pub const MAX_STOP_TOKENS: usize = 8;

    /// Tokens that end texts as [`ends`](Self::ends) has them, but for those beyond the most.
    pub fn pad_stop_tokens(texts: &[Vec<u32>], device: &B::Device) -> Tensor<B, 2, Int> {
        let stop_tokens: Vec<&[u32]> =
            texts.iter().map(|stop_tokens| &stop_tokens[..stop_tokens.len().min(Self::MAX_STOP_TOKENS)]).collect();
        padded_rows(&stop_tokens, -1, device)
    }

    /// One step of texts that have no ends.
    pub fn one() -> Self {
        Self { steps: 1, stop_tokens: None }
    }
}

/// How a step draws the tokens behind its own.
#[derive(Debug)]
pub struct StepDraw<'a, B: Backend> {
    /// How each row draws.
    pub rows: &'a SampledRows<B>,
    /// The texts of rows that have lines; the chosen tokens are counted there.
    pub counts: Option<&'a mut TokenCounts<B>>,
}

impl<B: Backend> Operands for DecodeStep<'_, B> {
    fn check(&self) {
        let op = "decode_step";
        let rows = self.at.rows.len();
        let DecodePlan { model, body, cache_dims, cache_ids } = self.plan;
        let gamma = part(op, "gamma", &model.final_norm.gamma);
        let tokens = part(op, "tokens", &self.tokens).integer();
        let positions = part(op, "positions", &self.at.positions).integer().shaped(&[1, rows], &gamma);
        part(op, "tokens", &self.tokens).shaped(&[rows], &positions).alike(&positions);
        part(op, "pages", &self.at.pages).fits(self.at.pages.dims()[0] == rows, &tokens).alike(&positions);
        let most_rows = body.most_rows;
        assert!((1..=most_rows).contains(&rows), "{op}: {rows} rows of up to {most_rows}");
        let MultiStep { steps, stop_tokens } = self.ahead;
        let most = self.plan.steps(self.at.rows.iter().map(|row| row.keys), self.draw.is_some());
        assert!((1..=most).contains(&steps), "{op}: {steps} steps of up to {most}");
        assert!(self.at.window == model.window, "{op}: keys that a token sees");
        if let Some(stop_tokens) = stop_tokens {
            let fits = stop_tokens.dims()[0] == rows && stop_tokens.dims()[1] <= MultiStep::<B>::MAX_STOP_TOKENS;
            part(op, "stop_tokens", stop_tokens).fits(fits, &tokens).alike(&positions);
        }
        if let Some(StepDraw { rows: sampled, counts }) = &self.draw {
            sampled.check(op, counts.as_deref(), [rows, model.embedding.dims()[0]], &tokens);
        }
        let positions = model.positions();
        let planned = self.caches.iter().map(|cache| cache.id).eq(cache_ids.iter().copied());
        assert!(planned, "{op}: other caches than those that the plan was made with");
        let [pages, _, page_tokens, _] = *cache_dims;
        for row in &self.at.rows {
            assert!(row.tokens == 1, "{op}: one token of each row");
            let keys = row.keys + steps - 1;
            assert!(keys <= positions, "{op}: {keys} keys in a table of {positions} positions");
            let room = row.pages.len().saturating_mul(page_tokens);
            assert!(keys <= room, "{op}: {keys} keys in {} pages of {page_tokens}", row.pages.len());
            let furthest = row.pages.iter().max().map_or(0, |page| *page as usize);
            assert!(furthest < pages, "{op}: page {furthest} of a cache of {pages}");
        }
        self.at.assert_apart(op, page_tokens);
    }
}

impl<B: Backend> DecodeStep<'_, B> {
    /// The last position that the model's tables have, and the pages of the rows.
    #[cfg(feature = "cuda")]
    fn last_position(&self) -> usize {
        let [_, _, page_tokens, _] = self.plan.cache_dims;
        self.plan.model.positions().min(self.at.pages.dims()[1] * page_tokens) - 1
    }
}

/// Whole decode steps on a backend.
pub trait DecodeStepOps: CachedAttentionOps {
    /// Body of [`DecodePlan::new`]; by default there is none.
    ///
    /// # Errors
    /// Why there is none for this model, or on this device.
    fn decode_plan(planned: Checked<DecodePlanned<'_, Self>>) -> Result<DecodeBody, Declined> {
        let _ = planned;
        Err(Declined::new("this backend has no kernel for a whole step"))
    }

    /// Body of [`decode_step`], of a plan that this backend made.
    ///
    /// # Errors
    /// If it turns out not to run on this device.
    fn decode_step(operands: Checked<DecodeStep<'_, Self>>) -> Result<Decoded<Self>, Declined> {
        let _ = operands;
        Err(Declined::new("this backend has no kernel for a whole step"))
    }
}

/// What a step gives.
#[derive(Clone, Debug)]
pub struct Decoded<B: Backend> {
    /// `[rows, d_model]`, after the last norm.
    pub hidden: Tensor<B, 2>,
    /// What the head makes of them, where the backend computed that with them.
    pub predicted: Option<Predicted<B>>,
    /// Where the last step's tokens stand, and where those behind them will, `[1, rows]` each, likewise.
    pub positions: Option<[Tensor<B, 2, Int>; 2]>,
}

parts!(Decoded { hidden, predicted, positions });

/// What a model's head says of some rows.
#[derive(Clone, Debug)]
pub struct Predicted<B: Backend> {
    /// `[rows, vocab_size]`, f32.
    pub logits: Tensor<B, 2>,
    /// The token that was drawn, or else the one with the largest logit, the first of several, `[rows]`; -1 where a logit is not a number.
    pub next: Tensor<B, 1, Int>,
    /// The same of each step, `[steps, rows]`, the last of which is `next`.
    pub tokens: Tensor<B, 2, Int>,
    /// Whether it was drawn.
    pub drawn: bool,
}

parts!(Predicted { logits, next, tokens } kept drawn);

/// One token more of each row, `[rows]`, through embedding, all blocks and the last norm, and through the head where the backend
/// does that at once: then the next tokens come with it, the likeliest, or, where it does that, too, those of the `draw` that is
/// asked for, as [`draw`](crate::draw()) makes it. Keys and values go into the pages of the rows. It has no gradient. With what the step gives come the rows to go
/// [on](CachedTokens::next) from, which are those of `at` after the last step.
///
/// Of several steps `ahead`, each reads the tokens that the one before predicts; hidden states and logits are those of the last.
///
/// Numbers differ from those of the operations one by one by rounding: the residual stream is f32 here.
///
/// # Errors
/// If it turns out not to run on this device. The pages may have got keys and values of the token by then, which are the right ones.
///
/// # Panics
/// If the sizes do not fit each other, the caches are not those that the plan was made with, a page that a row writes into is
/// listed twice, or there are more rows than [`rows`](DecodePlan::rows), or more steps than [`steps`](DecodePlan::steps); or in a
/// rehearsal of [`compile_ahead`](crate::compile_ahead()), where the cache would keep what means nothing.
pub fn decode_step<B: DecodeStepOps>(
    plan: &DecodePlan<B>,
    tokens: Tensor<B, 1, Int>,
    at: &CachedTokens<B>,
    caches: &mut [LayerCache<B>],
    draw: Option<StepDraw<'_, B>>,
    ahead: MultiStep<'_, B>,
) -> Result<(Decoded<B>, CachedTokens<B>), Declined> {
    let DecodePlan { model, body, .. } = plan;
    let steps = ahead.steps;
    let _op = recorder::op("decode_step", || {
        let (tokens, keys) = (recorder::operand(&tokens), caches[0].keys.operand());
        let matrices = model.blocks.iter().flat_map(|block| [&block.qkv, &block.output, &block.up, &block.down]);
        let matrices = matrices.chain((at.rows.len() <= body.head_rows).then_some(&model.head));
        let weights: u64 = matrices.clone().map(|weight| weight.operand().bytes()).sum();
        let products: usize = matrices.map(|weight| weight.dims().iter().product::<usize>()).sum();
        let read: usize = at.rows.iter().map(|row| at.window.map_or(row.keys, |window| window.min(row.keys))).sum();
        let n_kv_heads = model.heads.n_kv_heads;
        let cached = 2 * model.blocks.len() * n_kv_heads * read * caches[0].head_bytes();
        let flops = (2 * at.rows.len() * products) as u64;
        Call {
            bytes: steps as u64 * (weights + cached as u64),
            flops: steps as u64 * flops,
            inputs: vec![tokens, keys],
        }
    });
    rehearsal::refuse("decode_step");
    let decoded =
        call!(B: DecodeStepOps::decode_step(Checked::new(DecodeStep { plan, tokens, at, caches, draw, ahead })))?;
    let at = match &decoded.positions {
        Some(positions) => at.after(steps, positions.clone()),
        None => at.clone(),
    };
    Ok((decoded, at))
}
