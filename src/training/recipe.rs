//! Recipes: what to train, on what, and how, as TOML.

use std::path::{Path, PathBuf};

use fireclay_datasets::{
    Corpus, Labels, PieceTokenizer, StoryCorpus, TextCorpus, Tokenizer, TokenizerKind, Utterances, read_text,
};
use fireclay_kernels::Backend;
use fireclay_model::{AttentionDirection, ModelFolder, Transformer, TransformerConfig};
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;
use toml::{Table, Value};

use crate::Failure;
use crate::precision::Precision;
use crate::tasks::{IntentSlot, Language, ModelSizes, Task, TaskName};
use crate::training::checkpoint::{LABELS, TOKENIZER};
use crate::training::schedule::{Schedule, ScheduleKind};

/// Data that is in the program itself.
pub const EMBEDDED: [&str; 2] = ["stories", "home"];

/// The recipes that come with the program.
const SHIPPED: [(&str, &str); 7] = [
    ("stories", include_str!("recipes/stories.toml")),
    ("shakespeare-char-cpu", include_str!("recipes/shakespeare-char-cpu.toml")),
    ("shakespeare-char-gpu", include_str!("recipes/shakespeare-char-gpu.toml")),
    ("gpt2-124m", include_str!("recipes/gpt2-124m.toml")),
    ("llama-15m", include_str!("recipes/llama-15m.toml")),
    ("home", include_str!("recipes/home.toml")),
    ("intent-slot", include_str!("recipes/intent-slot.toml")),
];

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
    /// Family and shape: `family`, and any field of [`TransformerConfig`].
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
    sizes: ModelSizes,
}

fn is_unknown(sizes: &ModelSizes) -> bool {
    *sizes == ModelSizes::default()
}

/// The `[data]` of a recipe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DataRecipe {
    /// `stories` or `home` for an embedded grammar, else the path of a text or of a folder; empty to ask for one.
    pub source: String,
    /// For a language `byte`, `char` or `bpe`, for utterances `pieces` (of the training part's words); or the path of a
    /// `tokenizer.json`.
    pub tokenizer: String,
    /// Size of the vocabulary of `bpe`.
    pub bpe_size: usize,
    /// Size of the vocabulary of pieces, for utterances.
    pub pieces: usize,
    /// Share of the text held out at its end.
    pub holdout: f64,
}

impl Default for DataRecipe {
    fn default() -> Self {
        Self { source: String::new(), tokenizer: "byte".into(), bpe_size: 4096, pieces: 2000, holdout: 0.1 }
    }
}

/// The `[training]` of a recipe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainingRecipe {
    /// Optimizer steps.
    pub steps: u64,
    /// Rows of a forward pass.
    pub batch_size: usize,
    /// Tokens of a row.
    pub seq_length: usize,
    /// Forward passes of a step.
    pub accumulation: usize,
    /// Learning rate after the warm-up.
    pub learning_rate: f64,
    /// Learning rate at the end of a cosine.
    pub min_learning_rate: f64,
    /// Steps of warm-up.
    pub warmup_steps: u64,
    /// `cosine` or `constant`.
    pub schedule: ScheduleKind,
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
    /// Where all randomness comes from.
    pub seed: u64,
    /// Steps between validations.
    pub valid_every: u64,
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
            learning_rate: 1e-3,
            min_learning_rate: 1e-4,
            warmup_steps: 100,
            schedule: ScheduleKind::Cosine,
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
            seed: 1337,
            valid_every: 250,
            valid_tokens: 20_000,
            final_valid_tokens: 0,
            checkpoint_every: 250,
            checkpoints_kept: 2,
        }
    }
}

impl Recipe {
    /// A recipe that comes with the program, by its name.
    ///
    /// # Errors
    /// If there is none of that name.
    pub fn shipped(name: &str) -> Result<Self, Failure> {
        match SHIPPED.iter().find(|(known, _)| *known == name) {
            Some((_, text)) => Self::parse(text, name),
            None => {
                let known: Vec<&str> = SHIPPED.iter().map(|(known, _)| *known).collect();
                let known = known.join(", ");
                Err(Failure::usage(format!("no recipe '{name}': neither a file nor one of those shipped ({known})")))
            }
        }
    }

    /// The recipe in a file, or the shipped one of that name.
    ///
    /// # Errors
    /// If there is neither, or the file is no recipe.
    pub fn open(path: &Path) -> Result<Self, Failure> {
        let name = path.to_string_lossy();
        if !path.exists() && !name.ends_with(".toml") {
            return Self::shipped(&name);
        }
        let text = std::fs::read_to_string(path).map_err(Failure::io(path))?;
        Self::parse(&text, &name)
    }

