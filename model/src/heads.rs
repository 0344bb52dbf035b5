//! Heads of an encoder for utterances: an intent, and a tag per token.

use burn::module::{Module, Param};
use burn::tensor::{Int, Tensor};

use fireclay_kernels::recorder::part;
use fireclay_kernels::{Backend, F32Products, HeadLossOptions, head_loss, linear};

use crate::config::TransformerConfig;
use crate::parameters::Initializer;

/// Projections of hidden states to intents and to tags, both read from the same encoder (Chen et
/// al., 2019, "BERT for joint intent classification and slot filling").
#[derive(Module, Debug)]
pub struct UtteranceHeads<B: Backend> {
    /// From a row's first token, `[intents, d_model]`.
    pub intent: Param<Tensor<B, 2>>,
    /// From every token, `[tags, d_model]`.
    pub tag: Param<Tensor<B, 2>>,
    #[module(skip)]
    pub(crate) f32_products: F32Products,
}

/// Targets of a batch of utterances; `IGNORED_TARGET` is ignored.
#[derive(Clone, Debug)]
pub struct UtteranceTargets<B: Backend> {
    /// The intent of each row at its first token, `[batch_size, seq_length]`.
    pub intents: Tensor<B, 2, Int>,
    /// The tag of each token, `[batch_size, seq_length]`.
    pub tags: Tensor<B, 2, Int>,
}

impl<B: Backend> UtteranceHeads<B> {
    pub(crate) fn new(config: &TransformerConfig, init: &mut Initializer<'_, B>) -> Self {
        let mut head = |rows: usize| init.matrix([rows, config.d_model], config.init_deviation);
        Self { intent: head(config.intents), tag: head(config.tags), f32_products: F32Products::Exact }
    }

    /// Logits `[batch_size, intents]` and `[batch_size, seq_length, tags]` of hidden states
    /// `[batch_size, seq_length, d_model]`.
    pub fn logits(&self, hidden: Tensor<B, 3>) -> (Tensor<B, 2>, Tensor<B, 3>) {
        let (_in_heads, _products) = (part("utterance_heads"), self.f32_products.enter());
        let intents = linear(hidden.clone().narrow(1, 0, 1), self.intent.val(), None);
        (intents.squeeze_dim(1), linear(hidden, self.tag.val(), None))
    }

    /// Weighted sum of the mean cross entropies of intents and tags, times the options' weight:
    /// `[1]` f32, in nats.
    pub fn loss(
        &self,
        hidden: Tensor<B, 3>,
        targets: UtteranceTargets<B>,
        (intent_weight, tag_weight): (f64, f64),
        options: HeadLossOptions,
    ) -> Tensor<B, 1> {
        let (_in_heads, _products) = (part("utterance_heads"), self.f32_products.enter());
        // Over all tokens, of which only the first counts: a slice would cost a copy forward and
        // two backward.
        let weighted = |weight: f64| options.with_weight(weight * options.weight);
        let intents = head_loss(hidden.clone(), self.intent.val(), targets.intents, weighted(intent_weight));
        head_loss(hidden, self.tag.val(), targets.tags, weighted(tag_weight)) + intents
    }
}
