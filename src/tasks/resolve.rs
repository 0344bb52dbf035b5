//! Resolves a recipe's data and model.

use std::ops::ControlFlow;
use std::path::Path;

use burn::tensor::FloatDType;
use fireclay_kernels::{Backend, Format};
use fireclay_model::{
    Family, LoraConfig, LoraFiles, MatrixDtype, ModelFolder, Targets, Transformer, TransformerConfig,
};
use toml::Value;

use super::Task;
use crate::download::{FileProgress, dataset_folder, model_folder};
use crate::failure::Failure;
use crate::model_folder::warn_of_config;
use crate::progress::Watch;
use crate::recipe::{AdapterKind, BaseKind, EMBEDDED, LoraRecipe, ModelSizes, Recipe, TaskName};

impl Recipe {
    /// Checks that a model fits the task's data.
    pub(crate) fn suits(&self, config: &TransformerConfig, task: &Task) -> Result<(), Failure> {
        self.suits_rows(config)?;
        task.sizes().fit(config)
    }

    /// The model in `folder`, with heads for the task where it needs them: the folder's, if they are for the same
    /// labels, else fresh ones. With an adapter, where one is trained: a fresh one, or `adapter`.
    pub(crate) fn model_from<B: Backend>(
        &self,
        folder: &Path,
        task: &Task,
        adapter: Option<&LoraFiles>,
        device: &B::Device,
    ) -> Result<Transformer<B>, Failure> {
        let (family, mut config) = ModelFolder::new(folder).config()?;
        warn_of_config(folder)?;
        let dropout = self.model.get("dropout").and_then(|value| match value {
            Value::Integer(whole) => Some(*whole as f64),
            other => other.as_float(),
        });
        config.dropout = dropout.unwrap_or(config.dropout);
        let ModelSizes { intents, tags, .. } = task.sizes();
        let config = config.with_intents(intents).with_tags(tags);
        let shown = folder.display().to_string();
        let grown = adapter.and_then(|adapter| adapter.vocab_size(family)).filter(|size| *size != config.vocab_size);
        let grown = grown.map(|size| grown_rows(config.vocab_size, size));
        let rows = task.initial_rows().or(grown.as_deref());
        let known = rows.map_or(config.vocab_size, <[_]>::len);
        self.suits(&TransformerConfig { vocab_size: known, ..config.clone() }, task)
            .map_err(|failure| failure.about(&shown))?;
        config.validate().map_err(|error| Failure::usage(format!("{shown}: {error}")))?;
        let heads = task.has_heads_of(folder)?;
        let is_adapted = self.training.adapter == AdapterKind::Lora;
        let dtype = match (is_adapted, self.lora.base) {
            (false, _) => MatrixDtype::from(FloatDType::F32),
            (true, BaseKind::Float) => self.training.precision.activations::<B>(device)?.into(),
            (true, BaseKind::Int8) => Format::Int8.into(),
        };
        if dtype == MatrixDtype::Quantized(Format::Int8) && rows.is_some() {
            return Err(Failure::usage("lora.base is int8: an embedding with new tokens cannot be stored so"));
        }
        let model = ModelFolder::new(folder).load_as(&config, heads, self.training.seed, dtype, device)?;
        let model = match rows {
            Some(rows) => model.with_vocabulary(rows),
            None => model,
        };
        if !is_adapted {
            return Ok(model);
        }
        let lora = self.lora_config(folder, family, &config, task.initial_rows().is_some() || grown.is_some());
        let model = model.with_lora(family, &lora, adapter, self.training.seed);
        model.map_err(|reason| Failure::new(format!("{shown}: {reason}")))
    }

