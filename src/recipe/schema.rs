//! What a recipe says: what to train, on what, and how.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fireclay_datasets::conversations::EMBEDDED_CHATS;
use fireclay_datasets::{EMBEDDED_NAMES, STDIN};
use serde::{Deserialize, Serialize};
use toml::Table;

use super::schedule::{Schedule, ScheduleKind};
use super::task::{ModelSizes, TaskName};
use super::tuning::{AdapterKind, LoraRecipe, PreferenceLoss, PreferenceRecipe};
use crate::failure::Failure;
use crate::precision::Precision;

/// Data embedded in the program.
pub const EMBEDDED: [&str; 4] = ["stories", "home", EMBEDDED_CHATS, EMBEDDED_NAMES];

/// How the names of embedded data begin that no folder can be confused with.
pub(super) const EMBEDDED_PREFIX: &str = "embedded:";

/// Tokenizers that a run trains itself.
const MADE_TOKENIZERS: [&str; 4] = ["byte", "char", "bpe", "pieces"];

/// Everything about a training run except its output folder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Name of the run.
    pub name: String,
    /// The task.
    #[serde(default)]
    pub task: TaskName,
    /// Folder of a model to initialize from. The run takes its shape and tokenizer; of `[model]`
    /// only dropout applies then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub init: Option<PathBuf>,
    /// Folder of an adapter on the initial model, to continue.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub init_adapter: Option<PathBuf>,
    /// Family and shape: `family`, and any field of
    /// [`TransformerConfig`](fireclay_model::TransformerConfig).
    #[serde(default)]
    pub model: Table,
    /// The training data.
    #[serde(default)]
    pub data: DataRecipe,
    /// The training settings.
    #[serde(default)]
    pub training: TrainingRecipe,
    /// The adapter that is trained, where `training.adapter` asks for one.
    #[serde(default)]
    pub lora: LoraRecipe,
    /// How preference pairs are learned, by the task `preference`.
    #[serde(default)]
    pub preference: PreferenceRecipe,
    /// Sizes that the data sets; filled in by [`Recipe::sized_for`].
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
    /// `stories`, `home`, `embedded:chats` or `embedded:names` for embedded data; else the path of a
    /// file, a folder or prepared tokens. Empty if it has to be given.
    pub source: String,
    /// Several sources instead of one, each with its sampling weight.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub corpora: BTreeMap<String, f64>,
    /// JSON field, or column of CSV, TSV or Parquet, with the document; `a.b` for a nested one. For
    /// labelled examples it may be empty: then it is recognised by its usual names.
    pub field: String,
    /// The field of the label, for labelled examples; empty to recognise it by its usual names.
    pub label_field: String,
    /// Language: `byte`, `char` or `bpe`. Utterances: `pieces`, trained on the training part's
    /// words; labelled examples: the same. Or the path of a `tokenizer.json`.
    pub tokenizer: String,
    /// Vocabulary size of `bpe`.
    pub bpe_size: usize,
    /// Vocabulary size of `pieces`.
    pub pieces: usize,
    /// Whether each word that utterances of the training part have more than once has an embedding,
    /// next to those of its pieces, and all other words share one.
    pub word_types: bool,
    /// Whether the intent and the slots of an utterance are decoded together: a slot costs something
    /// with an intent that never has it in training.
    pub joint_decoding: bool,
    /// Share of the data that is held out.
    pub holdout: f64,
    /// What is held out: the end of the data, or documents chosen at random.
    pub holdout_by: HoldoutBy,
    /// Whether attention is limited to a token's own document, where a row has several.
    pub documents_apart: bool,
    /// For conversations and preference pairs, whether a row has several, none of which sees
    /// another; else each has a separate row.
    pub packing: bool,
    /// For conversations and preference pairs, the file of a chat template; empty for the model's
    /// own.
    pub chat_template: String,
    /// Whether an initialized model takes the recipe's tokenizer, with new embedding rows for
    /// unknown tokens.
    pub resize_embedding: bool,
}

/// Which part of the data is held out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HoldoutBy {
    /// The end.
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
            label_field: String::new(),
            tokenizer: "byte".into(),
            bpe_size: 4096,
            pieces: 2000,
            word_types: false,
            joint_decoding: false,
            holdout: 0.1,
            holdout_by: HoldoutBy::Tail,
            documents_apart: false,
            packing: true,
            chat_template: String::new(),
            resize_embedding: false,
        }
    }
}

/// The optimizers.
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

