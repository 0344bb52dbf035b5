//! Continuous batching: requests join and leave at any step, and share one KV cache.
//!
//! ```text
//! add -> waiting -> prefill, in chunks -> decode, a token per step -> finished
//!           ^                                     |
//!           '------ preempted: pages ran out -----'   recomputed with its generated tokens
//! ```
//!
//! A step is one forward pass: one token of every decoding sequence, and prompt tokens up to the
//! step's token budget (Yu et al., 2022, "Orca"; Agrawal et al., 2024, "Sarathi-Serve"). Budget
//! left by a prefill goes to waiting sequences, all but their last token: larger passes are more
//! efficient, and such a sequence starts to decode as soon as a slot is free. Sampled tokens feed
//! the next step on the device and are read one or more steps later. When only decoding is left,
//! one step generates as many tokens as the device supports.

mod log_probabilities;
mod pass;
mod plan;
mod warm_up;

use std::collections::{HashMap, VecDeque};
use std::iter::Sum;
use std::time::{Duration, Instant};

use burn::tensor::{Int, Tensor};
use fireclay_kernels::{Backend, Download, SampledRow, SampledRows, Sampling, TokenCounts};
use fireclay_model::{Cache, RowId, Transformer, TransformerConfig};

use self::log_probabilities::PromptLogProbabilities;
use crate::failure::Failure;

/// Maximum steps whose tokens are read together, on devices where a read blocks.
const READ_STEPS: usize = 16;
/// Minimum time between two reads, except for [`READ_STEPS`]: too short to notice.
const READ_INTERVAL: Duration = Duration::from_millis(25);
/// Maximum tokens per sequence in one multi-step call.
const MAX_STEPS: usize = 16;
/// Share of the slots that may be prefilled ahead: one in this many.
const PREFILL_AHEAD: usize = 4;
/// Maximum number of top log-probabilities per token.
pub const MAX_TOP_LOGPROBS: usize = 20;

/// Limits of a scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerOptions {
    /// Slots: the maximum number of sequences decoded concurrently.
    pub rows: usize,
    /// Token budget of a step, decode and prefill together.
    pub step_tokens: usize,
    /// Size of the KV cache, in tokens.
    pub cache_tokens: usize,
}

/// A sequence to generate.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// The prompt: at least one token.
    pub prompt: Vec<u32>,
    /// Maximum number of tokens to generate: at least one.
    pub max_tokens: usize,
    /// Sampling parameters.
    pub sampling: Sampling,
    /// Stop tokens.
    pub stop_tokens: Vec<u32>,
    /// Logit biases, by token.
    pub biases: Vec<(u32, f32)>,
    /// Requests the log-probability of each token, with this many top alternatives.
    pub top_logprobs: Option<usize>,
    /// Requests the log-probabilities of the prompt's tokens, with this many top alternatives.
    pub prompt_top_logprobs: Option<usize>,
    /// The client. When pages run out, sequences of the client with the most pages are preempted.
    pub client: u64,
}

impl Request {
    /// A greedy request.
    pub fn new(prompt: Vec<u32>, max_tokens: usize) -> Self {
        let sampling = Sampling::greedy();
        Self {
            prompt,
            max_tokens,
            sampling,
            stop_tokens: Vec::new(),
            biases: Vec::new(),
            top_logprobs: None,
            prompt_top_logprobs: None,
            client: 0,
        }
    }
}

/// Restricts the tokens of a sequence, for example to a grammar.
pub trait TokenFilter: Send {
    /// Mask of the allowed next tokens: one bit per vocabulary entry, 32 per word, lowest first.
    ///
    /// # Errors
    /// If it fails; the sequence ends then.
    fn allowed(&mut self) -> Result<Vec<u32>, Failure>;

    /// Accepts the next token. Returns whether the output is complete.
    ///
    /// # Errors
    /// If it fails; the sequence ends then.
    fn push(&mut self, token: u32) -> Result<bool, Failure>;
}

/// The id of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(u64);

