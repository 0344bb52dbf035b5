//! Events of a run: one type and one JSON schema, for `metrics.jsonl`, `--json` and the views.

use fireclay_kernels::recorder::Memory;
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::inference::class_report::ClassScores;
use crate::tasks::rewards::Rewards;
use crate::tasks::scores::{ClassificationReport, Scores, SpanCounts};
use crate::tasks::validation::Validation;
use crate::training::expert_balance::ExpertBalance;

/// An event of a run.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A training step.
    Trained {
        /// Counted from one.
        step: u64,
        /// In nats per target.
        loss: f64,
        /// Perplexity, for language tasks.
        perplexity: Option<f64>,
        /// Learning rate of the step.
        learning_rate: f64,
        /// Global norm before clipping.
        gradient_norm: f64,
        /// Targets per second.
        tokens_per_second: f64,
        /// Rewards of preference pairs.
        rewards: Option<Rewards>,
        /// How evenly tokens were distributed over experts.
        experts: Option<ExpertBalance>,
        /// Memory at the last of the steps that were read together.
        memory: Option<MemoryUse>,
    },
    /// A validation.
    Validated {
        /// Completed steps.
        step: u64,
        /// The figures.
        validation: Validation,
        /// Perplexity, for language tasks.
        perplexity: Option<f64>,
    },
    /// A generated sample.
    Sampled {
        /// Completed steps.
        step: u64,
        /// The text.
        text: String,
    },
    /// Confusions of intents or labels in a validation.
    Confused {
        /// Completed steps.
        step: u64,
        /// `(expected, predicted, count)`, most frequent first.
        confusions: Vec<(String, String, usize)>,
    },
    /// A warning.
    Warned {
        /// Completed steps.
        step: u64,
        /// The message.
        text: String,
    },
}

/// Memory use of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// Of the device, if it has its own memory.
    pub device: Option<Memory>,
    /// Bytes of this process.
    pub host: Option<u64>,
}

/// A receiver of events.
pub trait Sink {
    /// Receives an event.
    ///
    /// # Errors
    /// If it cannot be stored.
    fn tell(&mut self, event: &Event) -> Result<(), Failure>;
}

impl Event {
    /// As a JSON line.
    pub fn to_json(&self) -> Value {
        match self {
            Self::Trained {
                step,
                loss,
                perplexity,
                learning_rate,
                gradient_norm,
                tokens_per_second,
                rewards,
                experts,
                memory,
            } => {
                let mut line = json!({ "event": "train", "step": step, "loss": loss });
                add_perplexity(&mut line, *perplexity);
                line["learning_rate"] = json!(learning_rate);
                line["gradient_norm"] = json!(gradient_norm);
                line["tokens_per_second"] = json!(tokens_per_second);
                add_rewards(&mut line, *rewards);
                for (name, value) in (*experts).into_iter().flat_map(ExpertBalance::named) {
                    line[name] = json!(value);
                }
                if let Some(device) = memory.and_then(|memory| memory.device) {
                    line["device_memory"] = json!({ "in_use": device.in_use, "reserved": device.reserved });
                }
                if let Some(host) = memory.and_then(|memory| memory.host) {
                    line["host_memory"] = json!(host);
                }
                line
            }
            Self::Validated { step, validation, perplexity } => {
                let Validation { loss, scores, classes, rewards, answer_accuracy } = validation;
                let mut line = json!({ "event": "valid", "step": step, "loss": loss });
                add_perplexity(&mut line, *perplexity);
                add_scores(&mut line, *scores);
                add_class_scores(&mut line, *classes);
                add_rewards(&mut line, *rewards);
                add_answer_accuracy(&mut line, "answer_accuracy", *answer_accuracy);
                line
            }
            Self::Sampled { step, text } => json!({ "event": "sample", "step": step, "text": text }),
            Self::Confused { step, confusions } => {
                let confusions = confusions.iter().map(|(expected, predicted, count)| {
                    json!({ "expected": expected, "predicted": predicted, "count": count })
                });
                let confusions: Vec<Value> = confusions.collect();
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

/// Adds rewards to a line.
pub(crate) fn add_rewards(line: &mut Value, rewards: Option<Rewards>) {
    for (name, value) in rewards.into_iter().flat_map(Rewards::named) {
        line[name] = json!(value);
    }
}

/// Adds the share of right answers to a line, in percent.
pub(crate) fn add_answer_accuracy(line: &mut Value, name: &str, percent: Option<f64>) {
    if let Some(percent) = percent {
        line[name] = json!((percent * 1e3).round() / 1e3);
    }
}

/// Adds a test report to a line, in percent: its scores, F1 of the values that fill their slot in
/// training and of those that do not, the share of the latter, and the same for each slot.
pub(crate) fn add_test(line: &mut Value, report: Option<&ClassificationReport>) {
    let Some(report) = report else { return };
    add_scores(line, Some(report.scores));
    let (seen, unseen) = report.seen_and_unseen();
    line["slot_f1_seen"] = rounded(seen.f1());
    line["slot_f1_unseen"] = rounded(unseen.f1());
    line["unseen_values"] = rounded(unseen.share_of(seen));
    let f1 = |counts: SpanCounts| (counts.present > 0).then(|| rounded(counts.f1()));
    for (slot, all) in &report.slots {
        let (seen, unseen) = report.seen_and_unseen_of(slot);
        line["slots"][slot] = json!({
            "present": all.present,
            "f1": rounded(all.f1()),
            "f1_seen": f1(seen),
            "f1_unseen": f1(unseen),
            "unseen_values": rounded(unseen.share_of(seen)),
            "open": report.is_open(slot),
        });
    }
}

/// To three digits after the point.
fn rounded(number: f64) -> Value {
    json!((number * 1e3).round() / 1e3)
}

/// Adds scores to a line, in percent.
pub(crate) fn add_scores(line: &mut Value, scores: Option<Scores>) {
    if let Some(Scores { intent_accuracy, slot_f1, sentence_accuracy }) = scores {
        line["intent_accuracy"] = rounded(intent_accuracy);
        line["slot_f1"] = rounded(slot_f1);
        line["sentence_accuracy"] = rounded(sentence_accuracy);
    }
}

/// Adds the scores of labels to a line, in percent.
pub(crate) fn add_class_scores(line: &mut Value, scores: Option<ClassScores>) {
    if let Some(ClassScores { accuracy, macro_f1 }) = scores {
        let rounded = |percent: f64| json!((percent * 1e3).round() / 1e3);
        line["accuracy"] = rounded(accuracy);
        line["macro_f1"] = rounded(macro_f1);
    }
}
