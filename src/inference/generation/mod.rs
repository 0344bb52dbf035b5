//! Text generation: encodes prompts, runs the [`scheduler`], and decodes its tokens.

pub mod scheduler;

use std::collections::{HashMap, VecDeque};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fireclay_datasets::Tokenizer;
use fireclay_kernels::{Backend, CacheDType, Penalties, Sampling};
use fireclay_model::{PAGE_TOKENS, Transformer};

use self::scheduler::{Finish, OutputToken, Request, RequestOutput, Scheduler, SchedulerOptions, kept_tokens};
use crate::backend::{OnBackend, RunContext};
use crate::failure::Failure;
use crate::inference::language_model::{LanguageModel, adapted};
use crate::model_folder::{ModelSource, assert_known, gguf_ends, tokenizer};
use crate::precision::{CachePrecision, Precision};

/// Stop tokens by name, where the tokenizer has them.
const END_TOKENS: [&str; 3] = ["<|endoftext|>", "<|im_end|>", "</s>"];

/// Below this temperature logits would overflow f32; it counts as zero, which is greedy.
pub(crate) const LEAST_TEMPERATURE: f64 = 1e-3;

/// Default maximum of sequences decoded concurrently: on a GPU, and on the CPU.
const ROWS: usize = 256;
const CPU_ROWS: usize = 16;
/// Default token budget of a step: on CUDA, which needs some ten milliseconds for it, and
/// elsewhere.
const CUDA_STEP_TOKENS: usize = 4096;
const STEP_TOKENS: usize = 2048;
/// Size limits of the cache in bytes, and of one layer's keys, since WGPU binds no more than 128
/// MiB on some devices. A cache for one sequence may exceed them.
const CACHE_BYTES: usize = 4 << 30;
const SLAB_BYTES: usize = 120 << 20;

/// Ends generation early when set.
pub type Interrupt = Arc<AtomicBool>;

/// Sampling and limits of generation.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationOptions {
    /// Maximum number of tokens to generate; `None` for what fits, up to 256.
    pub max_tokens: Option<usize>,
    /// Temperature; zero is greedy.
    pub temperature: f64,
    /// Top-k sampling.
    pub top_k: Option<usize>,
    /// Top-p sampling.
    pub top_p: Option<f64>,
    /// Min-p sampling: tokens need this share of the top token's probability.
    pub min_p: Option<f64>,
    /// Penalties of tokens that the sequence already has.
    pub penalties: Penalties,
    /// Generation stops before any of these strings.
    pub stop: Vec<String>,
    /// Random seed.
    pub seed: u64,
}

impl Default for GenerationOptions {
    fn default() -> Self {
        Self {
            max_tokens: None,
            temperature: 0.8,
            top_k: None,
            top_p: None,
            min_p: None,
            penalties: Penalties::default(),
            stop: Vec::new(),
            seed: 1337,
        }
    }
}

impl GenerationOptions {
    /// Checks the values.
    ///
    /// # Errors
    /// Names the value.
    pub fn validate(&self) -> Result<(), Failure> {
        if !(self.temperature as f32).is_finite() || self.temperature < 0.0 {
            let asked = self.temperature;
            return Err(Failure::usage(format!("--temperature {asked:e} must be 0 or above, and finite in f32")));
        }
        if self.top_k == Some(0) {
            return Err(Failure::usage("--top-k must be 1 or more"));
        }
        if let Some(top_p) = self.top_p.filter(|top_p| !(*top_p > 0.0 && *top_p <= 1.0)) {
            return Err(Failure::usage(format!("--top-p {top_p} must be above 0 and at most 1")));
        }
        if let Some(min_p) = self.min_p.filter(|min_p| !(0.0..=1.0).contains(min_p)) {
            return Err(Failure::usage(format!("--min-p {min_p} must be 0 to 1")));
        }
        let Penalties { repetition, presence, frequency } = self.penalties;
        if !((repetition as f32).is_finite() && repetition as f32 > 0.0) {
            return Err(Failure::usage(format!(
                "--repetition-penalty {repetition:e} must be above 0; 1 is no penalty"
            )));
        }
        if [presence, frequency].iter().any(|penalty| !(*penalty as f32).is_finite()) {
            return Err(Failure::usage("--presence-penalty and --frequency-penalty must be finite in f32"));
        }
        if self.max_tokens == Some(0) {
            return Err(Failure::usage("--max-tokens must be 1 or more"));
        }
        Ok(())
    }