    /// Reads TOML; `origin` stands in errors.
    ///
    /// # Errors
    /// If it is not TOML, a key is unknown, or a value is of the wrong type.
    pub fn parse(text: &str, origin: &str) -> Result<Self, Failure> {
        let wrong = |reason: String| Failure::usage(format!("{origin}: {reason}"));
        let table: Table = text.parse().map_err(|error: toml::de::Error| {
            let line = error.span().map_or(0, |span| text[..span.start].lines().count().max(1));
            wrong(format!("line {line}: {}", error.message()))
        })?;
        Self::from_table(table).map_err(|failure| wrong(failure.to_string()))
    }

    fn from_table(table: Table) -> Result<Self, Failure> {
        let known = known_keys();
        for (section, value) in &table {
            let keys: Vec<&str> = match value {
                Value::Table(entries) if section != "sizes" => entries.keys().map(String::as_str).collect(),
                _ => Vec::new(),
            };
            if !known.iter().any(|(known, key)| known == section || (known.is_empty() && key == section)) {
                return Err(unknown(section, &known));
            }
            for key in keys {
                if !known.iter().any(|(known, known_key)| known == section && known_key == key) {
                    return Err(unknown(&format!("{section}.{key}"), &known));
                }
            }
        }
        let mut recipe: Self = Value::Table(table).try_into().map_err(|error: toml::de::Error| {
            let text = error.to_string();
            Failure::usage(text.trim().to_string())
        })?;
        if is_unknown(&recipe.sizes) && recipe.init.is_none() {
            // Finds wrong types in [model] now, rather than when the data has been read.
            recipe.sizes.vocab_size = 1;
            recipe.model_config()?;
            recipe.sizes = ModelSizes::default();
        }
        recipe.check()
    }

    /// Refuses values that no run can have.
    fn check(self) -> Result<Self, Failure> {
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
            return Err(Failure::usage(format!("training.precision is {name}: training takes f32 or bf16")));
        }
        let numbers = [
            ("learning_rate", training.learning_rate),
            ("min_learning_rate", training.min_learning_rate),
            ("epsilon", training.epsilon),
            ("weight_decay", training.weight_decay),
            ("max_grad_norm", training.max_grad_norm),
            ("intent_weight", training.intent_weight),
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
        if !(self.data.holdout > 0.0 && self.data.holdout < 1.0) {
            let holdout = self.data.holdout;
            return Err(Failure::usage(format!("data.holdout is {holdout}: it must be above 0 and below 1")));
        }
        Ok(self)
    }

    /// With `key` set to `value`, which reads as TOML where it can, else as a text. A key is `section.key`, or the key
    /// alone.
    ///
    /// # Errors
    /// If the key is unknown (the nearest known one is named) or the value of a wrong type.
    pub fn with(&self, key: &str, value: &str) -> Result<Self, Failure> {
        let known = known_keys();
        let found = known.iter().find(|(section, name)| key == name || key == dotted(section, name));
        let (section, name) = found.ok_or_else(|| unknown(key, &known))?;
        let parsed = format!("x = {value}").parse::<Table>().ok().and_then(|mut table| table.remove("x"));
        let value = parsed.unwrap_or_else(|| Value::String(value.to_string()));
        let mut table = Table::try_from(self).map_err(|error| Failure::new(error.to_string()))?;
        if section.is_empty() {
            table.insert(name.clone(), value);
        } else if let Some(Value::Table(entries)) =
            Some(table.entry(section.clone()).or_insert_with(|| Value::Table(Table::new())))
        {
            entries.insert(name.clone(), value);
        }
        Self::from_table(table).map_err(|failure| Failure::usage(format!("--set {key}: {failure}")))
    }

