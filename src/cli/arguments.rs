//! What several commands take, and say.

use std::path::{Path, PathBuf};

use clap::Args;
use fireclay::Failure;
use fireclay::backend::BackendName;
use fireclay::download::{dataset_folder, model_folder, show_fetching};
use fireclay::inference::generation::Generated;
use fireclay::precision::{CachePrecision, Precision};
use fireclay_kernels::{Kernels, Penalties, use_kernels};
use serde_json::{Value, json};

/// What every command that runs a model takes.
#[derive(Args)]
pub(super) struct RunArgs {
    /// What to run on [default: the fastest that is built in and present]
    #[arg(long)]
    pub(super) backend: Option<BackendName>,
    /// Change a value of the recipe; kernels=reference runs without fused kernels
    #[arg(long, value_name = "KEY=VALUE")]
    pub(super) set: Vec<String>,
    /// One JSON object a line on stdout, nothing else there
    #[arg(long)]
    pub(super) json: bool,
}

impl RunArgs {
    pub(super) fn backend(&self) -> BackendName {
        self.backend.unwrap_or_else(BackendName::best)
    }

    /// Takes `kernels=fused` or `kernels=reference` out of the settings, and obeys it.
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
            Some(setting) => Err(Failure::usage(format!("--set {setting}: {command} has no recipe to change"))),
            None => Ok(()),
        }
    }
}

/// What a model that writes computes in.
#[derive(Args)]
pub(super) struct DtypeArgs {
    /// Dtype of matrices and activations
    #[arg(long, default_value = "auto")]
    pub(super) precision: Precision,
    /// What the cache keeps keys and values as
    #[arg(long, value_name = "DTYPE", default_value = "auto")]
    pub(super) cache_dtype: CachePrecision,
}

/// How tokens are drawn, beyond temperature and top-p.
#[derive(Args)]
pub(super) struct DrawArgs {
    /// Draw among this many likeliest tokens
    #[arg(long, value_name = "K")]
    pub(super) top_k: Option<usize>,
    /// Draw among tokens at least this likely, as a share of the likeliest one's probability
    #[arg(long, value_name = "P")]
    pub(super) min_p: Option<f64>,
    /// Divide the positive logits of tokens that the text has, and multiply the negative ones
    #[arg(long, value_name = "R", default_value_t = 1.0)]
    pub(super) repetition_penalty: f64,
    /// Take this from the logit of each token written so far
    #[arg(long, value_name = "R", default_value_t = 0.0, allow_hyphen_values = true)]
    pub(super) presence_penalty: f64,
    /// Take this from the logit of a token for each time it was written so far
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

/// The folder of a model; what is missing of one that is named as on the hub is fetched, shown on a terminal. Only once
/// `backend` is found to be there: a large download is not for nothing.
pub(super) fn fetched(model: &Path, backend: BackendName) -> Result<PathBuf, Failure> {
    backend.devices()?;
    let mut progress = show_fetching();
    Ok(model_folder(model, &mut progress)?)
}

/// The file or folder of a text; a dataset that is named as on the hub is fetched, shown on a terminal.
pub(super) fn fetched_data(data: &Path) -> Result<PathBuf, Failure> {
    let mut progress = show_fetching();
    Ok(dataset_folder(data, &mut progress)?)
}

/// What came of a prompt, for programs.
pub(super) fn done_line(done: &Generated) -> Value {
    json!({
        "event": "done", "text": done.text, "tokens": done.tokens, "prompt_tokens": done.prompt_tokens,
        "prefill_seconds": done.prefill.as_secs_f64(), "decode_tokens_per_second": done.decode_tokens_per_second(),
    })
}
