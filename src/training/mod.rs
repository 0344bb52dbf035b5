//! Training: recipes, the optimizer, the loop through burn-train, checkpoints.

pub mod checkpoint;
pub mod optimizer;
pub mod recipe;
pub mod schedule;
pub mod trainer;

mod chart;
mod progress;
mod session;
mod strategy;

use std::path::{Path, PathBuf};
use std::time::Instant;

use burn::train::Interrupter;
use fireclay_kernels::Backend;
use serde_json::Value;

pub use progress::{View, duration};
pub use recipe::{DataRecipe, EMBEDDED, Recipe, TrainingRecipe};
pub use schedule::{Schedule, ScheduleKind};
pub(crate) use trainer::read_scalars;
pub use trainer::{StepOutput, Trainer, read_steps};

use crate::Failure;
use crate::backend::OnBackend;
use crate::tasks::{Task, TaskName};
use crate::training::checkpoint::{Best, RunFolder, RunState};
use crate::training::session::Session;

/// Where a finished run keeps the figures of its `done` line.
const DONE: &str = "done.json";

/// A run to begin or to go on with.
pub struct TrainingRun {
    recipe: Recipe,
    folder: RunFolder,
    resumed: Option<RunState>,
    view: View,
    interrupter: Interrupter,
    begun: Instant,
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// It took its last step; the figures of its `done` line.
    Done(Value),
    /// It was interrupted after this step, and saved.
    Interrupted(u64),
}

impl TrainingRun {
    /// A new run of `recipe` into the folder `out`.
    ///
    /// # Errors
    /// If the folder cannot be written, or holds a run already.
    pub fn begin(recipe: Recipe, out: &Path) -> Result<Self, Failure> {
        Ok(Self::new(recipe, RunFolder::create(out)?, None))
    }

    /// Goes on with the run in `out`, its recipe changed by `change`.
    ///
    /// # Errors
    /// If there is no run, or it cannot be read, and whatever `change` gives.
    pub fn resume(out: &Path, change: impl FnOnce(Recipe) -> Result<Recipe, Failure>) -> Result<Self, Failure> {
        let (folder, mut state) = RunFolder::resume(out)?;
        state.recipe = change(state.recipe)?;
        Ok(Self::new(state.recipe.clone(), folder, Some(state)))
    }

    /// Whether there is a checkpoint in `out` to go on from.
    pub fn is_begun(out: &Path) -> bool {
        RunFolder::resume(out).is_ok()
    }

    /// The figures of the run in `out`, if it is done.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn done(out: &Path) -> Result<Option<Value>, Failure> {
        let file = out.join(DONE);
        match std::fs::read_to_string(&file) {
            Ok(text) => serde_json::from_str(&text)
                .map(Some)
                .map_err(|error| Failure::new(format!("{}: not valid JSON: {error}", file.display()))),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Failure::io(&file)(error)),
        }
    }

    fn new(recipe: Recipe, folder: RunFolder, resumed: Option<RunState>) -> Self {
        let (view, interrupter) = (View::Plain, Interrupter::new());
        Self { recipe, folder, resumed, view, interrupter, begun: Instant::now() }
    }

    /// Shown in this way.
    pub fn with_view(mut self, view: View) -> Self {
        self.view = view;
        self
    }

    /// Stopped, and saved, when `interrupter` says so.
    pub fn with_interrupter(mut self, interrupter: Interrupter) -> Self {
        self.interrupter = interrupter;
        self
    }

    /// What is trained for.
    pub fn task(&self) -> TaskName {
        self.recipe.task
    }

    /// Where the run is kept.
    pub fn folder(&self) -> PathBuf {
        self.folder.path().to_path_buf()
    }
}

impl OnBackend for TrainingRun {
    type Output = Outcome;

    fn run<B: Backend>(self, device: B::Device) -> Result<Outcome, Failure> {
        let Self { recipe, folder, resumed, view, interrupter, begun } = self;
        let prepared = prepare::<B>(recipe, &folder, resumed, &device);
        let (trainer, best) = prepared.inspect_err(|_| folder.forget_if_empty())?;
        describe(&trainer, &folder, view);
        let session = Session::new(trainer, folder.clone(), device, best, begun)?;
        let (session, outcome) = strategy::launch(session, view, interrupter);
        let finished = outcome?;
        chart::draw(folder.path())?;
        if let (Some(report), true) = (session.test_report(), view != View::Json) {
            eprintln!("\non the test data, read once:\n\n{report}\n");
        }
        if !finished {
            return Ok(Outcome::Interrupted(session.trainer.step()));
        }
        let summary = session.summary();
        checkpoint::write_synced(&folder.path().join(DONE), &summary.to_string())?;
        Ok(Outcome::Done(summary))
    }
}

/// Reads data and, where there is one, the last checkpoint.
fn prepare<B: Backend>(
    recipe: Recipe,
    folder: &RunFolder,
    resumed: Option<RunState>,
    device: &B::Device,
) -> Result<(Trainer<B>, Option<Best>), Failure> {
    let Some(state) = resumed else {
        return Ok((Trainer::new(&recipe, recipe.task()?, device.clone())?, None));
    };
    // A run that ended between its last checkpoint and its figures has those to come.
    let figures_lack = state.step == recipe.training.steps && !folder.path().join(DONE).exists();
    if state.step >= recipe.training.steps && !figures_lack {
        let (shown, step) = (folder.path().display(), state.step);
        return Err(Failure::new(format!("{shown} is already at step {step}: go further with --steps N")));
    }
    let task = recipe.task_of(&folder.checkpoint(&state))?;
    let trainer = folder.load::<B>(&state, task, device.clone())?;
    Ok((trainer, state.best))
}

/// Says what is about to happen.
fn describe<B: Backend>(trainer: &Trainer<B>, folder: &RunFolder, view: View) {
    if view == View::Dashboard {
        return;
    }
    let recipe = trainer.recipe();
    let config = trainer.model().config();
    let training = &recipe.training;
    let rows = training.batch_size * training.accumulation;
    let (parameters, step, out) = (config.parameter_count() as f64 / 1e6, trainer.step(), folder.path().display());
    let (name, steps) = (&recipe.name, training.steps);
    match trainer.task() {
        Task::Language(_) => eprintln!(
            "{name}: {parameters:.1}M parameters, {} tokens known; {steps} steps of {rows} x {} tokens from step \
             {step}; into {out}",
            config.vocab_size, training.seq_length,
        ),
        Task::IntentSlot(task) => {
            let labels = task.labels();
            eprintln!(
                "{name}: {parameters:.1}M parameters, {} pieces known; {} intents, {} slots in {} utterances; {steps} \
                 steps of {rows} utterances from step {step}; into {out}",
                config.vocab_size,
                labels.intents.len(),
                labels.slots.len(),
                task.train_count(),
            );
            if task.cut_count() > 0 {
                let (cut, seq_length) = (task.cut_count(), training.seq_length);
                eprintln!("the ends of {cut} utterances do not fit in {seq_length} pieces and are not learnt from");
            }
        }
    }
}
