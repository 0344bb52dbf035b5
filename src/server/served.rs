//! The served model as requests need it, without the device: for validation and for text.

use std::path::Path;
use std::sync::Arc;

use fireclay_datasets::Tokenizer;
use fireclay_kernels::Backend;

use super::grammar::Grammars;
use super::tools::ToolStyle;
use crate::failure::Failure;
use crate::inference::chat::ChatTemplate;
use crate::inference::embedding::Embedder;
use crate::inference::generation::Generator;
use crate::inference::text_encoder::TextEncoder;

/// The served model.
pub(super) enum Served {
    /// A model that generates text, and the same with each adapter.
    Generators(Vec<ServedGenerator>),
    /// An encoder.
    Encoder(Box<ServedEncoder>),
}

/// A model that generates text.
pub(super) struct ServedGenerator {
    /// Its name in the API.
    pub(super) name: String,
    pub(super) tokenizer: Tokenizer,
    /// The bytes of each token.
    pub(super) token_bytes: Vec<Vec<u8>>,
    /// Bytes of the longest token.
    pub(super) longest_token: usize,
    /// The chat template, if the model has one.
    pub(super) template: Option<ChatTemplate>,
    /// The format of its tool calls, if known.
    pub(super) tool_style: Option<ToolStyle>,
    /// Stop tokens.
    pub(super) stop_tokens: Vec<u32>,
    /// Maximum tokens of a sequence, prompt included.
    pub(super) context: usize,
    pub(super) vocabulary: usize,
    /// The token that the tokenizer puts first, if any.
    pub(super) begins: Option<u32>,
    pub(super) grammars: Arc<Grammars>,
}

impl ServedGenerator {
    /// The model of a folder, with the chat template of a file or its own.
    pub(super) fn new<B: Backend>(
        name: &str,
        generator: &Generator<B>,
        folder: &Path,
        template: Option<&Path>,
        context: usize,
    ) -> Result<Self, Failure> {
        let tokenizer = generator.tokenizer().clone();
        let vocabulary = generator.model().config().vocab_size;
        let token_bytes = tokenizer.token_bytes();
        let template = match template {
            Some(file) => Some(ChatTemplate::of_file(file, folder)?),
            None => ChatTemplate::find(folder),
        };
        let stop_tokens = generator.stop_tokens().to_vec();
        Ok(Self {
            name: name.to_string(),
            longest_token: token_bytes.iter().map(Vec::len).max().unwrap_or(1),
            tool_style: template.as_ref().and_then(ToolStyle::of),
            grammars: Arc::new(Grammars::new(&token_bytes, vocabulary, &stop_tokens)),
            begins: begins(&tokenizer),
            token_bytes,
            tokenizer,
            template,
            stop_tokens,
            context,
            vocabulary,
        })
    }
}

impl ServedGenerator {
    /// The bytes of a token's text; for a special token, those of its name.
    pub(super) fn bytes_of(&self, token: u32) -> Vec<u8> {
        match self.token_bytes.get(token as usize) {
            Some(bytes) if !bytes.is_empty() => bytes.clone(),
            _ => self.tokenizer.token(token).unwrap_or_default().into_bytes(),
        }
    }
}

/// The token that a tokenizer puts first, if any.
pub(super) fn begins(tokenizer: &Tokenizer) -> Option<u32> {
    let (with, without) = (tokenizer.encode_prompt("a").ok()?, tokenizer.encode("a").ok()?);
    with.first().copied().filter(|first| with.len() > without.len() && Some(first) != without.first())
}

/// An encoder.
pub(super) struct ServedEncoder {
    pub(super) tokenizer: Tokenizer,
    /// What encodes inputs of embeddings.
    pub(super) text_encoder: TextEncoder,
    /// Maximum tokens of an input.
    pub(super) context: usize,
    pub(super) vocabulary: usize,
    /// Size of an embedding.
    pub(super) width: usize,
    /// Whether it predicts intents and slots.
    pub(super) predicts: bool,
    /// Whether it is a cross-encoder with a score head.
    pub(super) scores: bool,
}

impl ServedEncoder {
    pub(super) fn new<B: Backend>(embedder: &Embedder<B>, predicts: bool, scores: bool) -> Self {
        let config = embedder.model().config();
        Self {
            tokenizer: embedder.tokenizer().clone(),
            text_encoder: embedder.text_encoder().clone(),
            context: config.context_length,
            vocabulary: config.vocab_size,
            width: config.d_model,
            predicts,
            scores,
        }
    }
}
