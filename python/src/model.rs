//! Loaded models, tokenizers, and their outputs.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fireclay::inference::chat::Dialogue;
use fireclay::inference::generation::{GenerationOptions, Interrupt};
use fireclay::inference::loaded::{LoadedModel, ModelToLoad, Prompt, TokenRows};
use fireclay::inference::prediction;
use fireclay::precision::{CachePrecision, Precision};
use fireclay_datasets::Tokenizer as Tokens;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::Value;

use crate::arguments::{backend, fetched, json, named, options, python, strings};
use crate::errors::{Problem, failure, usage};
use crate::mailbox::{Mailbox, Taken, mailbox};
use crate::process::Waiting;
use crate::tensor::{Tensor, token_rows};
use crate::worker::{Worker, next, nothing, wait};

/// A model of any backend.
type Loaded = dyn LoadedModel;

/// A model on a device.
#[pyclass(frozen, module = "fireclay")]
pub(crate) struct Model {
    worker: Worker<Loaded>,
    tokenizer: Arc<Tokens>,
    config: Value,
    backend: &'static str,
    name: String,
    closed: AtomicBool,
}

/// Loads a model.
#[pyfunction]
#[pyo3(signature = (model, *, backend = None, precision = "f32", cache_dtype = "auto"))]
pub(crate) fn load(
    py: Python<'_>,
    model: PathBuf,
    backend: Option<&str>,
    precision: &str,
    cache_dtype: &str,
) -> PyResult<Model> {
    let chosen = self::backend(py, backend)?;
    let precision: Precision = named(py, "precision", precision)?;
    let cache: CachePrecision = named(py, "cache_dtype", cache_dtype)?;
    let name = model.display().to_string();
    let open = move |found: fireclay::backend::FoundBackend| {
        found.run(ModelToLoad { model: fetched(&model)?, precision, cache })
    };
    let tell = |model: &Loaded, name: fireclay::backend::BackendName| {
        let config = serde_json::to_value(model.config()).unwrap_or_default();
        (Arc::new(model.tokenizer().clone()), config, name.as_str())
    };
    let (worker, (tokenizer, config, backend)) = Worker::start(py, chosen, open, tell)?;
    Ok(Model { worker, tokenizer, config, backend, name, closed: AtomicBool::new(false) })
}

impl Model {
    fn call<R: Send + 'static>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Loaded) -> Result<R, fireclay::Failure> + Send + 'static,
    ) -> PyResult<R> {
        self.worker.call(py, &Interrupt::default(), work)
    }

    fn rows(ids: &Bound<'_, PyAny>) -> PyResult<TokenRows> {
        let (ids, length) = token_rows(ids)?;
        Ok(TokenRows { ids, length })
    }

    fn written(&self, py: Python<'_>, prompts: Vec<Prompt>, options: GenerationOptions) -> PyResult<Vec<Generated>> {
        let interrupt = Interrupt::default();
        let ends = interrupt.clone();
        let work = move |model: &mut Loaded| model.generate(&prompts, &options, &ends, &mut |_, _| {});
        let all = self.worker.call(py, &interrupt, work)?;
        Ok(all.into_iter().map(Generated::from).collect())
    }

    fn streamed(&self, py: Python<'_>, prompt: Prompt, options: GenerationOptions) -> PyResult<Stream> {
        let _waiting = Waiting::begin().map_err(|problem| problem.raise(py))?;
        let interrupt = Interrupt::default();
        let (post, pieces) = mailbox();
        let ends = interrupt.clone();
        let work = move |model: &mut Loaded| {
            let mut all = model.generate(&[prompt], &options, &ends, &mut |_, text| post.put(text.to_string()))?;
            all.pop().ok_or_else(|| fireclay::Failure::new("nothing was written"))
        };
        let answer = self.worker.ask(interrupt.clone(), work).map_err(|problem| problem.raise(py))?;
        Ok(Stream { pieces, answer, interrupt, over: AtomicBool::new(false) })
    }

    /// Converts a conversation.
    fn dialogue(
        messages: &Bound<'_, PyAny>,
        tools: Option<&Bound<'_, PyAny>>,
        variables: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Prompt> {
        let py = messages.py();
        let Value::Array(messages) = json(messages)? else {
            return Err(usage(py, "messages must be a list of dicts with role and content"));
        };
        if let Some(other) = messages.iter().find(|message| !message["role"].is_string()) {
            return Err(usage(py, format!("a message must be a dict with role and content, not {other}")));
        }
        let tools = tools.map(json).transpose()?.unwrap_or_default();
        let variables = match variables.map(json).transpose()? {
            None | Some(Value::Null) => serde_json::Map::new(),
            Some(Value::Object(variables)) => variables,
            Some(other) => return Err(usage(py, format!("template_variables must be a dict, not {other}"))),
        };
        Ok(Prompt::Dialogue(Dialogue { messages, tools, variables }))
    }
}

