//! Where text comes from: files, folders of them, and standard input; as text, JSON, tables or
//! Parquet, compressed or not.
//!
//! A source is read piece by piece, so that a corpus need not fit in memory.

mod field;
mod json;
mod parquet;
mod plain;
mod table;
#[cfg(test)]
mod tests;
mod text;

use std::fs::{self, File};
use std::io::{self, BufReader, Read};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::DataError;

use plain::Plain;
pub(crate) use text::{cut_between_words, read_file};

/// Standard input, as a path.
pub const STDIN: &str = "-";

/// In place of a field's name: the whole record, as JSON.
const WHOLE_RECORD: &str = "";

/// Bytes of a document that has to be read as one piece, at the most.
const LONGEST_DOCUMENT: usize = 64 << 20;

/// A part of a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// What it says.
    pub text: String,
    /// Whether the document ends with it.
    pub ends_document: bool,
}

/// How a file holds its documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    /// The file is one document.
    Text,
    /// JSON lines or one array of objects, with the document in a field.
    Json,
    /// The same if it begins as one, and else one document.
    JsonOrText,
    /// A row a document, with the document in a column; what stands between two columns.
    Table(u8),
    /// A row a document, with the document in a column.
    Parquet,
}

/// What a file is compressed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Compression {
    None,
    Gzip,
    Zstd,
}

/// Documents of a file, of all files in a folder and the folders below it, in the order of their names, or of standard input.
#[derive(Clone, Debug)]
pub struct TextSource {
    path: PathBuf,
    files: Vec<PathBuf>,
    field: String,
    /// Bytes of the files that were read.
    read: Arc<AtomicU64>,
}

/// Told of each piece; breaks where no more are wanted.
pub(crate) type EachPiece<'a> = &'a mut dyn FnMut(Piece) -> Result<ControlFlow<()>, DataError>;

impl TextSource {
    /// The documents in `path`; hidden files are left out. `.json`, `.jsonl` and `.ndjson` are JSON
    /// lines or one array of objects, whichever they begin as; `.csv` and `.tsv` are tables whose
    /// first row names the columns, and `.parquet` is Parquet. Their documents are in `field`: a
    /// name, or for what is nested several with dots between them, as in `meta.text`. Everything
    /// else is text, a document a file, but standard input, which is JSON if it begins with an
    /// object or an array of objects. `.gz` and `.zst` are decompressed, and a byte order mark of
    /// UTF-8 is dropped. However long a file is, one record of up to 64 MB is in memory at a time;
    /// of an array, too.
    ///
    /// # Errors
    /// If something is missing or unreadable.
    pub fn open(path: &Path, field: &str) -> Result<Self, DataError> {
        let mut files = Vec::new();
        if path != Path::new(STDIN) {
            collect(path, &mut files)?;
        }
        Ok(Self { path: path.to_path_buf(), files, field: field.to_string(), read: Arc::default() })
    }

