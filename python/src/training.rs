//! Training runs, and a trainer for custom loops.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use burn::train::Interrupter;
use fireclay::Failure;
use fireclay::backend::BackendName;
use fireclay::inference::generation::Interrupt;
use fireclay::precision::Precision;
use fireclay::recipe::{RecipeRequest, TaskName};
use fireclay::training::events::{Event, Sink};
use fireclay::training::loaded::{LoadedTrainer, StepFigures, StepTaken, TrainerToLoad};
use fireclay::training::{Outcome, TrainingRun, View};
use fireclay_datasets::TokenBatch;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString};
use serde_json::Value;

use crate::arguments::{backend, named, python};
use crate::errors::{Problem, failure, usage};
use crate::mailbox::{Post, Taken, mailbox};
use crate::notices;
use crate::process::{Computing, Waiting};
use crate::tensor::token_rows;
use crate::worker::{Worker, caught, next, nothing};

/// Collects the arguments of a recipe.
#[allow(clippy::too_many_arguments)] // Python's keywords.
fn request(
    py: Python<'_>,
    recipe: Option<PathBuf>,
    task: Option<&str>,
    data: Option<PathBuf>,
    field: Option<String>,
    init: Option<PathBuf>,
    precision: Option<&str>,
    overrides: Option<&Bound<'_, PyDict>>,
) -> PyResult<RecipeRequest> {
    let task: Option<TaskName> = task.map(|task| named(py, "task", task)).transpose()?;
    let precision: Option<Precision> = precision.map(|name| named(py, "precision", name)).transpose()?;
    let mut settings = Vec::new();
    for (key, value) in overrides.into_iter().flatten() {
        let key: String = key.extract()?;
        settings.push(format!("{}={}", key.replace("__", "."), setting(&key, &value)?));
    }
    Ok(RecipeRequest { recipe, task, data, field, init, precision, settings })
}

/// Converts a value to TOML.
fn setting(key: &str, value: &Bound<'_, PyAny>) -> PyResult<String> {
    let py = value.py();
    if value.is_instance_of::<PyBool>() {
        return Ok(value.extract::<bool>()?.to_string());
    }
    if value.is_instance_of::<PyInt>() {
        return Ok(value.str()?.to_string());
    }
    if value.is_instance_of::<PyFloat>() {
        let value: f64 = value.extract()?;
        return Ok(format!("{value:?}"));
    }
    if value.is_instance_of::<PyString>() || value.hasattr("__fspath__")? {
        // Quoted, so that a string of digits stays a string.
        let text = Value::String(value.str()?.to_string());
        return Ok(text.to_string());
    }
    if let Ok(list) = value.cast::<PyList>() {
        let all = list.iter().map(|value| setting(key, &value)).collect::<PyResult<Vec<_>>>()?;
        return Ok(format!("[{}]", all.join(", ")));
    }
    if let Ok(table) = value.cast::<PyDict>() {
        let pair = |(name, value): (Bound<'_, PyAny>, Bound<'_, PyAny>)| {
            let name = Value::String(name.str()?.to_string());
            Ok(format!("{name} = {}", setting(key, &value)?))
        };
        return Ok(format!("{{ {} }}", table.iter().map(pair).collect::<PyResult<Vec<_>>>()?.join(", ")));
    }
    Err(usage(py, format!("{key} = {value}: settings are numbers, strings, lists or dicts")))
}

/// Messages of a run.
enum News {
    Event(Value),
    Over(Result<Outcome, Problem>),
}

/// Sends events to the waiting thread.
struct Telling(Arc<Post<News>>);

impl Sink for Telling {
    fn tell(&mut self, event: &Event) -> Result<(), Failure> {
        self.0.put(News::Event(event.to_json()));
        Ok(())
    }
}

