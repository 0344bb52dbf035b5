//! `fireclay compare`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use fireclay::Failure;
use fireclay::runs::{Comparison, Run};
use fireclay::stdout;

#[derive(Args)]
pub(super) struct CompareArgs {
    /// Run folders to compare
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// SVG file to write
    #[arg(long, value_name = "FILE", default_value = "compare.svg")]
    svg: PathBuf,
    /// HTML file to write
    #[arg(long, value_name = "FILE", default_value = "compare.html")]
    html: PathBuf,
    /// Print JSON, one object per line, on stdout; everything else goes to stderr
    #[arg(long)]
    json: bool,
}

pub(super) fn compare(args: &CompareArgs) -> Result<ExitCode, Failure> {
    let runs = args.runs.iter().map(|folder| Run::read(folder)).collect::<Result<Vec<_>, _>>()?;
    let comparison = Comparison::new(runs);
    if args.json {
        comparison.to_json().into_iter().for_each(stdout::line);
    } else {
        stdout::line(comparison.table());
    }
    comparison.picture()?.save(&args.svg)?;
    comparison.write_page(&args.html)?;
    eprintln!("wrote curves to {} and an interactive page to {}", args.svg.display(), args.html.display());
    Ok(ExitCode::SUCCESS)
}
