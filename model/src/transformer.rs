//! The transformer: embeddings, blocks, final norm and output head.

use std::collections::{HashMap, HashSet};

use burn::module::{Module, Param, ParamId};
use burn::tensor::activation::log_softmax;
use burn::tensor::backend::ExecutionError;
use burn::tensor::{DType, FloatDType, Int, Tensor, TensorData};

use fireclay_kernels::recorder::part;
use fireclay_kernels::{
    AttentionMask, Backend, CacheDType, CachedTokens, Declined, DecodeBlock, DecodeModel, DecodePlan, Decoded,
    DeviceTensor, Dropout, F32Products, Format, HeadLossOptions, MultiStep, PackedHeads, Predicted, RandomKey,
    RotaryTable, SampledRows, StepDraw, TokenCounts, Weight, draw, dropout, embed, embed_add, head_log_probs,
    head_logits, head_loss, head_sample, head_sample_logits, linear, linear_add, norm, reshape,
};

use crate::block::Block;
use crate::cache::{Cache, RowId, Weights};
use crate::classifier::ClassifierHead;
use crate::config::{AttentionDirection, ConfigError, NormPlacement, Positions, TransformerConfig};
use crate::convolution::around;
use crate::feed_forward::{Dense, Experts, FeedForward, Projection, RouterLosses, Routing, RoutingRecord};
use crate::heads::UtteranceHeads;
use crate::linear::{Adapter, Linear};
use crate::matrix::Matrix;
use crate::parameters::{Initializer, LayerNorm, set_trained, shaped_parameters};
use crate::pass::{Pass, Seen};

/// One transformer for training, prefill and decode, of any family.
#[derive(Module, Debug)]
pub struct Transformer<B: Backend> {
    /// Token embeddings, `[vocab_size, d_model]`.
    pub embedding: Matrix<B>,
    /// Position embeddings, `[context_length, d_model]`.
    pub position_embedding: Option<Param<Tensor<B, 2>>>,
    /// Token type embeddings, `[token_types, d_model]`.
    pub token_type_embedding: Option<Param<Tensor<B, 2>>>,
    /// A convolution over the embeddings, `[d_model, width * d_model]`, whose result is added to
    /// them: columns are a token's neighbours from left to right.
    pub convolution: Option<Param<Tensor<B, 2>>>,
    /// The norm of the embeddings, with post-norm blocks and ModernBERT's.
    pub embedding_norm: Option<LayerNorm<B>>,
    /// The blocks, in order.
    pub blocks: Vec<Block<B>>,
    /// The final norm, unless blocks end with one.
    pub final_norm: Option<LayerNorm<B>>,
    /// The output projection `[vocab_size, d_model]`, unless it is tied to the embedding.
    pub head: Option<Matrix<B>>,
    /// Heads for utterances, if it is such an encoder.
    pub heads: Option<UtteranceHeads<B>>,
    /// The head for sequences, if it is a classifier.
    pub classifier: Option<ClassifierHead<B>>,
    #[module(skip)]
    config: TransformerConfig,
    /// `0..context_length`, so that a pass need not upload it.
    positions: Tensor<B, 1, Int>,
    /// Cosines of the rotary tables of the layers, and sines.
    rotary_cos: Vec<Tensor<B, 2>>,
    rotary_sin: Vec<Tensor<B, 2>>,
    #[module(skip)]
    activations: FloatDType,
    #[module(skip)]
    f32_products: F32Products,
    /// Changes whenever this model's methods change the weights that operations read.
    #[module(skip)]
    weights: Weights,
    #[module(skip)]
    int8_cache: bool,
    #[module(skip)]
    dropout_key: Option<RandomKey>,
    /// Tokens of the batch that other ranks have, before those that this model is given.
    #[module(skip)]
    tokens_before: usize,
    /// The factors on routers' losses, if they are to be computed.
    #[module(skip)]
    router_losses: Option<RouterLosses>,
}

/// The input of a forward pass.
#[derive(Clone, Debug)]
pub struct Tokens<B: Backend> {
    pub(crate) ids: Tensor<B, 2, Int>,
    types: Option<Tensor<B, 2, Int>>,
    lengths: Option<Tensor<B, 1, Int>>,
    document_starts: Option<Tensor<B, 2, Int>>,
}

/// Results of a cached pass, for each row's last token.
#[derive(Clone, Debug)]
pub struct Hidden<B: Backend> {
    states: Tensor<B, 2>,
    /// Logits and samples, if they were computed with them.
    predicted: Option<Predicted<B>>,
    /// Hidden states of all prefill tokens, `[tokens, d_model]`, if requested.
    of_prompts: Option<Tensor<B, 2>>,
}

/// Tokens of decode rows, and of prefill rows.
type StepTokens<'a, B> = (Option<(Tensor<B, 1, Int>, &'a [RowId])>, &'a [(RowId, &'a [u32])]);

/// A sampled token per row, with its logits: see
/// [`next_tokens_and_states`](Transformer::next_tokens_and_states).
#[derive(Clone, Debug)]
pub struct NextTokens<B: Backend> {
    /// `[rows]`.
    pub tokens: Tensor<B, 1, Int>,
    /// Logits, f32 `[rows, vocab_size]`, before biases and penalties.
    pub logits: Tensor<B, 2>,
    /// Hidden states of all tokens of the `prefill` rows, `[tokens, d_model]`, concatenated, after
    /// the final norm; if requested.
    pub prompt_states: Option<Tensor<B, 2>>,
}

/// Consecutive tokens of each row: see [`decode_multi_step`](Transformer::decode_multi_step).
#[derive(Clone, Debug)]
pub struct MultiStepTokens<B: Backend> {
    /// `[steps, rows]`.
    pub tokens: Tensor<B, 2, Int>,
    /// The last of them, `[rows]`, which are not in the cache yet.
    pub last: Tensor<B, 1, Int>,
}

impl<B: Backend> Hidden<B> {
    /// Hidden states `[rows, d_model]`, in the dtype of activations, after the final norm.
    pub fn states(&self) -> Tensor<B, 2> {
        self.states.clone()
    }
}

impl<B: Backend> From<Tensor<B, 2>> for Hidden<B> {
    fn from(states: Tensor<B, 2>) -> Self {
        Self { states, predicted: None, of_prompts: None }
    }
}

