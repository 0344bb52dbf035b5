//! JSON records with a document field: consecutive objects such as JSON lines, or one array of
//! objects. The start of the file tells which. Only one record is in memory at a time.

use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::ops::ControlFlow;
use std::path::Path;

use serde_json::{Map, Value};

use super::plain::{Plain, unreadable_at};
use super::{EachPiece, LONGEST_DOCUMENT, Piece, field, text};
use crate::error::DataError;

/// What the first value of a file says about the layout.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Layout {
    /// One record per line.
    Lines,
    /// Records over several lines, or several in one.
    Objects,
    /// The elements of one array.
    Array,
    /// White space only.
    Blank,
    /// Not records: the line, and the reason.
    Other(usize, String),
}

/// Passes on the document of each record; skips empty lines and records whose field is null.
/// Content that is not records is refused, or taken as text if it `may_be_text`.
pub(super) fn pieces(
    reader: Plain<impl Read>,
    path: &Path,
    field: &str,
    may_be_text: bool,
    may_cut: bool,
    each: EachPiece<'_>,
) -> Result<ControlFlow<()>, DataError> {
    let begins_at = reader.at();
    let mut reader = BufReader::with_capacity(1 << 20, reader);
    let mut head = Head::default();
    let layout = head.layout(&mut reader).map_err(|error| unreadable_at(path, head.lines() + 1, error))?;
    let reader = Cursor::new(head.bytes).chain(reader);
    let mut records = Records { reader, path, field, line: 1, each };
    match layout {
        Layout::Lines => records.lines(),
        Layout::Objects => records.objects(),
        Layout::Array => records.array(),
        Layout::Blank | Layout::Other(..) if may_be_text => {
            text::pieces(records.reader, path, begins_at, may_cut, records.each)
        }
        Layout::Blank => Ok(ControlFlow::Continue(())),
        Layout::Other(line, reason) => Err(DataError::Malformed { path: path.to_path_buf(), line, reason, more: 0 }),
    }
}

/// The first bytes of a file, enough to tell its layout.
#[derive(Default)]
struct Head {
    bytes: Vec<u8>,
}

impl Head {
    fn lines(&self) -> usize {
        self.bytes.iter().filter(|byte| **byte == b'\n').count()
    }

    /// Reads more, up to the end of a line; false at the end, or at the size limit.
    fn grow(&mut self, reader: &mut impl BufRead) -> io::Result<bool> {
        if self.is_too_long() {
            return Ok(false);
        }
        let bytes = loop {
            match reader.fill_buf() {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                _ => break reader.fill_buf()?,
            }
        };
        let count = bytes.iter().position(|byte| *byte == b'\n').map_or(bytes.len(), |at| at + 1);
        self.bytes.extend_from_slice(&bytes[..count]);
        reader.consume(count);
        Ok(count > 0)
    }

    fn is_too_long(&self) -> bool {
        self.bytes.len() > LONGEST_DOCUMENT
    }

    /// The index of the first byte from `from` on that is not blank.
    fn solid(&mut self, reader: &mut impl BufRead, mut from: usize) -> io::Result<Option<usize>> {
        loop {
            if let Some(at) = self.bytes[from..].iter().position(|byte| !byte.is_ascii_whitespace()) {
                return Ok(Some(from + at));
            }
            from = self.bytes.len();
            if !self.grow(reader)? {
                return Ok(None);
            }
        }
    }

    fn layout(&mut self, reader: &mut impl BufRead) -> io::Result<Layout> {
        let Some(begin) = self.solid(reader, 0)? else { return Ok(Layout::Blank) };
        match self.bytes[begin] {
            b'{' => self.first_object(reader, begin),
            b'[' => match self.solid(reader, begin + 1)? {
                Some(first) if self.bytes[first] == b'{' => Ok(match self.first_object(reader, first)? {
                    Layout::Lines | Layout::Objects => Layout::Array,
                    other => other,
                }),
                // An array of scalars; `[] is no set` is a sentence.
                Some(end) if self.bytes[end] == b']' && self.solid(reader, end + 1)?.is_none() => Ok(Layout::Array),
                _ => self.other(reader, begin, "is an array, but not of objects"),
            },
            _ => self.other(reader, begin, "is neither an object nor an array of objects"),
        }
    }

