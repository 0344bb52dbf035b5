//! The vocabulary of a tokenizer for a GGUF file: the inverse of [`Tokenizer::of_vocabulary`].

use std::collections::{HashMap, HashSet};

use serde_json::Value;

use super::patterns::Pattern;
use super::{SPACE, TokenKind, Vocabulary, VocabularyModel};
use crate::error::DataError;
use crate::tokenizer::Tokenizer;

/// Score of a piece that no merge produces.
const UNMERGED: f64 = -1e6;

impl Tokenizer {
    /// Its vocabulary, and notes on what GGUF cannot express.
    ///
    /// # Errors
    /// If it is neither byte-level BPE nor SentencePiece BPE, or a setting that changes tokens cannot be
    /// expressed in GGUF; the setting is named.
    pub fn vocabulary(&self) -> Result<(Vocabulary, Vec<String>), DataError> {
        let state: Value = serde_json::from_str(&self.to_json()?).map_err(|error| cannot(error.to_string()))?;
        Settings { state: &state, tokens: self }.vocabulary()
    }
}

fn cannot(reason: impl std::fmt::Display) -> DataError {
    DataError::Tokenizer(format!("GGUF cannot express the tokenizer: {reason}"))
}

/// A `tokenizer.json`.
struct Settings<'a> {
    state: &'a Value,
    tokens: &'a Tokenizer,
}

/// The parts of a setting: one, or those of a sequence.
fn parts<'a>(setting: &'a Value, several: &str) -> Vec<&'a Value> {
    match setting[several].as_array() {
        Some(parts) if setting["type"] == "Sequence" => {
            parts.iter().flat_map(|part| self::parts(part, several)).collect()
        }
        _ if setting.is_null() => Vec::new(),
        _ => vec![setting],
    }
}

fn kind(setting: &Value) -> &str {
    setting["type"].as_str().unwrap_or("unknown")
}