impl<B: Backend> Tokens<B> {
    /// Sets the type of each token, `[batch_size, seq_length]`; zero by default.
    pub fn with_types(mut self, types: Tensor<B, 2, Int>) -> Self {
        self.types = Some(types);
        self
    }

    /// Sets the length of each row, `[batch_size]`: the rest is padding, which is not attended to.
    /// For bidirectional models; a causal one never attends to later tokens.
    pub fn with_lengths(mut self, lengths: Tensor<B, 1, Int>) -> Self {
        self.lengths = Some(lengths);
        self
    }

    /// Sets the column where each token's document starts, `[batch_size, seq_length]`: earlier
    /// tokens are not attended to. For causal models.
    pub fn with_document_starts(mut self, starts: Tensor<B, 2, Int>) -> Self {
        self.document_starts = Some(starts);
        self
    }
}

impl<B: Backend> From<Tensor<B, 2, Int>> for Tokens<B> {
    fn from(ids: Tensor<B, 2, Int>) -> Self {
        Self { ids, types: None, lengths: None, document_starts: None }
    }
}

/// Values of a matrix that are sampled by [`TransformerConfig::init_in`].
const MOST_SAMPLED: usize = 1 << 22;

impl TransformerConfig {
    /// A transformer of this shape with parameters sampled from `seed`, the same on every backend.
    ///
    /// # Errors
    /// If the config contradicts itself.
    pub fn init<B: Backend>(&self, seed: u64, device: &B::Device) -> Result<Transformer<B>, ConfigError> {
        self.init_with(&mut Initializer::<B>::new(seed, device))
    }

    /// A transformer with matrices of a dtype, for measurements: of large matrices, the first four
    /// million values are sampled, and rows repeat after these, since the host would take minutes
    /// for billions.
    ///
    /// # Errors
    /// If the config contradicts itself.
    pub fn init_in<B: Backend>(
        &self,
        seed: u64,
        dtype: FloatDType,
        device: &B::Device,
    ) -> Result<Transformer<B>, ConfigError> {
        self.init_with(&mut Initializer::<B>::new(seed, device).with_matrices(dtype, MOST_SAMPLED))
    }

    /// A transformer of this shape, initialized by `init`.
    pub(crate) fn init_with<B: Backend>(&self, init: &mut Initializer<'_, B>) -> Result<Transformer<B>, ConfigError> {
        self.validate()?;
        let device = init.device();
        let rotary = self.rotary_positions().filter_map(|positions| match positions {
            Positions::Rotary { base, scaling } => {
                let frequencies = scaling.frequencies(self.rotated(), *base);
                Some(RotaryTable::<B>::new(self.context_length, &frequencies, scaling.magnitude(), device))
            }
            Positions::Learned | Positions::None => None,
        });
        let (rotary_cos, rotary_sin) = rotary.map(|table| (table.cos, table.sin)).unzip();
        let mut table = |rows: usize| init.matrix([rows, self.d_model], self.init_deviation);
        let embedding = table(self.vocab_size);
        let position_embedding = (self.positions == Positions::Learned).then(|| table(self.context_length));
        let token_type_embedding = (self.token_types > 0).then(|| table(self.token_types));
        let head = (!self.tied_embeddings).then(|| table(self.vocab_size));
        let convolution = (self.convolution > 0)
            .then(|| init.matrix([self.d_model, self.convolution * self.d_model], self.init_deviation));
        let norm = |init: &Initializer<'_, B>| init.norm(self.d_model, self.norm, self.norm_bias, self.norm_epsilon);
        Ok(Transformer {
            embedding: embedding.into(),
            position_embedding,
            token_type_embedding,
            convolution,
            embedding_norm: (self.embedding_norm || self.norm_placement == NormPlacement::Post).then(|| norm(init)),
            blocks: self.layers().map(|layer| Block::new(&layer, init)).collect(),
            final_norm: (self.norm_placement != NormPlacement::Post).then(|| norm(init)),
            head: head.map(Matrix::from),
            heads: (self.tags > 0).then(|| UtteranceHeads::new(self, init)),
            classifier: self.classifier.as_ref().map(|settings| ClassifierHead::new(self, settings, init)),
            config: self.clone(),
            positions: Tensor::arange(0..self.context_length as i64, device),
            rotary_cos,
            rotary_sin,
            activations: FloatDType::F32,
            f32_products: F32Products::Exact,
            weights: Weights::new(),
            int8_cache: false,
            dropout_key: None,
            tokens_before: 0,
            router_losses: None,
        })
    }
}

impl<B: Backend> Transformer<B> {
    /// The config.
    pub fn config(&self) -> &TransformerConfig {
        &self.config
    }

    /// Sets the dtype of activations and products: f32, the default, or bf16. Parameters keep their
    /// dtype.
    pub fn with_activations(mut self, dtype: FloatDType) -> Self {
        if dtype != self.activations {
            self.take_copies();
        }
        self.weights = Weights::new();
        self.activations = dtype;
        self
    }

    /// Sets how products of f32 are computed, exactly by default, in this model and in its backward
    /// passes.
    pub fn with_f32_products(mut self, products: F32Products) -> Self {
        self.weights = Weights::new();
        self.f32_products = products;
        if let Some(heads) = &mut self.heads {
            heads.f32_products = products;
        }
        if let Some(classifier) = &mut self.classifier {
            classifier.f32_products = products;
        }
        self
    }

    /// How products of f32 are computed.
    pub fn f32_products(&self) -> F32Products {
        self.f32_products
    }

    /// Makes a copy of every large matrix in the dtype of the activations, unless it has that
    /// dtype. Operations read the copies, so that no pass converts matrices. Whoever changes a
    /// parameter updates its copy, as [`optimizer_step`](fireclay_kernels::optimizer_step) does
    /// between [`take_copies`](Self::take_copies) and [`put_copies`](Self::put_copies).
    pub fn with_copies(mut self) -> Self {
        self.weights = Weights::new();
        let dtype = self.activations.into();
        self.all_matrices_mut().for_each(|(_, matrix)| matrix.make_copy(dtype));
        self
    }