    /// The adapter that is trained on the model in `folder`, which may have new tokens: these are trained, too.
    pub(crate) fn lora_config(
        &self,
        folder: &Path,
        family: Family,
        config: &TransformerConfig,
        new_tokens: bool,
    ) -> LoraConfig {
        let LoraRecipe { rank, alpha, rslora, lora_dropout, targets, modules_to_save, base: _ } = &self.lora;
        let names = |list: &str| -> Vec<String> {
            list.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_string).collect()
        };
        let mut modules_to_save = names(modules_to_save);
        let tables = [family.embedding_name(), family.head_name().filter(|_| !config.tied_embeddings)];
        for weight in tables.into_iter().flatten().filter(|_| new_tokens) {
            let name = weight.strip_suffix(".weight").and_then(|module| module.rsplit('.').next());
            modules_to_save
                .extend(name.filter(|name| !modules_to_save.iter().any(|saved| saved == name)).map(str::to_string));
        }
        LoraConfig {
            rank: *rank,
            alpha: *alpha,
            rslora: *rslora,
            dropout: *lora_dropout,
            targets: if targets == "all-linear" { Targets::AllLinear } else { Targets::Names(names(targets)) },
            modules_to_save,
            base: Some(hub_name(folder).unwrap_or_else(|| folder.display().to_string())),
            ..LoraConfig::default()
        }
    }

    /// Reads the data, and trains its tokenizer.
    ///
    /// # Errors
    /// If the data is missing, empty, malformed, not text, or too short.
    pub fn task(&self) -> Result<Task, Failure> {
        self.task_watched(&mut |_, _| ControlFlow::Continue(()))
    }

    /// [`task`](Self::task), reporting the progress of tokenization.
    ///
    /// # Errors
    /// As [`task`](Self::task), and if `watch` stops it.
    pub fn task_watched(&self, watch: Watch<'_>) -> Result<Task, Failure> {
        Task::begin(self, self.init_model()?, watch)
    }

    /// The model to initialize from.
    ///
    /// # Errors
    /// If it cannot have the data's vocabulary.
    pub fn init_model(&self) -> Result<Option<&Path>, Failure> {
        match &self.init {
            Some(_) if self.data.source == "stories" => Err(Failure::usage(
                "the embedded stories have their own vocabulary, which no other model knows: give text with --data",
            )),
            init => Ok(init.as_deref()),
        }
    }

    /// Reads the data with the tokenizer and labels of a model folder.
    ///
    /// # Errors
    /// As [`task_watched`](Self::task_watched), and if the tokenizer lacks a part of the text.
    pub fn task_of(&self, folder: &Path, watch: Watch<'_>) -> Result<Task, Failure> {
        Task::resume(self, folder, watch)
    }

    /// With the sizes that the task's data needs.
    pub fn sized_for(mut self, task: &Task) -> Self {
        self.sizes = task.sizes();
        self
    }

    /// Downloads data and the initial model if they are names on the hub, and replaces the names with paths. A run that has
    /// `begun` needs no initial model.
    ///
    /// # Errors
    /// If a download fails.
    pub fn fetched(mut self, begun: bool, progress: FileProgress<'_>) -> Result<Self, Failure> {
        if matches!(self.task, TaskName::Language | TaskName::Masked | TaskName::Chat) {
            let mut fetched = |source: &str| -> Result<String, Failure> {
                Ok(dataset_folder(Path::new(source), progress)?.display().to_string())
            };
            if !EMBEDDED.contains(&self.data.source.as_str()) && !self.data.source.is_empty() {
                self.data.source = fetched(&self.data.source)?;
            }
            let corpora = std::mem::take(&mut self.data.corpora).into_iter();
            self.data.corpora =
                corpora.map(|(source, weight)| Ok((fetched(&source)?, weight))).collect::<Result<_, Failure>>()?;
        }
        // A run that goes on has its weights.
        if !begun && let Some(init) = self.init_model()? {
            self.init = Some(model_folder(init, progress)?);
        }
        Ok(self)
    }
}

/// For each of `size` tokens the old one that it is, of `known`.
fn grown_rows(known: usize, size: usize) -> Vec<Option<u32>> {
    (0..size).map(|row| (row < known).then_some(row as u32)).collect()
}

/// The name on the hub of a folder in its cache: `models--OWNER--NAME/snapshots/COMMIT`.
fn hub_name(folder: &Path) -> Option<String> {
    let mut parts = folder.components().rev().map(|part| part.as_os_str().to_str());
    let (_, snapshots, cached) = (parts.next()??, parts.next()??, parts.next()??);
    let name = cached.strip_prefix("models--").filter(|_| snapshots == "snapshots")?;
    Some(name.replacen("--", "/", 1))
}
