//! What is worth saying of a model folder, and of tokens that its model lacks.

use std::path::Path;

use fireclay_datasets::Tokenizer;
use fireclay_model::{ModelFolder, Positions, RotaryScaling};

use crate::failure::Failure;

/// Names the keys of `config.json` that are passed over, on stderr, and says where the context is shorter than it says.
///
/// # Errors
/// If the file is missing, damaged, or describes nothing that can be built.
pub(crate) fn warn_of_config(folder: &Path) -> Result<(), Failure> {
    let unknown = ModelFolder::new(folder).unknown_keys()?;
    if !unknown.is_empty() {
        let (shown, keys) = (folder.join("config.json"), unknown.join(", "));
        eprintln!("warning: {}: nothing is known of {keys}, which may change what the model computes", shown.display());
    }
    let (_, config) = ModelFolder::new(folder).config()?;
    if let Positions::Rotary { scaling: RotaryScaling::LongRope { .. }, .. } = config.positions {
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
