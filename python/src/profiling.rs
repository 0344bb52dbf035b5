//! Profiles and devices.

use std::path::PathBuf;

use fireclay::Failure;
use fireclay::backend::{BACKENDS, BackendName};
use fireclay::inference::generation::GenerationOptions;
use fireclay::precision::{CachePrecision, Precision};
use fireclay::profiling::{Profile as Profiled, ProfileGeneration, ProfileOptions, ProfilePrediction, ProfileTraining};
use fireclay::recipe::RecipeRequest;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use serde_json::json;

use crate::arguments::{backend, fetched, named, python, strings};
use crate::errors::{Problem, failure, usage};
use crate::mailbox::mailbox;
use crate::process::{Computing, Waiting};
use crate::worker::{caught, wait};

/// A profile.
#[pyclass(frozen, module = "fireclay")]
pub(crate) struct Profile(Profiled);

#[pymethods]
impl Profile {
    /// Seconds per step, token or batch, measured without recording.
    #[getter]
    fn seconds(&self) -> f64 {
        self.0.seconds
    }

    /// The table and totals.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        python(py, &self.0.to_json())
    }

    /// Writes a page with the table, a flame graph and the roofline.
    fn write_html(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        self.0.write_html(&path).map_err(|error| failure(py, error))
    }

    /// Writes a trace for Perfetto.
    fn write_trace(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        self.0.write_trace(&path).map_err(|error| failure(py, error))
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }
}

/// Profiles training, generation or prediction.
#[pyfunction]
#[pyo3(signature = (what, recipe, data, model, prompt, utterances, batch, precision, backend, count, warm_up))]
#[allow(clippy::too_many_arguments)] // Python's keywords.
pub(crate) fn _profile(
    py: Python<'_>,
    what: &str,
    recipe: Option<PathBuf>,
    data: Option<PathBuf>,
    model: Option<PathBuf>,
    prompt: Option<String>,
    utterances: Option<&Bound<'_, PyAny>>,
    batch: usize,
    precision: Option<&str>,
    backend: Option<&str>,
    count: u64,
    warm_up: u64,
) -> PyResult<Profile> {
    let _waiting = Waiting::begin().map_err(|problem| problem.raise(py))?;
    let chosen = self::backend(py, backend)?;
    let precision: Option<Precision> = precision.map(|name| named(py, "precision", name)).transpose()?;
    let utterances = utterances
        .map(|utterances| self::strings("utterances", utterances))
        .transpose()?
        .map(|(utterances, _)| utterances);
    if count == 0 {
        return Err(usage(py, "count must be at least 1"));
    }
    enum Work {
        Train(RecipeRequest),
        Generate(PathBuf, String),
        Predict(PathBuf, Vec<String>),
    }
    let work = match (what, model, prompt, utterances) {
        ("train", None, None, None) => Work::Train(RecipeRequest { recipe, data, precision, ..Default::default() }),
        ("generate", Some(model), Some(prompt), None) => Work::Generate(model, prompt),
        ("predict", Some(model), None, Some(utterances)) => Work::Predict(model, utterances),
        _ => {
            return Err(usage(
                py,
                "profile(\"train\", recipe=..), profile(\"generate\", model=.., prompt=..) or profile(\"predict\", \
                 model=.., utterances=..)",
            ));
        }
    };
    let (post, answer) = mailbox();
    // Ends after a fixed number of steps.
    let computing = Computing::begin(|| {});
    let thread = move || {
        let _computing = computing;
        let work = || -> Result<Profiled, Failure> {
            let found = chosen.unwrap_or_else(BackendName::best).found()?;
            let name = found.name();
            let device = name.devices()?.into_iter().next().map_or_else(|| name.as_str().into(), |device| device.name);
            let options = ProfileOptions { warm_up: warm_up.max(1), count, device, peak: None };
            let precision = precision.unwrap_or(Precision::F32);
            match work {
                Work::Train(request) => {
                    let recipe = request.recipe()?.fetched(false, &mut |_, _, _| {})?;
                    found.run(ProfileTraining { recipe, options })
                }
                Work::Generate(model, prompt) => {
                    let (model, prompts) = (fetched(&model)?, vec![prompt; batch.max(1)]);
                    let (generation, cache) = (GenerationOptions::default(), CachePrecision::Auto);
                    found.run(ProfileGeneration { model, prompts, generation, precision, cache, options })
                }
                Work::Predict(model, utterances) => {
                    found.run(ProfilePrediction { model: fetched(&model)?, utterances, precision, options })
                }
            }
        };
        post.put(caught(work));
    };
    let spawned = std::thread::Builder::new().name("fireclay".into()).spawn(thread);
    spawned.map_err(|error| Problem::Failed(format!("no thread for a profile: {error}")).raise(py))?;
    wait(py, &answer, || {}).map(Profile)
}

/// All backends: built-in or not, and their devices.
#[pyfunction]
pub(crate) fn devices(py: Python<'_>) -> PyResult<Bound<'_, PyList>> {
    let found = py.detach(|| {
        let best = BackendName::best();
        BACKENDS.map(|backend| {
            let (devices, missing) = match backend.devices() {
                Ok(devices) => (devices, None),
                Err(failure) => (Vec::new(), Some(failure.to_string())),
            };
            let devices = devices.iter().map(|device| json!({ "name": device.name, "detail": device.detail }));
            json!({
                "backend": backend.as_str(), "built_in": backend.is_built_in(), "devices": devices.collect::<Vec<_>>(),
                "missing": missing, "default": backend == best,
            })
        })
    });
    let all = PyList::empty(py);
    for backend in found {
        all.append(python(py, &backend)?.cast::<PyDict>()?)?;
    }
    Ok(all)
}
