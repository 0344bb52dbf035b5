//! Tokenizers from a vocabulary and settings as in GGUF files: byte-level BPE, or SentencePiece.

mod patterns;

use std::collections::HashMap;

use serde_json::{Value, json};
use tokenizers::AddedToken;
use tokenizers::models::bpe::{BPE, Vocab};

use self::patterns::{Pattern, Rule};
use crate::error::DataError;
use crate::tokenizer::Tokenizer;

/// SentencePiece's character for a space.
const SPACE: &str = "▁";
/// The longest SentencePiece piece that is split into pairs.
const LONGEST_PIECE: usize = 512;

/// Type of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKind {
    /// Text.
    Normal,
    /// Stands for unknown text.
    Unknown,
    /// A control token, such as the end of a turn.
    Control,
    /// Text that is matched before tokenization.
    UserDefined,
    /// Unused.
    Unused,
    /// One byte, named `<0x0A>`.
    Byte,
}

impl TokenKind {
    /// From its number in GGUF files (`gguf.TokenType`); normal for unknown numbers.
    pub fn of(number: f64) -> Self {
        match number as i32 {
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => Self::Normal,
        }
    }
}

/// The tokenization algorithm.
#[derive(Clone, Debug, PartialEq)]
pub enum VocabularyModel {
    /// Byte-level BPE (Radford et al., 2019): merges pairs within the pieces found by a pattern.
    BytePairs {
        /// Pairs of tokens separated by a space, in order of priority.
        merges: Vec<String>,
        /// The pattern's name; [`Tokenizer::of_vocabulary`] reports the default for an unknown one.
        pattern: Option<String>,
    },
    /// SentencePiece BPE (Kudo and Richardson, 2018): merges the pair whose token has the highest
    /// score.
    SentencePiece {
        /// One per token.
        scores: Vec<f64>,
        /// Whether a space is put before each text.
        space_before: bool,
    },
}

/// A vocabulary.
#[derive(Clone, Debug, PartialEq)]
pub struct Vocabulary {
    /// The algorithm.
    pub model: VocabularyModel,
    /// The tokens, by id.
    pub tokens: Vec<String>,
    /// Their types.
    pub kinds: Vec<TokenKind>,
    /// The token for unknown text.
    pub unknown: Option<u32>,
    /// The BOS token, if given or usual.
    pub begin: Option<u32>,
    /// Whether BOS is added; by default, as usual for the pattern.
    pub adds_begin: Option<bool>,
    /// The EOS token, if it is added.
    pub end: Option<u32>,
}

impl Tokenizer {
    /// The tokenizer of a vocabulary, and assumptions for a warning.
    ///
    /// # Errors
    /// If lists differ in length, an id is invalid, or merges name unknown tokens.
    pub fn of_vocabulary(vocabulary: &Vocabulary) -> Result<(Self, Option<String>), DataError> {
        let Vocabulary { model, tokens, kinds, .. } = vocabulary;
        if kinds.len() != tokens.len() {
            return Err(wrong(format!("{} tokens have {} types", tokens.len(), kinds.len())));
        }
        let ids = [vocabulary.unknown, vocabulary.begin, vocabulary.end];
        if let Some(id) = ids.into_iter().flatten().find(|id| *id as usize >= tokens.len()) {
            return Err(wrong(format!("there is no token {id}: there are {}", tokens.len())));
        }
        match model {
            VocabularyModel::BytePairs { merges, pattern } => {
                let (pattern, assumed) = Pattern::named(pattern.as_deref());
                Ok((vocabulary.byte_pairs(merges, &pattern)?, assumed))
            }
            VocabularyModel::SentencePiece { scores, .. } if scores.len() != tokens.len() => {
                Err(wrong(format!("{} tokens have {} scores", tokens.len(), scores.len())))
            }
            VocabularyModel::SentencePiece { scores, space_before } => {
                Ok((vocabulary.sentence_piece(scores, *space_before)?, None))
            }
        }
    }
}

fn wrong(reason: String) -> DataError {
    DataError::Tokenizer(format!("the vocabulary is damaged: {reason}"))
}

