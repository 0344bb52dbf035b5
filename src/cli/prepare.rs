//! `fireclay prepare`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::Instant;

use clap::Args;
use fireclay::Failure;
use fireclay::progress::show_preparing;
use fireclay::stdout;
use fireclay_datasets::{DataError, PrepareOptions, TextSource, Tokenizer};
use serde_json::json;

use super::arguments::fetched_data;
use super::signals::{interrupt_on_signals, signalled};

#[derive(Args)]
pub(super) struct PrepareArgs {
    /// Data to tokenize: text, JSON, CSV, TSV or Parquet, as a file or folder; a dataset on the
    /// hub, OWNER/NAME; or - for text or JSON on standard input
    #[arg(long, value_name = "PATH")]
    data: PathBuf,
    /// Tokenizer file (tokenizer.json)
    #[arg(long, value_name = "FILE")]
    tokenizer: PathBuf,
    /// Output folder; an interrupted run in it is resumed
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// JSON field, or CSV, TSV or Parquet column, that holds the text; A.B for a nested field
    #[arg(long, value_name = "NAME", default_value = "text")]
    field: String,
    /// Fraction of the documents, chosen at random, to hold out for validation [default: the end of
    /// the data is held out]
    #[arg(long, value_name = "SHARE")]
    holdout_documents: Option<f64>,
    /// Print JSON, one object per line, on stdout; everything else goes to stderr
    #[arg(long)]
    json: bool,
}

pub(super) fn prepare(args: PrepareArgs) -> Result<ExitCode, Failure> {
    if let Some(share) = args.holdout_documents.filter(|share| !(*share > 0.0 && *share < 1.0)) {
        return Err(Failure::usage(format!("--holdout-documents {share} must be above 0 and below 1")));
    }
    let interrupt = interrupt_on_signals(false)?;
    let tokenizer = Tokenizer::load(&args.tokenizer)?;
    let data = fetched_data(&args.data)?;
    let source = TextSource::open(&data, &args.field)?;
    let options = PrepareOptions { held_out_documents: args.holdout_documents, ..PrepareOptions::default() };
    let begun = Instant::now();
    let mut encoded = 0;
    let made = {
        let mut watch = show_preparing(|| interrupt.load(Ordering::Relaxed));
        fireclay_datasets::prepare(&source, &tokenizer, &args.out, options, &mut |progress| {
            encoded = progress.encoded;
            watch(&data, progress)
        })
    };
    let files = match made {
        Err(DataError::Stopped) => {
            eprintln!("stopped; run the same command again to continue from the last complete shard");
            return Ok(signalled());
        }
        made => made?,
    };
    let (manifest, seconds) = (files.manifest(), begun.elapsed().as_secs_f64());
    let rate = encoded as f64 / seconds.max(1e-9);
    let (tokens, documents, bytes) = (manifest.tokens(), manifest.documents, manifest.bytes);
    if args.json {
        stdout::line(json!({
            "event": "done", "tokens": tokens, "documents": documents, "bytes": bytes, "seconds": seconds,
            "bytes_per_second": rate, "out": args.out.display().to_string(),
        }));
        return Ok(ExitCode::SUCCESS);
    }
    let out = args.out.display();
    let how = match encoded {
        0 => "there already: nothing has changed".to_string(),
        _ => format!("{:.1} MB/s", rate / 1e6),
    };
    let each = bytes as f64 / tokens.max(1) as f64;
    let plural = if documents == 1 { "" } else { "s" };
    eprintln!("{out}: {tokens} tokens of {documents} document{plural}, {each:.2} bytes each; {how}");
    eprintln!("Train on them: fireclay train RECIPE --data {out}");
    Ok(ExitCode::SUCCESS)
}
