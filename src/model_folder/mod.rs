//! What a model folder or GGUF file has besides the weights, and warnings about it.

mod gguf;

use std::path::Path;

use fireclay_datasets::Tokenizer;
use fireclay_model::{ModelFolder, Positions, RotaryScaling};
use serde_json::{Map, Value};

pub(crate) use self::gguf::{ENDS as GGUF_ENDS, SPECIAL as GGUF_SPECIAL, TEMPLATE as GGUF_TEMPLATE};
use crate::failure::Failure;
use crate::run_folder::TOKENIZER;

/// The tokenizer of a model.
///
/// # Errors
/// If it is missing, damaged, or of an unsupported kind.
pub(crate) fn tokenizer(model: &Path) -> Result<Tokenizer, Failure> {
    match ModelFolder::new(model).gguf_metadata()? {
        Some(metadata) => gguf::tokenizer(model, &metadata),
        None => Ok(Tokenizer::load(&model.join(TOKENIZER))?),
    }
}

/// The stop tokens of a GGUF file; none for a folder.
///
/// # Errors
/// If the file is damaged.
pub(crate) fn gguf_ends(model: &Path) -> Result<Option<Vec<u32>>, Failure> {
    ModelFolder::new(model).gguf_metadata()?.map(|metadata| gguf::ends(&metadata)).transpose()
}

/// Chat templates and special tokens by name.
pub(crate) type Templates = (Vec<(String, String)>, Map<String, Value>);

/// Those of a GGUF file; none of a folder.
///
/// # Errors
/// If the file is damaged.
pub(crate) fn gguf_templates(model: &Path) -> Result<Option<Templates>, Failure> {
    let read = |metadata| gguf::templates(&metadata).map_err(|failure| failure.about(&model.display().to_string()));
    ModelFolder::new(model).gguf_metadata()?.map(read).transpose()
}

/// Warns on stderr of ignored keys of `config.json` or of a GGUF file, and of a context shorter
/// than they say.
///
/// # Errors
/// If the file is missing, damaged, or describes an unsupported model.
pub(crate) fn warn_of_config(folder: &Path) -> Result<(), Failure> {
    let files = ModelFolder::new(folder);
    let unknown = files.unknown_keys()?;
    if !unknown.is_empty() {
        let described = if files.is_gguf() { folder.to_path_buf() } else { folder.join("config.json") };
        let (shown, keys) = (described, unknown.join(", "));
        eprintln!("warning: {}: unknown keys {keys} are ignored and may change the model's results", shown.display());
    }
    let (_, config) = files.config()?;
    // In GGUF files the factors may be valid for the whole context.
    if let Positions::Rotary { scaling: RotaryScaling::LongRope { .. }, .. } = config.positions
        && !files.is_gguf()
    {
        let (shown, context) = (folder.display(), config.context_length);
        eprintln!("note: {shown}: the context is limited to {context} tokens, the range of longrope's short factors");
    }
    Ok(())
}

/// Refuses tokens beyond a model's `vocab_size`: a tokenizer may have more.
///
/// # Errors
/// Names the first of them.
pub(crate) fn assert_known(tokens: &[u32], vocab_size: usize, tokenizer: &Tokenizer) -> Result<(), Failure> {
    match tokens.iter().find(|token| **token as usize >= vocab_size) {
        None => Ok(()),
        Some(token) => {
            let name = tokenizer.token(*token).map_or(String::new(), |name| format!(" ('{name}')"));
            let last = vocab_size.saturating_sub(1);
            Err(Failure::new(format!("the text has token {token}{name}, but the model's vocabulary is 0 to {last}")))
        }
    }
}
