//! IOB2 tags, and the slot spans that they encode.

use std::ops::Range;

/// The slot of a tag and whether the tag begins it; none for `O` and for what is not a tag.
pub(crate) fn slot_of(tag: &str) -> Option<(&str, bool)> {
    let begun = tag.strip_prefix("B-").map(|slot| (slot, true));
    begun.or_else(|| tag.strip_prefix("I-").map(|slot| (slot, false))).filter(|(slot, _)| !slot.is_empty())
}

/// The span of a slot.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Span {
    /// Name of the slot.
    pub slot: String,
    /// Indices of its words.
    pub words: Range<usize>,
}

/// The spans of a tag sequence by the rules of conlleval: a `B` begins one; an `I` continues one of
/// the same slot, and begins one otherwise.
pub fn spans<S: AsRef<str>>(tags: &[S]) -> Vec<Span> {
    let mut spans: Vec<Span> = Vec::new();
    for (at, tag) in tags.iter().enumerate() {
        let Some((slot, begins)) = slot_of(tag.as_ref()) else { continue };
        match spans.last_mut() {
            Some(last) if !begins && last.words.end == at && last.slot == slot => last.words.end = at + 1,
            _ => spans.push(Span { slot: slot.to_owned(), words: at..at + 1 }),
        }
    }
    spans
}
