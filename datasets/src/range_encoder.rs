//! Tokens with the bytes that each was made of.

use std::ops::Range;

use tokenizers::AddedToken;

use crate::error::DataError;
use crate::tokenizer::Tokenizer;

/// Encodes text and says which bytes each token was made of. A character that is the mark makes no
/// token, and no token crosses one.
pub struct RangeEncoder {
    tokenizer: tokenizers::Tokenizer,
    mark: char,
    id: u32,
}

impl RangeEncoder {
    /// By the tokens of `tokenizer`.
    ///
    /// # Errors
    /// If the tokenizer takes no further token.
    pub fn new(tokenizer: &Tokenizer, mark: char) -> Result<Self, DataError> {
        let refused = |error: tokenizers::Error| DataError::Tokenizer(error.to_string());
        let mut marked = tokenizer.inner().clone();
        // Some post-processors leave white space out of the ranges.
        marked.with_post_processor(None::<tokenizers::PostProcessorWrapper>);
        marked.add_special_tokens([AddedToken::from(mark.to_string(), true)]).map_err(refused)?;
        let id = marked.token_to_id(&mark.to_string());
        let id = id.ok_or_else(|| DataError::Tokenizer(format!("the tokenizer takes no token '{mark}'")))?;
        Ok(Self { tokenizer: marked, mark, id })
    }

    /// The mark.
    pub fn mark(&self) -> char {
        self.mark
    }

    /// The tokens of a text, without those that a post-processor adds, each with its range of
    /// bytes.
    ///
    /// # Errors
    /// If the text holds what the vocabulary lacks.
    pub fn encode(&self, text: &str) -> Result<Vec<(u32, Range<usize>)>, DataError> {
        let encoding = self
            .tokenizer
            .encode(text, false)
            .map_err(|error| DataError::Tokenizer(format!("the text cannot be encoded: {error}")))?;
        let tokens = encoding.get_ids().iter().zip(encoding.get_offsets());
        let tokens = tokens.filter(|(token, _)| **token != self.id);
        Ok(tokens.map(|(token, (start, end))| (*token, *start..*end)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::TokenizerKind;

    #[test]
    fn ranges_cover_the_text_and_no_token_crosses_a_mark() {
        let tokenizer = Tokenizer::train(TokenizerKind::Bpe(300), &"the clay, the kiln ".repeat(50)).expect("trains");
        let encoder = RangeEncoder::new(&tokenizer, '\u{10FFFD}').expect("takes a mark");
        let text = "the clay";
        let whole = encoder.encode(text).expect("encodes");
        assert_eq!(whole.iter().map(|(token, _)| *token).collect::<Vec<_>>(), tokenizer.encode(text).expect("encodes"));
        assert_eq!(whole.iter().map(|(_, range)| &text[range.clone()]).collect::<String>(), text);
        let crossing = whole.iter().find(|(_, range)| range.len() > 1).expect("a merged token").1.clone();
        let mut marked = text.to_string();
        marked.insert(crossing.start + 1, encoder.mark());
        let apart = encoder.encode(&marked).expect("encodes");
        assert!(apart.len() > whole.len());
        assert_eq!(apart.iter().map(|(_, range)| &marked[range.clone()]).collect::<String>(), text);
    }
}
