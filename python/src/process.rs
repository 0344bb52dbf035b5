//! What concerns the process: that it was not forked, and that nothing computes any more when the interpreter ends.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pyo3::prelude::*;

use crate::errors::Problem;

/// How long the interpreter's end waits for what computes.
const PATIENCE: Duration = Duration::from_secs(20);

/// The process whose threads compute; zero for none yet.
static OWNER: AtomicU32 = AtomicU32::new(0);
static ENDING: AtomicBool = AtomicBool::new(false);
/// Calls from Python that wait, and threads that compute.
static WAITING: AtomicUsize = AtomicUsize::new(0);
static COMPUTING: AtomicUsize = AtomicUsize::new(0);

type Stop = Box<dyn Fn() + Send>;
static STOPS: Mutex<Option<HashMap<u64, Stop>>> = Mutex::new(None);
static NEXT: AtomicU64 = AtomicU64::new(0);

fn stops() -> MutexGuard<'static, Option<HashMap<u64, Stop>>> {
    STOPS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether this process's threads are the ones that compute: a fork takes none of them along.
pub(crate) fn is_forked() -> bool {
    !matches!(OWNER.load(Ordering::Acquire), 0) && OWNER.load(Ordering::Acquire) != std::process::id()
}

/// Whether the interpreter is about to end.
pub(crate) fn is_ending() -> bool {
    ENDING.load(Ordering::Acquire)
}

/// A call that waits for what computes.
pub(crate) struct Waiting;

impl Waiting {
    /// Begins to wait.
    pub(crate) fn begin() -> Result<Self, Problem> {
        // The first process that computes is the one.
        let _ = OWNER.compare_exchange(0, std::process::id(), Ordering::AcqRel, Ordering::Acquire);
        if is_forked() {
            return Err(Problem::Failed(
                "this process was forked from one that had used fireclay, and has none of its threads: start processes with \
                 multiprocessing.get_context(\"spawn\"), or use fireclay in the child alone"
                    .into(),
            ));
        }
        WAITING.fetch_add(1, Ordering::AcqRel);
        if is_ending() {
            WAITING.fetch_sub(1, Ordering::AcqRel);
            return Err(ended());
        }
        Ok(Self)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        WAITING.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Why nothing is computed at the end.
pub(crate) fn ended() -> Problem {
    Problem::Failed("the interpreter is about to end: nothing is computed any more".into())
}

/// A thread that computes, until this is dropped.
pub(crate) struct Computing(u64);

impl Computing {
    /// Counts the thread; `stop` asks it to end.
    pub(crate) fn begin(stop: impl Fn() + Send + 'static) -> Self {
        COMPUTING.fetch_add(1, Ordering::AcqRel);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        stops().get_or_insert_default().insert(number, Box::new(stop));
        Self(number)
    }
}

impl Drop for Computing {
    fn drop(&mut self) {
        stops().get_or_insert_default().remove(&self.0);
        COMPUTING.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Ends all that computes; `atexit` calls it, while threads can still take the interpreter.
#[pyfunction]
pub(crate) fn _end(py: Python<'_>) {
    if is_forked() || ENDING.swap(true, Ordering::AcqRel) {
        return;
    }
    py.detach(|| {
        let begun = Instant::now();
        while COMPUTING.load(Ordering::Acquire) + WAITING.load(Ordering::Acquire) > 0 && begun.elapsed() < PATIENCE {
            stops().iter().flat_map(HashMap::values).for_each(|stop| stop());
            std::thread::sleep(Duration::from_millis(2));
        }
    });
}
