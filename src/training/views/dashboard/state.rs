//! The dashboard's state of a run.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::inference::class_report::ClassScores;
use crate::runs::record::RunRecord;
use crate::tasks::scores::Scores;
use crate::tasks::validation::Validation;
use crate::training::events::{Event, MemoryUse};

/// Maximum points of a curve; beyond it, pairs are averaged.
const POINTS: usize = 2048;
/// Maximum number of warnings.
const WARNINGS: usize = 3;

/// Constants of a run.
#[derive(Clone, Debug, Default)]
pub(super) struct About {
    pub(super) title: String,
    pub(super) what: String,
    /// Total steps; 0 if unknown.
    pub(super) steps: u64,
    /// FLOP per token, and peak FLOP/s of the device, if known.
    pub(super) flops: Option<(f64, f64)>,
}

impl About {
    pub(super) fn of(record: &RunRecord) -> Self {
        let training = &record.recipe.training;
        let device = if record.device.is_empty() { String::new() } else { format!(" on {}", record.device) };
        let what = format!(
            "{:.1}M parameters, {} x {} tokens per step, {}{device}",
            record.parameters as f64 / 1e6,
            training.batch_size * training.accumulation,
            training.seq_length,
            training.precision.name()
        );
        let flops = record.peak_flops.map(|peak| (record.flops_per_token, peak));
        Self { title: record.recipe.name.clone(), what, steps: training.steps, flops }
    }

    pub(super) fn titled(title: &str) -> Self {
        Self { title: title.to_string(), ..Self::default() }
    }
}

/// Points in order of x, at most [`POINTS`].
#[derive(Clone, Debug)]
pub(super) struct Curve {
    points: Vec<(f64, f64)>,
    /// Points averaged per stored point, and those in the last one.
    each: usize,
    last: usize,
}

impl Curve {
    fn new() -> Self {
        Self { points: Vec::new(), each: 1, last: 1 }
    }

    pub(super) fn points(&self) -> &[(f64, f64)] {
        &self.points
    }

    pub(super) fn push(&mut self, x: f64, y: f64) {
        match self.points.last_mut() {
            Some(point) if self.last < self.each => {
                self.last += 1;
                let share = 1.0 / self.last as f64;
                *point = (point.0 + (x - point.0) * share, point.1 + (y - point.1) * share);
            }
            _ => {
                if self.points.len() == POINTS {
                    let middle = |pair: &[(f64, f64)]| ((pair[0].0 + pair[1].0) / 2.0, (pair[0].1 + pair[1].1) / 2.0);
                    self.points = self.points.chunks_exact(2).map(middle).collect();
                    self.each *= 2;
                }
                self.points.push((x, y));
                self.last = 1;
            }
        }
    }
}

/// The displayed state.
#[derive(Clone, Debug)]
pub(super) struct State {
    pub(super) about: About,
    pub(super) train: Curve,
    pub(super) valid: Curve,
    pub(super) step: u64,
    pub(super) loss: Option<f64>,
    pub(super) valid_loss: Option<f64>,
    /// The step and value of the best validation.
    pub(super) best: Option<(u64, Validation)>,
    pub(super) scores: Option<Scores>,
    pub(super) classes: Option<ClassScores>,
    pub(super) learning_rate: Option<f64>,
    pub(super) gradient_norm: Option<f64>,
    pub(super) tokens_per_second: Option<f64>,
    pub(super) memory: Option<MemoryUse>,
    /// Step and text.
    pub(super) sample: Option<(u64, String)>,
    pub(super) confusions: Vec<(String, String, usize)>,
    pub(super) warnings: VecDeque<String>,
    pub(super) log: bool,
    pub(super) stopping: bool,
    begun: Instant,
    /// Time and number of the first step seen.
    first: Option<(Instant, u64)>,
    news: bool,
    keys: bool,
    wiped: bool,
}

