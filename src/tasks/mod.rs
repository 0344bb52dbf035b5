//! Training tasks: data, loss, validation, and saved files.

pub mod batch;
pub mod chat;
pub mod classify;
pub(crate) mod counts;
mod held_out;
pub mod intent_slot;
pub mod language;
pub mod masked;
pub mod preference;
pub(crate) mod resolve;
pub mod rewards;
pub mod scores;
pub mod test_report;
pub mod validation;

use std::path::Path;

use fireclay_datasets::BatchKey;
use fireclay_kernels::{Backend, Collective};
use fireclay_model::{Transformer, TransformerConfig};

pub use batch::Batch;
pub use chat::Chat;
pub use classify::Classify;
pub use intent_slot::IntentSlot;
pub use language::Language;
pub use masked::Masked;
pub use preference::Preferences;
pub use rewards::Rewards;
pub use scores::{ClassificationReport, Scores};
pub use test_report::TestReport;
pub use validation::{Validation, ValidationOutput};

use crate::failure::Failure;
use crate::progress::Watch;
use crate::recipe::{ModelSizes, Recipe, TaskName, TrainingRecipe};

/// A task with its data.
#[allow(clippy::large_enum_variant)] // A run has one of them.
pub enum Task {
    /// Next-token prediction.
    Language(Language),
    /// Prediction of hidden tokens.
    Masked(Masked),
    /// Learns what the assistant writes in conversations.
    Chat(Chat),
    /// Learns to prefer one of two answers.
    Preference(Preferences),
    /// Intent and slot prediction for utterances.
    IntentSlot(IntentSlot),
    /// Labels of examples.
    Classify(Classify),
}

impl Task {
    /// The sizes that it needs of a model.
    pub fn sizes(&self) -> ModelSizes {
        match self {
            Self::Language(language) => {
                ModelSizes { vocab_size: language.tokenizer.vocab_size(), ..ModelSizes::default() }
            }
            Self::Masked(masked) => {
                ModelSizes { vocab_size: masked.language().tokenizer.vocab_size(), ..ModelSizes::default() }
            }
            Self::Chat(chat) => ModelSizes { vocab_size: chat.tokenizer().vocab_size(), ..ModelSizes::default() },
            Self::Preference(task) => ModelSizes { vocab_size: task.tokenizer().vocab_size(), ..ModelSizes::default() },
            Self::IntentSlot(task) => task.sizes(),
            Self::Classify(task) => task.sizes(),
        }
    }

    /// The rows of a training step: a pure function of the recipe's seed and `step`.
    ///
    /// # Errors
    /// If its data files cannot be read any more.
    pub fn batch(&self, training: &TrainingRecipe, step: u64) -> Result<Batch, Failure> {
        let rows = training.batch_size * training.accumulation;
        let key = BatchKey::new(training.seed, step);
        match self {
            Self::Language(language) => Ok(language.corpus.batch(key, rows)?.into()),
            Self::Masked(masked) => Ok(masked.batch(training, key, rows)?.into()),
            Self::Chat(chat) => Ok(chat.batch(key, rows).into()),
            Self::Preference(task) => Ok(task.batch(key, rows).into()),
            Self::IntentSlot(task) => Ok(task.batch(training, key, rows).into()),
            Self::Classify(task) => Ok(task.batch(key, rows).into()),
        }
    }