/// The weights that a run ends with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Keep {
    /// Those of the best validation.
    #[default]
    Best,
    /// Those of the last one.
    Last,
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
    /// Forward passes of a step (gradient accumulation).
    pub accumulation: usize,
    /// Blocks per activation checkpoint: backward recomputes that many blocks at a time; 0 keeps
    /// all activations.
    pub checkpoint_activations: usize,
    /// Memory of each device that training may take, such as `24GB`; empty for no limit.
    pub memory_limit: String,
    /// `none` to train all weights, or `lora`.
    pub adapter: AdapterKind,
    /// Peak learning rate, after warm-up.
    pub learning_rate: f64,
    /// Learning rate at the end of a decaying schedule.
    pub min_learning_rate: f64,
    /// Warm-up steps.
    pub warmup_steps: u64,
    /// `cosine`, `linear`, `wsd` or `constant`.
    pub schedule: ScheduleKind,
    /// Steps of decay at the end of `wsd`; 0 for a fifth of all.
    pub decay_steps: u64,
    /// `adamw`.
    pub optimizer: OptimizerKind,
    /// AdamW: beta 1.
    pub beta_1: f64,
    /// AdamW: beta 2.
    pub beta_2: f64,
    /// AdamW: epsilon.
    pub epsilon: f64,
    /// Decoupled weight decay of matrices.
    pub weight_decay: f64,
    /// Maximum global gradient norm; 0 for no clipping.
    pub max_grad_norm: f64,
    /// Label smoothing in training.
    pub label_smoothing: f64,
    /// Factor on the load-balancing loss of each layer of experts.
    pub balance_loss: f64,
    /// Factor on the z-loss of their routers.
    pub router_z_loss: f64,
    /// Share of the tokens that are hidden and predicted, in the task masked.
    pub masked: f64,
    /// Weight of the intent loss relative to the tag loss.
    pub intent_weight: f64,
    /// Share of words read letter by letter, in training on utterances.
    pub split_words: f64,
    /// Share of slot values exchanged for another value of the same slot, in training on
    /// utterances.
    pub swap_values: f64,
    /// Share of these values that are made from the beginning of one value and the end of another, in
    /// slots that are open by their training values.
    pub splice_values: f64,
    /// Share of the values of such slots half of whose words are masked, in training on utterances.
    pub hide_values: f64,
    /// Share of words masked, in training on utterances.
    pub hide_words: f64,
    /// `f32` or `bf16`.
    pub precision: Precision,
    /// What several ranks share out: `optimizer` or `none`.
    pub shard: Shard,
    /// What several ranks add gradients up in: `f32` or `bf16`.
    pub reduce: Reduce,
    /// Random seed.
    pub seed: u64,
    /// Steps between validations.
    pub valid_every: u64,
    /// Tokens between validations, rounded up to a step; 0 to count steps.
    pub valid_every_tokens: u64,
    /// Whether the weights of the best validation are kept, or the last ones: `best` or `last`.
    pub keep: Keep,
    /// Patience: validations in a row without improvement after which training stops; 0 for never.
    pub patience: u64,
    /// Tokens of a sample generated at each validation; 0 for none.
    pub sample_tokens: usize,
    /// Prompt of that sample; empty to start a new document.
    pub sample_prompt: String,
    /// Peak TFLOP/s of the device, for its utilization; 0 for the datasheet's value, where known.
    pub peak_tflops: f64,
    /// Held-out tokens of a validation.
    pub valid_tokens: usize,
    /// Held-out tokens of the last validation; 0 for the usual number.
    pub final_valid_tokens: usize,
    /// Steps between checkpoints.
    pub checkpoint_every: u64,
    /// Checkpoints to keep, besides the best model.
    pub checkpoints_kept: usize,
}

impl TrainingRecipe {
    /// The memory limit in bytes, if there is one.
    ///
    /// # Errors
    /// If it is no size.
    pub(crate) fn memory_limit(&self) -> Result<Option<u64>, Failure> {
        let limit = self.memory_limit.trim();
        if limit.is_empty() {
            return Ok(None);
        }
        let (number, unit) = limit.split_at(limit.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(limit.len()));
        let unit = match unit.to_ascii_lowercase().as_str() {
            "mb" => Some(1e6),
            "gb" => Some(1e9),
            "mib" => Some(f64::from(1 << 20)),
            "gib" => Some(f64::from(1 << 30)),
            _ => None,
        };
        let bytes = unit.zip(number.trim().parse::<f64>().ok()).map(|(unit, number)| unit * number);
        match bytes {
            Some(bytes) if bytes.is_finite() && bytes >= 1.0 => Ok(Some(bytes as u64)),
            _ => Err(Failure::usage(format!("training.memory_limit is {limit}: write it as 24GB, or as 800MB"))),
        }
    }
}

