//! Learning from preferences: of two answers to a prompt, the model learns to prefer one (DPO;
//! Rafailov et al., 2023, "Direct Preference Optimization: Your Language Model is Secretly a Reward
//! Model").
//!
//! The model is held to a reference, which is the model as the run begins: without an adapter, or
//! with the adapter that the run continues. A row holds whole pairs, so that one pass has the
//! log-probabilities of both answers.

mod batch;
mod loss;

use std::path::Path;

use burn::tensor::Tensor;
use fireclay_datasets::conversations::{Conversation, Preference};
use fireclay_datasets::{BatchKey, Tokenizer};
use fireclay_kernels::{Backend, Collective, Rank, all_reduce};
use fireclay_model::Transformer;
use rayon::prelude::*;

pub use self::batch::PairBatch;
pub use self::loss::{loss_by, pair_losses};
use super::chat::{ChatFolder, Example, Masker, Rows};
use super::held_out::parted;
use super::rewards::Rewards;
use super::validation::Validation;
use crate::device_read::read_scalars;
use crate::failure::Failure;
use crate::recipe::schema::{Recipe, TrainingRecipe};

/// Preference pairs, rendered with the model's chat template.
pub struct Preferences {
    folder: ChatFolder,
    train: PackedPairs,
    valid: PackedPairs,
    /// Pairs that were read, and those that are longer than a row.
    read: usize,
    dropped: usize,
}

/// Pairs in rows.
struct PackedPairs {
    pairs: Vec<[Example; 2]>,
    rows: Rows,
    seq_length: usize,
}

impl Preferences {
    /// The pairs of `recipe`, with the tokenizer and the chat template of the model to begin from.
    pub(super) fn begin(recipe: &Recipe, model: Option<&Path>) -> Result<Self, Failure> {
        Self::of(recipe, ChatFolder::begin(recipe, model)?)
    }

    /// The same with those of the checkpoint `folder`.
    pub(super) fn resume(recipe: &Recipe, folder: &Path) -> Result<Self, Failure> {
        let mut folder = ChatFolder::open(folder)?;
        // Rewards are measured against the model as the run began, with its new tokens.
        folder.rows = ChatFolder::begin(recipe, recipe.init.as_deref())?.rows;
        Self::of(recipe, folder)
    }

    fn of(recipe: &Recipe, mut folder: ChatFolder) -> Result<Self, Failure> {
        let source = &recipe.data.source;
        if source.is_empty() {
            return Err(recipe.lacks_data("preference pairs"));
        }
        let read = Preference::read(Path::new(source))?;
        let masker = Masker::new(&folder.template, &folder.tokenizer)?;
        let pair = |(number, Preference { chosen, rejected }): (usize, &Preference)| {
            let one = |conversation: &Conversation| {
                let about = |failure: Failure| failure.about(&format!("{source}: record {}", number + 1));
                let mut examples = masker.examples(conversation).map_err(about)?;
                match (examples.pop(), examples.is_empty()) {
                    (Some(example), true) => Ok(example),
                    _ => Err(about(Failure::new(
                        "the chat template renders the turns of an answer differently: give an answer of one turn",
                    ))),
                }
            };
            Ok([one(chosen)?, one(rejected)?])
        };
        let all: Vec<[Example; 2]> = read.par_iter().enumerate().map(pair).collect::<Result<_, Failure>>()?;
        let control = masker.controls_of(all.iter().flatten());
        let (seq_length, count) = (recipe.training.seq_length, all.len());
        let fits = |pair: &[Example; 2]| {
            let supervised = pair.iter().all(|example| example.supervised.iter().skip(1).any(|flag| *flag));
            supervised && length(pair) <= seq_length
        };
        let all: Vec<[Example; 2]> = all.into_iter().filter(fits).collect();
        if all.len() < 2 {
            return Err(Failure::new(format!(
                "{source}: {} of {count} pairs fit into a row of seq_length={seq_length} tokens, chosen and rejected \
                 together: at least two are needed, one of them to hold out; --set seq_length=N",
                all.len()
            )));
        }
        let dropped = count - all.len();
        folder.learn_ends(all.iter().map(|[chosen, _]| chosen), |token| control.contains(&token));
        let (train, valid) = parted(all, recipe);
        let pack = |pairs: Vec<[Example; 2]>| {
            let lengths: Vec<usize> = pairs.iter().map(length).collect();
            PackedPairs { pairs, rows: Rows::new(&lengths, seq_length, recipe.data.packing), seq_length }
        };
        Ok(Self { folder, train: pack(train), valid: pack(valid), read: count, dropped })
    }

