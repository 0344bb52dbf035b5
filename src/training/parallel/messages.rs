//! Messages between ranks, one JSON object per line.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::recipe::Recipe;

/// What other ranks need in order to start training.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Begin {
    /// The recipe, with the changes of rank 0's command line.
    pub(crate) recipe: Recipe,
    /// The checkpoint to resume from, and its step.
    pub(crate) checkpoint: Option<(PathBuf, u64)>,
    /// Checksum of the tokenizer or labels.
    pub(crate) checksum: String,
}

/// Commands of rank 0, executed in order.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Command {
    /// Start the run.
    Begin(Box<Begin>),
    /// Run a training step.
    Step,
    /// Gather the model's parameters.
    Complete,
    /// Gather the parameters and evaluate a shard of the held-out data.
    Judge { tokens: usize },
    /// Gather the parameters and the optimizer's state.
    Save,
    /// End the run.
    End,
}

/// From rank 0 to another rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum FromFirst {
    /// Heartbeat.
    Beat,
    Do(Command),
    /// The run has failed, and rank 0 reports it.
    Abort,
}

/// From another rank to rank 0.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum ToFirst {
    /// Heartbeat.
    Beat,
    /// Stop the run.
    Stop,
    /// This rank has failed.
    Failed(String),
    /// This rank has finished and exits.
    Done,
}