    /// Validates `model`: on about `tokens` held-out tokens of a language task, of which each rank of
    /// `collective` reads a share, and on all utterances or examples otherwise. Preferences are measured
    /// against `reference`.
    ///
    /// # Errors
    /// If the device fails, or there is no reference and the task has one.
    pub fn validate<B: Backend>(
        &self,
        model: &Transformer<B>,
        reference: Option<&Transformer<B>>,
        recipe: &Recipe,
        tokens: usize,
        device: &B::Device,
        collective: &Collective,
    ) -> Result<ValidationOutput, Failure> {
        let training = &recipe.training;
        let plain = |validation: Validation| Ok(ValidationOutput { validation, confusions: Vec::new() });
        match self {
            Self::Language(language) => {
                let loss = language.validate(model, training.batch_size, tokens, device, collective)?;
                plain(Validation::of_loss(loss))
            }
            Self::Masked(masked) => {
                let loss = masked.validate(model, training, tokens, device, collective)?;
                plain(Validation::of_loss(loss))
            }
            Self::Chat(chat) => plain(chat.validate(model, training.batch_size, tokens, device, collective)?),
            Self::Preference(task) => {
                let reference =
                    reference.ok_or_else(|| Failure::new("preferences are measured against a reference"))?;
                plain(task.validate(model, reference, recipe, tokens, device, collective)?)
            }
            Self::IntentSlot(task) => task.validate(model, training, device),
            Self::Classify(task) => task.validate(model, device),
        }
    }

    /// Writes the tokenizer and, by task, the end token or the labels.
    ///
    /// # Errors
    /// If the file system fails.
    pub(crate) fn save(&self, folder: &Path) -> Result<(), Failure> {
        match self {
            Self::Language(language) => language.save(folder),
            Self::Masked(masked) => masked.language().save(folder),
            Self::Chat(chat) => chat.save(folder),
            Self::Preference(task) => task.save(folder),
            Self::IntentSlot(task) => task.save(folder),
            Self::Classify(task) => task.save(folder),
        }
    }

    /// The task of `recipe` with its data, and with the tokenizer of `model` if given.
    ///
    /// # Errors
    /// If the data is missing, empty, malformed, not text, or too short.
    pub(crate) fn begin(recipe: &Recipe, model: Option<&Path>, watch: Watch<'_>) -> Result<Self, Failure> {
        match recipe.task {
            TaskName::Language => Language::begin(recipe, model, watch).map(Self::Language),
            TaskName::Masked => Masked::begin(recipe, model, watch).map(Self::Masked),
            TaskName::Chat => Chat::begin(recipe, model).map(Self::Chat),
            TaskName::Preference => Preferences::begin(recipe, model).map(Self::Preference),
            TaskName::IntentSlot => IntentSlot::begin(recipe).map(Self::IntentSlot),
            TaskName::Classify => Classify::begin(recipe, model).map(Self::Classify),
        }
    }

    /// The task of `recipe` with its data, and with the tokenizer and labels in `folder`.
    ///
    /// # Errors
    /// As [`begin`](Self::begin), and if the tokenizer lacks a part of the text.
    pub(crate) fn resume(recipe: &Recipe, folder: &Path, watch: Watch<'_>) -> Result<Self, Failure> {
        match recipe.task {
            TaskName::Language => Language::resume(recipe, folder, watch).map(Self::Language),
            TaskName::Masked => Masked::resume(recipe, folder, watch).map(Self::Masked),
            TaskName::Chat => Chat::resume(recipe, folder).map(Self::Chat),
            TaskName::Preference => Preferences::resume(recipe, folder).map(Self::Preference),
            TaskName::IntentSlot => IntentSlot::resume(recipe, folder).map(Self::IntentSlot),
            TaskName::Classify => Classify::resume(recipe, folder).map(Self::Classify),
        }
    }

    /// For each token, the token of the initial model whose embedding it takes, if the tokenizers
    /// differ.
    pub(crate) fn initial_rows(&self) -> Option<&[Option<u32>]> {
        match self {
            Self::Language(language) => language.rows.as_deref(),
            Self::Masked(masked) => masked.language().rows.as_deref(),
            Self::Chat(chat) => chat.initial_rows(),
            Self::Preference(task) => task.initial_rows(),
            Self::IntentSlot(_) | Self::Classify(_) => None,
        }
    }

