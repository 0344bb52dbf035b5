//! What chat, responses and completions share: settings, jobs for the device, and streamed or
//! complete answers.

use std::convert::Infallible;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use fireclay_kernels::Penalties;
use serde_json::{Map, Value, json};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::constraints::Constraint;
use super::error::ApiError;
use super::fields::Fields;
use super::{Caller, Shared, json_response};
use crate::inference::generation::scheduler::{MAX_TOP_LOGPROBS, OutputToken, Request, TokenFilter};
use crate::inference::generation::{GenerationOptions, LEAST_TEMPERATURE};
use crate::server::answers::{Answers, Piece, Taken};
use crate::server::engine::{GenerateJob, Job, SequenceEvent};
use crate::server::grammar::GrammarFilter;
use crate::server::log::Record;
use crate::server::served::{Served, ServedGenerator};

/// Maximum sequences of a request.
pub(super) const MAX_SEQUENCES: usize = 2048;
/// Maximum stop strings of a request.
const STOPS: usize = 16;
/// Maximum entries of logit_bias.
const BIASES: usize = 1024;
/// Events buffered for a client, besides those of its connection.
const EVENTS: usize = 16;
/// A bias that excludes a token.
const FORBIDDEN: f32 = -1e30;
/// Interval of keep-alive events.
const ALIVE: Duration = Duration::from_secs(15);

/// Marks answers that are event streams.
#[derive(Clone, Copy)]
pub(super) struct Streams;

/// A served model by number, if it generates text.
pub(super) fn writer(shared: &Shared, model: usize) -> Result<&ServedGenerator, ApiError> {
    match shared.served.get() {
        Some(Served::Generators(writers)) => Ok(&writers[model]),
        Some(Served::Encoder(_)) => Err(ApiError::request("this model is an encoder: it does not generate text")),
        None => Err(ApiError::unavailable("the model is loading").with_code("loading")),
    }
}

/// The number of the model that a request names: the first, if it names none.
pub(super) fn named(shared: &Shared, fields: &Fields) -> Result<usize, ApiError> {
    let Some(name) = fields.string("model")? else { return Ok(0) };
    shared.options.names().position(|served| served == name).ok_or_else(|| unknown_model(shared, name))
}

pub(super) fn unknown_model(shared: &Shared, name: &str) -> ApiError {
    let served: Vec<String> = shared.options.names().map(|name| format!("{name:?}")).collect();
    let is = if served.len() > 1 { "are" } else { "is" };
    let served = served.join(", ");
    let error = ApiError::param("model", format!("model {name:?} is not served here; {served} {is}"));
    error.with_status(StatusCode::NOT_FOUND).with_code("model_not_found")
}

/// Generation settings of a request.
pub(super) struct Settings {
    options: GenerationOptions,
    biases: Vec<(u32, f32)>,
    pub(super) stop: Vec<String>,
    /// Sequences per prompt.
    pub(super) choices: usize,
    pub(super) stream: bool,
    pub(super) usage: bool,
    pub(super) top_logprobs: Option<usize>,
    /// Requests prompt log-probabilities, with this many top alternatives.
    pub(super) prompt_top_logprobs: Option<usize>,
    /// Priority among the client's requests: lower first.
    priority: i64,
    /// Time limit of the answer.
    time: Duration,
}

