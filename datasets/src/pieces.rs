//! WordPiece tokenization, as in BERT.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use serde_json::{Map, Value, json};

use crate::error::DataError;
use crate::tokenizer::Tokenizer;
use crate::utterance::Utterance;

/// The special tokens of a trained vocabulary, which start it in this order.
const SPECIAL: [&str; 5] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];

/// Prefix of a piece that continues a word.
const CONTINUES: &str = "##";

/// Minimum frequency of a merged pair.
const MIN_FREQUENCY: u64 = 2;

/// A tokenizer of words into pieces.
#[derive(Clone, Debug)]
pub struct PieceTokenizer {
    tokenizer: Tokenizer,
    unknown: u32,
    cls: u32,
    sep: Option<u32>,
    pad: u32,
}

impl PieceTokenizer {
    /// Trains a lower-casing vocabulary of at most `vocab_size` pieces on the words of some
    /// utterances: the special tokens, every letter at the start of a word and within one, and
    /// frequent merges. The same words always give the same vocabulary.
    ///
    /// # Errors
    /// If the special tokens and letters alone exceed `vocab_size`.
    pub fn train(utterances: &[Utterance], vocab_size: usize) -> Result<Self, DataError> {
        Self::train_on(utterances.iter().flat_map(|utterance| &utterance.words).map(String::as_str), vocab_size)
    }

    /// [`train`](Self::train) on words of any source.
    ///
    /// # Errors
    /// As there.
    pub fn train_on<'a>(all: impl Iterator<Item = &'a str>, vocab_size: usize) -> Result<Self, DataError> {
        let speller = word_pieces(&SPECIAL.map(str::to_owned))?;
        let mut words = BTreeMap::<&str, u64>::new();
        for word in all {
            *words.entry(word).or_default() += 1;
        }
        let mut parts = BTreeMap::<String, u64>::new();
        for (word, count) in words {
            for part in speller.parts(word) {
                *parts.entry(part).or_default() += count;
            }
        }
        Self::new(word_pieces(&vocabulary(&parts, vocab_size)?)?)
    }

    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    /// If it is missing, not a tokenizer, or lacks `[CLS]` or `[UNK]`.
    pub fn load(path: &Path) -> Result<Self, DataError> {
        let told = |error| match error {
            DataError::Tokenizer(reason) if !reason.contains(&*path.to_string_lossy()) => {
                DataError::Tokenizer(format!("{}: {reason}", path.display()))
            }
            other => other,
        };
        Tokenizer::load(path).and_then(Self::new).map_err(told)
    }

    /// Writes a `tokenizer.json` atomically.
    ///
    /// # Errors
    /// If the file system fails.
    pub fn save(&self, path: &Path) -> Result<(), DataError> {
        self.tokenizer.save(path)
    }

    /// The checksum of what [`save`](Self::save) writes, as far as it makes pieces.
    ///
    /// # Errors
    /// If the tokenizer cannot be written.
    pub fn sha256(&self) -> Result<String, DataError> {
        self.tokenizer.sha256()
    }

    fn new(tokenizer: Tokenizer) -> Result<Self, DataError> {
        let needed = |token: &str| {
            let lacking = || DataError::Tokenizer(format!("the tokenizer has no {token}"));
            tokenizer.token_id(token).ok_or_else(lacking)
        };
        let (cls, unknown) = (needed("[CLS]")?, needed("[UNK]")?);
        let (sep, pad) = (tokenizer.token_id("[SEP]"), tokenizer.token_id("[PAD]").unwrap_or(0));
        Ok(Self { tokenizer, unknown, cls, sep, pad })
    }

    /// The tokenizer, which puts text between `[CLS]` and `[SEP]`.
    pub fn into_tokenizer(self) -> Tokenizer {
        self.tokenizer
    }

    /// The id of `[UNK]`.
    pub(crate) fn unknown(&self) -> u32 {
        self.unknown
    }

    /// Number of pieces, special tokens included.
    pub fn vocab_size(&self) -> usize {
        self.tokenizer.vocab_size()
    }

    /// The pieces of a word, at least one; `[UNK]` if it cannot be spelt.
    pub fn word(&self, word: &str) -> Vec<u32> {
        let parts = self.tokenizer.parts(word);
        let pieces = parts.iter().flat_map(|part| self.tokenizer.part_tokens(part).unwrap_or(vec![self.unknown]));
        self.something(pieces.collect())
    }

    /// A word letter by letter, at least one piece. An unknown letter is `[UNK]`.
    pub fn letters(&self, word: &str) -> Vec<u32> {
        let mut pieces = Vec::new();
        for part in self.tokenizer.parts(word) {
            for (at, letter) in part.chars().enumerate() {
                let piece = if at == 0 { letter.to_string() } else { format!("{CONTINUES}{letter}") };
                pieces.push(self.tokenizer.token_id(&piece).unwrap_or(self.unknown));
            }
        }
        self.something(pieces)
    }

    fn something(&self, pieces: Vec<u32>) -> Vec<u32> {
        if pieces.is_empty() { vec![self.unknown] } else { pieces }
    }

    /// The id of `[CLS]`.
    pub fn cls(&self) -> u32 {
        self.cls
    }

    /// The id of `[SEP]`, if it exists.
    pub fn sep(&self) -> Option<u32> {
        self.sep
    }

    /// The id of `[PAD]`, or 0.
    pub fn pad(&self) -> u32 {
        self.pad
    }
}