impl State {
    pub(super) fn new(about: About, step: u64) -> Self {
        Self {
            about,
            train: Curve::new(),
            valid: Curve::new(),
            step,
            loss: None,
            valid_loss: None,
            best: None,
            scores: None,
            classes: None,
            learning_rate: None,
            gradient_norm: None,
            tokens_per_second: None,
            memory: None,
            sample: None,
            confusions: Vec::new(),
            warnings: VecDeque::new(),
            log: false,
            stopping: false,
            begun: Instant::now(),
            first: None,
            news: true,
            keys: false,
            wiped: false,
        }
    }

    /// Applies an event.
    pub(super) fn note(&mut self, event: &Event) {
        self.news = true;
        match event {
            Event::Trained { step, loss, learning_rate, gradient_norm, tokens_per_second, memory, .. } => {
                self.first.get_or_insert((Instant::now(), *step));
                self.step = *step;
                self.train.push(*step as f64, *loss);
                self.loss = Some(match self.loss {
                    // A single step's loss is noisy.
                    Some(before) => before + (loss - before) * 0.1,
                    None => *loss,
                });
                self.learning_rate = Some(*learning_rate);
                self.gradient_norm = Some(*gradient_norm);
                self.tokens_per_second = Some(*tokens_per_second);
                self.memory = memory.or(self.memory);
            }
            Event::Validated { step, validation, .. } => {
                let validation = *validation;
                self.valid.push(*step as f64, validation.loss);
                self.valid_loss = Some(validation.loss);
                self.scores = validation.scores;
                self.classes = validation.classes;
                if self.best.is_none_or(|(_, best)| validation.is_better_than(&best)) {
                    self.best = Some((*step, validation));
                }
                self.wiped = true;
            }
            Event::Sampled { step, text } => self.sample = Some((*step, text.clone())),
            Event::Confused { confusions, .. } => self.confusions.clone_from(confusions),
            Event::Warned { step, text } => {
                self.warnings.push_back(format!("step {step}: {text}"));
                if self.warnings.len() > WARNINGS {
                    self.warnings.pop_front();
                }
            }
        }
    }

    pub(super) fn elapsed(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Seconds to the last step, if known.
    pub(super) fn left(&self) -> Option<f64> {
        let (begun, first) = self.first?;
        let done = self.step.checked_sub(first).filter(|done| *done > 0)?;
        let each = begun.elapsed().as_secs_f64() / done as f64;
        (self.about.steps > 0).then(|| each * self.about.steps.saturating_sub(self.step) as f64)
    }

    /// Model FLOPs utilization, if known.
    pub(super) fn utilization(&self) -> Option<f64> {
        let (flops, peak) = self.about.flops?;
        Some(self.tokens_per_second? * flops / peak)
    }

    pub(super) fn stop(&mut self) {
        self.news |= !self.stopping;
        self.keys |= !self.stopping;
        self.stopping = true;
    }

    pub(super) fn toggle_log(&mut self) {
        self.log = !self.log;
        self.renew();
    }

    /// Requests a full redraw.
    pub(super) fn wipe(&mut self) {
        self.wiped = true;
        self.renew();
    }

    pub(super) fn renew(&mut self) {
        (self.news, self.keys) = (true, true);
    }

    /// Whether there is news since the last call.
    pub(super) fn take_news(&mut self) -> bool {
        self.keys = false;
        std::mem::take(&mut self.news)
    }

    pub(super) fn take_wipe(&mut self) -> bool {
        std::mem::take(&mut self.wiped)
    }

    /// Whether a key waits for a reaction.
    pub(super) fn has_news_of_keys(&self) -> bool {
        self.keys
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_of_any_length_keeps_its_shape_in_few_points() {
        let mut curve = Curve::new();
        let count = 100_000;
        (0..count).for_each(|x| curve.push(f64::from(x), f64::from(x) / 2.0));
        let points = curve.points();
        assert!(points.len() <= POINTS && points.len() > POINTS / 4, "{}", points.len());
        assert!(points.windows(2).all(|pair| pair[0].0 < pair[1].0));
        assert!(points.iter().all(|(x, y)| (y - x / 2.0).abs() < 1e-6));
        assert!(points[0].0 < 100.0 && points[points.len() - 1].0 > f64::from(count) - 200.0);
    }
}