/// Why a sequence finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// It generated a stop token, its last one.
    End,
    /// Its filter accepts the output as complete, last token included.
    Complete,
    /// It reached max_tokens.
    Length,
    /// Its logits are NaN.
    NotANumber,
    /// Its filter failed.
    Filter,
}

/// A token with optional log-probabilities.
#[derive(Clone, Debug, PartialEq)]
pub struct OutputToken {
    /// The token.
    pub token: u32,
    /// Its log-probability in nats, if requested: the model's own, before temperature, truncation,
    /// biases and penalties.
    pub log_probability: Option<f32>,
    /// The top tokens in its place and their log-probabilities, in descending order.
    pub top_logprobs: Vec<(u32, f32)>,
}

impl OutputToken {
    /// A token without log-probabilities.
    fn plain(token: u32) -> Self {
        Self { token, log_probability: None, top_logprobs: Vec::new() }
    }

    /// A token and its top `count` alternatives, from the start of `known`.
    fn of(known: &[(u32, f32)], count: usize) -> Self {
        let Some(((token, own), others)) = known.split_first() else { return Self::plain(0) };
        Self { token: *token, log_probability: Some(*own), top_logprobs: others.iter().take(count).copied().collect() }
    }
}

/// Output of a request since the last call.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestOutput {
    /// The request.
    pub id: RequestId,
    /// Further prompt tokens, if their log-probabilities were requested. The first one has none.
    pub prompt: Vec<OutputToken>,
    /// New tokens.
    pub tokens: Vec<OutputToken>,
    /// Prompt tokens found in the KV cache; set with the first token.
    pub cached: Option<usize>,
    /// The reason it finished, if it did; it is the last output then.
    pub finish: Option<Finish>,
}

impl RequestOutput {
    fn nothing(id: RequestId) -> Self {
        Self { id, prompt: Vec::new(), tokens: Vec::new(), cached: None, finish: None }
    }
}

/// The scheduler's current load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests that have not started.
    pub waiting: usize,
    /// Sequences in prefill, or past it and waiting for a slot.
    pub prefilling: usize,
    /// Decoding sequences.
    pub decoding: usize,
    /// Pages of the cache.
    pub pages: usize,
    /// Free pages.
    pub free_pages: usize,
    /// Tokens in the sequences' pages.
    pub tokens: usize,
    /// Preemptions so far.
    pub preemptions: usize,
}

impl Sum for Load {
    fn sum<I: Iterator<Item = Self>>(loads: I) -> Self {
        loads.fold(Self::default(), |sum, load| Self {
            waiting: sum.waiting + load.waiting,
            prefilling: sum.prefilling + load.prefilling,
            decoding: sum.decoding + load.decoding,
            pages: sum.pages + load.pages,
            free_pages: sum.free_pages + load.free_pages,
            tokens: sum.tokens + load.tokens,
            preemptions: sum.preemptions + load.preemptions,
        })
    }
}

/// A request in the scheduler.
struct Sequence {
    id: RequestId,
    /// Its place in the queue; a pause loses it.
    arrival: u64,
    request: Request,
    /// The prompt, and the generated tokens read from the device.
    tokens: Vec<u32>,
    /// Number of generated tokens; those beyond `tokens` are still on the device.
    drawn: usize,
    /// Where in `tokens` its cache row starts.
    begin: usize,
    row: Option<RowId>,
    /// Its row of token counts.
    line: Option<usize>,
    /// Restricts its tokens, if set.
    filter: Option<Box<dyn TokenFilter>>,
    /// Number of context shifts.
    slides: u64,
    /// Prompt tokens found in the cache at admission; reported with its first token.
    cached: Option<usize>,
    was_admitted: bool,
    /// Prompt tokens whose log-probabilities are computed, if requested.
    prompt_known: usize,
    /// Index of its last token among those sampled by the last step, if any: the next step reads it
    /// there.
    drawn_at: Option<usize>,
    /// Tokens scheduled for this step.
    scheduled: usize,
    /// Whether it has a slot. Without one, its last prompt token is not prefilled.
    has_slot: bool,
    finished: bool,
}

