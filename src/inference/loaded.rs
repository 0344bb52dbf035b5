//! A model of any backend and kind behind one trait: decoders, encoders, and those that predict.

use std::path::PathBuf;

use burn::tensor::{Int, Tensor, TensorData};
use fireclay_datasets::Tokenizer;
use fireclay_kernels::{Backend, DeviceTensor};
use fireclay_model::{AttentionDirection, ModelFolder, Tokens, Transformer, TransformerConfig};

use crate::backend::{OnBackend, RunContext};
use crate::failure::Failure;
use crate::inference::chat::{ChatTemplate, Dialogue};
use crate::inference::classification::classifies;
use crate::inference::embedding::Embedder;
use crate::inference::evaluation::{Evaluation, evaluate};
use crate::inference::generation::{Generated, GenerationOptions, Generator, Interrupt, Prepared};
use crate::inference::prediction::{AnyPredictor, Prediction};
use crate::precision::{CachePrecision, Precision};

/// A model folder or GGUF file to load.
#[derive(Clone, Debug)]
pub struct ModelToLoad {
    /// The folder or file.
    pub model: PathBuf,
    /// Dtype of matrices and activations.
    pub precision: Precision,
    /// Data type of the KV cache.
    pub cache: CachePrecision,
}

/// Input of a generation.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Text.
    Text(String),
    /// A conversation, rendered with the model's chat template.
    Dialogue(Dialogue),
}

/// Token ids, one row per sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenRows {
    /// All rows, concatenated.
    pub ids: Vec<i64>,
    /// Tokens per row.
    pub length: usize,
}

/// A loaded model, without its backend type.
///
/// Call its methods inside [`FoundBackend::enter`](crate::backend::FoundBackend::enter).
pub trait LoadedModel: Send {
    /// The configuration.
    fn config(&self) -> &TransformerConfig;

    /// The tokenizer.
    fn tokenizer(&self) -> &Tokenizer;

    /// Generates from several prompts concurrently. `show` gets the index of a prompt and new text;
    /// `interrupt` ends all outputs early.
    ///
    /// # Errors
    /// If the model is an encoder, an option or a prompt is invalid, or the device fails.
    fn generate(
        &mut self,
        prompts: &[Prompt],
        options: &GenerationOptions,
        interrupt: &Interrupt,
        show: &mut dyn FnMut(usize, &str),
    ) -> Result<Vec<Generated>, Failure>;

    /// Logits `[rows, length, vocab_size]` in the dtype of activations.
    ///
    /// # Errors
    /// If the model is an encoder, or the tokens are empty, exceed the context, or are not in the vocabulary.
    fn logits(&self, tokens: &TokenRows) -> Result<DeviceTensor, Failure>;

    /// Hidden states `[rows, length, d_model]` after the last norm, in the dtype of activations.
    ///
    /// # Errors
    /// As [`logits`](Self::logits), for any model but one whose words have types, which token ids do
    /// not tell.
    fn hidden_states(&self, tokens: &TokenRows) -> Result<DeviceTensor, Failure>;

    /// Attention weights of each layer, f32 `[rows, n_heads, length, length]`.
    ///
    /// # Errors
    /// As [`hidden_states`](Self::hidden_states).
    fn attention(&self, tokens: &TokenRows) -> Result<Vec<DeviceTensor>, Failure>;

    /// A normalized embedding of each text.
    ///
    /// # Errors
    /// If the model is not an encoder, a text is empty or too long, or the device fails.
    fn embed(&self, sentences: &[String]) -> Result<Vec<Vec<f32>>, Failure>;

    /// The intent and slots of each text, or its label.
    ///
    /// # Errors
    /// If the model was trained neither on utterances nor on labels, or the device fails.
    fn predict(&self, utterances: &[String]) -> Result<Vec<Prediction>, Failure>;

    /// Evaluates the model on a text; see [`evaluate`].
    ///
    /// # Errors
    /// As there, or if the model is an encoder.
    fn evaluate(&self, text: &str, sizes: (Option<usize>, Option<usize>)) -> Result<Evaluation, Failure>;

    /// Every parameter by its path, as it is stored.
    ///
    /// # Errors
    /// If matrices are quantized.
    fn parameters(&self) -> Result<Vec<(String, DeviceTensor)>, Failure>;
}

