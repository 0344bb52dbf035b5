//! CSV and TSV: one document per row, in a column named by the first row.

use std::cell::RefCell;
use std::io::{self, Read};
use std::ops::ControlFlow;
use std::path::Path;
use std::rc::Rc;

use csv::{ByteRecord, ErrorKind, Position, Reader, ReaderBuilder};
use serde_json::{Map, Value};

use super::plain::{Plain, unreadable_at};
use super::{EachPiece, LONGEST_DOCUMENT, Piece, WHOLE_RECORD, field};
use crate::error::DataError;

/// Appended after the end of a file, which cannot contain NUL bytes: if it does not arrive as a
/// row, a quoted field is not closed.
const END: &[u8] = b"\n\0";
/// Bytes of finished rows to keep before they are dropped.
const FORGOTTEN: usize = 1 << 20;

/// Passes on a document per row; skips empty fields.
pub(super) fn pieces(
    reader: Plain<impl Read>,
    path: &Path,
    field: &str,
    delimiter: u8,
    each: EachPiece<'_>,
) -> Result<ControlFlow<()>, DataError> {
    let mut rows = Rows::new(reader.chain(END), path, delimiter);
    let Some(header) = rows.row()? else { return Ok(ControlFlow::Continue(())) };
    if field == WHOLE_RECORD {
        return records(rows, &header, each);
    }
    let mut columns = (0..header.len()).filter(|at| header[*at] == *field.as_bytes());
    let Some(column) = columns.next() else {
        let names = header.iter().map(|name| String::from_utf8_lossy(name).into_owned()).collect();
        return Err(rows.malformed(field::lacks(field, names)));
    };
    if columns.next().is_some() {
        return Err(rows.malformed(format!("names two columns '{field}'")));
    }
    while let Some(row) = rows.row_like(&header)? {
        if row[column].is_empty() {
            continue;
        }
        let Ok(text) = String::from_utf8(row[column].to_vec()) else {
            return Err(rows.malformed(format!("is not UTF-8 text in the column '{field}'")));
        };
        if each(Piece { text, ends_document: true })?.is_break() {
            return Ok(ControlFlow::Break(()));
        }
    }
    Ok(ControlFlow::Continue(()))
}

/// Hands on each row as a JSON object of strings.
fn records(
    mut rows: Rows<'_, impl Read>,
    header: &ByteRecord,
    each: EachPiece<'_>,
) -> Result<ControlFlow<()>, DataError> {
    let utf8 = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).ok();
    while let Some(row) = rows.row_like(header)? {
        let cell = |(name, cell)| Some((utf8(name)?, Value::String(utf8(cell)?)));
        let Some(record) = header.iter().zip(&row).map(cell).collect::<Option<Map<_, _>>>() else {
            return Err(rows.malformed("is not UTF-8 text".into()));
        };
        if each(Piece { text: Value::Object(record).to_string(), ends_document: true })?.is_break() {
            return Ok(ControlFlow::Break(()));
        }
    }
    Ok(ControlFlow::Continue(()))
}

/// The rows of a table.
struct Rows<'a, R> {
    reader: Reader<Kept<R>>,
    path: &'a Path,
    /// The bytes since the start of the last row, and more.
    kept: Rc<RefCell<Bytes>>,
    /// Offset of the last row, or of the blank lines before it.
    began: Position,
}

impl<'a, R: Read> Rows<'a, R> {
    fn new(reader: R, path: &'a Path, delimiter: u8) -> Self {
        let kept = Rc::new(RefCell::new(Bytes::default()));
        let reader = Kept { reader, kept: Rc::clone(&kept) };
        // Rows of other lengths are refused here, with their line numbers.
        let mut builder = ReaderBuilder::new();
        builder.delimiter(delimiter).has_headers(false).flexible(true).buffer_capacity(64 << 10);
        Self { reader: builder.from_reader(reader), path, kept, began: Position::new() }
    }

    /// The next row.
    fn row(&mut self) -> Result<Option<ByteRecord>, DataError> {
        self.began = self.reader.position().clone();
        self.kept.borrow_mut().forget(self.began.byte());
        let mut row = ByteRecord::new();
        let read = self.reader.read_byte_record(&mut row);
        read.map_err(|error| match error.into_kind() {
            ErrorKind::Io(error) if error.get_ref().is_some_and(|inner| inner.is::<TooLong>()) => {
                self.malformed(TooLong.to_string())
            }
            ErrorKind::Io(error) => unreadable_at(self.path, self.line(), error),
            other => self.malformed(format!("is no row: {other:?}")),
        })?;
        match row.iter().next_back() {
            Some(last) if row.len() == 1 && *last == END[1..] => Ok(None),
            Some(last) if last.ends_with(END) => Err(self.malformed("a quoted field of this row is not closed".into())),
            _ => Ok(Some(row)),
        }
    }

    /// The next row, with as many fields as the header names columns.
    fn row_like(&mut self, header: &ByteRecord) -> Result<Option<ByteRecord>, DataError> {
        let Some(row) = self.row()? else { return Ok(None) };
        if row.len() != header.len() {
            let (found, wanted) = (row.len(), header.len());
            return Err(self.malformed(format!("has {found} fields, but the header names {wanted} columns")));
        }
        Ok(Some(row))
    }

    /// The line on which the last row starts. The reader counts lines up to the end of the row
    /// before, and blank lines are in between.
    fn line(&self) -> usize {
        let kept = self.kept.borrow();
        let from = (self.began.byte() - kept.before) as usize;
        let blank = kept.bytes[from.min(kept.bytes.len())..].iter().take_while(|byte| matches!(byte, b'\r' | b'\n'));
        self.began.line() as usize + blank.filter(|byte| **byte == b'\n').count()
    }

    fn malformed(&self, reason: String) -> DataError {
        DataError::Malformed { path: self.path.to_path_buf(), line: self.line(), reason, more: 0 }
    }
}

/// The bytes read, after the `before` dropped ones.
#[derive(Default)]
struct Bytes {
    bytes: Vec<u8>,
    before: u64,
}

impl Bytes {
    /// Drops the bytes before offset `at`, at intervals.
    fn forget(&mut self, at: u64) {
        let count = (at - self.before) as usize;
        if count >= FORGOTTEN {
            self.bytes.drain(..count.min(self.bytes.len()));
            self.before = at;
        }
    }
}

/// Buffers what is read, up to the maximum length of a row.
struct Kept<R> {
    reader: R,
    kept: Rc<RefCell<Bytes>>,
}

impl<R: Read> Read for Kept<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        if self.kept.borrow().bytes.len() > LONGEST_DOCUMENT + FORGOTTEN {
            return Err(io::Error::other(TooLong));
        }
        let count = self.reader.read(bytes)?;
        self.kept.borrow_mut().bytes.extend_from_slice(&bytes[..count]);
        Ok(count)
    }
}

/// The error of a row that is too long.
#[derive(Debug, thiserror::Error)]
#[error("is longer than 64 MB: is a quoted field not closed?")]
struct TooLong;
