//! Incremental decoding of tokens to text.

use crate::error::DataError;
use crate::tokenizer::Tokenizer;

impl Tokenizer {
    /// A decoder for a stream of tokens, from the start of a text.
    pub fn stream(&self) -> TextStream<'_> {
        self.stream_behind(&[])
    }

    /// A decoder for a stream of tokens after those of `before`, such as a prompt, of which the
    /// last few matter.
    pub fn stream_behind(&self, before: &[u32]) -> TextStream<'_> {
        TextStream::new(self, before)
    }
}

/// Minimum context tokens: enough for every decoder to know that it is not at the start of a text.
const CONTEXT: usize = 8;
/// Maximum tokens of a character.
const CHARACTER: usize = 4;

/// Decodes tokens to text one by one, holding back incomplete UTF-8.
///
/// Tokens are decoded after their context: many decoders drop the space before the first word.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The last tokens whose text was returned, and those whose text was not yet.
    tokens: Vec<u32>,
    /// How many of them were returned.
    told: usize,
    /// Their text.
    text: String,
    /// Character boundaries among the returned tokens. The context may only be cut there, since
    /// decoders garble a run of byte tokens that starts within a character.
    ends: Vec<usize>,
}

impl<'a> TextStream<'a> {
    /// For tokens after those of `before`.
    fn new(tokenizer: &'a Tokenizer, before: &[u32]) -> Self {
        // If the decoder refuses context tokens, the error comes with the first new one.
        let decoded = |first: usize| tokenizer.decode(&before[first..]).unwrap_or_default();
        let first = before.len().saturating_sub(CONTEXT);
        let earlier = (0..CHARACTER).map(|more| first.saturating_sub(more));
        let whole = earlier.clone().find(|first| !decoded(*first).starts_with(char::REPLACEMENT_CHARACTER));
        let first = whole.unwrap_or(first);
        let mut text = decoded(first);
        // A character that is cut there is completed by what follows.
        text.truncate(text.trim_end_matches(char::REPLACEMENT_CHARACTER).len());
        let tokens = before[first..].to_vec();
        Self { tokenizer, told: tokens.len(), tokens, text, ends: Vec::new() }
    }

    /// The text that `token` completes, possibly empty.
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
            // The new token invalidates bytes returned before, or the decoder corrects earlier
            // text.
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