impl Settings {
    pub(super) fn read(shared: &Shared, fields: &Fields, vocabulary: usize) -> Result<Self, ApiError> {
        fields.refuse(&UNSUPPORTED)?;
        if !fields.flag("skip_special_tokens", true)? {
            return Err(fields.wrong("skip_special_tokens", "true: answers never contain special tokens"));
        }
        let most = shared.options.limits.request;
        let time = fields.number("timeout", 0.001..=most.as_secs_f64())?.map_or(most, Duration::from_secs_f64);
        let temperature = fields.number("temperature", 0.0..=2.0)?.unwrap_or(1.0);
        // Practically greedy.
        let temperature = if temperature < LEAST_TEMPERATURE { 0.0 } else { temperature };
        let top_p = fields.number("top_p", 0.0..=1.0)?;
        if top_p == Some(0.0) {
            return Err(fields.wrong("top_p", "above 0 and at most 1"));
        }
        // Other servers take 0 and -1 for all.
        let top_k = match fields.integer("top_k")? {
            None | Some(0 | -1) => None,
            Some(top_k) if top_k > 0 => usize::try_from(top_k).ok(),
            Some(_) => return Err(fields.wrong("top_k", "a whole number of 1 or more")),
        };
        let repetition = fields.number("repetition_penalty", 0.01..=10.0)?.unwrap_or(1.0);
        let presence = fields.number("presence_penalty", -2.0..=2.0)?.unwrap_or(0.0);
        let frequency = fields.number("frequency_penalty", -2.0..=2.0)?.unwrap_or(0.0);
        let options = GenerationOptions {
            max_tokens: None,
            temperature,
            top_k,
            top_p,
            min_p: fields.number("min_p", 0.0..=1.0)?,
            penalties: Penalties { repetition, presence, frequency },
            stop: Vec::new(),
            seed: fields.integer("seed")?.map_or_else(random, i64::cast_unsigned),
        };
        let stop = fields.strings("stop", STOPS)?;
        if stop.iter().any(String::is_empty) {
            return Err(fields.wrong("stop", "a string that is not empty, or several"));
        }
        let stream = fields.flag("stream", false)?;
        let stream_options = fields.object("stream_options")?;
        if stream_options.is_some() && !stream {
            return Err(ApiError::param("stream_options", "stream_options needs stream: true"));
        }
        Ok(Self {
            options,
            biases: biases(fields, vocabulary)?,
            stop,
            choices: fields.count("n", 1..=shared.options.limits.answers)?.unwrap_or(1),
            stream,
            usage: stream_options.map_or(Ok(false), |options| options.flag("include_usage", false))?,
            top_logprobs: None,
            // As at vLLM; -1 for all is not supported.
            prompt_top_logprobs: fields.count("prompt_logprobs", 0..=MAX_TOP_LOGPROBS)?,
            priority: fields.integer("priority")?.unwrap_or(0),
            time,
        })
    }
}

fn biases(fields: &Fields, vocabulary: usize) -> Result<Vec<(u32, f32)>, ApiError> {
    let Some(biases) = fields.object("logit_bias")? else { return Ok(Vec::new()) };
    let biases = biases.into_values();
    let name = fields.name("logit_bias");
    if biases.len() > BIASES {
        return Err(ApiError::param(
            name,
            format!("logit_bias has {} tokens; at most {BIASES} are allowed", biases.len()),
        ));
    }
    let bias = |(token, by): (String, Value)| {
        let id = token.parse::<u32>().ok().filter(|id| (*id as usize) < vocabulary);
        let by = by.as_f64().filter(|by| (-100.0..=100.0).contains(by));
        // As at OpenAI, this excludes a token.
        let by = by.map(|by| if by == -100.0 { FORBIDDEN } else { by as f32 });
        id.zip(by).ok_or_else(|| {
            let wanted = format!("tokens from 0 to {} and numbers from -100 to 100", vocabulary - 1);
            ApiError::param(&name, format!("logit_bias must hold {wanted}, but token {token:?} is not"))
        })
    };
    biases.into_iter().map(bias).collect()
}

/// An unpredictable number.
pub(super) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// Seconds since 1970.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// The prompts of a request and the constraint of their sequences.
pub(super) struct Prompts {
    /// The number of the model.
    pub(super) model: usize,
    pub(super) prompts: Vec<Vec<u32>>,
    pub(super) max_tokens: Option<usize>,
    /// The constraint of each sequence.
    pub(super) constraint: Option<Constraint>,
    /// The field that a prompt comes from.
    pub(super) field: &'static str,
}

