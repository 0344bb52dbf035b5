//! What a model is trained for: the data, the loss, and how the model is judged.

pub mod intent_slot;
pub mod language;
pub mod scores;

use std::path::Path;

use burn::tensor::Tensor;
use fireclay_datasets::{Labels, PieceTokenizer, TokenBatch, UtteranceBatch};
use fireclay_kernels::{Backend, HeadLossOptions};
use fireclay_model::{Transformer, TransformerConfig};
use serde::{Deserialize, Serialize};

pub use intent_slot::IntentSlot;
pub use language::Language;
pub use scores::{Report, Scores};

use crate::Failure;
use crate::training::TrainingRecipe;
use crate::training::checkpoint::{LABELS, TOKENIZER};

/// A kind of work by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum TaskName {
    /// Predict the next token
    #[default]
    Language,
    /// Say an utterance's intent and tag its slots
    IntentSlot,
}

/// A kind of work, with its data.
#[allow(clippy::large_enum_variant)] // A run has one of them.
pub enum Task {
    /// Each token predicts the next.
    Language(Language),
    /// Utterances are heard as an intent and slots.
    IntentSlot(IntentSlot),
}

/// What a task needs a model to have room for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelSizes {
    /// Tokens or pieces known.
    pub vocab_size: usize,
    /// Intents told apart; 0 where there are none.
    #[serde(default)]
    pub intents: usize,
    /// Tags given; 0 where there are none.
    #[serde(default)]
    pub tags: usize,
}

impl ModelSizes {
    /// What utterances with these labels, read in these pieces, need.
    pub(crate) fn of_utterances(labels: &Labels, pieces: &PieceTokenizer) -> Self {
        Self { vocab_size: pieces.vocab_size(), intents: labels.intents.len(), tags: labels.tag_count() }
    }

    /// Refuses a model without the room.
    pub(crate) fn fit(self, config: &TransformerConfig) -> Result<(), Failure> {
        let Self { vocab_size, intents, tags } = self;
        if vocab_size > config.vocab_size {
            let known = config.vocab_size;
            return Err(Failure::new(format!("{TOKENIZER} has {vocab_size} tokens, but the model knows {known}")));
        }
        if (intents, tags) != (config.intents, config.tags) {
            return Err(Failure::new(format!(
                "{LABELS} has {intents} intents and {tags} tags, but the model {} and {}",
                config.intents, config.tags
            )));
        }
        Ok(())
    }
}

/// Rows for a step, on the host.
#[derive(Clone, Debug)]
pub enum Batch {
    /// Tokens, and what follows each.
    Tokens(TokenBatch),
    /// Pieces of words, with intents and tags.
    Utterances(UtteranceBatch),
}

impl From<TokenBatch> for Batch {
    fn from(batch: TokenBatch) -> Self {
        Self::Tokens(batch)
    }
}

impl From<UtteranceBatch> for Batch {
    fn from(batch: UtteranceBatch) -> Self {
        Self::Utterances(batch)
    }
}

/// Targets that count, of tokens or tags and of intents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TargetCounts {
    pub(crate) tokens: usize,
    pub(crate) intents: usize,
}

impl TargetCounts {
    /// The shares that these have in `whole`.
    pub(crate) fn shares(self, whole: Self) -> (f64, f64) {
        let share = |part: usize, whole: usize| part as f64 / whole.max(1) as f64;
        (share(self.tokens, whole.tokens), share(self.intents, whole.intents))
    }
}

impl std::ops::Add for TargetCounts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { tokens: self.tokens + other.tokens, intents: self.intents + other.intents }
    }
}

/// How a model did on held-out data.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Validation {
    /// Nats a target.
    pub loss: f64,
    /// Percentages, where the task has them.
    #[serde(default)]
    pub scores: Option<Scores>,
}

impl Validation {
    /// Whether this model is to be kept rather than the other: by whole utterances understood and then by slots, where
    /// there are scores, and by its loss.
    pub fn is_better_than(&self, other: &Self) -> bool {
        let rank = |validation: &Self| {
            let scores = validation.scores.unwrap_or_default();
            [scores.sentence_accuracy, scores.slot_f1, -validation.loss]
        };
        rank(self).partial_cmp(&rank(other)).is_some_and(std::cmp::Ordering::is_gt)
    }
}

impl Batch {
    /// The targets that count.
    pub(crate) fn counts(&self) -> TargetCounts {
        match self {
            Self::Tokens(batch) => TargetCounts { tokens: batch.target_count(), intents: 0 },
            Self::Utterances(batch) => intent_slot::counts(batch),
        }
    }

    /// Tokens learnt from.
    pub(crate) fn tokens(&self) -> usize {
        match self {
            Self::Tokens(batch) => batch.target_count(),
            Self::Utterances(batch) => batch.lengths().iter().map(|length| *length as usize).sum(),
        }
    }

    /// The same rows in `parts`.
    pub(crate) fn split(self, parts: usize) -> Vec<Self> {
        match self {
            Self::Tokens(batch) => batch.split(parts).into_iter().map(Self::Tokens).collect(),
            Self::Utterances(batch) => batch.split(parts).into_iter().map(Self::Utterances).collect(),
        }
    }

    /// What this part of a batch, whose targets are `whole`, adds to the mean loss over all of it: `[1]` nats.
    pub(crate) fn loss<B: Backend>(
        &self,
        model: &Transformer<B>,
        training: &TrainingRecipe,
        whole: TargetCounts,
        device: &B::Device,
    ) -> Tensor<B, 1> {
        let options = HeadLossOptions::new().with_label_smoothing(training.label_smoothing);
        let (tokens, intents) = self.counts().shares(whole);
        match self {
            Self::Tokens(batch) => language::loss(model, batch, options.with_weight(tokens), device),
            Self::Utterances(batch) => {
                let weights = (intents * training.intent_weight, tokens);
                intent_slot::loss(model, batch, weights, options, device)
            }
        }
    }
}

impl Task {
    /// What a model needs room for.
    pub fn sizes(&self) -> ModelSizes {
        match self {
            Self::Language(language) => {
                ModelSizes { vocab_size: language.tokenizer.vocab_size(), ..ModelSizes::default() }
            }
            Self::IntentSlot(task) => task.sizes(),
        }
    }

    /// The rows of a training step: a pure function of the recipe's seed and `step`.
    pub fn batch(&self, training: &TrainingRecipe, step: u64) -> Batch {
        let rows = training.batch_size * training.accumulation;
        match self {
            Self::Language(language) => language.corpus.batch(training.seed, step, rows).into(),
            Self::IntentSlot(task) => task.batch(training, step, rows).into(),
        }
    }

    /// How `model` does on held-out data: about `tokens` of a language's, all of the utterances.
    ///
    /// # Errors
    /// If the device failed.
    pub fn validate<B: Backend>(
        &self,
        model: &Transformer<B>,
        training: &TrainingRecipe,
        tokens: usize,
        device: &B::Device,
    ) -> Result<Validation, Failure> {
        match self {
            Self::Language(language) => {
                let loss = language.validate(model, training.batch_size, tokens, device)?;
                Ok(Validation { loss, scores: None })
            }
            Self::IntentSlot(task) => task.validate(model, training, device),
        }
    }

    /// Writes what belongs beside the weights: the tokenizer and, by task, where a text ends or what labels are called.
    ///
    /// # Errors
    /// If the file system refuses.
    pub(crate) fn save(&self, folder: &Path) -> Result<(), Failure> {
        match self {
            Self::Language(language) => language.save(folder),
            Self::IntentSlot(task) => task.save(folder),
        }
    }
}
