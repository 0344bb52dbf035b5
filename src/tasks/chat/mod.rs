//! Supervised fine-tuning on conversations: the model learns to write what the assistant says.

mod folder;
mod mask;
mod packing;

use std::path::Path;

use burn::tensor::Tensor;
use fireclay_datasets::conversations::{Conversation, Conversations, Layout};
use fireclay_datasets::{BatchKey, IGNORED_TARGET, TokenBatch, Tokenizer};
use fireclay_kernels::{Backend, Collective, HeadLossOptions, Rank, all_reduce};
use fireclay_model::{Transformer, TransformerConfig};
use rayon::prelude::*;

pub(super) use self::folder::ChatFolder;
pub use self::mask::{Example, Masker};
pub(super) use self::packing::Rows;
use super::held_out::parted;
use super::language;
use super::validation::Validation;
use crate::device_read::{read_scalars, recorded};
use crate::failure::Failure;
use crate::recipe::schema::{Recipe, TrainingRecipe};

/// Conversations, rendered by the model's chat template.
pub struct Chat {
    folder: ChatFolder,
    /// What is learned from, in rows.
    train: Packed,
    /// What is held out, in rows.
    valid: Packed,
    report: Report,
}

/// Examples in rows.
struct Packed {
    examples: Vec<Example>,
    rows: Rows,
    seq_length: usize,
}

/// What became of the conversations.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// How the records are laid out.
    pub layout: Option<Layout>,
    /// Conversations that were read.
    pub conversations: usize,
    /// Examples that they became: more where a template renders earlier turns differently.
    pub examples: usize,
    /// Examples whose end was cut off, as they are longer than a row.
    pub cut: usize,
    /// Conversations without a supervised token within a row's length.
    pub dropped: usize,
    /// Those of them that have one beyond it.
    pub too_long: usize,
    /// Tokens that the model reads.
    pub tokens: usize,
    /// Tokens that it learns to write.
    pub supervised: usize,
}

impl Chat {
    /// The conversations of `recipe`, by the tokenizer and the chat template of the model to begin
    /// from.
    pub(super) fn begin(recipe: &Recipe, model: Option<&Path>) -> Result<Self, Failure> {
        Self::of(recipe, ChatFolder::begin(recipe, model)?)
    }

    /// The same by what the checkpoint `folder` has.
    pub(super) fn resume(recipe: &Recipe, folder: &Path) -> Result<Self, Failure> {
        Self::of(recipe, ChatFolder::open(folder)?)
    }

    fn of(recipe: &Recipe, mut folder: ChatFolder) -> Result<Self, Failure> {
        let source = &recipe.data.source;
        if source.is_empty() {
            return Err(recipe.lacks_data("conversations"));
        }
        let read = Conversations::open(Path::new(source))?;
        let (seq_length, about) =
            (recipe.training.seq_length, |number: usize| format!("{source}: record {}", number + 1));
        let mut report = Report { layout: Some(read.layout), conversations: read.all.len(), ..Report::default() };
        let masker = Masker::new(&folder.template, &folder.tokenizer)?;
        let examples = |(number, conversation): (usize, &Conversation)| {
            masker.examples(conversation).map_err(|failure| failure.about(&about(number)))
        };
        let all: Vec<Vec<Example>> = read.all.par_iter().enumerate().map(examples).collect::<Result<_, _>>()?;
        let control = masker.controls_of(all.iter().flatten());
        folder.learn_ends(all.iter().flatten(), |token| control.contains(&token));
        // The first token of a sequence is not predicted.
        let learned = |example: &Example| example.supervised.iter().skip(1).filter(|supervised| **supervised).count();
        let mut fitting = |of_one: Vec<Example>| {
            let answers = of_one.iter().any(|example| learned(example) > 0);
            let mut kept = Vec::new();
            for mut example in of_one {
                if example.positions() > seq_length {
                    example.tokens.truncate(seq_length + 1);
                    example.supervised.truncate(seq_length + 1);
                    report.cut += 1;
                }
                let supervised = learned(&example);
                if supervised == 0 {
                    continue;
                }
                report.examples += 1;
                report.tokens += example.positions();
                report.supervised += supervised;
                kept.push(example);
            }
            if kept.is_empty() {
                report.dropped += 1;
                report.too_long += usize::from(answers);
            }
            kept
        };
        let mut all: Vec<Vec<Example>> = all.into_iter().map(&mut fitting).collect();
        all.retain(|kept| !kept.is_empty());
        if all.len() < 2 {
            return Err(Failure::new(format!("{source}: {}", too_few(&report, &folder, seq_length))));
        }
        let (train, valid) = parted(all, recipe);
        let [train, valid] = [train, valid].map(|part| part.into_iter().flatten().collect::<Vec<Example>>());
        let pack = |examples| Packed::new(examples, seq_length, recipe.data.packing);
        Ok(Self { folder, train: pack(train), valid: pack(valid), report })
    }

