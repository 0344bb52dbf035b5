//! `fireclay tokenizer`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Subcommand;
use fireclay::Failure;
use fireclay_datasets::{TextSource, Tokenizer, TokenizerKind};

use super::arguments::fetched_data;

/// Bytes of the text used to measure the mean token length.
const SAMPLE: usize = 16 << 20;

#[derive(Subcommand)]
pub(super) enum TokenizerCommand {
    /// Train a byte-level BPE tokenizer
    Train {
        /// Training data: text, JSON, CSV, TSV or Parquet, as a file or folder; a dataset on the
        /// hub, OWNER/NAME; or - for text or JSON on standard input. Only the first gigabyte is
        /// used
        #[arg(long, value_name = "PATH")]
        data: PathBuf,
        /// JSON field, or CSV, TSV or Parquet column, that holds the text; A.B for a nested field
        #[arg(long, value_name = "NAME", default_value = "text")]
        field: String,
        /// Vocabulary size, at least 257
        #[arg(long, value_name = "N")]
        vocab_size: usize,
        /// Output file (tokenizer.json)
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
    },
}

pub(super) fn tokenizer(command: TokenizerCommand) -> Result<ExitCode, Failure> {
    match command {
        TokenizerCommand::Train { data, field, vocab_size, out } => train(&data, &field, vocab_size, &out),
    }
}

fn train(data: &Path, field: &str, vocab_size: usize, out: &Path) -> Result<ExitCode, Failure> {
    let source = TextSource::open(&fetched_data(data)?, field)?;
    let tokenizer = Tokenizer::train_on(TokenizerKind::Bpe(vocab_size), std::slice::from_ref(&source))?;
    tokenizer.save(out)?;
    let sample = source.beginning(SAMPLE)?;
    let per_token = sample.len() as f64 / tokenizer.encode(&sample)?.len().max(1) as f64;
    let (out, known) = (out.display(), tokenizer.vocab_size());
    eprintln!("{out}: {known} tokens, {per_token:.2} bytes per token on this text");
    Ok(ExitCode::SUCCESS)
}
