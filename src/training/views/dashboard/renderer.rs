//! The dashboard of a burn-train `Learner`: its metrics as events.

use std::collections::HashMap;

use burn::train::metric::{MetricDefinition, MetricId};
use burn::train::renderer::{
    EvaluationName, EvaluationProgress, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining, ProgressType, TrainingProgress,
};

use super::Dashboard;
use crate::tasks::validation::Validation;
use crate::training::events::{Event, Sink};

/// A `Learner`'s metrics, by name.
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
    /// The first of these metrics that has a value.
    fn metric(&self, names: &[&str]) -> Option<f64> {
        names.iter().find_map(|name| self.metrics.train.get(*name).copied())
    }

    /// Records an event; it cannot fail here.
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
                rewards: None,
                experts: None,
                memory: None,
            });
        }
    }

    fn render_valid(&mut self, item: TrainingProgress, _: Vec<ProgressType>) {
        let is_last = item.progress.as_ref().is_none_or(|at| at.items_processed >= at.items_total);
        if let (true, Some(loss)) = (is_last, self.metrics.valid.get("loss").copied()) {
            let step = self.metrics.step;
            self.show(&Event::Validated { step, validation: Validation::of_loss(loss), perplexity: None });
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::sync::{Arc, Mutex};

    use burn::data::dataloader::Progress;
    use burn::train::metric::{MetricAttributes, MetricEntry, NumericEntry, SerializedEntry};

    use super::*;
    use crate::training::views::dashboard::state::{About, State};

    #[test]
    fn a_learners_metrics_become_curves() {
        let state = Arc::new(Mutex::new(State::new(About::titled("mnist"), 0)));
        // Without a thread and a terminal.
        let closed = Arc::new(AtomicBool::new(true));
        let mut dashboard = Dashboard { state, closed, thread: None, metrics: Metrics::default() };
        let id = |name: &str| MetricId::new(Arc::new(name.to_string()));
        for name in ["Loss", "Learning Rate"] {
            let attributes = MetricAttributes::None;
            let definition = MetricDefinition { metric_id: id(name), name: name.into(), description: None, attributes };
            dashboard.register_metric(definition);
        }
        let value = |name: &str, value: f64| {
            let entry = MetricEntry::new(id(name), SerializedEntry::new(value.to_string(), value.to_string()));
            MetricState::Numeric(entry, NumericEntry::Value(value))
        };
        let progress = |items_processed| TrainingProgress {
            progress: Some(Progress { items_processed, items_total: 3 }),
            global_progress: Progress { items_processed: 0, items_total: 1 },
            iteration: Some(items_processed),
        };
        for step in 1..=3 {
            dashboard.update_train(value("Loss", 4.0 - step as f64));
            dashboard.update_train(value("Learning Rate", 0.5));
            dashboard.render_train(progress(step), Vec::new());
        }
        dashboard.update_valid(value("Loss", 1.5));
        dashboard.render_valid(progress(2), Vec::new());
        dashboard.render_valid(progress(3), Vec::new());
        let state = dashboard.state();
        assert_eq!(state.train.points(), [(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)]);
        assert_eq!(state.valid.points(), [(3.0, 1.5)], "once, when all of it is read");
        assert_eq!(state.best.map(|(step, best)| (step, best.loss)), Some((3, 1.5)));
        assert_eq!(state.learning_rate, Some(0.5));
    }
}
