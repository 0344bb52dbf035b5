//! Validation results.

use serde::{Deserialize, Serialize};

use super::rewards::Rewards;
use super::scores::Scores;
use crate::inference::class_report::ClassScores;

/// A model's result on held-out data.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Validation {
    /// Loss in nats per target, or per preference pair.
    pub loss: f64,
    /// Scores, if the task has them.
    #[serde(default)]
    pub scores: Option<Scores>,
    /// Scores of labels, for a classifier.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub classes: Option<ClassScores>,
    /// Rewards of preference pairs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rewards: Option<Rewards>,
    /// The share of held-out answers that greedy decoding generates, in percent, for conversations.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer_accuracy: Option<f64>,
}

impl Validation {
    /// A loss alone.
    pub(crate) fn of_loss(loss: f64) -> Self {
        Self { loss, scores: None, classes: None, rewards: None, answer_accuracy: None }
    }

    /// Whether this model is better: by sentence accuracy and then slot F1, or by the accuracy of
    /// labels and then their macro F1, if there are such scores, else by loss.
    pub fn is_better_than(&self, other: &Self) -> bool {
        let rank = |validation: &Self| {
            let scores = validation.scores.unwrap_or_default();
            match validation.classes {
                Some(classes) => [classes.accuracy, classes.macro_f1, -validation.loss],
                None => [scores.sentence_accuracy, scores.slot_f1, -validation.loss],
            }
        };
        rank(self).partial_cmp(&rank(other)).is_some_and(std::cmp::Ordering::is_gt)
    }
}

/// A validation with details.
#[derive(Clone, Debug, PartialEq)]
pub struct ValidationOutput {
    /// The figures.
    pub validation: Validation,
    /// Confusions of intents or labels, `(expected, predicted, count)`, most frequent first.
    pub confusions: Vec<(String, String, usize)>,
}
