//! Language modelling: each token predicts the next.

use std::path::Path;

use burn::tensor::Tensor;
use fireclay_datasets::{
    Corpus, DeviceTokens, StoryCorpus, TextCorpus, TextSource, TokenBatch, TokenFiles, Tokenizer, TokenizerKind,
};
use fireclay_kernels::{Backend, Collective, HeadLossOptions, Rank, all_reduce};
use fireclay_model::{Tokens, Transformer, TransformerConfig};

use crate::device_read::read_scalars;
use crate::failure::Failure;
use crate::inference::generation::{GenerationOptions, Generator};
use crate::model_folder;
use crate::progress::Watch;
use crate::recipe::schema::{Recipe, TrainingRecipe};
use crate::run_folder::{GENERATION, TOKENIZER, write_atomic};
use crate::token_cache::tokens;

/// A text corpus and its tokenizer.
pub struct Language {
    /// The training and held-out data.
    pub corpus: Corpus,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// For each token, the token of the initial model whose embedding it takes.
    pub(crate) rows: Option<Vec<Option<u32>>>,
}

/// Mean cross entropy times the options' weight: `[1]`, in nats per token.
pub fn loss<B: Backend>(
    model: &Transformer<B>,
    batch: &TokenBatch,
    options: HeadLossOptions,
    device: &B::Device,
) -> Tensor<B, 1> {
    loss_by(model, batch, options, device, |tokens| model.forward(tokens))
}

/// [`loss`] with the hidden states of `forward`.
pub(crate) fn loss_by<B: Backend>(
    model: &Transformer<B>,
    batch: &TokenBatch,
    options: HeadLossOptions,
    device: &B::Device,
    forward: impl FnOnce(Tokens<B>) -> Tensor<B, 3>,
) -> Tensor<B, 1> {
    let DeviceTokens { inputs, targets, document_starts } = batch.to_device(device);
    let tokens = Tokens::from(inputs);
    let hidden = forward(match document_starts {
        Some(starts) => tokens.with_document_starts(starts),
        None => tokens,
    });
    model.loss(hidden, targets, options)
}

impl Language {
    /// A corpus and its tokenizer.
    pub fn new(corpus: Corpus, tokenizer: Tokenizer) -> Self {
        Self { corpus, tokenizer, rows: None }
    }

    /// The corpus of `recipe`, with the tokenizer of the initial model if any, else the recipe's.
    pub(crate) fn begin(recipe: &Recipe, model: Option<&Path>, watch: Watch<'_>) -> Result<Self, Failure> {
        let Some(model) = model else {
            return Self::of(recipe, None, watch);
        };
        let known = model_folder::tokenizer(model)?;
        let Some(file) = recipe.tokenizer_file() else {
            return Self::of(recipe, Some(known), watch);
        };
        let wanted = Tokenizer::load(file)?;
        if wanted.sha256()? == known.sha256()? {
            return Self::of(recipe, Some(known), watch);
        }
        if !recipe.data.resize_embedding {
            let (file, model) = (file.display(), model.display());
            return Err(Failure::usage(format!(
                "{file} is not the tokenizer of {model}, whose embedding knows other tokens: leave the tokenizer \
                 out, or --set resize_embedding=true to give each token that {model} does not know a new row"
            )));
        }
        let rows = wanted.tokens_of(&known);
        Ok(Self { rows: Some(rows), ..Self::of(recipe, Some(wanted), watch)? })
    }

    /// The corpus of `recipe`, with the tokenizer in the checkpoint `folder`.
    pub(crate) fn resume(recipe: &Recipe, folder: &Path, watch: Watch<'_>) -> Result<Self, Failure> {
        Self::of(recipe, Some(Tokenizer::load(&folder.join(TOKENIZER))?), watch)
    }

    /// The corpus of `recipe`, with `tokenizer` or the recipe's.
    fn of(recipe: &Recipe, tokenizer: Option<Tokenizer>, watch: Watch<'_>) -> Result<Self, Failure> {
        let (seq_length, data) = (recipe.training.seq_length, &recipe.data);
        if data.source == "stories" {
            let stories = StoryCorpus::new(seq_length);
            let tokenizer = tokenizer.map_or_else(|| stories.tokenizer(), Ok)?;
            return Ok(Self::new(Corpus::Stories(stories), tokenizer));
        }
        let corpora = recipe.corpora()?;
        let tokenizer = match tokenizer {
            Some(tokenizer) => tokenizer,
            None => make_tokenizer(recipe, &corpora)?,
        };
        let mut files = Vec::new();
        for (path, weight) in &corpora {
            files.push((tokens(path, &tokenizer, data, watch)?, *weight));
        }
        let shown: Vec<String> = corpora.iter().map(|(path, _)| path.display().to_string()).collect();
        let corpus = TextCorpus::of_files(files, seq_length, data.holdout);
        let corpus = if data.documents_apart { corpus.and_then(TextCorpus::with_documents_apart) } else { corpus };
        let corpus = corpus.map_err(|error| Failure::new(format!("{}: {error}", shown.join(", "))))?;
        Ok(Self::new(Corpus::Text(corpus), tokenizer))
    }