#[pymethods]
impl Model {
    /// The configuration.
    #[getter]
    fn config<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        python(py, &self.config)
    }

    /// The backend.
    #[getter]
    fn backend(&self) -> &'static str {
        self.backend
    }

    /// The tokenizer.
    #[getter]
    fn tokenizer(&self) -> Tokenizer {
        Tokenizer(self.tokenizer.clone())
    }

    /// Generates from one prompt or several.
    #[pyo3(signature = (prompt, *, details = false, **keywords))]
    fn generate<'py>(
        &self,
        py: Python<'py>,
        prompt: &Bound<'py, PyAny>,
        details: bool,
        keywords: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let options = options(py, GenerationOptions::default(), keywords)?;
        let (prompts, one) = strings("prompt", prompt)?;
        let mut all = self.written(py, prompts.into_iter().map(Prompt::Text).collect(), options)?;
        match (one, details) {
            (true, _) => {
                let only = all.pop().ok_or_else(|| nothing(py))?;
                only.shown(py, details)
            }
            (false, true) => Ok(all.into_pyobject(py)?.into_any()),
            (false, false) => {
                let outputs: Vec<String> = all.into_iter().map(|generated| generated.text).collect();
                Ok(outputs.into_pyobject(py)?.into_any())
            }
        }
    }

    /// Generates from a prompt, piece by piece.
    #[pyo3(signature = (prompt, **keywords))]
    fn stream(&self, py: Python<'_>, prompt: String, keywords: Option<&Bound<'_, PyDict>>) -> PyResult<Stream> {
        let options = options(py, GenerationOptions::default(), keywords)?;
        self.streamed(py, Prompt::Text(prompt), options)
    }

    /// Answers a conversation.
    #[pyo3(signature = (
        messages, *, stream = false, details = false, tools = None, template_variables = None, **keywords
    ))]
    #[allow(clippy::too_many_arguments)] // Python's keywords.
    fn chat<'py>(
        &self,
        py: Python<'py>,
        messages: &Bound<'py, PyAny>,
        stream: bool,
        details: bool,
        tools: Option<&Bound<'py, PyAny>>,
        template_variables: Option<&Bound<'py, PyAny>>,
        keywords: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let base = GenerationOptions { temperature: 0.7, top_p: Some(0.9), ..GenerationOptions::default() };
        let options = options(py, base, keywords)?;
        let prompt = Self::dialogue(messages, tools, template_variables)?;
        if stream {
            return Ok(Bound::new(py, self.streamed(py, prompt, options)?)?.into_any());
        }
        let only = self.written(py, vec![prompt], options)?.pop().ok_or_else(|| nothing(py))?;
        only.shown(py, details)
    }

    /// Logits of the next token at each position.
    fn logits(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> PyResult<Tensor> {
        let rows = Self::rows(ids)?;
        self.call(py, move |model| model.logits(&rows)).map(Tensor::new)
    }

    /// Hidden states after the last norm.
    fn hidden_states(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> PyResult<Tensor> {
        let rows = Self::rows(ids)?;
        self.call(py, move |model| model.hidden_states(&rows)).map(Tensor::new)
    }

    /// Attention weights of each layer.
    fn attention(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> PyResult<Vec<Tensor>> {
        let rows = Self::rows(ids)?;
        let all = self.call(py, move |model| model.attention(&rows))?;
        Ok(all.into_iter().map(Tensor::new).collect())
    }

    /// Embeddings of sentences.
    fn embed<'py>(&self, py: Python<'py>, sentences: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let (sentences, one) = self::strings("sentences", sentences)?;
        let mut all = self.call(py, move |model| model.embed(&sentences))?;
        let numpy = py.import("numpy")?;
        match one {
            true => numpy.call_method1("array", (all.pop().unwrap_or_default(), "float32")),
            false => {
                let width = self.config["d_model"].as_u64().unwrap_or(0);
                let shape = (all.len(), width);
                numpy.call_method1("array", (all, "float32"))?.call_method1("reshape", (shape,))
            }
        }
    }

    /// Intents and slots of utterances, or the labels of texts.
    fn predict<'py>(&self, py: Python<'py>, utterances: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let (utterances, one) = self::strings("utterances", utterances)?;
        let all = self.call(py, move |model| model.predict(&utterances))?;
        let all = all.into_iter().map(|prediction| Prediction::new(py, prediction));
        let mut all = all.collect::<PyResult<Vec<Prediction>>>()?;
        match one {
            true => Ok(all.pop().ok_or_else(|| nothing(py))?.into_pyobject(py)?.into_any()),
            false => Ok(all.into_pyobject(py)?.into_any()),
        }
    }

    /// Perplexity of a text.
    #[pyo3(signature = (text, *, context = None, stride = None))]
    fn perplexity(&self, py: Python<'_>, text: String, context: Option<usize>, stride: Option<usize>) -> PyResult<f64> {
        Ok(self.call(py, move |model| model.evaluate(&text, (context, stride)))?.perplexity())
    }

    /// Every parameter by its path.
    fn parameters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let named = PyDict::new(py);
        for (name, tensor) in self.call(py, |model| model.parameters())? {
            named.set_item(name, Bound::new(py, Tensor::new(tensor))?)?;
        }
        Ok(named)
    }

    /// Frees the model.
    fn close(&self, py: Python<'_>) {
        if !self.closed.swap(true, Ordering::AcqRel) {
            self.worker.close(py);
        }
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(&self, py: Python<'_>, _kind: Py<PyAny>, _value: Py<PyAny>, _trace: Py<PyAny>) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        format!("<fireclay.Model {:?} on {}>", self.name, self.backend)
    }
}

