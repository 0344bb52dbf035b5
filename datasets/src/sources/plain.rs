//! Checks of text: byte order marks, other encodings, NUL bytes.

use std::fmt;
use std::io::{self, Cursor, Read};
use std::path::Path;

use crate::error::DataError;

/// Signatures of content that is not UTF-8. UTF-32 precedes UTF-16, whose mark is its prefix.
const OTHERS: [(&[u8], &str); 6] = [
    (b"\xFF\xFE\0\0", "is UTF-32, by its byte order mark: convert it to UTF-8 (iconv -f UTF-32 -t UTF-8)"),
    (b"\0\0\xFE\xFF", "is UTF-32, by its byte order mark: convert it to UTF-8 (iconv -f UTF-32 -t UTF-8)"),
    (b"\xFF\xFE", "is UTF-16, by its byte order mark: convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)"),
    (b"\xFE\xFF", "is UTF-16, by its byte order mark: convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)"),
    (b"\x1F\x8B", "is compressed with gzip: decompress it, or give it a name that ends in .gz"),
    (b"\x28\xB5\x2F\xFD", "is compressed with zstd: decompress it, or give it a name that ends in .zst"),
];
const UTF8_MARK: &[u8] = b"\xEF\xBB\xBF";

/// A text without its byte order mark; a NUL byte is an error.
pub(super) struct Plain<R> {
    begin: Cursor<Vec<u8>>,
    rest: R,
    /// Offset of the next byte in the file.
    at: usize,
    nul: Option<NulByte>,
}

/// The offset of a NUL byte.
#[derive(Clone, Copy, Debug)]
pub(super) struct NulByte(pub(super) usize);

impl fmt::Display for NulByte {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "holds a NUL byte (byte {}), so it is not UTF-8 text: is it UTF-16, or binary?", self.0)
    }
}

impl std::error::Error for NulByte {}

impl<R: Read> Plain<R> {
    /// Skips the byte order mark.
    ///
    /// # Errors
    /// If the start is of another encoding or a compressed file, or cannot be read.
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

    /// Offset of the next byte in the file.
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
        // Pass on the bytes before it first, so that line-based readers know its line.
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

/// The NUL byte behind an error of [`Plain`].
pub(super) fn nul_byte(error: &io::Error) -> Option<NulByte> {
    error.get_ref().and_then(|inner| inner.downcast_ref()).copied()
}

/// The error of a file that could not be read.
pub(super) fn unreadable(path: &Path, error: io::Error) -> DataError {
    match nul_byte(&error) {
        Some(nul) => DataError::Refused { path: path.to_path_buf(), reason: nul.to_string() },
        None => DataError::Io { path: path.to_path_buf(), error },
    }
}

/// As [`unreadable`], with a line.
pub(super) fn unreadable_at(path: &Path, line: usize, error: io::Error) -> DataError {
    match nul_byte(&error) {
        Some(nul) => DataError::Malformed { path: path.to_path_buf(), line, reason: nul.to_string(), more: 0 },
        None => DataError::Io { path: path.to_path_buf(), error },
    }
}
