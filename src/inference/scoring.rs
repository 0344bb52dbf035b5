//! Relevance scores of pairs by a cross-encoder, which reads both at once (Nogueira and Cho,
//! 2019, "Passage Re-ranking with BERT").

use std::path::Path;

use burn::tensor::activation::{sigmoid, tanh};
use burn::tensor::{DType, FloatDType, Int, Tensor, TensorData};
use fireclay_kernels::Backend;
use fireclay_kernels::recorder::read_back;
use fireclay_model::{ModelFolder, Tokens, Transformer};
use serde_json::Value;

use crate::failure::Failure;

/// Pairs per forward pass.
const BATCH_SIZE: usize = 64;

/// The tokens of a pair, and the text type of each token.
pub type Pair = (Vec<u32>, Vec<u32>);

/// The head that maps an encoder's first hidden state to a score.
pub struct ScoreHead<B: Backend> {
    /// The pooler, `[d_model, d_model]` and `[d_model]`.
    pooler: (Tensor<B, 2>, Tensor<B, 1>),
    /// The classifier, `[1, d_model]` and `[1]`.
    classifier: (Tensor<B, 2>, Tensor<B, 1>),
    /// Whether scores go through a sigmoid.
    sigmoid: bool,
}

impl<B: Backend> ScoreHead<B> {
    /// The score head of a folder, if it is a classification model with one class.
    ///
    /// # Errors
    /// If one of its tensors is missing or damaged, or its activation is unknown.
    pub fn open(folder: &Path, device: &B::Device) -> Result<Option<Self>, Failure> {
        let files = ModelFolder::new(folder);
        let Some((shape, classifier)) = files.tensor::<2>("classifier.weight")? else { return Ok(None) };
        // With several classes, no single number is a score.
        if shape[0] != 1 {
            return Ok(None);
        }
        let missing = |name: &str| Failure::new(format!("{}: {name} is missing", folder.display()));
        let vector = |name: &str| {
            let (shape, values) = files.tensor::<1>(name)?.ok_or_else(|| missing(name))?;
            Ok::<_, Failure>(Tensor::<B, 1>::from_data(TensorData::new(values, shape), (device, DType::F32)))
        };
        let matrix =
            |shape: [usize; 2], values| Tensor::<B, 2>::from_data(TensorData::new(values, shape), (device, DType::F32));
        let name = "bert.pooler.dense.weight";
        let (pooler_shape, pooler) = files.tensor::<2>(name)?.ok_or_else(|| missing(name))?;
        if pooler_shape != [shape[1]; 2] {
            return Err(Failure::new(format!("{}: {name} has shape {pooler_shape:?}", folder.display())));
        }
        Ok(Some(Self {
            pooler: (matrix(pooler_shape, pooler), vector("bert.pooler.dense.bias")?),
            classifier: (matrix(shape, classifier), vector("classifier.bias")?),
            sigmoid: has_sigmoid(folder)?,
        }))
    }

    /// The score of each pair, from the model that this head belongs to.
    ///
    /// # Errors
    /// If a pair has no tokens, more than the model's context, or unknown ones, or the device
    /// fails.
    pub fn scores(&self, model: &Transformer<B>, pairs: &[Pair]) -> Result<Vec<f32>, Failure> {
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

    fn pass(&self, model: &Transformer<B>, pairs: &[&Pair]) -> Result<Vec<f32>, Failure> {
        let device = self.classifier.0.device();
        let (rows, longest) = (pairs.len(), pairs.iter().map(|(ids, _)| ids.len()).max().unwrap_or(0));
        let padded = |part: fn(&Pair) -> &Vec<u32>| {
            let place = |pair: &&Pair, at: usize| part(pair).get(at).map_or(0, |value| *value as i32);
            let values: Vec<i32> = pairs.iter().flat_map(|pair| (0..longest).map(move |at| place(pair, at))).collect();
            Tensor::<B, 2, Int>::from_data(TensorData::new(values, [rows, longest]), &device)
        };
        let lengths: Vec<i32> = pairs.iter().map(|(ids, _)| ids.len() as i32).collect();
        let lengths = Tensor::<B, 1, Int>::from_data(TensorData::new(lengths, [rows]), &device);
        let tokens = Tokens::from(padded(|pair| &pair.0)).with_types(padded(|pair| &pair.1)).with_lengths(lengths);
        let hidden = model.forward(tokens).cast(FloatDType::F32);
        let d_model = hidden.dims()[2];
        let first = hidden.narrow(1, 0, 1).reshape([rows, d_model]);
        let layer = |x: Tensor<B, 2>, (weight, bias): &(Tensor<B, 2>, Tensor<B, 1>)| {
            x.matmul(weight.clone().transpose()) + bias.clone().unsqueeze()
        };
        let logits = layer(tanh(layer(first, &self.pooler)), &self.classifier);
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
