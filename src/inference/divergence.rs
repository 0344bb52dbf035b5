//! What merging an adapter costs: how far the predictions of the merged model are from those of the
//! model with the adapter next to its weights.

use std::path::PathBuf;

use burn::tensor::activation::log_softmax;
use burn::tensor::{Int, Tensor, TensorData};
use fireclay_kernels::Backend;
use fireclay_model::{LoraFiles, ModelFolder, Transformer};

use fireclay_datasets::TextSource;

use crate::backend::{OnBackend, RunContext};
use crate::device_read::read_scalars;
use crate::failure::Failure;
use crate::model_folder::{ModelSource, tokenizer};
use crate::precision::Precision;

/// Tokens that are compared, at most, in windows of this length.
const TOKENS: usize = 4096;
const WINDOW: usize = 512;
/// Logits of each model that are in memory at a time.
const LOGITS: usize = 1 << 24;

/// The precisions that a merged model is compared in; f32 has its weights as they are written.
const PRECISIONS: [Precision; 4] = [Precision::F32, Precision::Bf16, Precision::Int8, Precision::Nf4];

/// A comparison of a merged model with its adapter, on any backend.
pub struct MergeCostRun {
    /// The model and its adapter.
    pub adapted: ModelSource,
    /// The merged model's folder.
    pub merged: PathBuf,
    /// A text that neither was trained on.
    pub data: PathBuf,
    /// The field with the documents, for JSON, CSV, TSV or Parquet.
    pub field: String,
}

impl OnBackend for MergeCostRun {
    /// For each precision the mean Kullback-Leibler divergence of the merged model from the adapted
    /// one, in nats per token.
    type Output = Vec<(Precision, f64)>;

    fn run<B: Backend>(self, RunContext { device, .. }: RunContext<B>) -> Result<Self::Output, Failure> {
        let text = TextSource::open(&self.data, &self.field)?.text()?;
        let mut tokens = tokenizer(self.adapted.text())?.encode(&text)?;
        tokens.truncate(TOKENS);
        if tokens.is_empty() {
            return Err(Failure::new(format!("{} holds no text", self.data.display())));
        }
        let reference = unmerged::<B>(&self.adapted, &device)?;
        let merged = ModelFolder::new(&self.merged);
        let cost = |precision: Precision| {
            let model = precision.load::<B>(&merged, &mut |_, _| {}, &device)?;
            Ok((precision, divergence(&reference, &model, &tokens, &device)?))
        };
        PRECISIONS.into_iter().map(cost).collect()
    }
}

/// A model in f32, with its adapter next to its weights.
fn unmerged<B: Backend>(source: &ModelSource, device: &B::Device) -> Result<Transformer<B>, Failure> {
    let Some(adapter) = source.adapter() else { return Err(Failure::new("there is no adapter to compare with")) };
    let files = LoraFiles::open(adapter)?;
    let folder = ModelFolder::new(source.weights()).with_adapter(files.clone());
    let (family, _) = folder.config()?;
    let model = folder.load_base::<B>(device)?.with_lora(family, files.config(), Some(&files), 0);
    model.map_err(|reason| Failure::new(format!("{}: {reason}", adapter.display())))
}

/// The mean Kullback-Leibler divergence of `model` from `reference` over some tokens, in nats per
/// token.
fn divergence<B: Backend>(
    reference: &Transformer<B>,
    model: &Transformer<B>,
    tokens: &[u32],
    device: &B::Device,
) -> Result<f64, Failure> {
    let window = WINDOW.min(model.config().context_length);
    let each = (LOGITS / model.config().vocab_size).clamp(1, window);
    let mut sum = Tensor::<B, 1>::zeros([1], device);
    for window in tokens.chunks(window) {
        let ids: Vec<i32> = window.iter().map(|token| *token as i32).collect();
        let ids = Tensor::<B, 2, Int>::from_data(TensorData::new(ids, [1, window.len()]), device);
        let states = [reference, model].map(|model| model.forward(ids.clone()).squeeze_dim::<2>(0));
        for first in (0..window.len()).step_by(each) {
            let rows = |states: &Tensor<B, 2>| states.clone().narrow(0, first, each.min(window.len() - first));
            let wanted = log_softmax(reference.f32_logits(rows(&states[0])), 1);
            let own = log_softmax(model.f32_logits(rows(&states[1])), 1);
            let of_rows = (wanted.clone().exp() * (wanted - own)).sum_dim(1);
            sum = sum + of_rows.sum_dim(0).squeeze_dim::<1>(1);
        }
    }
    Ok(read_scalars(vec![sum])?[0] / tokens.len() as f64)
}
