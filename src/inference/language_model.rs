//! A language model's folder, or its GGUF file, opened: the transformer and its tokenizer.

use std::io::{IsTerminal, Write};
use std::path::Path;

use fireclay_datasets::Tokenizer;
use fireclay_kernels::Backend;
use fireclay_model::{AttentionDirection, ModelFolder, Transformer};

use crate::failure::Failure;
use crate::model_folder::{tokenizer, warn_of_config};
use crate::precision::Precision;

/// Bytes of a model from which on its reading is shown.
const LARGE: u64 = 256 << 20;

/// A transformer that writes, with its tokenizer.
pub struct LanguageModel<B: Backend> {
    /// The transformer, its matrices in the precision asked for.
    pub model: Transformer<B>,
    /// How text becomes tokens.
    pub tokenizer: Tokenizer,
}

impl<B: Backend> LanguageModel<B> {
    /// Opens a folder as the hub lays it out, or a GGUF file; how far a large one is read shows on
    /// a terminal.
    ///
    /// # Errors
    /// If a file is missing or damaged, the model is no language model, or the device lacks the precision.
    pub fn open(folder: &Path, precision: Precision, device: &B::Device) -> Result<Self, Failure> {
        let files = ModelFolder::new(folder);
        let (_, config) = files.config()?;
        let shown = folder.display();
        if config.attention == AttentionDirection::Bidirectional {
            return Err(Failure::new(format!("{shown}: an encoder, which cannot write text")));
        }
        warn_of_config(folder)?;
        let tokenizer = tokenizer(folder)?;
        let model = precision.load::<B>(&files, &mut show_reading(folder), device)?;
        Ok(Self { model, tokenizer })
    }
}

/// Shows on a terminal how many bytes of how many are read, and nothing more when they all are.
fn show_reading(folder: &Path) -> impl FnMut(u64, u64) {
    let (shown, terminal) = (folder.display().to_string(), std::io::stderr().is_terminal());
    let mut percent = u64::MAX;
    move |done, total| {
        let now = 100 * done / total.max(1);
        if !terminal || total < LARGE || now == percent {
            return;
        }
        percent = now;
        let mut line = format!("\rreading {shown}: {percent:>3}% of {:.2} GB", total as f64 / 1e9);
        if done == total {
            line = format!("\r{:width$}\r", "", width = line.chars().count());
        }
        let mut stderr = std::io::stderr();
        // A terminal that is gone is no reason to stop.
        let _ = stderr.write_all(line.as_bytes()).and_then(|()| stderr.flush());
    }
}
