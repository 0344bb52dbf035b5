//! Sends the library's notices to Python's logger `fireclay`.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use fireclay_kernels::notices::{Level, take_notices};
use pyo3::prelude::*;

static SAID: Mutex<Vec<(Level, String)>> = Mutex::new(Vec::new());
static ANY: AtomicBool = AtomicBool::new(false);

/// Stops the library from printing.
pub(crate) fn take() {
    take_notices(|level, text| {
        SAID.lock().unwrap_or_else(PoisonError::into_inner).push((level, text.trim().to_string()));
        ANY.store(true, Ordering::Release);
    });
}

/// Logs the notices since the last call.
pub(crate) fn log(py: Python<'_>) -> PyResult<()> {
    if !ANY.swap(false, Ordering::Acquire) {
        return Ok(());
    }
    let said = std::mem::take(&mut *SAID.lock().unwrap_or_else(PoisonError::into_inner));
    let logger = py.import("logging")?.call_method1("getLogger", ("fireclay",))?;
    for (level, text) in said {
        let level = if level == Level::Warning { 30 } else { 20 };
        logger.call_method1("log", (level, "%s", text))?;
    }
    Ok(())
}
