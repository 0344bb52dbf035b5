//! Learning rate schedules.

use serde::{Deserialize, Serialize};

/// The learning rate after warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleKind {
    /// Cosine decay to the minimum at the last step (Loshchilov and Hutter, 2017).
    Cosine,
    /// Linear decay to the minimum at the last step.
    Linear,
    /// Constant, with a linear decay over the last steps: warm-up, stable, decay (Hu et al., 2024).
    Wsd,
    /// Constant.
    Constant,
}

/// A linear warm-up, then a [`ScheduleKind`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// The schedule after warm-up.
    pub kind: ScheduleKind,
    /// The peak learning rate.
    pub maximum: f64,
    /// The learning rate at the end of a decay.
    pub minimum: f64,
    /// Warm-up steps.
    pub warmup_steps: u64,
    /// Decay steps of [`ScheduleKind::Wsd`].
    pub decay_steps: u64,
    /// Total steps.
    pub steps: u64,
}

impl Schedule {
    /// The learning rate of `step`, counted from zero.
    pub fn learning_rate(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return self.maximum * (step + 1) as f64 / (self.warmup_steps + 1) as f64;
        }
        // The completed share of the steps from `begin` to the last.
        let done = |begin: u64| {
            let span = self.steps.saturating_sub(begin).max(1);
            (step.saturating_sub(begin) as f64 / span as f64).min(1.0)
        };
        let height = match self.kind {
            ScheduleKind::Constant => 1.0,
            ScheduleKind::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * done(self.warmup_steps)).cos()),
            ScheduleKind::Linear => 1.0 - done(self.warmup_steps),
            ScheduleKind::Wsd => 1.0 - done(self.steps.saturating_sub(self.decay_steps).max(self.warmup_steps)),
        };
        self.minimum + height * (self.maximum - self.minimum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COSINE: Schedule =
        Schedule { kind: ScheduleKind::Cosine, maximum: 1.0, minimum: 0.1, warmup_steps: 3, decay_steps: 2, steps: 13 };

    #[test]
    fn the_rate_rises_linearly_falls_along_a_cosine_and_ends_at_the_minimum() {
        let schedule = COSINE;
        let rate = |step| schedule.learning_rate(step);
        assert_eq!([rate(0), rate(1), rate(2), rate(3)], [0.25, 0.5, 0.75, 1.0]);
        assert!((rate(8) - 0.55).abs() < 1e-12, "half way: {}", rate(8));
        assert!((rate(13) - 0.1).abs() < 1e-12 && (rate(99) - 0.1).abs() < 1e-12);
        assert_eq!(Schedule { kind: ScheduleKind::Constant, ..schedule }.learning_rate(10), 1.0);
    }

    #[test]
    fn a_straight_line_falls_from_the_warm_up_or_over_the_last_steps() {
        let near = |rate: f64, wanted: f64| assert!((rate - wanted).abs() < 1e-12, "{rate}, wanted {wanted}");
        let linear = Schedule { kind: ScheduleKind::Linear, ..COSINE };
        near(linear.learning_rate(3), 1.0);
        near(linear.learning_rate(8), 0.55);
        near(linear.learning_rate(13), 0.1);
        let wsd = Schedule { kind: ScheduleKind::Wsd, decay_steps: 4, ..COSINE };
        near(wsd.learning_rate(1), 0.5);
        near(wsd.learning_rate(9), 1.0);
        near(wsd.learning_rate(11), 0.55);
        near(wsd.learning_rate(13), 0.1);
        // A decay longer than the steps after warm-up takes all of them.
        let all = Schedule { decay_steps: 13, ..wsd };
        near(all.learning_rate(8), 0.55);
    }
}