    /// Moves the copies out of the model, by parameter, in their shapes. Operations read the
    /// parameters again.
    pub fn take_copies(&mut self) -> HashMap<ParamId, Tensor<B, 2>> {
        self.weights = Weights::new();
        self.all_matrices_mut().filter_map(|(_, matrix)| matrix.take_copy()).collect()
    }

    /// Returns copies to the model.
    pub fn put_copies(&mut self, mut copies: HashMap<ParamId, Tensor<B, 2>>) {
        self.weights = Weights::new();
        for (_, matrix) in self.all_matrices_mut() {
            if let Some(copy) = copies.remove(&matrix.parameter.id) {
                matrix.put_copy(copy);
            }
        }
    }

    /// All matrices that may be quantized, by path: embedding, head and linear layers.
    pub(crate) fn matrices_mut(&mut self) -> impl Iterator<Item = (String, &mut Matrix<B>)> {
        self.all_matrices_mut().filter(|(path, _)| !path.contains(".adapter."))
    }

    /// The format of each matrix that may be quantized, by its path; of several the first, and none
    /// where it is floats.
    pub fn formats(&mut self) -> Vec<(String, Option<Format>)> {
        self.matrices_mut().map(|(path, matrix)| (path, matrix.weight().format())).collect()
    }

    /// Bytes of the matrices whose paths `counted` accepts, as they are stored, with copies in
    /// other dtypes.
    pub fn matrix_bytes(&mut self, counted: impl Fn(&str) -> bool) -> u64 {
        self.all_matrices_mut().filter(|(path, _)| counted(path)).map(|(_, matrix)| matrix.bytes()).sum()
    }

    /// All matrices that may have a copy in another dtype, by path.
    fn all_matrices_mut(&mut self) -> impl Iterator<Item = (String, &mut Matrix<B>)> {
        let Self { embedding, head, blocks, .. } = self;
        let outer = [("embedding", Some(embedding)), ("head", head.as_mut())];
        let outer = outer.into_iter().filter_map(|(path, matrix)| Some((path.to_string(), matrix?)));
        outer.chain(projections_of(blocks).flat_map(|(path, projection)| match projection {
            Projection::Stacked(matrix) => vec![(path, matrix)],
            Projection::Linear(Linear { base, adapter }) => {
                let adapter = adapter.iter_mut().flat_map(|Adapter { a, b, .. }| [("a", a), ("b", b)]);
                let adapter = adapter.map(|(name, matrix)| (format!("{path}.adapter.{name}"), matrix));
                let adapter: Vec<_> = adapter.collect();
                std::iter::once((path, base)).chain(adapter).collect()
            }
        }))
    }

    /// The linear layers of all blocks, by their paths.
    pub(crate) fn linears_mut(&mut self) -> impl Iterator<Item = (String, &mut Linear<B>)> {
        linears_of(&mut self.blocks)
    }

    /// Trains only the parameters that `trained` accepts by path, such as `blocks.0.attention.qkv`,
    /// and freezes all others: these have neither gradients nor optimizer state. Quantized weights
    /// are never trained.
    pub fn with_trained(mut self, trained: impl Fn(&str) -> bool) -> Self {
        let quantized = self.quantized();
        self.weights = Weights::new();
        set_trained(self, |path| trained(path) && !quantized.contains(path))
    }

    /// Paths of the quantized matrices.
    fn quantized(&mut self) -> HashSet<String> {
        self.all_matrices_mut().filter(|(_, matrix)| matrix.is_quantized()).map(|(path, _)| path).collect()
    }

    /// Every parameter by its path, such as `blocks.0.attention.qkv`, as it is stored: `[d_output,
    /// d_input]` for matrices. Quantized matrices are left out.
    pub fn parameters(&self) -> Vec<(String, DeviceTensor)> {
        let quantized = self.clone().quantized();
        shaped_parameters(self).into_iter().filter(|(path, _)| !quantized.contains(path)).collect()
    }

    /// Quantizes every large matrix for operations; parameters stay as they are. Matrices whose row
    /// length the format does not support stay floats.
    ///
    /// # Errors
    /// If the device fails.
    pub fn with_quantized_matrices(mut self, format: Format) -> Result<Self, ExecutionError> {
        self.weights = Weights::new();
        for (_, matrix) in self.matrices_mut() {
            matrix.quantize(format)?;
        }
        Ok(self)
    }

    /// The dtype of activations and products.
    pub fn activations(&self) -> FloatDType {
        self.activations
    }

    /// Uses INT8 caches, with a scale per head and token, instead of the activations' dtype.
    ///
    /// # Panics
    /// If the head size is not a multiple of [`CacheDType::INT8_COLUMNS`].
    pub fn with_int8_cache(mut self) -> Self {
        let (columns, head_dim) = (CacheDType::INT8_COLUMNS, self.config.head_dim);
        assert!(head_dim.is_multiple_of(columns), "heads of {head_dim} elements, no multiple of {columns}, as bytes");
        self.weights = Weights::new();
        self.int8_cache = true;
        self
    }

    /// The data type of its caches.
    pub fn cache_dtype(&self) -> CacheDType {
        if self.int8_cache { CacheDType::Int8 } else { CacheDType::Float(self.activations) }
    }

    /// Sets the key of this step's dropout masks, or disables dropout. It is disabled initially.
    pub fn set_dropout(&mut self, key: Option<RandomKey>) {
        self.set_dropout_from(key, 0);
    }

    /// The same for a part of a batch, before which there are `tokens_before` tokens, padding
    /// included: it drops what the whole batch drops there.
    pub fn set_dropout_from(&mut self, key: Option<RandomKey>, tokens_before: usize) {
        (self.dropout_key, self.tokens_before) = (key, tokens_before);
        for (number, (_, linear)) in linears_of(&mut self.blocks).enumerate() {
            if let Some(adapter) = &mut linear.adapter {
                adapter.set_dropout(key.map(|key| key.fold(0x6c6f_7261).fold(number as u64).from_row(tokens_before)));
            }
        }
    }

    /// Sets the factors on the losses of this step's routers, which the backward pass adds to the
    /// loss that it starts from; they are then recorded, with the experts' loads, even if the factors
    /// are 0. `None`, as initially, computes none of it. Without effect on models without experts.
    pub fn set_router_losses(&mut self, losses: Option<RouterLosses>) {
        self.router_losses = losses;
    }