impl OnBackend for ModelToLoad {
    type Output = Box<dyn LoadedModel>;

    fn run<B: Backend>(self, RunContext { device, .. }: RunContext<B>) -> Result<Self::Output, Failure> {
        let Self { model: folder, precision, cache } = self;
        let (_, config) = ModelFolder::new(&folder).config()?;
        let name = folder.display().to_string();
        let predicts = config.tags > 0 || classifies(&folder, &config)?;
        let kind = match (config.attention, predicts) {
            (AttentionDirection::Causal, _) => {
                let generator = Generator::<B>::open(&folder, precision, device.clone())?.with_cache(cache)?;
                Kind::Writer { generator: Box::new(generator), template: ChatTemplate::find(&folder) }
            }
            (AttentionDirection::Bidirectional, _) if cache != CachePrecision::Auto => {
                return Err(Failure::usage(format!("{name}: an encoder, which has no KV cache")));
            }
            (AttentionDirection::Bidirectional, false) => {
                Kind::Encoder(Box::new(Embedder::<B>::open(&folder, precision, device.clone())?))
            }
            (AttentionDirection::Bidirectional, true) => {
                let predictor = AnyPredictor::<B>::open(&folder, precision, device.clone())?;
                // Both use the same weights.
                let embedder = Embedder::of(predictor.model().clone(), &folder, device.clone())?;
                Kind::Predictor { predictor: Box::new(predictor), embedder: Box::new(embedder) }
            }
        };
        let tokenizer = match &kind {
            Kind::Writer { generator, .. } => generator.tokenizer().clone(),
            Kind::Encoder(embedder) | Kind::Predictor { embedder, .. } => embedder.tokenizer().clone(),
        };
        Ok(Box::new(Loaded { kind, tokenizer, name, device }))
    }
}

/// A model on backend `B`.
struct Loaded<B: Backend> {
    kind: Kind<B>,
    tokenizer: Tokenizer,
    /// Its name in errors.
    name: String,
    device: B::Device,
}

enum Kind<B: Backend> {
    Writer { generator: Box<Generator<B>>, template: Option<ChatTemplate> },
    Encoder(Box<Embedder<B>>),
    Predictor { predictor: Box<AnyPredictor<B>>, embedder: Box<Embedder<B>> },
}

impl<B: Backend> Loaded<B> {
    fn model(&self) -> &Transformer<B> {
        match &self.kind {
            Kind::Writer { generator, .. } => generator.model(),
            Kind::Encoder(embedder) => embedder.model(),
            Kind::Predictor { predictor, .. } => predictor.model(),
        }
    }

    /// The error for operations that encoders lack.
    fn reads_only(&self, what: &str) -> Failure {
        Failure::new(format!("{}: an encoder, which {what}", self.name))
    }

    fn prepared(&self, prompt: &Prompt, options: &GenerationOptions) -> Result<Prepared, Failure> {
        let Kind::Writer { generator, template } = &self.kind else {
            return Err(self.reads_only("cannot generate text"));
        };
        match prompt {
            Prompt::Text(text) => generator.prepare(text, options),
            Prompt::Dialogue(dialogue) => {
                let lacks = || Failure::new(format!("{}: no chat template; use generate with a text", self.name));
                let template = template.as_ref().ok_or_else(lacks)?;
                template.check().map_err(|failure| failure.about(&self.name))?;
                let tokens = template.tokens(dialogue, generator.tokenizer())?;
                // By default an answer may fill the context.
                let room = generator.model().config().context_length.saturating_sub(tokens.len()).max(1);
                let max_tokens = options.max_tokens.unwrap_or(room);
                generator.prepare_tokens(tokens, &GenerationOptions { max_tokens: Some(max_tokens), ..options.clone() })
            }
        }
    }