    /// Whether the model in `folder` has heads for this task, to keep instead of new ones.
    ///
    /// # Errors
    /// If its labels are damaged.
    pub(crate) fn has_heads_of(&self, folder: &Path) -> Result<bool, Failure> {
        match self {
            Self::Language(_) | Self::Masked(_) | Self::Chat(_) | Self::Preference(_) => Ok(false),
            Self::IntentSlot(task) => task.has_labels_of(folder),
            Self::Classify(task) => task.has_head_of(folder),
        }
    }

    /// Describes the training data.
    pub(crate) fn describe(&self, config: &TransformerConfig, training: &TrainingRecipe) -> String {
        match self {
            Self::Language(language) => language.describe(config, training),
            Self::Masked(masked) => masked.describe(config, training),
            Self::Chat(chat) => chat.describe(config, training),
            Self::Preference(task) => task.describe(training),
            Self::IntentSlot(task) => task.describe(config, training),
            Self::Classify(task) => task.describe(config, training),
        }
    }

    /// Lower bound of the loss in nats per token, if the data's source has a known entropy.
    pub fn source_entropy(&self) -> Option<f64> {
        match self {
            Self::Language(language) => language.corpus.source_entropy(),
            Self::Masked(_) | Self::Chat(_) | Self::Preference(_) | Self::IntentSlot(_) | Self::Classify(_) => None,
        }
    }

    /// Whether validations have scores.
    pub(crate) fn has_scores(&self) -> bool {
        matches!(self, Self::IntentSlot(_) | Self::Classify(_))
    }

    /// Whether its validations count answers: then the model is validated before the first step,
    /// too.
    pub(crate) fn has_answers(&self) -> bool {
        matches!(self, Self::Chat(_))
    }

    /// Whether its loss is that of tokens, and has a perplexity.
    pub(crate) fn has_perplexity(&self) -> bool {
        matches!(self, Self::Language(_) | Self::Chat(_))
    }

    /// Whether the model is measured against a reference: the model as the run begins.
    pub(crate) fn has_reference(&self) -> bool {
        matches!(self, Self::Preference(_))
    }

    /// The first example of conversations or preference pairs, with what is supervised in colour or
    /// in double brackets.
    pub(crate) fn preview(&self, colour: bool) -> Option<Result<String, Failure>> {
        match self {
            Self::Chat(chat) => Some(chat.preview(colour)),
            Self::Preference(task) => Some(task.preview(colour)),
            Self::Language(_) | Self::Masked(_) | Self::IntentSlot(_) | Self::Classify(_) => None,
        }
    }

    /// The report of `model` on the test data, if the task has any.
    ///
    /// # Errors
    /// If the device fails.
    pub(crate) fn test<B: Backend>(
        &self,
        model: &Transformer<B>,
        device: &B::Device,
    ) -> Result<Option<TestReport>, Failure> {
        match self {
            Self::Language(_) | Self::Masked(_) | Self::Chat(_) | Self::Preference(_) => Ok(None),
            Self::IntentSlot(task) => Ok(Some(TestReport::Utterances(task.test(model, device)?))),
            Self::Classify(task) => Ok(Some(TestReport::Classes(task.test(model, device)?))),
        }
    }

    /// A checksum of what makes tokens and labels of the data: ranks that do not have the same one
    /// train different models.
    ///
    /// # Errors
    /// If a tokenizer cannot be written.
    pub(crate) fn checksum(&self) -> Result<String, Failure> {
        match self {
            Self::Language(language) => Ok(language.tokenizer.sha256()?),
            Self::Masked(masked) => Ok(masked.language().tokenizer.sha256()?),
            Self::Chat(chat) => chat.checksum(),
            Self::Preference(task) => task.checksum(),
            Self::IntentSlot(task) => task.checksum(),
            Self::Classify(task) => task.checksum(),
        }
    }

    /// Whether the task has test data: for labelled examples those of the validation will do.
    pub(crate) fn has_test(&self) -> bool {
        match self {
            Self::IntentSlot(task) => task.test_count() > 0,
            task => matches!(task, Self::Classify(_)),
        }
    }
}