    /// The logits of a sequence classifier, f32 `[batch_size, labels]`, of hidden states
    /// `[batch_size, seq_length, d_model]` of rows of `lengths` tokens, `[batch_size]`; without
    /// lengths all tokens count. `None` if the model has no such head.
    pub fn classify(&self, hidden: Tensor<B, 3>, lengths: Option<Tensor<B, 1, Int>>) -> Option<Tensor<B, 2>> {
        let head = self.classifier.as_ref()?;
        let (probability, [_, seq_length, _]) = (head.settings().dropout, hidden.dims());
        // One row per sequence, and not per token.
        let first = self.tokens_before / seq_length.max(1);
        let key = self.dropout_key.filter(|_| probability > 0.0);
        let dropped = key.map(|key| Dropout { probability, key: key.fold(0x636c_6173).from_row(first) });
        Some(head.logits(hidden, lengths, dropped))
    }

    /// A cache for `tokens` tokens in any number of rows. It consists of pages, and the last page
    /// of each row may be partly filled. It is valid for this model's current weights and for
    /// clones of it: a step with another model, or after a method changed the weights, panics.
    /// After changing parameters in other ways, make a new cache.
    ///
    /// # Panics
    /// If the model is an encoder.
    pub fn cache(&self, tokens: usize) -> Cache<B> {
        assert_eq!(self.config.attention, AttentionDirection::Causal, "only causal models have a cache");
        let cache = Cache::new(&self.config, self.weights, tokens, self.cache_dtype(), &self.positions.device());
        cache.planned(|layers| DecodePlan::new(self.decode_model()?, layers))
    }

    /// Hidden states `[batch_size, seq_length, d_model]` of `tokens` `[batch_size, seq_length]`,
    /// after the final norm.
    ///
    /// # Panics
    /// If a row exceeds `context_length`.
    pub fn forward(&self, tokens: impl Into<Tokens<B>>) -> Tensor<B, 3> {
        self.forward_routed(tokens).0
    }

    /// [`forward`](Self::forward), and how routers distributed the tokens, if
    /// [`set_router_losses`](Self::set_router_losses) asked for it.
    ///
    /// # Panics
    /// As [`forward`](Self::forward) does.
    pub fn forward_routed(&self, tokens: impl Into<Tokens<B>>) -> (Tensor<B, 3>, Option<Routing<B>>) {
        let tokens = tokens.into();
        let [batch_size, seq_length] = self.dims(&tokens);
        let (x, pass) = self.residual_stream(tokens, None);
        let hidden = reshape(self.normalised(x), [batch_size, seq_length, self.config.d_model]);
        (hidden, pass.routing.as_ref().and_then(RoutingRecord::take))
    }

    /// `[batch_size, seq_length]`, checked against the context.
    pub(crate) fn dims(&self, tokens: &Tokens<B>) -> [usize; 2] {
        let [batch_size, seq_length] = tokens.ids.dims();
        let context = self.config.context_length;
        assert!(seq_length <= context, "{seq_length} tokens exceed context_length {context}");
        [batch_size, seq_length]
    }

    /// Processes new tokens of some rows of `cache`: one token, `[rows]` on the device, for each of
    /// the `decode` rows, and any number for each of the `prefill` rows. Returns the hidden states
    /// of each row's last token, those of `decode` first. Nothing that is in the cache is
    /// recomputed.
    ///
    /// # Panics
    /// If there are no tokens, a row does not exist or is listed twice, would exceed
    /// `context_length`, or the cache lacks pages for it: [`reserve`](Cache::reserve) them first.
    pub fn step(
        &self,
        decode: Option<(Tensor<B, 1, Int>, &[RowId])>,
        prefill: &[(RowId, &[u32])],
        cache: &mut Cache<B>,
    ) -> Hidden<B> {
        self.step_drawing(decode, prefill, (None, MultiStep::one()), false, cache)
    }

    /// [`step`](Self::step) followed by [`sample`](Self::sample), in one launch if the backend
    /// supports it. Returns the tokens and the logits, f32 `[rows, vocab_size]`, before biases and
    /// penalties.
    ///
    /// # Panics
    /// As [`step`](Self::step) and [`sample`](Self::sample) do.
    pub fn next_tokens(
        &self,
        decode: Option<(Tensor<B, 1, Int>, &[RowId])>,
        prefill: &[(RowId, &[u32])],
        rows: &SampledRows<B>,
        counts: Option<&mut TokenCounts<B>>,
        cache: &mut Cache<B>,
    ) -> (Tensor<B, 1, Int>, Tensor<B, 2>) {
        let NextTokens { tokens, logits, .. } = self.next_tokens_of((decode, prefill), rows, counts, false, cache);
        (tokens, logits)
    }

    /// [`next_tokens`](Self::next_tokens) that also returns the hidden states of all prefill
    /// tokens, for the log-probabilities of prompts.
    ///
    /// # Panics
    /// As [`next_tokens`](Self::next_tokens) does.
    pub fn next_tokens_and_states(
        &self,
        decode: Option<(Tensor<B, 1, Int>, &[RowId])>,
        prefill: &[(RowId, &[u32])],
        rows: &SampledRows<B>,
        counts: Option<&mut TokenCounts<B>>,
        cache: &mut Cache<B>,
    ) -> NextTokens<B> {
        self.next_tokens_of((decode, prefill), rows, counts, true, cache)
    }

    fn next_tokens_of(
        &self,
        (decode, prefill): StepTokens<'_, B>,
        rows: &SampledRows<B>,
        mut counts: Option<&mut TokenCounts<B>>,
        prompt_states: bool,
        cache: &mut Cache<B>,
    ) -> NextTokens<B> {
        let greedy = rows.are_greedy();
        let draw = (!greedy).then_some(StepDraw { rows, counts: counts.as_deref_mut() });
        let mut hidden = self.step_drawing(decode, prefill, (draw, MultiStep::one()), prompt_states, cache);
        let prompt_states = hidden.of_prompts.take();
        let (tokens, logits) = match hidden.predicted {
            Some(Predicted { logits, next, drawn, .. }) if drawn || greedy => {
                assert_rows(rows, &next);
                (next, logits)
            }
            predicted => self.sample_logits(Hidden { predicted, ..hidden }, rows, counts, cache),
        };
        NextTokens { tokens, logits, prompt_states }
    }

