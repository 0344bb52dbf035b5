//! Checkpoints: a model folder, the optimizer's state, and the state of the run.

use std::borrow::Cow;
use std::fs::{self, File};
use std::path::Path;

use burn::tensor::{Tensor, TensorData};
use fireclay_kernels::Backend;
use fireclay_model::{ModelFolder, f32_chunks};
use safetensors::SafeTensorError;
use safetensors::tensor::{Dtype, SafeTensors, View};
use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::recipe::schema::Recipe;
use crate::run_folder::{OPTIMIZER, RunFolder, STATE, write_atomic};
use crate::tasks::{Task, Validation};
use crate::training::optim::Optimizer;
use crate::training::origin::Origin;
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
pub fn save<B: Backend>(folder: &RunFolder, trainer: &Trainer<B>, state: &RunState) -> Result<(), Failure> {
    let place = folder.put_checkpoint(state.step, |folder| write(folder, trainer, state))?;
    if state.best.is_some_and(|best| best.step == state.step) {
        folder.publish(&place)?;
    }
    folder.keep_checkpoints(state.recipe.training.checkpoints_kept)
}

fn write<B: Backend>(folder: &Path, trainer: &Trainer<B>, state: &RunState) -> Result<(), Failure> {
    trainer.save(folder)?;
    let state_tensors = trainer.optimizer().state();
    let views = state_tensors.map(|(name, tensor)| (name, Kept { shape: tensor.dims(), tensor }));
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

/// An optimizer tensor that is read from the device when it is written, so that the host holds one
/// at a time.
struct Kept<'a, B: Backend> {
    shape: [usize; 1],
    tensor: &'a Tensor<B, 1>,
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
        f32_chunks(self.tensor, 0..self.shape[0], |_, chunk| bytes.extend_from_slice(chunk));
        Cow::Owned(bytes)
    }

    fn data_len(&self) -> usize {
        4 * self.shape[0]
    }
}

/// Restores the trainer from the last checkpoint in `folder`.
///
/// # Errors
/// If a file is missing or damaged; names it.
pub fn load<B: Backend>(
    folder: &RunFolder,
    state: &RunState,
    task: Task,
    device: B::Device,
) -> Result<Trainer<B>, Failure> {
    let checkpoint = folder.checkpoint(state.step);
    let model = ModelFolder::new(&checkpoint).load(&device)?;
    let mut trainer = Trainer::<B>::with_model(&state.recipe, task, model, device.clone())?;
    let file = checkpoint.join(OPTIMIZER);
    let bytes = fs::read(&file).map_err(Failure::io(&file))?;
    let tensors = SafeTensors::deserialize(&bytes).map_err(|error| damaged(&file, &error.to_string()))?;
    let read = |name: &str, size: usize| {
        // Old checkpoints of AdamW do not name the optimizer.
        let older = name.strip_prefix("adamw.").unwrap_or(name);
        let view = tensors.tensor(name).or_else(|_| tensors.tensor(older));
        let view = view.map_err(|_| damaged(&file, &format!("{name} is missing")))?;
        if view.shape() != [size] || view.dtype() != Dtype::F32 {
            return Err(damaged(&file, &format!("{name} does not have {size} f32 values")));
        }
        let chunks = view.data().chunks_exact(4);
        let values: Vec<f32> = chunks.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        Ok(Tensor::from_data(TensorData::new(values, [size]), &device))
    };
    let optimizer = Optimizer::new(state.recipe.training.optimizer, trainer.model()).with_state(state.step, read)?;
    trainer.restore(state.step, optimizer);
    // The run may have been killed between a checkpoint and its publication.
    if state.best.is_some_and(|best| best.step == state.step) {
        folder.publish(&checkpoint)?;
    }
    folder.forget_partial();
    Ok(trainer)
}

fn damaged(file: &Path, reason: &str) -> Failure {
    let folder = file.parent().unwrap_or(file).display();
    Failure::new(format!("{}: {reason}; remove {folder} to resume from the checkpoint before it", file.display()))
}
