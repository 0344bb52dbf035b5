//! What a recipe says: what to train, on what, and how.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fireclay_datasets::STDIN;
use serde::{Deserialize, Serialize};
use toml::Table;

use super::schedule::{Schedule, ScheduleKind};
use super::task::{ModelSizes, TaskName};
use crate::failure::Failure;
use crate::precision::Precision;

/// Data that is in the program itself.
pub const EMBEDDED: [&str; 2] = ["stories", "home"];

/// Tokenizers that a run makes itself.
const MADE_TOKENIZERS: [&str; 4] = ["byte", "char", "bpe", "pieces"];

/// Everything about a training run but where it goes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Name of the run.
    pub name: String,
    /// What to train for.
    #[serde(default)]
    pub task: TaskName,
    /// Folder of a model to begin from, whose shape and tokenizer are taken; of `[model]` only the dropout counts then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub init: Option<PathBuf>,
    /// Family and shape: `family`, and any field of [`TransformerConfig`](fireclay_model::TransformerConfig).
    #[serde(default)]
    pub model: Table,
    /// What to learn from.
    #[serde(default)]
    pub data: DataRecipe,
    /// How to learn.
    #[serde(default)]
    pub training: TrainingRecipe,
    /// What the data asks for; filled in by [`Recipe::sized_for`].
    #[serde(default, skip_serializing_if = "is_unknown")]
    pub(crate) sizes: ModelSizes,
}

pub(super) fn is_unknown(sizes: &ModelSizes) -> bool {
    *sizes == ModelSizes::default()
}

/// The `[data]` of a recipe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DataRecipe {
    /// `stories` or `home` for an embedded grammar, else the path of a text, of a folder, or of prepared tokens; empty to ask for
    /// one.
    pub source: String,
    /// Several texts instead of one, each with its weight: how often it is drawn from, beside the others.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub corpora: BTreeMap<String, f64>,
    /// The field of JSON, or the column of a table or of Parquet, that holds a document; of what is
    /// nested `a.b`.
    pub field: String,
    /// For a language `byte`, `char` or `bpe`, for utterances `pieces` (of the training part's words); or the path of a
    /// `tokenizer.json`.
    pub tokenizer: String,
    /// Size of the vocabulary of `bpe`.
    pub bpe_size: usize,
    /// Size of the vocabulary of pieces, for utterances.
    pub pieces: usize,
    /// Share of the text held out.
    pub holdout: f64,
    /// What is held out: the end of the text, or whole documents from everywhere.
    pub holdout_by: HoldoutBy,
    /// Whether a token sees none before its own document, where a row has several.
    pub documents_apart: bool,
    /// Whether a model to begin from takes the recipe's tokenizer, and rows of its embedding for tokens that it does not know.
    pub resize_embedding: bool,
}

/// What a text's held-out share is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HoldoutBy {
    /// Its end.
    #[default]
    Tail,
    /// Documents, chosen by their numbers.
    Document,
}

impl HoldoutBy {
    /// Whether whole documents are held out.
    pub fn documents(self) -> bool {
        self == Self::Document
    }
}

impl Default for DataRecipe {
    fn default() -> Self {
        Self {
            source: String::new(),
            corpora: BTreeMap::new(),
            field: "text".into(),
            tokenizer: "byte".into(),
            bpe_size: 4096,
            pieces: 2000,
            holdout: 0.1,
            holdout_by: HoldoutBy::Tail,
            documents_apart: false,
            resize_embedding: false,
        }
    }
}

/// Which optimizer updates the parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OptimizerKind {
    /// AdamW (Loshchilov and Hutter, 2019).
    #[serde(rename = "adamw")]
    AdamW,
}

/// What is shared out among several ranks, each of which then has a part of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Shard {
    /// Nothing: every rank keeps and updates everything.
    None,
    /// What the optimizer keeps for a parameter, and the update (ZeRO-1, Rajbhandari et al., 2020).
    #[default]
    Optimizer,
}

/// The dtype in which gradients are added up over the ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reduce {
    /// As they are.
    #[default]
    F32,
    /// Rounded before, which halves what is sent.
    Bf16,
}

