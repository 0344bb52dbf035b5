//! `fireclay merge`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use fireclay::Failure;
use fireclay::backend::{OnBackend, RunContext};
use fireclay::model_folder::{ModelSource, merge as merge_into};
use fireclay::stdout;
use fireclay_kernels::Backend;
use serde_json::json;

use super::arguments::{RunArgs, fetched_source};

#[derive(Args)]
pub(super) struct MergeArgs {
    /// Base model of the adapter: folder, or name on the hub, OWNER/NAME
    #[arg(long, value_name = "MODEL")]
    model: PathBuf,
    /// Adapter folder: from PEFT, or a run with adapter=lora
    #[arg(long, value_name = "DIR")]
    adapter: PathBuf,
    /// Output folder for the merged model, a plain model folder
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
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
    backend.run(Merge { source, out: &args.out })?;
    let out = args.out.display().to_string();
    if args.run.json {
        stdout::line(json!({ "event": "done", "out": out }));
    } else {
        eprintln!("merged into {out}; try it: fireclay generate --model {out} --prompt \"...\"");
    }
    Ok(ExitCode::SUCCESS)
}
