//! Lines for people: now and then on stderr.

use std::time::{Duration, Instant};

use crate::failure::Failure;
use crate::tasks::scores::Scores;
use crate::training::events::{Event, Sink};

/// Time between two lines.
const PAUSE: Duration = Duration::from_secs(2);

pub(super) struct Lines {
    steps: u64,
    begun: Option<(Instant, u64)>,
    shown: Option<Instant>,
}

impl Lines {
    /// Lines of a run of `steps`.
    pub(super) fn new(steps: u64) -> Self {
        Self { steps, begun: None, shown: None }
    }

    /// Whether a line of training is due.
    fn is_due(&self, step: u64) -> bool {
        step >= self.steps || self.shown.is_none_or(|shown| shown.elapsed() >= PAUSE)
    }
}

impl Sink for Lines {
    fn tell(&mut self, event: &Event) -> Result<(), Failure> {
        let steps = self.steps;
        let width = steps.to_string().len();
        let shown =
            |perplexity: Option<f64>| perplexity.map_or(String::new(), |value| format!("  perplexity {value:.2}"));
        match *event {
            Event::Trained { step, loss, perplexity, learning_rate, gradient_norm, tokens_per_second } => {
                let (begun, first) = *self.begun.get_or_insert((Instant::now(), step));
                if !self.is_due(step) {
                    return Ok(());
                }
                self.shown = Some(Instant::now());
                let left = match step - first {
                    0 => String::new(),
                    done => {
                        let each = begun.elapsed().as_secs_f64() / done as f64;
                        format!("  {} left", duration(each * (steps - step.min(steps)) as f64))
                    }
                };
                let perplexity = shown(perplexity);
                eprintln!(
                    "step {step:>width$}/{steps}  loss {loss:.4}{perplexity}  learning rate {learning_rate:.2e}  gradient \
                     norm {gradient_norm:.2}  {tokens_per_second:.0} tokens/s{left}"
                );
            }
            Event::Validated { step, loss, perplexity, scores } => {
                let perplexity = shown(perplexity);
                let scores = scores.map_or(String::new(), |Scores { intent_accuracy, slot_f1, sentence_accuracy }| {
                    format!("  intents {intent_accuracy:.2}%  slots F1 {slot_f1:.2}  sentences {sentence_accuracy:.2}%")
                });
                eprintln!("step {step:>width$}/{steps}  validation loss {loss:.4}{perplexity}{scores}");
            }
        }
        Ok(())
    }
}

/// Seconds for people: `7s`, `2m 05s`, `3h 10m`.
pub fn duration(seconds: f64) -> String {
    let seconds = seconds.max(0.0).round() as u64;
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, seconds) => format!("{seconds}s"),
        (0, minutes, seconds) => format!("{minutes}m {seconds:02}s"),
        (hours, minutes, _) => format!("{hours}h {minutes:02}m"),
    }
}

#[cfg(test)]
mod tests {
    use super::duration;

    #[test]
    fn durations_read_well() {
        assert_eq!(
            ["7s", "2m 05s", "3h 10m"],
            [duration(6.6), duration(125.0), duration(11_400.0)].each_ref().map(|s| s.as_str())
        );
    }
}
