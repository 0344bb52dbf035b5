//! `fireclay runs`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use fireclay::Failure;
use fireclay::runs::Run;
use fireclay::stdout;
use serde_json::json;

#[derive(Args)]
pub(super) struct RunsArgs {
    /// Folder that contains the runs
    #[arg(default_value = "runs", value_name = "DIR")]
    folder: PathBuf,
    /// Print JSON, one object per line, on stdout; everything else goes to stderr
    #[arg(long)]
    json: bool,
}

pub(super) fn runs(args: &RunsArgs) -> Result<ExitCode, Failure> {
    if !args.folder.is_dir() {
        let shown = args.folder.display();
        return Err(Failure::new(format!("{shown}: no such folder: name the folder of the runs, fireclay runs DIR")));
    }
    let runs = Run::list(&args.folder);
    if args.json {
        for run in &runs {
            stdout::line(json!({
                "event": "run", "folder": run.folder.display().to_string(), "status": run.status().as_str(),
                "step": run.step(), "steps": run.record.as_ref().map(|record| record.recipe.training.steps),
                "best_step": run.best().map(|best| best.0), "best_valid_loss": run.best().map(|best| best.1),
                "tokens_per_second": run.tokens_per_second(),
                "begun": run.record.as_ref().map(|record| record.begun),
            }));
        }
        return Ok(ExitCode::SUCCESS);
    }
    if runs.is_empty() {
        eprintln!("no runs in {}", args.folder.display());
    }
    let names: Vec<String> = runs.iter().map(|run| run.folder.display().to_string()).collect();
    let width = names.iter().map(|name| name.chars().count()).max().unwrap_or(0).max("run".len());
    if !runs.is_empty() {
        stdout::line(format!(
            "{:<width$}  {:<7}  {:>17}  {:>9}  {:>9}  {:>9}",
            "run", "status", "step", "best", "at step", "tokens/s"
        ));
    }
    for (run, name) in runs.iter().zip(names) {
        let step = match &run.record {
            Some(record) => format!("{} of {}", run.step(), record.recipe.training.steps),
            None => run.step().to_string(),
        };
        let (best, at) = match run.best() {
            Some((step, loss)) => (format!("{loss:.4}"), step.to_string()),
            None => ("-".into(), "-".into()),
        };
        let speed = run.tokens_per_second().map_or("-".to_string(), |speed| format!("{speed:.0}"));
        let status = run.status().as_str();
        stdout::line(format!("{name:<width$}  {status:<7}  {step:>17}  {best:>9}  {at:>9}  {speed:>9}"));
    }
    Ok(ExitCode::SUCCESS)
}