    /// How text becomes tokens.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.folder.tokenizer
    }

    /// What became of the conversations.
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// For each token the one of the model that a run begins from whose embedding it takes, where
    /// there are new tokens.
    pub(super) fn initial_rows(&self) -> Option<&[Option<u32>]> {
        self.folder.rows.as_deref()
    }

    /// The rows of a step: each row once an epoch, in an order that the seed and the epoch decide.
    pub(super) fn batch(&self, key: BatchKey, rows: usize) -> TokenBatch {
        self.train.batch(&self.train.rows.of_step(key, rows))
    }

    /// Mean loss of held-out examples' supervised tokens, of about `tokens` positions, in nats, and
    /// the share of answers that greedy decoding would generate: those whose every token has the
    /// largest logit.
    pub(super) fn validate<B: Backend>(
        &self,
        model: &Transformer<B>,
        batch_size: usize,
        tokens: usize,
        device: &B::Device,
        collective: &Collective,
    ) -> Result<Validation, Failure> {
        let Rank { rank, ranks } = collective.rank();
        let rows = self.valid.rows.sample(tokens, self.valid.seq_length);
        let batches: Vec<(&[usize], TokenBatch)> =
            rows.chunks(batch_size).map(|rows| (rows, self.valid.batch(rows))).collect();
        let total: usize = batches.iter().map(|(_, batch)| batch.target_count()).sum();
        let mut sum = Tensor::<B, 1>::zeros([1], device);
        let mut answers = (0, 0);
        for (rows, batch) in batches.iter().skip(rank).step_by(ranks) {
            let share = batch.target_count() as f64 / total.max(1) as f64;
            let options = HeadLossOptions::new().with_weight(share);
            let mut states = None;
            sum = sum
                + language::loss_by(model, batch, options, device, |tokens| {
                    let hidden = model.forward(tokens);
                    states = Some(hidden.clone());
                    hidden
                });
            if let Some(states) = states {
                let (right, all) = self.valid.right_answers(rows, batch, &top_tokens(model, states)?);
                answers = (answers.0 + right, answers.1 + all);
            }
        }
        let counts = Tensor::from_floats([answers.0 as f32, answers.1 as f32], device);
        let figures = read_scalars(all_reduce(vec![Tensor::cat(vec![sum, counts], 0)], collective))?;
        let share = 100.0 * figures[1] / figures[2].max(1.0);
        Ok(Validation { answer_accuracy: Some(share), ..Validation::of_loss(figures[0]) })
    }

    pub(super) fn checksum(&self) -> Result<String, Failure> {
        Ok(self.folder.tokenizer.sha256()?)
    }

    /// What is trained on, and how much of it is supervised.
    pub(super) fn describe(&self, _config: &TransformerConfig, training: &TrainingRecipe) -> String {
        let Report { layout, conversations, examples, cut, dropped, too_long, tokens, supervised } = &self.report;
        let layout = layout.map_or_else(String::new, |layout| format!("{layout}: "));
        let share = 100.0 * *supervised as f64 / (*tokens).max(1) as f64;
        let (steps, rows) = (training.steps, training.batch_size * training.accumulation);
        let (packed, epochs) =
            (self.train.rows.len(), (steps as f64 * rows as f64) / self.train.rows.len().max(1) as f64);
        let mut lost = String::new();
        if *cut > 0 {
            lost += &format!(", {cut} cut at {} tokens", training.seq_length);
        }
        if *too_long > 0 {
            lost += &format!(", {too_long} dropped as nothing within these is supervised");
        }
        if dropped > too_long {
            lost += &format!(", {} dropped as nothing in them is supervised", dropped - too_long);
        }
        format!(
            "{layout}{conversations} conversations, {examples} examples{lost}; {share:.1}% of {tokens} tokens are \
             supervised; {packed} rows, {steps} steps of {rows} ({epochs:.1} epochs)"
        )
    }

    /// The first example as the model reads it, with what is supervised within marks: in colour, or
    /// in double brackets.
    pub(super) fn preview(&self, colour: bool) -> Result<String, Failure> {
        let Some(example) = self.train.examples.first() else { return Ok(String::new()) };
        example.shown(&self.folder.tokenizer, colour)
    }

    pub(super) fn save(&self, folder: &Path) -> Result<(), Failure> {
        self.folder.save(folder)
    }
}

