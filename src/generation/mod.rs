//! Text from a trained model: prefill once, then a token at a time from the cache.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use burn::tensor::{Int, Tensor, Transaction};
use fireclay_datasets::Tokenizer;
use fireclay_kernels::recorder::read_back;
use fireclay_kernels::{Backend, Penalties, RandomKey, SampledRows, Sampling, TokenCounts};
use fireclay_model::{Cache, Transformer};

use crate::backend::OnBackend;
use crate::failure::Failure;
use crate::language_model::LanguageModel;
use crate::precision::Precision;

/// Tokens that end a text, where the tokenizer has them.
const END_TOKENS: [&str; 3] = ["<|endoftext|>", "<|im_end|>", "</s>"];

/// Steps of which the tokens are read together, at the most: reading makes the device wait for the host.
const READ_STEPS: usize = 16;

/// Time between two reads, at the least but for [`READ_STEPS`]: what a reader does not notice.
const READ_INTERVAL: Duration = Duration::from_millis(25);

/// Lower temperatures than this, but for zero, take logits out of what f32 holds.
const LEAST_TEMPERATURE: f64 = 1e-3;

/// Prompts that are continued together, at the most.
const BATCH: usize = 16;

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
        if !self.temperature.is_finite() || self.temperature < 0.0 {
            return Err(Failure::usage(format!("--temperature {} must be 0 or above", self.temperature)));
        }
        if self.temperature > 0.0 && self.temperature < LEAST_TEMPERATURE {
            let least = LEAST_TEMPERATURE;
            return Err(Failure::usage(format!("--temperature {} must be 0, or {least} or above", self.temperature)));
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
        if !(repetition.is_finite() && repetition > 0.0) {
            return Err(Failure::usage(format!("--repetition-penalty {repetition} must be above 0; 1 takes nothing")));
        }
        if !presence.is_finite() || !frequency.is_finite() {
            return Err(Failure::usage("--presence-penalty and --frequency-penalty must be numbers"));
        }
        if self.max_tokens == Some(0) {
            return Err(Failure::usage("--max-tokens 0 asks for nothing"));
        }
        Ok(())
    }
}