impl Settings<'_> {
    fn vocabulary(&self) -> Result<(Vocabulary, Vec<String>), DataError> {
        let model = &self.state["model"];
        if model["type"] != "BPE" {
            let model = kind(model);
            return Err(cannot(format!(
                "its model is {model}, not BPE: train with a tokenizer of `fireclay tokenizer train`"
            )));
        }
        for name in ["dropout", "continuing_subword_prefix", "end_of_word_suffix"] {
            let value = &model[name];
            if !(value.is_null() || *value == "" || value.as_f64() == Some(0.0)) {
                return Err(cannot(format!("{name} is {value}")));
            }
        }
        let mut notes = Vec::new();
        let tokens = self.names()?;
        let kinds = self.kinds(&tokens, &mut notes);
        let unknown = model["unk_token"].as_str().and_then(|name| self.tokens.token_id(name));
        let (begin, end) = self.around()?;
        let mut vocabulary = Vocabulary {
            model: VocabularyModel::BytePairs { merges: Vec::new(), pattern: None },
            tokens,
            kinds,
            unknown,
            begin,
            adds_begin: Some(begin.is_some()),
            end,
        };
        vocabulary.model = match model["byte_fallback"] == true {
            true => self.sentence_piece(&vocabulary, &mut notes)?,
            false => self.byte_pairs()?,
        };
        Ok((vocabulary, notes))
    }

    /// Tokens by id, with placeholders for gaps.
    fn names(&self) -> Result<Vec<String>, DataError> {
        let name = |id: u32| self.tokens.token(id).unwrap_or_else(|| format!("[PAD{id}]"));
        let names: Vec<String> = (0..self.tokens.vocab_size() as u32).map(name).collect();
        let mut known = HashSet::new();
        match names.iter().find(|name| !known.insert(&name[..])) {
            Some(twice) => Err(cannot(format!("there are two tokens '{twice}'"))),
            None => Ok(names),
        }
    }

    fn kinds(&self, tokens: &[String], notes: &mut Vec<String>) -> Vec<TokenKind> {
        let fallback = self.state["model"]["byte_fallback"] == true;
        let is_byte = |name: &str| name.len() == 6 && name.starts_with("<0x") && name.ends_with('>');
        let of = |(id, name): (usize, &String)| match self.tokens.token(id as u32) {
            None => TokenKind::Unused,
            Some(_) if fallback && is_byte(name) => TokenKind::Byte,
            Some(_) if self.state["model"]["unk_token"] == name[..] => TokenKind::Unknown,
            Some(_) => TokenKind::Normal,
        };
        let mut kinds: Vec<TokenKind> = tokens.iter().enumerate().map(of).collect();
        let mut stripped = Vec::new();
        for added in self.state["added_tokens"].as_array().into_iter().flatten() {
            let id = added["id"].as_u64().and_then(|id| usize::try_from(id).ok());
            let Some(kind) = id.and_then(|id| kinds.get_mut(id)) else { continue };
            if *kind == TokenKind::Normal {
                *kind = if added["special"] == true { TokenKind::Control } else { TokenKind::UserDefined };
            }
            if ["lstrip", "rstrip", "single_word"].iter().any(|flag| added[*flag] == true) {
                stripped.extend(added["content"].as_str());
            }
        }
        if !stripped.is_empty() {
            let names = stripped.join(", ");
            notes.push(format!("the tokenizer strips spaces around {names}, which GGUF cannot express: they are kept"));
        }
        kinds
    }

    /// The tokens added before and after a text.
    fn around(&self) -> Result<(Option<u32>, Option<u32>), DataError> {
        let (mut begin, mut end) = (None, None);
        for processor in parts(&self.state["post_processor"], "processors") {
            match kind(processor) {
                "ByteLevel" => {}
                "TemplateProcessing" => {
                    let id =
                        |part: &Value| part["SpecialToken"]["id"].as_str().and_then(|name| self.tokens.token_id(name));
                    let single = processor["single"].as_array().map_or(&[][..], Vec::as_slice);
                    let text = single.iter().position(|part| part.get("Sequence").is_some());
                    let around = text.map(|text| (&single[..text], &single[text + 1..]));
                    let Some((before, behind)) = around.filter(|(a, b)| a.len() < 2 && b.len() < 2) else {
                        return Err(cannot("post_processor adds more than a token before a text and one behind it"));
                    };
                    (begin, end) = (before.first().and_then(id), behind.first().and_then(id));
                }
                other => return Err(cannot(format!("post_processor is {other}"))),
            }
        }
        Ok((begin, end))
    }

    fn merges(&self) -> Vec<(String, String)> {
        let pair = |merge: &Value| match merge {
            Value::String(text) => text.split_once(' ').map(|(one, other)| (one.to_string(), other.to_string())),
            pair => Some((pair[0].as_str()?.to_string(), pair[1].as_str()?.to_string())),
        };
        self.state["model"]["merges"].as_array().into_iter().flatten().filter_map(pair).collect()
    }

    fn byte_pairs(&self) -> Result<VocabularyModel, DataError> {
        let normalizes = match parts(&self.state["normalizer"], "normalizers")[..] {
            [] => false,
            [normalizer] if kind(normalizer) == "NFC" => true,
            [normalizer, ..] => return Err(cannot(format!("normalizer is {}", kind(normalizer)))),
        };
        let mut rules: Vec<String> = Vec::new();
        let cutters = parts(&self.state["pre_tokenizer"], "pretokenizers");
        if cutters.last().is_none_or(|last| kind(last) != "ByteLevel") {
            let last = cutters.last().map_or("missing", |last| kind(last));
            return Err(cannot(format!("pre_tokenizer is {last}, and only ByteLevel can be")));
        }
        for cutter in cutters {
            match kind(cutter) {
                "ByteLevel" if cutter["add_prefix_space"] == true => {
                    return Err(cannot("pre_tokenizer.add_prefix_space is true"));
                }
                "ByteLevel" if cutter["use_regex"] != false => rules.push(super::patterns::GPT2.0.into()),
                "ByteLevel" => {}
                "Digits" if cutter["individual_digits"] == true => rules.push(super::patterns::DIGIT.0.into()),
                "Digits" => rules.push(super::patterns::DIGITS.0.into()),
                "Split" => {
                    let isolates = cutter["behavior"] == "Isolated" && cutter["invert"] == false;
                    let keeps = cutter["behavior"] == "Removed" && cutter["invert"] == true;
                    match cutter["pattern"]["Regex"].as_str().filter(|_| isolates || keeps) {
                        Some(rule) => rules.push(rule.into()),
                        None => return Err(cannot(format!("pre_tokenizer has Split as {}", cutter["behavior"]))),
                    }
                }
                other => return Err(cannot(format!("pre_tokenizer is {other}"))),
            }
        }
        let whole_words = self.state["model"]["ignore_merges"] == true;
        let pattern = Pattern::name_of(&rules, whole_words, normalizes).ok_or_else(|| {
            let with = if whole_words { ", and ignore_merges is set" } else { "" };
            cannot(format!("it cuts text by {rules:?}{with}, which has no name in GGUF files"))
        })?;
        let merges = self.merges();
        if let Some((one, other)) = merges.iter().find(|(one, other)| one.contains(' ') || other.contains(' ')) {
            return Err(cannot(format!("a merge of '{one}' and '{other}' has a space in a token")));
        }
        let merges = merges.into_iter().map(|(one, other)| format!("{one} {other}")).collect();
        Ok(VocabularyModel::BytePairs { merges, pattern: Some(pattern.into()) })
    }

    fn sentence_piece(&self, vocabulary: &Vocabulary, notes: &mut Vec<String>) -> Result<VocabularyModel, DataError> {
        let (mut space_before, mut replaces) = (false, false);
        for normalizer in parts(&self.state["normalizer"], "normalizers") {
            match kind(normalizer) {
                "Prepend" if normalizer["prepend"] == SPACE => space_before = true,
                "Replace" if normalizer["pattern"]["String"] == " " && normalizer["content"] == SPACE => {
                    replaces = true
                }
                other => return Err(cannot(format!("normalizer has {other}"))),
            }
        }
        for cutter in parts(&self.state["pre_tokenizer"], "pretokenizers") {
            if kind(cutter) != "Metaspace" || cutter["replacement"] != SPACE || cutter["split"] != false {
                return Err(cannot(format!(
                    "pre_tokenizer is {}, and only Metaspace without split can be",
                    kind(cutter)
                )));
            }
            replaces = true;
            space_before |= cutter["prepend_scheme"] != "never";
            if cutter["prepend_scheme"] == "first" {
                notes.push("behind a control token a space is put before text, which the tokenizer does not".into());
            }
        }
        if !replaces {
            return Err(cannot(format!("nothing makes {SPACE} of a space")));
        }
        let merges = self.merges();
        let mut ranks: HashMap<String, usize> = HashMap::new();
        for (rank, (one, other)) in merges.iter().enumerate() {
            ranks.entry(format!("{one}{other}")).or_insert(rank);
        }
        let score = |token: &String| ranks.get(token).map_or(UNMERGED, |rank| -(*rank as f64) - 1.0);
        let scores: Vec<f64> = vocabulary.tokens.iter().map(score).collect();
        // Scores are equivalent only if merges contain every pair that makes a piece.
        let normal: HashSet<&str> = {
            let kinds = vocabulary.tokens.iter().zip(&vocabulary.kinds);
            kinds.filter(|(_, kind)| **kind == TokenKind::Normal).map(|(token, _)| &token[..]).collect()
        };
        let made = vocabulary.merges(&scores);
        let listed: Vec<&(String, String)> = merges
            .iter()
            .filter(|(one, other)| {
                [&format!("{one}{other}"), one, other].into_iter().all(|piece| normal.contains(&piece[..]))
            })
            .collect();
        let listed_set: HashSet<&(String, String)> = listed.iter().copied().collect();
        if let Some((one, other)) = made.iter().find(|pair| !listed_set.contains(pair)) {
            return Err(cannot(format!("no merge is of '{one}' and '{other}', and SentencePiece has them all")));
        }
        if !made.iter().eq(listed) {
            notes.push("some pieces are merged in another order than the tokenizer's".into());
        }
        Ok(VocabularyModel::SentencePiece { scores, space_before })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pieces() -> Value {
        let vocab = ["<unk>", "<s>", "</s>", "<0x0A>", "▁", "a", "b", "▁a", "ab", "▁ab"];
        let vocab: serde_json::Map<String, Value> =
            vocab.iter().zip(0..).map(|(name, id)| (name.to_string(), json!(id))).collect();
        let added = |id: u32, content: &str| {
            json!({ "id": id, "content": content, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true })
        };
        json!({
            "version": "1.0", "added_tokens": [added(0, "<unk>"), added(1, "<s>"), added(2, "</s>")],
            "normalizer": { "type": "Sequence", "normalizers": [
                { "type": "Prepend", "prepend": "▁" },
                { "type": "Replace", "pattern": { "String": " " }, "content": "▁" },
            ] },
            "post_processor": { "type": "TemplateProcessing",
                "single": [
                    { "SpecialToken": { "id": "<s>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } },
                ],
                "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 0 } }],
                "special_tokens": { "<s>": { "id": "<s>", "ids": [1], "tokens": ["<s>"] } } },
            "model": { "type": "BPE", "byte_fallback": true, "fuse_unk": true, "unk_token": "<unk>", "vocab": vocab,
                "merges": [["▁", "a"], ["a", "b"], ["▁a", "b"], ["▁", "ab"]] },
        })
    }

    #[test]
    fn pieces_of_sentence_piece_get_scores_by_which_they_are_merged_in_the_same_order() {
        let tokenizer = Tokenizer::from_json(&pieces()).expect("a tokenizer");
        let (vocabulary, notes) = tokenizer.vocabulary().expect("a vocabulary");
        assert_eq!(notes, Vec::<String>::new());
        let VocabularyModel::SentencePiece { scores, space_before: true } = &vocabulary.model else { panic!("pieces") };
        assert_eq!(scores[7..], [-1.0, -2.0, -3.0]);
        assert_eq!((vocabulary.begin, vocabulary.adds_begin, vocabulary.end), (Some(1), Some(true), None));
        let numbers: Vec<i32> = vocabulary.kinds.iter().map(|kind| kind.number()).collect();
        assert_eq!(numbers, [2, 3, 3, 6, 1, 1, 1, 1, 1, 1]);
        let (again, _) = Tokenizer::of_vocabulary(&vocabulary).expect("a tokenizer");
        for text in ["ab a b", "aab", "\n", "<s>ab", "c"] {
            assert_eq!(
                again.encode_prompt(text).expect("ids"),
                tokenizer.encode_prompt(text).expect("ids"),
                "{text:?}"
            );
        }
    }

    #[test]
    fn pieces_that_no_scores_stand_for_are_refused() {
        let refusal = |change: &dyn Fn(&mut Value)| {
            let mut state = pieces();
            change(&mut state);
            Tokenizer::from_json(&state).expect("a tokenizer").vocabulary().expect_err("no such files").to_string()
        };
        let message = refusal(&|state| state["model"]["merges"] = json!([["▁", "a"], ["a", "b"], ["▁a", "b"]]));
        assert!(message.contains("no merge is of '▁' and 'ab'"), "{message}");
        let message = refusal(&|state| state["normalizer"] = json!(null));
        assert!(message.contains("nothing makes ▁ of a space"), "{message}");
        let message = refusal(&|state| state["normalizer"] = json!({ "type": "NFKC" }));
        assert!(message.contains("normalizer has NFKC"), "{message}");
    }
}