impl Vocabulary {
    fn byte_pairs(&self, merges: &[String], pattern: &Pattern) -> Result<Tokenizer, DataError> {
        // Unused tokens fill gaps between ids: they match no text.
        let ids = self.ids(|kind| kind != TokenKind::Unused);
        let pair = |merge: &String| {
            // Some files have tokens with a plain leading space, outside the byte alphabet.
            let at = merge.char_indices().skip(1).find(|(_, character)| *character == ' ').map(|(at, _)| at);
            let pair = at.map(|at| (merge[..at].to_string(), merge[at + 1..].to_string()));
            pair.ok_or_else(|| wrong(format!("the merge '{merge}' is not two tokens")))
        };
        let merges = merges.iter().map(pair).collect::<Result<Vec<_>, _>>()?;
        let model = BPE::builder().vocab_and_merges(ids, merges).ignore_merges(pattern.whole_words);
        let model = model.build().map_err(|error| wrong(error.to_string()))?;
        let mut cut: Vec<Value> = pattern.rules.iter().map(|rule| rule.json()).collect();
        let by_words = pattern.rules.is_empty();
        cut.push(
            json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": by_words }),
        );
        let cut = if by_words { cut.remove(0) } else { json!({ "type": "Sequence", "pretokenizers": cut }) };
        let adds_begin = self.adds_begin.unwrap_or(pattern.adds_begin);
        let settings = json!({
            "normalizer": pattern.normalizes.then(|| json!({ "type": "NFC" })), "pre_tokenizer": cut,
            "decoder": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
        });
        self.assemble(model, settings, adds_begin)
    }

    fn sentence_piece(&self, scores: &[f64], space_before: bool) -> Result<Tokenizer, DataError> {
        let ids = self.ids(|_| true);
        let unknown = self.unknown.map(|id| self.tokens[id as usize].clone());
        let mut model = BPE::builder().vocab_and_merges(ids, self.merges(scores)).byte_fallback(true).fuse_unk(true);
        if let Some(unknown) = unknown {
            model = model.unk_token(unknown);
        }
        let model = model.build().map_err(|error| wrong(error.to_string()))?;
        let replace = |from: &str, to: &str| json!({ "type": "Replace", "pattern": { "String": from }, "content": to });
        let mut normalizers = vec![replace(" ", SPACE)];
        let mut decoders = vec![replace(SPACE, " "), json!({ "type": "ByteFallback" }), json!({ "type": "Fuse" })];
        if space_before {
            normalizers.insert(0, json!({ "type": "Prepend", "prepend": SPACE }));
            decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
        }
        let settings = json!({
            "normalizer": { "type": "Sequence", "normalizers": normalizers },
            "decoder": { "type": "Sequence", "decoders": decoders },
        });
        self.assemble(model, settings, self.adds_begin.unwrap_or(true))
    }

    /// The ids of tokens of some types; of duplicates the first.
    fn ids(&self, wanted: impl Fn(TokenKind) -> bool) -> Vocab {
        let all = self.tokens.iter().zip(&self.kinds).enumerate().rev();
        all.filter(|(_, (_, kind))| wanted(**kind)).map(|(id, (token, _))| (token.clone(), id as u32)).collect()
    }

