//! Training: optimizers, the training loop, checkpoints, and views.

mod batches;
mod chart;
pub mod checkpoint;
pub mod events;
pub mod expert_balance;
mod follower;
pub mod loaded;
mod memory;
pub mod optim;
pub mod origin;
pub mod parallel;
mod session;
pub mod trainer;
mod views;
mod watchdog;

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::Instant;

use burn::train::Interrupter;
use fireclay_datasets::Inputs;
use fireclay_kernels::notices::{Level, notice};
use fireclay_kernels::{Backend, Collective, Rank};
use serde_json::Value;

pub use follower::Follower;
pub use memory::out_of_memory;
pub use trainer::{StepFigures, StepOutput, Trainer, read_figures, read_steps};
pub use views::{Dashboard, View, Wandb, has_terminal, leave_terminal};

use crate::backend::{OnBackend, RunContext};
use crate::failure::Failure;
use crate::progress::show_preparing;
use crate::recipe::{Recipe, TaskName};
use crate::run_folder::{DONE, RunFolder, checkpoints, write_atomic};
use crate::runs::{self, RunRecord};
use crate::tasks::Task;
use crate::training::checkpoint::{Best, RunState};
use crate::training::events::Sink;
use crate::training::origin::Origin;
use crate::training::parallel::{Begin, Command, Ranks};
use crate::training::session::Session;

/// A new or resumed run.
pub struct TrainingRun {
    recipe: Recipe,
    folder: RunFolder,
    resumed: Option<RunState>,
    /// Origin of the current data.
    origin: Origin,
    view: View,
    interrupter: Interrupter,
    /// Device and command line, for the record.
    device: String,
    /// Bytes of memory that the device has, if known.
    memory: Option<u64>,
    command: Vec<String>,
    /// The Weights & Biases project, if any.
    wandb: Option<String>,
    /// Receives all events.
    listener: Option<Box<dyn Sink + Send>>,
    ranks: Ranks,
    begun: Instant,
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// Finished, with the figures of its `done` line.
    Done(Value),
    /// Interrupted after this step, and saved.
    Interrupted(u64),
}

impl TrainingRun {
    /// A new run of `recipe` in the folder `out`.
    ///
    /// # Errors
    /// If the folder cannot be written, or holds a run already.
    pub fn begin(mut recipe: Recipe, out: &Path) -> Result<Self, Failure> {
        // Full paths: the working directory may differ when the run resumes, or its adapter is read.
        for path in [&mut recipe.init, &mut recipe.init_adapter].into_iter().flatten() {
            *path = std::path::absolute(&*path).map_err(Failure::io(&*path))?;
        }
        let origin = Origin::of(&recipe, None)?;
        Ok(Self::new(recipe, RunFolder::create(out)?, None, origin))
    }

    /// Resumes the run in `out`, with its recipe changed by `change`.
    ///
    /// # Errors
    /// If there is no run, it cannot be read, or its data or tokenizer changed without
    /// `allow_changed_data`; and any error of `change`.
    pub fn resume(
        out: &Path,
        allow_changed_data: bool,
        change: impl FnOnce(Recipe) -> Result<Recipe, Failure>,
    ) -> Result<Self, Failure> {
        let (folder, mut state) = checkpoint::resume(out)?;
        if let Some(Origin { data, corpora, tokenizer }) = &state.origin {
            // Full paths: the working directory may differ when the run resumes.
            let path = |inputs: &Inputs| inputs.path.display().to_string();
            if let Some(data) = data {
                state.recipe.data.source = path(data);
            }
            if let Some(tokenizer) = tokenizer {
                state.recipe.data.tokenizer = path(tokenizer);
            }
            let weights = std::mem::take(&mut state.recipe.data.corpora).into_values();
            state.recipe.data.corpora = corpora.iter().map(path).zip(weights).collect();
        }
        state.recipe = change(state.recipe)?;
        let moved = |failure: Failure| {
            Failure::new(format!(
                "{failure}; if it was moved, give its new path: --resume --set source=PATH or --set tokenizer=PATH"
            ))
        };
        let origin = Origin::of(&state.recipe, state.origin.as_ref()).map_err(moved)?;
        let changes = state.origin.as_ref().map_or_else(Vec::new, |then| then.changes(&origin));
        if !changes.is_empty() && !allow_changed_data {
            let (shown, changes) = (out.display(), changes.join("; "));
            return Err(Failure::new(format!("{shown}: {changes}; --allow-changed-data resumes anyway")));
        }
        Ok(Self::new(state.recipe.clone(), folder, Some(state), origin))
    }