    /// The transformer that the recipe asks for. Needs to know the data: call [`sized_for`](Self::sized_for) first.
    ///
    /// # Errors
    /// If a field is unknown, of a wrong type, or contradicts another.
    pub fn model_config(&self) -> Result<TransformerConfig, Failure> {
        let usage = |reason: String| Failure::usage(reason);
        let size = |name: &str, default: usize| match self.model.get(name) {
            None => Ok(default),
            Some(Value::Integer(size)) if *size > 0 => Ok(*size as usize),
            Some(other) => Err(usage(format!("model.{name} is {other}: a whole number above 0 is wanted"))),
        };
        let shape = (size("context_length", self.training.seq_length)?, size("d_model", 128)?);
        let (n_layers, n_heads) = (size("n_layers", 4)?, size("n_heads", 4)?);
        let family = match self.model.get("family") {
            None => "gpt2",
            Some(Value::String(family)) => family,
            Some(other) => return Err(usage(format!("model.family is {other}: a text is wanted"))),
        };
        let vocab_size = self.sizes.vocab_size;
        let base = match family {
            "gpt2" => TransformerConfig::gpt2(vocab_size, shape.0, shape.1, n_layers, n_heads),
            "llama" => TransformerConfig::llama(vocab_size, shape.0, shape.1, n_layers, n_heads),
            "mistral" => TransformerConfig::mistral(vocab_size, shape.0, shape.1, n_layers, n_heads, shape.0),
            "qwen2" => TransformerConfig::qwen2(vocab_size, shape.0, shape.1, n_layers, n_heads),
            "qwen3" => {
                let head_dim = shape.1 / n_heads;
                TransformerConfig::qwen3(vocab_size, shape.0, shape.1, n_layers, n_heads, head_dim)
            }
            "bert" => TransformerConfig::bert(vocab_size, shape.0, shape.1, n_layers, n_heads),
            other => {
                let known = "gpt2, llama, mistral, qwen2, qwen3, bert";
                return Err(usage(format!("model.family '{other}' is unknown; known: {known}")));
            }
        };
        let base = base.with_intents(self.sizes.intents).with_tags(self.sizes.tags);
        // The preset's fields, with the recipe's in their place.
        let mut fields = serde_json::to_value(&base).map_err(|error| Failure::new(error.to_string()))?;
        if let Json::Object(fields) = &mut fields {
            for (key, value) in self.model.iter().filter(|(key, _)| *key != "family") {
                let value = serde_json::to_value(value).map_err(|error| usage(format!("model.{key}: {error}")))?;
                let alone = Json::Object([(key.clone(), value.clone())].into_iter().collect());
                let mut tried = fields.clone();
                tried.insert(key.clone(), value.clone());
                serde_json::from_value::<TransformerConfig>(Json::Object(tried))
                    .map_err(|error| usage(format!("model.{key} = {}: {error}", alone[key])))?;
                fields.insert(key.clone(), value);
            }
        }
        let config: TransformerConfig =
            serde_json::from_value(fields).map_err(|error| usage(format!("[model]: {error}")))?;
        self.suits_rows(&config)?;
        config.validate().map_err(|error| usage(error.to_string()))?;
        Ok(config)
    }

    /// Refuses a model that the task's data does not fit.
    pub(crate) fn suits(&self, config: &TransformerConfig, task: &Task) -> Result<(), Failure> {
        self.suits_rows(config)?;
        task.sizes().fit(config)
    }

    /// Refuses a shape that the kind of task, or its rows, cannot do with.
    fn suits_rows(&self, config: &TransformerConfig) -> Result<(), Failure> {
        let (wanted, why) = match self.task {
            TaskName::Language => (AttentionDirection::Causal, "a language model must not see what it foretells"),
            TaskName::IntentSlot => (AttentionDirection::Bidirectional, "a word's tag depends on what follows it"),
        };
        if config.attention != wanted {
            let wanted = if wanted == AttentionDirection::Causal { "causal" } else { "bidirectional" };
            return Err(Failure::usage(format!("the model's attention must be {wanted}: {why}")));
        }
        if config.context_length < self.training.seq_length {
            let (context, seq_length) = (config.context_length, self.training.seq_length);
            return Err(Failure::usage(format!(
                "the model's context_length ({context}) is below training.seq_length ({seq_length})"
            )));
        }
        Ok(())
    }

    /// The model in `folder`, with heads for the task where it needs them: the folder's, if they are for the same
    /// labels, else fresh ones.
    pub(crate) fn model_from<B: Backend>(
        &self,
        folder: &Path,
        task: &Task,
        device: &B::Device,
    ) -> Result<Transformer<B>, Failure> {
        let (_, mut config) = ModelFolder::new(folder).config()?;
        let dropout = self.model.get("dropout").and_then(|value| match value {
            Value::Integer(whole) => Some(*whole as f64),
            other => other.as_float(),
        });
        config.dropout = dropout.unwrap_or(config.dropout);
        let ModelSizes { intents, tags, .. } = task.sizes();
        let config = config.with_intents(intents).with_tags(tags);
        let shown = folder.display().to_string();
        self.suits(&config, task).map_err(|failure| failure.about(&shown))?;
        config.validate().map_err(|error| Failure::usage(format!("{shown}: {error}")))?;
        let labels = folder.join(LABELS);
        let same_labels = match task {
            Task::IntentSlot(task) if labels.exists() => read_labels(&labels)?.same_names(task.labels()),
            _ => false,
        };
        Ok(ModelFolder::new(folder).load_as(&config, same_labels, self.training.seed, device)?)
    }

