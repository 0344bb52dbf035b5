//! What an encoder says of an utterance: its intent, and a tag for each token.

use burn::module::{Module, Param};
use burn::tensor::{Int, Tensor};

use fireclay_kernels::{Backend, HeadLossOptions, head_loss, linear};

use crate::config::TransformerConfig;
use crate::parameters::Initializer;

/// Projections of hidden states to intents and to tags, both read from the same encoder (Chen et al., 2019, "BERT for
/// joint intent classification and slot filling").
#[derive(Module, Debug)]
pub struct UtteranceHeads<B: Backend> {
    /// From a row's first token, `[intents, d_model]`.
    pub intent: Param<Tensor<B, 2>>,
    /// From every token, `[tags, d_model]`.
    pub tag: Param<Tensor<B, 2>>,
}

/// What a batch of utterances should be heard as. `IGNORED_TARGET` stands where nothing counts.
#[derive(Clone, Debug)]
pub struct UtteranceTargets<B: Backend> {
    /// The intent of each row, `[batch_size]`.
    pub intents: Tensor<B, 1, Int>,
    /// The tag of each token, `[batch_size, seq_length]`.
    pub tags: Tensor<B, 2, Int>,
}

impl<B: Backend> UtteranceHeads<B> {
    pub(crate) fn new(config: &TransformerConfig, init: &mut Initializer<'_, B>) -> Self {
        let mut head = |rows: usize| init.matrix([rows, config.d_model], config.init_deviation);
        Self { intent: head(config.intents), tag: head(config.tags) }
    }

    /// Logits `[batch_size, intents]` and `[batch_size, seq_length, tags]` of hidden states
    /// `[batch_size, seq_length, d_model]`.
    pub fn logits(&self, hidden: Tensor<B, 3>) -> (Tensor<B, 2>, Tensor<B, 3>) {
        let intents = linear(hidden.clone().narrow(1, 0, 1), self.intent.val(), None);
        (intents.squeeze_dim(1), linear(hidden, self.tag.val(), None))
    }

    /// Mean cross entropy of the intents times `intent_weight`, and of the tags, added: `[1]` f32 nats.
    pub fn loss(
        &self,
        hidden: Tensor<B, 3>,
        targets: UtteranceTargets<B>,
        intent_weight: f64,
        options: HeadLossOptions,
    ) -> Tensor<B, 1> {
        let first = hidden.clone().narrow(1, 0, 1);
        let intents = head_loss(first, self.intent.val(), targets.intents.unsqueeze_dim::<2>(1), options);
        head_loss(hidden, self.tag.val(), targets.tags, options) + intents * intent_weight
    }
}
