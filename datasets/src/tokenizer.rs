//! Tokenizers: bytes, characters, words or byte-level BPE, each stored as the hub's
//! `tokenizer.json`.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::ops::{ControlFlow, RangeInclusive};
use std::path::Path;
use std::sync::mpsc::sync_channel;
use std::sync::{Mutex, PoisonError};
use std::thread;

use rayon::prelude::*;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{
    AddedToken, Model, NormalizedString, Normalizer, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer,
};

use crate::error::DataError;
use crate::inputs::hex;
use crate::sources::{TextSource, cut_between_words};
use crate::words::Words;

/// The end-of-document token of a trained BPE tokenizer.
const END_OF_TEXT: &str = "<|endoftext|>";

/// End-of-document tokens by name.
const DOCUMENT_ENDS: [&str; 4] = [END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>"];

/// Kinds of trained tokenizers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenizerKind {
    /// A token per byte.
    Byte,
    /// A token per character of the text.
    Char,
    /// Byte-level BPE with this vocabulary size.
    Bpe(usize),
}

/// A tokenizer of the `tokenizers` crate.
#[derive(Clone, Debug)]
pub struct Tokenizer(tokenizers::Tokenizer);

impl Tokenizer {
    /// Trains a tokenizer on `text`.
    ///
    /// # Errors
    /// If a BPE vocabulary is smaller than the 256 bytes and one special token.
    pub fn train(kind: TokenizerKind, text: &str) -> Result<Self, DataError> {
        match kind {
            TokenizerKind::Byte => Self::byte_level(Map::new()),
            TokenizerKind::Char => Self::characters(text.chars().collect()),
            // Whole lines: words do not cross lines, and equal pieces are counted once.
            TokenizerKind::Bpe(vocab_size) => Self::train_bpe(vocab_size, text.split_inclusive('\n')),
        }
    }