/// Streamed output.
#[pyclass(frozen, module = "fireclay")]
pub(crate) struct Stream {
    pieces: Mailbox<String>,
    answer: crate::worker::Answer<fireclay::inference::generation::Generated>,
    interrupt: Interrupt,
    over: AtomicBool,
}

#[pymethods]
impl Stream {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<String>> {
        if self.over.load(Ordering::Acquire) {
            return Ok(None);
        }
        let stop = || self.interrupt.store(true, Ordering::Release);
        match next(py, &self.pieces, &stop, Duration::from_millis(100))? {
            Some(piece) => Ok(Some(piece)),
            None => {
                self.over.store(true, Ordering::Release);
                // Raises the error of the generation, if any.
                wait(py, &self.answer, stop).map(|_| None)
            }
        }
    }

    /// Stops the generation.
    fn close(&self) {
        self.interrupt.store(true, Ordering::Release);
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.interrupt.store(true, Ordering::Release);
        // Discards unread pieces.
        while let Taken::Message(_) = self.pieces.take(Duration::ZERO) {}
    }
}

/// Output of a prompt.
#[pyclass(frozen, get_all, module = "fireclay")]
pub(crate) struct Generated {
    text: String,
    tokens: Vec<u32>,
    prompt_tokens: usize,
    prefill_seconds: f64,
    decode_seconds: f64,
    decode_tokens_per_second: f64,
}

