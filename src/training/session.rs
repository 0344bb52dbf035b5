//! The training loop: when to read losses, validate, save and stop.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::time::{Duration, Instant};

use burn::train::Interrupter;
use fireclay_kernels::Backend;
use fireclay_model::ModelFolder;
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::process_memory::process_memory;
use crate::recipe::schema::{Keep, TrainingRecipe};
use crate::run_folder::{METRICS, RunFolder};
use crate::tasks::TestReport;
use crate::tasks::validation::{Validation, ValidationOutput};
use crate::training::checkpoint::{self, Best, RunState};
use crate::training::events::{Event, MemoryUse, Sink, add_answer_accuracy, add_class_scores, add_rewards, add_test};
use crate::training::origin::Origin;
use crate::training::trainer::{StepFigures, StepOutput, Trainer, read_figures};
use crate::training::watchdog::Watchdog;

/// Losses are read from the device at this interval, or after this many steps, whichever is sooner.
const READ_EVERY: (Duration, usize) = (Duration::from_millis(500), 100);

/// Number of steps averaged for the summary's training loss.
const SUMMARY_STEPS: usize = 50;

/// A run in progress.
pub(crate) struct Session<B: Backend> {
    pub(crate) trainer: Trainer<B>,
    folder: RunFolder,
    device: B::Device,
    best: Option<Best>,
    origin: Origin,
    metrics: File,
    pending: Vec<StepOutput<B>>,
    recent: VecDeque<f64>,
    begun: Instant,
    flushed: Instant,
    first_step_seconds: Option<f64>,
    trained: (usize, Duration),
    /// Before the first step, where the task counts answers.
    first_valid_loss: Option<f64>,
    first_answer_accuracy: Option<f64>,
    final_validation: Option<Validation>,
    test: Option<TestReport>,
    saved: u64,
    watch: Watchdog,
    stopped_early: bool,
}

impl<B: Backend> Session<B> {
    /// A session that continues from `trainer`'s step. `begun` is when the user started to wait.
    pub(crate) fn new(
        trainer: Trainer<B>,
        folder: RunFolder,
        device: B::Device,
        best: Option<Best>,
        origin: Origin,
        begun: Instant,
    ) -> Result<Self, Failure> {
        folder.cut_metrics(trainer.step())?;
        let path = folder.path().join(METRICS);
        let metrics = OpenOptions::new().create(true).append(true).open(&path).map_err(Failure::io(&path))?;
        let saved = trainer.step();
        Ok(Self {
            trainer,
            folder,
            device,
            best,
            origin,
            metrics,
            pending: Vec::new(),
            recent: VecDeque::new(),
            begun,
            flushed: Instant::now(),
            first_step_seconds: None,
            trained: (0, Duration::ZERO),
            first_valid_loss: None,
            first_answer_accuracy: None,
            final_validation: None,
            test: None,
            saved,
            watch: Watchdog::default(),
            stopped_early: false,
        })
    }

    fn training(&self) -> &TrainingRecipe {
        &self.trainer.recipe().training
    }

    pub(crate) fn steps(&self) -> u64 {
        self.training().steps
    }

    fn valid_every(&self) -> u64 {
        self.trainer.recipe().valid_every()
    }

