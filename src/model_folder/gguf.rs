//! Tokenizer, chat templates and stop tokens of a GGUF file.

use std::path::Path;

use fireclay_datasets::{TokenKind, Tokenizer, Vocabulary, VocabularyModel};
use fireclay_kernels::notices::{Level, notice};
use fireclay_model::{ConfigError, GgufMetadata};
use serde_json::{Map, Value};

use super::Templates;
use crate::failure::Failure;

/// Special tokens: their names in templates and vocabularies, and in GGUF keys.
pub(crate) const SPECIAL: [(&str, &str); 7] = [
    ("bos_token", "bos"),
    ("eos_token", "eos"),
    ("unk_token", "unknown"),
    // Spelled as in the format.
    ("sep_token", "seperator"),
    ("pad_token", "padding"),
    ("cls_token", "cls"),
    ("mask_token", "mask"),
];
/// Stop tokens: end of text, of a turn, or of a message that waits for a tool.
pub(crate) const ENDS: [&str; 3] = ["eos", "eot", "eom"];
pub(crate) const TEMPLATE: &str = "tokenizer.chat_template";

/// The id of a special token.
fn id(metadata: &GgufMetadata, name: &str) -> Result<Option<u32>, ConfigError> {
    // An invalid id means no token.
    Ok(metadata.size(&format!("tokenizer.ggml.{name}_token_id"))?.filter(|id| *id != u32::MAX))
}

/// The tokenizer; prints assumptions on stderr.
///
/// # Errors
/// If it is missing, of an unsupported kind, or damaged.
pub(super) fn tokenizer(path: &Path, metadata: &GgufMetadata) -> Result<Tokenizer, Failure> {
    let shown = path.display();
    let about = |failure: Failure| failure.about(&shown.to_string());
    let vocabulary = vocabulary(metadata).map_err(about)?;
    let (tokenizer, assumed) =
        Tokenizer::of_vocabulary(&vocabulary).map_err(|error| about(Failure::new(error.to_string())))?;
    if let Some(assumed) = assumed {
        notice(Level::Warning, &format!("{shown}: {assumed}"));
    }
    Ok(tokenizer)
}

fn vocabulary(metadata: &GgufMetadata) -> Result<Vocabulary, Failure> {
    let missing = |key: &str| Failure::new(format!("no tokenizer: {key} is missing"));
    let list = |name: &str| metadata.numbers(&format!("tokenizer.ggml.{name}"));
    let key = "tokenizer.ggml.model";
    let model = match metadata.string(key)?.ok_or_else(|| missing(key))? {
        "gpt2" => {
            let key = "tokenizer.ggml.merges";
            let merges = metadata.strings(key)?.ok_or_else(|| missing(key))?.to_vec();
            VocabularyModel::BytePairs { merges, pattern: metadata.string("tokenizer.ggml.pre")?.map(String::from) }
        }
        "llama" => {
            let scores = list("scores")?.ok_or_else(|| missing("tokenizer.ggml.scores"))?.to_vec();
            for key in ["tokenizer.ggml.remove_extra_whitespaces", "tokenizer.ggml.precompiled_charsmap"] {
                let asked = metadata.flag(key).ok().flatten() == Some(true)
                    || metadata.numbers(key).ok().flatten().is_some_and(|map| !map.is_empty());
                if asked {
                    return Err(Failure::new(format!("{key} is set, which is not supported")));
                }
            }
            let space_before = metadata.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
            VocabularyModel::SentencePiece { scores, space_before }
        }
        other => {
            return Err(Failure::new(format!("{key} '{other}' is not supported; supported are gpt2 and llama")));
        }
    };
    let key = "tokenizer.ggml.tokens";
    let tokens = metadata.strings(key)?.ok_or_else(|| missing(key))?.to_vec();
    let kinds = match list("token_type")? {
        Some(kinds) => kinds.iter().map(|kind| TokenKind::of(*kind)).collect(),
        None => vec![TokenKind::Normal; tokens.len()],
    };
    // SentencePiece's defaults.
    let pieces = matches!(model, VocabularyModel::SentencePiece { .. }) && tokens.len() > 2;
    let usual = |id: u32| pieces.then_some(id);
    Ok(Vocabulary {
        unknown: id(metadata, "unknown")?.or(usual(0)),
        begin: id(metadata, "bos")?.or(usual(1)),
        adds_begin: metadata.flag("tokenizer.ggml.add_bos_token")?,
        end: match metadata.flag("tokenizer.ggml.add_eos_token")? {
            Some(true) => id(metadata, "eos")?.or(usual(2)),
            _ => None,
        },
        model,
        tokens,
        kinds,
    })
}

/// The stop tokens.
///
/// # Errors
/// If an id is invalid.
pub(super) fn ends(metadata: &GgufMetadata) -> Result<Vec<u32>, Failure> {
    let found = ENDS.into_iter().map(|name| id(metadata, name)).collect::<Result<Vec<_>, _>>()?;
    Ok(found.into_iter().flatten().collect())
}

/// Chat templates by name, a single one called `default`, and special tokens by name.
///
/// # Errors
/// If one of them is not a string.
pub(super) fn templates(metadata: &GgufMetadata) -> Result<Templates, Failure> {
    let mut templates = Vec::new();
    let alone = metadata.string(TEMPLATE)?.map(|text| ("default".to_string(), text.to_string()));
    templates.extend(alone);
    for name in metadata.strings("tokenizer.chat_templates")?.unwrap_or_default() {
        let further = metadata.string(&format!("{TEMPLATE}.{name}"))?;
        templates.extend(further.map(|text| (name.clone(), text.to_string())));
    }
    let tokens = metadata.strings("tokenizer.ggml.tokens")?.unwrap_or_default();
    let mut special = Map::new();
    for (name, key) in SPECIAL {
        let token = id(metadata, key)?.and_then(|id| tokens.get(id as usize));
        special.extend(token.map(|token| (name.to_string(), Value::from(token.clone()))));
    }
    Ok((templates, special))
}