    /// The sampling of sequence `number`, which selects its random stream.
    pub fn sampling(&self, number: u64) -> Sampling {
        Sampling::greedy()
            .with_temperature(if self.temperature < LEAST_TEMPERATURE { 0.0 } else { self.temperature })
            .with_seed(self.seed, number)
            .with_top_k(self.top_k)
            .with_top_p(self.top_p)
            .with_min_p(self.min_p)
            .with_penalties(self.penalties)
    }
}

/// An encoded prompt that fits the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prepared {
    pub(crate) tokens: Vec<u32>,
    pub(crate) max_tokens: usize,
    /// Its random stream; by default, its index among the prompts.
    pub(crate) draw: Option<u64>,
}

impl Prepared {
    /// Maximum tokens of prompt and output together.
    fn length(&self) -> usize {
        self.tokens.len() + self.max_tokens
    }
}

/// The result of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Generated {
    /// The generated text.
    pub text: String,
    /// Its tokens, including a stop token.
    pub tokens: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Time of prefill, with the first token.
    pub prefill: Duration,
    /// Time of decoding, after the first token.
    pub decode: Duration,
    /// The part of `decode` until the first decoded tokens were read, and their number. In a new
    /// process it includes compiling and loading kernels.
    pub warm_up: (Duration, usize),
}

impl Generated {
    /// Tokens per second after the warm-up, or after the first token if nothing follows the
    /// warm-up; zero if there is only one token.
    pub fn decode_tokens_per_second(&self) -> f64 {
        let decoded = self.tokens.len().saturating_sub(1);
        let (warm_up, tokens) = self.warm_up;
        let (time, tokens) =
            if decoded > tokens { (self.decode - warm_up, decoded - tokens) } else { (self.decode, decoded) };
        if tokens == 0 { 0.0 } else { tokens as f64 / time.as_secs_f64().max(1e-9) }
    }
}

/// A model with its tokenizer.
pub struct Generator<B: Backend> {
    model: Transformer<B>,
    tokenizer: Tokenizer,
    /// Stop tokens.
    stop_tokens: Vec<u32>,
    interrupt: Interrupt,
    device: B::Device,
}

impl<B: Backend> Generator<B> {
    /// Opens a model folder, or a GGUF file.
    ///
    /// # Errors
    /// If a file is missing or damaged, the model is not a language model, or the device lacks the
    /// precision.
    pub fn open(model: impl Into<ModelSource>, precision: Precision, device: B::Device) -> Result<Self, Failure> {
        let source = model.into();
        Self::of(LanguageModel::open(&source, precision, &device)?, source.text(), device)
    }

    /// The same weights with the adapter of `source` next to them.
    ///
    /// # Errors
    /// If the adapter is missing or damaged, does not fit, or changes more than linear layers.
    pub(crate) fn with_adapter(&self, source: &ModelSource) -> Result<Self, Failure> {
        let model = adapted(&self.model, source)?;
        let tokenizer = tokenizer(source.text())?;
        Self::of(LanguageModel { model, tokenizer }, source.text(), self.device.clone())
    }

    /// A model with the stop tokens that a folder configures.
    fn of(model: LanguageModel<B>, folder: &Path, device: B::Device) -> Result<Self, Failure> {
        let LanguageModel { model, tokenizer } = model;
        let named = END_TOKENS.iter().filter_map(|end| tokenizer.token_id(end));
        let stop_tokens = named.chain(configured_ends(folder)?).collect();
        Ok(Self { model, tokenizer, stop_tokens, interrupt: Interrupt::default(), device })
    }

