//! JSON lines: an object a line, with the document in a field.

use std::io::{BufRead, BufReader, Read};
use std::ops::ControlFlow;
use std::path::Path;

use serde_json::{Map, Value};

use super::{EachPiece, LONGEST_DOCUMENT, Piece, lacks};
use crate::error::DataError;

/// Hands on a document a line; empty lines and objects whose field is null count for nothing.
pub(super) fn pieces(
    reader: impl Read,
    path: &Path,
    field: &str,
    each: EachPiece<'_>,
) -> Result<ControlFlow<()>, DataError> {
    let mut reader = BufReader::with_capacity(1 << 20, reader);
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        let read = (&mut reader).take(LONGEST_DOCUMENT as u64 + 1).read_until(b'\n', &mut line);
        if read.map_err(|error| DataError::Io { path: path.to_path_buf(), error })? == 0 {
            break;
        }
        let malformed =
            |reason: String| DataError::Malformed { path: path.to_path_buf(), line: number, reason, more: 0 };
        if line.len() > LONGEST_DOCUMENT {
            return Err(malformed("is longer than 64 MB".into()));
        }
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let mut fields: Map<String, Value> =
            serde_json::from_slice(&line).map_err(|error| malformed(format!("is no JSON object: {error}")))?;
        match fields.remove(field) {
            Some(Value::String(text)) => {
                if each(Piece { text, ends_document: true })?.is_break() {
                    return Ok(ControlFlow::Break(()));
                }
            }
            Some(Value::Null) => {}
            Some(_) => return Err(malformed(format!("the field '{field}' is no text"))),
            None => return Err(lacks(path, field, fields.into_iter().map(|(name, _)| name))),
        }
    }
    Ok(ControlFlow::Continue(()))
}
