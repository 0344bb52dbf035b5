//! Why data could not be used.

use std::path::PathBuf;

/// Why data could not be used.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The file system refused.
    #[error("{path}: {error}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What it said.
        error: std::io::Error,
    },
    /// A file or folder holds no text.
    #[error("{path}: holds no text")]
    Empty {
        /// The file or folder.
        path: PathBuf,
    },
    /// A file is not UTF-8 text.
    #[error("{path}: is not UTF-8 text (byte {byte})")]
    Binary {
        /// The file.
        path: PathBuf,
        /// Where it stops being text.
        byte: usize,
    },
    /// A folder holds no utterances in a layout that is known.
    #[error("{path}: holds no utterances; looked for {looked_for}")]
    Layout {
        /// The folder.
        path: PathBuf,
        /// The layouts that are known.
        looked_for: &'static str,
    },
    /// A line of a file is not what it should be.
    #[error("{path}, line {line}: {reason}{}", further(*more))]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// What is wrong with it.
        reason: String,
        /// How many other lines are malformed.
        more: usize,
    },
    /// A file or folder cannot be used.
    #[error("{path}: {reason}")]
    Refused {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// It was asked to stop.
    #[error("stopped")]
    Stopped,
    /// A tokenizer could not be read, trained or written.
    #[error("{0}")]
    Tokenizer(String),
    /// Tokens and targets are no rows of a batch.
    #[error("{0}")]
    Batch(String),
    /// The text is shorter than what one batch row needs.
    #[error("the text has {tokens} tokens; training on blocks of {seq_length} needs at least {needed}")]
    Short {
        /// How many there are.
        tokens: usize,
        /// Length of a block.
        seq_length: usize,
        /// How many are needed.
        needed: usize,
    },
}

/// What a message about a malformed line says of others.
fn further(more: usize) -> String {
    match more {
        0 => String::new(),
        1 => " (and 1 more malformed line)".to_owned(),
        _ => format!(" (and {more} more malformed lines)"),
    }
}
