//! What is served: all that requests are checked by and texts are made with, without the device.

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

/// A model that is served.
pub(super) enum Served {
    /// One that writes.
    Writer(Box<ServedWriter>),
    /// One that reads.
    Encoder(Box<ServedEncoder>),
}

/// A model that writes.
pub(super) struct ServedWriter {
    pub(super) tokenizer: Tokenizer,
    /// The bytes of each token.
    pub(super) token_bytes: Vec<Vec<u8>>,
    /// Bytes of the longest token.
    pub(super) longest_token: usize,
    /// How a conversation becomes text, if the model was made for conversations.
    pub(super) template: Option<ChatTemplate>,
    /// How it spells calls of tools, if it knows any.
    pub(super) tool_style: Option<ToolStyle>,
    /// Tokens that end a text.
    pub(super) ends: Vec<u32>,
    /// Tokens of a text, with its prompt.
    pub(super) context: usize,
    pub(super) vocabulary: usize,
    pub(super) grammars: Arc<Grammars>,
}

impl ServedWriter {
    pub(super) fn new<B: Backend>(generator: &Generator<B>, folder: &Path, context: usize) -> Result<Self, Failure> {
        let tokenizer = generator.tokenizer().clone();
        let vocabulary = generator.model().config().vocab_size;
        let token_bytes = tokenizer.token_bytes();
        let template = ChatTemplate::find(folder);
        let ends = generator.ends().to_vec();
        Ok(Self {
            longest_token: token_bytes.iter().map(Vec::len).max().unwrap_or(1),
            tool_style: template.as_ref().and_then(ToolStyle::of),
            grammars: Arc::new(Grammars::new(&token_bytes, vocabulary, &ends)),
            token_bytes,
            tokenizer,
            template,
            ends,
            context,
            vocabulary,
        })
    }
}

/// A model that reads.
pub(super) struct ServedEncoder {
    pub(super) tokenizer: Tokenizer,
    /// Tokens of a text.
    pub(super) context: usize,
    pub(super) vocabulary: usize,
    /// Numbers of an embedding.
    pub(super) width: usize,
    /// Whether it says what utterances ask for.
    pub(super) predicts: bool,
}

impl ServedEncoder {
    pub(super) fn new<B: Backend>(embedder: &Embedder<B>, predicts: bool) -> Self {
        let config = embedder.model().config();
        Self {
            tokenizer: embedder.tokenizer().clone(),
            context: config.context_length,
            vocabulary: config.vocab_size,
            width: config.d_model,
            predicts,
        }
    }
}