    /// How text becomes tokens.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.folder.tokenizer
    }

    pub(super) fn initial_rows(&self) -> Option<&[Option<u32>]> {
        self.folder.rows.as_deref()
    }

    /// The rows of a step: each row once an epoch, in an order that the seed and the epoch decide.
    pub(super) fn batch(&self, key: BatchKey, rows: usize) -> PairBatch {
        self.train.batch(&self.train.rows.of_step(key, rows))
    }

    /// Mean loss of held-out pairs, of about `tokens` positions, and their rewards; one read from
    /// the device.
    pub(super) fn validate<B: Backend>(
        &self,
        model: &Transformer<B>,
        reference: &Transformer<B>,
        recipe: &Recipe,
        tokens: usize,
        device: &B::Device,
        collective: &Collective,
    ) -> Result<Validation, Failure> {
        let Rank { rank, ranks } = collective.rank();
        let rows = self.valid.rows.sample(tokens, self.valid.seq_length);
        let batches: Vec<PairBatch> =
            rows.chunks(recipe.training.batch_size).map(|rows| self.valid.batch(rows)).collect();
        let whole: usize = batches.iter().map(PairBatch::pairs).sum();
        let mut sums = Tensor::<B, 1>::zeros([1 + Rewards::COUNT], device);
        for batch in batches.iter().skip(rank).step_by(ranks) {
            let (loss, rewards) =
                loss_by(model, reference, batch, recipe, whole, device, |tokens| model.forward(tokens));
            sums = sums + Tensor::cat(vec![loss, rewards], 0);
        }
        let figures = read_scalars(all_reduce(vec![sums], collective))?;
        Ok(Validation { rewards: Rewards::of(&figures[1..]), ..Validation::of_loss(figures[0]) })
    }

    pub(super) fn checksum(&self) -> Result<String, Failure> {
        Ok(self.folder.tokenizer.sha256()?)
    }

    /// What is trained on.
    pub(super) fn describe(&self, training: &TrainingRecipe) -> String {
        let (steps, rows, packed) =
            (training.steps, training.batch_size * training.accumulation, self.train.rows.len());
        let epochs = (steps as f64 * rows as f64) / packed.max(1) as f64;
        let dropped = match self.dropped {
            0 => String::new(),
            dropped => format!(", {dropped} dropped as they are longer than {} tokens", training.seq_length),
        };
        format!("{} preference pairs{dropped}; {packed} rows, {steps} steps of {rows} ({epochs:.1} epochs)", self.read)
    }

    /// The first pair as the model reads it, with the answers within marks.
    pub(super) fn preview(&self, colour: bool) -> Result<String, Failure> {
        let Some([chosen, rejected]) = self.train.pairs.first() else { return Ok(String::new()) };
        let [chosen, rejected] = [chosen, rejected].map(|example| example.shown(&self.folder.tokenizer, colour));
        Ok(format!("chosen:\n{}\n\nrejected:\n{}", chosen?, rejected?))
    }

    pub(super) fn save(&self, folder: &Path) -> Result<(), Failure> {
        self.folder.save(folder)
    }
}

/// Positions that a pair takes in a row.
fn length(pair: &[Example; 2]) -> usize {
    pair.iter().map(Example::positions).sum()
}

impl PackedPairs {
    fn batch(&self, rows: &[usize]) -> PairBatch {
        let pairs = |row: &usize| self.rows.of_row(*row).iter().map(|pair| self.pairs[*pair].each_ref());
        PairBatch::new(self.seq_length, rows.iter().map(pairs))
    }
}
