//! Checkpoints: a model folder, the optimizer's state, and the state of the run.

use std::borrow::Cow;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;

use burn::tensor::{Tensor, TensorData};
use fireclay_kernels::{Backend, Collective};
use fireclay_model::{LoraFiles, ModelFolder, f32_chunks};
use safetensors::SafeTensorError;
use safetensors::tensor::{Dtype, Metadata, View};
use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::recipe::{AdapterKind, Recipe};
use crate::run_folder::{OPTIMIZER, RunFolder, STATE, write_atomic};
use crate::tasks::resolve::InitialModel;
use crate::tasks::{Task, Validation};
use crate::training::optim::{Optimizer, Sharding, StateTensor};
use crate::training::origin::Origin;
use crate::training::parallel::Ranks;
use crate::training::trainer::Trainer;

/// The best validation so far.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// Its step.
    pub step: u64,
    /// Its result.
    pub validation: Validation,
    /// Validations since then.
    #[serde(default)]
    pub without_improvement: u64,
}

/// State of a run besides model and optimizer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunState {
    /// Completed steps.
    pub step: u64,
    /// The best validation so far.
    pub best: Option<Best>,
    /// The data and tokenizer at the start of the run; missing in old checkpoints.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<Origin>,
    /// The recipe.
    pub recipe: Recipe,
}

/// Opens the run in `path` and the state of its last checkpoint.
///
/// # Errors
/// If there is none, its state cannot be read, or another process trains there.
pub fn resume(path: &Path) -> Result<(RunFolder, RunState), Failure> {
    let folder = RunFolder::open(path)?;
    let Some((_, checkpoint)) = folder.checkpoints().pop() else {
        return Err(Failure::new(format!("{} holds no checkpoint", path.display())));
    };
    let file = checkpoint.join(STATE);
    let text = fs::read_to_string(&file).map_err(Failure::io(&file))?;
    let state: RunState = serde_json::from_str(&text).map_err(|error| damaged(&file, &error.to_string()))?;
    Ok((folder, state))
}

/// Writes a checkpoint, publishes its model if it is the best, and removes old checkpoints.
///
/// # Errors
/// If the file system fails; earlier checkpoints stay.
pub fn save<B: Backend>(folder: &RunFolder, trainer: &mut Trainer<B>, state: &RunState) -> Result<(), Failure> {
    trainer.begin_save();
    let trainer = &*trainer;
    let place = folder.put_checkpoint(state.step, |folder| write(folder, trainer, state))?;
    if state.best.is_some_and(|best| best.step == state.step) {
        folder.publish(&place)?;
    }
    folder.keep_checkpoints(state.recipe.training.checkpoints_kept)
}

fn write<B: Backend>(folder: &Path, trainer: &Trainer<B>, state: &RunState) -> Result<(), Failure> {
    trainer.write(folder)?;
    let views =
        trainer.optimizer().state().map(|tensor| (tensor.name.clone(), Kept { shape: [tensor.elements()], tensor }));
    let file = folder.join(OPTIMIZER);
    safetensors::serialize_to_file(views, None, &file)
        .map_err(|error| match error {
            SafeTensorError::IoError(error) => error,
            error => std::io::Error::other(error.to_string()),
        })
        .and_then(|()| File::open(&file)?.sync_all())
        .map_err(Failure::io(&file))?;
    let text = serde_json::to_string_pretty(state).map_err(|error| Failure::new(error.to_string()))?;
    write_atomic(&folder.join(STATE), text.as_bytes())
}

/// A tensor of the optimizer as it is saved: made whole and read from the device when it is
/// written, in the order of the names, so that device and host hold one at a time.
struct Kept<'a, B: Backend> {
    shape: [usize; 1],
    tensor: StateTensor<'a, B>,
}

impl<B: Backend> View for Kept<'_, B> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let mut bytes = Vec::with_capacity(self.data_len());
        f32_chunks(&self.tensor.whole(), 0..self.shape[0], |_, chunk| bytes.extend_from_slice(chunk));
        Cow::Owned(bytes)
    }

    fn data_len(&self) -> usize {
        4 * self.shape[0]
    }
}

/// The trainer of the last checkpoint in `folder`, of the first of `ranks`.
///
/// # Errors
/// If a file is missing or damaged; it is named.
pub(crate) fn load<B: Backend>(
    folder: &RunFolder,
    state: &RunState,
    task: Task,
    device: B::Device,
    ranks: (Ranks, Collective),
) -> Result<Trainer<B>, Failure> {
    let checkpoint = folder.checkpoint(state.step);
    let trainer = read(&checkpoint, &state.recipe, state.step, task, device, ranks)?;
    // The run may have been killed between a checkpoint and its publication.
    if state.best.is_some_and(|best| best.step == state.step) {
        folder.publish(&checkpoint)?;
    }
    folder.forget_partial();
    Ok(trainer)
}

