//! A run's folder: the model as the hub lays it out, and under `training/` what resuming needs.
//!
//! ```text
//! config.json  model.safetensors  tokenizer.json     the best model so far; labels.json, done.json where there are such
//! metrics.jsonl  loss.svg                            how it went
//! training/step-00000500/                            the last few checkpoints, each a model folder with
//!     optimizer.safetensors  state.json              the optimizer's moments and everything else
//! ```
//!
//! A checkpoint is written into a folder beside, synced, and renamed, so that one under its name is whole.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use burn::module::AutodiffModule;
use burn::tensor::{Tensor, TensorData};
use fireclay_kernels::Backend;
use fireclay_model::ModelFolder;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::{Deserialize, Serialize};

use crate::Failure;
use crate::tasks::{Task, Validation};
use crate::training::optimizer::Optimizer;
use crate::training::recipe::Recipe;
use crate::training::trainer::Trainer;

pub(crate) const TOKENIZER: &str = "tokenizer.json";
pub(crate) const GENERATION: &str = "generation_config.json";
pub(crate) const LABELS: &str = "labels.json";
const WEIGHTS: &str = "model.safetensors";
/// What a model folder holds; the last two only where texts have an end token, or utterances labels.
const MODEL_FILES: [&str; 5] = ["config.json", TOKENIZER, WEIGHTS, GENERATION, LABELS];
const OPTIMIZER: &str = "optimizer.safetensors";
const STATE: &str = "state.json";

/// The folder of a run.
#[derive(Clone, Debug)]
pub struct RunFolder {
    path: PathBuf,
}

/// The best validation so far.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// After how many steps.
    pub step: u64,
    /// How well it did.
    pub validation: Validation,
}

/// What a checkpoint holds besides model and optimizer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunState {
    /// Steps taken.
    pub step: u64,
    /// The best validation up to then.
    pub best: Option<Best>,
    /// What is being trained.
    pub recipe: Recipe,
}

impl RunFolder {
    /// Makes the folder for a new run.
    ///
    /// # Errors
    /// If it cannot be made or written, or already holds a model or a run.
    pub fn create(path: &Path) -> Result<Self, Failure> {
        let folder = Self { path: path.to_path_buf() };
        let shown = path.display();
        if let Some((step, _)) = folder.checkpoints().last() {
            return Err(Failure::new(format!(
                "{shown} already holds a run, at step {step}: go on with `fireclay train --resume --out {shown}`, or \
                 choose another --out"
            )));
        }
        if path.join(WEIGHTS).exists() {
            return Err(Failure::new(format!("{shown} already holds a model: choose another --out")));
        }
        let training = folder.training();
        fs::create_dir_all(&training).map_err(Failure::io(&training))?;
        // Find out now, not at the first checkpoint, whether anything can be written.
        let probe = training.join(".writable");
        fs::write(&probe, b"").and_then(|()| fs::remove_file(&probe)).map_err(Failure::io(&training))?;
        Ok(folder)
    }

    /// The folder of a run to go on with, and the last checkpoint in it.
    ///
    /// # Errors
    /// If there is none, or its state cannot be read.
    pub fn resume(path: &Path) -> Result<(Self, RunState), Failure> {
        let folder = Self { path: path.to_path_buf() };
        let Some((_, checkpoint)) = folder.checkpoints().pop() else {
            let shown = path.display();
            return Err(Failure::new(format!(
                "{shown} holds no checkpoint to go on from: leave --resume out to begin"
            )));
        };
        let file = checkpoint.join(STATE);
        let text = fs::read_to_string(&file).map_err(Failure::io(&file))?;
        let state: RunState = serde_json::from_str(&text).map_err(|error| damaged(&file, &error.to_string()))?;
        Ok((folder, state))
    }

