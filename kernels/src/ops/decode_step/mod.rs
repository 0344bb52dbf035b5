//! Decode steps of a whole model in one operation: one token per row, or several one after another,
//! if a backend has a kernel for the model.
//!
//! There is no reference: if a backend declines, the blocks are computed operation by operation,
//! which is also what tests compare with.

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

/// Why a backend declines a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Declined(String);

impl std::fmt::Display for Declined {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Declined {}

impl Declined {
    /// With a reason.
    pub fn new(reason: impl Into<String>) -> Self {
        Self(reason.into())
    }
}

/// A pre-norm block.
#[derive(Clone, Debug)]
pub struct DecodeBlock<B: Backend> {
    /// Before attention.
    pub attention_norm: Norm<B>,
    /// Queries, keys and values, `[(n_heads + 2 * n_kv_heads) * head_dim, d_model]`.
    pub qkv: Weight<B>,
    /// Their bias.
    pub qkv_bias: Option<Tensor<B, 1>>,
    /// Placement of queries and keys; the rotation is the same in each block.
    pub placement: Placement<B>,
    /// Output projection, `[d_model, n_heads * head_dim]`.
    pub output: Weight<B>,
    /// Its bias.
    pub output_bias: Option<Tensor<B, 1>>,
    /// Before the feed-forward layer.
    pub feed_forward_norm: Norm<B>,
    /// The router, if the feed-forward layer is a mixture of experts.
    pub router: Option<DecodeRouter<B>>,
    /// First projection, `[d_ff, d_model]`; gate, then up, `[2 * d_ff, d_model]` if gated. Those of
    /// experts are stacked.
    pub up: Weight<B>,
    /// Its bias.
    pub up_bias: Option<Tensor<B, 1>>,
    /// Second projection, `[d_model, d_ff]`. Those of experts are stacked.
    pub down: Weight<B>,
    /// Its bias.
    pub down_bias: Option<Tensor<B, 1>>,
}

/// The router of a mixture of experts.
#[derive(Clone, Debug)]
pub struct DecodeRouter<B: Backend> {
    /// `[n_experts, d_model]`, multiplied in f32.
    pub weight: Tensor<B, 2>,
    /// The bias of its logits, `[n_experts]`.
    pub bias: Option<Tensor<B, 1>>,
    /// Added to scores where experts are chosen, and only there, `[n_experts]`.
    pub choice_bias: Option<Tensor<B, 1>>,
    /// How logits choose experts.
    pub choice: ExpertChoice,
}

/// How a router's logits choose the experts of a token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertChoice {
    /// Experts that each token goes through.
    pub experts_per_token: usize,
    /// Whether scores are a sigmoid of each logit, and not their softmax.
    pub sigmoid: bool,
    /// Whether the scores of a token's experts are divided by their sum.
    pub normalized: bool,
    /// Factor on scores.
    pub scale: f64,
}

/// The model in [`decode_step`].
#[derive(Clone, Debug)]
pub struct DecodeModel<B: Backend> {
    /// `[vocab_size, d_model]`.
    pub embedding: Weight<B>,
    /// Position embeddings, `[positions, d_model]`.
    pub position_embedding: Option<Tensor<B, 2>>,
    /// Output projection, `[vocab_size, d_model]`.
    pub head: Weight<B>,
    /// In order.
    pub blocks: Vec<DecodeBlock<B>>,
    /// After the last.
    pub final_norm: Norm<B>,
    /// The layout of the joint projection.
    pub heads: PackedHeads,
    /// Between the projections of the feed-forward layers.
    pub activation: Activation,
    /// The dtype of hidden states.
    pub activations: FloatDType,
    /// Maximum visible keys of a token, its own included.
    pub window: Option<usize>,
}

impl<B: Backend> DecodeBlock<B> {
    /// Number of experts; 1 without a router.
    fn n_experts(&self) -> usize {
        self.router.as_ref().map_or(1, |router| router.weight.dims()[0])
    }

