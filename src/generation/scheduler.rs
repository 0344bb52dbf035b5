//! Many texts at once: requests come and go at any step, and share one cache.
//!
//! ```text
//! add -> waiting -> reading its prompt, in chunks -> writing, a token a step -> finished
//!           ^                                           |
//!           '----- pages run out: the last that came ---'   it is read again, with what it has written
//! ```
//!
//! A step is one pass of the model: a token of every text that is being written, and as many tokens of prompts beside them as
//! there is room for (Yu et al., 2022, "Orca"; Agrawal et al., 2024, "Sarathi-Serve"). Drawn tokens feed the next step on the
//! device, and are read some steps later.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use burn::tensor::activation::log_softmax;
use burn::tensor::{Int, Tensor, TensorData, Transaction};
use fireclay_kernels::recorder::read_back;
use fireclay_kernels::{Backend, SampledRow, SampledRows, Sampling, TokenCounts};
use fireclay_model::{Cache, RowId, Transformer};

use crate::failure::Failure;

/// Steps of which the tokens are read together, at the most: reading makes the device wait for the host.
const READ_STEPS: usize = 16;
/// Time between two reads, at the least but for [`READ_STEPS`]: what a reader does not notice.
const READ_INTERVAL: Duration = Duration::from_millis(25);
/// The most of the likeliest tokens whose probabilities can be asked for.
pub const MOST_LIKELIEST: usize = 20;

/// What a scheduler may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerOptions {
    /// Texts that are read or written at a time.
    pub rows: usize,
    /// Tokens of one step, prompts and texts together.
    pub step_tokens: usize,
    /// Tokens that the cache holds.
    pub cache_tokens: usize,
}

/// A text to be written.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// What it goes on from: one token at least.
    pub prompt: Vec<u32>,
    /// Tokens to write at the most: one at least.
    pub max_tokens: usize,
    /// How they are drawn.
    pub sampling: Sampling,
    /// Tokens that end it.
    pub ends: Vec<u32>,
    /// What is added to the logits of some tokens.
    pub biases: Vec<(u32, f32)>,
    /// Asks for the log-probability of each token, and for so many of the likeliest in its place.
    pub likeliest: Option<usize>,
}

impl Request {
    /// A request of the likeliest tokens.
    pub fn new(prompt: Vec<u32>, max_tokens: usize) -> Self {
        let sampling = Sampling::greedy();
        Self { prompt, max_tokens, sampling, ends: Vec::new(), biases: Vec::new(), likeliest: None }
    }
}

/// Names a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(u64);

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// By a token that ends it, its last one.
    End,
    /// It has as many tokens as were asked for.
    Length,
    /// Its logits are not numbers.
    NotANumber,
}

/// A token of a text.
#[derive(Clone, Debug, PartialEq)]
pub struct WrittenToken {
    /// The token.
    pub token: u32,
    /// Its log-probability by the model, in nats, before temperature, cuts, biases and penalties, if it was asked for.
    pub log_probability: Option<f32>,
    /// The likeliest tokens in its place and their log-probabilities, the likeliest first.
    pub likeliest: Vec<(u32, f32)>,
}

/// What became of a request since it was asked before.
#[derive(Clone, Debug, PartialEq)]
pub struct Written {
    /// Which request.
    pub id: RequestId,
    /// Its new tokens.
    pub tokens: Vec<WrittenToken>,
    /// Why it ended, if it did: nothing more comes then.
    pub finish: Option<Finish>,
}

/// How much there is to do, and what it takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests that have not begun.
    pub waiting: usize,
    /// Those whose prompts are being read.
    pub reading: usize,
    /// Those that are being written.
    pub writing: usize,
    /// Pages of the cache.
    pub pages: usize,
    /// Pages that none of them has.
    pub pages_left: usize,
    /// How often a text gave up its pages for others so far, to be read again.
    pub preemptions: usize,
}

/// A request on its way.
struct Text {
    id: RequestId,
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
    /// How often it went on from its own end.
    slides: u64,
    /// Whether its last token was drawn in the last step, so that it is read in the next.
    writing: bool,
    /// Tokens that it reads in this step.
    reads: usize,
    finished: bool,
}

impl Text {
    fn prompt_length(&self) -> usize {
        self.request.prompt.len()
    }

