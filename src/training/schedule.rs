//! The learning rate over a run.

use serde::{Deserialize, Serialize};

/// What the learning rate does after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleKind {
    /// Falls along a cosine to the minimum at the last step (Loshchilov and Hutter, 2017).
    Cosine,
    /// Stays.
    Constant,
}

/// A linear warm-up, and then a [`ScheduleKind`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// What follows the warm-up.
    pub kind: ScheduleKind,
    /// The learning rate after the warm-up.
    pub maximum: f64,
    /// The learning rate at the end of a cosine.
    pub minimum: f64,
    /// Steps of warm-up.
    pub warmup_steps: u64,
    /// Steps in all.
    pub steps: u64,
}

impl Schedule {
    /// The learning rate of `step`, counted from zero.
    pub fn learning_rate(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return self.maximum * (step + 1) as f64 / (self.warmup_steps + 1) as f64;
        }
        match self.kind {
            ScheduleKind::Constant => self.maximum,
            ScheduleKind::Cosine => {
                let span = self.steps.saturating_sub(self.warmup_steps).max(1);
                let done = ((step - self.warmup_steps) as f64 / span as f64).min(1.0);
                let height = 0.5 * (1.0 + (std::f64::consts::PI * done).cos());
                self.minimum + height * (self.maximum - self.minimum)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_rises_linearly_falls_along_a_cosine_and_ends_at_the_minimum() {
        let schedule = Schedule { kind: ScheduleKind::Cosine, maximum: 1.0, minimum: 0.1, warmup_steps: 3, steps: 13 };
        let rate = |step| schedule.learning_rate(step);
        assert_eq!([rate(0), rate(1), rate(2), rate(3)], [0.25, 0.5, 0.75, 1.0]);
        assert!((rate(8) - 0.55).abs() < 1e-12, "half way: {}", rate(8));
        assert!((rate(13) - 0.1).abs() < 1e-12 && (rate(99) - 0.1).abs() < 1e-12);
        assert_eq!(Schedule { kind: ScheduleKind::Constant, ..schedule }.learning_rate(10), 1.0);
    }
}