/// The trainer of a checkpoint of `step`, of any rank: of what the optimizer keeps it reads the
/// part that this rank has.
///
/// # Errors
/// As [`load`].
pub(crate) fn read<B: Backend>(
    checkpoint: &Path,
    recipe: &Recipe,
    step: u64,
    task: Task,
    device: B::Device,
    (ranks, collective): (Ranks, Collective),
) -> Result<Trainer<B>, Failure> {
    let initial = match (&recipe.init, recipe.training.adapter) {
        (Some(base), AdapterKind::Lora) => {
            let adapter = LoraFiles::open(checkpoint)?;
            recipe.model_from(base, &task, Some(&adapter), &device)?
        }
        (base, _) => {
            let reference = match base {
                Some(base) if task.has_reference() => recipe.model_from(base, &task, None, &device)?.reference,
                _ => None,
            };
            InitialModel { model: ModelFolder::new(checkpoint).load(&device)?, reference }
        }
    };
    let training = &recipe.training;
    let sharding = Sharding { collective: collective.clone(), shard: training.shard, reduce: training.reduce };
    let mut trainer = Trainer::<B>::with_model_of_rank(recipe, task, initial, device.clone(), (ranks, collective))?;
    let path = checkpoint.join(OPTIMIZER);
    let mut file = File::open(&path).map_err(Failure::io(&path))?;
    let (header, metadata) = header(&mut file, &path)?;
    let read = |name: &str, size: usize, ranges: [Range<usize>; 2]| {
        // Checkpoints written when AdamW was the only optimizer do not name it.
        let older = name.strip_prefix("adamw.").unwrap_or(name);
        let info = metadata.info(name).or_else(|| metadata.info(older));
        let info = info.ok_or_else(|| damaged(&path, &format!("{name} is missing")))?;
        if info.shape != [size] || info.dtype != Dtype::F32 {
            return Err(damaged(&path, &format!("{name} is not {size} values of f32")));
        }
        let mut bytes = Vec::with_capacity(4 * ranges.iter().map(Range::len).sum::<usize>());
        for range in ranges.into_iter().filter(|range| !range.is_empty()) {
            let (begin, before) = (header + info.data_offsets.0 + 4 * range.start, bytes.len());
            bytes.resize(before + 4 * range.len(), 0);
            let read = file.seek(SeekFrom::Start(begin as u64)).and_then(|_| file.read_exact(&mut bytes[before..]));
            read.map_err(|error| damaged(&path, &error.to_string()))?;
        }
        let values: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        let count = values.len();
        Ok(Tensor::from_data(TensorData::new(values, [count]), &device))
    };
    let optimizer = Optimizer::of_rank(training.optimizer, trainer.model(), sharding).with_state(step, read)?;
    trainer.restore(step, optimizer);
    Ok(trainer)
}

/// Where the tensors begin in a file, and what it says of them.
fn header(file: &mut File, path: &Path) -> Result<(usize, Metadata), Failure> {
    /// The most that safetensors lets a header have.
    const MOST: u64 = 100_000_000;
    let wrong = |error: std::io::Error| damaged(path, &error.to_string());
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(wrong)?;
    let size = u64::from_le_bytes(length);
    if size > MOST {
        return Err(damaged(path, "its header is too long"));
    }
    let mut bytes = length.to_vec();
    bytes.resize(8 + size as usize, 0);
    file.read_exact(&mut bytes[8..]).map_err(wrong)?;
    let text = std::str::from_utf8(&bytes[8..]).map_err(|error| damaged(path, &error.to_string()))?;
    let metadata: Metadata = serde_json::from_str(text).map_err(|error| damaged(path, &error.to_string()))?;
    let whole = file.metadata().map_err(wrong)?.len();
    if whole != (bytes.len() + metadata.data_len()) as u64 {
        return Err(damaged(path, "it is not as long as its header says"));
    }
    Ok((bytes.len(), metadata))
}

fn damaged(file: &Path, reason: &str) -> Failure {
    let folder = file.parent().unwrap_or(file).display();
    Failure::new(format!("{}: {reason}; remove {folder} to resume from the checkpoint before it", file.display()))
}