    /// Sets the precision of the KV cache.
    ///
    /// # Errors
    /// If the model's heads do not fit it.
    pub fn with_cache(mut self, precision: CachePrecision) -> Result<Self, Failure> {
        let (head_dim, columns) = (self.model.config().head_dim, CacheDType::INT8_COLUMNS);
        match precision {
            CachePrecision::Auto => {}
            CachePrecision::Int8 if head_dim.is_multiple_of(columns) => self.model = self.model.with_int8_cache(),
            CachePrecision::Int8 => {
                return Err(Failure::new(format!(
                    "an INT8 cache needs head_dim to be a multiple of {columns}; this model's is {head_dim}: leave out \
                     --cache-dtype"
                )));
            }
        }
        Ok(self)
    }

    /// A generator for a loaded model.
    pub fn new(model: Transformer<B>, tokenizer: Tokenizer, device: B::Device) -> Self {
        let stop_tokens = END_TOKENS.iter().filter_map(|end| tokenizer.token_id(end)).collect();
        Self { model, tokenizer, stop_tokens, interrupt: Interrupt::default(), device }
    }

    /// Without stop tokens: generates all requested tokens.
    pub(crate) fn without_ends(mut self) -> Self {
        self.stop_tokens.clear();
        self
    }

    /// With an interrupt that ends generation.
    pub fn with_interrupt(mut self, interrupt: Interrupt) -> Self {
        self.set_interrupt(interrupt);
        self
    }

    /// Replaces the interrupt flag.
    pub fn set_interrupt(&mut self, interrupt: Interrupt) {
        self.interrupt = interrupt;
    }

    /// The model.
    pub fn model(&self) -> &Transformer<B> {
        &self.model
    }

    /// The stop tokens.
    pub fn stop_tokens(&self) -> &[u32] {
        &self.stop_tokens
    }

    /// Its tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Encodes a prompt and computes its token limit. With sliding-window attention the limit may
    /// exceed the context: a full sequence continues from its last tokens.
    ///
    /// # Errors
    /// If the prompt is empty or not in the vocabulary, or if prompt and output do not fit the
    /// context of a model without a window.
    pub fn prepare(&self, prompt: &str, options: &GenerationOptions) -> Result<Prepared, Failure> {
        options.validate()?;
        self.prepare_tokens(self.tokenizer.encode_prompt(prompt)?, options)
    }

    /// [`prepare`](Self::prepare) for a tokenized prompt.
    ///
    /// # Errors
    /// As there.
    pub fn prepare_tokens(&self, tokens: Vec<u32>, options: &GenerationOptions) -> Result<Prepared, Failure> {
        options.validate()?;
        if tokens.is_empty() {
            return Err(Failure::usage("the prompt is empty: the model needs at least one token"));
        }
        assert_known(&tokens, self.model.config().vocab_size, &self.tokenizer)?;
        let context = self.model.config().context_length;
        let room = context.saturating_sub(tokens.len());
        let max_tokens = options.max_tokens.unwrap_or(room.min(256));
        let length = tokens.len();
        if room == 0 {
            return Err(Failure::new(format!(
                "the prompt has {length} tokens, but the model's context is {context}: shorten the prompt"
            )));
        }
        if max_tokens > room && kept_tokens(self.model.config()).is_none() {
            return Err(Failure::new(format!(
                "the prompt has {length} tokens and max_tokens is {max_tokens}, but the model's context is {context}: \
                 shorten the prompt, or set --max-tokens to {room} at the most"
            )));
        }
        Ok(Prepared { tokens, max_tokens, draw: None })
    }

    /// A scheduler for sequences of these maximum lengths, prompts included.
    pub fn scheduler(&self, lengths: impl Iterator<Item = usize>) -> Scheduler<B> {
        self.scheduler_of(Self::rows(), Self::step_tokens(), lengths, None)
    }

    /// Default maximum of sequences decoded concurrently.
    pub fn rows() -> usize {
        if B::is_synchronous() { CPU_ROWS } else { ROWS }
    }

    /// Default token budget of a step.
    pub fn step_tokens() -> usize {
        if B::downloads_at_once() { CUDA_STEP_TOKENS } else { STEP_TOKENS }
    }

