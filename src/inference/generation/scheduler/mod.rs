//! Many sequences at once: requests come and go at any step, and share one cache.
//!
//! ```text
//! add -> waiting -> reading its prompt, in chunks -> writing, a token a step -> finished
//!           ^                                           |
//!           '----- pages run out: the last that came ---'   it is read again, with what it has written
//! ```
//!
//! A step is one pass of the model: a token of every sequence that is being written, and as many tokens of prompts beside them as
//! there is room for (Yu et al., 2022, "Orca"; Agrawal et al., 2024, "Sarathi-Serve"). Where a prompt is read, so are those of the
//! next sequences that wait, as far as the step has room, but for their last tokens: many tokens take less time each, and such a sequence
//! is written as soon as another has ended. Drawn tokens feed the next step on the device, and are read one or more steps later.
//! Where nothing else is to be done, a step gives sequences as many tokens as the device does at once.

mod log_probabilities;
mod pass;
mod plan;
mod warm_up;

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use burn::tensor::{Int, Tensor};
use fireclay_kernels::{Backend, Download, SampledRow, SampledRows, Sampling, TokenCounts};
use fireclay_model::{Cache, RowId, Transformer, TransformerConfig};

use self::log_probabilities::PromptLogProbabilities;
use crate::failure::Failure;

/// Steps of which the tokens are read together, at the most, where reading makes the device wait for the host.
const READ_STEPS: usize = 16;
/// Time between two reads, at the least but for [`READ_STEPS`]: what a reader does not notice.
const READ_INTERVAL: Duration = Duration::from_millis(25);
/// Tokens that sequences are given before the next look at what else is to be done, at the most.
const MAX_STEPS: usize = 16;
/// Of the sequences that are written at a time, the share that may be read ahead of their turn: one in so many.
const PREFILL_AHEAD: usize = 4;
/// The most of the likeliest tokens whose probabilities can be asked for.
pub const MAX_TOP_LOGPROBS: usize = 20;

/// What a scheduler may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerOptions {
    /// Sequences that are written at a time.
    pub rows: usize,
    /// Tokens of one step, prompts and sequences together.
    pub step_tokens: usize,
    /// Tokens that the cache holds.
    pub cache_tokens: usize,
}

/// A sequence to be written.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// What it goes on from: one token at least.
    pub prompt: Vec<u32>,
    /// Tokens to write at the most: one at least.
    pub max_tokens: usize,
    /// How they are drawn.
    pub sampling: Sampling,
    /// Tokens that end it.
    pub stop_tokens: Vec<u32>,
    /// What is added to the logits of some tokens.
    pub biases: Vec<(u32, f32)>,
    /// Asks for the log-probability of each token, and for so many of the likeliest in its place.
    pub top_logprobs: Option<usize>,
    /// Asks for the log-probabilities of the prompt's own tokens, too, and for so many of the
    /// likeliest in their places.
    pub prompt_top_logprobs: Option<usize>,
    /// Whose it is. Where pages run out, the client that has most of them gives some up.
    pub client: u64,
}

impl Request {
    /// A request of the likeliest tokens.
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

/// Which tokens a sequence may go on with, as a grammar has it.
pub trait TokenFilter: Send {
    /// The tokens that may be next, a bit for each of the vocabulary, 32 in a word, the lowest first.
    ///
    /// # Errors
    /// If it cannot say; the sequence ends then.
    fn allowed(&mut self) -> Result<Vec<u32>, Failure>;

    /// Takes the next token; whether the sequence is complete with it.
    ///
    /// # Errors
    /// If it cannot be followed; the sequence ends then.
    fn push(&mut self, token: u32) -> Result<bool, Failure>;
}

/// Names a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(u64);

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// By a token that ends it, its last one.
    End,
    /// Its filter has it complete; the last token is a part of it.
    Complete,
    /// It has as many tokens as were asked for.
    Length,
    /// Its logits are not numbers.
    NotANumber,
    /// Its filter cannot say what may follow.
    Filter,
}