impl Prompts {
    /// Checks the number of sequences and their lengths.
    fn check(&self, served: &ServedGenerator, settings: &Settings) -> Result<(), ApiError> {
        let count = self.prompts.len() * settings.choices;
        for length in self.prompts.iter().map(Vec::len) {
            let room = served.context.saturating_sub(length);
            if length == 0 {
                return Err(ApiError::param(self.field, "the prompt is empty: the model needs at least one token"));
            }
            if room == 0 || self.max_tokens.is_some_and(|more| more > room) {
                let asked = self.max_tokens.map_or(String::new(), |more| format!(" and max_tokens is {more}"));
                let message = format!(
                    "the prompt has {length} tokens{asked}, but prompt and answer together may have {}",
                    served.context
                );
                return Err(ApiError::param(self.field, message).with_code("context_length_exceeded"));
            }
        }
        if count > MAX_SEQUENCES {
            let message = format!("the request asks for {count} sequences; at most {MAX_SEQUENCES} are allowed");
            return Err(ApiError::param("n", message));
        }
        Ok(())
    }

    /// The jobs of all sequences and their channels: first those of the first prompt, then of the
    /// next.
    fn jobs(
        &self,
        served: &ServedGenerator,
        settings: &Settings,
        filter: Option<&GrammarFilter>,
    ) -> (Vec<Job>, Vec<mpsc::UnboundedReceiver<SequenceEvent>>) {
        let prompts = self.prompts.iter().flat_map(|prompt| std::iter::repeat_n(prompt, settings.choices));
        let job = |(number, prompt): (usize, &Vec<u32>)| {
            let max_tokens = self.max_tokens.unwrap_or(served.context.saturating_sub(prompt.len()));
            let request = Request {
                sampling: settings.options.sampling(number as u64),
                stop_tokens: served.stop_tokens.clone(),
                biases: settings.biases.clone(),
                top_logprobs: settings.top_logprobs.map(|count| count.min(MAX_TOP_LOGPROBS)),
                prompt_top_logprobs: settings.prompt_top_logprobs,
                // Prefill always samples a token.
                ..Request::new(prompt.clone(), max_tokens.max(1))
            };
            let filter = filter.map(|filter| Box::new(filter.again()) as Box<dyn TokenFilter>);
            let (sender, receiver) = mpsc::unbounded_channel();
            (Job::Generate(Box::new(GenerateJob { model: self.model, request, filter, events: sender })), receiver)
        };
        prompts.enumerate().map(job).unzip()
    }

    /// The end of each sequence's prompt, in the order of [`jobs`](Self::jobs).
    fn of_choices(&self, settings: &Settings) -> Vec<Vec<u32>> {
        let last = |prompt: &Vec<u32>| prompt[prompt.len().saturating_sub(PROMPT_END)..].to_vec();
        self.prompts.iter().flat_map(|prompt| std::iter::repeat_n(last(prompt), settings.choices)).collect()
    }
}

/// Fields of other servers that would change an answer and are not supported.
const UNSUPPORTED: [&str; 23] = [
    "allowed_token_ids",
    "audio",
    "bad_words",
    "chat_template",
    "documents",
    "function_call",
    "functions",
    "guided_whitespace_pattern",
    "ignore_eos",
    "include_stop_str_in_output",
    "length_penalty",
    "logits_processors",
    "min_tokens",
    "prediction",
    "prompt_embeds",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "stop_token_ids",
    "structural_tag",
    "truncate_prompt_tokens",
    "typical_p",
    "use_beam_search",
    "web_search_options",
];

/// Prompt tokens used as context for decoding text.
const PROMPT_END: usize = 16;

