//! Loads a language model's folder or GGUF file: the transformer and its tokenizer.

use std::io::{IsTerminal, Write};
use std::path::Path;

use fireclay_datasets::Tokenizer;
use fireclay_kernels::Backend;
use fireclay_model::{AttentionDirection, LoraFiles, ModelFolder, Transformer};

use crate::failure::Failure;
use crate::model_folder::{ModelSource, tokenizer, warn_of_config};
use crate::precision::Precision;

/// Size from which loading shows its progress, in bytes.
const LARGE: u64 = 256 << 20;

/// A text-generating transformer with its tokenizer.
pub struct LanguageModel<B: Backend> {
    /// The transformer, with matrices in the requested precision.
    pub model: Transformer<B>,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
}

impl<B: Backend> LanguageModel<B> {
    /// Opens a folder in the hub's layout, or a GGUF file; shows the progress of a large one on a
    /// terminal.
    ///
    /// # Errors
    /// If a file is missing or damaged, the model is not a language model, or the device lacks the
    /// precision.
    pub fn open(model: impl Into<ModelSource>, precision: Precision, device: &B::Device) -> Result<Self, Failure> {
        let source = model.into();
        let folder = source.weights();
        let files = source.files()?;
        let (_, config) = files.config()?;
        let shown = folder.display();
        if config.attention == AttentionDirection::Bidirectional {
            return Err(Failure::new(format!("{shown}: an encoder, which cannot generate text")));
        }
        warn_of_config(folder)?;
        let tokenizer = tokenizer(source.text())?;
        let model = precision.load::<B>(&files, &mut show_reading(folder), device)?;
        if std::io::stderr().is_terminal() && files.is_gguf() {
            eprintln!("{shown}: {}", precision.described(&files)?);
        }
        Ok(Self { model, tokenizer })
    }
}

/// An adapter that can share a model's weights with others.
///
/// # Errors
/// If it is missing or damaged, or changes more than linear layers.
pub(crate) fn shared_adapter(folder: &Path) -> Result<LoraFiles, Failure> {
    let files = LoraFiles::open(folder)?;
    match files.saved_module() {
        None => Ok(files),
        Some(saved) => Err(Failure::usage(format!(
            "{}: it saves {saved} whole, so that it cannot share weights with others: merge it with `fireclay merge`",
            folder.display()
        ))),
    }
}

/// `model` with the adapter of `source` next to its weights, which both share.
///
/// # Errors
/// If the adapter is missing or damaged, does not fit, or changes more than linear layers.
pub(crate) fn adapted<B: Backend>(model: &Transformer<B>, source: &ModelSource) -> Result<Transformer<B>, Failure> {
    let Some(adapter) = source.adapter() else { return Err(Failure::new("there is no adapter")) };
    let (files, shown) = (shared_adapter(adapter)?, adapter.display());
    let (family, _) = ModelFolder::new(source.weights()).config()?;
    let model = model.clone().with_lora(family, files.config(), Some(&files), 0);
    model.map_err(|reason| Failure::new(format!("{shown}: {reason}")))
}

/// Shows loading progress on a terminal, and clears it at the end.
fn show_reading(folder: &Path) -> impl FnMut(u64, u64) {
    let (shown, terminal) = (folder.display().to_string(), std::io::stderr().is_terminal());
    let mut percent = u64::MAX;
    move |done, total| {
        let now = 100 * done / total.max(1);
        if !terminal || total < LARGE || now == percent {
            return;
        }
        percent = now;
        let mut line = format!("\rloading {shown}: {percent:>3}% of {:.2} GB", total as f64 / 1e9);
        if done == total {
            line = format!("\r{:width$}\r", "", width = line.chars().count());
        }
        let mut stderr = std::io::stderr();
        // A closed terminal is not an error.
        let _ = stderr.write_all(line.as_bytes()).and_then(|()| stderr.flush());
    }
}