    /// Trains to the last step. Returns `false` if interrupted earlier, with a checkpoint saved.
    pub(crate) fn run(&mut self, interrupter: &Interrupter, sink: &mut impl Sink) -> Result<bool, Failure> {
        let steps = self.steps();
        self.flushed = Instant::now();
        self.tell_best(sink)?;
        if self.trainer.step() == 0 && self.trainer.task().has_answers() {
            let Validation { loss, answer_accuracy, .. } = self.validate_before(sink)?;
            (self.first_valid_loss, self.first_answer_accuracy) = (Some(loss), answer_accuracy);
            self.flushed = Instant::now();
        }
        while self.trainer.step() < steps {
            if interrupter.should_stop() {
                self.flush(sink)?;
                self.save()?;
                return Ok(false);
            }
            match self.trainer.train_step() {
                Ok(output) => self.pending.push(output),
                Err(failure) => {
                    self.flush(sink)?;
                    self.save()?;
                    return Err(self.kept(failure));
                }
            }
            let step = self.trainer.step();
            let due = self.flushed.elapsed() >= READ_EVERY.0 || self.pending.len() >= READ_EVERY.1;
            if due || self.first_step_seconds.is_none() {
                self.flush(sink)?;
            }
            let mut last = step == steps;
            let mut improved = false;
            if step.is_multiple_of(self.valid_every()) || last {
                self.flush(sink)?;
                improved = self.validate(step, sink)?;
                let patience = self.training().patience;
                let since = self.best.map_or(0, |best| best.without_improvement);
                if patience > 0 && since >= patience && !last {
                    let text = format!("no improvement in {patience}: stopping early (patience)");
                    sink.tell(&Event::Warned { step, text })?;
                    self.stopped_early = true;
                    last = true;
                }
                if last && self.training().final_valid_tokens > 0 {
                    self.final_validation = Some(self.trainer.validate(self.training().final_valid_tokens)?);
                }
            }
            if step.is_multiple_of(self.training().checkpoint_every) || improved || last {
                self.flush(sink)?;
                self.save()?;
            }
            if self.stopped_early {
                break;
            }
            if self.pending.is_empty() {
                // Validations and checkpoints do not count as training time.
                self.flushed = Instant::now();
            }
        }
        if self.final_validation.is_none() {
            let training = self.training();
            let tokens =
                if training.final_valid_tokens > 0 { training.final_valid_tokens } else { training.valid_tokens };
            self.final_validation = Some(self.trainer.validate(tokens)?);
        }
        self.test()?;
        Ok(true)
    }

    /// Tests the best model, if the task has test data: once, at the end.
    fn test(&mut self) -> Result<(), Failure> {
        if !self.trainer.task().has_test() {
            return Ok(());
        }
        let activations = self.trainer.model().activations();
        let best = match self.best {
            Some(best) if best.step != self.trainer.step() => {
                Some(ModelFolder::new(self.folder.path()).load::<B>(&self.device)?.with_activations(activations))
            }
            _ => None,
        };
        self.test = self.trainer.test(best)?;
        Ok(())
    }

    /// The test report of the best model, if the task has test data.
    pub(crate) fn test_report(&self) -> Option<&TestReport> {
        self.test.as_ref()
    }

    /// Cleans up after a failure.
    fn kept(&self, failure: Failure) -> Failure {
        let (step, out) = (self.trainer.step(), self.folder.path().display());
        match step {
            0 => failure,
            _ => Failure::new(format!(
                "{failure}; saved at step {step}: resume with fireclay train --resume --out {out}"
            )),
        }
    }

    /// Tells a resumed run's views of the best validation so far.
    fn tell_best(&self, sink: &mut impl Sink) -> Result<(), Failure> {
        let Some(Best { step, validation, .. }) = self.best else { return Ok(()) };
        sink.tell(&Event::Validated { step, validation, perplexity: self.perplexity(validation.loss) })
    }

