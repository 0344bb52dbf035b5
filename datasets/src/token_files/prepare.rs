//! Tokenizes text to token files: one thread reads, all cores encode. Complete shards are never
//! made again.

use std::fs::{self, File, TryLockError};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use super::manifest::{FILE, Manifest};
use super::shard::ShardWriter;
use super::{TOKENIZER, TokenFiles};
use crate::error::DataError;
use crate::inputs::Inputs;
use crate::random::Generator;
use crate::sources::{Piece, STDIN, TextSource};
use crate::tokenizer::{Encoder, Tokenizer};

/// Size of a full shard, in tokens.
const SHARD: u64 = 32 << 20;
/// Bytes of text per encoding batch.
const BATCH: usize = 4 << 20;
/// Maximum queued batches.
const AHEAD: usize = 2;
const LOCK: &str = "tokens.lock";

/// Options of token files.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PrepareOptions {
    /// Holds out this share of the documents, chosen by their numbers; with `None`, training holds
    /// out the end of the data.
    pub held_out_documents: Option<f64>,
    /// Tokens per shard; 0 for 32 million.
    pub shard: u64,
}

/// Progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of the files read, as stored.
    pub read: u64,
    /// Total bytes of the files; 0 if unknown.
    pub total: u64,
    /// Bytes of text encoded by this call.
    pub encoded: u64,
    /// Tokens so far, earlier calls included.
    pub tokens: u64,
}

/// A message of the reader.
enum Read {
    Pieces(Vec<Piece>, u64),
    Failed(DataError),
}

/// Makes token files of `source` in `folder`, continues incomplete ones, or reuses those of the
/// same source and tokenizer. Calls `progress` every few megabytes; it breaks to stop, and the same
/// call continues later.
///
/// # Errors
/// If the source cannot be read or contains no text, the tokenizer lacks a part of it, the folder
/// holds something else or cannot be written, or another process writes there; and
/// [`DataError::Stopped`].
pub fn prepare(
    source: &TextSource,
    tokenizer: &Tokenizer,
    folder: &Path,
    options: PrepareOptions,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<TokenFiles, DataError> {
    let refused = |error| DataError::Io { path: folder.to_path_buf(), error };
    fs::create_dir_all(folder).map_err(refused)?;
    let known = if TokenFiles::are_in(folder) { Some(Manifest::read(folder)?) } else { None };
    if known.is_none() && fs::read_dir(folder).map_err(refused)?.flatten().any(|entry| entry.file_name() != LOCK) {
        let reason = "holds something other than tokens: choose another folder".to_string();
        return Err(DataError::Refused { path: folder.to_path_buf(), reason });
    }
    let _lock = lock(folder)?;
    let inputs = match source.path() == Path::new(STDIN) {
        true => None,
        false => Some(Inputs::of(source.path(), known.as_ref().and_then(|known| known.inputs.as_ref()))?),
    };
    let (vocab_size, end) = (tokenizer.vocab_size(), tokenizer.end_token());
    let held_out = options.held_out_documents;
    let begun = Manifest::new(tokenizer.sha256()?, vocab_size, end, inputs, source.field(), held_out);
    let mut manifest = match known {
        Some(known) if known.is_alike(&begun) => Manifest { inputs: begun.inputs, ..known },
        _ => begun,
    };
    if !manifest.complete {
        if manifest.pieces == 0 {
            clear(folder)?;
            manifest.write(folder)?;
            tokenizer.save(&folder.join(TOKENIZER))?;
        }
        let shard = if options.shard == 0 { SHARD } else { options.shard };
        Writer { folder, tokenizer, shard, progress, total: source.bytes() }.write(source, &mut manifest)?;
    }
    manifest.write(folder)?;
    TokenFiles::open(folder)
}

struct Writer<'a> {
    folder: &'a Path,
    tokenizer: &'a Tokenizer,
    shard: u64,
    progress: &'a mut dyn FnMut(Progress) -> ControlFlow<()>,
    /// Bytes of the files.
    total: u64,
}

