//! Language modelling: each token predicts the next.

use std::path::Path;

use burn::tensor::Tensor;
use fireclay_datasets::{Corpus, TokenBatch, Tokenizer};
use fireclay_kernels::{Backend, HeadLossOptions};
use fireclay_model::Transformer;

use crate::Failure;
use crate::training::checkpoint::{GENERATION, TOKENIZER, write_synced};
use crate::training::read_scalars;

/// A text, and how it is cut into tokens.
pub struct Language {
    /// What is learnt from and what is held out.
    pub corpus: Corpus,
    /// How text becomes tokens.
    pub tokenizer: Tokenizer,
}

/// Mean cross entropy of a batch's predictions, times the options' weight, `[1]` nats a token.
pub fn loss<B: Backend>(
    model: &Transformer<B>,
    batch: &TokenBatch,
    options: HeadLossOptions,
    device: &B::Device,
) -> Tensor<B, 1> {
    let (inputs, targets) = batch.to_device(device);
    let hidden = model.forward(inputs, None);
    model.loss(hidden, targets, options)
}

impl Language {
    /// Mean loss over about `tokens` of the held-out part, nats a token; one read from the device.
    pub(crate) fn validate<B: Backend>(
        &self,
        model: &Transformer<B>,
        batch_size: usize,
        tokens: usize,
        device: &B::Device,
    ) -> Result<f64, Failure> {
        let batches = self.corpus.valid_batches(batch_size, tokens);
        let total: usize = batches.iter().map(TokenBatch::target_count).sum();
        let mut sum = Tensor::<B, 1>::zeros([1], device);
        for batch in &batches {
            let share = batch.target_count() as f64 / total.max(1) as f64;
            sum = sum + loss(model, batch, HeadLossOptions::new().with_weight(share), device);
        }
        Ok(read_scalars(vec![sum])?[0])
    }

    pub(crate) fn save(&self, folder: &Path) -> Result<(), Failure> {
        self.tokenizer.save(&folder.join(TOKENIZER))?;
        match self.corpus.end_token() {
            Some(end) => {
                let text = serde_json::json!({ "eos_token_id": end }).to_string();
                write_synced(&folder.join(GENERATION), &text)
            }
            None => Ok(()),
        }
    }
}