    /// Reads the losses of the steps since the last read, at once, and reports them.
    fn flush(&mut self, sink: &mut impl Sink) -> Result<(), Failure> {
        let pending = std::mem::take(&mut self.pending);
        if pending.is_empty() {
            return Ok(());
        }
        let read = read_figures(&pending)?;
        let (elapsed, now) = (self.flushed.elapsed(), Instant::now());
        let tokens: usize = pending.iter().map(|output| output.tokens).sum();
        let tokens_per_second = tokens as f64 / elapsed.as_secs_f64().max(1e-9);
        if self.first_step_seconds.is_none() {
            // Compilation and warm-up do not count as speed.
            self.first_step_seconds = Some(self.begun.elapsed().as_secs_f64());
        } else {
            self.trained = (self.trained.0 + tokens, self.trained.1 + elapsed);
        }
        self.flushed = now;
        let mut lines = String::new();
        let count = pending.len();
        for (at, (output, figures)) in pending.iter().zip(read).enumerate() {
            let StepFigures { loss, gradient_norm, rewards, experts } = figures;
            let learning_rate = output.learning_rate;
            if !loss.is_finite() || !gradient_norm.is_finite() {
                return Err(self.diverged(output.step, loss, gradient_norm, learning_rate));
            }
            let step = output.step + 1;
            let perplexity = self.perplexity(loss);
            let memory = (at + 1 == count).then(|| self.memory());
            let event = Event::Trained {
                step,
                loss,
                perplexity,
                learning_rate,
                gradient_norm,
                tokens_per_second,
                rewards,
                experts,
                memory,
            };
            sink.tell(&event)?;
            lines.push_str(&format!("{}\n", event.to_json()));
            if let Some(text) = self.watch.look(loss, gradient_norm) {
                let event = Event::Warned { step, text };
                sink.tell(&event)?;
                lines.push_str(&format!("{}\n", event.to_json()));
            }
            self.recent.push_back(loss);
            if self.recent.len() > SUMMARY_STEPS {
                self.recent.pop_front();
            }
        }
        self.log(&lines)
    }

    /// Read on the training thread: a device's allocator is per thread.
    fn memory(&self) -> MemoryUse {
        let device = if B::is_synchronous() { None } else { B::memory(&self.device) };
        MemoryUse { device, host: process_memory().map(|memory| memory.in_use) }
    }

    /// Perplexity, where the loss is that of tokens.
    fn perplexity(&self, loss: f64) -> Option<f64> {
        self.trainer.task().has_perplexity().then(|| loss.exp())
    }

    fn log(&mut self, lines: &str) -> Result<(), Failure> {
        let path = self.folder.path().join(METRICS);
        self.metrics.write_all(lines.as_bytes()).map_err(Failure::io(&path))
    }

    fn diverged(&self, step: u64, loss: f64, gradient_norm: f64, learning_rate: f64) -> Failure {
        let kept = match self.folder.checkpoints().last() {
            Some((_, path)) => format!("the last checkpoint before it is {}", path.display()),
            None => "there is no checkpoint yet".to_string(),
        };
        let cause = if loss.is_finite() {
            "the gradients overflowed"
        } else if self.training().max_grad_norm == 0.0 {
            "gradients are not clipped, or the learning rate is too high"
        } else {
            "the learning rate is too high"
        };
        let lower = learning_rate / 3.0;
        Failure::new(format!(
            "training diverged at step {}: loss {loss}, gradient norm {gradient_norm}; {kept}; likely cause: {cause}, \
             try --set learning_rate={lower:.1e}",
            step + 1
        ))
    }

    /// Validates before the first step, which shows what a run achieves.
    fn validate_before(&mut self, sink: &mut impl Sink) -> Result<Validation, Failure> {
        let validation = self.trainer.validate(self.training().valid_tokens)?;
        let event = Event::Validated { step: 0, validation, perplexity: self.perplexity(validation.loss) };
        self.tell(&event, sink)?;
        Ok(validation)
    }

