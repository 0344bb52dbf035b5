//! Embeddings from an encoder: the mean of its hidden states, or the first one, normalized (Reimers
//! and Gurevych, 2019, "Sentence-BERT").

use std::path::Path;

use burn::tensor::{DType, Int, Tensor, TensorData};
use fireclay_datasets::Tokenizer;
use fireclay_kernels::Backend;
use fireclay_kernels::recorder::read_back;
use fireclay_model::{AttentionDirection, ModelFolder, Tokens, Transformer};
use serde_json::Value;

use crate::failure::Failure;
use crate::inference::text_encoder::{EncodedText, TextEncoder};
use crate::model_folder::warn_of_config;
use crate::precision::Precision;

/// Inputs per forward pass.
const BATCH_SIZE: usize = 64;
/// Where sentence-transformers stores the pooling mode.
const POOLING: &str = "1_Pooling/config.json";

/// How hidden states are pooled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pooling {
    Mean,
    First,
}

/// An encoder with its tokenizer.
pub struct Embedder<B: Backend> {
    model: Transformer<B>,
    text_encoder: TextEncoder,
    pooling: Pooling,
    device: B::Device,
}

impl<B: Backend> Embedder<B> {
    /// Opens a model folder.
    ///
    /// # Errors
    /// If a file is missing or damaged, the model is not an encoder, or the device lacks the
    /// precision.
    pub fn open(folder: &Path, precision: Precision, device: B::Device) -> Result<Self, Failure> {
        warn_of_config(folder)?;
        let model = precision.load::<B>(&ModelFolder::new(folder), &mut |_, _| {}, &device)?;
        Self::of(model, folder, device)
    }

    /// An embedder of a loaded model, with the tokenizer of its folder.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn of(model: Transformer<B>, folder: &Path, device: B::Device) -> Result<Self, Failure> {
        if model.config().attention == AttentionDirection::Causal {
            return Err(Failure::new(format!("{}: not an encoder: it has no embeddings", folder.display())));
        }
        Ok(Self { model, text_encoder: TextEncoder::open(folder)?, pooling: pooling(folder)?, device })
    }

    /// The model.
    pub fn model(&self) -> &Transformer<B> {
        &self.model
    }

    /// Its tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        self.text_encoder.tokenizer()
    }

    /// What encodes its inputs.
    pub fn text_encoder(&self) -> &TextEncoder {
        &self.text_encoder
    }

    /// An embedding of `d_model` elements per input, from [`TextEncoder::encode`].
    ///
    /// # Errors
    /// If an input has no tokens, more than the model's context, unknown ones, or no types although
    /// the model's words have types, or the device fails.
    pub fn embed(&self, inputs: &[EncodedText]) -> Result<Vec<Vec<f32>>, Failure> {
        let (context, known) = (self.model.config().context_length, self.model.config().vocab_size);
        for EncodedText { ids: text, types } in inputs {
            if types.is_empty() {
                self.text_encoder.takes_ids()?;
            }
            if text.is_empty() || text.len() > context {
                let length = text.len();
                return Err(Failure::usage(format!("an input has {length} tokens; the model accepts 1 to {context}")));
            }
            if let Some(token) = text.iter().find(|token| **token as usize >= known) {
                return Err(Failure::usage(format!("token {token} is outside the model's vocabulary of {known}")));
            }
        }
        // Batch inputs of similar length.
        let mut order: Vec<usize> = (0..inputs.len()).collect();
        order.sort_by_key(|text| inputs[*text].ids.len());
        let mut embeddings = vec![Vec::new(); inputs.len()];
        for batch in order.chunks(BATCH_SIZE) {
            let rows: Vec<&EncodedText> = batch.iter().map(|text| &inputs[*text]).collect();
            for (text, embedding) in batch.iter().zip(self.pass(&rows)?) {
                embeddings[*text] = embedding;
            }
        }
        Ok(embeddings)
    }

    fn pass(&self, inputs: &[&EncodedText]) -> Result<Vec<Vec<f32>>, Failure> {
        let (rows, longest) = (inputs.len(), inputs.iter().map(|text| text.ids.len()).max().unwrap_or(0));
        // Padding is neither attended to nor counted.
        let padded = |part: fn(&EncodedText) -> &[u32]| {
            let place = |text: &&EncodedText, at: usize| part(text).get(at).map_or(0, |value| *value as i32);
            let values: Vec<i32> = inputs.iter().flat_map(|text| (0..longest).map(move |at| place(text, at))).collect();
            Tensor::<B, 2, Int>::from_data(TensorData::new(values, [rows, longest]), &self.device)
        };
        let lengths: Vec<i32> = inputs.iter().map(|text| text.ids.len() as i32).collect();
        let lengths = Tensor::<B, 1, Int>::from_data(TensorData::new(lengths, [rows]), &self.device);
        let tokens = Tokens::from(padded(|text| &text.ids)).with_lengths(lengths);
        let tokens = match self.text_encoder.has_word_types() {
            true => tokens.with_types(padded(|text| &text.types)),
            false => tokens,
        };
        let hidden = self.model.forward(tokens).cast(DType::F32);
        let d_model = hidden.dims()[2];
        let pooled: Tensor<B, 2> = match self.pooling {
            Pooling::First => hidden.narrow(1, 0, 1).reshape([rows, d_model]),
            Pooling::Mean => {
                let share = |length: usize, at: usize| if at < length { 1.0 / length as f32 } else { 0.0 };
                let lengths = inputs.iter().map(|text| text.ids.len());
                let shares: Vec<f32> =
                    lengths.flat_map(|length| (0..longest).map(move |at| share(length, at))).collect();
                let shares = TensorData::new(shares, [rows, longest, 1]);
                (hidden * Tensor::from_data(shares, (&self.device, DType::F32))).sum_dim(1).reshape([rows, d_model])
            }
        };
        let data = pooled.try_into_data().map_err(|error| Failure::new(format!("the device failed: {error:?}")))?;
        read_back(data.bytes.len());
        let values: Vec<f32> = data.iter::<f32>().collect();
        values.chunks_exact(d_model).map(normalised).collect()
    }
}

/// Normalizes a vector.
fn normalised(values: &[f32]) -> Result<Vec<f32>, Failure> {
    let length = values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
    if !length.is_finite() {
        return Err(Failure::new("the model's output is not a number: its weights are damaged"));
    }
    Ok(values.iter().map(|value| (f64::from(*value) / length.max(1e-12)) as f32).collect())
}

/// The pooling mode of a folder; the mean by default.
fn pooling(folder: &Path) -> Result<Pooling, Failure> {
    let file = folder.join(POOLING);
    let text = match std::fs::read_to_string(&file) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Pooling::Mean),
        Err(error) => return Err(Failure::io(&file)(error)),
    };
    let config: Value = serde_json::from_str(&text)
        .map_err(|error| Failure::new(format!("{}: not valid JSON: {error}", file.display())))?;
    let asked = |mode: &str| config[format!("pooling_mode_{mode}")] == true;
    let other =
        ["max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"].into_iter().find(|m| asked(m));
    match other {
        Some(other) => Err(Failure::new(format!("{}: pooling_mode_{other} is not supported", file.display()))),
        None if asked("cls_token") && !asked("mean_tokens") => Ok(Pooling::First),
        None => Ok(Pooling::Mean),
    }
}
