//! Metadata of a GGUF file besides the model config: name, tokenizer, special tokens and chat
//! templates.

use std::path::Path;

use fireclay_datasets::{TokenKind, Tokenizer, Vocabulary, VocabularyModel};
use fireclay_model::GgufValue;

use crate::failure::Failure;
use crate::inference::generation::configured_ends;
use crate::inference::template::folder;
use crate::model_folder::{GGUF_ENDS, GGUF_SPECIAL, GGUF_TEMPLATE};

/// Keys and their values.
type Metadata = Vec<(String, GgufValue)>;

/// The metadata, and notes on what GGUF cannot express.
///
/// # Errors
/// If GGUF cannot express the tokenizer, or it has more tokens than the model.
pub(super) fn of(model: &Path, tokenizer: &Tokenizer, vocab_size: usize) -> Result<(Metadata, Vec<String>), Failure> {
    let (mut vocabulary, mut notes) = tokenizer.vocabulary()?;
    let known = vocabulary.tokens.len();
    if known > vocab_size {
        return Err(Failure::new(format!("the tokenizer has {known} tokens, but the model only {vocab_size} rows")));
    }
    // Rows of the model without a token.
    vocabulary.tokens.extend((known..vocab_size).map(|id| format!("[PAD{id}]")));
    vocabulary.kinds.resize(vocab_size, TokenKind::Unused);
    if let VocabularyModel::SentencePiece { scores, .. } = &mut vocabulary.model {
        scores.resize(vocab_size, -1e6);
    }
    let mut keys: Vec<(String, GgufValue)> = Vec::new();
    let mut put = |key: &str, value: GgufValue| keys.push((key.to_string(), value));
    if let Some(name) = std::path::absolute(model).ok().as_deref().and_then(Path::file_name) {
        put("general.name", name.to_string_lossy().into_owned().into());
    }
    put_vocabulary(&vocabulary, &mut put);
    for (name, id) in special_ids(model, tokenizer, &vocabulary, &mut notes)? {
        put(&format!("tokenizer.ggml.{name}_token_id"), id.into());
    }
    let templates = folder::read(model)?.templates;
    let named: Vec<String> =
        templates.iter().map(|(name, _)| name.clone()).filter(|name| name != folder::DEFAULT).collect();
    for (name, source) in templates {
        let key = if name == folder::DEFAULT { GGUF_TEMPLATE.to_string() } else { format!("{GGUF_TEMPLATE}.{name}") };
        put(&key, source.into());
    }
    if !named.is_empty() {
        put("tokenizer.chat_templates", named.into());
    }
    Ok((keys, notes))
}

fn put_vocabulary(vocabulary: &Vocabulary, put: &mut impl FnMut(&str, GgufValue)) {
    match &vocabulary.model {
        VocabularyModel::BytePairs { merges, pattern } => {
            put("tokenizer.ggml.model", "gpt2".into());
            put("tokenizer.ggml.pre", pattern.clone().unwrap_or_default().into());
            put("tokenizer.ggml.merges", merges.clone().into());
        }
        VocabularyModel::SentencePiece { scores, space_before } => {
            put("tokenizer.ggml.model", "llama".into());
            put("tokenizer.ggml.pre", "default".into());
            put("tokenizer.ggml.scores", scores.iter().map(|score| *score as f32).collect::<Vec<_>>().into());
            put("tokenizer.ggml.add_space_prefix", (*space_before).into());
        }
    }
    put("tokenizer.ggml.tokens", vocabulary.tokens.clone().into());
    let kinds: Vec<i32> = vocabulary.kinds.iter().map(|kind| kind.number()).collect();
    put("tokenizer.ggml.token_type", kinds.into());
    put("tokenizer.ggml.add_bos_token", vocabulary.begin.is_some().into());
    put("tokenizer.ggml.add_eos_token", vocabulary.end.is_some().into());
}

/// Ids of special tokens by their GGUF names.
fn special_ids(
    model: &Path,
    tokenizer: &Tokenizer,
    vocabulary: &Vocabulary,
    notes: &mut Vec<String>,
) -> Result<Vec<(&'static str, u32)>, Failure> {
    let named = folder::special_tokens(model)?;
    let id = |name: &str| named.get(name)?.as_str().and_then(|token| tokenizer.token_id(token));
    let mut ids: Vec<(&'static str, u32)> = Vec::new();
    for (name, key) in GGUF_SPECIAL {
        let own = match key {
            "bos" => vocabulary.begin,
            "unknown" => vocabulary.unknown,
            _ => None,
        };
        ids.extend(own.or_else(|| id(name)).filter(|_| key != "eos").map(|id| (key, id)));
    }
    // The end token that the tokenizer adds, then that of its settings, then those of the model's
    // configuration.
    let configured: Vec<u32> =
        configured_ends(model)?.into_iter().filter(|id| (*id as usize) < vocabulary.tokens.len()).collect();
    let mut ends: Vec<u32> = vocabulary.end.into_iter().chain(id("eos_token")).collect();
    ends.extend(configured);
    let mut seen = Vec::new();
    ends.retain(|end| {
        !seen.contains(end) && {
            seen.push(*end);
            true
        }
    });
    ids.extend(GGUF_ENDS.into_iter().zip(ends.iter().copied()));
    if ends.len() > GGUF_ENDS.len() {
        let further: Vec<String> =
            ends[GGUF_ENDS.len()..].iter().map(|id| vocabulary.tokens[*id as usize].clone()).collect();
        notes.push(format!("GGUF stores up to three end tokens; {} will not end a sequence", further.join(", ")));
    }
    Ok(ids)
}
