//! A cache of the tokens of words, for tokenizers that split text like GPT-2.
//!
//! Byte-level BPE first splits text into words, and a word always has the same tokens. A scanner
//! finds the words, and `tokenizers` encodes each of them once.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use aho_corasick::AhoCorasick;
use tokenizers::{ModelWrapper, PreTokenizerWrapper, Tokenizer};

/// Maximum words cached per core, and bytes per word.
const MOST_WORDS: usize = 1 << 18;
const LONGEST_WORD: usize = 64;

/// GPT-2's words, with the tokens of known ones.
pub(crate) struct Words {
    /// Added tokens, which are not words.
    added: AhoCorasick,
    memories: Mutex<Vec<Memory>>,
}

impl Words {
    /// For a tokenizer that splits everything but its added tokens into GPT-2's words.
    pub(crate) fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let by_words = matches!(
            tokenizer.get_pre_tokenizer(),
            Some(PreTokenizerWrapper::ByteLevel(bytes)) if bytes.use_regex && !bytes.add_prefix_space
        );
        let always_alike = matches!(tokenizer.get_model(), ModelWrapper::BPE(model) if model.dropout.is_none());
        if !by_words || !always_alike || tokenizer.get_normalizer().is_some() {
            return None;
        }
        let added = tokenizer.get_added_tokens_decoder();
        let added = added.values().map(|token| &token.content).filter(|content| !content.is_empty());
        Some(Self { added: AhoCorasick::new(added).ok()?, memories: Mutex::default() })
    }

    /// The tokens of a text without added tokens; none if it contains one.
    pub(crate) fn encode(&self, text: &str, tokenizer: &Tokenizer) -> Option<tokenizers::Result<Vec<u32>>> {
        if self.added.is_match(text) {
            return None;
        }
        let mut memory = self.memories().pop().unwrap_or_default();
        let tokens = memory.encode(text, tokenizer);
        self.memories().push(memory);
        Some(tokens)
    }

    fn memories(&self) -> MutexGuard<'_, Vec<Memory>> {
        // A thread that panicked held none of them.
        self.memories.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Words and their tokens.
#[derive(Default)]
struct Memory {
    /// The range of a word's tokens.
    places: HashMap<Box<str>, (u32, u32)>,
    tokens: Vec<u32>,
}

impl Memory {
    fn encode(&mut self, text: &str, tokenizer: &Tokenizer) -> tokenizers::Result<Vec<u32>> {
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
            let encoding = tokenizer.encode_fast(word, false)?;
            let tokens = encoding.get_ids();
            if self.places.len() < MOST_WORDS && word.len() <= LONGEST_WORD {
                let begin = self.tokens.len() as u32;
                self.tokens.extend_from_slice(tokens);
                self.places.insert(word.into(), (begin, self.tokens.len() as u32));
            }
            encoded.extend_from_slice(tokens);
        }
        Ok(encoded)
    }
}

/// Length of GPT-2's first word in a text: a match of its regular expression (Radford et al.,
/// 2019), `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`.
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
        // White space, except for the last character if a word follows: a space belongs to that
        // word.
        _ => {
            let end = run(0, Class::Space);
            let last = text[..end].char_indices().next_back().map_or(0, |(at, _)| at);
            if end == text.len() || last == 0 { end } else { last }
        }
    }
}

/// Character classes of the regular expression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    Other,
    Letter,
    Number,
    Space,
}

/// The class of every character, as in the regular expressions of `tokenizers`.
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
            // These patterns are valid, as the tests check.
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

    /// Strings with all character classes, and with arbitrary characters.
    fn samples() -> Vec<String> {
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
        let mut samples = vec![String::new()];
        for _ in 0..400 {
            let length = generator.below(30);
            samples.push((0..length).map(|_| parts[generator.below(parts.len())]).collect());
            let any = |generator: &mut Generator| {
                let highest = [0x80, 0x800, 0x11_0000][generator.below(3)];
                char::from_u32(generator.below(highest) as u32).unwrap_or('x')
            };
            samples.push((0..length).map(|_| any(&mut generator)).collect());
        }
        samples
    }

    #[test]
    fn remembered_words_give_the_tokens_of_tokenizers() {
        let text = "It's a kiln's fire, we've 12 of them; they'll glow.\n\n  'Clay' isn't 100% earth…\n".repeat(3);
        for kind in [TokenizerKind::Bpe(320), TokenizerKind::Byte] {
            let tokenizer = crate::tokenizer::Tokenizer::train(kind, &text).expect("a tokenizer");
            let words = Words::of(tokenizer.inner()).expect("GPT-2's words");
            // Twice: the second time all words are cached.
            for text in samples().iter().chain(&samples()) {
                let whole = tokenizer.inner().encode_fast(text.as_str(), false).expect("any text");
                match words.encode(text, tokenizer.inner()) {
                    Some(tokens) => assert_eq!(tokens.expect("any text"), whole.get_ids(), "{kind:?}: {text:?}"),
                    None => assert!(text.contains("<|endoftext|>"), "{text:?}"),
                }
            }
        }
    }

    #[test]
    fn every_character_alone_and_between_others_gives_the_same_words() {
        let tokenizer = crate::tokenizer::Tokenizer::train(TokenizerKind::Byte, "").expect("a tokenizer");
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
    fn a_tokenizer_of_other_words_has_none_of_these() {
        let tokenizer = crate::tokenizer::Tokenizer::train(TokenizerKind::Char, "a bc").expect("a tokenizer");
        assert!(Words::of(tokenizer.inner()).is_none());
    }
}
