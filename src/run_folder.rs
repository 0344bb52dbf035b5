//! The folder of a run: file names, atomic writes, the lock, checkpoints.
//!
//! ```text
//! config.json  model.safetensors  tokenizer.json     the best model so far; labels.json and done.json if any
//! run.json  metrics.jsonl                            the record of the run, and its metrics
//! report.html  loss.svg  confusion.svg  tensorboard/ the same as pages and plots; confusion.svg where there are labels
//! training/step-00000500/                            the last few checkpoints, each a model folder with
//!     optimizer.safetensors  state.json              the optimizer's moments and everything else
//! training/run.lock                                  held by the process that trains
//! ```
//!
//! Checkpoints and other files are written under a temporary name, synced, and renamed, so that
//! whatever has its final name is complete.

use std::fs::{self, File, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::failure::Failure;

pub(crate) const CONFIG: &str = "config.json";
pub(crate) const TOKENIZER: &str = "tokenizer.json";
pub(crate) const WEIGHTS: &str = "model.safetensors";
pub(crate) const ADAPTER: &str = "adapter_config.json";
pub(crate) const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";
pub(crate) const TOKENIZER_SETTINGS: &str = "tokenizer_config.json";
pub(crate) const GENERATION: &str = "generation_config.json";
pub(crate) const LABELS: &str = "labels.json";
pub(crate) const METRICS: &str = "metrics.jsonl";
pub(crate) const CHART: &str = "loss.svg";
pub(crate) const CONFUSION: &str = "confusion.svg";
pub(crate) const OPTIMIZER: &str = "optimizer.safetensors";
pub(crate) const STATE: &str = "state.json";
/// The figures of the `done` line of a finished run.
pub(crate) const DONE: &str = "done.json";
/// The record of the run.
pub(crate) const RECORD: &str = "run.json";
/// TensorBoard files.
pub(crate) const TENSORBOARD: &str = "tensorboard";
/// The report page.
pub(crate) const REPORT: &str = "report.html";
const LOCK: &str = "run.lock";
/// What a model folder holds; settings of the tokenizer only for chats, the last two only where
/// sequences have an end token, or utterances labels.
const MODEL_FILES: [&str; 8] =
    [CONFIG, TOKENIZER, TOKENIZER_SETTINGS, WEIGHTS, ADAPTER, ADAPTER_WEIGHTS, GENERATION, LABELS];

/// The folder of a run.
#[derive(Clone, Debug)]
pub struct RunFolder {
    path: PathBuf,
    /// Held while any clone lives; the system frees it when the process dies.
    _lock: Arc<File>,
}

impl RunFolder {
    /// Creates the folder of a new run.
    ///
    /// # Errors
    /// If it cannot be created or written, already holds a model or a run, or another process
    /// trains in it.
    pub fn create(path: &Path) -> Result<Self, Failure> {
        let shown = path.display();
        if let Some((step, _)) = checkpoints(path).last() {
            return Err(Failure::new(format!(
                "{shown} already holds a run, at step {step}: resume it with `fireclay train --resume --out \
                 {shown}`, or choose another --out"
            )));
        }
        if let Some(file) = model_file(path) {
            return Err(Failure::new(format!("{shown} already holds a model, {file}: choose another --out")));
        }
        let training = training(path);
        fs::create_dir_all(&training).map_err(Failure::io(&training))?;
        let folder = Self { path: path.to_path_buf(), _lock: Arc::new(lock(path)?) };
        // Find write errors now, not at the first checkpoint.
        let probe = training.join(".writable");
        fs::write(&probe, b"").and_then(|()| fs::remove_file(&probe)).map_err(Failure::io(&training))?;
        Ok(folder)
    }

    /// Opens the folder of a run to resume.
    ///
    /// # Errors
    /// If it has no checkpoint, or another process trains in it.
    pub fn open(path: &Path) -> Result<Self, Failure> {
        if checkpoints(path).is_empty() {
            let shown = path.display();
            return Err(Failure::new(format!(
                "{shown} holds no checkpoint to resume: leave out --resume to start a run"
            )));
        }
        Ok(Self { path: path.to_path_buf(), _lock: Arc::new(lock(path)?) })
    }

    /// The path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Complete checkpoints by step, oldest first.
    pub fn checkpoints(&self) -> Vec<(u64, PathBuf)> {
        checkpoints(&self.path)
    }

    /// The path of the checkpoint of `step`.
    pub(crate) fn checkpoint(&self, step: u64) -> PathBuf {
        training(&self.path).join(format!("step-{step:08}"))
    }

    /// Writes the checkpoint of `step` atomically; `write` fills the folder it is given.
    ///
    /// # Errors
    /// If the file system fails. Earlier checkpoints stay, and no partial files remain.
    pub(crate) fn put_checkpoint(
        &self,
        step: u64,
        write: impl FnOnce(&Path) -> Result<(), Failure>,
    ) -> Result<PathBuf, Failure> {
        let place = self.checkpoint(step);
        let partial = place.with_extension("partial");
        let written = empty_folder(&partial).and_then(|()| write(&partial)).and_then(|()| {
            sync(&partial)?;
            if place.exists() {
                remove(&place)?;
            }
            fs::rename(&partial, &place).map_err(Failure::io(&place))?;
            sync(&training(&self.path))
        });
        if let Err(failure) = written {
            // Report the first error; there may be nothing to remove.
            let _ = fs::remove_dir_all(&partial);
            let intact = match self.checkpoints().last() {
                Some((_, last)) => format!("; the last checkpoint, {}, is intact", last.display()),
                None => String::new(),
            };
            return Err(Failure::new(format!("cannot write the checkpoint: {failure}{intact}")));
        }
        Ok(place)
    }

    /// Removes all checkpoints but the last `kept`.
    ///
    /// # Errors
    /// If the file system fails.
    pub(crate) fn keep_checkpoints(&self, kept: usize) -> Result<(), Failure> {
        let checkpoints = self.checkpoints();
        let surplus = checkpoints.len().saturating_sub(kept);
        checkpoints[..surplus].iter().try_for_each(|(_, old)| remove(old))
    }

    /// Links or copies a checkpoint's model into the folder itself, each file atomically.
    ///
    /// # Errors
    /// If the file system fails.
    pub(crate) fn publish(&self, checkpoint: &Path) -> Result<(), Failure> {
        for name in MODEL_FILES.into_iter().filter(|name| checkpoint.join(name).exists()) {
            let (from, to) = (checkpoint.join(name), self.path.join(name));
            let partial = self.path.join(format!("{name}.partial"));
            // A run that was killed here may have left it.
            let _ = fs::remove_file(&partial);
            fs::hard_link(&from, &partial)
                .or_else(|_| fs::copy(&from, &partial).map(|_| ()))
                .and_then(|()| fs::rename(&partial, &to))
                .map_err(Failure::io(&to))?;
        }
        sync(&self.path)
    }

    /// Removes the folder of a run without result, unless it holds something else.
    pub(crate) fn forget_if_empty(&self) {
        let training = training(&self.path);
        if self.checkpoints().is_empty() {
            let _ = fs::remove_file(training.join(LOCK));
        }
        // Only empty folders are removed; one that stays does no harm.
        let _ = fs::remove_dir(training).and_then(|()| fs::remove_dir(&self.path));
    }

    /// Removes partial files of a killed run.
    pub(crate) fn forget_partial(&self) {
        for entry in fs::read_dir(training(&self.path)).into_iter().flatten().flatten() {
            if entry.path().extension().is_some_and(|extension| extension == "partial") {
                // Nothing reads it: a failure does no harm.
                let _ = fs::remove_dir_all(entry.path());
            }
        }
    }

    /// Truncates `metrics.jsonl` to the lines up to `step`.
    ///
    /// # Errors
    /// If the file system fails.
    pub fn cut_metrics(&self, step: u64) -> Result<(), Failure> {
        let file = self.path.join(METRICS);
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
        write_atomic(&file, kept.as_bytes())
    }
}

/// Complete checkpoints of the run in `folder` by step, oldest first.
pub(crate) fn checkpoints(folder: &Path) -> Vec<(u64, PathBuf)> {
    let entries = fs::read_dir(training(folder)).into_iter().flatten().flatten();
    let step = |path: &Path| path.file_name()?.to_str()?.strip_prefix("step-")?.parse::<u64>().ok();
    let mut found: Vec<(u64, PathBuf)> =
        entries.filter_map(|entry| Some((step(&entry.path())?, entry.path()))).collect();
    found.sort();
    found
}

/// Writes a file atomically: under a temporary name, synced, and renamed to `file`.
///
/// # Errors
/// If the file system fails; the old file stays.
pub(crate) fn write_atomic(file: &Path, bytes: &[u8]) -> Result<(), Failure> {
    let name = file.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    let partial = file.with_file_name(format!("{name}.partial"));
    let write = || {
        let mut open = File::create(&partial)?;
        open.write_all(bytes)?;
        open.sync_all()?;
        fs::rename(&partial, file)
    };
    write().map_err(|error| {
        // Report the first error; there may be nothing to remove.
        let _ = fs::remove_file(&partial);
        Failure::io(file)(error)
    })
}

fn training(folder: &Path) -> PathBuf {
    folder.join("training")
}

/// The lock of a run: held by one process, and freed when it dies.
fn lock(folder: &Path) -> Result<File, Failure> {
    let path = training(folder).join(LOCK);
    let file = File::options().create(true).truncate(false).write(true).open(&path).map_err(Failure::io(&path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => {
            let shown = folder.display();
            Err(Failure::new(format!("another process is training in {shown}: wait for it, or choose another --out")))
        }
        Err(TryLockError::Error(error)) => Err(Failure::io(&path)(error)),
    }
}

/// Whether a process trains in `folder`.
pub(crate) fn is_locked(folder: &Path) -> bool {
    let file = File::options().write(true).open(training(folder).join(LOCK));
    file.is_ok_and(|file| matches!(file.try_lock(), Err(TryLockError::WouldBlock)))
}

/// A model file in `folder`, if it exists.
pub(crate) fn model_file(folder: &Path) -> Option<String> {
    let names = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names = names.filter_map(|entry| entry.file_name().into_string().ok());
    names.find(|name| {
        [CONFIG, TOKENIZER, LABELS].contains(&name.as_str())
            || name.ends_with(".safetensors")
            || name.ends_with(".safetensors.index.json")
    })
}

fn empty_folder(folder: &Path) -> Result<(), Failure> {
    if folder.exists() {
        fs::remove_dir_all(folder).map_err(Failure::io(folder))?;
    }
    fs::create_dir_all(folder).map_err(Failure::io(folder))
}

/// Removes a checkpoint atomically: renames it first.
fn remove(checkpoint: &Path) -> Result<(), Failure> {
    let going = checkpoint.with_extension("old.partial");
    fs::rename(checkpoint, &going).map_err(Failure::io(checkpoint))?;
    fs::remove_dir_all(&going).map_err(Failure::io(&going))
}

/// Syncs a folder, so that a rename survives a power loss.
fn sync(folder: &Path) -> Result<(), Failure> {
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(Failure::io(folder))
}