    /// `runs/NAME`, or `runs/NAME-2` and so on where that is taken.
    pub fn free_folder(name: &str) -> PathBuf {
        let numbered = (2..).map(|number| PathBuf::from(format!("runs/{name}-{number}")));
        let candidates = std::iter::once(PathBuf::from(format!("runs/{name}"))).chain(numbered);
        candidates.into_iter().find(|path| !path.exists()).unwrap_or_else(|| PathBuf::from("runs").join(name))
    }

    /// Whether `out` has a checkpoint to resume from.
    pub fn is_begun(out: &Path) -> bool {
        !checkpoints(out).is_empty()
    }

    /// The figures of the run in `out`, if it is finished.
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

    fn new(recipe: Recipe, folder: RunFolder, resumed: Option<RunState>, origin: Origin) -> Self {
        let (view, interrupter) = (View::Plain, Interrupter::new());
        let (device, memory, command, begun) = (String::new(), None, Vec::new(), Instant::now());
        let (wandb, listener, ranks) = (None, None, Ranks::only());
        Self {
            recipe,
            folder,
            resumed,
            origin,
            view,
            interrupter,
            device,
            memory,
            command,
            wandb,
            listener,
            ranks,
            begun,
        }
    }

    /// Sets the view.
    pub fn with_view(mut self, view: View) -> Self {
        self.view = view;
        self
    }

    /// Stops and saves when `interrupter` says so.
    pub fn with_interrupter(mut self, interrupter: Interrupter) -> Self {
        self.interrupter = interrupter;
        self
    }

    /// Sets device name and command line for the record.
    pub fn with_record(mut self, device: String, command: Vec<String>) -> Self {
        (self.device, self.command) = (device, command);
        self
    }

    /// Sets how many bytes of memory the device has, which the estimate of the run's memory is
    /// compared with.
    pub fn with_memory(mut self, bytes: Option<u64>) -> Self {
        self.memory = bytes;
        self
    }

    /// Logs to a Weights & Biases project.
    pub fn with_wandb(mut self, project: Option<String>) -> Self {
        self.wandb = project;
        self
    }

    /// Also reports each event to `listener`, on the training thread. If that fails, the run ends
    /// with its last checkpoint.
    pub fn with_listener(mut self, listener: Box<dyn Sink + Send>) -> Self {
        self.listener = Some(listener);
        self
    }

    /// With other ranks, of which this one is the first.
    pub fn with_ranks(mut self, ranks: Ranks) -> Self {
        self.ranks = ranks;
        self
    }

    /// Its rank, and its number among the processes of this machine.
    pub fn place(&self) -> (Rank, usize) {
        (self.ranks.rank(), self.ranks.local())
    }

    /// The task.
    pub fn task(&self) -> TaskName {
        self.recipe.task
    }

    /// The run's folder.
    pub fn folder(&self) -> PathBuf {
        self.folder.path().to_path_buf()
    }
}

impl OnBackend for TrainingRun {
    type Output = Outcome;

    fn run<B: Backend>(self, context: RunContext<B>) -> Result<Outcome, Failure> {
        let ranks = self.ranks.clone();
        let outcome = self.lead(context);
        match &outcome {
            Ok(_) => ranks.end(),
            Err(failure) => ranks.failed(failure),
        }
        outcome
    }
}

impl TrainingRun {
    fn lead<B: Backend>(self, RunContext { device, .. }: RunContext<B>) -> Result<Outcome, Failure> {
        let Self { recipe, folder, resumed, origin, view, interrupter, device: device_name, .. } = self;
        let Self { memory, command, wandb, listener, ranks, begun, .. } = self;
        let resumed_at = resumed.as_ref().map(|state| state.step);
        let prepared = prepare::<B>(recipe, &folder, resumed, &interrupter, &device, &ranks);
        let (trainer, best) = match prepared {
            Ok(prepared) => prepared,
            // Interrupted during tokenization, whose results stay cached.
            Err(_) if interrupter.should_stop() => {
                folder.forget_if_empty();
                return Ok(Outcome::Interrupted(resumed_at.unwrap_or(0)));
            }
            Err(failure) => {
                folder.forget_if_empty();
                return Err(failure);
            }
        };
        let limit = trainer.recipe().training.memory_limit()?;
        trainer.memory_estimate().refuse_above(limit).inspect_err(|_| folder.forget_if_empty())?;
        let record = RunRecord::new(trainer.recipe(), trainer.model().config(), device_name, command);
        let wandb = wandb.map(|project| Wandb::begin(&project, &record, folder.path())).transpose();
        let wandb = wandb.inspect_err(|_| folder.forget_if_empty())?;
        record.write(folder.path(), resumed_at)?;
        if view != View::Dashboard {
            describe(&trainer, &folder)?;
            trainer.memory_estimate().announce(memory);
        }
        let mut session = Session::new(trainer, folder.clone(), device, best, origin, begun)?;
        let finished = views::run(&mut session, view, &record, (folder.path(), wandb, listener), interrupter)?;
        ranks.end();
        chart::draw(folder.path())?;
        if let Some(report) = session.test_report() {
            chart::draw_confusions(folder.path(), report)?;
        }
        if let (Some(report), true) = (session.test_report(), view != View::Json) {
            notice(Level::Info, &format!("\n{} results:\n\n{report}\n", report.part()));
        }
        let summary = session.summary();
        if finished {
            write_atomic(&folder.path().join(DONE), summary.to_string().as_bytes())?;
        }
        runs::write_report(folder.path())?;
        if !finished {
            return Ok(Outcome::Interrupted(session.trainer.step()));
        }
        Ok(Outcome::Done(summary))
    }
}

