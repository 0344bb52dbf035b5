//! Failures as Python exceptions, which `fireclay/_errors.py` defines.

use std::sync::{Mutex, PoisonError};

use fireclay::Failure;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

/// Why a device failed, after which it is unusable.
static DEVICE_FAILED: Mutex<Option<String>> = Mutex::new(None);

/// A one-line message and its kind.
#[derive(Clone, Debug)]
pub(crate) enum Problem {
    /// A failure.
    Failed(String),
    /// Wrong usage.
    Usage(String),
    /// A device failure.
    Device(String),
}

impl From<Failure> for Problem {
    fn from(failure: Failure) -> Self {
        let (usage, text) = (failure.exit_code() == 2, failure.to_string());
        match usage {
            true => Self::Usage(text),
            false if text.starts_with("the device failed") => Self::Device(text),
            false => Self::Failed(text),
        }
    }
}

impl Problem {
    /// The message of a panic.
    pub(crate) fn of_panic(payload: &(dyn std::any::Any + Send)) -> Self {
        let said = payload.downcast_ref::<String>().map(String::as_str);
        let said = said.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("unknown");
        Self::Failed(format!("internal error: {}", one_line(said)))
    }

    pub(crate) fn raise(self, py: Python<'_>) -> PyErr {
        static CLASSES: [PyOnceLock<Py<PyType>>; 3] = [const { PyOnceLock::new() }; 3];
        let (at, name, text) = match self {
            Self::Failed(text) => (0, "Error", text),
            Self::Usage(text) => (1, "UsageError", text),
            Self::Device(text) => (2, "DeviceError", text),
        };
        match CLASSES[at].import(py, "fireclay._errors", name) {
            Ok(class) => PyErr::from_type(class.clone(), text),
            Err(error) => error,
        }
    }
}

/// A usage error.
pub(crate) fn usage(py: Python<'_>, text: impl Into<String>) -> PyErr {
    Problem::Usage(text.into()).raise(py)
}

/// A failure as an exception.
pub(crate) fn failure(py: Python<'_>, failure: Failure) -> PyErr {
    Problem::from(failure).raise(py)
}

/// Silences panics, which become exceptions. A panic on a device thread makes the device unusable
/// and reaches no caller, so it is stored for those who wait.
pub(crate) fn keep_panics() {
    std::panic::set_hook(Box::new(|panic| {
        if std::thread::current().name().is_some_and(|name| name.starts_with("DS")) {
            let text = format!("the device failed: {}", one_line(panic.payload_as_str().unwrap_or("unknown")));
            DEVICE_FAILED.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(text);
        }
    }));
}

/// The failure of a device, if one failed.
pub(crate) fn device_failure() -> Option<Problem> {
    DEVICE_FAILED.lock().unwrap_or_else(PoisonError::into_inner).clone().map(Problem::Device)
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
