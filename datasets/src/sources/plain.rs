//! What text begins with, and what it cannot hold: byte order marks, other encodings, NUL bytes.

use std::fmt;
use std::io::{self, Cursor, Read};
use std::path::Path;

use crate::error::DataError;

/// How a file begins that is no UTF-8, and what it is then. UTF-32 stands before UTF-16, whose mark
/// it begins with.
const OTHERS: [(&[u8], &str); 6] = [
    (b"\xFF\xFE\0\0", "is UTF-32, by its byte order mark: convert it to UTF-8 (iconv -f UTF-32 -t UTF-8)"),
    (b"\0\0\xFE\xFF", "is UTF-32, by its byte order mark: convert it to UTF-8 (iconv -f UTF-32 -t UTF-8)"),
    (b"\xFF\xFE", "is UTF-16, by its byte order mark: convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)"),
    (b"\xFE\xFF", "is UTF-16, by its byte order mark: convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)"),
    (b"\x1F\x8B", "is compressed with gzip: decompress it, or give it a name that ends in .gz"),
    (b"\x28\xB5\x2F\xFD", "is compressed with zstd: decompress it, or give it a name that ends in .zst"),
];
const UTF8_MARK: &[u8] = b"\xEF\xBB\xBF";

/// The bytes of a text behind its byte order mark; a NUL byte among them is an error.
pub(super) struct Plain<R> {
    begin: Cursor<Vec<u8>>,
    rest: R,
    /// The byte that is read next, counted from the beginning of the file.
    at: usize,
    nul: Option<NulByte>,
}

/// The place of a NUL byte.
#[derive(Clone, Copy, Debug)]
pub(super) struct NulByte(pub(super) usize);

impl fmt::Display for NulByte {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "holds a NUL byte (byte {}), so it is not UTF-8 text: is it UTF-16, or binary?", self.0)
    }
}

impl std::error::Error for NulByte {}

impl<R: Read> Plain<R> {
    /// Reads past the byte order mark.
    ///
    /// # Errors
    /// If the first bytes are those of another encoding or of a compressed file, or cannot be read.
    pub(super) fn new(mut reader: R, path: &Path) -> Result<Self, DataError> {
        let mut begin = Vec::new();
        let read = (&mut reader).take(4).read_to_end(&mut begin);
        read.map_err(|error| DataError::Io { path: path.to_path_buf(), error })?;
        if let Some((_, reason)) = OTHERS.iter().find(|(mark, _)| begin.starts_with(mark)) {
            return Err(DataError::Refused { path: path.to_path_buf(), reason: (*reason).to_string() });
        }
        let at = if begin.starts_with(UTF8_MARK) { UTF8_MARK.len() } else { 0 };
        begin.drain(..at);
        Ok(Self { begin: Cursor::new(begin), rest: reader, at, nul: None })
    }

    /// The byte that is read next, counted from the beginning of the file.
    pub(super) fn at(&self) -> usize {
        self.at
    }
}

impl<R: Read> Read for Plain<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        if let Some(nul) = self.nul {
            return Err(io::Error::new(io::ErrorKind::InvalidData, nul));
        }
        let count = match self.begin.read(bytes)? {
            0 => self.rest.read(bytes)?,
            count => count,
        };
        // What stands before it is handed on first, so that whoever reads lines knows which one it
        // is in.
        if bytes[..count].contains(&0) {
            let before = bytes[..count].iter().take_while(|byte| **byte != 0).count();
            self.nul = Some(NulByte(self.at + before));
            self.at += before;
            return if before == 0 { self.read(bytes) } else { Ok(before) };
        }
        self.at += count;
        Ok(count)
    }
}

/// The NUL byte that an error of [`Plain`] is about.
pub(super) fn nul_byte(error: &io::Error) -> Option<NulByte> {
    error.get_ref().and_then(|inner| inner.downcast_ref()).copied()
}

/// Why a file could not be read on.
pub(super) fn unreadable(path: &Path, error: io::Error) -> DataError {
    match nul_byte(&error) {
        Some(nul) => DataError::Refused { path: path.to_path_buf(), reason: nul.to_string() },
        None => DataError::Io { path: path.to_path_buf(), error },
    }
}

/// As [`unreadable`], where the line is known.
pub(super) fn unreadable_at(path: &Path, line: usize, error: io::Error) -> DataError {
    match nul_byte(&error) {
        Some(nul) => DataError::Malformed { path: path.to_path_buf(), line, reason: nul.to_string(), more: 0 },
        None => DataError::Io { path: path.to_path_buf(), error },
    }
}
