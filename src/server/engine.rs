//! The thread that owns model and device: takes jobs from the queue and sends their results.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fireclay_kernels::Backend;
use fireclay_model::AttentionDirection;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;

use super::keys::Client;
use super::served::{Served, ServedEncoder, ServedGenerator};
use super::{Phase, ServerOptions, Shared};
use crate::backend::{OnBackend, RunContext};
use crate::failure::Failure;
use crate::inference::embedding::Embedder;
use crate::inference::generation::Generator;
use crate::inference::generation::scheduler::{
    Finish, OutputToken, Request, RequestId, RequestOutput, Scheduler, TokenFilter,
};
use crate::inference::language_model::shared_adapter;
use crate::inference::prediction::{Prediction, Predictor};
use crate::inference::scoring::{Pair, ScoreHead};
use crate::inference::text_encoder::EncodedText;
use crate::model_folder::ModelSource;
use crate::precision::{CachePrecision, Precision};
use crate::run_folder::LABELS;

/// Minimum time between two events of a sequence: unnoticed by readers, and slow enough for
/// clients.
const SEND_INTERVAL: Duration = Duration::from_millis(20);

/// Maximum time that an idle engine sleeps.
const SLEEP: Duration = Duration::from_secs(1);

/// Batch size up to which kernels are compiled before the first request.
const WARM_ROWS: usize = 128;

/// Work for the device.
pub(super) enum Job {
    /// Generate a sequence.
    Generate(Box<GenerateJob>),
    /// Embed inputs, given as tokens.
    Embed { inputs: Vec<EncodedText>, reply: Reply<Vec<Vec<f32>>> },
    /// Score pairs of inputs, with a model that has a score head.
    Score { pairs: Vec<Pair>, reply: Reply<Vec<f32>> },
    /// Predict intents and slots.
    Predict { inputs: Vec<String>, reply: Reply<Vec<Prediction>> },
    /// Resume a preempted sequence, with the channel to its client.
    Resume { id: SequenceId, events: UnboundedSender<SequenceEvent> },
}

/// A sequence: the number of its model, and its request in that model's scheduler.
pub(super) type SequenceId = (usize, RequestId);

type Reply<T> = oneshot::Sender<Result<T, Failure>>;

/// A sequence to generate.
pub(super) struct GenerateJob {
    /// The number of the model.
    pub(super) model: usize,
    pub(super) request: Request,
    pub(super) filter: Option<Box<dyn TokenFilter>>,
    /// Bounded by the request's max_tokens.
    pub(super) events: UnboundedSender<SequenceEvent>,
}

/// New output of a sequence.
#[derive(Debug, Default)]
pub(super) struct NewTokens {
    /// Prompt tokens, if their log-probabilities were requested.
    pub(super) prompt: Vec<OutputToken>,
    pub(super) tokens: Vec<OutputToken>,
    /// Prompt tokens found in the KV cache.
    pub(super) cached: usize,
}

/// An event of a sequence.
pub(super) enum SequenceEvent {
    Tokens(NewTokens),
    Finished(Finish),
    /// Generation failed, because of the request or of the server.
    Failed(Failure),
    /// The server stopped before the sequence was complete.
    Stopping,
}

impl Job {
    /// Whether its client is gone.
    pub(super) fn is_abandoned(&self) -> bool {
        match self {
            Self::Generate(job) => job.events.is_closed(),
            Self::Embed { reply, .. } => reply.is_closed(),
            Self::Score { reply, .. } => reply.is_closed(),
            Self::Predict { reply, .. } => reply.is_closed(),
            Self::Resume { events, .. } => events.is_closed(),
        }
    }
}

/// The server's device work, on any backend.
pub(super) struct Engine<R> {
    pub(super) shared: Arc<Shared>,
    pub(super) model: ModelSource,
    pub(super) precision: Precision,
    pub(super) ready: R,
}

impl<R: FnOnce() + Send> OnBackend for Engine<R> {
    type Output = ();