/// The form of an answer, complete or streamed.
pub(super) trait Form: Send + 'static {
    /// Prefix of the answer's id.
    fn prefix(&self) -> &'static str;

    /// Events before the first output of any sequence.
    fn begun(&mut self, head: &Head, count: usize) -> Vec<String>;

    /// Events of new output.
    fn more(&mut self, head: &Head, served: &ServedGenerator, piece: Piece) -> Vec<String>;

    /// Events when all sequences are complete.
    fn ended(&mut self, head: &Head, usage: Usage) -> Vec<String>;

    /// Events after a failure.
    fn failed(&mut self, head: &Head, error: &ApiError) -> Vec<String>;

    /// The body of a complete answer.
    fn whole(&mut self, head: &Head, served: &ServedGenerator, count: usize, pieces: Vec<Piece>, usage: Usage)
    -> Value;
}

/// The form of an answer made of choices.
pub(super) trait Choices: Send + 'static {
    /// Prefix of the answer's id, and the object names of a complete answer and of a chunk.
    fn names(&self) -> [&'static str; 3];

    /// The first delta of each streamed choice.
    fn opening(&self, _choice: usize) -> Option<Value> {
        None
    }

    /// New output, as a choice of a chunk.
    fn chunk(&mut self, served: &ServedGenerator, piece: Piece) -> Value;

    /// A complete choice.
    fn whole(&mut self, served: &ServedGenerator, choice: usize, text: Whole) -> Value;
}

impl<C: Choices> Form for C {
    fn prefix(&self) -> &'static str {
        self.names()[0]
    }

    fn begun(&mut self, head: &Head, count: usize) -> Vec<String> {
        let openings = (0..count).filter_map(|choice| self.opening(choice));
        openings.map(|opening| event(&head.chunk(self.names()[2], vec![opening]))).collect()
    }

    fn more(&mut self, head: &Head, served: &ServedGenerator, piece: Piece) -> Vec<String> {
        let choices = vec![self.chunk(served, piece)];
        vec![event(&head.chunk(self.names()[2], choices))]
    }

    fn ended(&mut self, head: &Head, usage: Usage) -> Vec<String> {
        let last = head.usage.then(|| {
            let mut last = head.chunk(self.names()[2], Vec::new());
            last["usage"] = usage.json();
            event(&last)
        });
        last.into_iter().chain(["data: [DONE]\n\n".to_string()]).collect()
    }

    fn failed(&mut self, _head: &Head, error: &ApiError) -> Vec<String> {
        vec![event(&error.json())]
    }

    fn whole(
        &mut self,
        head: &Head,
        served: &ServedGenerator,
        count: usize,
        pieces: Vec<Piece>,
        usage: Usage,
    ) -> Value {
        let mut collected: Vec<Whole> = (0..count).map(|_| Whole::default()).collect();
        for piece in pieces {
            let Some(text) = collected.get_mut(piece.choice) else { continue };
            text.text.push_str(&piece.text);
            text.calls.extend(piece.calls);
            text.prompt.extend(piece.prompt);
            text.tokens.extend(piece.tokens);
            text.finish = piece.finish.unwrap_or(text.finish);
        }
        let choice = |(choice, text): (usize, Whole)| Choices::whole(self, served, choice, text);
        let choices = collected.into_iter().enumerate().map(choice).collect();
        let mut body = head.json(self.names()[1], choices);
        body["usage"] = usage.json();
        body
    }
}

/// An unnamed event.
fn event(value: &Value) -> String {
    format!("data: {value}\n\n")
}

/// A complete sequence.
#[derive(Default)]
pub(super) struct Whole {
    pub(super) text: String,
    pub(super) calls: Vec<crate::server::tools::ToolCall>,
    /// Prompt tokens, if their log-probabilities were requested.
    pub(super) prompt: Vec<OutputToken>,
    pub(super) tokens: Vec<OutputToken>,
    pub(super) finish: &'static str,
}

