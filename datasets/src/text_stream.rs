//! Tokens into text, one by one as they are generated.

use crate::error::DataError;
use crate::tokenizer::Tokenizer;

impl Tokenizer {
    /// A decoder for tokens as they come, the first of a text.
    pub fn stream(&self) -> TextStream<'_> {
        self.stream_behind(&[])
    }

    /// A decoder for tokens as they come, which go on behind those of `before`: a prompt's, of which the last few count.
    pub fn stream_behind(&self, before: &[u32]) -> TextStream<'_> {
        TextStream::new(self, before)
    }
}

/// The fewest tokens that stay in front of those that come: enough for every decoder to know that its text does not begin there.
const CONTEXT: usize = 8;
/// The most tokens of a character.
const CHARACTER: usize = 4;

/// Turns tokens into text one by one, holding back what is not yet whole UTF-8.
///
/// Tokens are decoded behind those before them: many decoders drop the space before the first word of what they are given.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The last tokens whose text was told, and those whose text was not yet.
    tokens: Vec<u32>,
    /// How many of them were told.
    told: usize,
    /// What these decode to.
    text: String,
    /// Where characters end among the tokens that were told: only there may the first of them be dropped, since decoders
    /// that spell bytes spoil all of a run of them that begins within a character.
    ends: Vec<usize>,
}

impl<'a> TextStream<'a> {
    /// For the tokens behind those of `before`.
    fn new(tokenizer: &'a Tokenizer, before: &[u32]) -> Self {
        // Tokens that the decoder refuses are the caller's: it is told of them with the first of its own.
        let decoded = |first: usize| tokenizer.decode(&before[first..]).unwrap_or_default();
        let first = before.len().saturating_sub(CONTEXT);
        let earlier = (0..CHARACTER).map(|more| first.saturating_sub(more));
        let whole = earlier.clone().find(|first| !decoded(*first).starts_with(char::REPLACEMENT_CHARACTER));
        let first = whole.unwrap_or(first);
        let mut text = decoded(first);
        // A character that is cut there is whole with what follows.
        text.truncate(text.trim_end_matches(char::REPLACEMENT_CHARACTER).len());
        let tokens = before[first..].to_vec();
        Self { tokenizer, told: tokens.len(), tokens, text, ends: Vec::new() }
    }

    /// The text that `token` completes, which may be none yet.
    ///
    /// # Errors
    /// If the tokenizer's decoder refuses the token.
    pub fn push(&mut self, token: u32) -> Result<String, DataError> {
        self.tokens.push(token);
        let text = self.tokenizer.decode(&self.tokens)?;
        if text.ends_with(char::REPLACEMENT_CHARACTER) {
            return Ok(String::new());
        }
        let more = match text.strip_prefix(self.text.as_str()) {
            Some(more) => more.to_string(),
            // What came was no character after all, and spoils bytes that were told; or the decoder puts words right that were.
            None => self.tokenizer.decode(&self.tokens[self.told..])?,
        };
        self.told = self.tokens.len();
        self.text = text;
        self.ends.push(self.told);
        if let Some(first) = self.ends.iter().copied().rfind(|end| end + CONTEXT <= self.told) {
            self.tokens.drain(..first);
            self.told -= first;
            self.ends.retain_mut(|end| {
                *end = end.saturating_sub(first);
                *end > 0
            });
            self.text = self.tokenizer.decode(&self.tokens)?;
        }
        Ok(more)
    }
}
