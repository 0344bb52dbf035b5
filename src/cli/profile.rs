//! `fireclay profile`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use fireclay::Failure;
use fireclay::backend::BackendName;
use fireclay::inference::generation::GenerationOptions;
use fireclay::precision::Precision;
use fireclay::profiling::{
    Profile, ProfileGeneration, ProfileOptions, ProfilePrediction, ProfileTraining, VerdictKind, verdicts,
};
use fireclay::recipe::{RecipeRequest, TaskName};
use fireclay::stdout;

use super::arguments::{DrawArgs, DtypeArgs, RunArgs, fetched};

#[derive(Subcommand)]
pub(super) enum ProfileCommand {
    /// Profile training steps of a recipe
    Train(ProfileTrain),
    /// Profile text generation
    Generate(ProfileGenerate),
    /// Profile intent and slot prediction
    Predict(ProfilePredict),
}

/// Arguments of every profile.
#[derive(Args)]
struct ProfileArgs {
    /// Number of steps (train), tokens (generate) or batches (predict) to record
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    count: u64,
    /// Number of warm-up steps, tokens or batches before recording starts
    #[arg(long, value_name = "N", default_value_t = 10)]
    warm_up: u64,
    /// Peak matrix-multiplication throughput of the device [default: the datasheet's]
    #[arg(long, value_name = "TFLOPS")]
    peak: Option<f64>,
    /// Exit with code 1 if the profile has findings of these kinds, comma-separated
    #[arg(long, value_name = "KIND", value_delimiter = ',')]
    deny: Vec<VerdictKind>,
    /// Write a timeline for Perfetto (ui.perfetto.dev) or about:tracing
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Write a page with a flame graph and the roofline
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    #[command(flatten)]
    run: RunArgs,
}

#[derive(Args)]
pub(super) struct ProfileTrain {
    /// Recipe file, or name of a built-in recipe
    recipe: Option<PathBuf>,
    /// Task to train for [default: the recipe's, or language]
    #[arg(long)]
    task: Option<TaskName>,
    /// Training data
    #[arg(long, value_name = "PATH")]
    data: Option<PathBuf>,
    /// JSON field, or CSV, TSV or Parquet column, that holds the text; A.B for a nested
    /// field [default: the recipe's, or text]
    #[arg(long, value_name = "NAME")]
    field: Option<String>,
    /// Data type of activations [default: the recipe's]
    #[arg(long)]
    precision: Option<Precision>,
    #[command(flatten)]
    profile: ProfileArgs,
}

#[derive(Args)]
pub(super) struct ProfileGenerate {
    /// Run or model folder, .gguf file, or model on the hub: OWNER/NAME, or OWNER/NAME:QUANT for
    /// one GGUF quantization, such as :Q4_K_M
    #[arg(long, value_name = "MODEL")]
    model: PathBuf,
    /// Prompt to continue
    #[arg(long, value_name = "TEXT")]
    prompt: String,
    /// Batch size; every sequence has the same prompt
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1024))]
    batch: u64,
    /// Sampling temperature; 0 is greedy
    #[arg(long, value_name = "T", default_value_t = 0.8)]
    temperature: f64,
    /// Top-p sampling: sample from the smallest set of tokens with this total probability [default:
    /// off]
    #[arg(long, value_name = "P")]
    top_p: Option<f64>,
    #[command(flatten)]
    draw: DrawArgs,
    #[command(flatten)]
    dtypes: DtypeArgs,
    #[command(flatten)]
    profile: ProfileArgs,
}

#[derive(Args)]
pub(super) struct ProfilePredict {
    /// Run or model folder, or name on the hub, OWNER/NAME
    #[arg(long, value_name = "MODEL")]
    model: PathBuf,
    /// Utterance; repeat for a batch of several
    #[arg(long, value_name = "TEXT", required = true)]
    text: Vec<String>,
    /// Format of the weights, and data type of the activations
    #[arg(long, default_value = "auto")]
    precision: Precision,
    #[command(flatten)]
    profile: ProfileArgs,
}

pub(super) fn profile(command: ProfileCommand) -> Result<ExitCode, Failure> {
    match command {
        ProfileCommand::Train(args) => train(args),
        ProfileCommand::Generate(args) => generate(args),
        ProfileCommand::Predict(args) => predict(args),
    }
}

fn train(args: ProfileTrain) -> Result<ExitCode, Failure> {
    let ProfileTrain { recipe, task, data, field, precision, mut profile } = args;
    let (backend, options) = profile.prepare()?;
    let settings = std::mem::take(&mut profile.run.set);
    let recipe = RecipeRequest { recipe, task, data, field, init: None, precision, settings }.recipe()?;
    let work = ProfileTraining { recipe, options };
    profile.show(&backend.run(work)?)
}

fn generate(args: ProfileGenerate) -> Result<ExitCode, Failure> {
    let ProfileGenerate { model, prompt, batch, temperature, top_p, draw, dtypes, mut profile } = args;
    let (backend, options) = profile.prepare()?;
    profile.run.without_recipe("profile generate")?;
    let generation = GenerationOptions {
        temperature,
        top_k: draw.top_k,
        top_p,
        min_p: draw.min_p,
        penalties: draw.penalties(),
        ..GenerationOptions::default()
    };
    generation.validate()?;
    let model = fetched(&model, backend)?;
    let prompts = vec![prompt; batch as usize];
    let DtypeArgs { precision, cache_dtype: cache } = dtypes;
    profile.show(&backend.run(ProfileGeneration { model, prompts, generation, precision, cache, options })?)
}

fn predict(args: ProfilePredict) -> Result<ExitCode, Failure> {
    let ProfilePredict { model, text, precision, mut profile } = args;
    let (backend, options) = profile.prepare()?;
    profile.run.without_recipe("profile predict")?;
    let model = fetched(&model, backend)?;
    profile.show(&backend.run(ProfilePrediction { model, utterances: text, precision, options })?)
}

impl ProfileArgs {
    fn prepare(&mut self) -> Result<(BackendName, ProfileOptions), Failure> {
        self.run.select_kernels()?;
        if let Some(peak) = self.peak.filter(|peak| !(peak.is_finite() && *peak > 0.0)) {
            return Err(Failure::usage(format!("--peak {peak} must be above 0")));
        }
        let backend = self.run.backend();
        let devices = backend.devices()?;
        let device = devices.first().map_or_else(|| backend.as_str().to_string(), |device| device.name.clone());
        let (warm_up, count) = (self.warm_up.max(1), self.count);
        Ok((backend, ProfileOptions { warm_up, count, device, peak: self.peak }))
    }

    /// Prints and writes the profile. Exits with 1 if it has a denied finding.
    fn show(&self, profile: &Profile) -> Result<ExitCode, Failure> {
        if self.run.json {
            stdout::line(profile.to_json());
        } else {
            stdout::write(&profile.to_string());
        }
        if let Some(path) = &self.trace {
            profile.write_trace(path)?;
        }
        if let Some(path) = &self.html {
            profile.write_html(path)?;
        }
        let denied: Vec<String> = verdicts(profile)
            .into_iter()
            .filter(|verdict| self.deny.contains(&verdict.kind))
            .map(|verdict| verdict.to_string())
            .collect();
        match denied.is_empty() {
            true => Ok(ExitCode::SUCCESS),
            false => Err(Failure::new(format!("found what --deny forbids: {}", denied.join("; ")))),
        }
    }
}
