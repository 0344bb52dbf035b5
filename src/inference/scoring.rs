//! Relevance scores of pairs by a cross-encoder, which reads both at once (Nogueira and Cho,
//! 2019, "Passage Re-ranking with BERT").

use std::path::Path;

use burn::tensor::activation::sigmoid;
use burn::tensor::{Int, Tensor, TensorData};
use fireclay_kernels::Backend;
use fireclay_kernels::recorder::read_back;
use fireclay_model::{Tokens, Transformer};
use serde_json::Value;

use crate::failure::Failure;

/// Pairs per forward pass.
const BATCH_SIZE: usize = 64;

/// The tokens of a pair, and the text type of each token.
pub type Pair = (Vec<u32>, Vec<u32>);

/// What a cross-encoder does with the single output of its head.
#[derive(Clone, Copy, Debug)]
pub struct ScoreHead {
    /// Whether scores go through a sigmoid.
    sigmoid: bool,
}

impl ScoreHead {
    /// That of a model in `folder`, if it is a classifier with one class.
    ///
    /// # Errors
    /// If its `config.json` is missing or damaged, or its activation is unknown.
    pub fn of<B: Backend>(model: &Transformer<B>, folder: &Path) -> Result<Option<Self>, Failure> {
        match &model.config().classifier {
            // With several classes, no single number is a score.
            Some(head) if head.labels.len() == 1 => Ok(Some(Self { sigmoid: has_sigmoid(folder)? })),
            _ => Ok(None),
        }
    }

    /// The score of each pair, from the model that this is of.
    ///
    /// # Errors
    /// If a pair has no tokens, more than the model's context, or unknown ones, or the device
    /// fails.
    pub fn scores<B: Backend>(self, model: &Transformer<B>, pairs: &[Pair]) -> Result<Vec<f32>, Failure> {
        let (context, known) = (model.config().context_length, model.config().vocab_size);
        for (ids, _) in pairs {
            if ids.is_empty() || ids.len() > context {
                let length = ids.len();
                return Err(Failure::usage(format!("the pair has {length} tokens; the model accepts 1 to {context}")));
            }
            if let Some(token) = ids.iter().find(|token| **token as usize >= known) {
                return Err(Failure::usage(format!("token {token} is outside the model's vocabulary of {known}")));
            }
        }
        // Batch pairs of similar length.
        let mut order: Vec<usize> = (0..pairs.len()).collect();
        order.sort_by_key(|pair| pairs[*pair].0.len());
        let mut scores = vec![0.0; pairs.len()];
        for batch in order.chunks(BATCH_SIZE) {
            let rows: Vec<&Pair> = batch.iter().map(|pair| &pairs[*pair]).collect();
            for (pair, score) in batch.iter().zip(self.pass(model, &rows)?) {
                scores[*pair] = score;
            }
        }
        Ok(scores)
    }

    fn pass<B: Backend>(self, model: &Transformer<B>, pairs: &[&Pair]) -> Result<Vec<f32>, Failure> {
        let head = model.classifier.as_ref().ok_or_else(|| Failure::new("the model has no head for scores"))?;
        let device = head.output.val().device();
        let (rows, longest) = (pairs.len(), pairs.iter().map(|(ids, _)| ids.len()).max().unwrap_or(0));
        let padded = |part: fn(&Pair) -> &Vec<u32>| {
            let place = |pair: &&Pair, at: usize| part(pair).get(at).map_or(0, |value| *value as i32);
            let values: Vec<i32> = pairs.iter().flat_map(|pair| (0..longest).map(move |at| place(pair, at))).collect();
            Tensor::<B, 2, Int>::from_data(TensorData::new(values, [rows, longest]), &device)
        };
        let lengths: Vec<i32> = pairs.iter().map(|(ids, _)| ids.len() as i32).collect();
        let lengths = Tensor::<B, 1, Int>::from_data(TensorData::new(lengths, [rows]), &device);
        let tokens = Tokens::from(padded(|pair| &pair.0)).with_types(padded(|pair| &pair.1));
        let hidden = model.forward(tokens.with_lengths(lengths.clone()));
        let logits = model.classify(hidden, Some(lengths));
        let logits = logits.ok_or_else(|| Failure::new("the model has no head for scores"))?;
        let scores = if self.sigmoid { sigmoid(logits) } else { logits };
        let data = scores.try_into_data().map_err(|error| Failure::new(format!("the device failed: {error:?}")))?;
        read_back(data.bytes.len());
        let scores: Vec<f32> = data.iter::<f32>().collect();
        match scores.iter().all(|score| score.is_finite()) {
            true => Ok(scores),
            false => Err(Failure::new("the model's output is not a number: its weights are damaged")),
        }
    }
}

/// Whether a folder's scores go through a sigmoid: the default for one class, unless `config.json`
/// says otherwise.
fn has_sigmoid(folder: &Path) -> Result<bool, Failure> {
    let file = folder.join("config.json");
    let text = std::fs::read_to_string(&file).map_err(Failure::io(&file))?;
    let config: Value = serde_json::from_str(&text)
        .map_err(|error| Failure::new(format!("{}: not valid JSON: {error}", file.display())))?;
    let named = config["sentence_transformers"]["activation_fn"].as_str();
    let named = named.or(config["sbert_ce_default_activation_function"].as_str());
    match named.map(|name| name.rsplit('.').next().unwrap_or(name)) {
        None | Some("Sigmoid") => Ok(true),
        Some("Identity") => Ok(false),
        Some(other) => Err(Failure::new(format!("{}: the score activation {other} is not supported", file.display()))),
    }
}
