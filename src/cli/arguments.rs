//! Arguments and messages that several commands share.

use std::path::{Path, PathBuf};

use clap::Args;
use fireclay::Failure;
use fireclay::backend::BackendName;
use fireclay::download::{dataset_folder, model_folder, show_fetching};
use fireclay::inference::generation::Generated;
use fireclay::model_folder::ModelSource;
use fireclay::precision::{CachePrecision, Precision};
use fireclay_kernels::{Kernels, Penalties, use_kernels};
use fireclay_model::LoraFiles;
use serde_json::{Value, json};

/// Arguments of every command that runs a model.
#[derive(Args)]
pub(super) struct RunArgs {
    /// Backend to run on [default: the fastest that is built in and has a device on this machine]
    #[arg(long)]
    pub(super) backend: Option<BackendName>,
    /// Override a setting: of the recipe when training; in every command, kernels=reference turns
    /// fused kernels off
    #[arg(long, value_name = "KEY=VALUE")]
    pub(super) set: Vec<String>,
    /// Print JSON, one object per line, on stdout; everything else goes to stderr
    #[arg(long)]
    pub(super) json: bool,
}

impl RunArgs {
    pub(super) fn backend(&self) -> BackendName {
        chosen(self.backend)
    }

    /// Takes `kernels=fused` or `kernels=reference` out of the settings and applies it.
    pub(super) fn select_kernels(&mut self) -> Result<(), Failure> {
        let (kernels, others) = std::mem::take(&mut self.set)
            .into_iter()
            .partition(|setting| setting.split('=').next().is_some_and(|key| key.trim() == "kernels"));
        self.set = others;
        let kernels: Vec<String> = kernels;
        let Some(setting) = kernels.last() else { return Ok(()) };
        match setting.split_once('=').map(|(_, value)| value.trim()) {
            Some("fused") => use_kernels(Kernels::Fused),
            Some("reference") => use_kernels(Kernels::Reference),
            _ => return Err(Failure::usage(format!("--set {setting}: kernels are fused or reference"))),
        }
        Ok(())
    }

    /// Refuses settings for a command without a recipe.
    pub(super) fn without_recipe(&self, command: &str) -> Result<(), Failure> {
        match self.set.first() {
            Some(setting) => Err(Failure::usage(format!("--set {setting}: {command} has no recipe"))),
            None => Ok(()),
        }
    }
}

/// The requested backend, or the best one; configures the allocator for it.
pub(super) fn chosen(asked: Option<BackendName>) -> BackendName {
    let backend = asked.unwrap_or_else(BackendName::best);
    #[cfg(all(feature = "ndarray", feature = "mimalloc"))]
    if backend == BackendName::Cpu {
        fireclay_kernels::devices::keep_freed_memory();
    }
    backend
}

/// Data types of a text-generating model.
#[derive(Args)]
pub(super) struct DtypeArgs {
    /// Format of the weights, and data type of the activations
    #[arg(long, default_value = "auto")]
    pub(super) precision: Precision,
    /// Data type of the KV cache
    #[arg(long, value_name = "DTYPE", default_value = "auto")]
    pub(super) cache_dtype: CachePrecision,
}

/// Sampling options beyond temperature and top-p.
#[derive(Args)]
pub(super) struct DrawArgs {
    /// Top-k sampling: sample from the K most probable tokens [default: off]
    #[arg(long, value_name = "K")]
    pub(super) top_k: Option<usize>,
    /// Min-p sampling: drop tokens less probable than P times the most probable one
    /// [default: off]
    #[arg(long, value_name = "P")]
    pub(super) min_p: Option<f64>,
    /// Repetition penalty: divide the positive logits of tokens already in the sequence by R and
    /// multiply the negative ones
    #[arg(long, value_name = "R", default_value_t = 1.0)]
    pub(super) repetition_penalty: f64,
    /// Presence penalty: subtract this from the logit of every token already generated
    #[arg(long, value_name = "R", default_value_t = 0.0, allow_hyphen_values = true)]
    pub(super) presence_penalty: f64,
    /// Frequency penalty: subtract this from a token's logit for each time it was already generated
    #[arg(long, value_name = "R", default_value_t = 0.0, allow_hyphen_values = true)]
    pub(super) frequency_penalty: f64,
}

impl DrawArgs {
    pub(super) fn penalties(&self) -> Penalties {
        Penalties {
            repetition: self.repetition_penalty,
            presence: self.presence_penalty,
            frequency: self.frequency_penalty,
        }
    }
}

/// The folder of a model. Downloads missing files of a hub model, with progress on a terminal, once
/// `backend` is known to be available.
pub(super) fn fetched(model: &Path, backend: BackendName) -> Result<PathBuf, Failure> {
    backend.devices()?;
    let mut progress = show_fetching();
    Ok(model_folder(model, &mut progress)?)
}

/// Finds a model, with the adapter in a folder if one is given. If `model` itself is an adapter
/// folder, the model is the adapter's base model.
pub(super) fn fetched_source(
    model: &Path,
    adapter: Option<&Path>,
    backend: BackendName,
) -> Result<ModelSource, Failure> {
    if let Some(adapter) = adapter {
        return Ok(ModelSource::from(fetched(model, backend)?).with_adapter(adapter));
    }
    if !LoraFiles::are_alone_in(model) {
        return Ok(fetched(model, backend)?.into());
    }
    let Some(base) = LoraFiles::read_config(model)?.base else {
        let shown = model.display();
        return Err(Failure::new(format!(
            "{shown} holds an adapter: say which model it is for, --model BASE --adapter {shown}"
        )));
    };
    let base = fetched(Path::new(&base), backend).map_err(|failure| {
        let shown = model.display();
        Failure::new(format!(
            "{shown} holds an adapter for {base}: {failure}; if it is elsewhere, --model BASE --adapter {shown}"
        ))
    })?;
    Ok(ModelSource::from(base).with_adapter(model))
}

/// The path of training data. Downloads a hub dataset, with progress on a terminal.
pub(super) fn fetched_data(data: &Path) -> Result<PathBuf, Failure> {
    let mut progress = show_fetching();
    Ok(dataset_folder(data, &mut progress)?)
}

/// The JSON summary of a completed prompt.
pub(super) fn done_line(done: &Generated) -> Value {
    json!({
        "event": "done", "text": done.text, "tokens": done.tokens, "prompt_tokens": done.prompt_tokens,
        "prefill_seconds": done.prefill.as_secs_f64(), "decode_tokens_per_second": done.decode_tokens_per_second(),
    })
}