/// Generates for `prompts` and answers in a form.
pub(super) async fn answer(
    shared: Arc<Shared>,
    caller: Caller,
    (mut prompts, settings, mut taken): (Prompts, Settings, Taken),
    mut form: impl Form,
) -> Result<Response, ApiError> {
    let served = writer(&shared, prompts.model)?;
    prompts.check(served, &settings)?;
    let deadline = Instant::now() + settings.time;
    let filter = match prompts.constraint.take() {
        Some(constraint) => Some(constraint.compile(served, deadline).await?),
        None => None,
    };
    let (jobs, events) = prompts.jobs(served, &settings, filter.as_ref());
    taken.prompts = prompts.of_choices(&settings);
    taken.nothing = prompts.max_tokens == Some(0);
    let prompt_tokens = prompts.prompts.iter().map(Vec::len).sum();
    let count = jobs.len();
    if shared.queue.push(caller.client, settings.priority, jobs).is_err() {
        let waiting = shared.queue.len() as u64;
        return Err(ApiError::busy(1 + waiting / 16));
    }
    let head = Head {
        id: format!("{}{:016x}{:016x}", form.prefix(), random(), random()),
        created: now(),
        number: prompts.model,
        model: served.name.clone(),
        usage: settings.usage,
    };
    if settings.stream {
        return Ok(streamed(Arc::clone(&shared), caller, (head, prompt_tokens, taken), events, deadline, form));
    }
    let mut answers = Answers::new(served, &taken, events, deadline, Arc::clone(&caller.record));
    let mut pieces = Vec::new();
    while let Some(piece) = answers.next().await {
        pieces.push(piece?);
    }
    let usage = Usage::of(&answers, prompt_tokens);
    Ok(json_response(StatusCode::OK, &form.whole(&head, served, count, pieces, usage)))
}

/// Fields that all events of an answer share.
pub(super) struct Head {
    pub(super) id: String,
    pub(super) created: u64,
    /// The number of the model.
    pub(super) number: usize,
    /// Its name.
    pub(super) model: String,
    /// Whether a stream ends with its usage.
    pub(super) usage: bool,
}

impl Head {
    fn json(&self, object: &str, choices: Vec<Value>) -> Value {
        json!({ "id": self.id, "object": object, "created": self.created, "model": self.model, "choices": choices })
    }

    fn chunk(&self, object: &str, choices: Vec<Value>) -> Value {
        let mut chunk = self.json(object, choices);
        if self.usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }
}

/// Token usage of an answer.
#[derive(Clone, Copy)]
pub(super) struct Usage {
    pub(super) prompt: usize,
    /// Prompt tokens found in the KV cache.
    pub(super) cached: usize,
    pub(super) written: usize,
}

impl Usage {
    fn of(answers: &Answers, prompt: usize) -> Self {
        Self { prompt, cached: answers.cached, written: answers.tokens }
    }

    fn json(self) -> Value {
        let Self { prompt, cached, written } = self;
        json!({
            "prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written,
            "prompt_tokens_details": { "cached_tokens": cached },
        })
    }
}

fn streamed(
    shared: Arc<Shared>,
    caller: Caller,
    (head, prompt_tokens, taken): (Head, usize, Taken),
    events: Vec<mpsc::UnboundedReceiver<SequenceEvent>>,
    deadline: Instant,
    form: impl Form,
) -> Response {
    let (sender, mut receiver) = mpsc::channel::<Result<String, Infallible>>(EVENTS);
    // Ends with the client, which ends the sequences.
    tokio::spawn(async move {
        // The client may be gone.
        let _ = stream(shared, caller, (head, prompt_tokens, taken), events, deadline, form, sender).await;
    });
    let body = Body::from_stream(futures_util::stream::poll_fn(move |context| receiver.poll_recv(context)));
    let mut response = body.into_response();
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Keeps nginx from buffering events.
    response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
    response.extensions_mut().insert(Streams);
    response
}

type Sender = mpsc::Sender<Result<String, Infallible>>;

