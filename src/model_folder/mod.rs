//! What a model's folder, or the GGUF file of one, has beside the weights, and what is worth saying
//! of it.

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
/// If it is missing, damaged, or of a kind that is not read.
pub(crate) fn tokenizer(model: &Path) -> Result<Tokenizer, Failure> {
    match ModelFolder::new(model).gguf_metadata()? {
        Some(metadata) => gguf::tokenizer(model, &metadata),
        None => Ok(Tokenizer::load(&model.join(TOKENIZER))?),
    }
}

/// The tokens that a GGUF file says end a text; none of a folder.
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

/// Names the keys of `config.json`, or of a GGUF file, that are passed over, on stderr, and says
/// where the context is shorter than it says.
///
/// # Errors
/// If the file is missing, damaged, or describes nothing that can be built.
pub(crate) fn warn_of_config(folder: &Path) -> Result<(), Failure> {
    let files = ModelFolder::new(folder);
    let unknown = files.unknown_keys()?;
    if !unknown.is_empty() {
        let described = if files.is_gguf() { folder.to_path_buf() } else { folder.join("config.json") };
        let (shown, keys) = (described, unknown.join(", "));
        eprintln!("warning: {}: nothing is known of {keys}, which may change what the model computes", shown.display());
    }
    let (_, config) = files.config()?;
    // In GGUF files factors may hold for the whole context.
    if let Positions::Rotary { scaling: RotaryScaling::LongRope { .. }, .. } = config.positions
        && !files.is_gguf()
    {
        let (shown, context) = (folder.display(), config.context_length);
        eprintln!(
            "note: {shown}: the context is {context} tokens, as far as the short factors of its longrope are for"
        );
    }
    Ok(())
}

/// Refuses tokens that a model of `vocab_size` tokens has no row for: a tokenizer may have more.
///
/// # Errors
/// With the first of them.
pub(crate) fn assert_known(tokens: &[u32], vocab_size: usize, tokenizer: &Tokenizer) -> Result<(), Failure> {
    match tokens.iter().find(|token| **token as usize >= vocab_size) {
        None => Ok(()),
        Some(token) => {
            let name = tokenizer.token(*token).map_or(String::new(), |name| format!(" ('{name}')"));
            let last = vocab_size.saturating_sub(1);
            Err(Failure::new(format!("the text has token {token}{name}, but the model knows 0 to {last} only")))
        }
    }
}
