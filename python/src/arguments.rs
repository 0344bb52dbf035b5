//! Converts arguments from and to Python.

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use fireclay::Failure;
use fireclay::backend::BackendName;
use fireclay::download::model_folder;
use fireclay::inference::generation::GenerationOptions;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};
use serde_json::Value;

use crate::errors::{failure, usage};

/// Parses a name of the command line.
pub(crate) fn named<T: ValueEnum>(py: Python<'_>, what: &str, name: &str) -> PyResult<T> {
    T::from_str(name, false).map_err(|_| {
        let known = T::value_variants().iter().filter_map(ValueEnum::to_possible_value);
        let known: Vec<String> = known.map(|value| value.get_name().to_string()).collect();
        usage(py, format!("{what} must be one of {}, not {name:?}", known.join(", ")))
    })
}

/// Parses the name of a backend.
pub(crate) fn backend(py: Python<'_>, name: Option<&str>) -> PyResult<Option<BackendName>> {
    name.map(|name| named(py, "backend", name)).transpose()
}

/// Strings, and whether a single one was passed.
pub(crate) fn strings(what: &str, strings: &Bound<'_, PyAny>) -> PyResult<(Vec<String>, bool)> {
    if strings.is_instance_of::<PyString>() {
        return Ok((vec![strings.extract()?], true));
    }
    let several = strings.extract();
    several
        .map(|strings| (strings, false))
        .map_err(|_| usage(strings.py(), format!("{what} must be a str or a list of str")))
}

/// The folder of a model, downloaded if it is a name on the hub.
pub(crate) fn fetched(model: &Path) -> Result<PathBuf, Failure> {
    Ok(model_folder(model, &mut |_, _, _| {})?)
}

/// Converts to JSON.
pub(crate) fn json(value: &Bound<'_, PyAny>) -> PyResult<Value> {
    let py = value.py();
    let text: String = py.import("json")?.call_method1("dumps", (value,))?.extract()?;
    serde_json::from_str(&text).map_err(|error| usage(py, format!("not JSON: {error}")))
}

/// Converts from JSON.
pub(crate) fn python<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    py.import("json")?.call_method1("loads", (value.to_string(),))
}

/// Applies keyword arguments to generation options, and refuses unknown ones.
pub(crate) fn options(
    py: Python<'_>,
    mut options: GenerationOptions,
    keywords: Option<&Bound<'_, PyDict>>,
) -> PyResult<GenerationOptions> {
    for (name, value) in keywords.into_iter().flatten() {
        let name: String = name.extract()?;
        match name.as_str() {
            "max_tokens" => options.max_tokens = value.extract()?,
            "temperature" => options.temperature = value.extract()?,
            "top_k" => options.top_k = value.extract()?,
            "top_p" => options.top_p = value.extract()?,
            "min_p" => options.min_p = value.extract()?,
            "repetition_penalty" => options.penalties.repetition = value.extract()?,
            "presence_penalty" => options.penalties.presence = value.extract()?,
            "frequency_penalty" => options.penalties.frequency = value.extract()?,
            "seed" => options.seed = value.extract()?,
            "stop" if value.is_none() => options.stop = Vec::new(),
            "stop" => options.stop = strings("stop", &value)?.0,
            _ => return Err(PyTypeError::new_err(format!("unexpected keyword argument '{name}'"))),
        }
    }
    options.validate().map_err(|error| failure(py, error))?;
    Ok(options)
}
