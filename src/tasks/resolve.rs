//! Resolves a recipe's data and model.

use std::ops::ControlFlow;
use std::path::Path;

use burn::module::Module;
use burn::tensor::FloatDType;
use fireclay_kernels::{Backend, Format, GroupedFormat};
use fireclay_model::{
    ClassifierConfig, ClassifierPooling, Family, LoraConfig, LoraFiles, MatrixDtype, MatrixDtypes, ModelFolder,
    Targets, Transformer, TransformerConfig,
};

use super::Task;
use crate::download::{FileProgress, dataset_folder, model_folder};
use crate::failure::Failure;
use crate::inference::text_encoder::word_types;
use crate::model_folder::warn_of_config;
use crate::progress::Watch;
use crate::recipe::{AdapterKind, BaseKind, EMBEDDED, LoraRecipe, ModelSizes, Recipe, TaskName, TrainingRecipe};

/// A model to train, and the one that preferences are measured against, where the task needs it:
/// the model as the run begins, which is not trained.
pub(crate) struct InitialModel<B: Backend> {
    pub(crate) model: Transformer<B>,
    pub(crate) reference: Option<Transformer<B>>,
}

impl Recipe {
    /// Checks that a model fits the task's data.
    pub(crate) fn suits(&self, config: &TransformerConfig, task: &Task) -> Result<(), Failure> {
        self.suits_rows(config)?;
        task.sizes().fit(config)
    }

    /// The model in `folder`, with heads for the task where it needs them: the folder's, if they
    /// are for the same labels, else fresh ones. With an adapter, where one is trained: `adapter`,
    /// that of a checkpoint; else the one that the run continues; else a fresh one.
    pub(crate) fn model_from<B: Backend>(
        &self,
        folder: &Path,
        task: &Task,
        adapter: Option<&LoraFiles>,
        device: &B::Device,
    ) -> Result<InitialModel<B>, Failure> {
        let files = ModelFolder::new(folder);
        let (family, mut config) = files.config()?;
        let start = self.init_adapter.as_deref().map(LoraFiles::open).transpose()?;
        let adapter = adapter.or(start.as_ref());
        warn_of_config(folder)?;
        config.dropout = self.dropout().unwrap_or(config.dropout);
        let ModelSizes { intents, tags, labels, .. } = task.sizes();
        let classifier = match task {
            Task::Classify(task) => {
                // Without a token for the whole text, its tokens speak for it.
                let pooling = if task.begins_with_token()? { ClassifierPooling::Cls } else { ClassifierPooling::Mean };
                let head = files.classifier(labels, pooling)?;
                Some(ClassifierConfig { dropout: self.dropout().unwrap_or(head.dropout), ..head })
            }
            _ => None,
        };
        let default = TrainingRecipe::default();
        for (name, value, usual) in [
            ("balance_loss", self.training.balance_loss, default.balance_loss),
            ("router_z_loss", self.training.router_z_loss, default.router_z_loss),
        ] {
            if config.experts == 0 && value != usual {
                let shown = folder.display();
                return Err(Failure::usage(format!("training.{name} has no effect: {shown} has no experts")));
            }
        }
        if self.task != TaskName::IntentSlot && word_types(folder)?.is_some() {
            let shown = folder.display();
            return Err(Failure::usage(format!(
                "{shown}: its words have types (labels.json), which only the task intent-slot reads: initialize from \
                 another model"
            )));
        }
        let config = config.with_intents(intents).with_tags(tags).with_classifier(classifier);
        let shown = folder.display().to_string();
        let grown = adapter.and_then(|adapter| adapter.vocab_size(family)).filter(|size| *size != config.vocab_size);
        let grown = grown.map(|size| grown_rows(config.vocab_size, size));
        let rows = task.initial_rows().or(grown.as_deref());
        let known = rows.map_or(config.vocab_size, <[_]>::len);
        self.suits(&TransformerConfig { vocab_size: known, ..config.clone() }, task)
            .map_err(|failure| failure.about(&shown))?;
        config.validate().map_err(|error| Failure::usage(format!("{shown}: {error}")))?;
        let heads = task.has_heads_of(folder)?;
        let new_tokens = task.initial_rows().is_some() || grown.is_some();
        let lora = match self.training.adapter {
            AdapterKind::None => None,
            AdapterKind::Lora => Some(self.lora_config(folder, family, &config, new_tokens)?),
        };
        let dtypes = match &lora {
            None => MatrixDtypes::from(FloatDType::F32),
            Some(lora) => self.base_dtypes::<B>(&files, lora, device)?,
        };
        let model = files.load_as(&config, heads, self.training.seed, dtypes, device)?;
        let model = match rows {
            Some(rows) => model.with_vocabulary(rows),
            None => model,
        };
        let adapted = |model: Transformer<B>, files: Option<&LoraFiles>| match &lora {
            None => Ok(model),
            Some(lora) => {
                let model = model.with_lora(family, lora, files, self.training.seed);
                model.map_err(|reason| Failure::new(format!("{shown}: {reason}")))
            }
        };
        // What the run begins from: without a fresh adapter, which would add nothing.
        let reference = match &start {
            _ if !task.has_reference() => None,
            None => Some(model.clone().no_grad()),
            Some(start) => Some(adapted(model.clone(), Some(start))?.no_grad()),
        };
        Ok(InitialModel { model: adapted(model, adapter)?, reference })
    }