    /// Repeats [`next_tokens`](Self::next_tokens) for decode rows, feeding each sampled token to
    /// the next step on the device: as many steps as the backend runs in one launch, at least one
    /// and at most `most`. A row that reads one of its stop tokens may repeat it from then on.
    ///
    /// # Panics
    /// As [`next_tokens`](Self::next_tokens) does.
    pub fn decode_multi_step(
        &self,
        tokens: Tensor<B, 1, Int>,
        decoding: &[RowId],
        most: MultiStep<'_, B>,
        rows: &SampledRows<B>,
        mut counts: Option<&mut TokenCounts<B>>,
        cache: &mut Cache<B>,
    ) -> MultiStepTokens<B> {
        let greedy = rows.are_greedy();
        // A launch that exits early has no logits to sample from.
        let stop_tokens = most.stop_tokens.filter(|_| cache.supports_multi_step(decoding.len(), !greedy));
        let ahead = MultiStep { steps: cache.whole_steps(decoding, !greedy, most.steps), stop_tokens };
        let draw = (!greedy).then_some(StepDraw { rows, counts: counts.as_deref_mut() });
        let hidden = self.step_drawing(Some((tokens, decoding)), &[], (draw, ahead), false, cache);
        match hidden.predicted {
            Some(Predicted { tokens, next, drawn, .. }) if drawn || greedy => {
                assert_rows(rows, &next);
                MultiStepTokens { tokens, last: next }
            }
            predicted => {
                let last = self.sample(Hidden { predicted, ..hidden }, rows, counts, cache);
                MultiStepTokens { tokens: last.clone().reshape([1, decoding.len()]), last }
            }
        }
    }

    /// [`step`](Self::step), optionally with sampling and with several decode steps.
    fn step_drawing(
        &self,
        decode: Option<(Tensor<B, 1, Int>, &[RowId])>,
        prefill: &[(RowId, &[u32])],
        (draw, ahead): (Option<StepDraw<'_, B>>, MultiStep<'_, B>),
        prompt_states: bool,
        cache: &mut Cache<B>,
    ) -> Hidden<B> {
        cache.assert_of(self.weights);
        if let Some((tokens, decoding)) = &decode
            && !prefill.is_empty()
            && cache.takes_whole_step(decoding.len())
        {
            return self.step_apart((tokens.clone(), decoding), prefill, prompt_states, cache);
        }
        assert!(prefill.iter().all(|(_, tokens)| !tokens.is_empty()), "prefill: a row of no tokens");
        let device = self.positions.device();
        let mut rows: Vec<(RowId, usize)> = Vec::new();
        let mut ids = Vec::new();
        if let Some((tokens, decoding)) = decode {
            assert_eq!(tokens.dims(), [decoding.len()], "decode: a token for each row");
            rows.extend(decoding.iter().map(|row| (*row, 1)));
            ids.push(tokens);
        }
        rows.extend(prefill.iter().map(|(row, tokens)| (*row, tokens.len())));
        assert!(!rows.is_empty(), "there is nothing to read");
        let new: Vec<i32> = prefill.iter().flat_map(|(_, tokens)| *tokens).map(|token| *token as i32).collect();
        if !new.is_empty() {
            let shape = [new.len()];
            ids.push(Tensor::from_data(TensorData::new(new, shape), &device));
        }
        let ids = if ids.len() == 1 { ids.remove(0) } else { Tensor::cat(ids, 0) };
        let [count] = ids.dims();
        let at = cache.begin(&rows);
        let steps = ahead.steps;
        if prefill.is_empty()
            && let Some(Decoded { hidden, predicted, .. }) = cache.whole_step(&ids, &at, draw, ahead)
        {
            rows.iter_mut().for_each(|(_, tokens)| *tokens = steps);
            cache.advance(&rows);
            return Hidden { states: hidden, predicted, of_prompts: None };
        }
        let (x, _) = self.residual_stream(ids.reshape([1, count]).into(), Some((at, cache)));
        cache.advance(&rows);
        let decoded = rows.len() - prefill.len();
        let all = prompt_states.then(|| self.normalised(x.clone()));
        let of_prompts = all.map(|all| all.narrow(0, decoded, count - decoded));
        if count == rows.len() {
            return Hidden { of_prompts, ..self.normalised(x).into() };
        }
        let stop_tokens = rows.iter().scan(0, |end, (_, tokens)| {
            *end += tokens;
            Some(*end as i32 - 1)
        });
        // Flat first: an uploaded matrix may have padded rows.
        let last = TensorData::new(stop_tokens.collect::<Vec<i32>>(), [rows.len()]);
        let last = Tensor::<B, 1, Int>::from_data(last, &device).reshape([1, rows.len()]);
        let last = embed(x, last, self.activations);
        Hidden { of_prompts, ..self.normalised(reshape(last, [rows.len(), self.config.d_model])).into() }
    }

    /// Runs the decode rows and then the prefill rows: the host prepares the second pass while the
    /// device runs the first, a single launch.
    fn step_apart(
        &self,
        (tokens, decoding): (Tensor<B, 1, Int>, &[RowId]),
        prefill: &[(RowId, &[u32])],
        prompt_states: bool,
        cache: &mut Cache<B>,
    ) -> Hidden<B> {
        let rows: Vec<RowId> = decoding.iter().chain(prefill.iter().map(|(row, _)| row)).copied().collect();
        let first = self.decode(tokens, decoding, cache);
        let second = self.step_drawing(None, prefill, (None, MultiStep::one()), prompt_states, cache);
        cache.join_passes(rows);
        Hidden { of_prompts: second.of_prompts, ..Tensor::cat(vec![first.states, second.states], 0).into() }
    }

    /// [`step`](Self::step) for prefill rows only.
    ///
    /// # Panics
    /// As [`step`](Self::step) does.
    pub fn prefill(&self, rows: &[(RowId, &[u32])], cache: &mut Cache<B>) -> Hidden<B> {
        self.step(None, rows, cache)
    }

