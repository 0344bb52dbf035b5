//! Masked-language modelling (Devlin et al., 2018): an encoder predicts tokens that it cannot see.

use std::path::Path;

use burn::tensor::Tensor;
use fireclay_datasets::{BatchKey, IGNORED_TARGET, TokenBatch, Tokenizer};
use fireclay_kernels::{Backend, Collective, HeadLossOptions, RandomKey, Rank, all_reduce};
use fireclay_model::{Transformer, TransformerConfig};

use super::language::{Language, loss};
use crate::device_read::read_scalars;
use crate::failure::Failure;
use crate::progress::Watch;
use crate::recipe::schema::{Recipe, TrainingRecipe};

/// The names of the token that hides another, as tokenizers spell it.
const MASKS: [&str; 2] = ["[MASK]", "<mask>"];
/// Of the predicted tokens, the share that the mask replaces, and the share that another token
/// does; the rest stays as it is.
const HIDDEN: f64 = 0.8;
const EXCHANGED: f64 = 0.1;
/// The seed of the masks in validation, where they are always the same.
const VALIDATION: u64 = 0x6d61_736b;

/// A text corpus, and the token that hides others.
pub struct Masked {
    language: Language,
    mask: u32,
}

impl Masked {
    /// As [`Language::begin`]. A tokenizer without a mask gets one, unless a model knows it
    /// already.
    pub(crate) fn begin(recipe: &Recipe, model: Option<&Path>, watch: Watch<'_>) -> Result<Self, Failure> {
        if recipe.data.documents_apart {
            return Err(Failure::usage(
                "data.documents_apart is set: it is for the task language, whose attention is causal",
            ));
        }
        let mut language = Language::begin(recipe, model, watch)?;
        if mask_of(&language.tokenizer).is_none() {
            if let Some(model) = model {
                let (model, names) = (model.display(), MASKS.join(" or "));
                return Err(Failure::new(format!("the tokenizer of {model} has no token {names} to hide others with")));
            }
            language.tokenizer = language.tokenizer.with_control_tokens(&MASKS[..1])?;
        }
        Self::of(language)
    }

    /// As [`Language::resume`].
    pub(crate) fn resume(recipe: &Recipe, folder: &Path, watch: Watch<'_>) -> Result<Self, Failure> {
        Self::of(Language::resume(recipe, folder, watch)?)
    }

    fn of(language: Language) -> Result<Self, Failure> {
        let missing = || Failure::new(format!("the tokenizer has no token {}", MASKS.join(" or ")));
        let mask = mask_of(&language.tokenizer).ok_or_else(missing)?;
        Ok(Self { language, mask })
    }

    /// The corpus and its tokenizer.
    pub(crate) fn language(&self) -> &Language {
        &self.language
    }

    /// Rows of a step, of whose tokens `training.masked` are predicted.
    pub(crate) fn batch(&self, training: &TrainingRecipe, key: BatchKey, rows: usize) -> Result<TokenBatch, Failure> {
        let batch = self.language.corpus.batch(key, rows)?;
        self.masked(&batch, training.masked, RandomKey::new(key.seed).fold(key.step))
    }

    /// The tokens of `batch`, of which a share is hidden and predicted.
    fn masked(&self, batch: &TokenBatch, share: f64, key: RandomKey) -> Result<TokenBatch, Failure> {
        let known = self.language.tokenizer.vocab_size() as i32;
        let width = batch.seq_length();
        let hide = |(at, token): (usize, &i32)| {
            let (row, column) = ((at / width) as u32, (at % width) as u32);
            if key.uniform(row, column) >= share {
                return (*token, IGNORED_TARGET);
            }
            let kind = key.fold(1).uniform(row, column);
            let seen = if kind < HIDDEN {
                self.mask as i32
            } else if kind < HIDDEN + EXCHANGED {
                ((key.fold(2).uniform(row, column) * f64::from(known)) as i32).min(known - 1)
            } else {
                *token
            };
            (seen, *token)
        };
        let (inputs, targets) = batch.inputs().iter().enumerate().map(hide).unzip();
        Ok(TokenBatch::new(inputs, targets, width)?)
    }