    /// The tokens in a cache for sequences of up to these lengths, of which `rows` run at a time;
    /// fewer where that takes more than 4 GiB.
    pub fn cache_tokens(&self, rows: usize, lengths: impl Iterator<Item = usize>) -> usize {
        let config = self.model.config();
        let token = config.n_kv_heads * self.model.cache_dtype().head_bytes(config.head_dim);
        let most = (CACHE_BYTES / (2 * config.n_layers * token).max(1)).min(SLAB_BYTES / token.max(1));
        let lengths: Vec<usize> = lengths.map(|length| self.paged(length)).collect();
        let longest = lengths.iter().copied().max().unwrap_or(1);
        lengths.iter().sum::<usize>().min(rows * longest).min(most).max(longest)
    }

    /// The tokens in the pages of a sequence, of which the last is partly filled.
    fn paged(&self, length: usize) -> usize {
        length.min(self.model.config().context_length).next_multiple_of(PAGE_TOKENS)
    }

    /// [`scheduler`](Self::scheduler) with `rows` concurrent sequences, `step_tokens` tokens per
    /// step and, if given, this cache size in tokens.
    pub fn scheduler_of(
        &self,
        rows: usize,
        step_tokens: usize,
        lengths: impl Iterator<Item = usize>,
        cache_tokens: Option<usize>,
    ) -> Scheduler<B> {
        let lengths: Vec<usize> = lengths.collect();
        let longest = lengths.iter().map(|length| self.paged(*length)).max().unwrap_or(1);
        let cache_tokens = cache_tokens.unwrap_or_else(|| self.cache_tokens(rows, lengths.into_iter())).max(longest);
        let options = SchedulerOptions { rows, step_tokens, cache_tokens };
        Scheduler::new(&self.model, options, self.device.clone())
    }

    /// The request for a prompt, with random stream `number`.
    pub fn request(&self, prompt: &Prepared, options: &GenerationOptions, number: u64) -> Request {
        let sampling = options.sampling(number);
        Request {
            sampling,
            stop_tokens: self.stop_tokens.clone(),
            ..Request::new(prompt.tokens.clone(), prompt.max_tokens)
        }
    }

    /// Generates from a prompt and streams the text to `show`.
    ///
    /// # Errors
    /// If the device fails.
    pub fn generate(
        &self,
        prompt: &Prepared,
        options: &GenerationOptions,
        mut show: impl FnMut(&str),
    ) -> Result<Generated, Failure> {
        let mut generated = self.generate_batch(&[prompt], 0, options, |_, text| show(text))?;
        generated.pop().ok_or_else(|| Failure::new("nothing was written"))
    }

    /// Generates from several prompts at once. The first samples from random stream `first`, each
    /// next one from the next stream, so that outputs match those of separate calls. `show`
    /// receives the index of the prompt with each piece of text.
    ///
    /// # Errors
    /// If the device fails.
    pub fn generate_batch(
        &self,
        prompts: &[&Prepared],
        first: u64,
        options: &GenerationOptions,
        show: impl FnMut(usize, &str),
    ) -> Result<Vec<Generated>, Failure> {
        self.generate_watched(prompts, first, options, show, || Ok(()))
    }

    /// [`generate_batch`](Self::generate_batch) that calls `decoding` after prefill.
    pub(crate) fn generate_watched(
        &self,
        prompts: &[&Prepared],
        first: u64,
        options: &GenerationOptions,
        show: impl FnMut(usize, &str),
        decoding: impl FnOnce() -> Result<(), Failure>,
    ) -> Result<Vec<Generated>, Failure> {
        let mut all = Vec::new();
        let mut scheduler = self.scheduler(prompts.iter().map(|prompt| prompt.length()));
        self.write_all(
            &mut scheduler,
            (prompts, first),
            options,
            (show, |_, generated| all.push(generated)),
            decoding,
        )?;
        Ok(all)
    }

