//! Where text comes from: files, folders of them, and standard input; as text, JSON lines or Parquet, compressed or not.
//!
//! A source is read piece by piece, so that a corpus need not fit in memory.

mod jsonl;
mod parquet;
mod text;

use std::fs::{self, File};
use std::io::{self, BufReader, Read};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::DataError;

pub(crate) use text::{cut_between_words, read_file};

/// Standard input, as a path.
pub const STDIN: &str = "-";

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
    /// A JSON object a line, with the document in a field.
    JsonLines,
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
    /// The documents in `path`; hidden files are left out. `.jsonl` and `.ndjson` are JSON lines and `.parquet` is Parquet, whose
    /// documents are in `field`; everything else is text, a document a file. `.gz` and `.zst` are decompressed.
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
    /// If a file cannot be read, is not UTF-8, is malformed, or lacks the field; and what `each` gives.
    pub(crate) fn read(&self, may_cut: bool, each: EachPiece<'_>) -> Result<(), DataError> {
        self.read.store(0, Ordering::Relaxed);
        if self.path == Path::new(STDIN) {
            return text::pieces(io::stdin().lock(), &self.path, may_cut, each).map(|_| ());
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
        match format {
            Format::JsonLines => jsonl::pieces(reader, file, &self.field, each),
            _ => text::pieces(reader, file, may_cut, each),
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
        Some("jsonl" | "ndjson") => (Format::JsonLines, compression),
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

/// That a field is not there, and which are.
fn lacks(path: &Path, field: &str, fields: impl Iterator<Item = String>) -> DataError {
    let fields: Vec<String> = fields.take(12).collect();
    let has = if fields.is_empty() { "nothing".to_string() } else { fields.join(", ") };
    let reason = format!("has no text in the field '{field}' but {has}: name one with --set field=NAME");
    DataError::Refused { path: path.to_path_buf(), reason }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn pieces(path: &Path, field: &str, may_cut: bool) -> Result<Vec<Piece>, DataError> {
        let mut found = Vec::new();
        TextSource::open(path, field)?.read(may_cut, &mut |piece| {
            found.push(piece);
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(found)
    }

    fn whole(text: &str) -> Piece {
        Piece { text: text.into(), ends_document: true }
    }

    #[test]
    fn every_format_gives_its_documents() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        let lines = "{\"id\": 1, \"text\": \"one\\n\"}\n\n{\"text\": \"två\", \"id\": 2}";
        fs::write(at("a.jsonl"), lines).expect("writable");
        fs::write(at("b.txt"), "three\nfour").expect("writable");
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        gzip.write_all(lines.as_bytes()).expect("in memory");
        fs::write(at("c.jsonl.gz"), gzip.finish().expect("in memory")).expect("writable");
        fs::write(at("d.zst"), zstd::encode_all(&b"five"[..], 1).expect("in memory")).expect("writable");
        parquet::tests::write(&at("e.parquet"), &[Some("six"), None, Some("seven")]);
        let expected = ["one\n", "två", "three\nfour", "one\n", "två", "five", "six", "seven"].map(whole).to_vec();
        assert_eq!(pieces(folder.path(), "text", true).expect("good files"), expected);
        assert_eq!(read_text(&at("b.txt")).expect("a text"), "three\nfour");
        assert_eq!(read_text(folder.path()).expect("texts").lines().count(), 9);
    }

    #[test]
    fn what_is_malformed_is_named_with_its_place() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        let cases: [(&str, &[u8], &str); 8] = [
            ("a.txt", b"good \xFF bad", "is not UTF-8 text (byte 5)"),
            ("b.txt", b"cut off \xE2\x82", "is not UTF-8 text (byte 8)"),
            ("c.txt", b"nul \0", "is not UTF-8 text (byte 4)"),
            ("d.jsonl", b"{\"text\": \"a\"}\n{\"text\": ", "line 2"),
            ("e.jsonl", b"{\"body\": \"a\", \"id\": 3}", "no text in the field 'text' but body, id"),
            ("f.jsonl", b"[1]", "line 1"),
            ("g.parquet", b"PAR1 no more", "is not Parquet"),
            ("h.gz", b"not gzip", "h.gz"),
        ];
        for (name, bytes, said) in cases {
            fs::write(at(name), bytes).expect("writable");
            let message = pieces(&at(name), "text", true).expect_err(name).to_string();
            assert!(message.contains(said) && message.contains(name) && !message.contains('\n'), "{name}: {message}");
        }
        parquet::tests::write(&at("i.parquet"), &[Some("x")]);
        let message = pieces(&at("i.parquet"), "body", true).expect_err("no such column").to_string();
        assert!(message.contains("no text in the field 'body' but text"), "{message}");
    }
}