/// A prompt that a model can go on from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prepared {
    tokens: Vec<u32>,
    max_tokens: usize,
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
    /// Opens a model folder.
    ///
    /// # Errors
    /// If a file is missing or damaged, the model is no language model, or the device lacks the precision.
    pub fn open(folder: &Path, precision: Precision, device: B::Device) -> Result<Self, Failure> {
        let LanguageModel { model, tokenizer } = LanguageModel::open(folder, precision, &device)?;
        let named = END_TOKENS.iter().filter_map(|end| tokenizer.token_id(end));
        let ends = named.chain(configured_ends(folder)?).collect();
        Ok(Self { model, tokenizer, ends, interrupt: Interrupt::default(), device })
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
        let context = self.model.config().context_length;
        let room = context.saturating_sub(tokens.len());
        let max_tokens = options.max_tokens.unwrap_or(room.min(256));
        if (max_tokens > room && self.kept_tokens().is_none()) || room == 0 {
            return Err(Failure::new(format!(
                "the prompt has {} tokens and {max_tokens} are to follow, but the model's context is {context}: \
                 shorten the prompt, or set --max-tokens to {room} at the most",
                tokens.len()
            )));
        }
        Ok(Prepared { tokens, max_tokens })
    }

    /// Tokens from which a text goes on that has filled the context: half of it, or what the attention's window sees, if
    /// that is more. None where attention sees all of the context.
    fn kept_tokens(&self) -> Option<usize> {
        let config = self.model.config();
        let window = config.sliding_window.filter(|window| *window < config.context_length)?;
        Some(window.max(config.context_length / 2))
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

    /// Writes after several prompts at once, the first of which draws by stream `first_stream` of the seed, the next by
    /// the one behind it: each as if it were alone. `show` is told which one a piece of text belongs to.
    ///
    /// # Errors
    /// If the device fails.
    pub fn generate_batch(
        &self,
        prompts: &[&Prepared],
        first_stream: u32,
        options: &GenerationOptions,
        show: impl FnMut(usize, &str),
    ) -> Result<Vec<Generated>, Failure> {
        self.generate_watched(prompts, first_stream, options, show, || Ok(()))
    }

    /// [`generate_batch`](Self::generate_batch) that calls `decoding` when the prompts are read and the first tokens drawn.
    pub(crate) fn generate_watched(
        &self,
        prompts: &[&Prepared],
        first_stream: u32,
        options: &GenerationOptions,
        show: impl FnMut(usize, &str),
        decoding: impl FnOnce() -> Result<(), Failure>,
    ) -> Result<Vec<Generated>, Failure> {
        let longest = prompts.iter().map(|prompt| prompt.tokens.len() + prompt.max_tokens).max().unwrap_or(0);
        let mut cache = self.model.cache(prompts.len(), longest.min(self.model.config().context_length));
        let texts: Vec<Text<'_>> = prompts
            .iter()
            .map(|prompt| Text::new(&prompt.tokens, prompt.max_tokens, Writer::new(&self.tokenizer, &options.stop)))
            .collect();
        let watched = (first_stream, decoding);
        self.write_all(&mut cache, texts, self.kept_tokens(), watched, options, show)
    }

    /// Reads what `cache` lacks of `prompt_tokens`, one at least, and writes up to `wanted` more, for which it must have
    /// room. Afterwards it holds all of them, or all but the last, which the model has not read.
    ///
    /// # Errors
    /// If the device fails.
    pub(crate) fn write(
        &self,
        cache: &mut Cache<B>,
        prompt_tokens: &[u32],
        wanted: usize,
        options: &GenerationOptions,
        mut show: impl FnMut(&str),
    ) -> Result<Generated, Failure> {
        let text = Text::new(prompt_tokens, wanted, Writer::new(&self.tokenizer, &options.stop));
        let watched = (0, || Ok(()));
        let mut generated = self.write_all(cache, vec![text], None, watched, options, |_, text| show(text))?;
        let generated = generated.pop().ok_or_else(|| Failure::new("nothing was written"))?;
        // What the device wrote on while its tokens were on their way here is forgotten.
        cache.truncate(prompt_tokens.len() + generated.tokens.len());
        Ok(generated)
    }

    /// The loop: each step's tokens feed the next one on the device, and are read some steps later. A text that fills the
    /// cache goes on from the `kept` last tokens of it. `decoding` is called when the first tokens are drawn.
    fn write_all(
        &self,
        cache: &mut Cache<B>,
        mut texts: Vec<Text<'_>>,
        kept: Option<usize>,
        (first_stream, decoding): (u32, impl FnOnce() -> Result<(), Failure>),
        options: &GenerationOptions,
        mut show: impl FnMut(usize, &str),
    ) -> Result<Vec<Generated>, Failure> {
        let key = RandomKey::new(options.seed);
        let sampling = |step: usize| {
            Sampling::greedy()
                .with_temperature(options.temperature, key.fold(step as u64))
                .with_top_k(options.top_k)
                .with_top_p(options.top_p)
                .with_min_p(options.min_p)
                .with_penalties(options.penalties)
        };
        let begun = Instant::now();
        let prompts: Vec<&[u32]> = texts.iter().map(|text| text.prompt).collect();
        let streams: Vec<u32> = (first_stream..).take(texts.len()).collect();
        let vocabulary = self.model.config().vocab_size;
        let counts =
            (!options.penalties.are_none()).then(|| TokenCounts::of_prompts(&prompts, vocabulary, &self.device));
        let mut rows = SampledRows::new(&streams, &self.device).with_counts(counts);
        let unread: Vec<&[u32]> = prompts.iter().zip(cache.lengths()).map(|(all, read)| &all[*read..]).collect();
        let hidden = self.model.prefill(&unread, cache);
        let mut next = self.model.sample(hidden, &sampling(0), &mut rows);
        let mut on_the_way = vec![next.clone()];
        self.take(&mut on_the_way, &mut texts, Instant::now(), &mut show)?;
        let prefill = begun.elapsed();

        decoding()?;
        let decoding = Instant::now();
        let wanted = texts.iter().map(|text| text.wanted).max().unwrap_or(0);
        let (mut step, mut last_read) = (1, decoding);
        while texts.iter().any(|text| !text.complete) && !self.interrupt.load(Ordering::Relaxed) {
            if step < wanted {
                let hidden = match kept.filter(|_| is_full(cache, &texts)) {
                    Some(kept) => {
                        self.take(&mut on_the_way, &mut texts, decoding, &mut show)?;
                        self.slide(cache, &texts, kept)
                    }
                    None => self.model.decode(next, cache),
                };
                next = self.model.sample(hidden, &sampling(step), &mut rows);
                on_the_way.push(next.clone());
                step += 1;
            }
            if step == wanted || on_the_way.len() >= READ_STEPS || last_read.elapsed() >= READ_INTERVAL {
                self.take(&mut on_the_way, &mut texts, decoding, &mut show)?;
                last_read = Instant::now();
            }
        }
        let finish = |(row, text): (usize, Text<'_>)| text.finish(prefill, |text| show(row, text));
        Ok(texts.into_iter().enumerate().map(finish).collect())
    }

    /// Reads the end of each text that fills its row once more, `kept` tokens of it, and all of the others: what
    /// [`Transformer::decode`] would give, if there were room.
    fn slide(&self, cache: &mut Cache<B>, texts: &[Text<'_>], kept: usize) -> Tensor<B, 2> {
        let end = |(text, held): (&Text<'_>, &usize)| {
            let mut tokens = [text.prompt, &text.tokens].concat();
            // A text that is complete is not written on, whatever it is read as.
            let all = if *held == cache.capacity() { kept } else { held + 1 };
            tokens.split_off(tokens.len().saturating_sub(all))
        };
        let ends: Vec<Vec<u32>> = texts.iter().zip(cache.lengths()).map(end).collect();
        cache.truncate(0);
        self.model.prefill(&ends.iter().map(Vec::as_slice).collect::<Vec<_>>(), cache)
    }

    /// Reads the tokens of some steps at once, and adds them to the texts that are not complete.
    fn take(
        &self,
        on_the_way: &mut Vec<Tensor<B, 1, Int>>,
        texts: &mut [Text<'_>],
        decoding: Instant,
        show: &mut impl FnMut(usize, &str),
    ) -> Result<(), Failure> {
        if on_the_way.is_empty() {
            return Ok(());
        }
        let steps = std::mem::take(on_the_way).into_iter().fold(Transaction::<B>::default(), Transaction::register);
        let steps = steps.try_execute().inspect(|steps| read_back(steps.iter().map(|step| step.bytes.len()).sum()));
        for step in steps.map_err(|error| Failure::new(format!("the device failed: {error:?}")))? {
            for ((row, text), token) in texts.iter_mut().enumerate().zip(step.iter::<i64>()) {
                text.push(token, &self.ends, decoding, |text| show(row, text))?;
            }
        }
        Ok(())
    }
}

/// Whether a text that is not complete has no room for its next token.
fn is_full<B: Backend>(cache: &Cache<B>, texts: &[Text<'_>]) -> bool {
    texts.iter().zip(cache.lengths()).any(|(text, held)| !text.complete && *held == cache.capacity())
}

/// A text that is being written.
struct Text<'a> {
    prompt: &'a [u32],
    wanted: usize,
    writer: Writer<'a>,
    tokens: Vec<u32>,
    complete: bool,
    decode: Duration,
}

impl<'a> Text<'a> {
    fn new(prompt: &'a [u32], wanted: usize, writer: Writer<'a>) -> Self {
        Self { prompt, wanted, writer, tokens: Vec::new(), complete: false, decode: Duration::ZERO }
    }

    /// One more token, unless the text is complete; -1 is what the device draws from logits that are NaN.
    fn push(&mut self, token: i64, ends: &[u32], decoding: Instant, mut show: impl FnMut(&str)) -> Result<(), Failure> {
        if self.complete {
            return Ok(());
        }
        let token = u32::try_from(token).map_err(|_| {
            Failure::new(format!(
                "the model's logits are NaN after {} tokens: its weights are damaged, or its values overflow in bf16 or f16 \
                 (then --precision f32 helps)",
                self.prompt.len() + self.tokens.len()
            ))
        })?;
        self.tokens.push(token);
        self.complete =
            ends.contains(&token) || self.writer.push(token, &mut show)? || self.tokens.len() >= self.wanted;
        self.decode = decoding.elapsed();
        Ok(())
    }

    fn finish(self, prefill: Duration, mut show: impl FnMut(&str)) -> Generated {
        let Self { prompt, writer, tokens, decode, .. } = self;
        Generated { text: writer.finish(&mut show), tokens, prompt_tokens: prompt.len(), prefill, decode }
    }
}

/// `eos_token_id` of a folder's `generation_config.json` and `config.json`, one or several each, where they name any.
fn configured_ends(folder: &Path) -> Result<Vec<u32>, Failure> {
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
struct Writer<'a> {
    stream: fireclay_datasets::TextStream<'a>,
    stop: &'a [String],
    text: String,
    shown: usize,
}

impl<'a> Writer<'a> {
    fn new(tokenizer: &'a Tokenizer, stop: &'a [String]) -> Self {
        Self { stream: tokenizer.stream(), stop, text: String::new(), shown: 0 }
    }

    /// Whether a stop text was reached.
    fn push(&mut self, token: u32, show: &mut impl FnMut(&str)) -> Result<bool, Failure> {
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

    fn finish(self, show: &mut impl FnMut(&str)) -> String {
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
    /// Ends the text that is being written, and all further ones.
    pub interrupt: Interrupt,
    /// Told of each piece of text and, at a prompt's end, of what came of it.
    pub show: S,
}

/// A piece of news from a generation. Of several prompts, each one's news come together when its batch is complete.
pub enum GenerationEvent<'a> {
    /// What follows is behind this prompt.
    Begun(&'a str),
    /// More text; all of it, of several prompts.
    Text(&'a str),
    /// A prompt's text is complete.
    Done(&'a Generated),
}

impl<S: FnMut(GenerationEvent<'_>)> OnBackend for GenerationRun<S> {
    type Output = ();

    fn run<B: Backend>(mut self, device: B::Device) -> Result<(), Failure> {
        let generator =
            Generator::<B>::open(&self.model, self.precision, device)?.with_interrupt(self.interrupt.clone());
        // All prompts are read before anything is written.
        let prepare = |prompt: &String| generator.prepare(prompt, &self.options);
        let prepared = self.prompts.iter().map(prepare).collect::<Result<Vec<_>, _>>()?;
        if let ([prompt], [prepared]) = (&self.prompts[..], &prepared[..]) {
            (self.show)(GenerationEvent::Begun(prompt));
            let generated =
                generator.generate(prepared, &self.options, |text| (self.show)(GenerationEvent::Text(text)))?;
            (self.show)(GenerationEvent::Done(&generated));
            return Ok(());
        }
        // Several are shown when they are complete: side by side, nobody could read them.
        for (at, (prompts, prepared)) in self.prompts.chunks(BATCH).zip(prepared.chunks(BATCH)).enumerate() {
            let prepared: Vec<&Prepared> = prepared.iter().collect();
            let generated = generator.generate_batch(&prepared, (at * BATCH) as u32, &self.options, |_, _| {})?;
            for (prompt, generated) in prompts.iter().zip(&generated) {
                (self.show)(GenerationEvent::Begun(prompt));
                (self.show)(GenerationEvent::Text(&generated.text));
                (self.show)(GenerationEvent::Done(generated));
            }
            if self.interrupt.load(Ordering::Relaxed) {
                break;
            }
        }
        Ok(())
    }
}