/// The `[training]` of a recipe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainingRecipe {
    /// Optimizer steps.
    pub steps: u64,
    /// Rows of a forward pass, of all ranks together.
    pub batch_size: usize,
    /// Tokens of a row.
    pub seq_length: usize,
    /// Forward passes of a step.
    pub accumulation: usize,
    /// Blocks of which the backward pass computes the activations again, together, in place of keeping them; 0 keeps all.
    pub checkpoint_activations: usize,
    /// Learning rate after the warm-up.
    pub learning_rate: f64,
    /// Learning rate at the end of a schedule that falls.
    pub min_learning_rate: f64,
    /// Steps of warm-up.
    pub warmup_steps: u64,
    /// `cosine`, `linear`, `wsd` or `constant`.
    pub schedule: ScheduleKind,
    /// Steps at the end in which the rate of `wsd` falls; 0 for a fifth of all.
    pub decay_steps: u64,
    /// `adamw`.
    pub optimizer: OptimizerKind,
    /// AdamW's decay of the first moment.
    pub beta_1: f64,
    /// AdamW's decay of the second moment.
    pub beta_2: f64,
    /// AdamW's epsilon.
    pub epsilon: f64,
    /// Decoupled decay of matrices.
    pub weight_decay: f64,
    /// Largest global norm of the gradients; 0 for no clipping.
    pub max_grad_norm: f64,
    /// Share of the targets' probability spread over the vocabulary, in training.
    pub label_smoothing: f64,
    /// Weight of the intents' loss beside that of the tags.
    pub intent_weight: f64,
    /// Share of the words that are read letter by letter, in training on utterances.
    pub split_words: f64,
    /// Share of the slots' values that are exchanged for another of the same slot, in training on utterances.
    pub swap_values: f64,
    /// Share of the words that are hidden, in training on utterances.
    pub hide_words: f64,
    /// `f32` or `bf16`.
    pub precision: Precision,
    /// What several ranks share out: `optimizer` or `none`.
    pub shard: Shard,
    /// What several ranks add gradients up in: `f32` or `bf16`.
    pub reduce: Reduce,
    /// Where all randomness comes from.
    pub seed: u64,
    /// Steps between validations.
    pub valid_every: u64,
    /// Tokens between validations, to the next whole step; 0 to count by steps.
    pub valid_every_tokens: u64,
    /// Validations in a row without a better one after which training stops; 0 for never.
    pub patience: u64,
    /// Tokens of a sample of text at each validation; 0 for none.
    pub sample_tokens: usize,
    /// What a sample goes on from; empty for the beginning of a text.
    pub sample_prompt: String,
    /// TFLOP/s that the device can do, for the share that is used; 0 for what its datasheet says, where that is known.
    pub peak_tflops: f64,
    /// Held-out tokens of a validation.
    pub valid_tokens: usize,
    /// Held-out tokens of the last validation; 0 for as many as of the others.
    pub final_valid_tokens: usize,
    /// Steps between checkpoints.
    pub checkpoint_every: u64,
    /// Checkpoints kept; the best model is kept besides.
    pub checkpoints_kept: usize,
}

impl Default for TrainingRecipe {
    fn default() -> Self {
        Self {
            steps: 1000,
            batch_size: 12,
            seq_length: 64,
            accumulation: 1,
            checkpoint_activations: 0,
            learning_rate: 1e-3,
            min_learning_rate: 1e-4,
            warmup_steps: 100,
            schedule: ScheduleKind::Cosine,
            decay_steps: 0,
            optimizer: OptimizerKind::AdamW,
            beta_1: 0.9,
            beta_2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            max_grad_norm: 1.0,
            label_smoothing: 0.0,
            intent_weight: 1.0,
            split_words: 0.0,
            swap_values: 0.0,
            hide_words: 0.0,
            precision: Precision::F32,
            shard: Shard::Optimizer,
            reduce: Reduce::F32,
            seed: 1337,
            valid_every: 250,
            valid_every_tokens: 0,
            patience: 0,
            sample_tokens: 64,
            sample_prompt: String::new(),
            peak_tflops: 0.0,
            valid_tokens: 20_000,
            final_valid_tokens: 0,
            checkpoint_every: 250,
            checkpoints_kept: 2,
        }
    }
}

