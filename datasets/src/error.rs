//! Errors of data.

use std::path::PathBuf;

/// An error of data.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A file system error.
    #[error("{path}: {error}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
    /// A file or folder contains no text.
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
        /// Offset of the first invalid byte.
        byte: usize,
    },
    /// A folder has no utterances in a known layout.
    #[error("{path}: no utterances found; looked for {looked_for}")]
    Layout {
        /// The folder.
        path: PathBuf,
        /// The known layouts.
        looked_for: &'static str,
    },
    /// A line of a file is malformed.
    #[error("{path}, line {line}: {reason}{}", further(*more))]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// The reason.
        reason: String,
        /// Number of other malformed lines.
        more: usize,
    },
    /// A file or folder cannot be used.
    #[error("{path}: {reason}")]
    Refused {
        /// The file or folder.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// The caller asked to stop.
    #[error("stopped")]
    Stopped,
    /// A tokenizer could not be read, trained or written.
    #[error("{0}")]
    Tokenizer(String),
    /// The text is too short for a row.
    #[error("the text has {tokens} tokens; training on blocks of {seq_length} needs at least {needed}")]
    Short {
        /// Its tokens.
        tokens: usize,
        /// Tokens of a row.
        seq_length: usize,
        /// Required tokens.
        needed: usize,
    },
}

/// The part of a message about other malformed lines.
fn further(more: usize) -> String {
    match more {
        0 => String::new(),
        1 => " (and 1 more malformed line)".to_owned(),
        _ => format!(" (and {more} more malformed lines)"),
    }
}
