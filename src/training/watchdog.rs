//! Warns of anomalies during a run.

/// Steps over which the gradient norm is averaged.
const USUAL: f64 = 50.0;
/// Steps before the first warning, and between two.
const PAUSE: u64 = 100;
/// Factor above the average from which a gradient norm counts as an anomaly.
const SPIKE: f64 = 10.0;

/// Checks each step's figures.
#[derive(Default)]
pub(crate) struct Watchdog {
    /// Running mean of the gradient norm.
    usual: f64,
    steps: u64,
    warned: u64,
}

impl Watchdog {
    /// A warning, if these figures call for one.
    pub(crate) fn look(&mut self, loss: f64, gradient_norm: f64) -> Option<String> {
        let (usual, steps) = (self.usual, self.steps);
        self.steps += 1;
        self.usual += (gradient_norm - usual) / USUAL.min(self.steps as f64);
        if steps < PAUSE || steps < self.warned + PAUSE || gradient_norm < SPIKE * usual || usual == 0.0 {
            return None;
        }
        self.warned = steps;
        let times = gradient_norm / usual;
        Some(format!(
            "the gradient norm is {gradient_norm:.2}, {times:.0} times its recent level, at a loss of {loss:.4}"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spike_is_told_once_and_noise_is_not() {
        let mut watch = Watchdog::default();
        let mut told = Vec::new();
        for step in 0..400 {
            let norm = if (200..205).contains(&step) { 30.0 } else { 1.0 + (step % 3) as f64 };
            if watch.look(2.0, norm).is_some() {
                told.push(step);
            }
        }
        assert_eq!(told, [200]);
    }
}
