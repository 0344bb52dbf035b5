//! Language modelling: each token predicts the next.

use std::path::Path;

use burn::tensor::Tensor;
use fireclay_datasets::{Corpus, StoryCorpus, TextCorpus, TokenBatch, Tokenizer, TokenizerKind, read_text};
use fireclay_kernels::{Backend, HeadLossOptions};
use fireclay_model::{Transformer, TransformerConfig};

use crate::device_read::read_scalars;
use crate::failure::Failure;
use crate::run_folder::{GENERATION, TOKENIZER, write_atomic};
use crate::training::recipe::schema::{Recipe, TrainingRecipe};

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
    /// The text of `recipe`, by the tokenizer in the folder `model`, where there is one, or else the recipe's.
    pub(crate) fn begin(recipe: &Recipe, model: Option<&Path>) -> Result<Self, Failure> {
        let tokenizer = model.map(|model| Tokenizer::load(&model.join(TOKENIZER))).transpose()?;
        let seq_length = recipe.training.seq_length;
        if recipe.data.source == "stories" {
            let stories = StoryCorpus::new(seq_length);
            let tokenizer = tokenizer.map_or_else(|| stories.tokenizer(), Ok)?;
            return Ok(Self { corpus: Corpus::Stories(stories), tokenizer });
        }
        if recipe.data.source.is_empty() {
            return Err(recipe.lacks_data("text"));
        }
        let text = read_text(Path::new(&recipe.data.source))?;
        let tokenizer = match (tokenizer, recipe.data.tokenizer.as_str()) {
            (Some(tokenizer), _) => tokenizer,
            (None, "byte") => Tokenizer::train(TokenizerKind::Byte, "")?,
            (None, "char") => Tokenizer::train(TokenizerKind::Char, &text)?,
            (None, "bpe") => Tokenizer::train(TokenizerKind::Bpe(recipe.data.bpe_size), &text)?,
            (None, file) => Tokenizer::load(Path::new(file))?,
        };
        let corpus = TextCorpus::new(tokenizer.encode(&text)?, seq_length, recipe.data.holdout)
            .map_err(|error| Failure::new(format!("{}: {error}", recipe.data.source)))?;
        Ok(Self { corpus: Corpus::Text(corpus), tokenizer })
    }

    pub(crate) fn describe(&self, config: &TransformerConfig, training: &TrainingRecipe) -> String {
        let rows = training.batch_size * training.accumulation;
        let (known, steps, seq_length) = (config.vocab_size, training.steps, training.seq_length);
        format!("{known} tokens known; {steps} steps of {rows} x {seq_length} tokens")
    }

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
                write_atomic(&folder.join(GENERATION), text.as_bytes())
            }
            None => Ok(()),
        }
    }
}
