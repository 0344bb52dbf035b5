//! Text from a trained model: prompts as tokens, and their tokens as text; the [`scheduler`] draws these.

pub mod scheduler;

use std::collections::{HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fireclay_datasets::Tokenizer;
use fireclay_kernels::{Backend, CacheDType, Penalties, Sampling};
use fireclay_model::{PAGE_TOKENS, Transformer};

use self::scheduler::{Finish, Request, Scheduler, SchedulerOptions, Written, WrittenToken, kept_tokens};
use crate::backend::{OnBackend, RunContext};
use crate::failure::Failure;
use crate::inference::language_model::LanguageModel;
use crate::model_folder::{assert_known, gguf_ends};
use crate::precision::{CachePrecision, Precision};

/// Tokens that end a text, where the tokenizer has them.
const END_TOKENS: [&str; 3] = ["<|endoftext|>", "<|im_end|>", "</s>"];

/// Lower temperatures than this would take logits out of what f32 holds: they are zero, which is greedy.
pub(crate) const LEAST_TEMPERATURE: f64 = 1e-3;

/// Prompts that are continued together, at the most: on a device of its own, and on the CPU.
const ROWS: usize = 256;
const CPU_ROWS: usize = 16;
/// Tokens of a step where nothing else is asked for: on CUDA, which reads so many in some ten milliseconds, and elsewhere.
const CUDA_STEP_TOKENS: usize = 4096;
const STEP_TOKENS: usize = 2048;
/// Bytes of the cache, at the most, and of the keys of one layer in it, which WGPU binds no more than 128 MiB of on some
/// devices; but for those that one text needs.
const CACHE_BYTES: usize = 4 << 30;
const SLAB_BYTES: usize = 120 << 20;

/// Ends a text early when it is set.
pub type Interrupt = Arc<AtomicBool>;

/// How to write.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationOptions {
    /// Tokens to write at the most; as many as fit where `None`, up to 256.
    pub max_tokens: Option<usize>,
    /// Zero takes the likeliest token each time.
    pub temperature: f64,
    /// Only this many likeliest tokens are drawn from.
    pub top_k: Option<usize>,
    /// Only the likeliest tokens that make up this probability are drawn from.
    pub top_p: Option<f64>,
    /// Only tokens at least this likely, as a share of the likeliest one's probability, are drawn from.
    pub min_p: Option<f64>,
    /// What tokens lose that the text has already.
    pub penalties: Penalties,
    /// Writing ends before any of these texts.
    pub stop: Vec<String>,
    /// Where the draws come from.
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
    /// Refuses values that mean nothing.
    ///
    /// # Errors
    /// Names the value.
    pub fn validate(&self) -> Result<(), Failure> {
        if !(self.temperature as f32).is_finite() || self.temperature < 0.0 {
            let asked = self.temperature;
            return Err(Failure::usage(format!(
                "--temperature {asked:e} must be 0 or above, and a number that f32 holds"
            )));
        }
        if self.top_k == Some(0) {
            return Err(Failure::usage("--top-k 0 leaves nothing to draw from"));
        }
        if let Some(top_p) = self.top_p.filter(|top_p| !(*top_p > 0.0 && *top_p <= 1.0)) {
            return Err(Failure::usage(format!("--top-p {top_p} must be above 0, and 1 at the most")));
        }
        if let Some(min_p) = self.min_p.filter(|min_p| !(0.0..=1.0).contains(min_p)) {
            return Err(Failure::usage(format!("--min-p {min_p} must be 0 to 1")));
        }
        let Penalties { repetition, presence, frequency } = self.penalties;
        if !((repetition as f32).is_finite() && repetition as f32 > 0.0) {
            return Err(Failure::usage(format!(
                "--repetition-penalty {repetition:e} must be above 0; 1 takes nothing"
            )));
        }
        if [presence, frequency].iter().any(|penalty| !(*penalty as f32).is_finite()) {
            return Err(Failure::usage("--presence-penalty and --frequency-penalty must be numbers that f32 holds"));
        }
        if self.max_tokens == Some(0) {
            return Err(Failure::usage("--max-tokens 0 asks for nothing"));
        }
        Ok(())
    }

    /// How the tokens of a text are drawn; its draws are those of a number.
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

/// A prompt that a model can go on from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prepared {
    pub(crate) tokens: Vec<u32>,
    pub(crate) max_tokens: usize,
    /// Which draws are its own; those of its place among the prompts that are gone on from together if not said.
    pub(crate) draw: Option<u64>,
}

impl Prepared {
    /// Tokens of prompt and text, at the most.
    fn length(&self) -> usize {
        self.tokens.len() + self.max_tokens
    }
}

