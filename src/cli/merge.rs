//! `fireclay merge`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use fireclay::Failure;
use fireclay::backend::{OnBackend, RunContext};
use fireclay::inference::divergence::MergeCostRun;
use fireclay::model_folder::{ModelSource, merge as merge_into};
use fireclay::precision::Precision;
use fireclay::stdout;
use fireclay_kernels::Backend;
use serde_json::json;

use super::arguments::{RunArgs, fetched_source};

#[derive(Args)]
pub(super) struct MergeArgs {
    /// Base model of the adapter: folder, or name on the hub, OWNER/NAME
    #[arg(long, value_name = "MODEL")]
    model: PathBuf,
    /// Adapter folder: from PEFT, or a run folder of LoRA training
    #[arg(long, value_name = "DIR")]
    adapter: PathBuf,
    /// Output folder for the merged model, a plain model folder
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Held-out text: reports the KL divergence of the merged model, in several precisions, from
    /// the base model with the adapter
    #[arg(long, value_name = "PATH")]
    data: Option<PathBuf>,
    /// JSON field, or CSV, TSV or Parquet column, that holds the text; A.B for a nested field
    #[arg(long, value_name = "NAME", default_value = "text", requires = "data")]
    field: String,
    #[command(flatten)]
    run: RunArgs,
}

/// A merge, on any backend: no backend computes anything.
struct Merge<'a> {
    source: ModelSource,
    out: &'a Path,
}

impl OnBackend for Merge<'_> {
    type Output = ();

    fn run<B: Backend>(self, RunContext { device, .. }: RunContext<B>) -> Result<(), Failure> {
        merge_into::<B>(&self.source, self.out, &device)
    }
}

pub(super) fn merge(mut args: MergeArgs) -> Result<ExitCode, Failure> {
    args.run.select_kernels()?;
    args.run.without_recipe("merge")?;
    let backend = args.run.backend();
    let source = fetched_source(&args.model, Some(&args.adapter), backend)?;
    backend.run(Merge { source: source.clone(), out: &args.out })?;
    let out = args.out.display().to_string();
    let cost = args.data.map(|data| MergeCostRun { adapted: source, merged: args.out, data, field: args.field });
    let cost = cost.map(|run| backend.run(run)).transpose().map_err(|failure| {
        Failure::new(format!("merged into {out}, but what that costs could not be measured: {failure}"))
    })?;
    if args.run.json {
        let mut line = json!({ "event": "done", "out": out });
        for (precision, nats) in cost.iter().flatten() {
            line["divergence"][precision.name()] = json!(nats);
        }
        stdout::line(line);
    } else {
        for (precision, nats) in cost.iter().flatten() {
            let name = match precision {
                Precision::F32 => "as written",
                other => other.name(),
            };
            stdout::line(format!("{name:<10} divergence from the adapter: {nats:.2e} nats per token"));
        }
        eprintln!("merged into {out}; try it: fireclay generate --model {out} --prompt \"...\"");
    }
    Ok(ExitCode::SUCCESS)
}