/// Trains a recipe, and returns the folder and the summary. An exception in `on_event` or from a
/// signal stops the run, and is raised once the run is saved.
#[pyfunction]
#[pyo3(signature = (
    recipe, task, data, field, init, precision, backend, out, resume, allow_changed_data, on_event, overrides,
))]
#[allow(clippy::too_many_arguments)] // Python's keywords.
pub(crate) fn _train<'py>(
    py: Python<'py>,
    recipe: Option<PathBuf>,
    task: Option<&str>,
    data: Option<PathBuf>,
    field: Option<String>,
    init: Option<PathBuf>,
    precision: Option<&str>,
    backend: Option<&str>,
    out: Option<PathBuf>,
    resume: Option<PathBuf>,
    allow_changed_data: bool,
    on_event: Option<Bound<'py, PyAny>>,
    overrides: Option<&Bound<'py, PyDict>>,
) -> PyResult<(String, Bound<'py, PyAny>)> {
    let _waiting = Waiting::begin().map_err(|problem| problem.raise(py))?;
    let chosen = self::backend(py, backend)?;
    let request = request(py, recipe, task, data, field, init, precision, overrides)?;
    let interrupter = Interrupter::new();
    let (post, news) = mailbox::<News>();
    let post = Arc::new(post);
    let (stop, asked) = (interrupter.clone(), interrupter.clone());
    let computing = Computing::begin(move || stop.stop(Some("the interpreter ends")));
    let (place, folder) = mailbox();
    let thread = move || {
        let _computing = computing;
        let listener = Box::new(Telling(post.clone()));
        let work = || {
            let found = chosen.unwrap_or_else(BackendName::best).found()?;
            let run = match resume {
                Some(out) => TrainingRun::resume(&out, allow_changed_data, |recipe| {
                    request.change(recipe)?.fetched(true, &mut |_, _, _| {})
                })?,
                None => {
                    let recipe = request.recipe()?.fetched(false, &mut |_, _, _| {})?;
                    let out = out.unwrap_or_else(|| TrainingRun::free_folder(&recipe.name));
                    TrainingRun::begin(recipe, &out)?
                }
            };
            place.put(run.folder().display().to_string());
            let name = found.name();
            let device = name.devices()?.into_iter().next().map_or_else(|| name.as_str().into(), |device| device.name);
            let run = run.with_view(View::Silent).with_record(device, vec!["fireclay.train".into()]);
            found.run(run.with_listener(listener).with_interrupter(asked))
        };
        let outcome = caught(work);
        post.put(News::Over(outcome));
    };
    let spawned = std::thread::Builder::new().name("fireclay".into()).spawn(thread);
    spawned.map_err(|error| Problem::Failed(format!("no thread for a run: {error}")).raise(py))?;
    let stop = || interrupter.stop(Some("interrupted"));
    let mut raised: Option<PyErr> = None;
    let outcome = loop {
        let came = match next(py, &news, &stop, Duration::ZERO) {
            Ok(came) => came,
            // The first exception waits for the save; the second does not.
            Err(error) if raised.is_some() => return Err(error),
            Err(error) => {
                raised = Some(error);
                continue;
            }
        };
        notices::log(py)?;
        match (came, &on_event) {
            (None, _) => return Err(raised.unwrap_or_else(|| nothing(py))),
            (Some(News::Over(outcome)), _) => break outcome,
            (Some(News::Event(event)), Some(on_event)) if raised.is_none() => {
                let told = python(py, &event).and_then(|event| on_event.call1((event,)));
                if let Err(error) = told {
                    stop();
                    raised = Some(error);
                }
            }
            (Some(News::Event(_)), _) => {}
        }
    };
    let folder = match folder.take(Duration::ZERO) {
        Taken::Message(folder) => folder,
        _ => String::new(),
    };
    match (outcome, raised) {
        (Ok(Outcome::Done(summary)), None) => Ok((folder, python(py, &summary)?)),
        (Ok(Outcome::Done(_)), Some(error)) => Err(error),
        (Ok(Outcome::Interrupted(step)), raised) => {
            let text = match step {
                0 => "stopped before the first step: nothing to save".to_string(),
                _ => format!("stopped and saved at step {step}; continue with fireclay.train(resume={folder:?})"),
            };
            let logger = py.import("logging")?.call_method1("getLogger", ("fireclay",))?;
            logger.call_method1("info", ("%s", &text))?;
            Err(raised.unwrap_or_else(|| Problem::Failed(text).raise(py)))
        }
        (Err(_), Some(error)) => Err(error),
        (Err(problem), None) => Err(problem.raise(py)),
    }
}

/// A trainer of any backend.
type Loaded = dyn LoadedTrainer;

/// A model in training.
#[pyclass(frozen, subclass, module = "fireclay")]
pub(crate) struct Trainer {
    worker: Worker<Loaded>,
    recipe: Value,
    backend: &'static str,
}