    /// Trains a tokenizer on `sources`; BPE uses their first gigabyte.
    ///
    /// # Errors
    /// As [`train`](Self::train), and if a source cannot be read.
    pub fn train_on(kind: TokenizerKind, sources: &[TextSource]) -> Result<Self, DataError> {
        match kind {
            TokenizerKind::Byte => Self::byte_level(Map::new()),
            TokenizerKind::Char => {
                let mut characters = HashSet::new();
                for source in sources {
                    source.read(true, &mut |piece| {
                        characters.extend(piece.text.chars());
                        Ok(ControlFlow::Continue(()))
                    })?;
                }
                Self::characters(characters)
            }
            TokenizerKind::Bpe(vocab_size) => thread::scope(|scope| {
                let (sender, receiver) = sync_channel::<Result<String, DataError>>(64);
                scope.spawn(move || {
                    let mut bytes = 0;
                    let read = sources.iter().try_for_each(|source| {
                        source.read(true, &mut |piece| {
                            bytes += piece.text.len() as u64;
                            let taken = bytes < TRAINED_ON && sender.send(Ok(piece.text)).is_ok();
                            Ok(if taken { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
                        })
                    });
                    // A receiver that is gone has failed already.
                    let _ = read.map_err(|error| sender.send(Err(error)));
                });
                let failed = Mutex::new(None);
                let pieces = receiver.into_iter().map_while(|read| {
                    read.map_err(|error| failed.lock().unwrap_or_else(PoisonError::into_inner).replace(error)).ok()
                });
                let lines = pieces.flat_map(|text| text.split_inclusive('\n').map(str::to_string).collect::<Vec<_>>());
                let trained = Self::train_bpe(vocab_size, lines);
                match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
                    Some(error) => Err(error),
                    None => trained,
                }
            }),
        }
    }

    /// A token per character.
    fn characters(characters: HashSet<char>) -> Result<Self, DataError> {
        let mut characters: Vec<char> = characters.into_iter().collect();
        characters.sort_unstable();
        let words: Vec<String> = characters.into_iter().map(String::from).collect();
        Self::split(&words, r"[\s\S]")
    }

    /// A tokenizer with a closed vocabulary of words, each with the space before it, punctuation
    /// and line breaks.
    ///
    /// # Errors
    /// If the vocabulary is invalid.
    pub fn words(vocabulary: &[String]) -> Result<Self, DataError> {
        Self::split(vocabulary, r#" ?[A-Za-z'-]+|[.,!?;:"]|\n"#)
    }

    /// Splits by `pattern` and looks the words up.
    fn split(words: &[String], pattern: &str) -> Result<Self, DataError> {
        let vocabulary: Map<String, Value> = words.iter().cloned().zip((0..).map(|id| json!(id))).collect();
        Self::from_json(&json!({
            "version": "1.0",
            "model": { "type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>" },
            "pre_tokenizer": {
                "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false
            },
            "decoder": { "type": "Fuse" },
            "added_tokens": [],
        }))
    }

    /// Bytes by their printable names, with the vocabulary `merged` or, if that is empty, only the
    /// bytes.
    fn byte_level(merged: Map<String, Value>) -> Result<Self, DataError> {
        let vocabulary = if merged.is_empty() {
            let mut bytes: Vec<char> = ByteLevel::alphabet().into_iter().collect();
            bytes.sort_unstable();
            bytes.into_iter().map(String::from).zip((0..).map(|id| json!(id))).collect()
        } else {
            merged
        };
        let of_bytes =
            json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
        Self::from_json(&json!({
            "version": "1.0",
            "model": { "type": "BPE", "vocab": vocabulary, "merges": [] },
            "pre_tokenizer": of_bytes,
            "decoder": of_bytes,
            "added_tokens": [],
        }))
    }

    fn train_bpe<S: AsRef<str> + Send>(
        vocab_size: usize,
        lines: impl Iterator<Item = S> + Send,
    ) -> Result<Self, DataError> {
        if vocab_size < 257 {
            let reason = format!("a byte-level BPE vocabulary needs at least 257 tokens; got {vocab_size}");
            return Err(DataError::Tokenizer(reason));
        }
        let Self(mut tokenizer) = Self::byte_level(Map::new())?;
        let trainer = BpeTrainer::builder()
            .vocab_size(vocab_size)
            .show_progress(false)
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .special_tokens(vec![AddedToken::from(END_OF_TEXT, true)])
            .build();
        tokenizer.train(&mut TrainerWrapper::from(trainer), lines).map_err(tokenizer_error)?;
        Ok(Self(tokenizer))
    }

    pub(crate) fn from_json(json: &Value) -> Result<Self, DataError> {
        tokenizers::Tokenizer::from_bytes(json.to_string()).map(Self).map_err(tokenizer_error)
    }

    /// A tokenizer with the `settings` of a `tokenizer.json`, and the given model and added tokens.
    pub(crate) fn from_parts(settings: &Value, model: BPE, added: Vec<AddedToken>) -> Result<Self, DataError> {
        let Self(mut tokenizer) = Self::from_json(settings)?;
        tokenizer.with_model(model);
        tokenizer.add_tokens(added).map_err(tokenizer_error)?;
        Ok(Self(tokenizer))
    }

    /// Reads a `tokenizer.json`. Its padding and truncation are ignored.
    ///
    /// # Errors
    /// If it is missing or not a tokenizer.
    pub fn load(path: &Path) -> Result<Self, DataError> {
        let bytes = fs::read(path).map_err(|error| DataError::Io { path: path.to_path_buf(), error })?;
        let broken = |error| DataError::Tokenizer(format!("{}: not a tokenizer: {error}", path.display()));
        let mut tokenizer = tokenizers::Tokenizer::from_bytes(bytes).map_err(broken)?;
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(broken)?;
        Ok(Self(tokenizer))
    }

    /// As a `tokenizer.json`.
    pub(crate) fn to_json(&self) -> Result<String, DataError> {
        self.0.to_string(false).map_err(tokenizer_error)
    }

    /// Writes a `tokenizer.json` atomically.
    ///
    /// # Errors
    /// If the file system fails.
    pub fn save(&self, path: &Path) -> Result<(), DataError> {
        let text = self.0.to_string(true).map_err(tokenizer_error)?;
        let partial = path.with_extension("partial");
        let written = fs::write(&partial, text)
            .and_then(|()| File::open(&partial)?.sync_all())
            .and_then(|()| fs::rename(&partial, path));
        written.map_err(|error| {
            // Report the first error; there may be nothing to remove.
            let _ = fs::remove_file(&partial);
            DataError::Io { path: path.to_path_buf(), error }
        })
    }

    /// Vocabulary size, special tokens included.
    pub fn vocab_size(&self) -> usize {
        // Ids may have gaps: the largest counts.
        let largest = self.0.get_vocab(true).into_values().max();
        largest.map_or(0, |id| id as usize + 1)
    }

    /// A token's name in the vocabulary.
    pub fn token(&self, id: u32) -> Option<String> {
        self.0.id_to_token(id)
    }

    /// The bytes of each token's text within a text; empty for control tokens and unused ids.
    pub fn token_bytes(&self) -> Vec<Vec<u8>> {
        let spelling = Spelling::of(&self.0);
        let added = self.0.get_added_tokens_decoder();
        let bytes = |id: u32| match added.get(&id) {
            Some(token) if token.special => Vec::new(),
            Some(token) => token.content.clone().into_bytes(),
            None => self.token(id).map(|name| spelling.bytes(&name)).unwrap_or_default(),
        };
        (0..self.vocab_size() as u32).map(bytes).collect()
    }

    /// For each of its tokens, the one of the same name in `other`.
    pub fn tokens_of(&self, other: &Self) -> Vec<Option<u32>> {
        let name = |token: u32| self.0.id_to_token(token);
        (0..self.vocab_size() as u32).map(|token| name(token).and_then(|name| other.token_id(&name))).collect()
    }

    /// The id of a token by its name in the vocabulary.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.0.token_to_id(token)
    }

    /// The tokens of a text.
    ///
    /// # Errors
    /// If the vocabulary lacks a word or character of the text; names it.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        match self.may_cut_words() {
            true if text.len() > LONG => Ok(Encoder::new(self).encode(&cut_between_words(text))?.concat()),
            _ => self.encode_whole(text),
        }
    }

    /// The tokens of a text, on one core.
    pub(crate) fn encode_whole(&self, text: &str) -> Result<Vec<u32>, DataError> {
        let encoding = self.0.encode_fast(text, false).map_err(|error| self.unknown(text, error))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The tokenizer of the `tokenizers` crate.
    pub(crate) fn inner(&self) -> &tokenizers::Tokenizer {
        &self.0
    }

    /// The end-of-document token, if any.
    pub fn end_token(&self) -> Option<u32> {
        DOCUMENT_ENDS.iter().find_map(|end| self.token_id(end))
    }

    /// sha256 of the parts that affect tokenization: equal for equal tokenizers, however they were
    /// written.
    ///
    /// # Errors
    /// If the tokenizer cannot be serialized.
    pub fn sha256(&self) -> Result<String, DataError> {
        Ok(hex(&Sha256::digest(self.0.to_string(false).map_err(tokenizer_error)?)))
    }

    /// The tokens of a prompt, with those that the tokenizer's post-processor adds, such as Llama's
    /// `<s>`.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, DataError> {
        let encoding = self.0.encode_fast(text, true).map_err(|error| self.unknown(text, error))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Whether a text contains a control token (`special` in `tokenizer.json`), such as the end of
    /// a turn, as it is or after normalization.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn spells_control_token(&self, text: &str) -> Result<bool, DataError> {
        let control = self.control_tokens();
        if control.iter().any(|(_, token)| text.contains(&token.content)) {
            return Ok(true);
        }
        // Only a token matched after normalization can hide there; others stand for unknown words.
        let hidden: Vec<u32> = control.into_iter().filter(|(_, token)| token.normalized).map(|(id, _)| id).collect();
        Ok(!hidden.is_empty() && self.encode(text)?.iter().any(|token| hidden.contains(token)))
    }

    /// Inserts `mark` after the first character of each control token in a text.
    pub fn escape(&self, text: &str, mark: char) -> String {
        let control = self.control_tokens();
        let mut escaped = String::new();
        for (at, character) in text.char_indices() {
            escaped.push(character);
            if control.iter().any(|(_, token)| text[at..].starts_with(&token.content)) {
                escaped.push(mark);
            }
        }
        escaped
    }

    /// A private-use character that a text does not contain.
    ///
    /// # Errors
    /// If it contains all of them.
    pub fn unused_mark(text: &str) -> Result<char, DataError> {
        let used: HashSet<char> = text.chars().filter(|character| PRIVATE.contains(character)).collect();
        let mut marks = PRIVATE.filter(|mark| !used.contains(mark));
        marks.next().ok_or_else(|| DataError::Tokenizer("the text uses all of Unicode's private-use characters".into()))
    }

    /// The tokens of a text without its `mark`s, none of which crosses a mark.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_escaped(&self, text: &str, mark: char) -> Result<Vec<u32>, DataError> {
        self.encode_marked(text, mark, false)
    }

    /// [`encode_prompt`](Self::encode_prompt) for untrusted text, whose control tokens are plain
    /// text.
    ///
    /// # Errors
    /// As [`encode`](Self::encode), and if a control token cannot be escaped.
    pub fn encode_foreign_prompt(&self, text: &str) -> Result<Vec<u32>, DataError> {
        self.foreign(text, true)
    }

    /// [`encode`](Self::encode) for untrusted text, whose control tokens are plain text.
    ///
    /// # Errors
    /// As [`encode_foreign_prompt`](Self::encode_foreign_prompt).
    pub fn encode_foreign(&self, text: &str) -> Result<Vec<u32>, DataError> {
        self.foreign(text, false)
    }

    /// The token ids and token type ids (0 or 1) of a pair of sequences, joined by the tokenizer's
    /// post-processor. A control token that the input spells is encoded as plain text.
    ///
    /// # Errors
    /// As [`encode_foreign_prompt`](Self::encode_foreign_prompt).
    pub fn encode_pair(&self, first: &str, second: &str) -> Result<(Vec<u32>, Vec<u32>), DataError> {
        let spelled = self.spells_control_token(first)? || self.spells_control_token(second)?;
        if spelled {
            let mark = Self::unused_mark(&format!("{first}{second}"))?;
            let [one, other] = [first, second].map(|text| self.escape(text, mark));
            if self.spells_control_token(&one)? || self.spells_control_token(&other)? {
                let reason = "the text contains one of the model's control tokens: remove it";
                return Err(DataError::Tokenizer(reason.into()));
            }
            let mut marked = self.0.clone();
            marked.add_special_tokens([AddedToken::from(mark.to_string(), true)]).map_err(tokenizer_error)?;
            let marked = Self(marked);
            let id = marked.token_id(&mark.to_string());
            let (ids, types) = marked.encode_pair(&one, &other)?;
            return Ok(ids.into_iter().zip(types).filter(|(token, _)| Some(*token) != id).unzip());
        }
        let encoding = self.0.encode_fast((first, second), true).map_err(|error| self.unknown(second, error))?;
        Ok((encoding.get_ids().to_vec(), encoding.get_type_ids().to_vec()))
    }

    fn foreign(&self, text: &str, as_prompt: bool) -> Result<Vec<u32>, DataError> {
        if !self.spells_control_token(text)? {
            return if as_prompt { self.encode_prompt(text) } else { self.encode(text) };
        }
        let mark = Self::unused_mark(text)?;
        let escaped = self.escape(text, mark);
        if self.spells_control_token(&escaped)? {
            return Err(DataError::Tokenizer("the text contains one of the model's control tokens: remove it".into()));
        }
        self.encode_marked(&escaped, mark, as_prompt)
    }

    fn encode_marked(&self, text: &str, mark: char, as_prompt: bool) -> Result<Vec<u32>, DataError> {
        let mut marked = self.0.clone();
        marked.add_special_tokens([AddedToken::from(mark.to_string(), true)]).map_err(tokenizer_error)?;
        let marked = Self(marked);
        let id = marked.token_id(&mark.to_string());
        let tokens = if as_prompt { marked.encode_prompt(text)? } else { marked.encode(text)? };
        Ok(tokens.into_iter().filter(|token| Some(*token) != id).collect())
    }

    fn control_tokens(&self) -> Vec<(u32, AddedToken)> {
        let added = self.0.get_added_tokens_decoder().into_iter();
        added.filter(|(_, token)| token.special && !token.content.is_empty()).collect()
    }

    /// Whether a text may be split after a line break or before a space between two words, and
    /// encoded in parts. Not with tokenizers that put something before each text, such as Llama's.
    pub(crate) fn may_cut_words(&self) -> bool {
        let ids = |text: &str| self.0.encode_fast(text, false).map(|encoding| encoding.get_ids().to_vec());
        [("e\n", "e", "e\ne"), ("e", " e", "e e")].into_iter().all(|(first, second, whole)| {
            match (ids(first), ids(second), ids(whole)) {
                (Ok(first), Ok(second), Ok(whole)) => [first, second].concat() == whole,
                // A closed vocabulary without these letters: words and characters do not depend on
                // context.
                _ => true,
            }
        })
    }

    /// Names the first part of a text that the vocabulary lacks.
    fn unknown(&self, text: &str, error: tokenizers::Error) -> DataError {
        let known = |piece: &str| self.0.get_model().token_to_id(piece).is_some();
        let word = text.split_inclusive(|c: char| c.is_whitespace()).find(|word| self.0.encode(*word, false).is_err());
        match word.map(str::trim) {
            Some(word) if !word.is_empty() => {
                let character = word.chars().find(|c| !known(&c.to_string()));
                let single = character.filter(|_| known("e") || known("a"));
                let piece = single.map_or_else(|| format!("'{word}'"), |c| format!("'{c}'"));
                DataError::Tokenizer(format!("the model's vocabulary lacks {piece}"))
            }
            _ => DataError::Tokenizer(format!("the text cannot be encoded: {error}")),
        }
    }

    /// A normalized text, split where no token crosses. Names of special tokens are ordinary text
    /// here.
    pub(crate) fn parts(&self, text: &str) -> Vec<String> {
        let mut normalized = NormalizedString::from(text);
        if self.0.get_normalizer().is_some_and(|normalizer| normalizer.normalize(&mut normalized).is_err()) {
            return Vec::new();
        }
        let mut cut = PreTokenizedString::from(normalized);
        if self.0.get_pre_tokenizer().is_some_and(|cutter| cutter.pre_tokenize(&mut cut).is_err()) {
            return Vec::new();
        }
        let parts = cut.get_splits(OffsetReferential::Normalized, OffsetType::Byte);
        parts.into_iter().map(|(part, _, _)| part.to_owned()).filter(|part| !part.is_empty()).collect()
    }

    /// The tokens of one of the [`Self::parts`].
    pub(crate) fn part_tokens(&self, part: &str) -> Option<Vec<u32>> {
        let tokens = self.0.get_model().tokenize(part).ok()?;
        Some(tokens.into_iter().map(|token| token.id).collect())
    }

    /// Decodes tokens.
    ///
    /// # Errors
    /// If the tokenizer's decoder refuses them.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, DataError> {
        self.0.decode(tokens, true).map_err(tokenizer_error)
    }

    /// [`decode`](Self::decode) that spells control tokens, too.
    ///
    /// # Errors
    /// As there.
    pub fn decode_with_control(&self, tokens: &[u32]) -> Result<String, DataError> {
        self.0.decode(tokens, false).map_err(tokenizer_error)
    }

    /// A tokenizer that knows these control tokens, too. New ones get the next ids.
    ///
    /// # Errors
    /// If the tokenizer refuses them.
    pub fn with_control_tokens(&self, tokens: &[&str]) -> Result<Self, DataError> {
        let mut tokenizer = self.0.clone();
        tokenizer
            .add_special_tokens(tokens.iter().map(|token| AddedToken::from(*token, true)))
            .map_err(tokenizer_error)?;
        Ok(Self(tokenizer))
    }
}