    /// [`step`](Self::step) for decode rows only. Nothing is transferred, unless a row needs a page
    /// that was not [reserved](Cache::reserve).
    ///
    /// # Panics
    /// As [`step`](Self::step) does.
    pub fn decode(&self, tokens: Tensor<B, 1, Int>, rows: &[RowId], cache: &mut Cache<B>) -> Hidden<B> {
        self.step(Some((tokens, rows)), &[], cache)
    }

    /// The model for fused decode steps.
    ///
    /// # Errors
    /// A feature of the model that these lack.
    fn decode_model(&self) -> Result<DecodeModel<B>, Declined> {
        let declined = |what: &str| Err(Declined::new(format!("whole steps are not for {what}")));
        let config = &self.config;
        let Some(final_norm) = &self.final_norm else { return declined("models without a last norm") };
        if config.norm_placement != NormPlacement::Pre || self.embedding_norm.is_some() {
            return declined("norms behind layers");
        }
        if self.token_type_embedding.is_some() {
            return declined("token types");
        }
        if self.convolution.is_some() {
            return declined("a convolution");
        }
        if self.has_adapters() {
            return declined("adapters");
        }
        let [window] = config.windows()[..] else { return declined("layers with windows of their own") };
        if let Some(setting) = config.beyond_whole_steps() {
            return declined(setting);
        }
        let rotary = self.rotary();
        let heads = PackedHeads { n_heads: config.n_heads, n_kv_heads: config.n_kv_heads, head_dim: config.head_dim };
        let value = |bias: &Option<Param<Tensor<B, 1>>>| bias.as_ref().map(Param::val);
        let block = |block: &Block<B>| {
            let (router, [up, down], [up_bias, down_bias]) = match &block.feed_forward {
                FeedForward::Dense(Dense { up, up_bias, down, down_bias, .. }) => {
                    (None, [up.base.weight(), down.base.weight()], [up_bias, down_bias])
                }
                FeedForward::Experts(experts) => {
                    let Experts { up, up_bias, down, down_bias, .. } = experts;
                    (Some(experts.decode_router()), [up.weight(), down.weight()], [up_bias, down_bias])
                }
            };
            DecodeBlock {
                attention_norm: block.attention_norm.as_ref().unwrap_or(&block.feed_forward_norm).weights(),
                qkv: block.attention.qkv.base.weight(),
                qkv_bias: value(&block.attention.qkv_bias),
                placement: block.attention.placed_by(&rotary),
                output: block.attention.output.base.weight(),
                output_bias: value(&block.attention.output_bias),
                feed_forward_norm: block.feed_forward_norm.weights(),
                router,
                up,
                up_bias: value(up_bias),
                down,
                down_bias: value(down_bias),
            }
        };
        Ok(DecodeModel {
            embedding: self.embedding.weight(),
            position_embedding: self.position_embedding.as_ref().map(Param::val),
            head: self.head_weight(),
            blocks: self.blocks.iter().map(block).collect(),
            final_norm: final_norm.weights(),
            heads,
            activation: config.layer(0).activation,
            activations: self.activations,
            window,
        })
    }

    /// The residual stream `[batch_size * seq_length, d_model]` after the last block, with the state
    /// that blocks shared. A cache has stored the tokens then, but does not count them yet.
    fn residual_stream(
        &self,
        tokens: Tokens<B>,
        cache: Option<(CachedTokens<B>, &mut Cache<B>)>,
    ) -> (Tensor<B, 2>, Pass<B>) {
        let _products = self.f32_products.enter();
        let (at, mut cache) = cache.unzip();
        let (mut x, pass) = self.begin(tokens, at);
        for (layer, block) in self.blocks.iter().enumerate() {
            let cache = cache.as_mut().map(|cache| &mut cache.layers[layer]);
            x = block.forward(x, &pass, layer, cache);
        }
        (x, pass)
    }

    /// The input of the first block, `[batch_size * seq_length, d_model]`, and the state shared by
    /// all blocks.
    pub(crate) fn begin(&self, tokens: Tokens<B>, cached: Option<CachedTokens<B>>) -> (Tensor<B, 2>, Pass<B>) {
        let _in_embedding = part("embedding");
        let pass = self.pass(&tokens, cached);
        (self.embedded(tokens, &pass), pass)
    }

    /// The embeddings of the tokens that the convolution sees at each token: `[batch_size *
    /// seq_length, width * d_model]`.
    fn neighbours(&self, Tokens { ids, types, lengths, .. }: &Tokens<B>) -> Tensor<B, 2> {
        let ([batch_size, seq_length], width) = (ids.dims(), self.config.convolution);
        let padding = lengths.clone().map(|lengths| {
            let columns = self.positions.clone().narrow(0, 0, seq_length).reshape([1, seq_length]);
            columns.greater_equal(lengths.reshape([batch_size, 1]))
        });
        let mut x = embed(self.embedding.weight(), around(ids, width, padding.as_ref()), self.activations);
        if self.config.embedding_multiplier != 1.0 {
            x = x.mul_scalar(self.config.embedding_multiplier);
        }
        if let Some(table) = &self.token_type_embedding {
            let types = types.clone().unwrap_or_else(|| ids.zeros_like());
            x = embed_add(table.val(), around(&types, width, padding.as_ref()), x);
        }
        reshape(x, [batch_size * seq_length, width * self.config.d_model])
    }

    /// The input of the first block of a pass.
    pub(crate) fn embedded(&self, tokens: Tokens<B>, pass: &Pass<B>) -> Tensor<B, 2> {
        let _in_embedding = part("embedding");
        let neighbours = self.convolution.as_ref().map(|weight| (self.neighbours(&tokens), weight.val()));
        let Tokens { ids, types, .. } = tokens;
        let [batch_size, seq_length] = ids.dims();
        let mut x = embed(self.embedding.weight(), ids.clone(), self.activations);
        if self.config.embedding_multiplier != 1.0 {
            x = x.mul_scalar(self.config.embedding_multiplier);
        }
        if let Some(table) = &self.position_embedding {
            x = embed_add(table.val(), pass.positions.clone(), x);
        }
        if let Some(table) = &self.token_type_embedding {
            let types = types.unwrap_or_else(|| ids.zeros_like());
            x = embed_add(table.val(), types, x);
        }
        if let Some((neighbours, weight)) = neighbours {
            let rows = reshape(x, [batch_size * seq_length, self.config.d_model]);
            let rows = linear_add(neighbours, weight, None, None, rows);
            x = reshape(rows, [batch_size, seq_length, self.config.d_model]);
        }
        if let Some(weights) = &self.embedding_norm {
            x = norm(x, &weights.weights());
        }
        if let Some((probability, key)) = pass.dropout {
            x = dropout(x, Dropout { probability, key: key.from_row(pass.tokens_before) });
        }
        // From here on one row per token, as in all token-wise operations.
        reshape(x, [batch_size * seq_length, self.config.d_model])
    }