    /// Generates from a prompt with a scheduler that may have its prefix cached.
    ///
    /// # Errors
    /// If it does not fit the scheduler's cache, or the device fails.
    pub(crate) fn write(
        &self,
        scheduler: &mut Scheduler<B>,
        prompt: &Prepared,
        options: &GenerationOptions,
        mut show: impl FnMut(&str),
    ) -> Result<Generated, Failure> {
        let mut written = None;
        let told = (|_, text: &str| show(text), |_, generated| written = Some(generated));
        self.write_all(scheduler, (&[prompt], 0), options, told, || Ok(()))?;
        written.ok_or_else(|| Failure::new("nothing was written"))
    }

    /// The generation loop: decodes tokens as they arrive from the device, and passes text to
    /// `show` and completed sequences to `done`, in order.
    fn write_all(
        &self,
        scheduler: &mut Scheduler<B>,
        (prompts, first): (&[&Prepared], u64),
        options: &GenerationOptions,
        told: (impl FnMut(usize, &str), impl FnMut(usize, Generated)),
        decoding: impl FnOnce() -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let begun = Instant::now();
        let (mut show, mut done) = told;
        let mut rows = HashMap::new();
        let mut outputs = VecDeque::new();
        for (row, prompt) in prompts.iter().enumerate() {
            let id = scheduler.add(self.request(prompt, options, prompt.draw.unwrap_or(first + row as u64)))?;
            rows.insert(id, row);
            outputs.push_back((id, Text::new(prompt, Writer::new(&self.tokenizer, &prompt.tokens, &options.stop))));
        }
        let mut decoding = Some(decoding);
        // Sequences that were passed on are no longer in the list.
        let mut handed_on = 0;
        while !outputs.is_empty() && !self.interrupt.load(Ordering::Relaxed) {
            let written = scheduler.step(&self.model).and_then(|()| {
                for written in scheduler.take() {
                    let row = rows.get(&written.id).copied();
                    let text = row.and_then(|row| Some((row, outputs.get_mut(row.checked_sub(handed_on)?)?)));
                    if let Some((row, (_, text))) = text {
                        text.take(&written, begun, |text| show(row, text))?;
                        if text.complete && written.finish.is_none() {
                            // By a stop string.
                            scheduler.cancel(written.id);
                        }
                    }
                }
                Ok(())
            });
            let load = scheduler.load();
            let read = load.waiting + load.prefilling == 0;
            let begin = decoding.take_if(|_| read && written.is_ok());
            if let Err(failure) = written.and_then(|()| begin.map_or(Ok(()), |decoding| decoding())) {
                outputs.iter().for_each(|(id, _)| scheduler.cancel(*id));
                return Err(failure);
            }
            while outputs.front().is_some_and(|(_, text)| text.complete) {
                let Some((_, text)) = outputs.pop_front() else { break };
                done(handed_on, text.finish(|text| show(handed_on, text)));
                handed_on += 1;
            }
        }
        for (id, text) in outputs {
            scheduler.cancel(id);
            done(handed_on, text.finish(|text| show(handed_on, text)));
            handed_on += 1;
        }
        Ok(())
    }
}

/// A sequence and its decoded text.
struct Text<'a> {
    prompt_tokens: usize,
    writer: Writer<'a>,
    tokens: Vec<u32>,
    /// Number of earlier tokens.
    known: usize,
    complete: bool,
    /// Times of the first and the last token.
    first: Duration,
    last: Duration,
    /// Time of the first decoded tokens after the first token, and their number.
    warm_up: Option<(Duration, usize)>,
}

impl<'a> Text<'a> {
    fn new(prompt: &Prepared, writer: Writer<'a>) -> Self {
        let (first, last) = (Duration::ZERO, Duration::ZERO);
        let (prompt_tokens, tokens) = (prompt.tokens.len(), Vec::new());
        Self { prompt_tokens, writer, tokens, known: 0, complete: false, first, last, warm_up: None }
    }