impl Writer<'_> {
    /// Writes what the manifest lacks.
    fn write(mut self, source: &TextSource, manifest: &mut Manifest) -> Result<(), DataError> {
        let (may_cut, skipped) = (self.tokenizer.may_cut_words(), manifest.pieces);
        let written = thread::scope(|scope| {
            let (sender, receiver) = sync_channel(AHEAD);
            scope.spawn(move || read(source, may_cut, skipped, &sender));
            self.encode(&receiver, manifest)
        });
        if written.is_err() {
            // Remove partial files, which may fill the disk.
            for entry in fs::read_dir(self.folder).into_iter().flatten().flatten() {
                if entry.path().extension().is_some_and(|extension| extension == "partial") {
                    let _ = fs::remove_file(entry.path());
                }
            }
        }
        if !written? {
            return Err(DataError::Empty { path: source.path().to_path_buf() });
        }
        manifest.complete = true;
        Ok(())
    }

    /// Writes shards from the reader's batches. Returns whether they contain more than white space.
    fn encode(&mut self, receiver: &Receiver<Read>, manifest: &mut Manifest) -> Result<bool, DataError> {
        let mut has_text = manifest.pieces > 0;
        let encoder = Encoder::new(self.tokenizer);
        // Separator of documents for a tokenizer without an end token.
        let between = self.tokenizer.encode_whole("\n").unwrap_or_default();
        let mut shards: [Option<ShardWriter>; 2] = [None, None];
        let (mut done, mut encoded) = (manifest.clone(), 0);
        for read in receiver {
            let (pieces, bytes_read) = match read {
                Read::Pieces(pieces, bytes) => (pieces, bytes),
                Read::Failed(error) => return Err(error),
            };
            let strings: Vec<&str> = pieces.iter().map(|piece| piece.text.as_str()).collect();
            for (piece, mut tokens) in pieces.iter().zip(encoder.encode(&strings)?) {
                let held_out = done.held_out_documents.is_some_and(|share| is_held_out(done.documents, share));
                let (name, shard) = if held_out { ("valid", 1) } else { ("train", 0) };
                let list = if held_out { &done.valid } else { &done.train };
                if !done.in_document && done.end_token.is_none() && !(list.is_empty() && shards[shard].is_none()) {
                    tokens.splice(0..0, between.iter().copied());
                }
                done.in_document = !piece.ends_document;
                if piece.ends_document {
                    tokens.extend(done.end_token);
                    done.documents += 1;
                }
                has_text |= !piece.text.trim().is_empty();
                done.pieces += 1;
                done.bytes += piece.text.len() as u64;
                encoded += piece.text.len() as u64;
                let mut writer = match shards[shard].take() {
                    Some(writer) => writer,
                    None => ShardWriter::new(self.folder, format!("{name}-{:05}.tokens", list.len()), done.width)?,
                };
                writer.write(&tokens)?;
                shards[shard] = Some(writer);
                // All shards end together here: a place to continue from.
                if shards.iter().flatten().map(ShardWriter::len).sum::<u64>() >= self.shard {
                    Self::finish(&mut shards, &mut done)?;
                    done.write(self.folder)?;
                    *manifest = done.clone();
                }
            }
            let tokens = done.tokens() + shards.iter().flatten().map(ShardWriter::len).sum::<u64>();
            if (self.progress)(Progress { read: bytes_read, total: self.total, encoded, tokens }).is_break() {
                return Err(DataError::Stopped);
            }
        }
        Self::finish(&mut shards, &mut done)?;
        *manifest = done;
        Ok(has_text)
    }

    fn finish(shards: &mut [Option<ShardWriter>; 2], manifest: &mut Manifest) -> Result<(), DataError> {
        let [train, valid] = shards.each_mut().map(Option::take);
        if let Some(train) = train {
            let entry = train.finish(manifest)?;
            manifest.train.push(entry);
        }
        if let Some(valid) = valid {
            let entry = valid.finish(manifest)?;
            manifest.valid.push(entry);
        }
        Ok(())
    }
}

/// Reads pieces after the first `skipped` ones and sends them in batches, until the receiver is
/// gone.
fn read(source: &TextSource, may_cut: bool, skipped: u64, sender: &SyncSender<Read>) {
    let (mut batch, mut bytes, mut number) = (Vec::new(), 0, 0);
    let read = source.read(may_cut, &mut |piece| {
        number += 1;
        if number <= skipped {
            return Ok(ControlFlow::Continue(()));
        }
        bytes += piece.text.len();
        batch.push(piece);
        if bytes < BATCH {
            return Ok(ControlFlow::Continue(()));
        }
        bytes = 0;
        let taken = sender.send(Read::Pieces(std::mem::take(&mut batch), source.bytes_read()));
        Ok(if taken.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
    });
    // A receiver that is gone reports its own error.
    let _ = match read {
        Ok(()) if batch.is_empty() => Ok(()),
        Ok(()) => sender.send(Read::Pieces(batch, source.bytes_read())),
        Err(error) => sender.send(Read::Failed(error)),
    };
}

/// Whether the document of this number is held out.
fn is_held_out(number: u64, share: f64) -> bool {
    Generator::new(0, 0, number).chance(share)
}

/// Removes the shards of a folder.
fn clear(folder: &Path) -> Result<(), DataError> {
    let refused = |error| DataError::Io { path: folder.to_path_buf(), error };
    for entry in fs::read_dir(folder).map_err(refused)? {
        let path = entry.map_err(refused)?.path();
        if path.extension().is_some_and(|extension| extension == "tokens" || extension == "partial") {
            fs::remove_file(&path).map_err(|error| DataError::Io { path, error })?;
        }
    }
    Ok(())
}

/// The lock on a folder, held as long as the file is open.
fn lock(folder: &Path) -> Result<File, DataError> {
    let path = folder.join(LOCK);
    let file = File::options().create(true).truncate(false).write(true).open(&path);
    let file = file.map_err(|error| DataError::Io { path: path.clone(), error })?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => {
            let reason = format!("another process is writing {FILE} there: wait for it");
            Err(DataError::Refused { path: folder.to_path_buf(), reason })
        }
        Err(TryLockError::Error(error)) => Err(DataError::Io { path, error }),
    }
}
