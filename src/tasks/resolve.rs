//! Resolves a recipe's data and model.

use std::ops::ControlFlow;
use std::path::Path;

use fireclay_kernels::Backend;
use fireclay_model::{ModelFolder, Transformer, TransformerConfig};
use toml::Value;

use super::Task;
use crate::failure::Failure;
use crate::model_folder::warn_of_config;
use crate::progress::Watch;
use crate::recipe::{ModelSizes, Recipe};

impl Recipe {
    /// Checks that a model fits the task's data.
    pub(crate) fn suits(&self, config: &TransformerConfig, task: &Task) -> Result<(), Failure> {
        self.suits_rows(config)?;
        task.sizes().fit(config)
    }

    /// The model in `folder`, with the task's heads: the folder's if they have the same labels,
    /// else new ones.
    pub(crate) fn model_from<B: Backend>(
        &self,
        folder: &Path,
        task: &Task,
        device: &B::Device,
    ) -> Result<Transformer<B>, Failure> {
        let (_, mut config) = ModelFolder::new(folder).config()?;
        warn_of_config(folder)?;
        let dropout = self.model.get("dropout").and_then(|value| match value {
            Value::Integer(whole) => Some(*whole as f64),
            other => other.as_float(),
        });
        config.dropout = dropout.unwrap_or(config.dropout);
        let ModelSizes { intents, tags, .. } = task.sizes();
        let config = config.with_intents(intents).with_tags(tags);
        let shown = folder.display().to_string();
        let rows = task.initial_rows();
        let known = rows.map_or(config.vocab_size, <[_]>::len);
        self.suits(&TransformerConfig { vocab_size: known, ..config.clone() }, task)
            .map_err(|failure| failure.about(&shown))?;
        config.validate().map_err(|error| Failure::usage(format!("{shown}: {error}")))?;
        let heads = task.has_heads_of(folder)?;
        let model = ModelFolder::new(folder).load_as(&config, heads, self.training.seed, device)?;
        Ok(match rows {
            Some(rows) => model.with_vocabulary(rows),
            None => model,
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
}
