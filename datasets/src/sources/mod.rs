//! Sources of text: files, folders, and standard input; as text, JSON, CSV, TSV or Parquet,
//! optionally compressed.
//!
//! A source is read in pieces, so a corpus need not fit in memory.

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

pub(crate) use field::kind as kind_of_value;
pub(crate) use parquet::class_names;
use plain::Plain;
pub(crate) use text::{cut_between_words, read_file};

/// Standard input, as a path.
pub const STDIN: &str = "-";

/// In place of a field's name: the whole record, as JSON.
const WHOLE_RECORD: &str = "";

/// Maximum size of a document that has to be read as one piece, in bytes.
const LONGEST_DOCUMENT: usize = 64 << 20;

/// A part of a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Its text.
    pub text: String,
    /// Whether the document ends with it.
    pub ends_document: bool,
}

/// How a file contains its documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    /// The file is one document.
    Text,
    /// JSON lines or one array of objects, with the document in a field.
    Json,
    /// As above if it starts as JSON, else one document.
    JsonOrText,
    /// A document per row, in a column; with the separator.
    Table(u8),
    /// A document per row, in a column.
    Parquet,
}

/// Compression formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Compression {
    None,
    Gzip,
    Zstd,
}

/// The documents of a file, of all files below a folder in the order of their names, or of standard
/// input.
#[derive(Clone, Debug)]
pub struct TextSource {
    path: PathBuf,
    files: Vec<PathBuf>,
    field: String,
    /// Bytes read so far.
    read: Arc<AtomicU64>,
}

/// Receives each piece; breaks to stop.
pub(crate) type EachPiece<'a> = &'a mut dyn FnMut(Piece) -> Result<ControlFlow<()>, DataError>;

impl TextSource {
    /// The documents in `path`; hidden files are left out. `.json`, `.jsonl` and `.ndjson` contain
    /// JSON lines or one array of objects; `.csv` and `.tsv` have column names in the first row;
    /// `.parquet` is Parquet. Their documents are in `field`: a name, or a dot-separated path such
    /// as `meta.text`. Everything else is text with one document per file, except standard input,
    /// which is JSON if it starts with an object or an array of objects. `.gz` and `.zst` are
    /// decompressed, and a UTF-8 byte order mark is dropped. Only one record of up to 64 MB is in
    /// memory at a time, also of an array.
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

    /// The path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its files; none for standard input.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// The document field, for records.
    pub fn field(&self) -> &str {
        &self.field
    }

    /// Bytes of its files read so far.
    pub fn bytes_read(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    /// Total bytes of its files, as stored.
    pub fn bytes(&self) -> u64 {
        self.files.iter().filter_map(|file| fs::metadata(file).ok()).map(|meta| meta.len()).sum()
    }

    /// Passes all pieces to `each`, in order. Splits documents between words if `may_cut`.
    ///
    /// # Errors
    /// If a file cannot be read, is not UTF-8, does not have the format of its name, is malformed,
    /// or lacks the field; and any error of `each`.
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

    /// All documents as one text, joined by line breaks: for uses that need it in memory.
    ///
    /// # Errors
    /// As for a file, and if there is no text at all.
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

/// A file that counts the bytes read.
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

/// The text of a file or of a folder, as read by [`TextSource`] with the field `text`.
///
/// # Errors
/// As [`TextSource::open`] and [`TextSource::text`].
pub fn read_text(path: &Path) -> Result<String, DataError> {
    TextSource::open(path, "text")?.text()
}

/// A file's format and compression, by its name.
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

/// Whether a file has records, by its name: JSON, a table or Parquet.
pub(crate) fn has_records(file: &Path) -> bool {
    matches!(kind(file).0, Format::Json | Format::Table(_) | Format::Parquet)
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
