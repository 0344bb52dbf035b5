//! `tokens.json`: how a folder's tokens were made.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};

use crate::error::DataError;
use crate::inputs::Inputs;

pub(super) const FILE: &str = "tokens.json";
const VERSION: u32 = 1;
/// Version of the reading of source files; a change makes tokens anew.
const READING: u32 = 1;

/// How a folder's tokens were made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    pub(super) version: u32,
    /// Version of the reading of source files.
    #[serde(default)]
    pub(super) reading: u32,
    /// Whether all of them are complete.
    pub complete: bool,
    /// Hash of the tokenizer.
    pub tokenizer_sha256: String,
    /// Size of the tokenizer's vocabulary.
    pub vocab_size: usize,
    /// The end-of-document token, if any.
    pub end_token: Option<u32>,
    /// Bytes per token.
    pub(super) width: usize,
    /// The source; none for standard input.
    pub inputs: Option<Inputs>,
    /// The document field, for records.
    pub field: String,
    /// Share of the documents held out, if by document.
    pub held_out_documents: Option<f64>,
    /// Documents read.
    pub documents: u64,
    /// Bytes of text.
    pub bytes: u64,
    /// Pieces of text in the shards: where to continue.
    pub(super) pieces: u64,
    /// Whether a document continues after them.
    pub(super) in_document: bool,
    pub(super) train: Vec<ShardEntry>,
    pub(super) valid: Vec<ShardEntry>,
}

/// A shard's metadata.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct ShardEntry {
    pub(super) file: String,
    pub(super) tokens: u64,
    pub(super) crc32: u32,
    /// Nanoseconds since 1970.
    pub(super) modified: u128,
}

impl Manifest {
    /// A manifest of tokens still to be made.
    pub(super) fn new(
        tokenizer_sha256: String,
        vocab_size: usize,
        end_token: Option<u32>,
        inputs: Option<Inputs>,
        field: &str,
        held_out_documents: Option<f64>,
    ) -> Self {
        let width = if vocab_size <= 1 << 16 { 2 } else { 4 };
        Self {
            version: VERSION,
            reading: READING,
            complete: false,
            tokenizer_sha256,
            vocab_size,
            end_token,
            width,
            inputs,
            field: field.to_string(),
            held_out_documents,
            documents: 0,
            bytes: 0,
            pieces: 0,
            in_document: false,
            train: Vec::new(),
            valid: Vec::new(),
        }
    }

    /// Whether `other` has the same source, tokenizer and options.
    pub(super) fn is_alike(&self, other: &Self) -> bool {
        let made = |manifest: &Self| {
            let inputs = manifest.inputs.as_ref().map(|inputs| inputs.sha256.clone());
            let (hash, held_out) = (manifest.tokenizer_sha256.clone(), manifest.held_out_documents);
            let versions = (manifest.version, manifest.reading);
            (versions, hash, manifest.end_token, inputs, manifest.field.clone(), held_out)
        };
        // Standard input cannot be read again.
        self.inputs.is_some() && made(self) == made(other)
    }

    /// Total tokens of the shards.
    pub fn tokens(&self) -> u64 {
        self.train.iter().chain(&self.valid).map(|shard| shard.tokens).sum()
    }

    /// Reads a folder's manifest.
    pub(super) fn read(folder: &Path) -> Result<Self, DataError> {
        let path = folder.join(FILE);
        let text = fs::read_to_string(&path).map_err(|error| DataError::Io { path: path.clone(), error })?;
        let refused = |reason: String| DataError::Refused { path: path.clone(), reason };
        let manifest: Self =
            serde_json::from_str(&text).map_err(|error| refused(format!("not a manifest of tokens: {error}")))?;
        if manifest.version != VERSION || ![2, 4].contains(&manifest.width) {
            let (version, width) = (manifest.version, manifest.width);
            return Err(refused(format!(
                "has version {version} and {width} bytes per token; this program reads version {VERSION}"
            )));
        }
        Ok(manifest)
    }

    /// Writes a folder's manifest atomically.
    pub(super) fn write(&self, folder: &Path) -> Result<(), DataError> {
        let (path, partial) = (folder.join(FILE), folder.join(format!("{FILE}.partial")));
        let put = || {
            let mut file = File::create(&partial)?;
            file.write_all(&serde_json::to_vec_pretty(self)?)?;
            file.sync_all()?;
            fs::rename(&partial, &path)
        };
        put().map_err(|error| DataError::Io { path: path.clone(), error })
    }
}

/// Modification time of a file in nanoseconds since 1970; 0 if unknown.
pub(super) fn modified(path: &Path) -> u128 {
    let time = fs::metadata(path).and_then(|meta| meta.modified()).ok();
    time.and_then(|time| time.duration_since(UNIX_EPOCH).ok()).map_or(0, |time| time.as_nanos())
}