/// A token of a sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct OutputToken {
    /// The token.
    pub token: u32,
    /// Its log-probability by the model, in nats, before temperature, cuts, biases and penalties, if it was asked for.
    pub log_probability: Option<f32>,
    /// The likeliest tokens in its place and their log-probabilities, the likeliest first.
    pub top_logprobs: Vec<(u32, f32)>,
}

impl OutputToken {
    /// A token of no known probability.
    fn plain(token: u32) -> Self {
        Self { token, log_probability: None, top_logprobs: Vec::new() }
    }

    /// A token and the `count` likeliest in its place, all of which `known` begins with.
    fn of(known: &[(u32, f32)], count: usize) -> Self {
        let Some(((token, own), others)) = known.split_first() else { return Self::plain(0) };
        Self { token: *token, log_probability: Some(*own), top_logprobs: others.iter().take(count).copied().collect() }
    }
}

/// What became of a request since it was asked before.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestOutput {
    /// Which request.
    pub id: RequestId,
    /// More tokens of its prompt, where their log-probabilities are asked for; the first of all has
    /// none.
    pub prompt: Vec<OutputToken>,
    /// Its new tokens.
    pub tokens: Vec<OutputToken>,
    /// Tokens of its prompt that were in the cache already, with the first of its tokens.
    pub cached: Option<usize>,
    /// Why it ended, if it did: nothing more comes then.
    pub finish: Option<Finish>,
}

impl RequestOutput {
    fn nothing(id: RequestId) -> Self {
        Self { id, prompt: Vec::new(), tokens: Vec::new(), cached: None, finish: None }
    }
}

/// How much there is to do, and what it takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests that have not begun.
    pub waiting: usize,
    /// Those whose prompts are being read, or were, and wait for their turn.
    pub prefilling: usize,
    /// Those that are being written.
    pub decoding: usize,
    /// Pages of the cache.
    pub pages: usize,
    /// Pages that none of them has.
    pub free_pages: usize,
    /// Tokens whose keys and values are in the pages that they have.
    pub tokens: usize,
    /// How often a sequence gave up its pages for others so far, to be read again.
    pub preemptions: usize,
}

/// A request on its way.
struct Sequence {
    id: RequestId,
    /// Its place in line, which a pause takes from it.
    arrival: u64,
    request: Request,
    /// The prompt, and the tokens behind it that were read from the device.
    tokens: Vec<u32>,
    /// Tokens drawn behind the prompt; those beyond `tokens` are still on the device.
    drawn: usize,
    /// Where in `tokens` its row of the cache begins.
    begin: usize,
    row: Option<RowId>,
    /// Its line of counts.
    line: Option<usize>,
    /// Which tokens it may go on with, if not all.
    filter: Option<Box<dyn TokenFilter>>,
    /// How often it went on from its own end.
    slides: u64,
    /// Tokens of its prompt that the cache had when it first got a row; told with its first token.
    cached: Option<usize>,
    was_admitted: bool,
    /// Tokens of the prompt of which log-probabilities are made, if they are asked for.
    prompt_known: usize,
    /// Where its last token is among those that the last step drew, if it was: the next step reads it there.
    drawn_at: Option<usize>,
    /// Tokens that it reads in this step.
    scheduled: usize,
    /// Whether it is its turn: if not, its last token is not read yet.
    has_slot: bool,
    finished: bool,
}

impl Sequence {
    fn prompt_length(&self) -> usize {
        self.request.prompt.len()
    }

    /// Whether nothing more is to be drawn.
    fn is_complete(&self) -> bool {
        self.finished || self.drawn >= self.request.max_tokens
    }