    pub(crate) fn describe(&self, config: &TransformerConfig, training: &TrainingRecipe) -> String {
        let rows = training.batch_size * training.accumulation;
        let (known, steps, seq_length) = (config.vocab_size, training.steps, training.seq_length);
        format!("vocabulary of {known} tokens; {steps} steps of {rows} x {seq_length} tokens")
    }

    /// Mean loss over about `tokens` held-out tokens, in nats per token, whose batches the ranks take in
    /// turn; one read from the device.
    pub(crate) fn validate<B: Backend>(
        &self,
        model: &Transformer<B>,
        batch_size: usize,
        tokens: usize,
        device: &B::Device,
        collective: &Collective,
    ) -> Result<f64, Failure> {
        let Rank { rank, ranks } = collective.rank();
        let batches = self.corpus.valid_batches(batch_size, tokens)?;
        let total: usize = batches.iter().map(TokenBatch::target_count).sum();
        let mut sum = Tensor::<B, 1>::zeros([1], device);
        for batch in batches.iter().skip(rank).step_by(ranks) {
            let share = batch.target_count() as f64 / total.max(1) as f64;
            sum = sum + loss(model, batch, HeadLossOptions::new().with_weight(share), device);
        }
        Ok(read_scalars(all_reduce(vec![sum], collective))?[0])
    }

    /// Generates after `prompt` or, if it is empty, from the start of a document.
    pub(crate) fn sample<B: Backend>(
        &self,
        model: Transformer<B>,
        prompt: &str,
        tokens: usize,
        seed: u64,
        device: &B::Device,
    ) -> Result<String, Failure> {
        let from = if prompt.is_empty() { self.beginning()? } else { prompt.to_string() };
        let generator = Generator::new(model, self.tokenizer.clone(), device.clone());
        let room = self.room_behind(&from, generator.model().config().context_length)?;
        let wanted = tokens.min(room);
        let options = GenerationOptions { max_tokens: Some(wanted), seed, ..GenerationOptions::default() };
        let prepared = generator.prepare(&from, &options)?;
        let written = generator.generate(&prepared, &options, |_| {})?.text;
        Ok(if prompt.is_empty() { written } else { format!("{prompt}{written}") })
    }

    /// The start of a sample without a prompt: the end token, else a line break, a space, or any
    /// token.
    fn beginning(&self) -> Result<String, Failure> {
        let end = self.corpus.end_token().and_then(|end| self.tokenizer.token(end));
        let common = ["\n", " "].map(String::from).into_iter();
        let tokens = (0..self.tokenizer.vocab_size() as u32).filter_map(|token| self.tokenizer.decode(&[token]).ok());
        let known = |text: &String| self.tokenizer.encode(text).is_ok_and(|tokens| !tokens.is_empty());
        let beginning = end.into_iter().chain(common).chain(tokens).find(known);
        beginning.ok_or_else(|| Failure::new("the vocabulary has no token to start a sample from"))
    }

    /// How many tokens a sample may have after `prompt`.
    ///
    /// # Errors
    /// If the prompt has tokens outside the vocabulary, or leaves no room.
    fn room_behind(&self, prompt: &str, context_length: usize) -> Result<usize, Failure> {
        // With the tokens that the tokenizer adds.
        let length = self.tokenizer.encode_prompt(prompt)?.len();
        match context_length.saturating_sub(length) {
            0 => Err(Failure::new(format!(
                "the prompt has {length} tokens, and the model's context is {context_length}: no room to generate"
            ))),
            room => Ok(room),
        }
    }

    /// Checks the prompt for samples.
    ///
    /// # Errors
    /// If it has tokens outside the vocabulary, or fills the context.
    pub(crate) fn check_sample(&self, prompt: &str, context_length: usize) -> Result<(), Failure> {
        let from = if prompt.is_empty() { self.beginning()? } else { prompt.to_string() };
        let checked = self.room_behind(&from, context_length);
        checked.map(drop).map_err(|failure| Failure::usage(format!("training.sample_prompt: {failure}")))
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

/// The recipe's tokenizer, trained on its data if need be.
fn make_tokenizer(recipe: &Recipe, corpora: &[(&Path, f64)]) -> Result<Tokenizer, Failure> {
    let data = &recipe.data;
    if let Some(file) = recipe.tokenizer_file() {
        return Ok(Tokenizer::load(file)?);
    }
    if let Some((prepared, _)) = corpora.iter().find(|(path, _)| TokenFiles::are_in(path)) {
        return Ok(TokenFiles::open(prepared)?.tokenizer()?);
    }
    let kind = match data.tokenizer.as_str() {
        "char" => TokenizerKind::Char,
        "bpe" => TokenizerKind::Bpe(data.bpe_size),
        _ => TokenizerKind::Byte,
    };
    let open = |(path, _): &(&Path, f64)| TextSource::open(path, &data.field);
    let sources = corpora.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    Ok(Tokenizer::train_on(kind, &sources)?)
}