    /// Where the run is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn training(&self) -> PathBuf {
        self.path.join("training")
    }

    /// Whole checkpoints, the oldest first, by their steps.
    pub fn checkpoints(&self) -> Vec<(u64, PathBuf)> {
        let entries = fs::read_dir(self.training()).into_iter().flatten().flatten();
        let step = |path: &Path| path.file_name()?.to_str()?.strip_prefix("step-")?.parse::<u64>().ok();
        let mut found: Vec<(u64, PathBuf)> =
            entries.filter_map(|entry| Some((step(&entry.path())?, entry.path()))).collect();
        found.sort();
        found
    }

    /// Writes a checkpoint, makes it the folder's model if it is the best, and drops all but the last `kept`.
    ///
    /// # Errors
    /// If the file system refuses; what was there before stays as it was.
    pub fn save<B: Backend>(&self, trainer: &Trainer<B>, state: &RunState) -> Result<PathBuf, Failure> {
        let name = format!("step-{:08}", state.step);
        let (beside, place) = (self.training().join(format!("{name}.partial")), self.training().join(&name));
        let written = self.write(&beside, trainer, state).and_then(|()| {
            if place.exists() {
                remove(&place)?;
            }
            fs::rename(&beside, &place).map_err(Failure::io(&place))?;
            sync(&self.training())
        });
        if let Err(failure) = written {
            // The first failure is the one to tell; what is left beside may not be there at all.
            let _ = fs::remove_dir_all(&beside);
            let intact = match self.checkpoints().last() {
                Some((_, last)) => format!("; the last checkpoint, {}, is whole", last.display()),
                None => String::new(),
            };
            return Err(Failure::new(format!("the checkpoint could not be written: {failure}{intact}")));
        }
        if state.best.is_some_and(|best| best.step == state.step) {
            self.publish(&place)?;
        }
        let checkpoints = self.checkpoints();
        let surplus = checkpoints.len().saturating_sub(state.recipe.training.checkpoints_kept);
        for (_, old) in &checkpoints[..surplus] {
            remove(old)?;
        }
        Ok(place)
    }

    fn write<B: Backend>(&self, folder: &Path, trainer: &Trainer<B>, state: &RunState) -> Result<(), Failure> {
        if folder.exists() {
            fs::remove_dir_all(folder).map_err(Failure::io(folder))?;
        }
        fs::create_dir_all(folder).map_err(Failure::io(folder))?;
        ModelFolder::new(folder).save(&trainer.model().valid())?;
        trainer.task().save(folder)?;

        let mut tensors = Vec::new();
        for (name, first, second) in trainer.optimizer().moments() {
            for (kind, tensor) in [("first", first), ("second", second)] {
                let (values, [size]) = (tensor.clone().into_data(), tensor.dims());
                let mut bytes = Vec::with_capacity(4 * size);
                values.iter::<f32>().for_each(|value| bytes.extend_from_slice(&value.to_le_bytes()));
                tensors.push((format!("{kind}.{name}"), size, bytes));
            }
        }
        let file = folder.join(OPTIMIZER);
        let wrong = |error: safetensors::SafeTensorError| Failure::new(format!("{}: {error}", file.display()));
        let mut views = Vec::with_capacity(tensors.len());
        for (name, size, bytes) in &tensors {
            views.push((name.as_str(), TensorView::new(Dtype::F32, vec![*size], bytes).map_err(wrong)?));
        }
        let bytes = safetensors::serialize(views, None).map_err(wrong)?;
        fs::write(&file, bytes).and_then(|()| File::open(&file)?.sync_all()).map_err(Failure::io(&file))?;

        let text = serde_json::to_string_pretty(state).map_err(|error| Failure::new(error.to_string()))?;
        write_synced(&folder.join(STATE), &text)?;
        sync(folder)
    }

    /// Makes a checkpoint's model the folder's own, each file in one move.
    fn publish(&self, checkpoint: &Path) -> Result<(), Failure> {
        for name in MODEL_FILES.into_iter().filter(|name| checkpoint.join(name).exists()) {
            let (from, to) = (checkpoint.join(name), self.path.join(name));
            let beside = self.path.join(format!("{name}.partial"));
            // It may be left from a run that was killed here.
            let _ = fs::remove_file(&beside);
            fs::hard_link(&from, &beside)
                .or_else(|_| fs::copy(&from, &beside).map(|_| ()))
                .and_then(|()| fs::rename(&beside, &to))
                .map_err(Failure::io(&to))?;
        }
        sync(&self.path)
    }

    /// The trainer of the last checkpoint.
    ///
    /// # Errors
    /// If a file is missing or damaged; it is named.
    pub fn load<B: Backend>(&self, state: &RunState, task: Task, device: B::Device) -> Result<Trainer<B>, Failure> {
        let checkpoint = self.checkpoint(state);
        let model = ModelFolder::new(&checkpoint).load(&device)?;
        let mut trainer = Trainer::<B>::with_model(&state.recipe, task, model, device.clone())?;
        let file = checkpoint.join(OPTIMIZER);
        let bytes = fs::read(&file).map_err(Failure::io(&file))?;
        let tensors = SafeTensors::deserialize(&bytes).map_err(|error| damaged(&file, &error.to_string()))?;
        let read = |kind: &str, name: &str, size: usize| {
            let name = format!("{kind}.{name}");
            let view = tensors.tensor(&name).map_err(|_| damaged(&file, &format!("{name} is missing")))?;
            if view.shape() != [size] || view.dtype() != Dtype::F32 {
                return Err(damaged(&file, &format!("{name} is not {size} values of f32")));
            }
            let chunks = view.data().chunks_exact(4);
            let values: Vec<f32> = chunks.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
            Ok(Tensor::from_data(TensorData::new(values, [size]), &device))
        };
        let moments = |name: &str, size| Ok::<_, Failure>((read("first", name, size)?, read("second", name, size)?));
        let optimizer = Optimizer::new(trainer.model()).with_moments(state.step, moments)?;
        trainer.restore(state.step, optimizer);
        // A run that was killed between a checkpoint and its publication.
        if state.best.is_some_and(|best| best.step == state.step) {
            self.publish(&checkpoint)?;
        }
        self.forget_partial();
        Ok(trainer)
    }

    /// The folder of the last checkpoint, where its tokenizer and labels are, too.
    pub fn checkpoint(&self, state: &RunState) -> PathBuf {
        self.training().join(format!("step-{:08}", state.step))
    }

    /// Removes the folder of a run that came to nothing, unless something else is in it.
    pub(crate) fn forget_if_empty(&self) {
        // Only empty folders can be removed so, and one that stays harms nobody.
        let _ = fs::remove_dir(self.training()).and_then(|()| fs::remove_dir(&self.path));
    }

    /// Removes what a killed run left half written.
    fn forget_partial(&self) {
        for entry in fs::read_dir(self.training()).into_iter().flatten().flatten() {
            if entry.path().extension().is_some_and(|extension| extension == "partial") {
                // It takes room, and nothing reads it: a failure here harms nobody.
                let _ = fs::remove_dir_all(entry.path());
            }
        }
    }

    /// Cuts `metrics.jsonl` to the lines up to `step`.
    ///
    /// # Errors
    /// If the file system refuses.
    pub fn cut_metrics(&self, step: u64) -> Result<(), Failure> {
        let file = self.path.join("metrics.jsonl");
        let text = match fs::read_to_string(&file) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(Failure::io(&file)(error)),
        };
        let early = |line: &&str| {
            let parsed = serde_json::from_str::<serde_json::Value>(line).ok();
            parsed.and_then(|line| line["step"].as_u64()).is_some_and(|at| at <= step)
        };
        let kept: String = text.lines().filter(early).map(|line| format!("{line}\n")).collect();
        let beside = self.path.join("metrics.partial");
        fs::write(&beside, kept).and_then(|()| fs::rename(&beside, &file)).map_err(Failure::io(&file))
    }
}

/// Removes a checkpoint, at no moment of which there is one that lacks some of its files.
fn remove(checkpoint: &Path) -> Result<(), Failure> {
    let going = checkpoint.with_extension("old.partial");
    fs::rename(checkpoint, &going).map_err(Failure::io(checkpoint))?;
    fs::remove_dir_all(&going).map_err(Failure::io(&going))
}

fn damaged(file: &Path, reason: &str) -> Failure {
    let folder = file.parent().unwrap_or(file).display();
    Failure::new(format!("{}: {reason}; remove {folder} to go on from the checkpoint before", file.display()))
}

/// Writes a text and waits until it is on the disk.
pub(crate) fn write_synced(file: &Path, text: &str) -> Result<(), Failure> {
    fs::write(file, text).and_then(|()| File::open(file)?.sync_all()).map_err(Failure::io(file))
}

/// Makes a rename in a folder last through a power cut.
fn sync(folder: &Path) -> Result<(), Failure> {
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(Failure::io(folder))
}