/// Private-use characters.
const PRIVATE: RangeInclusive<char> = '\u{E000}'..='\u{F8FF}';

/// Maximum bytes of text that BPE trains on.
const TRAINED_ON: u64 = 1 << 30;

/// Size from which all cores encode a text, in bytes.
const LONG: usize = 64 << 10;

fn tokenizer_error(error: tokenizers::Error) -> DataError {
    DataError::Tokenizer(error.to_string())
}

/// A tokenizer for bulk text, on all cores.
pub struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    words: Option<Words>,
}

impl<'a> Encoder<'a> {
    /// For text of any size.
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, words: Words::of(&tokenizer.0) }
    }

    /// The tokens of each of `pieces`, in order.
    ///
    /// # Errors
    /// If the vocabulary lacks a word or character of a piece; names it.
    pub fn encode<S: AsRef<str> + Sync>(&self, pieces: &[S]) -> Result<Vec<Vec<u32>>, DataError> {
        pieces.par_iter().map(|piece| self.encode_one(piece.as_ref())).collect()
    }

    fn encode_one(&self, piece: &str) -> Result<Vec<u32>, DataError> {
        match self.words.as_ref().and_then(|words| words.encode(piece, &self.tokenizer.0)) {
            Some(tokens) => tokens.map_err(|error| self.tokenizer.unknown(piece, error)),
            None => self.tokenizer.encode_whole(piece),
        }
    }
}

