//! Tokens of a text, cut to a length as transformers does it: the special tokens stay.

use crate::error::DataError;
use crate::tokenizer::Tokenizer;

impl Tokenizer {
    /// [`encode_prompt`](Self::encode_prompt) with at most `longest` tokens, and whether the text was
    /// truncated: then its end is cut off, and the tokens that the post-processor adds, such as
    /// `[CLS]` and `[SEP]`, stay.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_truncated(&self, text: &str, longest: usize) -> Result<(Vec<u32>, bool), DataError> {
        let mut whole = self.encode_prompt(text)?;
        if whole.len() <= longest {
            return Ok((whole, false));
        }
        let bare = self.encode(text)?;
        let added = whole.len().saturating_sub(bare.len());
        match (0..=added).find(|before| whole[*before..].starts_with(&bare)) {
            Some(before) if added <= longest => {
                let end = before + bare.len();
                whole.drain(before + longest - added..end);
            }
            _ => whole.truncate(longest),
        }
        Ok((whole, true))
    }
}

#[cfg(test)]
mod tests {
    use crate::pieces::PieceTokenizer;

    #[test]
    fn a_truncated_text_keeps_its_special_tokens() {
        let words = ["one", "two", "three", "four"].repeat(3);
        let tokenizer = PieceTokenizer::train_on(words.iter().copied(), 60).expect("room for letters").into_tokenizer();
        let (whole, cut) = tokenizer.encode_truncated("one two three four", 6).expect("known words");
        assert!(whole.len() == 6 && !cut);
        let (short, cut) = tokenizer.encode_truncated("one two three four", 4).expect("known words");
        assert!(cut);
        assert_eq!(short, [whole[0], whole[1], whole[2], whole[5]]);
        assert_eq!(tokenizer.encode_truncated("one two", 1).expect("known words").0, whole[..1]);
    }
}
