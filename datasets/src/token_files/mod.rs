//! Tokens on disk, made once and read in place.
//!
//! ```text
//! tokens.json                       the manifest, with the checksum of each shard
//! tokenizer.json                    their tokenizer
//! train-00000.tokens ...            shards of one token stream, documents in order
//! valid-00000.tokens ...            held-out documents, if held out by document
//! ```
//!
//! Until they are complete, `tokens.json` records where to continue.

mod manifest;
mod prepare;
mod shard;

use std::path::{Path, PathBuf};

pub use manifest::Manifest;
pub use prepare::{PrepareOptions, Progress, prepare};

use self::shard::Shard;
use crate::error::DataError;
use crate::tokenizer::Tokenizer;

/// The tokenizer of a folder's tokens.
pub(crate) const TOKENIZER: &str = "tokenizer.json";

/// A folder of tokens.
#[derive(Debug)]
pub struct TokenFiles {
    folder: PathBuf,
    manifest: Manifest,
    pub(crate) train: Stream,
    pub(crate) valid: Stream,
}

impl TokenFiles {
    /// Whether `folder` holds tokens, complete or not.
    pub fn are_in(folder: &Path) -> bool {
        folder.join(manifest::FILE).is_file()
    }

    /// Opens the tokens in `folder`. Shards with unchanged size and time are trusted; others are
    /// verified in full.
    ///
    /// # Errors
    /// If there are none, they are incomplete, or a shard is missing or damaged.
    pub fn open(folder: &Path) -> Result<Self, DataError> {
        let manifest = Manifest::read(folder)?;
        if !manifest.complete {
            let reason = "its tokens are incomplete: continue with `fireclay prepare`".to_string();
            return Err(DataError::Refused { path: folder.to_path_buf(), reason });
        }
        let open = |shards: &[manifest::ShardEntry]| {
            let shards = shards.iter().map(|entry| Shard::open(folder, entry, &manifest));
            Ok::<_, DataError>(Stream::new(shards.collect::<Result<_, _>>()?))
        };
        let (train, valid) = (open(&manifest.train)?, open(&manifest.valid)?);
        Ok(Self { folder: folder.to_path_buf(), manifest, train, valid })
    }

    /// The manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The tokenizer.
    ///
    /// # Errors
    /// If it is missing, damaged, or not the one that the tokens were made with.
    pub fn tokenizer(&self) -> Result<Tokenizer, DataError> {
        let path = self.folder.join(TOKENIZER);
        let tokenizer = Tokenizer::load(&path)?;
        if tokenizer.sha256()? != self.manifest.tokenizer_sha256 {
            let reason = "is not the tokenizer that these tokens were made with".to_string();
            return Err(DataError::Refused { path, reason });
        }
        Ok(tokenizer)
    }

    /// Number of training and held-out tokens.
    pub fn len(&self) -> u64 {
        self.train.len() + self.valid.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A token stream in shards.
#[derive(Debug)]
pub(crate) struct Stream {
    shards: Vec<Shard>,
    /// The start of each, and the end of the last.
    begins: Vec<u64>,
}

impl Stream {
    fn new(shards: Vec<Shard>) -> Self {
        let mut begins = vec![0];
        begins.extend(shards.iter().scan(0, |end, shard| {
            *end += shard.len();
            Some(*end)
        }));
        Self { shards, begins }
    }

    /// Tokens in all.
    pub(crate) fn len(&self) -> u64 {
        self.begins[self.shards.len()]
    }

    /// The `count` tokens from `begin` on.
    ///
    /// # Errors
    /// If a shard cannot be read, or contains invalid tokens.
    ///
    /// # Panics
    /// If there are fewer.
    pub(crate) fn read(&self, begin: u64, count: usize) -> Result<Vec<u32>, DataError> {
        assert!(begin + count as u64 <= self.len(), "{count} tokens from {begin} on, of {}", self.len());
        let mut tokens = Vec::with_capacity(count);
        let mut at = self.begins.partition_point(|first| *first <= begin) - 1;
        while tokens.len() < count {
            let place = begin + tokens.len() as u64 - self.begins[at];
            let here = (self.shards[at].len() - place).min((count - tokens.len()) as u64);
            self.shards[at].read(place, here as usize, &mut tokens)?;
            at += 1;
        }
        Ok(tokens)
    }
}

#[cfg(test)]
mod tests;