    /// Reads the data, and makes its tokenizer.
    ///
    /// # Errors
    /// If the data is missing, empty, malformed, not text, or too short.
    pub fn task(&self) -> Result<Task, Failure> {
        match (self.task, self.begins_with()?) {
            (TaskName::Language, None) => self.language(None),
            (TaskName::Language, Some(model)) => self.language(Some(Tokenizer::load(&model.join(TOKENIZER))?)),
            (TaskName::IntentSlot, _) => self.intent_slot(None),
        }
    }

    /// The model to begin from.
    ///
    /// # Errors
    /// If there is one that cannot know the data's words.
    pub fn begins_with(&self) -> Result<Option<&Path>, Failure> {
        let stories = self.task == TaskName::Language && self.data.source == "stories";
        match &self.init {
            Some(_) if stories => Err(Failure::usage(
                "the embedded stories are in words of their own, which no other model knows: give text with --data",
            )),
            init => Ok(init.as_deref()),
        }
    }

    /// Reads the data as the tokenizer and the labels in a model's folder have it.
    ///
    /// # Errors
    /// As [`task`](Self::task), and if the tokenizer lacks something in the text.
    pub fn task_of(&self, folder: &Path) -> Result<Task, Failure> {
        match self.task {
            TaskName::Language => self.language(Some(Tokenizer::load(&folder.join(TOKENIZER))?)),
            TaskName::IntentSlot => self.intent_slot(Some(folder)),
        }
    }

    fn language(&self, tokenizer: Option<Tokenizer>) -> Result<Task, Failure> {
        let seq_length = self.training.seq_length;
        if self.data.source == "stories" {
            let stories = StoryCorpus::new(seq_length);
            let tokenizer = tokenizer.map_or_else(|| stories.tokenizer(), Ok)?;
            return Ok(Task::Language(Language { corpus: Corpus::Stories(stories), tokenizer }));
        }
        let text = self.text()?;
        let tokenizer = match (tokenizer, self.data.tokenizer.as_str()) {
            (Some(tokenizer), _) => tokenizer,
            (None, "byte") => Tokenizer::train(TokenizerKind::Byte, "")?,
            (None, "char") => Tokenizer::train(TokenizerKind::Char, &text)?,
            (None, "bpe") => Tokenizer::train(TokenizerKind::Bpe(self.data.bpe_size), &text)?,
            (None, file) => Tokenizer::load(Path::new(file))?,
        };
        let corpus = TextCorpus::new(tokenizer.encode(&text)?, seq_length, self.data.holdout)
            .map_err(|error| Failure::new(format!("{}: {error}", self.data.source)))?;
        Ok(Task::Language(Language { corpus: Corpus::Text(corpus), tokenizer }))
    }

    fn intent_slot(&self, model: Option<&Path>) -> Result<Task, Failure> {
        let utterances = match self.data.source.as_str() {
            "home" => Utterances::home(),
            "" => return Err(self.lacks_data("utterances")),
            folder => Utterances::read(Path::new(folder))?,
        };
        let (pieces, labels) = match model {
            Some(folder) => (PieceTokenizer::load(&folder.join(TOKENIZER))?, read_labels(&folder.join(LABELS))?),
            None => {
                let pieces = match (&self.init, self.data.tokenizer.as_str()) {
                    (Some(model), _) => PieceTokenizer::load(&model.join(TOKENIZER))?,
                    // The default is for texts.
                    (None, "pieces" | "byte") => PieceTokenizer::train(&utterances.train, self.data.pieces)?,
                    (None, file) => PieceTokenizer::load(Path::new(file))?,
                };
                (pieces, Labels::of(&utterances.train))
            }
        };
        Ok(Task::IntentSlot(IntentSlot::new(utterances, labels, pieces, self.training.seq_length)?))
    }

    fn text(&self) -> Result<String, Failure> {
        if self.data.source.is_empty() {
            return Err(self.lacks_data("text"));
        }
        Ok(read_text(Path::new(&self.data.source))?)
    }

    fn lacks_data(&self, what: &str) -> Failure {
        let name = &self.name;
        Failure::usage(format!("recipe {name} needs {what} to learn from: give it with --data PATH"))
    }

    /// With a model that has room for what the task's data holds.
    pub fn sized_for(mut self, task: &Task) -> Self {
        self.sizes = task.sizes();
        self
    }