    /// What the frozen weights of an adapter's base are loaded as. Embeddings and output projection
    /// stay floats unless they are stored quantized, and are f32 where they are trained.
    fn base_dtypes<B: Backend>(
        &self,
        files: &ModelFolder,
        lora: &LoraConfig,
        device: &B::Device,
    ) -> Result<MatrixDtypes, Failure> {
        let float = MatrixDtype::from(self.training.precision.activations::<B>(device)?);
        let is_quantized = files.is_gguf() || files.is_quantized()?;
        let blocks = match self.lora.base {
            BaseKind::Auto if is_quantized => MatrixDtype::Stored,
            BaseKind::Auto | BaseKind::Float => float,
            BaseKind::Int8 => Format::Int8.into(),
            BaseKind::Nf4 => Format::Grouped(GroupedFormat::Nf4).into(),
            BaseKind::Stored => MatrixDtype::Stored,
        };
        let outer = match blocks {
            _ if !lora.modules_to_save.is_empty() => FloatDType::F32.into(),
            MatrixDtype::Stored => MatrixDtype::Stored,
            _ => float,
        };
        Ok(MatrixDtypes { blocks, outer })
    }

    /// The adapter that is trained on the model in `folder`, which may have new tokens: these are
    /// trained, too.
    ///
    /// # Errors
    /// If the adapter that the run continues cannot be read.
    pub(crate) fn lora_config(
        &self,
        folder: &Path,
        family: Family,
        config: &TransformerConfig,
        new_tokens: bool,
    ) -> Result<LoraConfig, Failure> {
        let base = Some(hub_name(folder).unwrap_or_else(|| folder.display().to_string()));
        if let Some(start) = &self.init_adapter {
            let config = LoraFiles::read_config(start)?;
            // Its own, if none is set.
            let dropout = if self.lora.lora_dropout > 0.0 { self.lora.lora_dropout } else { config.dropout };
            if config.dora && dropout > 0.0 {
                return Err(Failure::usage(format!(
                    "{}: DoRA is trained without dropout: leave out lora_dropout, and set it to 0 in \
                     adapter_config.json",
                    start.display()
                )));
            }
            return Ok(LoraConfig { dropout, base, ..config });
        }
        let LoraRecipe { rank, alpha, rslora, lora_dropout, targets, modules_to_save, dora, base: _ } = &self.lora;
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
        Ok(LoraConfig {
            rank: *rank,
            alpha: *alpha,
            rslora: *rslora,
            dora: *dora,
            dropout: *lora_dropout,
            targets: if targets == "all-linear" { Targets::AllLinear } else { Targets::Names(names(targets)) },
            modules_to_save,
            base,
            ..LoraConfig::default()
        })
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

    /// Downloads data and the initial model if they are names on the hub, and replaces the names
    /// with paths. A run that has `begun` needs no initial model.
    ///
    /// # Errors
    /// If a download fails.
    pub fn fetched(mut self, begun: bool, progress: FileProgress<'_>) -> Result<Self, Failure> {
        if self.task != TaskName::IntentSlot {
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