/// What came of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Generated {
    /// The text after the prompt.
    pub text: String,
    /// Its tokens, up to the one that ended it.
    pub tokens: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Time to read the prompt and draw the first token.
    pub prefill: Duration,
    /// Time for all tokens after the first.
    pub decode: Duration,
}

impl Generated {
    /// Tokens after the first in a second; zero where there is one token only.
    pub fn decode_tokens_per_second(&self) -> f64 {
        match self.tokens.len() {
            0 | 1 => 0.0,
            tokens => (tokens - 1) as f64 / self.decode.as_secs_f64().max(1e-9),
        }
    }
}

/// A model with its tokenizer.
pub struct Generator<B: Backend> {
    model: Transformer<B>,
    tokenizer: Tokenizer,
    /// Tokens that end a text.
    ends: Vec<u32>,
    interrupt: Interrupt,
    device: B::Device,
}

impl<B: Backend> Generator<B> {
    /// Opens a model folder, or a GGUF file.
    ///
    /// # Errors
    /// If a file is missing or damaged, the model is no language model, or the device lacks the precision.
    pub fn open(folder: &Path, precision: Precision, device: B::Device) -> Result<Self, Failure> {
        let LanguageModel { model, tokenizer } = LanguageModel::open(folder, precision, &device)?;
        let named = END_TOKENS.iter().filter_map(|end| tokenizer.token_id(end));
        let ends = named.chain(configured_ends(folder)?).collect();
        Ok(Self { model, tokenizer, ends, interrupt: Interrupt::default(), device })
    }