    /// What the object at `begin` says about the layout.
    fn first_object(&mut self, reader: &mut impl BufRead, begin: usize) -> io::Result<Layout> {
        let (mut scan, mut from) = (Scan::default(), begin);
        let end = loop {
            if let Some(length) = scan.end(&self.bytes[from..]) {
                break from + length;
            }
            from = self.bytes.len();
            if !self.grow(reader)? {
                break from;
            }
        };
        let line = 1 + self.bytes[..begin].iter().filter(|byte| **byte == b'\n').count();
        if self.is_too_long() {
            return Ok(Layout::Other(line, "is longer than 64 MB".to_string()));
        }
        if let Err((below, reason)) = parse(&self.bytes[begin..end]) {
            return Ok(Layout::Other(line + below, reason));
        }
        let alone = loop {
            let ends = |byte: &&u8| **byte == b'\n' || !byte.is_ascii_whitespace();
            match self.bytes[end..].iter().find(ends).copied() {
                Some(byte) => break byte == b'\n',
                None if self.grow(reader)? => {}
                None => break true,
            }
        };
        Ok(if alone && !self.bytes[begin..end].contains(&b'\n') { Layout::Lines } else { Layout::Objects })
    }

    /// The error for content at `begin`.
    fn other(&mut self, reader: &mut impl BufRead, begin: usize, what: &str) -> io::Result<Layout> {
        while self.bytes.len() < begin + 80 && !self.bytes[begin..].contains(&b'\n') && self.grow(reader)? {}
        let line = 1 + self.bytes[..begin].iter().filter(|byte| **byte == b'\n').count();
        let text = String::from_utf8_lossy(&self.bytes[begin..]);
        let shown = field::beginning(text.lines().next().unwrap_or_default(), 20);
        let mend = "write JSON lines or one array of objects, or name it .txt to take it as text";
        Ok(Layout::Other(line, format!("'{shown}' {what}: {mend}")))
    }
}

/// Finds the end of a JSON value that starts with a brace or bracket.
#[derive(Default)]
struct Scan {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl Scan {
    /// How many of `bytes` belong to the value, if it ends within them. A line break inside a
    /// string ends it, too: it is invalid.
    fn end(&mut self, bytes: &[u8]) -> Option<usize> {
        for (at, byte) in bytes.iter().enumerate() {
            match byte {
                b'\n' if self.in_string => return Some(at),
                _ if self.escaped => self.escaped = false,
                b'\\' if self.in_string => self.escaped = true,
                b'"' => self.in_string = !self.in_string,
                _ if self.in_string => {}
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return Some(at + 1);
                    }
                }
                _ => {}
            }
        }
        None
    }
}

/// Parses an object. Errors give the line, counted from 0, and the reason.
fn parse(bytes: &[u8]) -> Result<Map<String, Value>, (usize, String)> {
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let before = &bytes[..error.valid_up_to()];
        let begin = before.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let below = before.iter().filter(|byte| **byte == b'\n').count();
        (below, format!("is not UTF-8 text (byte {} of the line)", before.len() - begin))
    })?;
    serde_json::from_str(text).map_err(|error| {
        // The line number is known here, not to the parser.
        let told = error.to_string();
        let told = told.split(" at line ").next().unwrap_or(&told);
        (error.line().saturating_sub(1), format!("is no JSON object: {told} (column {})", error.column()))
    })
}

/// Records, read one by one.
struct Records<'a, R> {
    reader: R,
    path: &'a Path,
    field: &'a str,
    /// The next line's number.
    line: usize,
    each: EachPiece<'a>,
}