/// How token names spell their bytes.
enum Spelling {
    /// A printable character per byte.
    ByteLevel(HashMap<char, u8>),
    /// Characters, one of which stands for a space; `<0x0A>` is a byte.
    Characters { space: char },
    /// Unchanged.
    Plain,
}

impl Spelling {
    fn of(tokenizer: &tokenizers::Tokenizer) -> Self {
        let decoder =
            tokenizer.get_decoder().and_then(|decoder| serde_json::to_value(decoder).ok()).unwrap_or_default();
        let one = [decoder.clone()];
        let steps = decoder["decoders"].as_array().map_or(&one[..], Vec::as_slice);
        let has = |kind: &str| steps.iter().find(|step| step["type"] == kind);
        if has("ByteLevel").is_some() {
            return Self::ByteLevel(byte_names());
        }
        let character = |value: &Value| value.as_str().and_then(|text| text.chars().next());
        let replaced = steps.iter().find(|step| step["type"] == "Replace" && step["content"] == " ");
        let space = replaced.and_then(|step| character(&step["pattern"]["String"]));
        let space = space.or_else(|| has("Metaspace").and_then(|step| character(&step["replacement"])));
        match space {
            Some(space) => Self::Characters { space },
            None if has("ByteFallback").is_some() => Self::Characters { space: ' ' },
            None => Self::Plain,
        }
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        match self {
            Self::ByteLevel(bytes) => {
                let spelled: Option<Vec<u8>> = name.chars().map(|character| bytes.get(&character).copied()).collect();
                spelled.unwrap_or_else(|| name.as_bytes().to_vec())
            }
            Self::Characters { space } => {
                let byte = name.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
                match byte.filter(|byte| byte.len() == 2).and_then(|byte| u8::from_str_radix(byte, 16).ok()) {
                    Some(byte) => vec![byte],
                    None => name.replace(*space, " ").into_bytes(),
                }
            }
            Self::Plain => name.as_bytes().to_vec(),
        }
    }
}