    /// Whether log-probabilities of its prompt are asked for, and not all of them made.
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

/// Tokens that end each of some sequences, and the same on the device, `[sequences, most]`.
struct StopTokens<B: Backend> {
    of_sequences: Vec<Vec<u32>>,
    on_device: Tensor<B, 2, Int>,
}

/// Tokens on their way from the device.
struct Drawn {
    tokens: Download,
    /// How many come one after another of each.
    steps: usize,
    /// Whose they are, by their place in each step.
    sequences: Vec<(usize, RequestId)>,
    /// The tokens of [`LogProbabilities`](log_probabilities::LogProbabilities), and their values.
    log_probabilities: Option<(Download, Download)>,
    prompts: Vec<PromptLogProbabilities>,
}

impl Drawn {
    /// With all that it waits for begun.
    fn begin(self) -> Self {
        let log_probabilities = self.log_probabilities.map(|(tokens, values)| (tokens.begin(), values.begin()));
        Self { tokens: self.tokens.begin(), log_probabilities, ..self }
    }
}

/// Tokens from which a sequence goes on that has filled the context: half of it, or what the attention's window sees, if that is
/// more. None where attention sees all of the context.
pub(super) fn kept_tokens(config: &TransformerConfig) -> Option<usize> {
    let window = config.sliding_window.filter(|window| *window < config.context_length)?;
    Some(window.max(config.context_length / 2))
}

/// Writes many sequences at once.
pub struct Scheduler<B: Backend> {
    options: SchedulerOptions,
    cache: Cache<B>,
    context: usize,
    vocabulary: usize,
    /// Tokens that a sequence goes on from which has filled the context, where the model has a window.
    kept: Option<usize>,
    waiting: VecDeque<Sequence>,
    /// Those that have rows, in the order in which they came.
    running: Vec<Sequence>,
    /// Those that wait until they are resumed.
    paused: Vec<Sequence>,
    requests: u64,
    arrivals: u64,
    /// What the last step drew, and how.
    drawn: Option<Tensor<B, 1, Int>>,
    sampled: Option<(Vec<SampledRow>, SampledRows<B>)>,
    /// What the last steps ahead had.
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
    /// A scheduler for a model, whose cache is allocated here.
    ///
    /// # Panics
    /// If the model looks ahead, as encoders do, or an option is zero.
    pub fn new(model: &Transformer<B>, options: SchedulerOptions, device: B::Device) -> Self {
        let SchedulerOptions { rows, step_tokens, cache_tokens } = options;
        assert!(rows > 0 && step_tokens > 0 && cache_tokens > 0, "a scheduler of nothing: {options:?}");
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

    /// Sequences decoded at a time.
    pub fn rows(&self) -> usize {
        self.options.rows
    }

    /// Sequences that there is work for at a time: those that are written, and those that are read ahead of their turn.
    pub fn max_active(&self) -> usize {
        self.options.rows + self.options.rows / PREFILL_AHEAD
    }

    /// Adds a request, behind those that wait.
    ///
    /// # Errors
    /// If it asks for nothing, holds tokens that the vocabulary lacks, draws by numbers that make no distribution, or can never
    /// fit the context or the cache.
    pub fn add(&mut self, request: Request) -> Result<RequestId, Failure> {
        self.add_filtered(request, None)
    }

    /// Adds a request of which each token is one that `filter` allows. While there are such sequences, tokens are read at each step.
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
            return Err(Failure::usage("a request needs a prompt of one token at least, and asks for one at least"));
        }
        let tokens = prompt.iter().chain(biases.iter().map(|(token, _)| token));
        if let Some(token) = tokens.max().filter(|token| **token as usize >= self.vocabulary) {
            let last = self.vocabulary - 1;
            return Err(Failure::usage(format!("token {token} is none of the model's, which are 0 to {last}")));
        }
        if top_logprobs.max(prompt_top_logprobs).is_some_and(|count| count > MAX_TOP_LOGPROBS) {
            return Err(Failure::usage(format!(
                "{MAX_TOP_LOGPROBS} is the maximum number of top log-probabilities per token"
            )));
        }
        if room == 0 || (*max_tokens > room && self.kept.is_none()) {
            return Err(Failure::usage(format!(
                "the prompt has {length} tokens and {max_tokens} are to follow, but the model's context is {}",
                self.context
            )));
        }
        let (pages, _) = self.cache.pages();
        let most = (length + max_tokens).min(self.context);
        if most.div_ceil(self.cache.page_tokens()) > pages {
            let held = pages * self.cache.page_tokens();
            return Err(Failure::usage(format!(
                "the prompt has {length} tokens and {max_tokens} are to follow, but the cache holds {held}"
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

    /// The next place in line.
    fn arrive(&mut self) -> u64 {
        self.arrivals += 1;
        self.arrivals
    }

    /// Preempts a request until it is [resumed](Self::resume): it gives up its row and pages, and
    /// keeps its tokens. Whether it did: one that is complete by now, or is not there, does not.
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
        // What it has drawn has to be known.
        self.read(0)?;
        let Some(at) = self.running.iter().position(|sequence| sequence.id == id) else { return Ok(false) };
        let sequence = self.running.remove(at);
        let sequence = self.release(sequence);
        self.paused.push(sequence);
        self.preemptions += 1;
        Ok(true)
    }

    /// Puts a paused request behind those that wait.
    pub fn resume(&mut self, id: RequestId) {
        if let Some(at) = self.paused.iter().position(|sequence| sequence.id == id) {
            let sequence = Sequence { arrival: self.arrive(), ..self.paused.remove(at) };
            self.waiting.push_back(sequence);
        }
    }

    /// Ends a request now and drops its output that was not taken. Others are not touched.
    pub fn cancel(&mut self, id: RequestId) {
        self.waiting.retain(|sequence| sequence.id != id);
        self.paused.retain(|sequence| sequence.id != id);
        if let Some(at) = self.running.iter().position(|sequence| sequence.id == id) {
            let sequence = self.running.remove(at);
            self.release(sequence);
        }
        self.ready.remove(&id);
    }

    /// Whether there is nothing to do and nothing to take, but for requests that are paused.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty() && self.in_flight.is_empty() && self.ready.is_empty()
    }

    /// What there is to do.
    pub fn load(&self) -> Load {
        let (pages, free_pages) = self.cache.pages();
        let decoding = self.running.iter().filter(|sequence| sequence.drawn_at.is_some()).count();
        let (waiting, prefilling) = (self.waiting.len(), self.running.len() - decoding);
        let tokens = self.running.iter().filter_map(|sequence| Some(self.cache.length(sequence.row?))).sum();
        Load { waiting, prefilling, decoding, pages, free_pages, tokens, preemptions: self.preemptions }
    }

    /// What became of requests, in the order in which they were added: what was read from the device by now.
    pub fn take(&mut self) -> Vec<RequestOutput> {
        let mut written: Vec<RequestOutput> = self.ready.drain().map(|(_, written)| written).collect();
        written.sort_by_key(|written| written.id);
        written
    }

    /// One pass of the model, if there is something to do, and a look at what was drawn, if it is time.
    ///
    /// # Errors
    /// If the device fails.
    pub fn step(&mut self, model: &Transformer<B>) -> Result<(), Failure> {
        // A filter has to know all tokens before the next.
        if !self.in_flight.is_empty() && self.running.iter().any(|sequence| sequence.filter.is_some()) {
            self.read(0)?;
        }
        self.slide()?;
        let prefills = self.plan()?;
        let decoding: Vec<usize> = (0..self.running.len()).filter(|at| self.decodes(&self.running[*at])).collect();
        let first_tokens = decoding.iter().all(|at| self.running[*at].drawn_at.is_none());
        if !prefills.is_empty() || !decoding.is_empty() {
            self.pass(model, &decoding, &prefills);
        }
        // A sequence that has all its tokens holds up whoever waits for its row.
        let complete = self.running.iter().any(|sequence| sequence.is_complete());
        let waits = self.running.iter().any(|sequence| !sequence.is_complete());
        if B::downloads_at_once() {
            // The device has the last step to do meanwhile; but nobody waits longer for a first token than that takes.
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
