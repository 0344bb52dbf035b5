//! Text as an encoder reads it: tokens and, if the model's words have types, the type of each.

use std::path::Path;
use std::sync::Arc;

use fireclay_datasets::{Labels, PieceTokenizer, Tokenizer, words};

use crate::failure::Failure;
use crate::inference::tagging::read_labels;
use crate::model_folder::tokenizer;
use crate::run_folder::{LABELS, TOKENIZER};

/// The tokens of a text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EncodedText {
    /// Token ids.
    pub ids: Vec<u32>,
    /// The type of each token; empty if the model's words have no types, and if they are unknown.
    pub types: Vec<u32>,
}

impl From<Vec<u32>> for EncodedText {
    /// Token ids alone, which do not say where words begin.
    fn from(ids: Vec<u32>) -> Self {
        Self { ids, types: Vec::new() }
    }
}

/// Encodes text for the model in a folder.
#[derive(Clone, Debug)]
pub struct TextEncoder {
    tokenizer: Tokenizer,
    /// If words have types: their labels, and the pieces of a word.
    typed: Option<Arc<(Labels, PieceTokenizer)>>,
}

impl TextEncoder {
    /// The encoder of a model folder.
    ///
    /// # Errors
    /// If its tokenizer or its labels are missing or damaged.
    pub fn open(folder: &Path) -> Result<Self, Failure> {
        let typed = match word_types(folder)? {
            Some(labels) => Some(Arc::new((labels, PieceTokenizer::load(&folder.join(TOKENIZER))?))),
            None => None,
        };
        Ok(Self { tokenizer: tokenizer(folder)?, typed })
    }

    /// Its tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Whether words have types. Then a text is split into words as for predictions.
    pub fn has_word_types(&self) -> bool {
        self.typed.is_some()
    }

    /// The tokens of a text, with those that the tokenizer adds.
    ///
    /// # Errors
    /// If the tokenizer refuses the text.
    pub fn encode(&self, text: &str) -> Result<EncodedText, Failure> {
        match &self.typed {
            Some(typed) => Ok(with_types(typed, text)),
            None => Ok(self.tokenizer.encode_prompt(text)?.into()),
        }
    }

    /// [`encode`](Self::encode) for untrusted text, whose control tokens are plain text.
    ///
    /// # Errors
    /// As there.
    pub fn encode_foreign(&self, text: &str) -> Result<EncodedText, Failure> {
        match &self.typed {
            Some(typed) => Ok(with_types(typed, text)),
            None => Ok(self.tokenizer.encode_foreign_prompt(text)?.into()),
        }
    }

    /// Refuses token ids without types where words have types.
    ///
    /// # Errors
    /// If they do.
    pub(crate) fn takes_ids(&self) -> Result<(), Failure> {
        match &self.typed {
            Some(_) => Err(Failure::usage(
                "the words of this model have types (labels.json), which token ids alone do not tell: give text",
            )),
            None => Ok(()),
        }
    }
}

/// The labels of a model folder, if words have types there.
///
/// # Errors
/// If `labels.json` is damaged.
pub(crate) fn word_types(folder: &Path) -> Result<Option<Labels>, Failure> {
    let file = folder.join(LABELS);
    let labels = if file.is_file() { Some(read_labels(&file)?) } else { None };
    Ok(labels.filter(|labels| labels.type_count() > 0))
}

/// The pieces of a text, and the type of each word at its first piece.
fn with_types((labels, pieces): &(Labels, PieceTokenizer), text: &str) -> EncodedText {
    let mut encoded = EncodedText { ids: vec![pieces.cls()], types: vec![0] };
    for word in words(text) {
        if labels.is_noise(&word.text) {
            continue;
        }
        encoded.types.push(labels.word_type(&word.text) as u32);
        encoded.ids.extend(pieces.word(&word.text));
        encoded.types.resize(encoded.ids.len(), 0);
    }
    encoded.ids.extend(pieces.sep());
    encoded.types.resize(encoded.ids.len(), 0);
    encoded
}