    /// Adds tokens, until the sequence is complete.
    fn take(&mut self, written: &RequestOutput, begun: Instant, mut show: impl FnMut(&str)) -> Result<(), Failure> {
        for OutputToken { token, .. } in &written.tokens {
            if self.complete {
                return Ok(());
            }
            self.last = begun.elapsed();
            if self.tokens.is_empty() {
                self.first = self.last;
            }
            self.tokens.push(*token);
            // A stop token is not part of the text.
            let ends = written.finish == Some(Finish::End) && self.tokens.len() == self.known + written.tokens.len();
            self.complete = ends || self.writer.push(*token, &mut show)?;
        }
        self.known = self.tokens.len();
        if self.known > 1 {
            self.warm_up.get_or_insert((self.last - self.first, self.known - 1));
        }
        match written.finish {
            Some(Finish::NotANumber) => return Err(self.not_a_number()),
            finish => self.complete |= finish.is_some(),
        }
        Ok(())
    }

    fn not_a_number(&self) -> Failure {
        Failure::new(format!(
            "the model's logits are NaN after {} tokens: its weights are damaged, or its values overflow in bf16 or \
             f16 (then --precision f32 helps)",
            self.prompt_tokens + self.tokens.len()
        ))
    }

    fn finish(self, mut show: impl FnMut(&str)) -> Generated {
        let Self { prompt_tokens, writer, tokens, first, last, warm_up, .. } = self;
        let (text, warm_up) = (writer.finish(&mut show), warm_up.unwrap_or_default());
        Generated { text, tokens, prompt_tokens, prefill: first, decode: last - first, warm_up }
    }
}

/// `eos_token_id` of a folder's `generation_config.json` and `config.json`, each one id or several,
/// or that of a GGUF file.
pub(crate) fn configured_ends(folder: &Path) -> Result<Vec<u32>, Failure> {
    if let Some(ends) = gguf_ends(folder)? {
        return Ok(ends);
    }
    let ends = ["generation_config.json", "config.json"].map(|name| ends_in(&folder.join(name)));
    Ok(ends.into_iter().collect::<Result<Vec<_>, _>>()?.concat())
}

fn ends_in(file: &Path) -> Result<Vec<u32>, Failure> {
    let text = match std::fs::read_to_string(file) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Failure::io(file)(error)),
    };
    let config: serde_json::Value = serde_json::from_str(&text)
        .map_err(|error| Failure::new(format!("{}: not valid JSON: {error}", file.display())))?;
    let ends = match &config["eos_token_id"] {
        serde_json::Value::Array(ends) => ends.clone(),
        end => vec![end.clone()],
    };
    Ok(ends.iter().filter_map(|end| u32::try_from(end.as_u64()?).ok()).collect())
}

/// Decodes tokens to text and holds back what may become a stop string.
pub(crate) struct Writer<'a> {
    stream: fireclay_datasets::TextStream<'a>,
    stop: &'a [String],
    text: String,
    shown: usize,
}

impl<'a> Writer<'a> {
    /// For tokens that follow those of `prompt`.
    pub(crate) fn new(tokenizer: &'a Tokenizer, prompt: &[u32], stop: &'a [String]) -> Self {
        Self { stream: tokenizer.stream_behind(prompt), stop, text: String::new(), shown: 0 }
    }

    /// Returns whether a stop string was reached.
    pub(crate) fn push(&mut self, token: u32, show: &mut impl FnMut(&str)) -> Result<bool, Failure> {
        self.text.push_str(&self.stream.push(token)?);
        let found = self.stop.iter().filter(|stop| !stop.is_empty());
        if let Some(at) = found.filter_map(|stop| self.text.find(stop.as_str())).min() {
            self.text.truncate(at);
            return Ok(true);
        }
        // Hold back the longest suffix that begins a stop string.
        let begins = |at: usize| self.stop.iter().any(|stop| stop.starts_with(&self.text[at..]));
        let held = self.text.char_indices().map(|(at, _)| at).find(|at| begins(*at)).unwrap_or(self.text.len());
        if held > self.shown {
            show(&self.text[self.shown..held]);
            self.shown = held;
        }
        Ok(false)
    }

    pub(crate) fn finish(self, show: &mut impl FnMut(&str)) -> String {
        if self.shown < self.text.len() {
            show(&self.text[self.shown..]);
        }
        self.text
    }
}

