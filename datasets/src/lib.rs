//! Text and utterances, tokenizers, batches and the embedded grammars that Fireclay trains on.
//!
//! ```
//! use fireclay_datasets::{Split, StoryCorpus};
//!
//! let corpus = StoryCorpus::new(128);
//! let batch = corpus.batch(Split::Train, 7, 0, 4);
//! assert_eq!(batch.inputs().len(), 4 * 128);
//! // The same seed and step always give the same batch.
//! assert_eq!(batch, corpus.batch(Split::Train, 7, 0, 4));
//! ```

mod batch;
mod by_length;
pub mod conversations;
mod corpus;
mod embedded;
mod error;
mod inputs;
mod labelled;
mod labelled_batch;
mod labels;
mod pieces;
mod random;
mod range_encoder;
mod sources;
mod spans;
mod text_stream;
mod token_files;
mod tokenizer;
mod truncation;
mod utterance;
mod utterance_batch;
mod vocabulary;
mod words;

pub use batch::{DeviceTokens, IGNORED_TARGET, TokenBatch};
pub use corpus::{BatchKey, Corpus, Split, StoryCorpus, TextCorpus};
pub use embedded::names::EMBEDDED_NAMES;
pub use embedded::stories::{Story, StoryGrammar};
pub use error::DataError;
pub use inputs::Inputs;
pub use labelled::{LabelledText, LabelledTexts};
pub use labelled_batch::{DeviceTexts, EncodedTexts, LabelledBatch};
pub use labels::{IntentSlots, Labels};
pub use pieces::PieceTokenizer;
pub use range_encoder::RangeEncoder;
pub use sources::{Piece, STDIN, TextSource, read_text};
pub use spans::{Span, spans};
pub use text_stream::TextStream;
pub use token_files::{Manifest, PrepareOptions, Progress, TokenFiles, prepare};
pub use tokenizer::{Encoder, Tokenizer, TokenizerKind};
pub use utterance::{Utterance, Utterances, Word, words};
pub use utterance_batch::{DeviceBatch, EncodedUtterances, UtteranceBatch, Variation};
pub use vocabulary::{TokenKind, Vocabulary, VocabularyModel};
