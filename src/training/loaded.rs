//! A trainer of any backend behind one trait, for custom training loops.

use std::path::Path;

use fireclay_datasets::{IGNORED_TARGET, TokenBatch};
use fireclay_kernels::Backend;

use crate::backend::{OnBackend, RunContext};
use crate::failure::Failure;
use crate::recipe::Recipe;
use crate::tasks::Validation;
use crate::training::trainer::{StepOutput, Trainer, read_steps};

/// The recipe of a trainer to create.
pub struct TrainerToLoad(pub Recipe);

/// Reads a step's loss before the update, in nats per target, and its global gradient norm before clipping. Waits for
/// the device.
pub type StepFigures = Box<dyn FnOnce() -> Result<(f64, f64), Failure> + Send>;

/// A step that the device may not have finished.
pub struct StepTaken {
    /// Counted from one.
    pub step: u64,
    /// The learning rate.
    pub learning_rate: f64,
    /// Targets that counted.
    pub tokens: usize,
    /// Loss and gradient norm.
    pub figures: StepFigures,
}

/// A trainer, without its backend type.
///
/// Call its methods inside [`FoundBackend::enter`](crate::backend::FoundBackend::enter).
pub trait LoadedTrainer: Send {
    /// One optimizer step over `batch`, or over the next rows of the recipe's data. Does not wait for the device.
    ///
    /// # Errors
    /// If the task is not a language, rows exceed the context, tokens are not in the vocabulary, all
    /// targets are ignored, or the data cannot be read.
    fn step(&mut self, batch: Option<TokenBatch>) -> Result<StepTaken, Failure>;

    /// Validates on about `tokens` tokens of the recipe's held-out data.
    ///
    /// # Errors
    /// If the device fails.
    fn validate(&mut self, tokens: usize) -> Result<Validation, Failure>;

    /// Writes the model with its tokenizer, in the layout of the hub.
    ///
    /// # Errors
    /// If the file system refuses.
    fn save(&mut self, folder: &Path) -> Result<(), Failure>;

    /// The number of steps taken.
    fn steps(&self) -> u64;

    /// The recipe, with the sizes of its data.
    fn recipe(&self) -> &Recipe;
}

impl OnBackend for TrainerToLoad {
    type Output = Box<dyn LoadedTrainer>;

    fn run<B: Backend>(self, RunContext { device, .. }: RunContext<B>) -> Result<Self::Output, Failure> {
        let Self(recipe) = self;
        Ok(Box::new(Trainer::<B>::new(&recipe, recipe.task()?, device)?))
    }
}

impl<B: Backend> LoadedTrainer for Trainer<B> {
    fn step(&mut self, batch: Option<TokenBatch>) -> Result<StepTaken, Failure> {
        let output: StepOutput<B> = match batch {
            None => self.train_step()?,
            Some(batch) => {
                self.check(&batch)?;
                self.train_on(batch)
            }
        };
        let (step, learning_rate, tokens) = (output.step + 1, output.learning_rate, output.tokens);
        let figures = Box::new(move || Ok(read_steps(&[output])?[0]));
        Ok(StepTaken { step, learning_rate, tokens, figures })
    }

    fn validate(&mut self, tokens: usize) -> Result<Validation, Failure> {
        Trainer::validate(self, tokens)
    }

    fn save(&mut self, folder: &Path) -> Result<(), Failure> {
        Trainer::save(self, folder)
    }

    fn steps(&self) -> u64 {
        self.step()
    }

    fn recipe(&self) -> &Recipe {
        Trainer::recipe(self)
    }
}

impl<B: Backend> Trainer<B> {
    /// Refuses invalid rows.
    fn check(&self, batch: &TokenBatch) -> Result<(), Failure> {
        if !self.recipe().task.writes_text() {
            return Err(Failure::usage("the recipe trains on utterances: a step takes no rows of tokens"));
        }
        let (context, known) = (self.model().config().context_length, self.model().config().vocab_size as i32);
        let (rows, length) = (batch.batch_size(), batch.seq_length());
        if length > context {
            return Err(Failure::usage(format!("a row has {length} tokens; the model takes 1 to {context}")));
        }
        let accumulation = self.recipe().training.accumulation;
        if !rows.is_multiple_of(accumulation) {
            return Err(Failure::usage(format!("{rows} rows do not divide by accumulation={accumulation}")));
        }
        let unknown = |token: &&i32| !(0..known).contains(*token);
        if let Some(token) = batch.inputs().iter().find(unknown) {
            return Err(Failure::usage(format!("token {token} is not in the vocabulary, which is 0 to {}", known - 1)));
        }
        let counted = batch.targets().iter().filter(|target| **target != IGNORED_TARGET);
        if let Some(token) = counted.clone().find(unknown) {
            return Err(Failure::usage(format!(
                "target {token} is neither in the vocabulary, which is 0 to {}, nor {IGNORED_TARGET}, which is ignored",
                known - 1
            )));
        }
        if counted.count() == 0 {
            return Err(Failure::usage("all targets are ignored"));
        }
        Ok(())
    }
}