/// A tokenizer of these pieces, special tokens first.
fn word_pieces(pieces: &[String]) -> Result<Tokenizer, DataError> {
    let vocabulary: Map<String, Value> = pieces.iter().cloned().zip((0..).map(|id| json!(id))).collect();
    let special = |(id, token): (usize, &&str)| {
        json!({
            "id": id, "content": token, "special": true,
            "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        })
    };
    Tokenizer::from_json(&json!({
        "version": "1.0",
        "added_tokens": SPECIAL.iter().enumerate().map(special).collect::<Vec<_>>(),
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true,
        },
        "pre_tokenizer": { "type": "BertPreTokenizer" },
        "post_processor": { "type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2] },
        "decoder": { "type": "WordPiece", "prefix": CONTINUES, "cleanup": true },
        "model": {
            "type": "WordPiece", "vocab": vocabulary, "unk_token": "[UNK]",
            "continuing_subword_prefix": CONTINUES, "max_input_chars_per_word": 100,
        },
    }))
}

/// A pair of adjacent pieces: its frequency, and the words with it.
#[derive(Default)]
struct Pair {
    count: u64,
    words: BTreeSet<usize>,
}

/// Special tokens, letters, and the most frequent merges, up to `vocab_size` pieces.
///
/// The trainer of the `tokenizers` crate breaks ties by the order of a hash map, which differs from
/// run to run.
fn vocabulary(words: &BTreeMap<String, u64>, vocab_size: usize) -> Result<Vec<String>, DataError> {
    let alphabet: BTreeSet<char> = words.keys().flat_map(|word| word.chars()).collect();
    let mut pieces: Vec<String> = SPECIAL.map(str::to_owned).to_vec();
    pieces.extend(alphabet.iter().map(char::to_string));
    pieces.extend(alphabet.iter().map(|letter| format!("{CONTINUES}{letter}")));
    if pieces.len() > vocab_size {
        let needed = pieces.len();
        let reason = format!("vocab_size is {vocab_size}, but the letters alone need {needed}");
        return Err(DataError::Tokenizer(reason));
    }
    let mut ids: HashMap<String, usize> = pieces.iter().cloned().zip(0..).collect();
    let letters: HashMap<char, usize> = alphabet.iter().copied().zip(SPECIAL.len()..).collect();
    let spelt = |word: &String| {
        let within = |at: usize| if at == 0 { 0 } else { alphabet.len() };
        word.chars().enumerate().map(|(at, letter)| letters[&letter] + within(at)).collect()
    };
    let mut spellings: Vec<(Vec<usize>, u64)> = words.iter().map(|(word, count)| (spelt(word), *count)).collect();
    let mut pairs = HashMap::<(usize, usize), Pair>::new();
    for (at, (spelling, count)) in spellings.iter().enumerate() {
        for pair in spelling.windows(2) {
            let pair = pairs.entry((pair[0], pair[1])).or_default();
            pair.count += count;
            pair.words.insert(at);
        }
    }
    while pieces.len() < vocab_size {
        // The most frequent pair, the oldest among equals, independent of the map's order.
        let best = pairs.iter().max_by_key(|(pair, met)| (met.count, Reverse(**pair)));
        let Some((&joined, _)) = best.filter(|(_, met)| met.count >= MIN_FREQUENCY) else { break };
        let end = &pieces[joined.1];
        let piece = format!("{}{}", pieces[joined.0], end.strip_prefix(CONTINUES).unwrap_or(end));
        // Different pairs may spell the same piece.
        let id = *ids.entry(piece).or_insert_with_key(|piece| {
            pieces.push(piece.clone());
            pieces.len() - 1
        });
        for at in pairs.remove(&joined).unwrap_or_default().words {
            let (spelling, count) = &mut spellings[at];
            for pair in spelling.windows(2) {
                if let Some(met) = pairs.get_mut(&(pair[0], pair[1])) {
                    met.count -= *count;
                }
            }
            *spelling = join(spelling, joined, id);
            for pair in spelling.windows(2) {
                let met = pairs.entry((pair[0], pair[1])).or_default();
                met.count += *count;
                met.words.insert(at);
            }
        }
        pairs.retain(|_, met| met.count > 0);
    }
    Ok(pieces)
}

/// A spelling with each occurrence of `pair` merged.
fn join(spelling: &[usize], pair: (usize, usize), id: usize) -> Vec<usize> {
    let mut joined = Vec::with_capacity(spelling.len());
    let mut at = 0;
    while at < spelling.len() {
        let meets = spelling[at] == pair.0 && spelling.get(at + 1) == Some(&pair.1);
        joined.push(if meets { id } else { spelling[at] });
        at += if meets { 2 } else { 1 };
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::TempDir;

    fn utterances(sentences: &[&str]) -> Vec<Utterance> {
        let utterance = |text: &&str| Utterance {
            words: text.split_whitespace().map(str::to_owned).collect(),
            tags: text.split_whitespace().map(|_| "O".to_owned()).collect(),
            intent: "say".to_owned(),
        };
        sentences.iter().map(utterance).collect()
    }

    fn trained(vocab_size: usize) -> PieceTokenizer {
        let sentences = ["play the Player", "play playing singing", "Joe's café at 8:30", "singing the song"];
        PieceTokenizer::train(&utterances(&sentences), vocab_size).expect("room for letters")
    }

    /// The names of some pieces.
    fn names(pieces: &PieceTokenizer, ids: &[u32]) -> Vec<String> {
        let vocabulary: Value = serde_json::from_str(&json_of(pieces)).expect("what was written");
        let vocabulary = vocabulary["model"]["vocab"].as_object().expect("a vocabulary").clone();
        let name = |id: &u32| vocabulary.iter().find(|(_, known)| **known == *id).expect("a known id").0.clone();
        ids.iter().map(name).collect()
    }

    fn json_of(pieces: &PieceTokenizer) -> String {
        let folder = TempDir::new().expect("a folder");
        let path = folder.path().join("tokenizer.json");
        pieces.save(&path).expect("room for a file");
        std::fs::read_to_string(path).expect("what was written")
    }

    #[test]
    fn training_twice_gives_the_same_bytes() {
        let home = crate::Utterances::home();
        let train = || json_of(&PieceTokenizer::train(&home.train, 1500).expect("room for letters"));
        assert_eq!(train(), train());
    }

    #[test]
    fn special_tokens_come_first_and_letters_follow() {
        let pieces = trained(60);
        assert_eq!((pieces.pad(), pieces.cls(), pieces.sep()), (0, 2, Some(3)));
        assert_eq!(names(&pieces, &[0, 1, 2, 3, 4]), SPECIAL);
        assert!(pieces.vocab_size() <= 60);
        assert!(PieceTokenizer::train(&utterances(&["play"]), 12).is_err());
    }

    #[test]
    fn frequent_words_are_one_piece_and_rare_ones_are_spelt() {
        let pieces = trained(100);
        let spelt = |word| names(&pieces, &pieces.word(word));
        assert_eq!(spelt("play"), ["play"]);
        assert_eq!(spelt("PLAY"), ["play"]);
        assert_eq!(spelt("singing"), ["singing"]);
        assert_eq!(spelt("plays"), ["play", "##s"]);
        assert_eq!(spelt("Café"), ["c", "##a", "##f", "##e"]);
        assert_eq!(spelt("joe's"), ["j", "##o", "##e", "'", "s"]);
    }

    #[test]
    fn letters_spell_a_word_one_by_one() {
        let pieces = trained(100);
        let spelt = |word| names(&pieces, &pieces.letters(word));
        assert_eq!(spelt("Play"), ["p", "##l", "##a", "##y"]);
        assert_eq!(spelt("joe's"), ["j", "##o", "##e", "'", "s"]);
        assert_eq!(spelt("zap"), ["[UNK]", "##a", "##p"]);
    }

    #[test]
    fn a_word_that_cannot_be_spelt_is_unknown() {
        let pieces = trained(100);
        for word in ["火", "zz", "\u{7}", "", " "] {
            assert_eq!(names(&pieces, &pieces.word(word)), ["[UNK]"], "{word:?}");
            assert!(!pieces.letters(word).is_empty(), "{word:?}");
        }
        // The name of a special token is an ordinary word here.
        assert!(!pieces.word("[CLS]").contains(&pieces.cls()));
    }

    #[test]
    fn a_saved_tokenizer_is_read_back() {
        let folder = TempDir::new().expect("a folder");
        let path = folder.path().join("tokenizer.json");
        let pieces = trained(100);
        pieces.save(&path).expect("room for a file");
        let again = PieceTokenizer::load(&path).expect("what was written");
        assert_eq!(json_of(&again), json_of(&pieces));
        for word in ["playing", "café", "nothing"] {
            assert_eq!(again.word(word), pieces.word(word));
        }
        // The same as the tokenizers crate itself.
        let whole = Tokenizer::load(&path).expect("what was written").encode("playing singing").expect("any text");
        assert_eq!(whole, [pieces.word("playing"), pieces.word("singing")].concat());
    }

    #[test]
    fn a_tokenizer_without_special_tokens_is_refused() {
        let folder = TempDir::new().expect("a folder");
        let path = folder.path().join("tokenizer.json");
        Tokenizer::words(&["a".to_owned()]).and_then(|tokenizer| tokenizer.save(&path)).expect("room for a file");
        let message = PieceTokenizer::load(&path).expect_err("no special tokens").to_string();
        assert!(message.ends_with("tokenizer.json: the tokenizer has no [CLS]"), "{message}");
    }
}
