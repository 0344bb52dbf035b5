//! Burn's dashboard: our loop as a strategy of burn-train's, which brings the metrics and the renderer.
//!
//! burn-train wants a model, an optimizer and loaders of its own kinds; ours are in [`Session`], so it is handed
//! stand-ins that are never stepped.

use std::cell::RefCell;
use std::sync::Arc;

use burn::backend::Autodiff;
use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::module::{AutodiffModule, Module};
use burn::optim::{GradientsParams, LearningRate, MultiGradientsParams, Optimizer};
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend as BurnBackend};
use burn::train::logger::MetricLogger;
use burn::train::metric::store::{EpochSummary, MetricsUpdate, Split};
use burn::train::metric::{
    Adaptor, ItemLazy, Metric, MetricAttributes, MetricDefinition, MetricMetadata, MetricName, Numeric,
    NumericAttributes, NumericEntry, SerializedEntry, format_float,
};
use burn::train::renderer::tui::TuiMetricsRendererWrapper;
use burn::train::{
    CustomLearningStrategy, EventProcessorTraining, InferenceStep, Interrupter, Learner, LearnerEvent,
    LearningComponentsMarker, SupervisedLearningStrategy, SupervisedTraining, SupervisedTrainingEventProcessor,
    TrainLoader, TrainOutput, TrainStep, TrainingComponents, TrainingItem, TrainingModel, TrainingStrategy,
    ValidLoader,
};
use fireclay_kernels::Backend;

use crate::failure::Failure;
use crate::tasks::scores::Scores;
use crate::training::events::{Event, Sink};
use crate::training::session::Session;

type Components<B> = LearningComponentsMarker<Autodiff<B>, f64, StandIn<Autodiff<B>>, NoOptimizer>;

/// Runs a session to its end or its interruption, and shows it.
///
/// Returns whether it came to its end.
///
/// # Errors
/// Whatever the session runs into.
pub(super) fn run<B: Backend>(session: Session<B>, interrupter: Interrupter) -> State<B> {
    let device = session.device().clone();
    let (epochs_done, has_scores) = (session.epochs_done(), session.trainer.task().has_scores());
    let state = (session, Ok(false));
    #[allow(clippy::arc_with_non_send_sync)] // burn-train asks for an Arc, and never leaves this thread with it.
    let strategy = Arc::new(Strategy { state: RefCell::new(Some(state)) });
    let custom: CustomLearningStrategy<Components<B>> = strategy.clone();
    let training = SupervisedTraining::<Components<B>>::new("unused", Arc::new(NoData), Arc::new(NoData))
        .with_application_logger(None)
        .with_metric_logger(NoLog)
        .with_interrupter(interrupter.clone())
        .with_training_strategy(TrainingStrategy::Custom(custom))
        .metric_train_numeric(FigureMetric::loss())
        .metric_valid_numeric(FigureMetric::loss());
    let training = match has_scores {
        false => training.metrics((FigureMetric::perplexity(),)),
        true => training
            .metric_valid_numeric(FigureMetric::intent_accuracy())
            .metric_valid_numeric(FigureMetric::slot_f1())
            .metric_valid_numeric(FigureMetric::sentence_accuracy()),
    };
    let training = training
        .metric_train_numeric(FigureMetric::learning_rate())
        .metric_train_numeric(FigureMetric::gradient_norm())
        .metric_train_numeric(FigureMetric::tokens_per_second());
    let training = training.renderer(TuiMetricsRendererWrapper::new(interrupter, Some(epochs_done)));
    let stand_in = StandIn { anchor: Tensor::<Autodiff<B>, 1>::zeros([1], &device) };
    // The renderer gives the terminal back when it is dropped.
    drop(training.launch(Learner::<Components<B>>::new(stand_in, NoOptimizer, 0.0)));
    match strategy.state.take() {
        Some(state) => state,
        None => unreachable!("the strategy puts the session back when it is done"),
    }
}

struct Strategy<B: Backend> {
    state: RefCell<Option<State<B>>>,
}

/// A session, and how it ended.
type State<B> = (Session<B>, Result<bool, Failure>);

impl<B: Backend> SupervisedLearningStrategy<Components<B>> for Strategy<B> {
    fn fit(
        &self,
        components: TrainingComponents<Components<B>>,
        learner: Learner<Components<B>>,
        _train: TrainLoader<Components<B>>,
        _valid: ValidLoader<Components<B>>,
        _starting_epoch: usize,
    ) -> (TrainingModel<Components<B>>, SupervisedTrainingEventProcessor<Components<B>>) {
        let TrainingComponents { interrupter, mut event_processor, .. } = components;
        if let Some((mut session, _)) = self.state.take() {
            let mut reporter = Reporter::new(&session, &mut event_processor);
            let outcome = session.run(&interrupter, &mut reporter);
            self.state.replace(Some((session, outcome)));
        }
        (learner.model(), event_processor)
    }
}

/// Hands the session's figures to burn-train, whose epochs are the stretches between two validations.
struct Reporter<'a, B: Backend> {
    events: &'a mut SupervisedTrainingEventProcessor<Components<B>>,
    steps: u64,
    every: u64,
}

impl<'a, B: Backend> Reporter<'a, B> {
    fn new(session: &Session<B>, events: &'a mut SupervisedTrainingEventProcessor<Components<B>>) -> Self {
        let (steps, every) = (session.steps(), session.valid_every());
        let done = session.epochs_done();
        if done > 0 {
            events.process_train(LearnerEvent::EndEpoch(done));
            events.process_valid(LearnerEvent::EndEpoch(done));
        }
        Self { events, steps, every }
    }

    fn epochs(&self, step: u64) -> Progress {
        let items_processed = (step.saturating_sub(1) / self.every + 1) as usize;
        Progress { items_processed, items_total: self.steps.div_ceil(self.every) as usize }
    }
}