/// The byte of each character in GPT-2's alphabet: printable bytes are themselves, the others map
/// to U+0100 and up, in order.
fn byte_names() -> HashMap<char, u8> {
    let mut others = '\u{100}'..;
    let printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let name = |byte: u8| if printable(&byte) { Some(char::from(byte)) } else { others.next() };
    let names: Vec<Option<char>> = (0..=u8::MAX).map(name).collect();
    names.into_iter().zip(0..=u8::MAX).filter_map(|(name, byte)| Some((name?, byte))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "Clay, fire; and\n\nwater.\nÉmile's 火 kiln 🔥 glows.\n";

    #[test]
    fn every_kind_gives_the_text_back() {
        for kind in [TokenizerKind::Byte, TokenizerKind::Char, TokenizerKind::Bpe(300)] {
            let tokenizer = Tokenizer::train(kind, TEXT).expect("a tokenizer");
            let tokens = tokenizer.encode(TEXT).expect("known text");
            assert_eq!(tokenizer.decode(&tokens).expect("known tokens"), TEXT, "{kind:?}");
            assert!(tokens.iter().all(|token| (*token as usize) < tokenizer.vocab_size()), "{kind:?}");
            let mut stream = tokenizer.stream();
            let streamed: String = tokens.iter().map(|token| stream.push(*token).expect("known token")).collect();
            assert_eq!(streamed, TEXT, "{kind:?}");
        }
    }

    #[test]
    fn tokenizers_of_forty_kinds_encode_as_their_package_does_and_go_on_behind_a_prompt() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/tokenizer_kinds.json");
        let golden: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(path).expect("a golden file")).expect("JSON");
        let samples: Vec<String> = serde_json::from_value(golden["samples"].clone()).expect("strings");
        let (mut wrong, mut continuations) = (Vec::new(), 0);
        let cases = golden["cases"].as_array().expect("cases");
        for case in cases {
            let base = case["base"].as_str().expect("a name");
            let mut own = golden["bases"][base].clone();
            let replaced = case["replaced"].as_object().expect("parts");
            replaced.iter().for_each(|(part, value)| own[part] = value.clone());
            let file = tempfile::NamedTempFile::new().expect("a file");
            std::fs::write(file.path(), own.to_string()).expect("writable");
            let tokenizer = Tokenizer::load(file.path()).expect("a tokenizer");
            for (at, text) in samples.iter().enumerate() {
                let what = || format!("{base} {} {text:?}", case["replaced"]);
                let wanted: Vec<u32> = serde_json::from_value(case["ids"][at].clone()).expect("ids");
                let ids = tokenizer.encode(text).map_err(|error| error.to_string());
                if ids.as_ref() != Ok(&wanted) {
                    wrong.push(format!("{}: {ids:?}, and not {wanted:?}", what()));
                }
                for continued in case["continued"][at].as_array().expect("continuations") {
                    let cut = continued[0].as_u64().expect("a place") as usize;
                    let mut stream = tokenizer.stream_behind(&wanted[..cut]);
                    let behind: Result<String, _> = wanted[cut..].iter().map(|token| stream.push(*token)).collect();
                    let behind = behind.map_err(|error| error.to_string());
                    if behind.as_deref().ok() != continued[1].as_str() {
                        wrong.push(format!("{} behind {cut}: {behind:?}, and not {}", what(), continued[1]));
                    }
                    continuations += 1;
                }
            }
        }
        assert!(cases.len() >= 40 && continuations > 1500, "{} kinds, {continuations} continuations", cases.len());
        assert!(wrong.is_empty(), "{}:\n{}", wrong.len(), wrong.join("\n"));
    }

    #[test]
    fn characters_in_bytes_are_told_one_after_another() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/tokenizer_kinds.json");
        let golden: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(path).expect("a golden file")).expect("JSON");
        let of_bytes = golden["cases"]
            .as_array()
            .expect("cases")
            .iter()
            .filter(|case| case["base"] == "byte-fallback" && case["replaced"]["decoder"]["type"] == "Sequence");
        let mut kinds = 0;
        for case in of_bytes {
            let mut own = golden["bases"]["byte-fallback"].clone();
            let replaced = case["replaced"].as_object().expect("parts");
            replaced.iter().for_each(|(part, value)| own[part] = value.clone());
            let file = tempfile::NamedTempFile::new().expect("a file");
            std::fs::write(file.path(), own.to_string()).expect("writable");
            let tokenizer = Tokenizer::load(file.path()).expect("a tokenizer");
            for (prompt, text) in [
                ("the king", " \u{706b}\u{706b}\u{706b}\u{706b}\u{706b}\u{706b} ash"),
                ("\u{706b}\u{706b}\u{706b}\u{706b}", "\u{706b}\u{706b}\u{706b}\u{706b}"),
                ("clay \u{706b}\u{706b}\u{706b}", " glaze \u{1f525}\u{fe0f}\u{1f525}\u{e9}\u{1f525}\u{e9}\u{706b}"),
            ] {
                let tokens = tokenizer.encode(&format!("{prompt}{text}")).expect("known text");
                let before = tokenizer.encode(prompt).expect("known text").len();
                let mut stream = tokenizer.stream_behind(&tokens[..before]);
                let pieces: Vec<String> =
                    tokens[before..].iter().map(|token| stream.push(*token).expect("known tokens")).collect();
                assert_eq!(pieces.concat(), text, "{prompt}: {pieces:?}");
                kinds += 1;
            }
            // Invalid bytes are returned as replacement characters, and so is what follows.
            let bytes: Vec<u32> = ["<0xE7>", "<0x81>", "<0xAB>", "<0xE7>"]
                .map(|name| tokenizer.0.token_to_id(name).expect("a byte"))
                .into();
            let mut stream = tokenizer.stream();
            let mut text: String = bytes.iter().map(|token| stream.push(*token).expect("known tokens")).collect();
            for token in tokenizer.encode(" clay and ash").expect("known text") {
                text.push_str(&stream.push(token).expect("known tokens"));
            }
            assert_eq!(text.matches('\u{706b}').count(), 1, "{text}");
            assert!(text.ends_with("clay and ash"), "{text}");
        }
        assert!(kinds >= 9, "{kinds}");
    }

    #[test]
    fn the_bytes_of_tokens_are_those_of_their_text() {
        for kind in [TokenizerKind::Byte, TokenizerKind::Char, TokenizerKind::Bpe(300)] {
            let tokenizer = Tokenizer::train(kind, TEXT).expect("a tokenizer");
            let bytes = tokenizer.token_bytes();
            assert_eq!(bytes.len(), tokenizer.vocab_size());
            let tokens = tokenizer.encode(TEXT).expect("known text");
            let spelled: Vec<u8> = tokens.iter().flat_map(|token| bytes[*token as usize].clone()).collect();
            assert_eq!(String::from_utf8(spelled).as_deref(), Ok(TEXT), "{kind:?}");
        }
        let llama = Tokenizer::from_json(&json!({
            "version": "1.0", "added_tokens": [{
                "id": 3, "content": "</s>", "special": true, "normalized": false, "lstrip": false, "rstrip": false,
                "single_word": false,
            }],
            "model": {
                "type": "BPE", "vocab": { "<0x0A>": 0, "\u{2581}a": 1, "b": 2, "</s>": 3 }, "merges": [],
                "byte_fallback": true,
            },
            "decoder": { "type": "Sequence", "decoders": [
                { "type": "Replace", "pattern": { "String": "\u{2581}" }, "content": " " }, { "type": "ByteFallback" },
                { "type": "Fuse" },
            ] },
        }));
        let bytes = llama.expect("a tokenizer").token_bytes();
        assert_eq!(bytes, [&b"\n"[..], b" a", b"b", b""]);
    }

    #[test]
    fn a_text_is_neither_padded_nor_cut() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("tokenizer.json");
        Tokenizer::train(TokenizerKind::Byte, "").expect("a tokenizer").save(&path).expect("writable");
        let mut json: Value = serde_json::from_slice(&fs::read(&path).expect("a file")).expect("JSON");
        json["truncation"] = json!({
            "max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right",
        });
        json["padding"] = json!({
            "strategy": { "Fixed": 9 }, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
            "pad_type_id": 0, "pad_token": "!",
        });
        fs::write(&path, json.to_string()).expect("writable");
        let tokenizer = Tokenizer::load(&path).expect("a tokenizer");
        for text in ["", "ab", "abcdef"] {
            assert_eq!(tokenizer.encode(text).expect("any text").len(), text.len());
            assert_eq!(tokenizer.encode_prompt(text).expect("any text").len(), text.len());
        }
    }

    #[test]
    fn a_byte_tokenizer_has_a_token_for_every_byte() {
        let tokenizer = Tokenizer::train(TokenizerKind::Byte, "").expect("a tokenizer");
        assert_eq!(tokenizer.vocab_size(), 256);
        assert_eq!(tokenizer.encode("é").expect("any text").len(), 2);
    }

    #[test]
    fn an_escaped_control_token_is_text() {
        let tokenizer = Tokenizer::train(TokenizerKind::Bpe(260), TEXT).expect("a tokenizer");
        let end = tokenizer.token_id(END_OF_TEXT).expect("a special token");
        let said = format!("a {END_OF_TEXT}b<|end");
        assert!(tokenizer.spells_control_token(&said).expect("any text"));
        assert!(!tokenizer.spells_control_token("a <|endof b").expect("any text"));
        let mark = '\u{E000}';
        let escaped = tokenizer.escape(&said, mark);
        assert_eq!(escaped, format!("a <{mark}|endoftext|>b<|end"));
        assert!(!tokenizer.spells_control_token(&escaped).expect("any text"));
        let tokens = tokenizer.encode_escaped(&format!("{escaped}{END_OF_TEXT}{escaped}"), mark).expect("any text");
        assert_eq!(tokens.iter().filter(|token| **token == end).count(), 1, "{tokens:?}");
        let turns: Vec<_> = tokens.split(|token| *token == end).collect();
        assert!(turns.iter().all(|turn| tokenizer.decode(turn).expect("known tokens") == said), "{tokens:?}");
        let foreign = tokenizer.encode_foreign_prompt(&said).expect("any text");
        assert!(!foreign.contains(&end), "{foreign:?}");
        assert_eq!(tokenizer.decode(&foreign).expect("known tokens"), said);
        assert_eq!(tokenizer.encode_foreign_prompt(TEXT).expect("any"), tokenizer.encode_prompt(TEXT).expect("any"));
        assert_eq!(tokenizer.encode_escaped(TEXT, mark).expect("any"), tokenizer.encode(TEXT).expect("any"));
    }

    #[test]
    fn an_unknown_character_is_named() {
        let tokenizer = Tokenizer::train(TokenizerKind::Char, "a bc").expect("a tokenizer");
        let message = tokenizer.encode("abz").expect_err("unknown").to_string();
        assert!(message.contains("'z'"), "{message}");
    }

    #[test]
    fn a_long_text_encodes_as_a_whole_would() {
        let line =
            |at: usize| format!("line {at} of a{}long text{}", " ".repeat(at % 4), ["\n", "  \n", "\n\n "][at % 3]);
        let long: String = (0..20_000).map(line).collect();
        let tokenizer = Tokenizer::train(TokenizerKind::Bpe(400), &long[..5_000]).expect("a tokenizer");
        assert!(cut_between_words(&long).len() > 5);
        let whole = tokenizer.0.encode_fast(long.as_str(), false).expect("any text");
        assert_eq!(tokenizer.encode(&long).expect("any text"), whole.get_ids());
    }
}