    /// Mean loss of the hidden tokens among about `tokens` held-out ones, in nats per token; the
    /// ranks take the batches in turn.
    pub(crate) fn validate<B: Backend>(
        &self,
        model: &Transformer<B>,
        training: &TrainingRecipe,
        tokens: usize,
        device: &B::Device,
        collective: &Collective,
    ) -> Result<f64, Failure> {
        let Rank { rank, ranks } = collective.rank();
        let batches = self.language.corpus.valid_batches(training.batch_size, tokens)?;
        let key = RandomKey::new(VALIDATION);
        let masked = |(at, batch): (usize, &TokenBatch)| self.masked(batch, training.masked, key.fold(at as u64));
        let batches: Vec<TokenBatch> = batches.iter().enumerate().map(masked).collect::<Result<_, _>>()?;
        let total: usize = batches.iter().map(TokenBatch::target_count).sum();
        let mut sum = Tensor::<B, 1>::zeros([1], device);
        for batch in batches.iter().skip(rank).step_by(ranks) {
            let share = batch.target_count() as f64 / total.max(1) as f64;
            sum = sum + loss(model, batch, HeadLossOptions::new().with_weight(share), device);
        }
        Ok(read_scalars(all_reduce(vec![sum], collective))?[0])
    }

    pub(crate) fn describe(&self, config: &TransformerConfig, training: &TrainingRecipe) -> String {
        let hidden = 100.0 * training.masked;
        format!("{}, {hidden:.0}% of them hidden", self.language.describe(config, training))
    }
}

/// The id of a tokenizer's mask.
fn mask_of(tokenizer: &Tokenizer) -> Option<u32> {
    MASKS.iter().find_map(|name| tokenizer.token_id(name))
}

#[cfg(test)]
mod tests {
    use fireclay_datasets::{Corpus, TextCorpus, TokenizerKind};

    use super::*;

    #[test]
    fn a_share_of_the_tokens_is_hidden_and_only_these_are_predicted() {
        let text = "The kiln's clay is fired at 1250 degrees. ".repeat(200);
        let tokenizer = Tokenizer::train(TokenizerKind::Char, &text).expect("a tokenizer");
        let tokens = tokenizer.encode(&text).expect("tokens");
        let corpus = Corpus::Text(TextCorpus::new(tokens, 40, 0.1).expect("a corpus"));
        let tokenizer = tokenizer.with_control_tokens(&["[MASK]"]).expect("one more token");
        let task = Masked::of(Language::new(corpus, tokenizer)).expect("a mask");
        assert_eq!(task.mask as usize + 1, task.language.tokenizer.vocab_size());
        let training = TrainingRecipe { masked: 0.3, ..TrainingRecipe::default() };
        let key = BatchKey::new(5, 3);
        let plain = task.language.corpus.batch(key, 50).expect("rows");
        let batch = task.batch(&training, key, 50).expect("rows");
        assert_eq!(batch.inputs().len(), 50 * 40);
        let (mut predicted, mut hidden, mut kept) = (0, 0, 0);
        for ((seen, target), token) in batch.inputs().iter().zip(batch.targets()).zip(plain.inputs()) {
            if *target == IGNORED_TARGET {
                assert_eq!(seen, token, "what is not predicted stays");
                continue;
            }
            assert_eq!(target, token, "its own token is predicted");
            predicted += 1;
            hidden += usize::from(*seen == task.mask as i32);
            kept += usize::from(seen == token);
        }
        let near = |count: usize, of: usize, share: f64| (count as f64 / of as f64 - share).abs() < 0.06;
        assert!(
            near(predicted, 2000, 0.3) && near(hidden, predicted, 0.8) && near(kept, predicted, 0.1),
            "{predicted} {hidden} {kept}"
        );
        assert_eq!(
            task.batch(&training, key, 50).expect("rows").inputs(),
            batch.inputs(),
            "a function of seed and step"
        );
        assert_ne!(task.batch(&training, BatchKey::new(5, 4), 50).expect("rows").targets(), batch.targets());
    }
}