    /// Its matrices, each with the share of it that a step of so many rows reads: of experts that
    /// many choices, at most all.
    fn matrices(&self, rows: usize) -> [(&Weight<B>, f64); 4] {
        let read = self.router.as_ref().map_or(1.0, |router| {
            (rows * router.choice.experts_per_token).min(self.n_experts()) as f64 / self.n_experts() as f64
        });
        [(&self.qkv, 1.0), (&self.output, 1.0), (&self.up, read), (&self.down, read)]
    }
}

impl<B: Backend> DecodeModel<B> {
    /// Number of positions in its tables.
    fn positions(&self) -> usize {
        let rotary = self.blocks.iter().filter_map(|block| block.placement.rotary.as_ref());
        let rotary = rotary.map(|table| table.cos.dims()[0]);
        rotary.chain(self.position_embedding.as_ref().map(|table| table.dims()[0])).min().unwrap_or(usize::MAX)
    }
}

/// A backend's prepared state for a model and a cache, both of which it keeps alive.
#[derive(Debug)]
pub struct DecodePlan<B: Backend> {
    model: DecodeModel<B>,
    body: DecodeBody,
    /// Size of each layer's cache.
    cache_dims: [usize; 4],
    /// The caches, whose addresses the body may hold.
    cache_ids: Vec<u64>,
}

/// A backend's part of a plan.
#[derive(Debug)]
pub struct DecodeBody {
    /// Maximum rows of a step.
    pub most_rows: usize,
    /// Maximum rows of a step that includes the output head.
    pub head_rows: usize,
    /// Maximum steps per launch, by rows and whether they sample.
    pub most_steps: fn(usize, bool) -> usize,
    /// The backend's state.
    pub body: Box<dyn Any + Send>,
}

impl<B: DecodeStepOps> DecodePlan<B> {
    /// Prepares [`decode_step`] for a model and the caches of its layers.
    ///
    /// # Errors
    /// Why the backend declines.
    ///
    /// # Panics
    /// If the number of caches differs from that of the blocks, or their sizes do not fit the
    /// model's.
    pub fn new(model: DecodeModel<B>, caches: &[LayerCache<B>]) -> Result<Self, Declined> {
        if reference_only() {
            return Err(Declined::new("kernels=reference is set"));
        }
        let planned = Checked::new(DecodePlanned { model: &model, caches });
        let cache_dims = caches.first().ok_or_else(|| Declined::new("there are no blocks"))?.dims();
        let body = B::decode_plan(planned)?;
        Ok(Self { model, body, cache_dims, cache_ids: caches.iter().map(|cache| cache.id).collect() })
    }
}

impl<B: Backend> DecodePlan<B> {
    /// Maximum rows of a step.
    pub fn rows(&self) -> usize {
        self.body.most_rows
    }

    /// Whether a launch for this many rows, which sample or not, may run several steps, and checks
    /// for stop tokens.
    pub fn supports_multi_step(&self, rows: usize, draws: bool) -> bool {
        (self.body.most_steps)(rows, draws) > 1
    }

    /// Maximum steps per launch, at least one, for rows with these token counts at the first step,
    /// which sample or not: all steps must see the same pages.
    pub fn steps(&self, keys: impl ExactSizeIterator<Item = usize>, draws: bool) -> usize {
        let [_, _, page_tokens, _] = self.cache_dims;
        let most = (self.body.most_steps)(keys.len(), draws);
        // Nothing is visible before a row's first page.
        let on_page = |keys: usize| page_tokens - (keys + page_tokens - 2) % page_tokens;
        keys.map(on_page).fold(most, usize::min).max(1)
    }
}