/// Reads the data and, if any, the last checkpoint.
fn prepare<B: Backend>(
    recipe: Recipe,
    folder: &RunFolder,
    resumed: Option<RunState>,
    interrupter: &Interrupter,
    device: &B::Device,
    ranks: &Ranks,
) -> Result<(Trainer<B>, Option<Best>), Failure> {
    let mut watch = show_preparing(|| interrupter.should_stop());
    let Some(state) = resumed else {
        let task = recipe.task_watched(&mut watch)?;
        let collective = begin::<B>(&recipe, None, &task, device, ranks)?;
        let trainer = Trainer::of_rank(&recipe, task, device.clone(), ranks.clone(), collective)?;
        trainer.check_sample()?;
        return Ok((trainer, None));
    };
    // It was interrupted between its last checkpoint and its figures.
    let figures_lack = state.step == recipe.training.steps && !folder.path().join(DONE).exists();
    if state.step >= recipe.training.steps && !figures_lack {
        let (shown, step) = (folder.path().display(), state.step);
        return Err(Failure::new(format!("{shown} is already at step {step}: raise --steps")));
    }
    let checkpoint = folder.checkpoint(state.step);
    let task = recipe.task_of(&checkpoint, &mut watch)?;
    let collective = begin::<B>(&recipe, Some((&checkpoint, state.step)), &task, device, ranks)?;
    let trainer = checkpoint::load::<B>(folder, &state, task, device.clone(), (ranks.clone(), collective))?;
    trainer.check_sample()?;
    Ok((trainer, state.best))
}

/// Has the other ranks begin, and gives what they exchange tensors through.
fn begin<B: Backend>(
    recipe: &Recipe,
    checkpoint: Option<(&Path, u64)>,
    task: &Task,
    device: &B::Device,
    ranks: &Ranks,
) -> Result<Collective, Failure> {
    if ranks.rank().ranks == 1 {
        return Ok(Collective::only());
    }
    let absolute = |path: &Path| std::path::absolute(path).map_err(Failure::io(path));
    let checkpoint = checkpoint.map(|(path, step)| Ok::<_, Failure>((absolute(path)?, step))).transpose()?;
    let begin = Begin { recipe: recipe.clone(), checkpoint, checksum: task.checksum()? };
    ranks.tell(&Command::Begin(Box::new(begin)));
    let collective = Collective::best::<B>(ranks.rank(), ranks.host(), device).map_err(Failure::new)?;
    ranks.watch(&collective);
    Ok(collective)
}

/// Announces the run.
fn describe<B: Backend>(trainer: &Trainer<B>, folder: &RunFolder) -> Result<(), Failure> {
    let recipe = trainer.recipe();
    let config = trainer.model().config();
    let (parameters, step, out) = (config.parameter_count() as f64 / 1e6, trainer.step(), folder.path().display());
    let (name, what) = (&recipe.name, trainer.task().describe(config, &recipe.training));
    let ranks = match trainer.ranks() {
        1 => String::new(),
        ranks => format!(" on {ranks} ranks"),
    };
    let trained = trainer.described_training();
    notice(
        Level::Info,
        &format!("{name}: {parameters:.1}M parameters{trained}, {what} from step {step}{ranks}; into {out}"),
    );
    let colour = std::io::stderr().is_terminal();
    if let Some(preview) = trainer.task().preview(colour) {
        let what = if colour { "in green" } else { "in [[double brackets]]" };
        let preview = preview?;
        notice(Level::Info, &format!("the first example, with what the model learns to write {what}:\n\n{preview}\n"));
    }
    Ok(())
}