impl Packed {
    fn new(examples: Vec<Example>, seq_length: usize, packing: bool) -> Self {
        let lengths: Vec<usize> = examples.iter().map(Example::positions).collect();
        Self { examples, rows: Rows::new(&lengths, seq_length, packing), seq_length }
    }

    /// How many examples of a batch of rows have the tokens `top` at all supervised positions, and
    /// how many there are.
    fn right_answers(&self, rows: &[usize], batch: &TokenBatch, top: &[i32]) -> (usize, usize) {
        let (mut right, mut all) = (0, 0);
        for (at, row) in rows.iter().enumerate() {
            let mut first = at * self.seq_length;
            for example in self.rows.of_row(*row) {
                let places = first..first + self.examples[*example].positions();
                first = places.end;
                let mut supervised = places.filter(|place| batch.targets()[*place] != IGNORED_TARGET);
                right += usize::from(supervised.all(|place| batch.targets()[place] == top[place]));
                all += 1;
            }
        }
        (right, all)
    }

    fn batch(&self, rows: &[usize]) -> TokenBatch {
        self.rows.batch(rows, &self.examples, self.seq_length)
    }
}

/// Logits that are computed at a time for their largest.
const LOGITS: usize = 1 << 24;

/// The token with the largest logit at each position, from hidden states.
fn top_tokens<B: Backend>(model: &Transformer<B>, hidden: Tensor<B, 3>) -> Result<Vec<i32>, Failure> {
    let [rows, length, width] = hidden.dims();
    let (hidden, positions) = (hidden.reshape([1, rows * length, width]), rows * length);
    let each = (LOGITS / model.config().vocab_size).clamp(1, positions);
    let mut top = Vec::with_capacity(positions);
    for first in (0..positions).step_by(each) {
        let states = hidden.clone().narrow(1, first, each.min(positions - first));
        let tokens = recorded(model.logits(states).argmax(2).try_into_data());
        let tokens = tokens.map_err(|error| Failure::new(format!("the device failed: {error:?}")))?;
        top.extend(tokens.iter::<i32>());
    }
    Ok(top)
}

/// Why too few conversations are left to learn from and to hold one out.
fn too_few(report: &Report, folder: &ChatFolder, seq_length: usize) -> String {
    let Report { conversations, dropped, too_long, .. } = report;
    let mut told = format!(
        "{} of {conversations} conversations can be learned from: at least two are needed, one of them to hold out",
        conversations - dropped
    );
    if *too_long > 0 {
        told += &format!(
            "; {too_long} dropped without a supervised token within seq_length={seq_length} tokens: --set seq_length=N"
        );
    }
    if dropped > too_long {
        let part = match folder.template.marks_generations() {
            true => "what it marks with {% generation %} is empty",
            false => "no message has the role 'assistant', or all of these have the weight 0",
        };
        told += &format!("; {} dropped without any supervised token: by the chat template {part}", dropped - too_long);
    }
    told
}
