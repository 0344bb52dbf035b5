//! A trainer for a loop of somebody else's, whatever its backend.

use std::path::Path;

use fireclay_datasets::{IGNORED_TARGET, TokenBatch};
use fireclay_kernels::Backend;

use crate::backend::{OnBackend, RunContext};
use crate::failure::Failure;
use crate::recipe::Recipe;
use crate::tasks::Validation;
use crate::training::trainer::{StepOutput, Trainer, read_steps};

/// A recipe whose model is to be trained step by step.
pub struct TrainerToLoad(pub Recipe);

/// What is read of a step when somebody asks: its loss before the update, in nats a target, and the global norm of its gradients
/// before clipping. Reading waits for the device.
pub type StepFigures = Box<dyn FnOnce() -> Result<(f64, f64), Failure> + Send>;

/// A step that the device may still be at.
pub struct StepTaken {
    /// Counted from one.
    pub step: u64,
    /// Of the step.
    pub learning_rate: f64,
    /// Targets that it learnt from.
    pub tokens: usize,
    /// The rest.
    pub figures: StepFigures,
}

/// A trainer on the backend that it was made on.
///
/// Ask where [`FoundBackend::enter`](crate::backend::FoundBackend::enter) computes.
pub trait LoadedTrainer: Send {
    /// One optimizer step over `batch`, or over the rows that the recipe's data has for it. Nothing is read from the device.
    ///
    /// # Errors
    /// If the model is not for tokens or does not know some of them, rows are longer than its context, no target counts, or the
    /// data cannot be read any more.
    fn step(&mut self, batch: Option<TokenBatch>) -> Result<StepTaken, Failure>;

    /// How the model does on the recipe's held-out data: about `tokens` of a language's.
    ///
    /// # Errors
    /// If the device fails.
    fn validate(&self, tokens: usize) -> Result<Validation, Failure>;

    /// Writes the model as it is, with its tokenizer, as a folder of the hub's layout.
    ///
    /// # Errors
    /// If the file system refuses.
    fn save(&self, folder: &Path) -> Result<(), Failure>;

    /// Steps taken.
    fn steps(&self) -> u64;

    /// The recipe, with what its data asked for.
    fn recipe(&self) -> &Recipe;
}

impl OnBackend for TrainerToLoad {
    type Output = Box<dyn LoadedTrainer>;

    fn run<B: Backend>(self, RunContext { device, rank }: RunContext<B>) -> Result<Self::Output, Failure> {
        let Self(recipe) = self;
        Ok(Box::new(Trainer::<B>::new(&recipe, recipe.task()?, device)?.with_rank(rank)))
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

    fn validate(&self, tokens: usize) -> Result<Validation, Failure> {
        Trainer::validate(self, tokens)
    }

    fn save(&self, folder: &Path) -> Result<(), Failure> {
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
    /// Refuses rows that the model cannot learn from.
    fn check(&self, batch: &TokenBatch) -> Result<(), Failure> {
        if !self.recipe().task.writes_text() {
            return Err(Failure::usage("the recipe is for utterances, which are not rows of tokens"));
        }
        let (context, known) = (self.model().config().context_length, self.model().config().vocab_size as i32);
        let (rows, length) = (batch.batch_size(), batch.seq_length());
        if length > context {
            return Err(Failure::usage(format!("a row has {length} tokens; the model reads 1 to {context}")));
        }
        let accumulation = self.recipe().training.accumulation;
        if !rows.is_multiple_of(accumulation) {
            return Err(Failure::usage(format!("{rows} rows are no {accumulation} equal parts, as accumulation asks")));
        }
        let unknown = |token: &&i32| !(0..known).contains(*token);
        if let Some(token) = batch.inputs().iter().find(unknown) {
            return Err(Failure::usage(format!("token {token} is none of the model's, which are 0 to {}", known - 1)));
        }
        let counted = batch.targets().iter().filter(|target| **target != IGNORED_TARGET);
        if let Some(token) = counted.clone().find(unknown) {
            return Err(Failure::usage(format!(
                "target {token} is none of the model's tokens, which are 0 to {}, nor {IGNORED_TARGET}, which does not count",
                known - 1
            )));
        }
        if counted.count() == 0 {
            return Err(Failure::usage("no target counts: there is nothing to learn"));
        }
        Ok(())
    }
}
