//! Where a model comes from: a folder or a GGUF file, and maybe an adapter on it.

use std::path::{Path, PathBuf};

use fireclay_model::{LoraFiles, ModelFolder};

use crate::failure::Failure;
use crate::run_folder::TOKENIZER;

/// A model's folder or GGUF file, and the folder of a LoRA adapter that is merged into it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelSource {
    weights: PathBuf,
    adapter: Option<PathBuf>,
}

impl From<PathBuf> for ModelSource {
    fn from(weights: PathBuf) -> Self {
        Self { weights, adapter: None }
    }
}

impl From<&PathBuf> for ModelSource {
    fn from(weights: &PathBuf) -> Self {
        weights.clone().into()
    }
}

impl From<&Path> for ModelSource {
    fn from(weights: &Path) -> Self {
        weights.to_path_buf().into()
    }
}

impl From<&Self> for ModelSource {
    fn from(source: &Self) -> Self {
        source.clone()
    }
}

impl ModelSource {
    /// With the adapter in a folder.
    pub fn with_adapter(self, adapter: impl Into<PathBuf>) -> Self {
        Self { adapter: Some(adapter.into()), ..self }
    }

    /// The folder or the GGUF file with the weights.
    pub fn weights(&self) -> &Path {
        &self.weights
    }

    /// The adapter's folder.
    pub fn adapter(&self) -> Option<&Path> {
        self.adapter.as_deref()
    }

    /// The folder with tokenizer, chat template and end tokens: the adapter's, if it has its own,
    /// since training may have added tokens.
    pub fn text(&self) -> &Path {
        let own = self.adapter.as_deref().filter(|adapter| adapter.join(TOKENIZER).is_file());
        own.unwrap_or(&self.weights)
    }

    /// What the weights are read from.
    ///
    /// # Errors
    /// If the adapter is missing or damaged, or is of a kind that is not supported.
    pub fn files(&self) -> Result<ModelFolder, Failure> {
        let files = ModelFolder::new(&self.weights);
        match &self.adapter {
            Some(adapter) => Ok(files.with_adapter(LoraFiles::open(adapter)?)),
            None => Ok(files),
        }
    }
}