    fn run<B: Backend>(self, RunContext { device, .. }: RunContext<B>) -> Result<(), Failure> {
        let (_, config) = self.model.files()?.config()?;
        match config.attention {
            AttentionDirection::Causal => {
                let ServerOptions { limits, adapters, .. } = &self.shared.options;
                if let Some(own) = self.model.adapter().filter(|_| !adapters.is_empty()) {
                    let own = own.display();
                    return Err(Failure::usage(format!(
                        "--model is itself an adapter: name its base model, and --adapter {own} with the others"
                    )));
                }
                // Before the model takes its time to load.
                adapters.iter().try_for_each(|(_, folder)| shared_adapter(folder).map(drop))?;
                let cache = limits.cache;
                let generator = Generator::<B>::open(&self.model, self.precision, device)?.with_cache(cache)?;
                self.write(generator)
            }
            AttentionDirection::Bidirectional if self.shared.options.limits.cache != CachePrecision::Auto => {
                Err(Failure::usage("--cache-dtype is for models that generate text; this one is an encoder"))
            }
            AttentionDirection::Bidirectional if !self.shared.options.adapters.is_empty() => {
                Err(Failure::usage("several adapters are for a model that generates text; this one is an encoder"))
            }
            AttentionDirection::Bidirectional if self.shared.options.chat_template.is_some() => {
                Err(Failure::usage("--chat-template is for models that generate text; this one is an encoder"))
            }
            AttentionDirection::Bidirectional => self.encode::<B>(device),
        }
    }
}

impl<R: FnOnce()> Engine<R> {
    /// From here on requests are answered.
    fn begin(&mut self, served: Served) {
        // Set only here.
        let _ = self.shared.served.set(served);
        self.shared.phase.send_if_modified(|phase| {
            let loading = *phase == Phase::Loading;
            if loading {
                *phase = Phase::Ready;
            }
            loading
        });
    }

    fn write<B: Backend>(mut self, generator: Generator<B>) -> Result<(), Failure> {
        let limits = self.shared.options.limits.clone();
        let rows = limits.rows.unwrap_or_else(Generator::<B>::rows).max(1);
        let longest = generator.model().config().context_length;
        let context = limits.context.unwrap_or(longest);
        if context == 0 || context > longest {
            return Err(Failure::usage(format!("--context {context} must be 1 to {longest}, the model's own")));
        }
        let step_tokens = limits.step_tokens.unwrap_or_else(Generator::<B>::step_tokens);
        let sources: Vec<ModelSource> = std::iter::once(self.model.clone())
            .chain(self.shared.options.adapters.iter().map(|(_, folder)| self.model.clone().with_adapter(folder)))
            .collect();
        let mut generators = vec![generator];
        for source in &sources[1..] {
            let with_adapter = generators[0].with_adapter(source)?;
            generators.push(with_adapter);
        }
        // The models share the memory for keys and values.
        let lengths = || std::iter::repeat_n(context, rows);
        let cache_tokens = limits.cache_tokens.unwrap_or_else(|| generators[0].cache_tokens(rows, lengths()));
        let (count, cache_tokens) = (generators.len(), cache_tokens / generators.len());
        if count > 1 && cache_tokens < context {
            return Err(Failure::usage(format!(
                "{count} models have {cache_tokens} tokens of the KV cache each, less than a sequence of {context}: set \
                 --context {cache_tokens} or less, or --cache-tokens {} or more",
                count * context
            )));
        }
        let mut models: Vec<(Generator<B>, Scheduler<B>)> = generators
            .into_iter()
            .map(|generator| {
                let scheduler = generator.scheduler_of(rows, step_tokens, lengths(), Some(cache_tokens));
                (generator, scheduler)
            })
            .collect();
        if !B::is_synchronous() {
            // All adapters take the same kernels.
            for (generator, scheduler) in models.iter_mut().take(2) {
                scheduler.warm_up(generator.model(), rows.min(WARM_ROWS), || self.shared.phase() == Phase::Loading)?;
            }
        }
        // A stop may come before the server has started.
        if self.shared.phase() != Phase::Loading {
            return Ok(());
        }
        let template = self.shared.options.chat_template.as_deref();
        let named = self.shared.options.names().zip(&models).zip(&sources);
        let served = named.map(|((name, (generator, _)), source)| {
            ServedGenerator::new(name, generator, source.text(), template, context)
        });
        let served = served.collect::<Result<_, Failure>>()?;
        self.begin(Served::Generators(served));
        let Self { shared, ready, .. } = self;
        ready();
        let mut sequences = Sequences {
            shared: &shared,
            models: &mut models,
            jobs: HashMap::new(),
            preempted: HashMap::new(),
            begun: 0,
        };
        let served = sequences.serve();
        let end = || served.clone().map_or_else(SequenceEvent::Failed, |()| SequenceEvent::Stopping);
        // The client may be gone.
        for mut waiting in sequences.jobs.into_values().chain(sequences.preempted.into_values()) {
            waiting.send();
            drop(waiting.events.send(end()));
        }
        while let Some((_, job)) = shared.queue.pop() {
            if let Job::Generate(job) = job {
                drop(job.events.send(end()));
            }
        }
        served
    }