/// Generation with a model folder, for any backend.
pub struct GenerationRun<S> {
    /// Where the model comes from.
    pub model: ModelSource,
    /// What to write after.
    pub prompts: Vec<String>,
    /// Sampling and limits.
    pub options: GenerationOptions,
    /// Data type of matrices and activations.
    pub precision: Precision,
    /// Data type of the KV cache.
    pub cache: CachePrecision,
    /// Ends the current and all further prompts.
    pub interrupt: Interrupt,
    /// Receives the events.
    pub show: S,
}

/// An event of a generation. With several prompts, the events of each come together when it is
/// complete.
pub enum GenerationEvent<'a> {
    /// Output of this prompt follows.
    Begun(&'a str),
    /// More text, or with several prompts all of it.
    Text(&'a str),
    /// A prompt is complete.
    Done(&'a Generated),
    /// One of several prompts is refused: its number, counted from one, and the reason.
    Refused(usize, &'a Failure),
}

impl<S: FnMut(GenerationEvent<'_>)> OnBackend for GenerationRun<S> {
    type Output = ();

    fn run<B: Backend>(mut self, RunContext { device, .. }: RunContext<B>) -> Result<(), Failure> {
        let generator = Generator::<B>::open(&self.model, self.precision, device)?.with_cache(self.cache)?;
        let generator = generator.with_interrupt(self.interrupt.clone());
        if let [prompt] = &self.prompts[..] {
            let prepared = generator.prepare(prompt, &self.options)?;
            // Show the prompt with its first text, after any warnings.
            let (mut show, mut begun) = (self.show, false);
            let mut tell = |event: GenerationEvent<'_>| {
                if !std::mem::replace(&mut begun, true) {
                    show(GenerationEvent::Begun(prompt));
                }
                show(event);
            };
            let generated = generator.generate(&prepared, &self.options, |text| tell(GenerationEvent::Text(text)))?;
            tell(GenerationEvent::Done(&generated));
            return Ok(());
        }
        self.options.validate()?;
        // Encode all prompts first; an invalid one does not stop the others.
        let mut prepared = Vec::new();
        let mut refused = 0;
        for (at, prompt) in self.prompts.iter().enumerate() {
            match generator.prepare(prompt, &self.options) {
                // A refused prompt does not shift the others' random streams.
                Ok(fits) => prepared.push((prompt, Prepared { draw: Some(at as u64), ..fits })),
                Err(failure) => {
                    refused += 1;
                    (self.show)(GenerationEvent::Refused(at + 1, &failure));
                }
            }
        }
        // Show several outputs in order, each when complete.
        let all: Vec<&Prepared> = prepared.iter().map(|(_, prepared)| prepared).collect();
        let done = |row: usize, generated: Generated| {
            // After an interrupt, skip prompts that were not started.
            if !generated.tokens.is_empty() {
                (self.show)(GenerationEvent::Begun(prepared[row].0));
                (self.show)(GenerationEvent::Text(&generated.text));
                (self.show)(GenerationEvent::Done(&generated));
            }
        };
        if !all.is_empty() {
            let mut scheduler = generator.scheduler(all.iter().map(|prepared| prepared.length()));
            generator.write_all(&mut scheduler, (&all, 0), &self.options, (|_, _: &str| {}, done), || Ok(()))?;
        }
        match refused {
            0 => Ok(()),
            _ => Err(Failure::new(format!("{refused} of {} prompts failed", self.prompts.len()))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_decode_step_does_not_count_as_speed() {
        let generated = |tokens: usize, decode: u64, warm_up: (u64, usize)| Generated {
            text: String::new(),
            tokens: vec![0; tokens],
            prompt_tokens: 3,
            prefill: Duration::from_secs(1),
            decode: Duration::from_secs(decode),
            warm_up: (Duration::from_secs(warm_up.0), warm_up.1),
        };
        // Eight tokens in 20 s, then 400 in 4 s.
        assert_eq!(generated(409, 24, (20, 8)).decode_tokens_per_second(), 100.0);
        // Nothing follows the first step.
        assert_eq!(generated(9, 4, (4, 8)).decode_tokens_per_second(), 2.0);
        assert_eq!(generated(1, 0, (0, 0)).decode_tokens_per_second(), 0.0);
    }
}