impl<R: BufRead> Records<'_, R> {
    fn malformed(&self, line: usize, reason: impl Into<String>) -> DataError {
        DataError::Malformed { path: self.path.to_path_buf(), line, reason: reason.into(), more: 0 }
    }

    fn unreadable(&self, error: io::Error) -> DataError {
        unreadable_at(self.path, self.line, error)
    }

    fn lines(&mut self) -> Result<ControlFlow<()>, DataError> {
        let mut line = Vec::new();
        loop {
            line.clear();
            let read = (&mut self.reader).take(LONGEST_DOCUMENT as u64 + 1).read_until(b'\n', &mut line);
            if read.map_err(|error| self.unreadable(error))? == 0 {
                return Ok(ControlFlow::Continue(()));
            }
            if line.len() > LONGEST_DOCUMENT {
                return Err(self.malformed(self.line, "is longer than 64 MB"));
            }
            if !line.iter().all(u8::is_ascii_whitespace) && self.record(&line, self.line, "")?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
            self.line += 1;
        }
    }

    fn objects(&mut self) -> Result<ControlFlow<()>, DataError> {
        while let Some(next) = self.solid()? {
            if next != b'{' {
                return Err(self.malformed(self.line, format!("'{}' is no JSON object", shown(next))));
            }
            if self.next_record("")?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    fn array(&mut self) -> Result<ControlFlow<()>, DataError> {
        self.solid()?;
        self.reader.consume(1);
        for number in 1.. {
            match self.solid()? {
                Some(b']') if number == 1 => {}
                Some(b'{') => {
                    if self.next_record(&format!("element {number} of the array: "))?.is_break() {
                        return Ok(ControlFlow::Break(()));
                    }
                }
                other => {
                    let other = other.map_or("the end of the file".to_string(), |byte| format!("'{}'", shown(byte)));
                    let reason = format!("{other} is where element {number} of the array should be, an object");
                    return Err(self.malformed(self.line, reason));
                }
            }
            match self.solid()? {
                Some(b',') => self.reader.consume(1),
                Some(b']') => break,
                other => {
                    let other = other.map_or("the end of the file".to_string(), |byte| format!("'{}'", shown(byte)));
                    let reason = format!("{other} is where ',' or ']' should be, behind element {number} of the array");
                    return Err(self.malformed(self.line, reason));
                }
            }
        }
        self.reader.consume(1);
        match self.solid()? {
            None => Ok(ControlFlow::Continue(())),
            Some(byte) => Err(self.malformed(self.line, format!("'{}' follows the end of the array", shown(byte)))),
        }
    }

    /// The next non-blank byte, without consuming it.
    fn solid(&mut self) -> Result<Option<u8>, DataError> {
        loop {
            let bytes = match self.reader.fill_buf() {
                Ok(bytes) => bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(unreadable_at(self.path, self.line, error)),
            };
            let blank = bytes.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
            let (found, ended) = (bytes.get(blank).copied(), bytes.is_empty());
            self.line += bytes[..blank].iter().filter(|byte| **byte == b'\n').count();
            self.reader.consume(blank);
            if found.is_some() || ended {
                return Ok(found);
            }
        }
    }

    /// Reads the next object and passes on its document.
    fn next_record(&mut self, place: &str) -> Result<ControlFlow<()>, DataError> {
        let (mut scan, mut object, first) = (Scan::default(), Vec::new(), self.line);
        loop {
            let bytes = match self.reader.fill_buf() {
                Ok(bytes) => bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(unreadable_at(self.path, self.line, error)),
            };
            let end = scan.end(bytes);
            let count = end.unwrap_or(bytes.len());
            self.line += bytes[..count].iter().filter(|byte| **byte == b'\n').count();
            object.extend_from_slice(&bytes[..count]);
            self.reader.consume(count);
            if object.len() > LONGEST_DOCUMENT {
                return Err(self.malformed(first, format!("{place}is longer than 64 MB")));
            }
            if end.is_some() || count == 0 {
                return self.record(&object, first, place);
            }
        }
    }

    /// Passes on the document of the record at a line.
    fn record(&mut self, bytes: &[u8], line: usize, place: &str) -> Result<ControlFlow<()>, DataError> {
        let record = parse(bytes);
        let record = record.map_err(|(below, reason)| self.malformed(line + below, format!("{place}{reason}")))?;
        match field::document(record, self.field) {
            Ok(Some(text)) => (self.each)(Piece { text, ends_document: true }),
            Ok(None) => Ok(ControlFlow::Continue(())),
            Err(reason) => Err(self.malformed(line, format!("{place}{reason}"))),
        }
    }
}

/// A byte, printable in a message.
fn shown(byte: u8) -> String {
    if byte.is_ascii_graphic() { char::from(byte).to_string() } else { format!("byte {byte:#04x}") }
}