/// Operands of a plan.
#[derive(Debug)]
pub struct DecodePlanned<'a, B: Backend> {
    /// The model.
    pub model: &'a DecodeModel<B>,
    /// The cache of each of its blocks.
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
            let n_experts = block.n_experts();
            if let Some(DecodeRouter { weight, bias, choice_bias, choice }) = &block.router {
                part(op, "router", weight).float().fits(n_experts > 0 && weight.dims()[1] == d_model, &gamma);
                for bias in [bias, choice_bias].into_iter().flatten() {
                    part(op, "the router's bias", bias).float().shaped(&[n_experts], &gamma);
                }
                let k = choice.experts_per_token;
                assert!(k > 0 && k <= n_experts, "{op}: {k} of {n_experts} experts per token");
            }
            let [up_rows, _] = block.up.dims();
            let up_width = up_rows / n_experts.max(1);
            let whole = up_rows == n_experts * up_width && (!activation.gated || up_width.is_multiple_of(2));
            for (name, weight, shape, bias) in [
                ("qkv", &block.qkv, [width, d_model], &block.qkv_bias),
                ("output", &block.output, [d_model, n_heads * head_dim], &block.output_bias),
                ("up", &block.up, [up_rows, d_model], &block.up_bias),
                ("down", &block.down, [n_experts * d_model, activation.output_width(up_width)], &block.down_bias),
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

/// Operands of [`decode_step`].
#[derive(Debug)]
pub struct DecodeStep<'a, B: Backend> {
    /// The model, with the backend's state.
    pub plan: &'a DecodePlan<B>,
    /// `[rows]`.
    pub tokens: Tensor<B, 1, Int>,
    /// Their positions.
    pub at: &'a CachedTokens<B>,
    /// The caches of the plan.
    pub caches: &'a mut [LayerCache<B>],
    /// The sampling of the next tokens, if the step includes it.
    pub draw: Option<StepDraw<'a, B>>,
    /// The number of steps.
    pub ahead: MultiStep<'a, B>,
}

/// Consecutive steps, each with the tokens predicted by the one before.
#[derive(Debug)]
pub struct MultiStep<'a, B: Backend> {
    /// Number of steps, at least one.
    pub steps: usize,
    /// Stop tokens of each row, `[rows, most]`, padded with -1, at most
    /// [`MAX_STOP_TOKENS`](Self::MAX_STOP_TOKENS). If the plan [supports several
    /// steps](DecodePlan::supports_multi_step), a row that reads one of these repeats it; and if
    /// all rows do so at the start, nothing is computed, and hidden states and logits are invalid.
    pub stop_tokens: Option<&'a Tensor<B, 2, Int>>,
}

impl<B: Backend> MultiStep<'_, B> {
    /// Maximum stop tokens of a row.
    pub const MAX_STOP_TOKENS: usize = 8;

    /// Pads the rows' stop tokens for [`stop_tokens`](Self::stop_tokens), dropping those beyond the
    /// maximum.
    pub fn pad_stop_tokens(rows: &[Vec<u32>], device: &B::Device) -> Tensor<B, 2, Int> {
        let stop_tokens: Vec<&[u32]> =
            rows.iter().map(|stop_tokens| &stop_tokens[..stop_tokens.len().min(Self::MAX_STOP_TOKENS)]).collect();
        padded_rows(&stop_tokens, -1, device)
    }

    /// One step, without stop tokens.
    pub fn one() -> Self {
        Self { steps: 1, stop_tokens: None }
    }
}

/// Sampling within a step.
#[derive(Debug)]
pub struct StepDraw<'a, B: Backend> {
    /// Sampling parameters of each row.
    pub rows: &'a SampledRows<B>,
    /// Token counts of rows with lines; sampled tokens are added.
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
    /// The last position in the model's tables, and the pages of the rows.
    #[cfg(feature = "cuda")]
    fn last_position(&self) -> usize {
        let [_, _, page_tokens, _] = self.plan.cache_dims;
        self.plan.model.positions().min(self.at.pages.dims()[1] * page_tokens) - 1
    }
}