    /// With a cache of this precision.
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
                    "a cache of INT8 is for heads of a multiple of {columns} elements; this model's have {head_dim}: leave out \
                     --cache-dtype"
                )));
            }
        }
        Ok(self)
    }

    /// A generator of a model that is there already.
    pub fn new(model: Transformer<B>, tokenizer: Tokenizer, device: B::Device) -> Self {
        let ends = END_TOKENS.iter().filter_map(|end| tokenizer.token_id(end)).collect();
        Self { model, tokenizer, ends, interrupt: Interrupt::default(), device }
    }

    /// That writes all the tokens that are asked for, past any that would end a text.
    pub(crate) fn without_ends(mut self) -> Self {
        self.ends.clear();
        self
    }

    /// With something else to end texts by.
    pub fn with_interrupt(mut self, interrupt: Interrupt) -> Self {
        self.interrupt = interrupt;
        self
    }

    /// The model.
    pub fn model(&self) -> &Transformer<B> {
        &self.model
    }

    /// Tokens that end a text.
    pub fn ends(&self) -> &[u32] {
        &self.ends
    }

    /// Its tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// A prompt as tokens, and how many may follow. Where the model's attention has a window, these may be more than its
    /// context: a text that fills it goes on from its end.
    ///
    /// # Errors
    /// If the prompt is empty or holds what the vocabulary lacks, or prompt and text do not fit the model's context and
    /// the model has no window.
    pub fn prepare(&self, prompt: &str, options: &GenerationOptions) -> Result<Prepared, Failure> {
        options.validate()?;
        let tokens = self.tokenizer.encode_prompt(prompt)?;
        if tokens.is_empty() {
            return Err(Failure::usage("the prompt is empty: the model needs at least one token to begin from"));
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
                "the prompt has {length} tokens and {max_tokens} are to follow, but the model's context is {context}: \
                 shorten the prompt, or set --max-tokens to {room} at the most"
            )));
        }
        Ok(Prepared { tokens, max_tokens, draw: None })
    }

    /// A scheduler for texts that have so many tokens each at the most, with their prompts.
    pub fn scheduler(&self, lengths: impl Iterator<Item = usize>) -> Scheduler<B> {
        self.scheduler_of(Self::rows(), Self::step_tokens(), lengths, None)
    }

    /// Texts that are written at a time where nothing else is asked for.
    pub fn rows() -> usize {
        if B::is_synchronous() { CPU_ROWS } else { ROWS }
    }

    /// Tokens of a step where nothing else is asked for: of prompts no more are read while texts are written.
    pub fn step_tokens() -> usize {
        if B::downloads_at_once() { CUDA_STEP_TOKENS } else { STEP_TOKENS }
    }

    /// [`scheduler`](Self::scheduler) of up to `rows` texts at a time and `step_tokens` a step, with a cache of so many tokens, if that is
    /// said.
    pub fn scheduler_of(
        &self,
        rows: usize,
        step_tokens: usize,
        lengths: impl Iterator<Item = usize>,
        cache_tokens: Option<usize>,
    ) -> Scheduler<B> {
        let config = self.model.config();
        let token = config.n_kv_heads * self.model.cache_dtype().head_bytes(config.head_dim);
        let most = (CACHE_BYTES / (2 * config.n_layers * token).max(1)).min(SLAB_BYTES / token.max(1));
        // Each fills its last page in part.
        let lengths = lengths.map(|length| length.min(config.context_length).next_multiple_of(PAGE_TOKENS));
        let lengths: Vec<usize> = lengths.collect();
        let longest = lengths.iter().copied().max().unwrap_or(1);
        let suits = lengths.iter().sum::<usize>().min(rows * longest).min(most);
        let cache_tokens = cache_tokens.unwrap_or(suits).max(longest);
        let options = SchedulerOptions { rows, step_tokens, cache_tokens };
        Scheduler::new(&self.model, options, self.device.clone())
    }

    /// The request that a prompt makes; its draws are those of a number.
    pub fn request(&self, prompt: &Prepared, options: &GenerationOptions, number: u64) -> Request {
        let sampling = options.sampling(number);
        Request { sampling, ends: self.ends.clone(), ..Request::new(prompt.tokens.clone(), prompt.max_tokens) }
    }

    /// Writes after a prompt, handing each whole piece of text to `show` as it comes.
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

    /// Writes after several prompts at once, the first of which draws by the numbers of text `first` of the seed, the next by
    /// those of the one behind it: each as if it were alone. `show` is told which one a piece of text belongs to.
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

    /// [`generate_batch`](Self::generate_batch) that calls `decoding` when the prompts are read and the first tokens drawn.
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

    /// Writes after a prompt by a scheduler that may know how it begins.
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

    /// The loop: as tokens come from the device, they become text. `show` is told of each piece of it, and `done` of each text
    /// that is complete, in their order.
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
        let mut texts = VecDeque::new();
        for (row, prompt) in prompts.iter().enumerate() {
            let id = scheduler.add(self.request(prompt, options, prompt.draw.unwrap_or(first + row as u64)))?;
            rows.insert(id, row);
            texts.push_back((id, Text::new(prompt, Writer::new(&self.tokenizer, &prompt.tokens, &options.stop))));
        }
        let mut decoding = Some(decoding);
        // Those that were handed on are no longer among the texts.
        let mut handed_on = 0;
        while !texts.is_empty() && !self.interrupt.load(Ordering::Relaxed) {
            let written = scheduler.step(&self.model).and_then(|()| {
                for written in scheduler.take() {
                    let row = rows.get(&written.id).copied();
                    let text = row.and_then(|row| Some((row, texts.get_mut(row.checked_sub(handed_on)?)?)));
                    if let Some((row, (_, text))) = text {
                        text.take(&written, begun, |text| show(row, text))?;
                        if text.complete && written.finish.is_none() {
                            // By a text that ends it.
                            scheduler.cancel(written.id);
                        }
                    }
                }
                Ok(())
            });
            let load = scheduler.load();
            let read = load.waiting + load.reading == 0;
            let begin = decoding.take_if(|_| read && written.is_ok());
            if let Err(failure) = written.and_then(|()| begin.map_or(Ok(()), |decoding| decoding())) {
                texts.iter().for_each(|(id, _)| scheduler.cancel(*id));
                return Err(failure);
            }
            while texts.front().is_some_and(|(_, text)| text.complete) {
                let Some((_, text)) = texts.pop_front() else { break };
                done(handed_on, text.finish(|text| show(handed_on, text)));
                handed_on += 1;
            }
        }
        for (id, text) in texts {
            scheduler.cancel(id);
            done(handed_on, text.finish(|text| show(handed_on, text)));
            handed_on += 1;
        }
        Ok(())
    }
}

/// A text that is being written.
struct Text<'a> {
    prompt_tokens: usize,
    writer: Writer<'a>,
    tokens: Vec<u32>,
    /// Tokens before those that come now.
    known: usize,
    complete: bool,
    /// When the first token came, and the last.
    first: Duration,
    last: Duration,
}

impl<'a> Text<'a> {
    fn new(prompt: &Prepared, writer: Writer<'a>) -> Self {
        let (first, last) = (Duration::ZERO, Duration::ZERO);
        Self { prompt_tokens: prompt.tokens.len(), writer, tokens: Vec::new(), known: 0, complete: false, first, last }
    }

    /// More tokens, until the text is complete.
    fn take(&mut self, written: &Written, begun: Instant, mut show: impl FnMut(&str)) -> Result<(), Failure> {
        for WrittenToken { token, .. } in &written.tokens {
            if self.complete {
                return Ok(());
            }
            self.last = begun.elapsed();
            if self.tokens.is_empty() {
                self.first = self.last;
            }
            self.tokens.push(*token);
            // A token that ends the text is none of its words.
            let ends = written.finish == Some(Finish::End) && self.tokens.len() == self.known + written.tokens.len();
            self.complete = ends || self.writer.push(*token, &mut show)?;
        }
        self.known = self.tokens.len();
        match written.finish {
            Some(Finish::NotANumber) => return Err(self.not_a_number()),
            finish => self.complete |= finish.is_some(),
        }
        Ok(())
    }