    fn encode<B: Backend>(mut self, device: B::Device) -> Result<(), Failure> {
        let predicts = self.model.weights().join(LABELS).exists();
        let predictor =
            predicts.then(|| Predictor::<B>::open(self.model.weights(), self.precision, device.clone())).transpose()?;
        let embedder = match &predictor {
            Some(predictor) => Embedder::of(predictor.model().clone(), self.model.weights(), device.clone()),
            None => Embedder::open(self.model.weights(), self.precision, device.clone()),
        }?;
        let head = ScoreHead::of(embedder.model(), self.model.weights())?;
        self.begin(Served::Encoder(Box::new(ServedEncoder::new(&embedder, predicts, head.is_some()))));
        let Self { shared, ready, .. } = self;
        ready();
        loop {
            let phase = shared.phase();
            if is_over(phase) || (matches!(phase, Phase::Draining(_)) && shared.queue.len() == 0) {
                return Ok(());
            }
            match shared.queue.pop().map(|(_, job)| job) {
                None => shared.queue.wait(SLEEP),
                Some(Job::Embed { inputs, reply }) => answer(reply, embedder.embed(&inputs))?,
                Some(Job::Score { pairs, reply }) => match &head {
                    Some(head) => answer(reply, head.scores(embedder.model(), &pairs))?,
                    None => drop(reply.send(Err(Failure::usage("this model has no head for scores")))),
                },
                Some(Job::Predict { inputs, reply }) => {
                    let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
                    match &predictor {
                        Some(predictor) => answer(reply, predictor.predict(&inputs))?,
                        None => drop(reply.send(Err(Failure::usage("this model does not predict intents")))),
                    }
                }
                Some(Job::Generate(job)) => {
                    let _ = job.events.send(SequenceEvent::Failed(Failure::usage("an encoder does not generate text")));
                }
                // Nothing is preempted here.
                Some(Job::Resume { .. }) => {}
            }
        }
    }
}

/// Whether a draining server has run out of time.
fn is_over(phase: Phase) -> bool {
    match phase {
        Phase::Draining(until) => Instant::now() >= until,
        Phase::Stopped => true,
        Phase::Loading | Phase::Ready => false,
    }
}

/// Sends a result. An error that is not the client's fault also ends the server.
fn answer<T>(reply: Reply<T>, answer: Result<T, Failure>) -> Result<(), Failure> {
    let failed = answer.as_ref().err().filter(|failure| failure.exit_code() != 2).cloned();
    // The client may be gone.
    let _ = reply.send(answer);
    failed.map_or(Ok(()), Err)
}

/// The sequences in the schedulers.
struct Sequences<'a, B: Backend> {
    shared: &'a Shared,
    /// Each model with its scheduler.
    models: &'a mut [(Generator<B>, Scheduler<B>)],
    jobs: HashMap<SequenceId, Waiting>,
    /// Preempted sequences that wait in the queue.
    preempted: HashMap<SequenceId, Waiting>,
    /// Number of sequences that began.
    begun: u64,
}

/// The channel of a sequence, and its output since the last event.
struct Waiting {
    client: Client,
    /// Its place among all sequences that began.
    arrival: u64,
    /// Prompt tokens.
    prompt: usize,
    events: UnboundedSender<SequenceEvent>,
    new: NewTokens,
    sent: Option<Instant>,
}

impl Waiting {
    /// Sends the pending output. A sequence whose channel is closed ends at the next step.
    fn send(&mut self) {
        if !self.new.tokens.is_empty() {
            let _ = self.events.send(SequenceEvent::Tokens(std::mem::take(&mut self.new)));
            self.sent = Some(Instant::now());
        }
    }
}

