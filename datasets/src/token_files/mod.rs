//! Tokens on disk, made once and read in place.
//!
//! ```text
//! tokens.json                       how they were made, and the checksum of each shard
//! tokenizer.json                    what they mean
//! train-00000.tokens ...            shards of one stream of tokens, documents one after the other
//! valid-00000.tokens ...            the held-out documents, where they are held out by document
//! ```
//!
//! While they are made, `tokens.json` says that there is more to come, and where to go on.

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
    /// Whether `folder` holds tokens, or the beginning of them.
    pub fn are_in(folder: &Path) -> bool {
        folder.join(manifest::FILE).is_file()
    }

    /// The tokens in `folder`. A shard that looks as it was written is taken at its word; of others every byte is checked.
    ///
    /// # Errors
    /// If there are none, they are not complete, or a shard is missing or damaged.
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

    /// How they were made.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Where they are.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What they mean.
    ///
    /// # Errors
    /// If the folder's tokenizer is missing, damaged, or not the one that they were made with.
    pub fn tokenizer(&self) -> Result<Tokenizer, DataError> {
        let path = self.folder.join(TOKENIZER);
        let tokenizer = Tokenizer::load(&path)?;
        if tokenizer.sha256()? != self.manifest.tokenizer_sha256 {
            let reason = "is not the tokenizer that these tokens were made with".to_string();
            return Err(DataError::Refused { path, reason });
        }
        Ok(tokenizer)
    }

    /// Tokens to learn from and held out.
    pub fn len(&self) -> u64 {
        self.train.len() + self.valid.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Shards one after the other.
#[derive(Debug)]
pub(crate) struct Stream {
    shards: Vec<Shard>,
    /// Where each begins, and where the last one ends.
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
    /// If a shard cannot be read, or holds what is no token.
    ///
    /// # Panics
    /// If there are not as many.
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