impl From<fireclay::inference::generation::Generated> for Generated {
    fn from(generated: fireclay::inference::generation::Generated) -> Self {
        Self {
            decode_tokens_per_second: generated.decode_tokens_per_second(),
            prefill_seconds: generated.prefill.as_secs_f64(),
            decode_seconds: generated.decode.as_secs_f64(),
            prompt_tokens: generated.prompt_tokens,
            tokens: generated.tokens,
            text: generated.text,
        }
    }
}

impl Generated {
    fn shown(self, py: Python<'_>, details: bool) -> PyResult<Bound<'_, PyAny>> {
        match details {
            true => Ok(self.into_pyobject(py)?.into_any()),
            false => Ok(self.text.into_pyobject(py)?.into_any()),
        }
    }
}

#[pymethods]
impl Generated {
    fn __repr__(&self) -> String {
        format!("<fireclay.Generated of {} tokens: {:?}>", self.tokens.len(), self.text)
    }
}

/// Intent and slots of an utterance, or the label of a text.
#[pyclass(frozen, get_all, module = "fireclay")]
pub(crate) struct Prediction {
    label: Option<String>,
    intent: Option<String>,
    probability: f64,
    spans: Vec<Py<Span>>,
}

/// A slot in an utterance.
#[pyclass(frozen, get_all, module = "fireclay")]
pub(crate) struct Span {
    slot: String,
    start: usize,
    end: usize,
    text: String,
}

impl Prediction {
    fn new(py: Python<'_>, prediction: prediction::Prediction) -> PyResult<Self> {
        let span = |prediction::PredictedSpan { slot, start, end, text }| Py::new(py, Span { slot, start, end, text });
        let spans = prediction.spans.into_iter().map(span).collect::<PyResult<_>>()?;
        let prediction::Prediction { label, intent, probability, .. } = prediction;
        Ok(Self { label, intent, probability, spans })
    }
}

#[pymethods]
impl Prediction {
    fn __repr__(&self) -> String {
        if let Some(label) = &self.label {
            return format!("<fireclay.Prediction {label} ({:.3})>", self.probability);
        }
        let intent = self.intent.as_deref().unwrap_or("none");
        format!("<fireclay.Prediction {intent} ({:.3}), {} spans>", self.probability, self.spans.len())
    }
}

#[pymethods]
impl Span {
    fn __repr__(&self) -> String {
        format!("<fireclay.Span {} {:?} [{}..{}]>", self.slot, self.text, self.start, self.end)
    }
}

/// Converts between text and token ids.
#[pyclass(frozen, module = "fireclay")]
pub(crate) struct Tokenizer(pub(crate) Arc<Tokens>);

#[pymethods]
impl Tokenizer {
    /// Token ids of a text; `prompt` adds special tokens before and after it.
    #[pyo3(signature = (text, *, prompt = false))]
    fn encode(&self, py: Python<'_>, text: &str, prompt: bool) -> PyResult<Vec<u32>> {
        let tokens = if prompt { self.0.encode_prompt(text) } else { self.0.encode(text) };
        tokens.map_err(|error| failure(py, error.into()))
    }

    /// Text of token ids.
    fn decode(&self, ids: &Bound<'_, PyAny>) -> PyResult<String> {
        let py = ids.py();
        let (ids, _) = token_rows(ids)?;
        let known = ids.iter().map(|id| u32::try_from(*id)).collect::<Result<Vec<_>, _>>();
        let known = known.map_err(|_| Problem::Usage("token ids must not be negative".into()).raise(py))?;
        self.0.decode(&known).map_err(|error| failure(py, error.into()))
    }

    /// Size of the vocabulary.
    #[getter]
    fn vocab_size(&self) -> usize {
        self.0.vocab_size()
    }

    /// The id of a token, if it is in the vocabulary.
    fn token_id(&self, token: &str) -> Option<u32> {
        self.0.token_id(token)
    }

    fn __repr__(&self) -> String {
        format!("<fireclay.Tokenizer of {} tokens>", self.0.vocab_size())
    }
}
