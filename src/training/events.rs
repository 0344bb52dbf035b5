//! What a run tells as it goes on: one type and one JSON schema, for `metrics.jsonl`, for `--json` and for people.

use serde_json::{Value, json};

use crate::failure::Failure;
use crate::tasks::scores::Scores;

/// Something that happened in a run.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Event {
    /// A training step.
    Trained {
        /// Counted from one.
        step: u64,
        /// Nats a target.
        loss: f64,
        /// `e` to the loss, where the loss is that of a language.
        perplexity: Option<f64>,
        /// Of the step.
        learning_rate: f64,
        /// Global norm before clipping.
        gradient_norm: f64,
        /// Targets learnt from in a second.
        tokens_per_second: f64,
    },
    /// A validation.
    Validated {
        /// Steps taken.
        step: u64,
        /// Nats a target.
        loss: f64,
        /// As above.
        perplexity: Option<f64>,
        /// Percentages, where the task has them.
        scores: Option<Scores>,
    },
}

/// Who is told of events.
pub(crate) trait Sink {
    /// Is told of an event.
    ///
    /// # Errors
    /// If it cannot be kept.
    fn tell(&mut self, event: &Event) -> Result<(), Failure>;
}

impl Event {
    /// As one line for programs.
    pub(crate) fn to_json(self) -> Value {
        match self {
            Self::Trained { step, loss, perplexity, learning_rate, gradient_norm, tokens_per_second } => {
                let mut line = json!({ "event": "train", "step": step, "loss": loss });
                add_perplexity(&mut line, perplexity);
                line["learning_rate"] = json!(learning_rate);
                line["gradient_norm"] = json!(gradient_norm);
                line["tokens_per_second"] = json!(tokens_per_second);
                line
            }
            Self::Validated { step, loss, perplexity, scores } => {
                let mut line = json!({ "event": "valid", "step": step, "loss": loss });
                add_perplexity(&mut line, perplexity);
                add_scores(&mut line, scores);
                line
            }
        }
    }
}

fn add_perplexity(line: &mut Value, perplexity: Option<f64>) {
    if let Some(perplexity) = perplexity {
        line["perplexity"] = json!(perplexity);
    }
}

/// Scores as fields of a line, percentages.
pub(crate) fn add_scores(line: &mut Value, scores: Option<Scores>) {
    if let Some(Scores { intent_accuracy, slot_f1, sentence_accuracy }) = scores {
        let rounded = |percent: f64| json!((percent * 1e3).round() / 1e3);
        line["intent_accuracy"] = rounded(intent_accuracy);
        line["slot_f1"] = rounded(slot_f1);
        line["sentence_accuracy"] = rounded(sentence_accuracy);
    }
}