impl Sequence {
    fn prompt_length(&self) -> usize {
        self.request.prompt.len()
    }

    /// Whether no further token is to be sampled.
    fn is_complete(&self) -> bool {
        self.finished || self.drawn >= self.request.max_tokens
    }

    /// Whether log-probabilities of its prompt are still to be computed.
    fn awaits_prompt(&self) -> bool {
        self.request.prompt_top_logprobs.is_some() && self.prompt_known + 1 < self.prompt_length()
    }

    fn needs_line(&self) -> bool {
        !self.request.sampling.penalties.are_none() || !self.request.biases.is_empty() || self.filter.is_some()
    }

    fn sampling(&self) -> Sampling {
        let Sampling { stream, .. } = self.request.sampling;
        let stream =
            if self.slides == 0 { stream } else { Sampling::greedy().with_seed(stream.into(), self.slides).stream };
        Sampling { stream, ..self.request.sampling }
    }
}

/// Stop tokens of some sequences, and the same on the device, `[sequences, most]`.
struct StopTokens<B: Backend> {
    of_sequences: Vec<Vec<u32>>,
    on_device: Tensor<B, 2, Int>,
}

/// Sampled tokens in transfer from the device.
struct Drawn {
    tokens: Download,
    /// Number of consecutive tokens per sequence.
    steps: usize,
    /// Their sequences, with the index in each step.
    sequences: Vec<(usize, RequestId)>,
    /// The tokens and values of [`LogProbabilities`](log_probabilities::LogProbabilities).
    log_probabilities: Option<(Download, Download)>,
    prompts: Vec<PromptLogProbabilities>,
}

impl Drawn {
    /// Starts all of its downloads.
    fn begin(self) -> Self {
        let log_probabilities = self.log_probabilities.map(|(tokens, values)| (tokens.begin(), values.begin()));
        Self { tokens: self.tokens.begin(), log_probabilities, ..self }
    }
}

/// Tokens kept when a sequence fills the context: half of the context, or the attention window if
/// that is larger. `None` without a window.
pub(super) fn kept_tokens(config: &TransformerConfig) -> Option<usize> {
    let window = config.sliding_window.filter(|window| *window < config.context_length)?;
    Some(window.max(config.context_length / 2))
}

/// A continuous-batching scheduler.
pub struct Scheduler<B: Backend> {
    options: SchedulerOptions,
    cache: Cache<B>,
    context: usize,
    vocabulary: usize,
    /// Tokens kept when a sequence fills the context, for models with a window.
    kept: Option<usize>,
    waiting: VecDeque<Sequence>,
    /// Admitted sequences, in order of arrival.
    running: Vec<Sequence>,
    /// Sequences that wait until they are resumed.
    paused: Vec<Sequence>,
    requests: u64,
    arrivals: u64,
    /// The tokens and parameters of the last sampling.
    drawn: Option<Tensor<B, 1, Int>>,
    sampled: Option<(Vec<SampledRow>, SampledRows<B>)>,
    /// Those of the last multi-step call.
    stop_tokens: Option<StopTokens<B>>,
    counts: Option<TokenCounts<B>>,
    free_lines: Vec<usize>,
    in_flight: VecDeque<Drawn>,
    last_read: Instant,
    ready: HashMap<RequestId, RequestOutput>,
    preemptions: usize,
    device: B::Device,
}

