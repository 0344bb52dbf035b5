//! What a model is trained for: the data, the loss, how the model is judged, and what is saved.

pub mod batch;
pub(crate) mod counts;
pub mod intent_slot;
pub mod language;
mod resolve;
pub mod scores;
pub mod validation;

use std::path::Path;

use fireclay_datasets::BatchKey;
use fireclay_kernels::{Backend, Collective};
use fireclay_model::{Transformer, TransformerConfig};

pub use batch::Batch;
pub use intent_slot::IntentSlot;
pub use language::Language;
pub use scores::{ClassificationReport, Scores};
pub use validation::{Judged, Validation};

use crate::failure::Failure;
use crate::progress::Watch;
use crate::recipe::{ModelSizes, Recipe, TaskName, TrainingRecipe};

/// A kind of work, with its data.
#[allow(clippy::large_enum_variant)] // A run has one of them.
pub enum Task {
    /// Each token predicts the next.
    Language(Language),
    /// Predicts the intent and slots of utterances.
    IntentSlot(IntentSlot),
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
    ///
    /// # Errors
    /// If the data is in files that cannot be read any more.
    pub fn batch(&self, training: &TrainingRecipe, step: u64) -> Result<Batch, Failure> {
        let rows = training.batch_size * training.accumulation;
        let key = BatchKey::new(training.seed, step);
        match self {
            Self::Language(language) => Ok(language.corpus.batch(key, rows)?.into()),
            Self::IntentSlot(task) => Ok(task.batch(training, key, rows).into()),
        }
    }

    /// How `model` does on held-out data: about `tokens` of a language's, of which each rank of `collective` reads a share, and all
    /// of the utterances, on every rank.
    ///
    /// # Errors
    /// If the device failed.
    pub fn validate<B: Backend>(
        &self,
        model: &Transformer<B>,
        training: &TrainingRecipe,
        tokens: usize,
        device: &B::Device,
        collective: &Collective,
    ) -> Result<Judged, Failure> {
        match self {
            Self::Language(language) => {
                let loss = language.validate(model, training.batch_size, tokens, device, collective)?;
                Ok(Judged { validation: Validation { loss, scores: None }, confusions: Vec::new() })
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

    /// The task of `recipe` with its data; with the tokenizer of `model`, where the run begins from one.
    ///
    /// # Errors
    /// If the data is missing, empty, malformed, not text, or too short.
    pub(crate) fn begin(recipe: &Recipe, model: Option<&Path>, watch: Watch<'_>) -> Result<Self, Failure> {
        match recipe.task {
            TaskName::Language => Language::begin(recipe, model, watch).map(Self::Language),
            TaskName::IntentSlot => IntentSlot::begin(recipe).map(Self::IntentSlot),
        }
    }

    /// The task of `recipe` with its data, as the tokenizer and labels in `folder` have it.
    ///
    /// # Errors
    /// As [`begin`](Self::begin), and if the tokenizer lacks something in the text.
    pub(crate) fn resume(recipe: &Recipe, folder: &Path, watch: Watch<'_>) -> Result<Self, Failure> {
        match recipe.task {
            TaskName::Language => Language::resume(recipe, folder, watch).map(Self::Language),
            TaskName::IntentSlot => IntentSlot::resume(recipe, folder).map(Self::IntentSlot),
        }
    }

    /// For each token of the task the one of the model that a run begins from whose embedding it takes, where the run has another
    /// tokenizer than that model.
    pub(crate) fn rows_to_begin_from(&self) -> Option<&[Option<u32>]> {
        match self {
            Self::Language(language) => language.rows.as_deref(),
            Self::IntentSlot(_) => None,
        }
    }

    /// Whether the model in `folder` has heads for this very task, so that they are not begun anew.
    ///
    /// # Errors
    /// If its labels are damaged.
    pub(crate) fn has_heads_of(&self, folder: &Path) -> Result<bool, Failure> {
        match self {
            Self::Language(_) => Ok(false),
            Self::IntentSlot(task) => task.has_labels_of(folder),
        }
    }

    /// Says what is about to be trained on, for people.
    pub(crate) fn describe(&self, config: &TransformerConfig, training: &TrainingRecipe) -> String {
        match self {
            Self::Language(language) => language.describe(config, training),
            Self::IntentSlot(task) => task.describe(config, training),
        }
    }

    /// Nats a token that no model can beat, where the data's source says so.
    pub fn source_entropy(&self) -> Option<f64> {
        match self {
            Self::Language(language) => language.corpus.source_entropy(),
            Self::IntentSlot(_) => None,
        }
    }

    /// Whether validations have scores beside the loss; otherwise the loss has a perplexity.
    pub(crate) fn has_scores(&self) -> bool {
        matches!(self, Self::IntentSlot(_))
    }

    /// How `model` does on the test data, where the task has such.
    ///
    /// # Errors
    /// If the device failed.
    pub(crate) fn test<B: Backend>(
        &self,
        model: &Transformer<B>,
        device: &B::Device,
    ) -> Result<Option<ClassificationReport>, Failure> {
        match self {
            Self::Language(_) => Ok(None),
            Self::IntentSlot(task) => task.test(model, device).map(Some),
        }
    }

    /// A checksum of what makes tokens and labels of the data: ranks that do not have the same one train different models.
    ///
    /// # Errors
    /// If a tokenizer cannot be written.
    pub(crate) fn checksum(&self) -> Result<String, Failure> {
        match self {
            Self::Language(language) => Ok(language.tokenizer.sha256()?),
            Self::IntentSlot(task) => task.checksum(),
        }
    }

    /// Whether there is test data.
    pub(crate) fn has_test(&self) -> bool {
        matches!(self, Self::IntentSlot(task) if task.test_count() > 0)
    }
}
