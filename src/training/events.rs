//! What a run tells as it goes on: one type and one JSON schema, for `metrics.jsonl`, for `--json` and for people.

use fireclay_kernels::recorder::Memory;
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::tasks::scores::Scores;

/// Something that happened in a run.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
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
        /// Of the last of the steps that were read together.
        memory: Option<MemoryUse>,
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
    /// Text that the model wrote at a validation.
    Sampled {
        /// Steps taken.
        step: u64,
        /// What it wrote.
        text: String,
    },
    /// Intents that were taken for others at a validation.
    Confused {
        /// Steps taken.
        step: u64,
        /// `(expected, predicted, how often)`, the most frequent first.
        confusions: Vec<(String, String, usize)>,
    },
    /// Something that somebody should look at.
    Warned {
        /// Steps taken.
        step: u64,
        /// What it is.
        text: String,
    },
}

/// Memory that a run uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// Of the device, where it has its own.
    pub device: Option<Memory>,
    /// Bytes of this process.
    pub host: Option<u64>,
}

/// Who is told of events.
pub trait Sink {
    /// Is told of an event.
    ///
    /// # Errors
    /// If it cannot be kept.
    fn tell(&mut self, event: &Event) -> Result<(), Failure>;
}

impl Event {
    /// As one line for programs.
    pub fn to_json(&self) -> Value {
        match self {
            Self::Trained { step, loss, perplexity, learning_rate, gradient_norm, tokens_per_second, memory } => {
                let mut line = json!({ "event": "train", "step": step, "loss": loss });
                add_perplexity(&mut line, *perplexity);
                line["learning_rate"] = json!(learning_rate);
                line["gradient_norm"] = json!(gradient_norm);
                line["tokens_per_second"] = json!(tokens_per_second);
                if let Some(device) = memory.and_then(|memory| memory.device) {
                    line["device_memory"] = json!({ "in_use": device.in_use, "reserved": device.reserved });
                }
                if let Some(host) = memory.and_then(|memory| memory.host) {
                    line["host_memory"] = json!(host);
                }
                line
            }
            Self::Validated { step, loss, perplexity, scores } => {
                let mut line = json!({ "event": "valid", "step": step, "loss": loss });
                add_perplexity(&mut line, *perplexity);
                add_scores(&mut line, *scores);
                line
            }
            Self::Sampled { step, text } => json!({ "event": "sample", "step": step, "text": text }),
            Self::Confused { step, confusions } => {
                let confusion = |(expected, predicted, count): &(String, String, usize)| json!({ "expected": expected, "predicted": predicted, "count": count });
                let confusions: Vec<Value> = confusions.iter().map(confusion).collect();
                json!({ "event": "confusions", "step": step, "confusions": confusions })
            }
            Self::Warned { step, text } => json!({ "event": "warning", "step": step, "text": text }),
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