async fn stream(
    shared: Arc<Shared>,
    caller: Caller,
    (head, prompt_tokens, taken): (Head, usize, Taken),
    events: Vec<mpsc::UnboundedReceiver<SequenceEvent>>,
    deadline: Instant,
    mut form: impl Form,
    sender: Sender,
) -> Result<(), mpsc::error::SendError<Result<String, Infallible>>> {
    let Ok(served) = writer(&shared, head.number) else { return Ok(()) };
    for event in form.begun(&head, events.len()) {
        sender.send(Ok(event)).await?;
    }
    let mut answers = Answers::new(served, &taken, events, deadline, Arc::clone(&caller.record));
    loop {
        let next = tokio::select! {
            next = tokio::time::timeout(ALIVE, answers.next()) => next,
            () = sender.closed() => return Ok(()),
        };
        let (events, last) = match next {
            Err(_) => (vec![": waiting\n\n".to_string()], false),
            Ok(Some(Ok(piece))) => (form.more(&head, served, piece), false),
            Ok(Some(Err(error))) => (form.failed(&head, &error), true),
            Ok(None) => (form.ended(&head, Usage::of(&answers, prompt_tokens)), true),
        };
        for event in events {
            sender.send(Ok(event)).await?;
        }
        if last {
            caller.record.complete();
            return Ok(());
        }
    }
}

/// Reports unknown fields to the log, and with it to the response header.
///
/// # Errors
/// If there are any and the server is strict.
pub(super) fn warn_unknown_fields(shared: &Shared, caller: &Record, fields: &Fields) -> Result<(), ApiError> {
    let unknown = Fields::unknown(fields);
    if shared.options.strict
        && let Some(field) = unknown.first()
    {
        return Err(ApiError::param(field.clone(), format!("{field:?} is unknown")));
    }
    if !unknown.is_empty() {
        caller.unknown(unknown);
    }
    Ok(())
}

/// Prompt log-probabilities in vLLM's form: one object per token, keyed by token id; null for the
/// first.
pub(super) fn prompt_logprobs(served: &ServedGenerator, tokens: &[OutputToken]) -> Value {
    let one = |known: &OutputToken| {
        let Some(own) = known.log_probability else { return Value::Null };
        let mut told = Map::new();
        let mut tell = |token: u32, logprob: f32, rank: Option<usize>| {
            let told_one =
                json!({ "logprob": logprob.max(-9999.0), "rank": rank, "decoded_token": spelled(served, token) });
            told.insert(token.to_string(), told_one);
        };
        tell(known.token, own, None);
        for (at, (token, logprob)) in known.top_logprobs.iter().enumerate() {
            tell(*token, *logprob, Some(at + 1));
        }
        Value::Object(told)
    };
    let mut all: Vec<Value> = tokens.iter().map(one).collect();
    if all.is_empty() {
        all.push(Value::Null);
    }
    all.into()
}

/// A token as text. Incomplete characters become U+FFFD, special tokens their names.
pub(super) fn spelled(served: &ServedGenerator, token: u32) -> String {
    String::from_utf8_lossy(&served.bytes_of(token)).into_owned()
}

/// Runs slow work for a model, such as tokenization, on a blocking thread.
pub(super) async fn run_blocking<T: Send + 'static>(
    shared: &Arc<Shared>,
    model: usize,
    work: impl FnOnce(&Shared, &ServedGenerator) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let shared = Arc::clone(shared);
    let done = tokio::task::spawn_blocking(move || work(&shared, writer(&shared, model)?)).await;
    done.unwrap_or_else(|_| Err(ApiError::server("the request could not be read")))
}

/// Checks that a text is not too long before it is tokenized.
pub(super) fn bounded(field: &str, text: &str, context: usize, longest_token: usize) -> Result<(), ApiError> {
    let most = context.saturating_mul(longest_token.max(1));
    if text.len() > most {
        let message = format!("{field} has {} bytes, which is more than {context} tokens", text.len());
        return Err(ApiError::param(field, message).with_code("context_length_exceeded"));
    }
    Ok(())
}