    /// The learning rate over the run.
    pub fn schedule(&self) -> Schedule {
        let TrainingRecipe { schedule, learning_rate, min_learning_rate, warmup_steps, steps, .. } = self.training;
        Schedule { kind: schedule, maximum: learning_rate, minimum: min_learning_rate, warmup_steps, steps }
    }
}

/// Reads a model folder's `labels.json`.
///
/// # Errors
/// If it is missing or damaged.
pub(crate) fn read_labels(file: &Path) -> Result<Labels, Failure> {
    let text = std::fs::read_to_string(file).map_err(Failure::io(file))?;
    serde_json::from_str(&text).map_err(|error| Failure::new(format!("{}: no labels: {error}", file.display())))
}

/// Every key of a recipe as `(section, key)`.
fn known_keys() -> Vec<(String, String)> {
    let keys = |value: Json| match value {
        Json::Object(fields) => fields.into_iter().map(|(key, _)| key).collect(),
        _ => Vec::new(),
    };
    let training = keys(serde_json::to_value(TrainingRecipe::default()).unwrap_or_default());
    let data = keys(serde_json::to_value(DataRecipe::default()).unwrap_or_default());
    let model = keys(serde_json::to_value(TransformerConfig::gpt2(1, 1, 1, 1, 1)).unwrap_or_default());
    let from_data = ["vocab_size", "intents", "tags"];
    let model: Vec<String> = std::iter::once("family".to_string())
        .chain(model.into_iter().filter(|key| !from_data.contains(&key.as_str())))
        .collect();
    let top = ["name", "task", "init", "sizes"].map(String::from).to_vec();
    [("training", training), ("data", data), ("model", model), ("", top)]
        .into_iter()
        .flat_map(|(section, keys)| keys.into_iter().map(move |key| (section.to_string(), key)))
        .collect()
}

fn dotted(section: &str, key: &str) -> String {
    if section.is_empty() { key.to_string() } else { format!("{section}.{key}") }
}

fn unknown(key: &str, known: &[(String, String)]) -> Failure {
    let bare = key.rsplit('.').next().unwrap_or(key);
    let nearest = known.iter().max_by(|a, b| {
        let closeness = |entry: &(String, String)| strsim::jaro_winkler(bare, &entry.1);
        closeness(a).total_cmp(&closeness(b))
    });
    let nearest = nearest.map_or(String::new(), |(section, key)| dotted(section, key));
    Failure::usage(format!("unknown key {key}; the nearest known one is {nearest}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(vocab_size: usize) -> ModelSizes {
        ModelSizes { vocab_size, ..ModelSizes::default() }
    }

    #[test]
    fn every_shipped_recipe_reads_and_describes_a_model() {
        for (name, _) in SHIPPED {
            let recipe = Recipe::shipped(name).expect("a good recipe");
            assert_eq!(recipe.name, name);
            recipe.model_config().expect_err("no vocabulary yet");
            Recipe { sizes: sizes(50_257), ..recipe }.model_config().expect("a good model");
        }
    }

    #[test]
    fn unknown_keys_are_refused_with_the_nearest_known_one() {
        let recipe = Recipe::shipped("stories").expect("a good recipe");
        let message = recipe.with("batchsize", "3").expect_err("unknown").to_string();
        assert!(message.contains("training.batch_size"), "{message}");
        let message = Recipe::parse("name = 'x'\n[training]\nlearning_rat = 1", "r.toml").expect_err("unknown");
        assert!(message.to_string().contains("training.learning_rate"), "{message}");
        assert_eq!(message.exit_code(), 2);
    }

    #[test]
    fn wrong_types_are_refused_with_their_key() {
        for (text, key) in [
            ("name = 'x'\n[training]\nsteps = 'many'", "steps"),
            ("name = 'x'\n[model]\nd_model = 'wide'", "d_model"),
            ("name = 'x'\n[model]\ntied_embeddings = 3", "tied_embeddings"),
            ("name = 'x'\n[data]\nholdout = 2.0", "holdout"),
        ] {
            let message = Recipe::parse(text, "r.toml").expect_err("wrong type").to_string();
            assert!(message.contains(key) && !message.contains('\n'), "{message}");
        }
    }

    #[test]
    fn a_setting_replaces_the_recipes_value() {
        let recipe = Recipe::shipped("stories").expect("a good recipe");
        let changed = recipe.with("steps", "7").and_then(|r| r.with("model.dropout", "0.25")).expect("known keys");
        assert_eq!(changed.training.steps, 7);
        assert_eq!(Recipe { sizes: sizes(10), ..changed }.model_config().expect("a good model").dropout, 0.25);
    }
}