#[pymethods]
impl Trainer {
    #[new]
    #[pyo3(signature = (
        recipe = None, *, task = None, data = None, field = None, init = None, precision = None, backend = None,
        **overrides
    ))]
    #[allow(clippy::too_many_arguments)] // Python's keywords.
    fn new(
        py: Python<'_>,
        recipe: Option<PathBuf>,
        task: Option<&str>,
        data: Option<PathBuf>,
        field: Option<String>,
        init: Option<PathBuf>,
        precision: Option<&str>,
        backend: Option<&str>,
        overrides: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let chosen = self::backend(py, backend)?;
        let request = request(py, recipe, task, data, field, init, precision, overrides)?;
        let open = move |found: fireclay::backend::FoundBackend| {
            found.run(TrainerToLoad(request.recipe()?.fetched(false, &mut |_, _, _| {})?))
        };
        let tell = |trainer: &Loaded, name: BackendName| {
            (serde_json::to_value(trainer.recipe()).unwrap_or_default(), name.as_str())
        };
        let (worker, (recipe, backend)) = Worker::start(py, chosen, open, tell)?;
        Ok(Self { worker, recipe, backend })
    }

    /// One optimizer step, over rows of tokens or the recipe's data.
    #[pyo3(signature = (input_ids = None, target_ids = None))]
    fn step(
        slf: &Bound<'_, Self>,
        input_ids: Option<&Bound<'_, PyAny>>,
        target_ids: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Step> {
        let py = slf.py();
        let batch = match (input_ids, target_ids) {
            (None, None) => None,
            (Some(inputs), Some(targets)) => {
                let ((inputs, length), (targets, wanted)) = (token_rows(inputs)?, token_rows(targets)?);
                if length != wanted {
                    return Err(usage(py, format!("rows have {length} tokens but {wanted} targets")));
                }
                let narrow = |ids: Vec<i64>| {
                    let narrow = |id: i64| {
                        i32::try_from(id).map_err(|_| usage(py, format!("token {id} is not in the vocabulary")))
                    };
                    ids.into_iter().map(narrow).collect::<PyResult<Vec<i32>>>()
                };
                let batch = TokenBatch::new(narrow(inputs)?, narrow(targets)?, length);
                Some(batch.map_err(|error| failure(py, Failure::usage(error.to_string())))?)
            }
            _ => return Err(usage(py, "a step takes input_ids and target_ids, or neither")),
        };
        let taken = slf.get().worker.call(py, &Interrupt::default(), move |trainer| trainer.step(batch))?;
        let StepTaken { step, learning_rate, tokens, figures } = taken;
        let figures = Mutex::new(Figures::Unread(figures));
        Ok(Step { step, learning_rate, tokens, figures, trainer: slf.clone().unbind() })
    }

    /// The mean loss on held-out data of the recipe.
    #[pyo3(signature = (tokens = None))]
    fn validate(&self, py: Python<'_>, tokens: Option<usize>) -> PyResult<f64> {
        let tokens = tokens.or_else(|| self.recipe["training"]["valid_tokens"].as_u64().map(|tokens| tokens as usize));
        let tokens = tokens.unwrap_or(10_000);
        Ok(self.worker.call(py, &Interrupt::default(), move |trainer| trainer.validate(tokens))?.loss)
    }

    /// Saves the model.
    fn save(&self, py: Python<'_>, folder: PathBuf) -> PyResult<()> {
        self.worker.call(py, &Interrupt::default(), move |trainer| trainer.save(&folder))
    }

    /// The number of steps taken.
    #[getter]
    fn steps(&self, py: Python<'_>) -> PyResult<u64> {
        self.worker.call(py, &Interrupt::default(), |trainer| Ok(trainer.steps()))
    }

    /// The recipe, with the sizes of its data.
    #[getter]
    fn recipe<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        python(py, &self.recipe)
    }

    /// The backend.
    #[getter]
    fn backend(&self) -> &'static str {
        self.backend
    }

    /// Frees the trainer.
    fn close(&self, py: Python<'_>) {
        self.worker.close(py);
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(&self, py: Python<'_>, _kind: Py<PyAny>, _value: Py<PyAny>, _trace: Py<PyAny>) {
        self.close(py);
    }
}

enum Figures {
    Unread(StepFigures),
    Read(f64, f64),
    /// Reading failed.
    Lost,
}

/// A step. Its loss is read from the device on first use.
#[pyclass(frozen, module = "fireclay")]
pub(crate) struct Step {
    #[pyo3(get)]
    step: u64,
    #[pyo3(get)]
    learning_rate: f64,
    #[pyo3(get)]
    tokens: usize,
    figures: Mutex<Figures>,
    trainer: Py<Trainer>,
}

impl Step {
    fn read(&self, py: Python<'_>) -> PyResult<(f64, f64)> {
        let lock = || self.figures.lock().unwrap_or_else(PoisonError::into_inner);
        // A separate statement: in a `match`, the lock would be held to its end.
        let figures = std::mem::replace(&mut *lock(), Figures::Lost);
        let unread = match figures {
            Figures::Unread(unread) => unread,
            Figures::Read(loss, norm) => {
                *lock() = Figures::Read(loss, norm);
                return Ok((loss, norm));
            }
            Figures::Lost => return Err(Problem::Failed("the loss of this step could not be read".into()).raise(py)),
        };
        let (loss, norm) = self.trainer.get().worker.call(py, &Interrupt::default(), move |_| unread())?;
        *lock() = Figures::Read(loss, norm);
        Ok((loss, norm))
    }
}

#[pymethods]
impl Step {
    /// Loss before the step, in nats per target.
    #[getter]
    fn loss(&self, py: Python<'_>) -> PyResult<f64> {
        Ok(self.read(py)?.0)
    }

    /// Global gradient norm before clipping.
    #[getter]
    fn gradient_norm(&self, py: Python<'_>) -> PyResult<f64> {
        Ok(self.read(py)?.1)
    }

    fn __float__(&self, py: Python<'_>) -> PyResult<f64> {
        self.loss(py)
    }

    fn __format__(&self, py: Python<'_>, specification: &str) -> PyResult<String> {
        PyFloat::new(py, self.loss(py)?).call_method1("__format__", (specification,))?.extract()
    }

    fn __repr__(&self) -> String {
        format!("<fireclay.Step {}>", self.step)
    }
}
