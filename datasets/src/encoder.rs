//! Much text to tokens, by all cores, each of which remembers the words that it has seen.
//!
//! Byte-level BPE cuts a text into words first, and a word always gives the same tokens. So GPT-2's words are found by a scanner
//! here, and `tokenizers` is asked for each word once. Other tokenizers encode whole pieces.

use std::collections::HashMap;
use std::sync::{Mutex, OnceLock, PoisonError};

use aho_corasick::AhoCorasick;
use rayon::prelude::*;
use tokenizers::{ModelWrapper, PreTokenizerWrapper};

use crate::error::DataError;
use crate::tokenizer::Tokenizer;

/// Words that a core remembers at the most.
const MOST_WORDS: usize = 1 << 18;

/// A tokenizer at work on much text.
pub struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    /// For texts of GPT-2's words: what is no word where it stands in them.
    words: Option<AhoCorasick>,
    memories: Mutex<Vec<Memory>>,
}

impl<'a> Encoder<'a> {
    /// For texts of any size.
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, words: gpt2_words(tokenizer), memories: Mutex::default() }
    }

    /// The tokens of each of `pieces`, in order.
    ///
    /// # Errors
    /// If a piece holds a word or character that the vocabulary lacks; it is named.
    pub fn encode<S: AsRef<str> + Sync>(&self, pieces: &[S]) -> Result<Vec<Vec<u32>>, DataError> {
        pieces.par_iter().map(|piece| self.encode_one(piece.as_ref())).collect()
    }

    fn encode_one(&self, piece: &str) -> Result<Vec<u32>, DataError> {
        match &self.words {
            Some(added) if !added.is_match(piece) => {
                let mut memory = self.memories().pop().unwrap_or_default();
                let tokens = memory.encode(piece, self.tokenizer);
                self.memories().push(memory);
                tokens
            }
            _ => self.tokenizer.encode_whole(piece),
        }
    }

    fn memories(&self) -> std::sync::MutexGuard<'_, Vec<Memory>> {
        // A thread that panicked had none of them.
        self.memories.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A search for the tokens beside the vocabulary, if all else is cut into GPT-2's words.
fn gpt2_words(tokenizer: &Tokenizer) -> Option<AhoCorasick> {
    let inner = tokenizer.inner();
    let by_words = matches!(
        inner.get_pre_tokenizer(),
        Some(PreTokenizerWrapper::ByteLevel(bytes)) if bytes.use_regex && !bytes.add_prefix_space
    );
    let always_alike = matches!(inner.get_model(), ModelWrapper::BPE(model) if model.dropout.is_none());
    if !by_words || !always_alike || inner.get_normalizer().is_some() {
        return None;
    }
    let added = inner.get_added_tokens_decoder();
    AhoCorasick::new(added.values().map(|token| &token.content).filter(|content| !content.is_empty())).ok()
}

/// Words and their tokens.
#[derive(Default)]
struct Memory {
    /// Where a word's tokens lie.
    places: HashMap<Box<str>, (u32, u32)>,
    tokens: Vec<u32>,
}

impl Memory {
    fn encode(&mut self, text: &str, tokenizer: &Tokenizer) -> Result<Vec<u32>, DataError> {
        let classes = Classes::get();
        let mut encoded = Vec::with_capacity(text.len() / 3);
        let mut rest = text;
        while !rest.is_empty() {
            let (word, behind) = rest.split_at(word_length(rest, classes));
            rest = behind;
            if let Some((begin, end)) = self.places.get(word) {
                encoded.extend_from_slice(&self.tokens[*begin as usize..*end as usize]);
                continue;
            }
            let tokens = tokenizer.encode_whole(word)?;
            if self.places.len() < MOST_WORDS {
                let begin = self.tokens.len() as u32;
                self.tokens.extend_from_slice(&tokens);
                self.places.insert(word.into(), (begin, self.tokens.len() as u32));
            }
            encoded.extend(tokens);
        }
        Ok(encoded)
    }
}

/// Bytes of GPT-2's first word in a text: what its regular expression matches (Radford et al., 2019),
/// `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`.
fn word_length(text: &str, classes: &Classes) -> usize {
    let endings = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d"];
    if text.starts_with('\'')
        && let Some(ending) = endings.into_iter().find(|ending| text.starts_with(ending))
    {
        return ending.len();
    }
    let begin = usize::from(text.starts_with(' '));
    let run = |from: usize, class: Class| {
        let other = text[from..].char_indices().find(|(_, next)| classes.of(*next) != class);
        other.map_or(text.len(), |(at, _)| from + at)
    };
    match text[begin..].chars().next().map(|first| classes.of(first)) {
        Some(class) if class != Class::Space => run(begin, class),
        // White space, up to the last of it where a word follows: that goes with the word if it is a space.
        _ => {
            let end = run(0, Class::Space);
            let last = text[..end].char_indices().next_back().map_or(0, |(at, _)| at);
            if end == text.len() || last == 0 { end } else { last }
        }
    }
}