/// Fused decode steps of a backend.
pub trait DecodeStepOps: CachedAttentionOps {
    /// Prepares a [`DecodePlan`]; declines by default.
    ///
    /// # Errors
    /// Why it declines this model or device.
    fn decode_plan(planned: Checked<DecodePlanned<'_, Self>>) -> Result<DecodeBody, Declined> {
        let _ = planned;
        Err(Declined::new("this backend has no kernel for a whole step"))
    }

    /// [`decode_step`] with a plan of this backend.
    ///
    /// # Errors
    /// If it turns out not to run on this device.
    fn decode_step(operands: Checked<DecodeStep<'_, Self>>) -> Result<Decoded<Self>, Declined> {
        let _ = operands;
        Err(Declined::new("this backend has no kernel for a whole step"))
    }
}

/// The results of a step.
#[derive(Clone, Debug)]
pub struct Decoded<B: Backend> {
    /// `[rows, d_model]`, after the last norm.
    pub hidden: Tensor<B, 2>,
    /// The output head's results, if the backend computed them.
    pub predicted: Option<Predicted<B>>,
    /// Positions of the last step's tokens, and of the next ones, `[1, rows]` each, if the backend
    /// computed them.
    pub positions: Option<[Tensor<B, 2, Int>; 2]>,
}

parts!(Decoded { hidden, predicted, positions });

/// The output head's results.
#[derive(Clone, Debug)]
pub struct Predicted<B: Backend> {
    /// `[rows, vocab_size]`, f32.
    pub logits: Tensor<B, 2>,
    /// The sampled token, or else the greedy one, the first of equals, `[rows]`; -1 if a logit is
    /// NaN.
    pub next: Tensor<B, 1, Int>,
    /// The tokens of each step, `[steps, rows]`, ending with `next`.
    pub tokens: Tensor<B, 2, Int>,
    /// Whether it was sampled.
    pub drawn: bool,
}

parts!(Predicted { logits, next, tokens } kept drawn);

/// Processes one token of each row, `[rows]`, through embedding, all blocks and the final norm, and
/// through the output head if the backend fuses it. The next tokens are then included: greedy ones
/// or, if the backend supports it, those of the requested `draw`, like [`draw`](crate::draw()).
/// Keys and values are written to the rows' pages. It has no gradient. Also returns the rows to
/// [continue](CachedTokens::next) from, those of `at` after the last step.
///
/// With several steps, each processes the tokens predicted by the one before; hidden states and
/// logits are those of the last.
///
/// Results differ from those of separate operations by rounding: the residual stream is f32 here.
///
/// # Errors
/// If it turns out not to run on this device. The pages may contain keys and values of the token by
/// then, which are valid.
///
/// # Panics
/// If sizes do not fit, the caches are not those of the plan, a page that a row writes is listed
/// twice, or there are more rows than [`rows`](DecodePlan::rows) or more steps than
/// [`steps`](DecodePlan::steps); or in a rehearsal of [`compile_ahead`](crate::compile_ahead()),
/// which would corrupt the cache.
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
        let rows = at.rows.len();
        let of_rows = |rows: usize| {
            let matrices = model.blocks.iter().flat_map(move |block| block.matrices(rows));
            matrices.chain((at.rows.len() <= body.head_rows).then_some((&model.head, 1.0)))
        };
        let bytes = |(weight, read): (&Weight<B>, f64)| (weight.operand().bytes() as f64 * read) as u64;
        let weights: u64 = of_rows(rows).map(bytes).sum();
        // A row is multiplied by its own experts.
        let numbers =
            |(weight, read): (&Weight<B>, f64)| (weight.dims().iter().product::<usize>() as f64 * read) as usize;
        let products: usize = of_rows(1).map(numbers).sum();
        let read: usize = at.rows.iter().map(|row| at.window.map_or(row.keys, |window| window.min(row.keys))).sum();
        let n_kv_heads = model.heads.n_kv_heads;
        let cached = 2 * model.blocks.len() * n_kv_heads * read * caches[0].head_bytes();
        let flops = (2 * rows * products) as u64;
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
