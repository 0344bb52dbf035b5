//! What a run shows: plain lines, JSON lines, or Burn's dashboard.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::train::metric::{
    Adaptor, ItemLazy, Metric, MetricAttributes, MetricDefinition, MetricId, MetricMetadata, MetricName, Numeric,
    NumericAttributes, NumericEntry, SerializedEntry, format_float,
};
use burn::train::renderer::{
    EvaluationName, EvaluationProgress, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining, ProgressType, TrainingProgress,
};
use serde_json::json;

use crate::stdout;
use crate::tasks::Scores;
use crate::training::session::add_scores;

/// How a run shows itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    /// Burn's dashboard, which takes the terminal.
    Dashboard,
    /// A line now and then on stderr.
    Plain,
    /// A JSON object a line on stdout.
    Json,
}

/// The figures of a training step or a validation, on the host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Figures {
    /// Nats a token.
    pub loss: f64,
    /// Of the step; zero for a validation.
    pub learning_rate: f64,
    /// Global norm before clipping; zero for a validation.
    pub gradient_norm: f64,
    /// Targets learnt from, or validated on, in a second.
    pub tokens_per_second: f64,
    /// Of a validation, where the task has them.
    pub scores: Option<Scores>,
}

impl ItemLazy for Figures {
    type ItemSync = Self;

    fn sync(self) -> Self {
        self
    }
}

impl Adaptor<Figures> for Figures {
    fn adapt(&self) -> Figures {
        *self
    }
}

/// One of the figures as burn-train's metric.
#[derive(Clone)]
pub(crate) struct FigureMetric {
    name: MetricName,
    higher_is_better: bool,
    pick: fn(&Figures) -> f64,
    value: f64,
}

impl FigureMetric {
    fn new(name: &str, higher_is_better: bool, pick: fn(&Figures) -> f64) -> Self {
        Self { name: Arc::new(name.to_string()), higher_is_better, pick, value: f64::NAN }
    }

    /// Nats a token.
    pub(crate) fn loss() -> Self {
        Self::new("Loss", false, |figures| figures.loss)
    }

    /// `e` to the loss.
    pub(crate) fn perplexity() -> Self {
        Self::new("Perplexity", false, |figures| figures.loss.exp())
    }

    /// Percent of a validation's utterances.
    pub(crate) fn intent_accuracy() -> Self {
        Self::new("Intent accuracy", true, |figures| figures.scores.unwrap_or_default().intent_accuracy)
    }

    /// Percent, over a validation's spans.
    pub(crate) fn slot_f1() -> Self {
        Self::new("Slot F1", true, |figures| figures.scores.unwrap_or_default().slot_f1)
    }

    /// Percent of a validation's utterances.
    pub(crate) fn sentence_accuracy() -> Self {
        Self::new("Sentence accuracy", true, |figures| figures.scores.unwrap_or_default().sentence_accuracy)
    }

    /// Of the step.
    pub(crate) fn learning_rate() -> Self {
        Self::new("Learning rate", false, |figures| figures.learning_rate)
    }

    /// Before clipping.
    pub(crate) fn gradient_norm() -> Self {
        Self::new("Gradient norm", false, |figures| figures.gradient_norm)
    }

    /// Training speed.
    pub(crate) fn tokens_per_second() -> Self {
        Self::new("Tokens/s", true, |figures| figures.tokens_per_second)
    }
}

impl Metric for FigureMetric {
    type Input = Figures;

    fn name(&self) -> MetricName {
        self.name.clone()
    }

    fn attributes(&self) -> MetricAttributes {
        NumericAttributes { unit: None, higher_is_better: self.higher_is_better }.into()
    }

    fn update(&mut self, figures: &Figures, _metadata: &MetricMetadata) -> SerializedEntry {
        self.value = (self.pick)(figures);
        SerializedEntry::new(format_float(self.value, 4), NumericEntry::Value(self.value).serialize())
    }

    fn clear(&mut self) {
        self.value = f64::NAN;
    }
}

impl Numeric for FigureMetric {
    fn value(&self) -> NumericEntry {
        NumericEntry::Value(self.value)
    }

    fn running_value(&self) -> NumericEntry {
        NumericEntry::Value(self.value)
    }
}

/// Writes lines: for people now and then, for programs every step.
pub(crate) struct LineRenderer {
    json: bool,
    steps: u64,
    names: HashMap<MetricId, String>,
    row: HashMap<String, f64>,
    begun: Option<(Instant, u64)>,
    shown: Option<Instant>,
}