impl<B: Backend> Sequences<'_, B> {
    /// Runs until the server drains, then until all sequences are complete or time is up.
    fn serve(&mut self) -> Result<(), Failure> {
        loop {
            self.cancel_abandoned();
            self.share()?;
            // They all have as many rows.
            while self.jobs.len() < self.models[0].1.max_active()
                && let Some((client, job)) = self.shared.queue.pop()
            {
                self.begin(client, job);
            }
            let load = self.models.iter().map(|(_, scheduler)| scheduler.load()).sum();
            self.shared.metrics.load(load, self.shared.queue.len());
            let phase = self.shared.phase();
            if is_over(phase) || (matches!(phase, Phase::Draining(_)) && self.jobs.is_empty()) {
                return Ok(());
            }
            if self.jobs.is_empty() {
                self.shared.queue.wait(SLEEP);
                continue;
            }
            for model in 0..self.models.len() {
                let (generator, scheduler) = &mut self.models[model];
                if !scheduler.is_idle() {
                    scheduler.step(generator.model())?;
                    self.send(model);
                }
            }
        }
    }

    /// Preempts sequences of the client furthest above its share, last first, for waiting clients
    /// below theirs. The preempted sequences wait in their own client's queue.
    fn share(&mut self) -> Result<(), Failure> {
        let rows = self.models[0].1.rows();
        let waiting = self.shared.queue.clients();
        if waiting.is_empty() || self.jobs.len() < rows {
            return Ok(());
        }
        let mut held: HashMap<Client, usize> = waiting.iter().map(|client| (*client, 0)).collect();
        for job in self.jobs.values() {
            *held.entry(job.client).or_default() += 1;
        }
        let share = (rows / held.len()).max(1);
        // One slot at a time for each of them, until nobody is below its share.
        loop {
            let below = |client: Client| held.get(&client).is_some_and(|held| *held < share);
            let beyond = held.iter().filter(|(_, held)| **held > share).max_by_key(|(_, held)| **held);
            let Some(most) = beyond.map(|(client, _)| *client) else { return Ok(()) };
            let Some((client, job)) = self.shared.queue.pop_of(below) else { return Ok(()) };
            while self.jobs.len() >= rows && held.get(&most).is_some_and(|held| *held > share) {
                let own = self.jobs.iter().filter(|(_, job)| job.client == most);
                let Some((id, _)) = own.max_by_key(|(_, job)| job.arrival) else { break };
                let id = *id;
                *held.entry(most).or_default() -= 1;
                if self.models[id.0].1.pause(id.1)?
                    && let Some(text) = self.jobs.remove(&id)
                {
                    let events = text.events.clone();
                    self.preempted.insert(id, text);
                    self.shared.queue.put_back(most, Job::Resume { id, events });
                }
                // Report what it generated before.
                self.send(id.0);
            }
            *held.entry(client).or_default() += 1;
            self.begin(client, job);
        }
    }

    fn begin(&mut self, client: Client, job: Job) {
        match job {
            Job::Generate(job) => {
                let GenerateJob { model, request, filter, events } = *job;
                let request = Request { client: client.number(), ..request };
                let prompt = request.prompt.len();
                match self.models[model].1.add_filtered(request, filter) {
                    Ok(id) => {
                        let (new, arrival) = (NewTokens::default(), self.begun);
                        self.begun += 1;
                        let waiting = Waiting { client, arrival, prompt, events, new, sent: None };
                        self.jobs.insert((model, id), waiting);
                    }
                    Err(failure) => drop(events.send(SequenceEvent::Failed(failure))),
                }
            }
            Job::Resume { id, .. } => {
                if let Some(text) = self.preempted.remove(&id) {
                    self.models[id.0].1.resume(id.1);
                    self.jobs.insert(id, text);
                }
            }
            Job::Embed { reply, .. } => {
                drop(reply.send(Err(Failure::usage("this model generates text; it has no embeddings"))));
            }
            Job::Score { reply, .. } => {
                drop(reply.send(Err(Failure::usage("this model generates text; it has no scores"))))
            }
            Job::Predict { reply, .. } => drop(reply.send(Err(Failure::usage("this model does not predict intents")))),
        }
    }

    /// Ends sequences whose clients are gone; their pages are free at once.
    fn cancel_abandoned(&mut self) {
        let models = &mut self.models;
        let mut wanted = |(model, id): &SequenceId, waiting: &mut Waiting| {
            let abandoned = waiting.events.is_closed();
            if abandoned {
                models[*model].1.cancel(*id);
            }
            !abandoned
        };
        self.jobs.retain(&mut wanted);
        self.preempted.retain(&mut wanted);
    }

    /// Sends new output of a model: at once for finished sequences, at intervals for the others.
    fn send(&mut self, model: usize) {
        for RequestOutput { id, prompt, tokens, cached, finish } in self.models[model].1.take() {
            let id = (model, id);
            let Some(waiting) = self.jobs.get_mut(&id).or_else(|| self.preempted.get_mut(&id)) else { continue };
            if let Some(cached) = cached {
                waiting.new.cached = cached;
                self.shared.metrics.cached(waiting.prompt as u64, cached as u64);
            }
            waiting.new.prompt.extend(prompt);
            waiting.new.tokens.extend(tokens);
            if let Some(finish) = finish {
                waiting.send();
                let _ = waiting.events.send(SequenceEvent::Finished(finish));
                self.jobs.remove(&id);
            }
        }
        let due = |waiting: &&mut Waiting| waiting.sent.is_none_or(|sent| sent.elapsed() >= SEND_INTERVAL);
        self.jobs.values_mut().chain(self.preempted.values_mut()).filter(due).for_each(Waiting::send);
    }
}