    fn not_a_number(&self) -> Failure {
        Failure::new(format!(
            "the model's logits are NaN after {} tokens: its weights are damaged, or its values overflow in bf16 or f16 (then \
             --precision f32 helps)",
            self.prompt_tokens + self.tokens.len()
        ))
    }

    fn finish(self, mut show: impl FnMut(&str)) -> Generated {
        let Self { prompt_tokens, writer, tokens, first, last, .. } = self;
        Generated { text: writer.finish(&mut show), tokens, prompt_tokens, prefill: first, decode: last - first }
    }
}

/// `eos_token_id` of a folder's `generation_config.json` and `config.json`, one or several each,
/// where they name any, or what a GGUF file says.
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

/// Turns tokens into text, holding back what may yet become a stop text.
pub(crate) struct Writer<'a> {
    stream: fireclay_datasets::TextStream<'a>,
    stop: &'a [String],
    text: String,
    shown: usize,
}

impl<'a> Writer<'a> {
    /// For the tokens behind those of `prompt`.
    pub(crate) fn new(tokenizer: &'a Tokenizer, prompt: &[u32], stop: &'a [String]) -> Self {
        Self { stream: tokenizer.stream_behind(prompt), stop, text: String::new(), shown: 0 }
    }

    /// Whether a stop text was reached.
    pub(crate) fn push(&mut self, token: u32, show: &mut impl FnMut(&str)) -> Result<bool, Failure> {
        self.text.push_str(&self.stream.push(token)?);
        let found = self.stop.iter().filter(|stop| !stop.is_empty());
        if let Some(at) = found.filter_map(|stop| self.text.find(stop.as_str())).min() {
            self.text.truncate(at);
            return Ok(true);
        }
        // The longest end of the text that begins a stop text stays back.
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

/// Prompts for a model folder, as work for any backend.
pub struct GenerationRun<S> {
    /// The model folder.
    pub model: PathBuf,
    /// What to write after.
    pub prompts: Vec<String>,
    /// How to write.
    pub options: GenerationOptions,
    /// Dtype of matrices and activations.
    pub precision: Precision,
    /// What the cache keeps keys and values as.
    pub cache: CachePrecision,
    /// Ends the text that is being written, and all further ones.
    pub interrupt: Interrupt,
    /// Told of each piece of text and, at a prompt's end, of what came of it.
    pub show: S,
}

/// A piece of news from a generation. Of several prompts, each one's news come together when all are complete.
pub enum GenerationEvent<'a> {
    /// What follows is behind this prompt.
    Begun(&'a str),
    /// More text; all of it, of several prompts.
    Text(&'a str),
    /// A prompt's text is complete.
    Done(&'a Generated),
    /// One of several prompts cannot be gone on from: its number, from one, and why.
    Refused(usize, &'a Failure),
}

impl<S: FnMut(GenerationEvent<'_>)> OnBackend for GenerationRun<S> {
    type Output = ();

    fn run<B: Backend>(mut self, RunContext { device, .. }: RunContext<B>) -> Result<(), Failure> {
        let generator = Generator::<B>::open(&self.model, self.precision, device)?.with_cache(self.cache)?;
        let generator = generator.with_interrupt(self.interrupt.clone());
        if let [prompt] = &self.prompts[..] {
            let prepared = generator.prepare(prompt, &self.options)?;
            // The prompt is shown with the first piece of its text, behind what may be said on the way there.
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
        // All prompts are read before anything is written; of several, one that does not fit leaves the others.
        let mut prepared = Vec::new();
        let mut refused = 0;
        for (at, prompt) in self.prompts.iter().enumerate() {
            match generator.prepare(prompt, &self.options) {
                // One that is refused takes no draws from the others.
                Ok(fits) => prepared.push((prompt, Prepared { draw: Some(at as u64), ..fits })),
                Err(failure) => {
                    refused += 1;
                    (self.show)(GenerationEvent::Refused(at + 1, &failure));
                }
            }
        }
        // Several are shown when they are complete, in their order: side by side, nobody could read them.
        let all: Vec<&Prepared> = prepared.iter().map(|(_, prepared)| prepared).collect();
        let done = |row: usize, generated: Generated| {
            // An interrupt leaves those that were not begun.
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
            _ => Err(Failure::new(format!("{refused} of {} prompts could not be gone on from", self.prompts.len()))),
        }
    }
}
