//! Rewards of preference pairs.

use serde::{Deserialize, Serialize};

/// Means over pairs. The reward of an answer is `beta` times the log-ratio of its probabilities
/// with the policy and the reference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Rewards {
    /// Of chosen answers.
    pub chosen: f64,
    /// Of rejected answers.
    pub rejected: f64,
    /// Of chosen over rejected answers.
    pub margins: f64,
    /// The share of pairs whose chosen answer has the larger reward, from 0 to 1.
    pub accuracies: f64,
}

impl Rewards {
    /// How many figures they are on the device.
    pub(crate) const COUNT: usize = 4;

    /// Of their figures on the device, in their order.
    pub(crate) fn of(figures: &[f64]) -> Option<Self> {
        let [chosen, rejected, margins, accuracies] = *figures else { return None };
        Some(Self { chosen, rejected, margins, accuracies })
    }

    /// With the names that TRL gives them.
    pub(crate) fn named(self) -> [(&'static str, f64); Self::COUNT] {
        let Self { chosen, rejected, margins, accuracies } = self;
        [
            ("rewards/chosen", chosen),
            ("rewards/rejected", rejected),
            ("rewards/margins", margins),
            ("rewards/accuracies", accuracies),
        ]
    }
}