/// Time between two lines for people.
const PAUSE: Duration = Duration::from_secs(2);

impl LineRenderer {
    /// Lines of a run of `steps`, as JSON or for people.
    pub(crate) fn new(json: bool, steps: u64) -> Self {
        Self { json, steps, names: HashMap::new(), row: HashMap::new(), begun: None, shown: None }
    }

    fn keep(&mut self, state: MetricState) {
        if let MetricState::Numeric(entry, value) = state
            && let Some(name) = self.names.get(&entry.metric_id)
        {
            self.row.insert(name.clone(), value.current());
        }
    }

    fn take(&mut self, name: &str) -> f64 {
        self.row.remove(name).unwrap_or(f64::NAN)
    }

    fn train(&mut self, step: u64) {
        let (loss, perplexity) = (self.take("Loss"), self.row.remove("Perplexity"));
        let (rate, norm, speed) = (self.take("Learning rate"), self.take("Gradient norm"), self.take("Tokens/s"));
        if self.json {
            let mut line = json!({ "event": "train", "step": step, "loss": loss });
            if let Some(perplexity) = perplexity {
                line["perplexity"] = json!(perplexity);
            }
            line["learning_rate"] = json!(rate);
            line["gradient_norm"] = json!(norm);
            line["tokens_per_second"] = json!(speed);
            stdout::line(line);
            return;
        }
        let (begun, first) = *self.begun.get_or_insert((Instant::now(), step));
        if self.shown.is_some_and(|shown| shown.elapsed() < PAUSE) && step < self.steps {
            return;
        }
        self.shown = Some(Instant::now());
        let left = match step - first {
            0 => String::new(),
            done => {
                let seconds = begun.elapsed().as_secs_f64() / done as f64 * (self.steps - step.min(self.steps)) as f64;
                format!("  {} left", duration(seconds))
            }
        };
        let steps = self.steps;
        let width = steps.to_string().len();
        let perplexity = perplexity.map_or(String::new(), |perplexity| format!("  perplexity {perplexity:.2}"));
        eprintln!(
            "step {step:>width$}/{steps}  loss {loss:.4}{perplexity}  learning rate {rate:.2e}  gradient norm {norm:.2}  {speed:.0} tokens/s{left}"
        );
    }

    fn valid(&mut self, step: u64) {
        let (loss, perplexity) = (self.take("Loss"), self.row.remove("Perplexity"));
        let scores = self.row.remove("Intent accuracy").map(|intent_accuracy| Scores {
            intent_accuracy,
            slot_f1: self.take("Slot F1"),
            sentence_accuracy: self.take("Sentence accuracy"),
        });
        self.row.clear();
        if self.json {
            let mut line = json!({ "event": "valid", "step": step, "loss": loss });
            if let Some(perplexity) = perplexity {
                line["perplexity"] = json!(perplexity);
            }
            add_scores(&mut line, scores);
            stdout::line(line);
            return;
        }
        let (steps, width) = (self.steps, self.steps.to_string().len());
        let perplexity = perplexity.map_or(String::new(), |perplexity| format!("  perplexity {perplexity:.2}"));
        let scores = scores.map_or(String::new(), |Scores { intent_accuracy, slot_f1, sentence_accuracy }| {
            format!("  intents {intent_accuracy:.2}%  slots F1 {slot_f1:.2}  sentences {sentence_accuracy:.2}%")
        });
        eprintln!("step {step:>width$}/{steps}  validation loss {loss:.4}{perplexity}{scores}");
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

impl MetricsRendererTraining for LineRenderer {
    fn update_train(&mut self, state: MetricState) {
        self.keep(state);
    }

    fn update_valid(&mut self, state: MetricState) {
        self.keep(state);
    }

    fn render_train(&mut self, progress: TrainingProgress, _types: Vec<ProgressType>) {
        self.train(progress.iteration.unwrap_or(0) as u64);
    }

    fn render_valid(&mut self, progress: TrainingProgress, _types: Vec<ProgressType>) {
        self.valid(progress.iteration.unwrap_or(0) as u64);
    }
}

impl MetricsRendererEvaluation for LineRenderer {
    fn update_test(&mut self, _name: EvaluationName, _state: MetricState) {}

    fn render_test(&mut self, _progress: EvaluationProgress, _types: Vec<ProgressType>) {}
}

impl MetricsRenderer for LineRenderer {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, definition: MetricDefinition) {
        self.names.insert(definition.metric_id, definition.name);
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