    /// `x` after the final norm, if there is one.
    pub(crate) fn normalised(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        let _in_final_norm = part("final_norm");
        match &self.final_norm {
            Some(weights) => norm(x, &weights.weights()),
            None => x,
        }
    }

    /// The rotary tables of the layers.
    fn rotary(&self) -> Vec<RotaryTable<B>> {
        let tables = self.rotary_cos.iter().cloned().zip(self.rotary_sin.iter().cloned());
        tables.map(|(cos, sin)| RotaryTable { cos, sin }).collect()
    }

    /// The first and the last key of each token, `[batch_size, seq_length, 2]`: nearer than
    /// `window`, and within the row's length.
    fn nearby(
        &self,
        window: usize,
        [batch_size, seq_length]: [usize; 2],
        lengths: &Option<Tensor<B, 1, Int>>,
    ) -> Tensor<B, 3, Int> {
        let shape = [batch_size, seq_length];
        let reach = i32::try_from(window - 1).unwrap_or(i32::MAX / 2).min(i32::MAX / 2);
        let own = self.positions.clone().narrow(0, 0, seq_length).reshape([1, seq_length]).expand(shape);
        let last = own.clone().add_scalar(reach);
        let last = match lengths {
            Some(lengths) => {
                let end = lengths.clone().reshape([batch_size, 1]).sub_scalar(1).expand(shape);
                last.clone().mask_where(last.greater(end.clone()), end)
            }
            None => last,
        };
        Tensor::stack(vec![own.sub_scalar(reach), last], 2)
    }

    fn pass(&self, tokens: &Tokens<B>, cached: Option<CachedTokens<B>>) -> Pass<B> {
        let Tokens { ids, lengths, document_starts, .. } = tokens.clone();
        let [batch_size, seq_length] = ids.dims();
        let positions = match &cached {
            Some(at) => at.positions().clone(),
            None => {
                let positions = self.positions.clone().narrow(0, 0, seq_length);
                let positions = positions.reshape([1, seq_length]).expand([batch_size, seq_length]);
                // Positions restart in each document of a packed row.
                match &document_starts {
                    Some(starts) => positions - starts.clone(),
                    None => positions,
                }
            }
        };
        let mask = |window| match (self.config.attention, &lengths, &document_starts) {
            (AttentionDirection::Causal, _, Some(starts)) => {
                AttentionMask::Documents { starts: starts.clone(), window }
            }
            (AttentionDirection::Causal, _, None) => AttentionMask::Causal { window },
            (AttentionDirection::Bidirectional, lengths, _) => match (window, lengths) {
                (Some(window), lengths) => {
                    AttentionMask::Ranges(self.nearby(window, [batch_size, seq_length], lengths))
                }
                (None, Some(lengths)) => AttentionMask::Lengths(lengths.clone()),
                (None, None) => AttentionMask::None,
            },
        };
        let seen =
            |window| Seen { window, mask: mask(window), cached: cached.as_ref().map(|at| at.with_window(window)) };
        Pass {
            positions,
            rotary: self.rotary(),
            seen: self.config.windows().into_iter().map(seen).collect(),
            dropout: self.dropout_key.filter(|_| self.config.dropout > 0.0).map(|key| (self.config.dropout, key)),
            tokens_before: self.tokens_before,
            n_heads: self.config.n_heads,
            routing: self.router_losses.filter(|_| self.config.experts > 0).map(RoutingRecord::new),
        }
    }

    /// The same model with another vocabulary. Token `i` gets the embedding and the output row of
    /// the old token `rows[i]`, or the mean of all rows if there is none (Hewitt, 2021). Not for
    /// quantized models.
    pub fn with_vocabulary(mut self, rows: &[Option<u32>]) -> Self {
        self.weights = Weights::new();
        let old = self.config.vocab_size as u32;
        for matrix in std::iter::once(&mut self.embedding).chain(&mut self.head) {
            let (device, width) = (matrix.val().device(), matrix.val().dims()[1]);
            // Once on the host: Burn's `select` is not reliable on all devices.
            let table: Vec<f32> = matrix.val().into_data().iter::<f32>().collect();
            let mut mean = vec![0.0; width];
            for row in table.chunks_exact(width) {
                mean.iter_mut().zip(row).for_each(|(mean, value)| *mean += value / old as f32);
            }
            // A tokenizer may have more tokens than the model has rows.
            let row = |row: Option<u32>| {
                row.filter(|row| *row < old).map_or(&mean[..], |row| &table[row as usize * width..][..width])
            };
            let values: Vec<f32> = rows.iter().flat_map(|old| row(*old)).copied().collect();
            let table = Tensor::from_data(TensorData::new(values, [rows.len(), width]), &device);
            let trained = matrix.val().is_require_grad();
            *matrix = Param::from_tensor(table).set_require_grad(trained).into();
        }
        self.config.vocab_size = rows.len();
        self
    }

    /// Whether any matrix is quantized.
    pub fn is_quantized(&self) -> bool {
        self.embedding.is_quantized()
            || self.head.as_ref().is_some_and(Matrix::is_quantized)
            || self.blocks.iter().any(Block::is_quantized)
    }

    /// Whether any linear layer has an adapter.
    pub(crate) fn has_adapters(&self) -> bool {
        self.blocks.iter().flat_map(Block::linears).any(|(_, linear)| linear.adapter.is_some())
    }

    /// The output projection, `[vocab_size, d_model]`.
    fn head_weight(&self) -> Weight<B> {
        self.head.as_ref().unwrap_or(&self.embedding).weight()
    }

    /// Logits `[batch_size, seq_length, vocab_size]` of hidden states.
    pub fn logits(&self, hidden: Tensor<B, 3>) -> Tensor<B, 3> {
        let (_in_head, _products) = (part("head"), self.f32_products.enter());
        self.capped(linear(self.before_head(hidden), self.head_weight(), None))
    }

