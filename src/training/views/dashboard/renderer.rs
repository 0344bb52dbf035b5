//! The dashboard for burn-train's own `Learner`: its metrics as events.

use std::collections::HashMap;

use burn::train::metric::{MetricDefinition, MetricId};
use burn::train::renderer::{
    EvaluationName, EvaluationProgress, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining, ProgressType, TrainingProgress,
};

use super::Dashboard;
use crate::training::events::{Event, Sink};

/// The metrics of a `Learner`, by name.
#[derive(Default)]
pub(super) struct Metrics {
    names: HashMap<MetricId, String>,
    train: HashMap<String, f64>,
    valid: HashMap<String, f64>,
    step: u64,
}

impl Metrics {
    fn update(&mut self, state: &MetricState, of_train: bool) {
        let MetricState::Numeric(entry, value) = state else { return };
        let Some(name) = self.names.get(&entry.metric_id) else { return };
        let values = if of_train { &mut self.train } else { &mut self.valid };
        values.insert(name.to_lowercase(), value.current());
    }
}

impl Dashboard {
    /// The first metric of these names that has a value.
    fn metric(&self, names: &[&str]) -> Option<f64> {
        names.iter().find_map(|name| self.metrics.train.get(*name).copied())
    }

    /// Tells an event; it cannot fail here.
    fn show(&mut self, event: &Event) {
        let _ = self.tell(event);
    }
}

impl MetricsRendererTraining for Dashboard {
    fn update_train(&mut self, state: MetricState) {
        self.metrics.update(&state, true);
    }

    fn update_valid(&mut self, state: MetricState) {
        self.metrics.update(&state, false);
    }

    fn render_train(&mut self, item: TrainingProgress, _: Vec<ProgressType>) {
        self.metrics.step = item.iteration.map_or(self.metrics.step + 1, |step| step as u64);
        let (step, none) = (self.metrics.step, 0.0);
        if let Some(loss) = self.metric(&["loss"]) {
            self.show(&Event::Trained {
                step,
                loss,
                perplexity: None,
                learning_rate: self.metric(&["learningrate", "learning rate"]).unwrap_or(none),
                gradient_norm: self.metric(&["gradient norm"]).unwrap_or(none),
                tokens_per_second: self.metric(&["tokens/s", "iterationspeed", "iteration speed"]).unwrap_or(none),
                memory: None,
            });
        }
    }

    fn render_valid(&mut self, item: TrainingProgress, _: Vec<ProgressType>) {
        let is_last = item.progress.as_ref().is_none_or(|at| at.items_processed >= at.items_total);
        if let (true, Some(loss)) = (is_last, self.metrics.valid.get("loss").copied()) {
            let step = self.metrics.step;
            self.show(&Event::Validated { step, loss, perplexity: None, scores: None });
        }
    }
}

impl MetricsRendererEvaluation for Dashboard {
    fn update_test(&mut self, _: EvaluationName, state: MetricState) {
        self.metrics.update(&state, false);
    }

    fn render_test(&mut self, _: EvaluationProgress, _: Vec<ProgressType>) {}
}

impl MetricsRenderer for Dashboard {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, definition: MetricDefinition) {
        self.metrics.names.insert(definition.metric_id, definition.name);
    }
}