impl<B: Backend> Sink for Reporter<'_, B> {
    fn tell(&mut self, event: &Event) -> Result<(), Failure> {
        match *event {
            Event::Trained { step, loss, learning_rate, gradient_norm, tokens_per_second, .. } => {
                let figures = Figures { loss, learning_rate, gradient_norm, tokens_per_second, scores: None };
                let within = ((step - 1) % self.every + 1) as usize;
                let within = Progress { items_processed: within, items_total: self.every as usize };
                let rate = Some(learning_rate);
                let item = TrainingItem::new(figures, within, self.epochs(step), Some(step as usize), rate);
                self.events.process_train(LearnerEvent::ProcessedItem(item));
            }
            Event::Validated { step, loss, scores, .. } => {
                let none = 0.0;
                let figures =
                    Figures { loss, learning_rate: none, gradient_norm: none, tokens_per_second: none, scores };
                let every = self.every as usize;
                let within = Progress { items_processed: every, items_total: every };
                let epochs = self.epochs(step);
                let epoch = epochs.items_processed;
                let item = TrainingItem::new(figures, within, epochs, Some(step as usize), None);
                self.events.process_valid(LearnerEvent::ProcessedItem(item));
                self.events.process_train(LearnerEvent::EndEpoch(epoch));
                self.events.process_valid(LearnerEvent::EndEpoch(epoch));
            }
        }
        Ok(())
    }
}

/// A model in name only; burn-train looks for its device.
#[derive(Module, Debug)]
struct StandIn<B: BurnBackend> {
    anchor: Tensor<B, 1>,
}

impl<B: AutodiffBackend> TrainStep for StandIn<B> {
    type Input = ();
    type Output = Figures;

    fn step(&self, _input: ()) -> TrainOutput<Figures> {
        unreachable!("the strategy trains")
    }
}

impl<B: BurnBackend> InferenceStep for StandIn<B> {
    type Input = ();
    type Output = Figures;

    fn step(&self, _input: ()) -> Figures {
        unreachable!("the strategy validates")
    }
}

#[derive(Clone)]
struct NoOptimizer;

impl<M: AutodiffModule<B>, B: AutodiffBackend> Optimizer<M, B> for NoOptimizer {
    type Record = ();

    fn step(&mut self, _rate: LearningRate, module: M, _gradients: GradientsParams) -> M {
        module
    }

    fn step_multi(&mut self, _rate: LearningRate, module: M, _gradients: MultiGradientsParams) -> M {
        module
    }

    fn to_record(&self) -> Self::Record {}

    fn load_record(self, _record: Self::Record) -> Self {
        self
    }
}

struct NoData;

struct NoItems;

impl Iterator for NoItems {
    type Item = ();

    fn next(&mut self) -> Option<()> {
        None
    }
}

impl DataLoaderIterator<()> for NoItems {
    fn progress(&self) -> Progress {
        Progress { items_processed: 0, items_total: 0 }
    }
}

impl<B: BurnBackend> DataLoader<B, ()> for NoData {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<()> + 'a> {
        Box::new(NoItems)
    }

    fn num_items(&self) -> usize {
        0
    }

    fn to_device(&self, _device: &B::Device) -> Arc<dyn DataLoader<B, ()>> {
        Arc::new(NoData)
    }

    fn slice(&self, _start: usize, _end: usize) -> Arc<dyn DataLoader<B, ()>> {
        Arc::new(NoData)
    }
}

/// The session writes `metrics.jsonl` itself.
struct NoLog;

impl MetricLogger for NoLog {
    fn log(&mut self, _update: MetricsUpdate, _epoch: usize, _split: &Split) {}

    fn read_numeric(&mut self, _name: &str, _epoch: usize, _split: &Split) -> Result<Vec<NumericEntry>, String> {
        Ok(Vec::new())
    }

    fn log_metric_definition(&mut self, _definition: MetricDefinition) {}

    fn log_epoch_summary(&mut self, _summary: EpochSummary) {}
}

/// The figures of a training step or a validation, on the host.
#[derive(Clone, Copy, Debug)]
struct Figures {
    /// Nats a token.
    loss: f64,
    /// Of the step; zero for a validation.
    learning_rate: f64,
    /// Global norm before clipping; zero for a validation.
    gradient_norm: f64,
    /// Targets learnt from, or validated on, in a second.
    tokens_per_second: f64,
    /// Of a validation, where the task has them.
    scores: Option<Scores>,
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
struct FigureMetric {
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
    fn loss() -> Self {
        Self::new("Loss", false, |figures| figures.loss)
    }

    /// `e` to the loss.
    fn perplexity() -> Self {
        Self::new("Perplexity", false, |figures| figures.loss.exp())
    }

    /// Percent of a validation's utterances.
    fn intent_accuracy() -> Self {
        Self::new("Intent accuracy", true, |figures| figures.scores.unwrap_or_default().intent_accuracy)
    }

    /// Percent, over a validation's spans.
    fn slot_f1() -> Self {
        Self::new("Slot F1", true, |figures| figures.scores.unwrap_or_default().slot_f1)
    }

    /// Percent of a validation's utterances.
    fn sentence_accuracy() -> Self {
        Self::new("Sentence accuracy", true, |figures| figures.scores.unwrap_or_default().sentence_accuracy)
    }

    /// Of the step.
    fn learning_rate() -> Self {
        Self::new("Learning rate", false, |figures| figures.learning_rate)
    }

    /// Before clipping.
    fn gradient_norm() -> Self {
        Self::new("Gradient norm", false, |figures| figures.gradient_norm)
    }

    /// Training speed.
    fn tokens_per_second() -> Self {
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