    /// Hidden states as the head takes them.
    fn before_head<const D: usize>(&self, hidden: Tensor<B, D>) -> Tensor<B, D> {
        match self.config.logit_divisor {
            1.0 => hidden,
            divisor => hidden.div_scalar(divisor),
        }
    }

    /// Soft-capped logits, if the config says so.
    fn capped<const D: usize>(&self, logits: Tensor<B, D>) -> Tensor<B, D> {
        match self.config.logit_softcap {
            Some(cap) => logits.div_scalar(cap).tanh().mul_scalar(cap),
            None => logits,
        }
    }

    /// Logits in f32, `[rows, vocab_size]`, of hidden states `[rows, d_model]` in the dtype of
    /// activations.
    pub fn f32_logits(&self, states: Tensor<B, 2>) -> Tensor<B, 2> {
        let (_in_head, _products) = (part("head"), self.f32_products.enter());
        self.capped(head_logits(self.before_head(states), self.head_weight()))
    }

    /// Mean cross entropy, `[1]` f32 in nats, of the hidden states' predictions for `targets`
    /// `[batch_size, seq_length]`, without storing all logits.
    pub fn loss(&self, hidden: Tensor<B, 3>, targets: Tensor<B, 2, Int>, options: HeadLossOptions) -> Tensor<B, 1> {
        let (_in_head, _products) = (part("head"), self.f32_products.enter());
        let options = options.with_softcap(self.config.logit_softcap);
        head_loss(self.before_head(hidden), self.head_weight(), targets, options)
    }

    /// The log-probability of each target `[batch_size, seq_length]`, f32 `[batch_size *
    /// seq_length]` in nats, from the hidden states; 0 for ignored ones: see [`head_log_probs`].
    pub fn log_probs(&self, hidden: Tensor<B, 3>, targets: Tensor<B, 2, Int>) -> Tensor<B, 1> {
        let (_in_head, _products) = (part("head"), self.f32_products.enter());
        if self.config.logit_softcap.is_none() {
            return head_log_probs(self.before_head(hidden), self.head_weight(), targets, None);
        }
        // The operation knows no cap.
        let ([batch_size, seq_length], known) = (targets.dims(), self.config.vocab_size as i64);
        let logits = linear(self.before_head(hidden), self.head_weight(), None).cast(DType::F32);
        let log_probs = log_softmax(self.capped(logits), 2);
        let ignored = targets.clone().lower_elem(0).bool_or(targets.clone().greater_equal_elem(known));
        let target = targets.clamp(0, known - 1).reshape([batch_size, seq_length, 1]);
        let own = log_probs.gather(2, target).reshape([batch_size, seq_length]).mask_fill(ignored, 0.0);
        own.reshape([batch_size * seq_length])
    }

    /// Samples a token for each row, `[rows]`, from the hidden states of the last pass into
    /// `cache`. `counts` has the token counts of rows with lines.
    ///
    /// # Panics
    /// If the numbers of rows and hidden states differ, or a line does not exist.
    pub fn sample(
        &self,
        hidden: impl Into<Hidden<B>>,
        rows: &SampledRows<B>,
        counts: Option<&mut TokenCounts<B>>,
        cache: &Cache<B>,
    ) -> Tensor<B, 1, Int> {
        let (_in_head, _products) = (part("head"), self.f32_products.enter());
        let Hidden { states, predicted, .. } = hidden.into();
        match predicted {
            Some(predicted) if rows.are_greedy() && !predicted.drawn => {
                assert_rows(rows, &predicted.next);
                predicted.next
            }
            Some(predicted) => draw(predicted.logits, rows, cache.last_positions(), counts),
            None if self.config.logit_softcap.is_some() => {
                draw(self.f32_logits(states), rows, cache.last_positions(), counts)
            }
            None => {
                let states = self.before_head(states);
                head_sample(states, self.head_weight(), rows, cache.last_positions(), counts)
            }
        }
    }

    /// [`sample`](Self::sample) together with the logits, f32 `[rows, vocab_size]`, before biases
    /// and penalties.
    ///
    /// # Panics
    /// As [`sample`](Self::sample) does.
    pub fn sample_logits(
        &self,
        hidden: impl Into<Hidden<B>>,
        rows: &SampledRows<B>,
        counts: Option<&mut TokenCounts<B>>,
        cache: &Cache<B>,
    ) -> (Tensor<B, 1, Int>, Tensor<B, 2>) {
        let (_in_head, _products) = (part("head"), self.f32_products.enter());
        let Hidden { states, predicted, .. } = hidden.into();
        match predicted {
            Some(Predicted { logits, .. }) => (draw(logits.clone(), rows, cache.last_positions(), counts), logits),
            None if self.config.logit_softcap.is_some() => {
                let logits = self.f32_logits(states);
                (draw(logits.clone(), rows, cache.last_positions(), counts), logits)
            }
            None => {
                let states = self.before_head(states);
                head_sample_logits(states, self.head_weight(), rows, cache.last_positions(), counts)
            }
        }
    }
}

/// Panics unless there is a row for each hidden state.
fn assert_rows<B: Backend>(rows: &SampledRows<B>, tokens: &Tensor<B, 1, Int>) {
    let ([states], rows) = (tokens.dims(), rows.count());
    assert_eq!(states, rows, "sample: {rows} rows for {states} hidden states");
}

/// The weights of blocks that may be stored in other formats, by their paths.
fn projections_of<B: Backend>(blocks: &mut [Block<B>]) -> impl Iterator<Item = (String, Projection<'_, B>)> {
    blocks.iter_mut().enumerate().flat_map(|(layer, block)| {
        block.projections_mut().into_iter().map(move |(path, own)| (format!("blocks.{layer}.{path}"), own))
    })
}

/// The linear layers of blocks, by their paths.
fn linears_of<B: Backend>(blocks: &mut [Block<B>]) -> impl Iterator<Item = (String, &mut Linear<B>)> {
    projections_of(blocks).filter_map(|(path, projection)| match projection {
        Projection::Linear(linear) => Some((path, linear)),
        Projection::Stacked(_) => None,
    })
}