#[cfg(test)]
mod tests {
    use fireclay_model::ModelFolder;

    use super::*;

    fn golden(name: &str) -> std::path::PathBuf {
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/gguf")).join(name)
    }

    fn opened(path: &Path) -> Result<Tokenizer, Failure> {
        super::super::tokenizer(path)
    }

    #[test]
    fn vocabularies_give_the_ids_of_the_tokenizers_that_they_came_from() {
        let golden_ids: Value =
            serde_json::from_slice(&std::fs::read(golden("tokenizers.json")).expect("a golden file")).expect("JSON");
        let samples: Vec<String> = serde_json::from_value(golden_ids["samples"].clone()).expect("strings");
        let vocabularies = golden_ids["vocabularies"].as_object().expect("vocabularies");
        assert!(vocabularies.len() > 6, "all of them");
        let mut wrong = Vec::new();
        for (name, ids) in vocabularies {
            let tokenizer = opened(&golden(&format!("vocab-{name}.gguf"))).expect("a tokenizer");
            let ids: Vec<Vec<u32>> = serde_json::from_value(ids.clone()).expect("ids");
            for (text, wanted) in samples.iter().zip(ids) {
                let own = tokenizer.encode_prompt(text).expect("any text");
                if own != wanted {
                    wrong.push(format!("{name} {text:?}: {own:?}, and not {wanted:?}"));
                }
                // NFC cannot be undone, and control tokens are not decoded.
                let shown = tokenizer.decode(&wanted).expect("known tokens");
                let spells_more = text.contains(['<', '\u{301}']);
                if !spells_more && shown != *text {
                    wrong.push(format!("{name} {text:?} comes back as {shown:?}"));
                }
            }
        }
        assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
    }

    #[test]
    fn vocabularies_go_into_a_file_as_they_came_out_of_one() {
        let samples = ["It's a kiln, 1250 °C.\n\n  ÉCOLE", "<think>a</s>  b", "<|im_start|>x", "세계 ½ naïve café"];
        let files = std::fs::read_dir(golden("")).expect("golden files");
        let mut seen = 0;
        for path in files.map(|entry| entry.expect("a file").path()) {
            if !path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("vocab-")) {
                continue;
            }
            let metadata = ModelFolder::new(&path).gguf_metadata().expect("good").expect("a GGUF file");
            let wanted = vocabulary(&metadata).expect("a vocabulary");
            let tokenizer = opened(&path).expect("a tokenizer");
            let (own, notes) = tokenizer.vocabulary().unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            assert_eq!(notes, Vec::<String>::new(), "{}", path.display());
            assert_eq!((&own.tokens, &own.kinds), (&wanted.tokens, &wanted.kinds), "{}", path.display());
            if let VocabularyModel::BytePairs { .. } = wanted.model {
                assert_eq!(own.model, wanted.model, "{}", path.display());
            }
            let (again, assumed) = Tokenizer::of_vocabulary(&own).expect("a tokenizer");
            assert_eq!(assumed, None);
            for text in samples {
                let ids = |tokenizer: &Tokenizer| tokenizer.encode_prompt(text).expect("any text");
                assert_eq!(ids(&again), ids(&tokenizer), "{}: {text:?}", path.display());
            }
            seen += 1;
        }
        assert!(seen > 6, "all of them");
    }

    #[test]
    fn templates_special_tokens_and_ends_come_from_the_metadata() {
        let metadata = |name: &str| ModelFolder::new(golden(name)).gguf_metadata().expect("good").expect("a GGUF file");
        let qwen2 = metadata("qwen2.gguf");
        let (found, special) = templates(&qwen2).expect("templates");
        assert_eq!(found.len(), 1);
        assert!(found[0].0 == "default" && found[0].1.contains("<|im_start|>"), "{found:?}");
        assert_eq!((&special["bos_token"], &special["eos_token"]), (&"<|endoftext|>".into(), &"<|im_end|>".into()));
        let tokenizer = tokenizer(&golden("qwen2.gguf"), &qwen2).expect("a tokenizer");
        assert_eq!(ends(&qwen2).expect("ends"), [tokenizer.token_id("<|im_end|>").expect("a token")]);
        assert_eq!(templates(&metadata("vocab-gpt-2.gguf")).expect("none").0.len(), 0);
        let none = vocabulary(&metadata("llama.gguf")).expect_err("no vocabulary").to_string();
        assert!(none.contains("tokenizer.ggml.model is missing"), "{none}");
    }

    #[test]
    fn a_damaged_vocabulary_is_an_error_or_a_tokenizer_and_never_a_panic() {
        for name in ["vocab-sentencepiece.gguf", "vocab-llama-bpe.gguf"] {
            let whole = std::fs::read(golden(name)).expect("a golden file");
            let folder = tempfile::tempdir().expect("a folder");
            let path = folder.path().join("damaged.gguf");
            let mut kept = 0;
            for at in (0..whole.len()).step_by(97) {
                let mut bytes = whole.clone();
                bytes[at] ^= [0xff, 0x01, 0x80][at % 3];
                std::fs::write(&path, &bytes).expect("writable");
                let encoded = opened(&path).map(|tokenizer| tokenizer.encode_prompt("It's a kiln, 1250 °C.\n").is_ok());
                kept += usize::from(encoded.is_ok());
            }
            assert!(kept > 5, "some of it is the letters of tokens: {kept}");
        }
    }
}