    /// Whether nothing more is to be drawn.
    fn is_complete(&self) -> bool {
        self.finished || self.drawn >= self.request.max_tokens
    }

    fn needs_line(&self) -> bool {
        !self.request.sampling.penalties.are_none() || !self.request.biases.is_empty()
    }

    fn sampling(&self) -> Sampling {
        let Sampling { stream, .. } = self.request.sampling;
        let stream =
            if self.slides == 0 { stream } else { Sampling::greedy().with_seed(stream.into(), self.slides).stream };
        Sampling { stream, ..self.request.sampling }
    }
}

/// Tokens on their way from the device.
struct Drawn<B: Backend> {
    tokens: Tensor<B, 1, Int>,
    /// Whose they are, by their place in `tokens`.
    texts: Vec<(usize, RequestId)>,
    probabilities: Option<Probabilities<B>>,
}

/// Log-probabilities `[rows, 1]` of the drawn tokens, and the likeliest tokens with theirs, `[rows, count]`.
struct Probabilities<B: Backend> {
    drawn: Tensor<B, 2>,
    likeliest: Tensor<B, 2, Int>,
    theirs: Tensor<B, 2>,
    count: usize,
}

/// Writes many texts at once.
pub struct Scheduler<B: Backend> {
    options: SchedulerOptions,
    cache: Cache<B>,
    context: usize,
    vocabulary: usize,
    /// Tokens that a text goes on from which has filled the context, where the model has a window.
    kept: Option<usize>,
    waiting: VecDeque<Text>,
    /// Those that have rows, in the order in which they came.
    running: Vec<Text>,
    requests: u64,
    /// The rows of the last step with what they drew, and how.
    last: Option<(Vec<RequestId>, Tensor<B, 1, Int>)>,
    sampled: Option<(Vec<SampledRow>, SampledRows<B>)>,
    counts: Option<TokenCounts<B>>,
    free_lines: Vec<usize>,
    on_the_way: Vec<Drawn<B>>,
    last_read: Instant,
    ready: HashMap<RequestId, Written>,
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
        // Half of the context, or what the attention's window sees, if that is more.
        let kept = config.sliding_window.filter(|window| *window < context).map(|window| window.max(context / 2));
        Self {
            options,
            cache: model.cache(cache_tokens),
            context,
            vocabulary: config.vocab_size,
            kept,
            waiting: VecDeque::new(),
            running: Vec::new(),
            requests: 0,
            last: None,
            sampled: None,
            counts: None,
            free_lines: Vec::new(),
            on_the_way: Vec::new(),
            last_read: Instant::now(),
            ready: HashMap::new(),
            preemptions: 0,
            device,
        }
    }

    /// Adds a request, behind those that wait.
    ///
    /// # Errors
    /// If it asks for nothing, holds tokens that the vocabulary lacks, or can never fit the context or the cache.
    pub fn add(&mut self, request: Request) -> Result<RequestId, Failure> {
        let Request { prompt, max_tokens, biases, likeliest, .. } = &request;
        let (length, room) = (prompt.len(), self.context.saturating_sub(prompt.len()));
        if length == 0 || *max_tokens == 0 {
            return Err(Failure::usage("a request needs a prompt of one token at least, and asks for one at least"));
        }
        let tokens = prompt.iter().chain(biases.iter().map(|(token, _)| token));
        if let Some(token) = tokens.max().filter(|token| **token as usize >= self.vocabulary) {
            let last = self.vocabulary - 1;
            return Err(Failure::usage(format!("token {token} is none of the model's, which are 0 to {last}")));
        }
        if likeliest.is_some_and(|count| count > MOST_LIKELIEST) {
            return Err(Failure::usage(format!("{MOST_LIKELIEST} of the likeliest tokens can be asked for, not more")));
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
        let text = Text {
            id,
            request,
            tokens,
            drawn: 0,
            begin: 0,
            row: None,
            line: None,
            slides: 0,
            writing: false,
            reads: 0,
            finished: false,
        };
        self.waiting.push_back(text);
        Ok(id)
    }

    /// Ends a request now; what was not taken of it is gone. Others are not touched.
    pub fn cancel(&mut self, id: RequestId) {
        self.waiting.retain(|text| text.id != id);
        if let Some(at) = self.running.iter().position(|text| text.id == id) {
            let text = self.running.remove(at);
            self.let_go(text);
        }
        self.ready.remove(&id);
    }

    /// Whether there is nothing to do and nothing to take.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty() && self.on_the_way.is_empty() && self.ready.is_empty()
    }

    /// What there is to do.
    pub fn load(&self) -> Load {
        let (pages, pages_left) = self.cache.pages();
        let writing = self.running.iter().filter(|text| text.writing).count();
        let (waiting, reading) = (self.waiting.len(), self.running.len() - writing);
        Load { waiting, reading, writing, pages, pages_left, preemptions: self.preemptions }
    }

    /// What became of requests, in the order in which they were added: what was read from the device by now.
    pub fn take(&mut self) -> Vec<Written> {
        let mut written: Vec<Written> = self.ready.drain().map(|(_, written)| written).collect();
        written.sort_by_key(|written| written.id);
        written
    }

    /// One pass of the model, if there is something to do, and a look at what was drawn, if it is time.
    ///
    /// # Errors
    /// If the device fails.
    pub fn step(&mut self, model: &Transformer<B>) -> Result<(), Failure> {
        self.slide()?;
        let reads = self.plan()?;
        let writing: Vec<usize> = (0..self.running.len())
            .filter(|at| self.running[*at].writing && !self.running[*at].is_complete())
            .collect();
        let first_tokens = !reads.is_empty() && writing.is_empty();
        if !reads.is_empty() || !writing.is_empty() {
            self.pass(model, &writing, &reads);
        }
        let waits = self.running.iter().any(|text| !text.is_complete());
        let due =
            first_tokens || !waits || self.on_the_way.len() >= READ_STEPS || self.last_read.elapsed() >= READ_INTERVAL;
        if due {
            self.read()?;
        }
        Ok(())
    }

    /// Texts that fill the context go on from their own ends: these are read anew.
    fn slide(&mut self) -> Result<(), Failure> {
        let Some(kept) = self.kept else { return Ok(()) };
        let full = |this: &Self, text: &Text| {
            text.row.is_some_and(|row| this.cache.length(row) == this.context) && !text.is_complete()
        };
        if !self.running.iter().any(|text| full(self, text)) {
            return Ok(());
        }
        // Their last tokens have to be known.
        self.read()?;
        for at in 0..self.running.len() {
            if full(self, &self.running[at]) {
                let text = &mut self.running[at];
                text.begin = text.tokens.len().saturating_sub(kept);
                text.slides += 1;
                text.writing = false;
                let row = text.row.replace(self.cache.add_row());
                row.into_iter().for_each(|row| self.cache.remove_row(row));
            }
        }
        Ok(())
    }

    /// Which texts read how many tokens in this step, with pages for all that the step reads and writes.
    fn plan(&mut self) -> Result<Vec<(usize, usize)>, Failure> {
        // Texts that are written come first, a token each.
        let writes = |text: &Text| text.writing && !text.is_complete();
        self.running.iter_mut().for_each(|text| text.reads = usize::from(writes(text)));
        let mut at = 0;
        while at < self.running.len() {
            let text = &self.running[at];
            let Some(row) = text.row.filter(|_| writes(text)) else {
                at += 1;
                continue;
            };
            let id = text.id;
            while self.cache.reserve(row, 1).is_err() {
                if !self.release() {
                    self.preempt()?;
                }
                if !self.running.iter().any(|text| text.id == id) {
                    break;
                }
            }
            // One that came before may be gone.
            at = self.running.iter().position(|text| text.id >= id).unwrap_or(self.running.len());
            at += usize::from(self.running.get(at).is_some_and(|text| text.id == id));
        }
        let writing = self.running.iter().filter(|text| writes(text)).count();
        let mut budget = self.options.step_tokens.saturating_sub(writing).max(usize::from(writing == 0));
        let mut reads = Vec::new();
        for at in 0..self.running.len() {
            if budget == 0 || self.running[at].writing || self.running[at].is_complete() {
                continue;
            }
            if let Some(count) = self.readable(at, budget) {
                self.running[at].reads = count;
                reads.push((at, count));
                budget -= count;
            }
        }
        while budget > 0 && self.running.len() < self.options.rows && !self.waiting.is_empty() {
            if self.cache.pages().1 == 0 && !self.release() {
                break;
            }
            self.admit();
            let at = self.running.len() - 1;
            match self.readable(at, budget) {
                Some(count) => {
                    self.running[at].reads = count;
                    reads.push((at, count));
                    budget -= count;
                }
                None => {
                    // It waits for pages, at the head of the others.
                    if let Some(text) = self.running.pop() {
                        let text = self.taken_back(text);
                        self.waiting.push_front(text);
                    }
                    break;
                }
            }
        }
        // Where nothing moves, two texts that are being read may have all pages: one gives way.
        if reads.is_empty() && writing == 0 && self.running.iter().any(|text| !text.is_complete()) {
            self.preempt()?;
            return self.plan();
        }
        Ok(reads)
    }

    /// Tokens that a text can read now, up to `budget`, with pages for them.
    fn readable(&mut self, at: usize, budget: usize) -> Option<usize> {
        let text = &self.running[at];
        let row = text.row?;
        let left = text.tokens.len().saturating_sub(text.begin + self.cache.length(row));
        let count = left.min(budget);
        // All that it will ever need, where there is room: its pages are sent to the device once then.
        let behind =
            (text.request.max_tokens - text.drawn).min(self.context.saturating_sub(text.tokens.len() - text.begin));
        let (_, pages_left) = self.cache.pages();
        let ahead = (left + behind).div_ceil(self.cache.page_tokens()) + 1;
        if self.waiting.is_empty() && 2 * ahead <= pages_left && self.cache.reserve(row, left + behind).is_ok() {
            return Some(count);
        }
        if self.cache.reserve(row, count).is_ok() || (self.release() && self.cache.reserve(row, count).is_ok()) {
            return Some(count);
        }
        // As many as there are pages for.
        let (_, pages_left) = self.cache.pages();
        let room = self.cache.pages_of(row) + pages_left;
        let fits = (room * self.cache.page_tokens()).saturating_sub(self.cache.length(row)).min(count);
        (fits > 0 && self.cache.reserve(row, fits).is_ok()).then_some(fits)
    }

    /// Gives up pages that texts took ahead; whether there were any.
    fn release(&mut self) -> bool {
        let (_, before) = self.cache.pages();
        let rows = self.running.iter().filter_map(|text| Some((text.row?, text.reads)));
        rows.for_each(|(row, reads)| self.cache.release(row, reads));
        self.cache.pages().1 > before
    }

    /// The first of those that wait gets a row, with as much of its tokens as the cache has.
    fn admit(&mut self) {
        let Some(mut text) = self.waiting.pop_front() else { return };
        text.row = Some(self.cache.add_row_of(&text.tokens[text.begin..]));
        if text.needs_line() {
            let line = self.free_line();
            if let Some(counts) = &mut self.counts {
                let (prompt, written) = text.tokens.split_at(text.prompt_length());
                counts.begin(line, prompt, written, &text.request.biases);
            }
            text.line = Some(line);
        }
        self.running.push(text);
    }

    /// A line of counts that no text has.
    fn free_line(&mut self) -> usize {
        if let Some(line) = self.free_lines.pop() {
            return line;
        }
        let lines = self.counts.as_ref().map_or(0, |counts| counts.prompt.dims()[0]);
        let more = TokenCounts::new(lines.max(4), self.vocabulary, &self.device);
        let all = match self.counts.take() {
            Some(counts) => TokenCounts {
                prompt: Tensor::cat(vec![counts.prompt, more.prompt], 0),
                written: Tensor::cat(vec![counts.written, more.written], 0),
                bias: Tensor::cat(vec![counts.bias, more.bias], 0),
            },
            None => more,
        };
        self.free_lines.extend((lines..all.prompt.dims()[0]).rev());
        self.counts = Some(all);
        self.free_lines.pop().unwrap_or(lines)
    }

    /// The text that came last gives up its pages, and waits to be read again.
    fn preempt(&mut self) -> Result<(), Failure> {
        // What it has drawn has to be known.
        self.read()?;
        if let Some(text) = self.running.pop() {
            self.preemptions += 1;
            let text = self.taken_back(text);
            self.waiting.push_front(text);
        }
        Ok(())
    }

    /// A text without row and line.
    fn taken_back(&mut self, mut text: Text) -> Text {
        if let Some(row) = text.row.take() {
            self.cache.make_known(row, &text.tokens[text.begin..]);
            self.cache.remove_row(row);
        }
        self.free_lines.extend(text.line.take());
        text.writing = false;
        text
    }

    fn let_go(&mut self, text: Text) {
        self.taken_back(text);
    }

    /// Runs the model over one token of each text that is `writing`, and over tokens of those that are being read.
    fn pass(&mut self, model: &Transformer<B>, writing: &[usize], reads: &[(usize, usize)]) {
        let ids: Vec<RequestId> = writing.iter().map(|at| self.running[*at].id).collect();
        let rows: Vec<RowId> = writing.iter().filter_map(|at| self.running[*at].row).collect();
        let decode = match &self.last {
            Some((last, drawn)) if *last == ids => Some(drawn.clone()),
            Some((last, drawn)) if !ids.is_empty() => {
                let places = ids.iter().map(|id| last.iter().position(|other| other == id).unwrap_or(0) as i32);
                let places = TensorData::new(places.collect::<Vec<i32>>(), [ids.len()]);
                Some(drawn.clone().gather(0, Tensor::from_data(places, &self.device)))
            }
            _ => None,
        };
        let prefill: Vec<(RowId, &[u32])> = reads
            .iter()
            .filter_map(|(at, count)| {
                let text = &self.running[*at];
                let row = text.row?;
                let from = text.begin + self.cache.length(row);
                Some((row, &text.tokens[from..from + count]))
            })
            .collect();
        let hidden = model.step(decode.as_ref().map(|tokens| (tokens.clone(), &rows[..])), &prefill, &mut self.cache);

        // What a prompt's chunks draw before its end is not used.
        let mut likeliest = None;
        let mut sampled: Vec<SampledRow> = Vec::new();
        let mut texts: Vec<(usize, RequestId)> = Vec::new();
        let places: Vec<usize> = writing.iter().chain(reads.iter().map(|(at, _)| at)).copied().collect();
        for (place, at) in places.iter().enumerate() {
            let text = &mut self.running[*at];
            let read = text.row.map_or(0, |row| text.begin + self.cache.length(row));
            if text.writing || read >= text.tokens.len() {
                text.writing = true;
                text.drawn += 1;
                likeliest = likeliest.max(text.request.likeliest);
                sampled.push(SampledRow { sampling: text.sampling(), line: text.line });
                texts.push((place, text.id));
            } else {
                sampled.push(Sampling::greedy().into());
            }
        }
        let rows = match self.sampled.take() {
            Some((same, rows)) if same == sampled => rows,
            _ => SampledRows::new(&sampled, &self.device),
        };
        let counts = self.counts.as_mut();
        let (tokens, probabilities) = match likeliest {
            Some(count) => {
                let (tokens, logits) = model.sample_logits(hidden, &rows, counts, &self.cache);
                let probabilities = Probabilities::of(logits, tokens.clone(), count);
                (tokens, Some(probabilities))
            }
            None => (model.sample(hidden, &rows, counts, &self.cache), None),
        };
        self.sampled = Some((sampled, rows));
        self.last = Some((places.iter().map(|at| self.running[*at].id).collect(), tokens.clone()));
        // Prompts that are read are there for others.
        for (at, _) in reads {
            let text = &self.running[*at];
            if let Some(row) = text.row.filter(|_| text.begin == 0) {
                self.cache.make_known(row, &text.tokens);
            }
        }
        if !texts.is_empty() {
            self.on_the_way.push(Drawn { tokens, texts, probabilities });
        }
    }

    /// Reads the tokens of some steps at once, and gives them to the texts that are not finished.
    fn read(&mut self) -> Result<(), Failure> {
        self.last_read = Instant::now();
        let drawn = std::mem::take(&mut self.on_the_way);
        if !drawn.is_empty() {
            let mut all = Transaction::<B>::default();
            for Drawn { tokens, probabilities, .. } in &drawn {
                all = all.register(tokens.clone());
                if let Some(Probabilities { drawn, likeliest, theirs, count }) = probabilities {
                    all = all.register(drawn.clone());
                    if *count > 0 {
                        all = all.register(likeliest.clone()).register(theirs.clone());
                    }
                }
            }
            let read = all.try_execute().inspect(|read| read_back(read.iter().map(|data| data.bytes.len()).sum()));
            let read = read.map_err(|error| Failure::new(format!("the device failed: {error:?}")))?;
            let mut read = read.into_iter();
            let integers = |read: &mut std::vec::IntoIter<TensorData>| -> Vec<i64> {
                read.next().map(|data| data.iter::<i64>().collect()).unwrap_or_default()
            };
            let floats = |read: &mut std::vec::IntoIter<TensorData>| -> Vec<f32> {
                read.next().map(|data| data.iter::<f32>().collect()).unwrap_or_default()
            };
            for Drawn { texts, probabilities, .. } in drawn {
                let tokens = integers(&mut read);
                let count = probabilities.as_ref().map(|probabilities| probabilities.count);
                let own = if count.is_some() { floats(&mut read) } else { Vec::new() };
                let (likeliest, theirs) = match count {
                    Some(1..) => (integers(&mut read), floats(&mut read)),
                    _ => (Vec::new(), Vec::new()),
                };
                for (place, id) in texts {
                    let all = count.unwrap_or(0);
                    let token = tokens.get(place).copied().unwrap_or(-1);
                    let others = likeliest.iter().zip(&theirs).skip(place * all).take(all);
                    self.push(
                        id,
                        token,
                        own.get(place).copied(),
                        others.map(|(token, theirs)| (*token as u32, *theirs)),
                    );
                }
            }
        }
        // Those that are finished give up their rows.
        let (gone, running) = std::mem::take(&mut self.running).into_iter().partition(|text: &Text| text.finished);
        self.running = running;
        let gone: Vec<Text> = gone;
        gone.into_iter().for_each(|text| self.let_go(text));
        Ok(())
    }

    /// One more token of a text, unless it is finished; -1 is what the device draws from logits that are NaN.
    fn push(
        &mut self,
        id: RequestId,
        token: i64,
        log_probability: Option<f32>,
        likeliest: impl Iterator<Item = (u32, f32)>,
    ) {
        let Some(text) = self.running.iter_mut().find(|text| text.id == id && !text.finished) else { return };
        let ready = self.ready.entry(id).or_insert_with(|| Written { id, tokens: Vec::new(), finish: None });
        match u32::try_from(token) {
            Ok(token) => {
                text.tokens.push(token);
                let asked = text.request.likeliest;
                let log_probability = log_probability.filter(|_| asked.is_some());
                let likeliest = likeliest.take(asked.unwrap_or(0)).collect();
                ready.tokens.push(WrittenToken { token, log_probability, likeliest });
                if text.request.ends.contains(&token) {
                    ready.finish = Some(Finish::End);
                } else if text.tokens.len() - text.prompt_length() >= text.request.max_tokens {
                    ready.finish = Some(Finish::Length);
                }
            }
            Err(_) => ready.finish = Some(Finish::NotANumber),
        }
        text.finished = ready.finish.is_some();
    }
}

