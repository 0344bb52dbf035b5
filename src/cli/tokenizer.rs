//! `fireclay tokenizer`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Subcommand;
use fireclay::Failure;
use fireclay_datasets::{TextSource, Tokenizer, TokenizerKind};

use super::arguments::fetched_data;

/// Bytes of the text that say how long a token is.
const SAMPLE: usize = 16 << 20;

#[derive(Subcommand)]
pub(super) enum TokenizerCommand {
    /// Train a byte-level BPE tokenizer
    Train {
        /// What to learn from, the first gigabyte of it: text, JSON, tables or Parquet, a file or a
        /// folder of them, a dataset on the hub, OWNER/NAME, or - for text or JSON on standard
        /// input
        #[arg(long, value_name = "PATH")]
        data: PathBuf,
        /// The field of JSON, or the column of a table or of Parquet, that holds a document; of
        /// what is nested A.B
        #[arg(long, value_name = "NAME", default_value = "text")]
        field: String,
        /// Number of tokens, 257 at least
        #[arg(long, value_name = "N")]
        vocab_size: usize,
        /// The tokenizer.json to write
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
    eprintln!("{out}: {known} tokens, {per_token:.2} bytes of this text each");
    Ok(ExitCode::SUCCESS)
}