    /// The records of `path`, each as a JSON object: what [`open`](Self::open) takes a field of.
    pub(crate) fn records(path: &Path) -> Result<Self, DataError> {
        Self::open(path, WHOLE_RECORD)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its files; none for standard input.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// The field of the documents, where a line or a row is one.
    pub fn field(&self) -> &str {
        &self.field
    }

    /// Bytes of its files that have been read.
    pub fn bytes_read(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    /// Bytes of its files, compressed as they are.
    pub fn bytes(&self) -> u64 {
        self.files.iter().filter_map(|file| fs::metadata(file).ok()).map(|meta| meta.len()).sum()
    }

    /// Hands all pieces to `each`, in order. Documents are cut between words, if `may_cut`; else each is one piece.
    ///
    /// # Errors
    /// If a file cannot be read, is not UTF-8, holds something else than its name says, is
    /// malformed, or lacks the field; and what `each` gives.
    pub(crate) fn read(&self, may_cut: bool, each: EachPiece<'_>) -> Result<(), DataError> {
        self.read.store(0, Ordering::Relaxed);
        if self.path == Path::new(STDIN) {
            return self.decompressed(io::stdin().lock(), &self.path, Format::JsonOrText, may_cut, each).map(|_| ());
        }
        for file in &self.files {
            if self.read_one(file, may_cut, each)?.is_break() {
                break;
            }
        }
        Ok(())
    }

    fn read_one(&self, file: &Path, may_cut: bool, each: EachPiece<'_>) -> Result<ControlFlow<()>, DataError> {
        let (format, compression) = kind(file);
        let refused = |error| DataError::Io { path: file.to_path_buf(), error };
        let open = File::open(file).map_err(refused)?;
        if format == Format::Parquet {
            let size = open.metadata().map_err(refused)?.len();
            return parquet::pieces(open, file, &self.field, each, &mut |share| {
                self.read.fetch_add((size as f64 * share) as u64, Ordering::Relaxed);
            });
        }
        let open = Counted { file: open, read: Arc::clone(&self.read) };
        let reader: Box<dyn Read> = match compression {
            Compression::None => Box::new(open),
            Compression::Gzip => Box::new(flate2::read::MultiGzDecoder::new(BufReader::new(open))),
            Compression::Zstd => Box::new(zstd::Decoder::new(open).map_err(refused)?),
        };
        self.decompressed(reader, file, format, may_cut, each)
    }

    fn decompressed(
        &self,
        reader: impl Read,
        path: &Path,
        format: Format,
        may_cut: bool,
        each: EachPiece<'_>,
    ) -> Result<ControlFlow<()>, DataError> {
        let reader = Plain::new(reader, path)?;
        match format {
            Format::Json => json::pieces(reader, path, &self.field, false, may_cut, each),
            Format::JsonOrText => json::pieces(reader, path, &self.field, true, may_cut, each),
            Format::Table(delimiter) => table::pieces(reader, path, &self.field, delimiter, each),
            Format::Text | Format::Parquet => {
                let begins_at = reader.at();
                text::pieces(reader, path, begins_at, may_cut, each)
            }
        }
    }

    /// About the first `bytes` of the text.
    ///
    /// # Errors
    /// As a file is refused.
    pub fn beginning(&self, bytes: usize) -> Result<String, DataError> {
        let mut text = String::new();
        self.read(true, &mut |piece| {
            text.push_str(&piece.text);
            Ok(if text.len() < bytes { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
        })?;
        Ok(text)
    }

    /// All documents as one text, joined by line breaks: for what has to be in memory as a whole.
    ///
    /// # Errors
    /// As a file is refused, and if there is no text at all.
    pub fn text(&self) -> Result<String, DataError> {
        let mut text = String::new();
        let mut begins = true;
        self.read(true, &mut |piece| {
            if begins && !text.is_empty() && !text.ends_with('\n') {
                text.push('\n');
            }
            text.push_str(&piece.text);
            begins = piece.ends_document;
            Ok(ControlFlow::Continue(()))
        })?;
        if text.trim().is_empty() {
            return Err(DataError::Empty { path: self.path.clone() });
        }
        Ok(text)
    }
}

/// A file whose bytes are counted as they are read.
struct Counted {
    file: File,
    read: Arc<AtomicU64>,
}

impl Read for Counted {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read(bytes)?;
        self.read.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }
}

/// The text of a file or of a folder, as [`TextSource`] reads it with the field `text`.
///
/// # Errors
/// As [`TextSource::open`] and [`TextSource::text`].
pub fn read_text(path: &Path) -> Result<String, DataError> {
    TextSource::open(path, "text")?.text()
}

/// How a file is to be read, by its name.
fn kind(file: &Path) -> (Format, Compression) {
    let extension = |path: &Path| path.extension().map(|extension| extension.to_string_lossy().to_ascii_lowercase());
    let (inner, compression) = match extension(file).as_deref() {
        Some("gz") => (file.with_extension(""), Compression::Gzip),
        Some("zst") => (file.with_extension(""), Compression::Zstd),
        _ => (file.to_path_buf(), Compression::None),
    };
    match extension(&inner).as_deref() {
        Some("json" | "jsonl" | "ndjson") => (Format::Json, compression),
        Some("csv") => (Format::Table(b','), compression),
        Some("tsv") => (Format::Table(b'\t'), compression),
        Some("parquet") => (Format::Parquet, compression),
        _ => (Format::Text, compression),
    }
}

/// The files in `path` and below, in the order of their names.
pub(crate) fn collect(path: &Path, files: &mut Vec<PathBuf>) -> Result<(), DataError> {
    let refused = |error| DataError::Io { path: path.to_path_buf(), error };
    if !fs::metadata(path).map_err(refused)?.is_dir() {
        files.push(path.to_path_buf());
        return Ok(());
    }
    let mut entries = Vec::new();
    for entry in fs::read_dir(path).map_err(refused)? {
        let entry = entry.map_err(refused)?;
        if !entry.file_name().to_string_lossy().starts_with('.') {
            entries.push(entry.path());
        }
    }
    entries.sort();
    entries.iter().try_for_each(|entry| collect(entry, files))
}