    /// The pairs that form a piece, by descending score. In this order BPE merges as SentencePiece
    /// does, except where two pairs form the same piece.
    fn merges(&self, scores: &[f64]) -> Vec<(String, String)> {
        let normal = self.kinds.iter().zip(0u32..).filter(|(kind, _)| **kind == TokenKind::Normal);
        let pieces: HashMap<&str, u32> = normal.map(|(_, id)| (&self.tokens[id as usize][..], id)).collect();
        let mut pairs = Vec::new();
        for (piece, id) in &pieces {
            if piece.len() > LONGEST_PIECE {
                continue;
            }
            let characters = piece.chars().count();
            for (first, (at, _)) in piece.char_indices().enumerate().skip(1) {
                let (one, other) = piece.split_at(at);
                if let (Some(one), Some(other)) = (pieces.get(one), pieces.get(other)) {
                    let lengths = (first, characters - first);
                    pairs.push((scores[*id as usize], lengths, (*id, *one, *other)));
                }
            }
        }
        // The order of transformers: by score, then by the lengths of both parts, longest first.
        pairs.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.cmp(&a.1)).then(a.2.cmp(&b.2)));
        let token = |id: u32| self.tokens[id as usize].clone();
        pairs.into_iter().map(|(.., (_, first, second))| (token(first), token(second))).collect()
    }

    /// A tokenizer with this model, the tokens matched before tokenization, and BOS and EOS.
    fn assemble(&self, model: BPE, mut settings: Value, adds_begin: bool) -> Result<Tokenizer, DataError> {
        settings["version"] = json!("1.0");
        settings["added_tokens"] = json!([]);
        settings["model"] = json!({ "type": "BPE", "vocab": {}, "merges": [] });
        let begin = self.begin.filter(|_| adds_begin);
        if begin.is_some() || self.end.is_some() {
            settings["post_processor"] = self.template(begin);
        }
        let kinds = self.tokens.iter().zip(&self.kinds).filter(|(token, _)| !token.is_empty());
        let added = kinds.filter_map(|(token, kind)| match kind {
            TokenKind::Control | TokenKind::Unknown => Some(AddedToken::from(token.clone(), true).normalized(false)),
            TokenKind::UserDefined => Some(AddedToken::from(token.clone(), false).normalized(false)),
            _ => None,
        });
        Tokenizer::from_parts(&settings, model, added.collect())
    }

    fn template(&self, begin: Option<u32>) -> Value {
        let special = |id: u32| json!({ "SpecialToken": { "id": self.tokens[id as usize], "type_id": 0 } });
        let text = |name: &str, kind: u32| json!({ "Sequence": { "id": name, "type_id": kind } });
        let around = |sequence: Vec<Value>| -> Vec<Value> {
            begin.map(special).into_iter().chain(sequence).chain(self.end.map(special)).collect()
        };
        let used = [begin, self.end].into_iter().flatten().map(|id| {
            let token = &self.tokens[id as usize];
            (token.clone(), json!({ "id": token, "ids": [id], "tokens": [token] }))
        });
        json!({
            "type": "TemplateProcessing", "single": around(vec![text("A", 0)]),
            "pair": around(vec![text("A", 0), text("B", 1)]),
            "special_tokens": used.collect::<serde_json::Map<String, Value>>(),
        })
    }
}

impl Rule {
    fn json(self) -> Value {
        json!({ "type": "Split", "pattern": { "Regex": self.0 }, "behavior": "Isolated", "invert": false })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vocabulary(pattern: Option<&str>, merges: &[&str]) -> Vocabulary {
        let tokens: Vec<String> = ["a", "b", "ab", "<end>"].map(String::from).into();
        let kinds = vec![TokenKind::Normal, TokenKind::Normal, TokenKind::Normal, TokenKind::Control];
        let merges = merges.iter().map(|merge| merge.to_string()).collect();
        let model = VocabularyModel::BytePairs { merges, pattern: pattern.map(String::from) };
        Vocabulary { model, tokens, kinds, unknown: None, begin: Some(3), adds_begin: None, end: None }
    }

    #[test]
    fn an_unknown_pattern_is_named_with_what_is_taken_for_it() {
        let (tokenizer, assumed) = Tokenizer::of_vocabulary(&vocabulary(Some("mars"), &["a b"])).expect("a tokenizer");
        let assumed = assumed.expect("a warning");
        assert!(assumed.contains("'mars'") && assumed.contains("'default'"), "{assumed}");
        assert_eq!(tokenizer.encode("ab<end>a").expect("known text"), [2, 3, 0]);
        let (_, assumed) = Tokenizer::of_vocabulary(&vocabulary(None, &["a b"])).expect("a tokenizer");
        assert!(assumed.expect("a warning").contains("names no pre-tokenizer pattern"));
        let (tokenizer, assumed) = Tokenizer::of_vocabulary(&vocabulary(Some("llama-bpe"), &["a b"])).expect("one");
        assert_eq!(assumed, None);
        assert_eq!(tokenizer.encode_prompt("ab").expect("known text"), [3, 2]);
    }

    #[test]
    fn a_damaged_vocabulary_is_refused() {
        let refusal = |vocabulary: &Vocabulary| Tokenizer::of_vocabulary(vocabulary).expect_err("damaged").to_string();
        assert!(refusal(&vocabulary(None, &["ab"])).contains("'ab' is not two tokens"));
        assert!(refusal(&vocabulary(None, &["a c"])).contains("c"));
        let good = vocabulary(None, &["a b"]);
        assert!(refusal(&Vocabulary { begin: Some(4), ..good.clone() }).contains("no token 4"));
        assert!(refusal(&Vocabulary { kinds: Vec::new(), ..good.clone() }).contains("4 tokens have 0 types"));
        let model = VocabularyModel::SentencePiece { scores: vec![0.0; 3], space_before: true };
        assert!(refusal(&Vocabulary { model, ..good }).contains("4 tokens have 3 scores"));
    }
}
