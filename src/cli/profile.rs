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
use fireclay::recipe::TaskName;
use fireclay::stdout;

use super::arguments::{DrawArgs, DtypeArgs, RunArgs, fetched};
use super::train::{recipe_from, with_settings};

#[derive(Subcommand)]
pub(super) enum ProfileCommand {
    /// Training steps of a recipe
    Train(ProfileTrain),
    /// Tokens that a model writes after a prompt
    Generate(ProfileGenerate),
    /// Utterances whose intent and slots are predicted
    Predict(ProfilePredict),
}

/// What every profile takes.
#[derive(Args)]
struct ProfileArgs {
    /// Steps, tokens or batches that are recorded
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    count: u64,
    /// Steps, tokens or batches before that
    #[arg(long, value_name = "N", default_value_t = 10)]
    warm_up: u64,
    /// What the matrix units can compute, in place of the datasheet's figure
    #[arg(long, value_name = "TFLOPS")]
    peak: Option<f64>,
    /// End with exit code 1 where the profile finds such a thing
    #[arg(long, value_name = "KIND", value_delimiter = ',')]
    deny: Vec<VerdictKind>,
    /// Write what happened when, for Perfetto (ui.perfetto.dev) or about:tracing
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
    /// A recipe's file, or the name of one that is shipped
    recipe: Option<PathBuf>,
    /// What to train for [default: the recipe's, or language]
    #[arg(long)]
    task: Option<TaskName>,
    /// What to learn from
    #[arg(long, value_name = "PATH")]
    data: Option<PathBuf>,
    /// The field of JSON, or the column of a table or of Parquet, that holds a document [default:
    /// the recipe's, or text]
    #[arg(long, value_name = "NAME")]
    field: Option<String>,
    /// Dtype of activations [default: the recipe's]
    #[arg(long)]
    precision: Option<Precision>,
    #[command(flatten)]
    profile: ProfileArgs,
}

#[derive(Args)]
pub(super) struct ProfileGenerate {
    /// The model's folder or .gguf file, or its name on the hub: OWNER/NAME, or OWNER/NAME:Q4_K_M
    /// of GGUF files
    #[arg(long, value_name = "MODEL")]
    model: PathBuf,
    /// What the text begins with
    #[arg(long, value_name = "TEXT")]
    prompt: String,
    /// How often the prompt is continued at once
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1024))]
    batch: u64,
    /// Flatten (above 1) or sharpen (below) what tokens are drawn from; 0 takes the likeliest
    #[arg(long, value_name = "T", default_value_t = 0.8)]
    temperature: f64,
    /// Draw among the likeliest tokens that make up this probability
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
    /// The model's folder or .gguf file, or its name on the hub: OWNER/NAME, or OWNER/NAME:Q4_K_M
    /// of GGUF files
    #[arg(long, value_name = "MODEL")]
    model: PathBuf,
    /// What was said; several times for several at once
    #[arg(long, value_name = "TEXT", required = true)]
    text: Vec<String>,
    /// Dtype of matrices and activations
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
    let mut recipe = recipe_from(recipe.as_deref(), task, data.is_some(), false)?;
    if let Some(field) = field {
        recipe.data.field = field;
    }
    let recipe = with_settings(recipe, data.as_deref(), precision, &profile.run.set)?;
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
    profile.show(&backend.run(ProfilePrediction { model, texts: text, precision, options })?)
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

    /// Prints and writes what was asked for; exit code 1 where something is found that was denied.
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
            false => Err(Failure::new(format!("denied, but found: {}", denied.join("; ")))),
        }
    }
}
