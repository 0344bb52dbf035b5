//! What ranks tell each other: a JSON object a line.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::recipe::Recipe;

/// What the others need to know to train along.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Begin {
    /// What is trained, with all that the command line of the first rank says.
    pub(crate) recipe: Recipe,
    /// The checkpoint that it goes on from, and its step.
    pub(crate) checkpoint: Option<(PathBuf, u64)>,
    /// Of what makes tokens of the data.
    pub(crate) checksum: String,
}

/// What the others are to do next, in the order in which they are told.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Command {
    /// The run begins.
    Begin(Box<Begin>),
    /// A training step.
    Step,
    /// To make the model's parameters complete.
    Complete,
    /// To make them complete, and to read a share of the held-out data.
    Judge { tokens: usize },
    /// To make them complete, and to send what the optimizer keeps.
    Save,
    /// The run is over.
    End,
}

/// From the first rank to another.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum FromFirst {
    /// It is well.
    Beat,
    Do(Command),
    /// The run has failed, which the first rank has told already.
    Abort,
}

/// To the first rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum ToFirst {
    /// It is well.
    Beat,
    /// Somebody asks the run to stop.
    Stop,
    /// It cannot go on.
    Failed(String),
    /// It has done all, and goes.
    Done,
}