    /// Validates. Returns whether the weights are kept: if this is the best result so far, or the last
    /// one counts.
    fn validate(&mut self, step: u64, sink: &mut impl Sink) -> Result<bool, Failure> {
        let tokens = self.training().valid_tokens;
        let ValidationOutput { validation, confusions } = self.trainer.evaluate(tokens)?;
        let loss = validation.loss;
        if !loss.is_finite() {
            return Err(self.diverged(
                step - 1,
                loss,
                f64::NAN,
                self.trainer.recipe().schedule().learning_rate(step - 1),
            ));
        }
        let event = Event::Validated { step, validation, perplexity: self.perplexity(loss) };
        self.tell(&event, sink)?;
        if !confusions.is_empty() {
            self.tell(&Event::Confused { step, confusions }, sink)?;
        }
        let (prompt, sample_tokens) = (self.training().sample_prompt.clone(), self.training().sample_tokens);
        if sample_tokens > 0 {
            match self.trainer.sample(&prompt, sample_tokens) {
                Ok(Some(text)) => self.tell(&Event::Sampled { step, text }, sink)?,
                Ok(None) => {}
                // The run continues without a sample.
                Err(failure) => self.tell(&Event::Warned { step, text: format!("no sample: {failure}") }, sink)?,
            }
        }
        let last_counts = self.training().keep == Keep::Last;
        let improved = last_counts || self.best.is_none_or(|best| validation.is_better_than(&best.validation));
        match &mut self.best {
            Some(best) if !improved => best.without_improvement += 1,
            best => *best = Some(Best { step, validation, without_improvement: 0 }),
        }
        self.final_validation = Some(validation);
        Ok(improved)
    }

    /// Reports and stores an event.
    fn tell(&mut self, event: &Event, sink: &mut impl Sink) -> Result<(), Failure> {
        sink.tell(event)?;
        self.log(&format!("{}\n", event.to_json()))
    }

    fn save(&mut self) -> Result<(), Failure> {
        let step = self.trainer.step();
        if step == self.saved {
            return Ok(());
        }
        let (best, recipe) = (self.best, self.trainer.recipe().clone());
        let state = RunState { step, best, origin: Some(self.origin.clone()), recipe };
        checkpoint::save(&self.folder, &mut self.trainer, &state)?;
        self.saved = step;
        Ok(())
    }

    /// The share of training time spent waiting for batches.
    fn data_wait_share(&self) -> f64 {
        self.trainer.waited_for_data().as_secs_f64() / self.trained.1.as_secs_f64().max(1e-9)
    }

    /// The `done` line.
    pub(crate) fn summary(&self) -> Value {
        let rounded = |value: f64| (value * 1e6).round() / 1e6;
        let loss = self.recent.iter().sum::<f64>() / self.recent.len() as f64;
        let train_loss = (!self.recent.is_empty()).then(|| rounded(loss));
        let speed = self.trained.0 as f64 / self.trained.1.as_secs_f64().max(1e-9);
        let speed = (!self.recent.is_empty()).then(|| speed.round());
        let mut summary = json!({
            "event": "done",
            "steps": self.trainer.step(),
            "train_loss": train_loss,
            "valid_loss": self.final_validation.map(|validation| rounded(validation.loss)),
            "tokens_per_second": speed,
            "first_step_seconds": self.first_step_seconds.map(|seconds| (seconds * 1e3).round() / 1e3),
            "data_wait_share": (!self.recent.is_empty()).then(|| rounded(self.data_wait_share())),
            "stopped_early": self.stopped_early.then_some(true),
            "best_step": self.best.map(|best| best.step),
            "best_valid_loss": self.best.map(|best| rounded(best.validation.loss)),
            "out": self.folder.path().display().to_string(),
        });
        if let Value::Object(fields) = &mut summary {
            fields.retain(|name, value| name != "stopped_early" || !value.is_null());
        }
        if let Some(entropy) = self.trainer.task().source_entropy() {
            summary["source_entropy"] = json!(rounded(entropy));
        }
        match &self.test {
            Some(TestReport::Utterances(report)) => add_test(&mut summary, Some(report)),
            Some(TestReport::Classes(report)) => add_class_scores(&mut summary, Some(report.scores)),
            None => {}
        }
        if let Some(loss) = self.first_valid_loss {
            summary["first_valid_loss"] = json!(rounded(loss));
        }
        let last = self.final_validation.and_then(|validation| validation.answer_accuracy);
        add_answer_accuracy(&mut summary, "first_answer_accuracy", self.first_answer_accuracy);
        add_answer_accuracy(&mut summary, "answer_accuracy", last);
        add_rewards(&mut summary, self.final_validation.and_then(|validation| validation.rewards));
        summary
    }
}
