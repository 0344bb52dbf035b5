//! Plain text: one document per file, in pieces that end between words.

use std::fs::File;
use std::io::Read;
use std::ops::ControlFlow;
use std::path::Path;

use super::plain::{Plain, unreadable};
use super::{EachPiece, LONGEST_DOCUMENT, Piece};
use crate::error::DataError;

/// Bytes read at once.
const BLOCK: usize = 256 << 10;
/// Bytes after which a piece may end at a line break, and after which at a space.
const SHORTEST: [usize; 2] = [64 << 10, 1 << 20];

/// Passes on a document in pieces. Its first byte has offset `begins_at` in the file.
pub(super) fn pieces(
    mut reader: impl Read,
    path: &Path,
    begins_at: usize,
    may_cut: bool,
    each: EachPiece<'_>,
) -> Result<ControlFlow<()>, DataError> {
    let mut bytes: Vec<u8> = Vec::new();
    let (mut handed_on, mut ended) = (begins_at, false);
    while !ended {
        let read = (&mut reader).take(BLOCK as u64).read_to_end(&mut bytes);
        ended = read.map_err(|error| unreadable(path, error))? == 0;
        let binary = |byte: usize| DataError::Binary { path: path.to_path_buf(), byte: handed_on + byte };
        let valid = match std::str::from_utf8(&bytes) {
            Ok(text) => text,
            // A character may continue in the next block.
            Err(error) if error.error_len().is_none() && !ended => {
                std::str::from_utf8(&bytes[..error.valid_up_to()]).unwrap_or_default()
            }
            Err(error) => return Err(binary(error.valid_up_to())),
        };
        let mut begin = 0;
        if ended {
            let piece = Piece { text: valid.to_string(), ends_document: true };
            if handed_on > begins_at || !valid.is_empty() {
                return each(piece);
            }
            return Ok(ControlFlow::Continue(()));
        }
        while let Some(length) = may_cut.then(|| cut(&valid[begin..])).flatten() {
            let text = valid[begin..begin + length].to_string();
            if each(Piece { text, ends_document: false })?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
            begin += length;
        }
        if valid.len() - begin > LONGEST_DOCUMENT {
            let cause = if may_cut {
                "64 MB of it have no space or line break between words"
            } else {
                "has a word longer than 64 MB: split it into files, or use JSON lines"
            };
            return Err(DataError::Refused { path: path.to_path_buf(), reason: cause.to_string() });
        }
        bytes.drain(..begin);
        handed_on += begin;
    }
    Ok(ControlFlow::Continue(()))
}

/// Where the first piece of a text ends, if the text is long enough: after a line break between two
/// words, or before a space between two if no line ends for long.
fn cut(text: &str) -> Option<usize> {
    let [lines, spaces] = SHORTEST;
    let place = |shortest: usize, mark: u8, past: usize| {
        let bytes = text.as_bytes();
        let found = (shortest..bytes.len().saturating_sub(1)).find(|at| bytes[*at] == mark && between_words(text, *at));
        found.map(|at| at + past)
    };
    place(lines, b'\n', 1).or_else(|| place(spaces, b' ', 0))
}

/// A text, split into pieces.
pub(crate) fn cut_between_words(text: &str) -> Vec<&str> {
    let mut pieces = Vec::new();
    let mut rest = text;
    while let Some(length) = cut(rest) {
        let (piece, behind) = rest.split_at(length);
        pieces.push(piece);
        rest = behind;
    }
    pieces.push(rest);
    pieces
}

/// Whether the characters before and after the byte at `at` are not white space.
fn between_words(text: &str, at: usize) -> bool {
    let solid = |next: char| !next.is_whitespace();
    text[..at].ends_with(solid) && text[at + 1..].starts_with(solid)
}

/// The text of a whole file, without its byte order mark.
pub(crate) fn read_file(path: &Path) -> Result<String, DataError> {
    let file = File::open(path).map_err(|error| DataError::Io { path: path.to_path_buf(), error })?;
    let mut plain = Plain::new(file, path)?;
    let (begins_at, mut bytes) = (plain.at(), Vec::new());
    plain.read_to_end(&mut bytes).map_err(|error| unreadable(path, error))?;
    String::from_utf8(bytes).map_err(|error| {
        let byte = begins_at + error.utf8_error().valid_up_to();
        DataError::Binary { path: path.to_path_buf(), byte }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_document_comes_in_pieces_that_end_between_words() {
        let line =
            |at: usize| format!("line {at} — of{}text{}", " ".repeat(1 + at % 3), ["\n", "  \n", "\n\n"][at % 3]);
        let long: String = (0..60_000).map(line).collect();
        let unbroken = "word ".repeat(900_000);
        for text in [&long, &unbroken] {
            for may_cut in [true, false] {
                let mut found: Vec<Piece> = Vec::new();
                let mut keep = |piece| {
                    found.push(piece);
                    Ok(ControlFlow::Continue(()))
                };
                let ended = pieces(text.as_bytes(), Path::new("x"), 0, may_cut, &mut keep).expect("good text");
                assert!(ended.is_continue());
                assert_eq!(&found.iter().map(|piece| piece.text.as_str()).collect::<String>(), text);
                let (last, others) = found.split_last().expect("some");
                assert!(last.ends_document && others.iter().all(|piece| !piece.ends_document));
                assert_eq!(others.is_empty(), !may_cut);
                let apart = |pair: &[Piece]| {
                    let at = pair[0].text.len() - usize::from(pair[0].text.ends_with('\n'));
                    between_words(&pair.iter().map(|piece| piece.text.as_str()).collect::<String>(), at)
                };
                assert!(found.windows(2).all(apart));
            }
        }
    }

    #[test]
    fn reading_stops_where_no_more_is_wanted() {
        let text = "a line\n".repeat(100_000);
        let mut count = 0;
        let mut stop = |_| {
            count += 1;
            Ok(if count == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        };
        assert!(pieces(text.as_bytes(), Path::new("x"), 0, true, &mut stop).expect("good text").is_break());
        assert_eq!(count, 3);
    }
}
