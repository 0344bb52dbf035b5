//! Text lines on stderr, at increasing intervals.

use std::time::{Duration, Instant};

use crate::failure::Failure;
use crate::inference::class_report::ClassScores;
use crate::progress::duration;
use crate::tasks::rewards::Rewards;
use crate::tasks::scores::Scores;
use crate::tasks::validation::Validation;
use crate::training::events::{Event, Sink};
use crate::training::expert_balance::ExpertBalance;

/// Time of the second line, and the factor between intervals, up to [`LONGEST`].
const FIRST: Duration = Duration::from_secs(2);
const GROWTH: f64 = 1.6;
const LONGEST: Duration = Duration::from_secs(600);

pub(super) struct Lines {
    steps: u64,
    begun: Option<(Instant, u64)>,
    /// Since the start.
    due: Duration,
}

impl Lines {
    /// Lines for a run of `steps`.
    pub(super) fn new(steps: u64) -> Self {
        Self { steps, begun: None, due: Duration::ZERO }
    }

    /// Whether a training line is due.
    fn is_due(&mut self, step: u64, elapsed: Duration) -> bool {
        if elapsed < self.due && step < self.steps {
            return false;
        }
        self.due = elapsed.mul_f64(GROWTH).clamp(FIRST, elapsed + LONGEST);
        true
    }
}

fn shown_rewards(rewards: Option<Rewards>) -> String {
    rewards.map_or(String::new(), |Rewards { margins, accuracies, .. }| {
        format!("  reward margin {margins:.3}  accuracy {:.1}%", 100.0 * accuracies)
    })
}

fn shown_loads(experts: Option<ExpertBalance>) -> String {
    experts.map_or(String::new(), |ExpertBalance { least_load, most_load, .. }| {
        format!("  expert loads {least_load:.2}-{most_load:.2}")
    })
}

impl Sink for Lines {
    fn tell(&mut self, event: &Event) -> Result<(), Failure> {
        let steps = self.steps;
        let width = steps.to_string().len();
        let shown =
            |perplexity: Option<f64>| perplexity.map_or(String::new(), |value| format!("  perplexity {value:.2}"));
        match *event {
            Event::Trained {
                step,
                loss,
                perplexity,
                learning_rate,
                gradient_norm,
                tokens_per_second,
                rewards,
                experts,
                ..
            } => {
                let (begun, first) = *self.begun.get_or_insert((Instant::now(), step));
                if !self.is_due(step, begun.elapsed()) {
                    return Ok(());
                }
                let left = match step - first {
                    0 => String::new(),
                    done => {
                        let each = begun.elapsed().as_secs_f64() / done as f64;
                        format!("  {} left", duration(each * (steps - step.min(steps)) as f64))
                    }
                };
                let (perplexity, rewards, loads) = (shown(perplexity), shown_rewards(rewards), shown_loads(experts));
                eprintln!(
                    "step {step:>width$}/{steps}  loss {loss:.4}{perplexity}{rewards}{loads}  learning rate \
                     {learning_rate:.2e}  gradient norm {gradient_norm:.2}  {tokens_per_second:.0} tokens/s{left}"
                );
            }
            Event::Validated {
                step,
                validation: Validation { loss, scores, classes, rewards, answer_accuracy },
                perplexity,
            } => {
                let perplexity = shown(perplexity);
                let answers = answer_accuracy.map_or(String::new(), |percent| format!("  right answers {percent:.1}%"));
                let scores = scores.map_or(String::new(), |Scores { intent_accuracy, slot_f1, sentence_accuracy }| {
                    format!("  intents {intent_accuracy:.2}%  slots F1 {slot_f1:.2}  sentences {sentence_accuracy:.2}%")
                });
                let classes = classes.map_or(String::new(), |ClassScores { accuracy, macro_f1 }| {
                    format!("  accuracy {accuracy:.2}%  macro F1 {macro_f1:.2}")
                });
                eprintln!(
                    "step {step:>width$}/{steps}  validation loss {loss:.4}{perplexity}{scores}{classes}{}{answers}",
                    shown_rewards(rewards)
                );
            }
            Event::Warned { step, ref text } => eprintln!("step {step:>width$}/{steps}  warning: {text}"),
            // Samples are for the dashboard and the report; here they would hide the figures.
            Event::Sampled { .. } | Event::Confused { .. } => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_of_minutes_has_some_dozen_lines_and_one_of_hours_not_many_more() {
        let lines = |seconds: u64| {
            let mut lines = Lines::new(u64::MAX);
            (0..10 * seconds).filter(|tenth| lines.is_due(1, Duration::from_millis(100 * tenth))).count()
        };
        assert!((8..14).contains(&lines(180)), "{}", lines(180));
        assert!((15..30).contains(&lines(2 * 3600)), "{}", lines(2 * 3600));
    }

    #[test]
    fn the_last_step_always_has_a_line() {
        let mut lines = Lines::new(7);
        let shown: Vec<u64> = (1..=7).filter(|step| lines.is_due(*step, Duration::from_millis(*step))).collect();
        assert_eq!(shown, [1, 7]);
    }
}