impl<B: Backend> Scheduler<B> {
    /// A scheduler for a model. Allocates the KV cache.
    ///
    /// # Panics
    /// If the model is an encoder, or an option is zero.
    pub fn new(model: &Transformer<B>, options: SchedulerOptions, device: B::Device) -> Self {
        let SchedulerOptions { rows, step_tokens, cache_tokens } = options;
        assert!(rows > 0 && step_tokens > 0 && cache_tokens > 0, "scheduler options must be positive: {options:?}");
        let config = model.config();
        let context = config.context_length;
        Self {
            options,
            cache: model.cache(cache_tokens),
            context,
            vocabulary: config.vocab_size,
            kept: kept_tokens(config),
            waiting: VecDeque::new(),
            running: Vec::new(),
            paused: Vec::new(),
            requests: 0,
            arrivals: 0,
            drawn: None,
            sampled: None,
            stop_tokens: None,
            counts: None,
            free_lines: Vec::new(),
            in_flight: VecDeque::new(),
            last_read: Instant::now(),
            ready: HashMap::new(),
            preemptions: 0,
            device,
        }
    }

    /// Slots: the maximum number of sequences decoded concurrently.
    pub fn rows(&self) -> usize {
        self.options.rows
    }

    /// Maximum number of admitted sequences: those with slots, and those prefilled ahead.
    pub fn max_active(&self) -> usize {
        self.options.rows + self.options.rows / PREFILL_AHEAD
    }

    /// Adds a request to the end of the queue.
    ///
    /// # Errors
    /// If it asks for nothing, has tokens outside the vocabulary or invalid sampling parameters, or
    /// can never fit the context or the cache.
    pub fn add(&mut self, request: Request) -> Result<RequestId, Failure> {
        self.add_filtered(request, None)
    }