impl Default for TrainingRecipe {
    fn default() -> Self {
        Self {
            steps: 1000,
            batch_size: 12,
            seq_length: 64,
            accumulation: 1,
            checkpoint_activations: 0,
            memory_limit: String::new(),
            adapter: AdapterKind::None,
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
            balance_loss: 0.01,
            router_z_loss: 0.001,
            masked: 0.3,
            intent_weight: 1.0,
            split_words: 0.0,
            swap_values: 0.0,
            splice_values: 0.0,
            hide_values: 0.0,
            hide_words: 0.0,
            precision: Precision::F32,
            shard: Shard::Optimizer,
            reduce: Reduce::F32,
            seed: 1337,
            valid_every: 250,
            valid_every_tokens: 0,
            keep: Keep::Best,
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
    /// Checks that every value is valid.
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
        if self.lora.rank == 0 {
            return Err(Failure::usage("lora.rank must be at least 1"));
        }
        training.memory_limit()?;
        if training.masked == 0.0 {
            return Err(Failure::usage("training.masked is 0: no token would be predicted"));
        }
        if training.adapter == AdapterKind::Lora && !self.task.takes_adapter() {
            return Err(Failure::usage(
                "training.adapter is lora: that is for the tasks language, chat and preference",
            ));
        }
        if let (Some(adapter), AdapterKind::None) = (&self.init_adapter, training.adapter) {
            return Err(Failure::usage(format!(
                "{} is an adapter, and training.adapter is none: continue it with --set adapter=lora, or merge it \
                 first",
                adapter.display()
            )));
        }
        if self.lora.dora && self.lora.lora_dropout > 0.0 {
            return Err(Failure::usage("lora.lora_dropout and lora.dora: DoRA is trained without dropout"));
        }
        let alpha = self.lora.alpha;
        if !(alpha.is_finite() && alpha > 0.0) {
            return Err(Failure::usage(format!("lora.alpha is {alpha}: it must be a number above 0")));
        }
        let beta = self.preference.beta;
        if !(beta.is_finite() && beta > 0.0) {
            return Err(Failure::usage(format!("preference.beta is {beta}: it must be a number above 0")));
        }
        if self.preference.loss == PreferenceLoss::Ipo && training.label_smoothing > 0.0 {
            return Err(Failure::usage("training.label_smoothing has no effect on preference.loss=ipo"));
        }
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
            ("balance_loss", training.balance_loss),
            ("router_z_loss", training.router_z_loss),
            ("peak_tflops", training.peak_tflops),
        ];
        if let Some((name, value)) = numbers.into_iter().find(|(_, value)| !value.is_finite() || *value < 0.0) {
            return Err(Failure::usage(format!("training.{name} is {value}: it must be a number, and not below 0")));
        }
        let shares = [
            ("training.beta_1", training.beta_1),
            ("training.beta_2", training.beta_2),
            ("training.label_smoothing", training.label_smoothing),
            ("training.masked", training.masked),
            ("training.split_words", training.split_words),
            ("training.swap_values", training.swap_values),
            ("training.splice_values", training.splice_values),
            ("training.hide_values", training.hide_values),
            ("training.hide_words", training.hide_words),
            ("lora.lora_dropout", self.lora.lora_dropout),
        ];
        if let Some((name, value)) = shares.into_iter().find(|(_, value)| !(0.0..1.0).contains(value)) {
            return Err(Failure::usage(format!("{name} is {value}: it must be at least 0 and below 1")));
        }
        if training.keep == Keep::Last && training.patience > 0 {
            return Err(Failure::usage(
                "training.patience stops after the best validation, and training.keep is last: set keep=best",
            ));
        }
        if self.data.source == STDIN || self.data.corpora.contains_key(STDIN) {
            let mend = "fireclay prepare --data - --tokenizer FILE --out DIR, then train with --data DIR";
            return Err(Failure::usage(format!("standard input cannot be read again when a run resumes: {mend}")));
        }
        if !self.data.corpora.is_empty() && !self.data.source.is_empty() {
            return Err(Failure::usage("data.source and data.corpora are both set: use one of them"));
        }
        if let Some((name, weight)) =
            self.data.corpora.iter().find(|(_, weight)| !(weight.is_finite() && **weight > 0.0))
        {
            return Err(Failure::usage(format!("data.corpora: the weight of {name} is {weight}: it must be above 0")));
        }
        if training.decay_steps > training.steps {
            let (decay, steps) = (training.decay_steps, training.steps);
            return Err(Failure::usage(format!(
                "training.decay_steps is {decay}, more than the {steps} training steps"
            )));
        }
        if !(self.data.holdout > 0.0 && self.data.holdout < 1.0) {
            let holdout = self.data.holdout;
            return Err(Failure::usage(format!("data.holdout is {holdout}: it must be above 0 and below 1")));
        }
        Ok(self)
    }

    /// The learning rate schedule.
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

    /// The training data, each source with its weight.
    pub(crate) fn corpora(&self) -> Result<Vec<(&Path, f64)>, Failure> {
        let DataRecipe { source, corpora, .. } = &self.data;
        match (source.is_empty(), corpora.is_empty()) {
            (true, true) => Err(self.lacks_data("text")),
            (false, _) => Ok(vec![(Path::new(source), 1.0)]),
            (true, false) => Ok(corpora.iter().map(|(path, weight)| (Path::new(path), *weight)).collect()),
        }
    }

    /// The tokenizer.json that it names, if any.
    pub(crate) fn tokenizer_file(&self) -> Option<&Path> {
        let named = self.data.tokenizer.as_str();
        (!MADE_TOKENIZERS.contains(&named) && !named.is_empty()).then_some(Path::new(named))
    }

    /// The file of a chat template, where it names one.
    pub(crate) fn chat_template(&self) -> Option<&Path> {
        let named = self.data.chat_template.as_str();
        (!named.is_empty()).then_some(Path::new(named))
    }

    /// The error for a recipe without training data.
    pub(crate) fn lacks_data(&self, what: &str) -> Failure {
        let name = &self.name;
        Failure::usage(format!("recipe {name} needs {what} as training data: give it with --data PATH"))
    }
}
