//! `fireclay tokenizer`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Subcommand;
use fireclay::Failure;
use fireclay_datasets::{Tokenizer, TokenizerKind, read_text};

#[derive(Subcommand)]
pub(super) enum TokenizerCommand {
    /// Train a byte-level BPE tokenizer
    Train {
        /// Text to learn from: a file or a folder of them
        #[arg(long, value_name = "PATH")]
        data: PathBuf,
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
        TokenizerCommand::Train { data, vocab_size, out } => train(&data, vocab_size, &out),
    }
}

fn train(data: &Path, vocab_size: usize, out: &Path) -> Result<ExitCode, Failure> {
    let text = read_text(data)?;
    let tokenizer = Tokenizer::train(TokenizerKind::Bpe(vocab_size), &text)?;
    tokenizer.save(out)?;
    let tokens = tokenizer.encode(&text)?.len();
    let per_token = text.len() as f64 / tokens.max(1) as f64;
    eprintln!("{}: {} tokens, {per_token:.2} bytes of this text each", out.display(), tokenizer.vocab_size());
    Ok(ExitCode::SUCCESS)
}
