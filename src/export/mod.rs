//! Exports a model folder as a GGUF file for llama.cpp and similar programs.

mod keys;

use std::io::IsTerminal;
use std::path::PathBuf;

use fireclay_kernels::Backend;
use fireclay_model::{AttentionDirection, GgufKind, ModelFolder, WrittenGguf};

use crate::backend::{OnBackend, RunContext};
use crate::failure::Failure;
use crate::model_folder::{tokenizer, warn_of_config};
use crate::progress::Line;

/// An export. It runs on any backend and computes nothing on the device.
#[derive(Clone, Debug)]
pub struct ExportRun {
    /// The model's folder.
    pub model: PathBuf,
    /// The format of the matrices.
    pub kind: GgufKind,
    /// The file.
    pub out: PathBuf,
}

impl OnBackend for ExportRun {
    type Output = WrittenGguf;

    /// # Errors
    /// If the folder is not a model, GGUF cannot express it or its tokenizer, or the file system fails.
    /// No partial file remains.
    fn run<B: Backend>(self, context: RunContext<B>) -> Result<Self::Output, Failure> {
        let folder = ModelFolder::new(&self.model);
        let shown = self.model.display().to_string();
        if folder.is_gguf() {
            return Err(Failure::new(format!("{shown}: already a GGUF file: pass the model folder it was made from")));
        }
        let (_, config) = folder.config()?;
        if config.attention == AttentionDirection::Bidirectional {
            return Err(Failure::new(format!("{shown}: an encoder; export supports language models only")));
        }
        warn_of_config(&self.model)?;
        let tokenizer = tokenizer(&self.model)?;
        let (keys, mut notes) =
            keys::of(&self.model, &tokenizer, config.vocab_size).map_err(|failure| failure.about(&shown))?;
        let (terminal, mut line, mut percent) = (std::io::stderr().is_terminal(), Line::default(), u64::MAX);
        let out = self.out.display();
        let mut progress = |done: u64, total: u64| {
            let now = 100 * done / total.max(1);
            if terminal && now != percent {
                percent = now;
                line.show(format!("writing {out}: {percent:>3}%"));
            }
        };
        let mut written = folder.export_gguf::<B>(self.kind, &keys, &self.out, &mut progress, &context.device)?;
        notes.append(&mut written.notes);
        Ok(WrittenGguf { notes, ..written })
    }
}
