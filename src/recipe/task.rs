//! Tasks by name, and what they need of a model.

use fireclay_datasets::{Labels, PieceTokenizer};
use fireclay_model::{AttentionDirection, TransformerConfig};
use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::run_folder::{LABELS, TOKENIZER};

/// A task by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum TaskName {
    /// Predict the next token
    #[default]
    Language,
    /// Predict hidden tokens, for encoders
    Masked,
    /// Predict the assistant's messages in conversations
    Chat,
    /// Prefer one answer to another (DPO)
    Preference,
    /// Predict an utterance's intent and slots
    IntentSlot,
    /// Predict the label of a text
    Classify,
}

impl TaskName {
    /// The attention that the task needs, and why.
    pub(crate) fn attention(self) -> (AttentionDirection, &'static str) {
        match self {
            Self::Language | Self::Chat | Self::Preference => {
                (AttentionDirection::Causal, "a language model must not see the tokens that it predicts")
            }
            Self::Masked => (AttentionDirection::Bidirectional, "a hidden token depends on what follows it"),
            Self::IntentSlot => (AttentionDirection::Bidirectional, "a word's tag depends on what follows it"),
            Self::Classify => (AttentionDirection::Bidirectional, "a label depends on the whole text"),
        }
    }

    /// Its default recipe: for given data and model, or without.
    pub fn default_recipe(self, has_data: bool, has_model: bool) -> &'static str {
        match (self, has_data, has_model) {
            (Self::Language, false, false) => "stories",
            (Self::Language, ..) => "shakespeare-char-cpu",
            (Self::Masked, ..) => "masked",
            (Self::Chat, ..) => "chat-lora",
            (Self::Preference, ..) => "dpo",
            (Self::IntentSlot, false, _) => "home",
            (Self::IntentSlot, true, _) => "intent-slot",
            (Self::Classify, _, false) => "classify",
            (Self::Classify, _, true) => "classify-tune",
        }
    }

    /// Whether it trains adapters.
    pub(crate) fn takes_adapter(self) -> bool {
        matches!(self, Self::Language | Self::Chat | Self::Preference)
    }

    /// Whether its models generate text.
    pub fn writes_text(self) -> bool {
        matches!(self, Self::Language | Self::Chat | Self::Preference)
    }
}

/// Sizes that a task needs of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelSizes {
    /// Vocabulary size.
    pub vocab_size: usize,
    /// Number of intents; 0 for none.
    #[serde(default)]
    pub intents: usize,
    /// Number of tags; 0 for none.
    #[serde(default)]
    pub tags: usize,
    /// Labels of examples; empty for none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub labels: Vec<String>,
    /// Number of types of words; 0 for none.
    #[serde(default)]
    pub word_types: usize,
}

impl ModelSizes {
    /// For utterances with these labels and this tokenizer.
    pub(crate) fn of_utterances(labels: &Labels, pieces: &PieceTokenizer) -> Self {
        Self {
            vocab_size: pieces.vocab_size(),
            intents: labels.intents.len(),
            tags: labels.tag_count(),
            labels: Vec::new(),
            word_types: labels.type_count(),
        }
    }

    /// Refuses a model that is too small.
    pub(crate) fn fit(self, config: &TransformerConfig) -> Result<(), Failure> {
        let Self { vocab_size, intents, tags, labels, word_types } = self;
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
        let own = config.classifier.as_ref().map_or(&[][..], |classifier| &classifier.labels);
        if labels != own {
            let shown = |labels: &[String]| format!("{} labels ({})", labels.len(), labels.join(", "));
            return Err(Failure::new(format!("the data has {}, but the model {}", shown(&labels), shown(own))));
        }
        if word_types > 0 && word_types != config.token_types {
            let known = config.token_types;
            return Err(Failure::new(format!("{LABELS} has {word_types} types of words, but the model {known}")));
        }
        Ok(())
    }
}