impl<B: Backend> Probabilities<B> {
    /// Of drawn tokens `[rows]` and the `count` likeliest by logits `[rows, vocabulary]`.
    fn of(logits: Tensor<B, 2>, drawn: Tensor<B, 1, Int>, count: usize) -> Self {
        let [rows, vocabulary] = logits.dims();
        let all = log_softmax(logits, 1);
        let drawn = all.clone().gather(1, drawn.clamp(0, vocabulary as i64 - 1).reshape([rows, 1]));
        let (mut left, mut likeliest, mut theirs) = (all, Vec::new(), Vec::new());
        // One after another: there are few, and a sort would leave the device.
        for _ in 0..count.min(vocabulary) {
            let best = left.clone().argmax(1);
            theirs.push(left.clone().gather(1, best.clone()));
            let low = Tensor::full([rows, 1], f32::MIN, &left.device());
            let current = left.clone().gather(1, best.clone());
            left = left.scatter(1, best.clone(), low - current, burn::tensor::IndexingUpdateOp::Add);
            likeliest.push(best);
        }
        let count = likeliest.len();
        if count == 0 {
            let none = Tensor::zeros([rows, 1], &drawn.device());
            return Self { likeliest: none, theirs: drawn.clone(), drawn, count };
        }
        Self { drawn, likeliest: Tensor::cat(likeliest, 1), theirs: Tensor::cat(theirs, 1), count }
    }
}