impl Recipe {
    /// Refuses values that no run can have.
    ///
    /// # Errors
    /// Names the value.
    pub fn check(self) -> Result<Self, Failure> {
        let training = &self.training;
        let counts = [
            ("steps", training.steps as usize),
            ("batch_size", training.batch_size),
            ("seq_length", training.seq_length),
            ("accumulation", training.accumulation),
            ("valid_every", training.valid_every as usize),
            ("valid_tokens", training.valid_tokens),
            ("checkpoint_every", training.checkpoint_every as usize),
            ("checkpoints_kept", training.checkpoints_kept),
        ];
        if let Some((name, _)) = counts.into_iter().find(|(_, count)| *count == 0) {
            return Err(Failure::usage(format!("training.{name} must be at least 1")));
        }
        if !training.precision.trains() {
            let name = training.precision.name();
            return Err(Failure::usage(format!("training.precision is {name}: training takes f32, tf32 or bf16")));
        }
        let numbers = [
            ("learning_rate", training.learning_rate),
            ("min_learning_rate", training.min_learning_rate),
            ("epsilon", training.epsilon),
            ("weight_decay", training.weight_decay),
            ("max_grad_norm", training.max_grad_norm),
            ("intent_weight", training.intent_weight),
            ("peak_tflops", training.peak_tflops),
        ];
        if let Some((name, value)) = numbers.into_iter().find(|(_, value)| !value.is_finite() || *value < 0.0) {
            return Err(Failure::usage(format!("training.{name} is {value}: it must be a number, and not below 0")));
        }
        let shares = [
            ("training.beta_1", training.beta_1),
            ("training.beta_2", training.beta_2),
            ("training.label_smoothing", training.label_smoothing),
            ("training.split_words", training.split_words),
            ("training.swap_values", training.swap_values),
            ("training.hide_words", training.hide_words),
        ];
        if let Some((name, value)) = shares.into_iter().find(|(_, value)| !(0.0..1.0).contains(value)) {
            return Err(Failure::usage(format!("{name} is {value}: it must be at least 0 and below 1")));
        }
        if self.data.source == STDIN || self.data.corpora.contains_key(STDIN) {
            let mend = "fireclay prepare --data - --tokenizer FILE --out DIR, then train with --data DIR";
            return Err(Failure::usage(format!(
                "standard input can be read but once, and a run may go on later: {mend}"
            )));
        }
        if !self.data.corpora.is_empty() && !self.data.source.is_empty() {
            return Err(Failure::usage("data.source and data.corpora are both set: a run has the one or the others"));
        }
        if let Some((name, weight)) =
            self.data.corpora.iter().find(|(_, weight)| !(weight.is_finite() && **weight > 0.0))
        {
            return Err(Failure::usage(format!("data.corpora: the weight of {name} is {weight}: it must be above 0")));
        }
        if training.decay_steps > training.steps {
            let (decay, steps) = (training.decay_steps, training.steps);
            return Err(Failure::usage(format!(
                "training.decay_steps is {decay}, more than the {steps} steps that there are"
            )));
        }
        if !(self.data.holdout > 0.0 && self.data.holdout < 1.0) {
            let holdout = self.data.holdout;
            return Err(Failure::usage(format!("data.holdout is {holdout}: it must be above 0 and below 1")));
        }
        Ok(self)
    }

    /// The learning rate over the run.
    pub fn schedule(&self) -> Schedule {
        let TrainingRecipe { schedule, learning_rate, min_learning_rate, warmup_steps, decay_steps, steps, .. } =
            self.training;
        let decay_steps = if decay_steps == 0 { steps.div_ceil(5) } else { decay_steps };
        Schedule {
            kind: schedule,
            maximum: learning_rate,
            minimum: min_learning_rate,
            warmup_steps,
            decay_steps,
            steps,
        }
    }

    /// Steps from one validation to the next.
    pub fn valid_every(&self) -> u64 {
        let training = &self.training;
        let tokens = (training.batch_size * training.accumulation * training.seq_length) as u64;
        match training.valid_every_tokens {
            0 => training.valid_every,
            wanted => wanted.div_ceil(tokens.max(1)),
        }
    }

    /// The texts to learn from, each with its weight.
    pub(crate) fn texts(&self) -> Result<Vec<(&Path, f64)>, Failure> {
        let DataRecipe { source, corpora, .. } = &self.data;
        match (source.is_empty(), corpora.is_empty()) {
            (true, true) => Err(self.lacks_data("text")),
            (false, _) => Ok(vec![(Path::new(source), 1.0)]),
            (true, false) => Ok(corpora.iter().map(|(path, weight)| (Path::new(path), *weight)).collect()),
        }
    }

    /// The tokenizer.json that it names, where it does not say how to make one.
    pub(crate) fn tokenizer_file(&self) -> Option<&Path> {
        let named = self.data.tokenizer.as_str();
        (!MADE_TOKENIZERS.contains(&named) && !named.is_empty()).then_some(Path::new(named))
    }

    /// That there is nothing to learn from.
    pub(crate) fn lacks_data(&self, what: &str) -> Failure {
        let name = &self.name;
        Failure::usage(format!("recipe {name} needs {what} to learn from: give it with --data PATH"))
    }
}
