//! How a model did on held-out data.

use serde::{Deserialize, Serialize};

use super::scores::Scores;

/// How a model did on held-out data.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Validation {
    /// Nats a target.
    pub loss: f64,
    /// Percentages, where the task has them.
    #[serde(default)]
    pub scores: Option<Scores>,
}

impl Validation {
    /// Whether this model is to be kept rather than the other: by whole utterances understood and then by slots, where
    /// there are scores, and by its loss.
    pub fn is_better_than(&self, other: &Self) -> bool {
        let rank = |validation: &Self| {
            let scores = validation.scores.unwrap_or_default();
            [scores.sentence_accuracy, scores.slot_f1, -validation.loss]
        };
        rank(self).partial_cmp(&rank(other)).is_some_and(std::cmp::Ordering::is_gt)
    }
}

/// A validation, and what it was about.
#[derive(Clone, Debug, PartialEq)]
pub struct ValidationOutput {
    /// The figures.
    pub validation: Validation,
    /// Intents taken for others, `(expected, predicted, how often)`, the most frequent first.
    pub confusions: Vec<(String, String, usize)>,
}