    /// Checks the rows and uploads them.
    fn tokens(&self, TokenRows { ids, length }: &TokenRows) -> Result<Tokens<B>, Failure> {
        if let Kind::Encoder(embedder) | Kind::Predictor { embedder, .. } = &self.kind {
            embedder.text_encoder().takes_ids().map_err(|failure| failure.about(&self.name))?;
        }
        let (context, known) = (self.model().config().context_length, self.model().config().vocab_size);
        if *length == 0 || *length > context || ids.is_empty() {
            return Err(Failure::usage(format!("a row has {length} tokens; the model takes 1 to {context}")));
        }
        if !ids.len().is_multiple_of(*length) {
            return Err(Failure::usage(format!("{} tokens do not divide into rows of {length}", ids.len())));
        }
        if let Some(token) = ids.iter().find(|token| !(0..known as i64).contains(token)) {
            return Err(Failure::usage(format!("token {token} is not in the vocabulary, which is 0 to {}", known - 1)));
        }
        let rows = ids.len() / length;
        let ids: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
        Ok(Tensor::<B, 2, Int>::from_data(TensorData::new(ids, [rows, *length]), &self.device).into())
    }
}

impl<B: Backend> LoadedModel for Loaded<B> {
    fn config(&self) -> &TransformerConfig {
        self.model().config()
    }

    fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    fn generate(
        &mut self,
        prompts: &[Prompt],
        options: &GenerationOptions,
        interrupt: &Interrupt,
        show: &mut dyn FnMut(usize, &str),
    ) -> Result<Vec<Generated>, Failure> {
        let numbered = |(at, prompt): (usize, &Prompt)| {
            let prepared = self.prepared(prompt, options);
            if prompts.len() == 1 {
                prepared
            } else {
                prepared.map_err(|failure| failure.about(&format!("prompt {}", at + 1)))
            }
        };
        let prepared = prompts.iter().enumerate().map(numbered).collect::<Result<Vec<_>, _>>()?;
        let prepared: Vec<&Prepared> = prepared.iter().collect();
        if prepared.is_empty() {
            return Ok(Vec::new());
        }
        let Kind::Writer { generator, .. } = &mut self.kind else { return Ok(Vec::new()) };
        generator.set_interrupt(interrupt.clone());
        generator.generate_batch(&prepared, 0, options, show)
    }

    fn logits(&self, tokens: &TokenRows) -> Result<DeviceTensor, Failure> {
        let Kind::Writer { generator, .. } = &self.kind else {
            return Err(self.reads_only("has no logits; use hidden states"));
        };
        let model = generator.model();
        Ok(DeviceTensor::new(model.logits(model.forward(self.tokens(tokens)?))))
    }

    fn hidden_states(&self, tokens: &TokenRows) -> Result<DeviceTensor, Failure> {
        Ok(DeviceTensor::new(self.model().forward(self.tokens(tokens)?)))
    }

    fn attention(&self, tokens: &TokenRows) -> Result<Vec<DeviceTensor>, Failure> {
        let inspection = self.model().inspect(self.tokens(tokens)?);
        Ok(inspection.attention.into_iter().map(DeviceTensor::new).collect())
    }

    fn embed(&self, sentences: &[String]) -> Result<Vec<Vec<f32>>, Failure> {
        let (Kind::Encoder(embedder) | Kind::Predictor { embedder, .. }) = &self.kind else {
            return Err(Failure::new(format!("{}: not an encoder: it has no text embeddings", self.name)));
        };
        let encoded = sentences.iter().map(|text| embedder.text_encoder().encode(text));
        embedder.embed(&encoded.collect::<Result<Vec<_>, _>>()?)
    }

    fn predict(&self, utterances: &[String]) -> Result<Vec<Prediction>, Failure> {
        let Kind::Predictor { predictor, .. } = &self.kind else {
            return Err(Failure::new(format!(
                "{}: not trained on utterances or labels; train a model with the recipe home, intent-slot or classify",
                self.name
            )));
        };
        predictor.predict(&utterances.iter().map(String::as_str).collect::<Vec<_>>())
    }

    fn evaluate(&self, text: &str, sizes: (Option<usize>, Option<usize>)) -> Result<Evaluation, Failure> {
        if !matches!(self.kind, Kind::Writer { .. }) {
            return Err(self.reads_only("has no perplexity"));
        }
        evaluate(self.model(), &self.tokenizer, text, sizes, &self.device)
    }

    fn parameters(&self) -> Result<Vec<(String, DeviceTensor)>, Failure> {
        match self.model().is_quantized() {
            true => Err(Failure::new(format!(
                "{}: the matrices are quantized: load the model with precision f32 or bf16 to share parameters",
                self.name
            ))),
            false => Ok(self.model().parameters()),
        }
    }
}