    /// Adds a request whose tokens `filter` restricts. With such sequences, tokens are read after
    /// each step.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn add_filtered(
        &mut self,
        request: Request,
        filter: Option<Box<dyn TokenFilter>>,
    ) -> Result<RequestId, Failure> {
        let Request { prompt, max_tokens, biases, top_logprobs, prompt_top_logprobs, sampling, .. } = &request;
        sampling.validate().map_err(|reason| Failure::usage(format!("a request with {reason}")))?;
        let (length, room) = (prompt.len(), self.context.saturating_sub(prompt.len()));
        if length == 0 || *max_tokens == 0 {
            return Err(Failure::usage("a request needs a prompt of at least one token and max_tokens of at least 1"));
        }
        let tokens = prompt.iter().chain(biases.iter().map(|(token, _)| token));
        if let Some(token) = tokens.max().filter(|token| **token as usize >= self.vocabulary) {
            let last = self.vocabulary - 1;
            return Err(Failure::usage(format!("token {token} is outside the model's vocabulary, 0 to {last}")));
        }
        if top_logprobs.max(prompt_top_logprobs).is_some_and(|count| count > MAX_TOP_LOGPROBS) {
            return Err(Failure::usage(format!(
                "{MAX_TOP_LOGPROBS} is the maximum number of top log-probabilities per token"
            )));
        }
        if room == 0 || (*max_tokens > room && self.kept.is_none()) {
            return Err(Failure::usage(format!(
                "the prompt has {length} tokens and max_tokens is {max_tokens}, but the model's context is {}",
                self.context
            )));
        }
        let (pages, _) = self.cache.pages();
        let most = (length + max_tokens).min(self.context);
        if most.div_ceil(self.cache.page_tokens()) > pages {
            let held = pages * self.cache.page_tokens();
            return Err(Failure::usage(format!(
                "the prompt has {length} tokens and max_tokens is {max_tokens}, but the cache holds {held}"
            )));
        }
        self.requests += 1;
        let id = RequestId(self.requests);
        let tokens = prompt.clone();
        let sequence = Sequence {
            id,
            arrival: self.arrive(),
            request,
            tokens,
            drawn: 0,
            begin: 0,
            row: None,
            line: None,
            filter,
            slides: 0,
            cached: None,
            was_admitted: false,
            prompt_known: 0,
            drawn_at: None,
            scheduled: 0,
            has_slot: false,
            finished: false,
        };
        self.waiting.push_back(sequence);
        Ok(id)
    }

    /// The next place in the queue.
    fn arrive(&mut self) -> u64 {
        self.arrivals += 1;
        self.arrivals
    }

    /// Preempts a request until it is [resumed](Self::resume): it loses its row and pages and keeps
    /// its tokens. Returns false if it is complete or unknown.
    ///
    /// # Errors
    /// If the device fails.
    pub fn pause(&mut self, id: RequestId) -> Result<bool, Failure> {
        if let Some(sequence) =
            self.waiting.iter().position(|sequence| sequence.id == id).and_then(|at| self.waiting.remove(at))
        {
            self.paused.push(sequence);
            return Ok(true);
        }
        if !self.running.iter().any(|sequence| sequence.id == id) {
            return Ok(false);
        }
        // All of its tokens have to be known.
        self.read(0)?;
        let Some(at) = self.running.iter().position(|sequence| sequence.id == id) else { return Ok(false) };
        let sequence = self.running.remove(at);
        let sequence = self.release(sequence);
        self.paused.push(sequence);
        self.preemptions += 1;
        Ok(true)
    }

    /// Puts a paused request at the end of the queue.
    pub fn resume(&mut self, id: RequestId) {
        if let Some(at) = self.paused.iter().position(|sequence| sequence.id == id) {
            let sequence = Sequence { arrival: self.arrive(), ..self.paused.remove(at) };
            self.waiting.push_back(sequence);
        }
    }

    /// Ends a request and drops its pending output. Others are not affected.
    pub fn cancel(&mut self, id: RequestId) {
        self.waiting.retain(|sequence| sequence.id != id);
        self.paused.retain(|sequence| sequence.id != id);
        if let Some(at) = self.running.iter().position(|sequence| sequence.id == id) {
            let sequence = self.running.remove(at);
            self.release(sequence);
        }
        self.ready.remove(&id);
    }

    /// Whether there is no work and no output, except for paused requests.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty() && self.in_flight.is_empty() && self.ready.is_empty()
    }

    /// The current load.
    pub fn load(&self) -> Load {
        let (pages, free_pages) = self.cache.pages();
        let decoding = self.running.iter().filter(|sequence| sequence.drawn_at.is_some()).count();
        let (waiting, prefilling) = (self.waiting.len(), self.running.len() - decoding);
        let tokens = self.running.iter().filter_map(|sequence| Some(self.cache.length(sequence.row?))).sum();
        Load { waiting, prefilling, decoding, pages, free_pages, tokens, preemptions: self.preemptions }
    }

    /// Takes the output read from the device so far, in the order of requests.
    pub fn take(&mut self) -> Vec<RequestOutput> {
        let mut written: Vec<RequestOutput> = self.ready.drain().map(|(_, written)| written).collect();
        written.sort_by_key(|written| written.id);
        written
    }

    /// Runs a forward pass if there is work, and reads sampled tokens if it is time.
    ///
    /// # Errors
    /// If the device fails.
    pub fn step(&mut self, model: &Transformer<B>) -> Result<(), Failure> {
        // A filter needs all tokens before the next mask.
        if !self.in_flight.is_empty() && self.running.iter().any(|sequence| sequence.filter.is_some()) {
            self.read(0)?;
        }
        self.slide()?;
        let prefills = self.plan()?;
        let decoding = self.decoding();
        let first_tokens = decoding.iter().all(|at| self.running[*at].drawn_at.is_none());
        if !prefills.is_empty() || !decoding.is_empty() {
            self.pass(model, &decoding, &prefills);
        }
        if !prefills.is_empty() {
            self.prepare_multi_step();
        }
        // A complete sequence blocks its slot until its tokens are read.
        let complete = self.running.iter().any(|sequence| sequence.is_complete());
        let waits = self.running.iter().any(|sequence| !sequence.is_complete());
        if B::downloads_at_once() {
            // The device works on the last step meanwhile. A first token waits for that step at
            // most.
            self.read(usize::from(waits && !first_tokens))?;
        } else if first_tokens
            || complete
            || !waits
            || self.in_flight.len() >= READ_STEPS
            || self.last_read.elapsed() >= READ_INTERVAL
        {
            self.read(0)?;
        }
        Ok(())
    }
}