/// What a regular expression takes a character for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    Other,
    Letter,
    Number,
    Space,
}

/// The class of every character, as the regular expressions of `tokenizers` have it.
struct Classes(Vec<Class>);

impl Classes {
    fn get() -> &'static Self {
        static CLASSES: OnceLock<Classes> = OnceLock::new();
        CLASSES.get_or_init(Self::new)
    }

    fn new() -> Self {
        let all: String = ('\0'..=char::MAX).collect();
        let mut classes = vec![Class::Other; char::MAX as usize + 1];
        for (pattern, class) in [(r"\p{L}+", Class::Letter), (r"\p{N}+", Class::Number), (r"\s+", Class::Space)] {
            // These patterns are sound, as the tests below see.
            let Ok(pattern) = onig::Regex::new(pattern) else { continue };
            for (begin, end) in pattern.find_iter(&all) {
                all[begin..end].chars().for_each(|found| classes[found as usize] = class);
            }
        }
        Self(classes)
    }

    fn of(&self, character: char) -> Class {
        self.0[character as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Generator;
    use crate::tokenizer::TokenizerKind;

    /// Texts of everything that the expression tells apart, and of any characters at all.
    fn texts() -> Vec<String> {
        let parts = [
            " ",
            "  ",
            "\n",
            "\t",
            "\r\n",
            "\u{A0}",
            "\u{3000}",
            "\u{85}",
            "'",
            "'s",
            "'re",
            "'LL",
            "word",
            "Émile",
            "火",
            "12",
            "½",
            "²",
            "!",
            "...",
            "🔥",
            "\u{301}",
            "a",
            "\u{180E}",
            "\u{200B}",
            "<|endoftext|>",
            "_",
        ];
        let mut generator = Generator::new(5, 0, 0);
        let mut texts = vec![String::new()];
        for _ in 0..400 {
            let length = generator.below(30);
            texts.push((0..length).map(|_| parts[generator.below(parts.len())]).collect());
            let any = |generator: &mut Generator| {
                let highest = [0x80, 0x800, 0x11_0000][generator.below(3)];
                char::from_u32(generator.below(highest) as u32).unwrap_or('x')
            };
            texts.push((0..length).map(|_| any(&mut generator)).collect());
        }
        texts
    }

    #[test]
    fn remembered_words_give_the_tokens_of_tokenizers() {
        let text = "It's a kiln's fire, we've 12 of them; they'll glow.\n\n  'Clay' isn't 100% earth…\n".repeat(3);
        for kind in [TokenizerKind::Bpe(320), TokenizerKind::Byte] {
            let tokenizer = Tokenizer::train(kind, &text).expect("a tokenizer");
            let encoder = Encoder::new(&tokenizer);
            assert!(encoder.words.is_some(), "{kind:?}");
            let texts = texts();
            let expected: Vec<_> = texts.iter().map(|text| tokenizer.encode_whole(text).expect("any text")).collect();
            assert_eq!(encoder.encode(&texts).expect("any text"), expected, "{kind:?}");
        }
    }

    #[test]
    fn every_character_alone_and_between_others_gives_the_same_words() {
        let tokenizer = Tokenizer::train(TokenizerKind::Byte, "").expect("a tokenizer");
        let classes = Classes::get();
        let mut text: String = ('\0'..=char::MAX).step_by(97).flat_map(|c| [c, 'a', c, c, ' ', c, '1', '\n']).collect();
        let whole = tokenizer.parts(&text);
        let mut count = 0;
        while !text.is_empty() {
            text.drain(..word_length(&text, classes));
            count += 1;
        }
        assert_eq!(count, whole.len());
    }

    #[test]
    fn a_tokenizer_without_gpt2s_words_encodes_whole_pieces() {
        let tokenizer = Tokenizer::train(TokenizerKind::Char, "a bc").expect("a tokenizer");
        let encoder = Encoder::new(&tokenizer);
        assert!(encoder.words.is_none());
        assert_eq!(encoder.encode(&["abc", "c b"]).expect("known"), [vec![1, 2, 3], vec![3, 0, 2]]);
        let message = encoder.encode(&["abc", "abz"]).expect_err("unknown").to_string();
        assert!(message.contains("'z'"), "{message}");
    }
}
