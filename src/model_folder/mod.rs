//! What a model folder or GGUF file has besides the weights, and warnings about it.

mod gguf;
mod source;

use std::path::Path;

use fireclay_datasets::Tokenizer;
use fireclay_kernels::Backend;
use fireclay_kernels::notices::{Level, notice};
use fireclay_model::{ModelFolder, Positions, RotaryScaling};
use serde_json::{Map, Value};

pub(crate) use self::gguf::{ENDS as GGUF_ENDS, SPECIAL as GGUF_SPECIAL, TEMPLATE as GGUF_TEMPLATE};
pub use source::ModelSource;

use crate::failure::Failure;
use crate::run_folder::{TOKENIZER, model_file, write_atomic};

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
        let shown = shown.display();
        let text = format!("{shown}: unknown keys {keys} are ignored and may change the model's results");
        notice(Level::Warning, &text);
    }
    let (_, config) = files.config()?;
    // In GGUF files the factors may be valid for the whole context.
    if let Positions::Rotary { scaling: RotaryScaling::LongRope { .. }, .. } = config.positions
        && !files.is_gguf()
    {
        let (shown, context) = (folder.display(), config.context_length);
        let text =
            format!("{shown}: the context is limited to {context} tokens, the range of longrope's short factors");
        notice(Level::Note, &text);
    }
    Ok(())
}

/// Files of a model's folder besides its weights and its config, which a merged model takes along.
const TEXT_FILES: [&str; 7] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
];

/// Writes a plain model folder with the adapter of `source` merged into its weights, and tokenizer,
/// chat template and end tokens.
///
/// # Errors
/// If `out` holds a model, a file of the model or the adapter is missing or damaged, they do not fit,
/// or the file system refuses.
pub fn merge<B: Backend>(source: &ModelSource, out: &Path, device: &B::Device) -> Result<(), Failure> {
    if let Some(file) = model_file(out) {
        return Err(Failure::new(format!("{} already holds a model, {file}: choose another --out", out.display())));
    }
    let files = source.files()?;
    std::fs::create_dir_all(out).map_err(Failure::io(out))?;
    files.save_merged::<B>(out, device)?;
    for name in TEXT_FILES {
        let from =
            [source.text(), source.weights()].map(|folder| folder.join(name)).into_iter().find(|file| file.is_file());
        if let Some(from) = from {
            let bytes = std::fs::read(&from).map_err(Failure::io(&from))?;
            write_atomic(&out.join(name), &bytes)?;
        }
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
