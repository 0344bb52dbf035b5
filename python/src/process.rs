//! Process state: detects forks, and stops all work before the interpreter exits.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pyo3::prelude::*;

use crate::errors::Problem;

/// How long the interpreter's exit waits for running work.
const PATIENCE: Duration = Duration::from_secs(20);

/// The process that owns the threads; zero before first use.
static OWNER: AtomicU32 = AtomicU32::new(0);
static ENDING: AtomicBool = AtomicBool::new(false);
/// Waiting calls from Python, and computing threads.
static WAITING: AtomicUsize = AtomicUsize::new(0);
static COMPUTING: AtomicUsize = AtomicUsize::new(0);

type Stop = Box<dyn Fn() + Send>;
static STOPS: Mutex<Option<HashMap<u64, Stop>>> = Mutex::new(None);
static NEXT: AtomicU64 = AtomicU64::new(0);

fn stops() -> MutexGuard<'static, Option<HashMap<u64, Stop>>> {
    STOPS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether this process was forked after first use, and so lacks the threads.
pub(crate) fn is_forked() -> bool {
    !matches!(OWNER.load(Ordering::Acquire), 0) && OWNER.load(Ordering::Acquire) != std::process::id()
}

/// Whether the interpreter is exiting.
pub(crate) fn is_ending() -> bool {
    ENDING.load(Ordering::Acquire)
}

/// A waiting call.
pub(crate) struct Waiting;

impl Waiting {
    /// Starts to wait; fails in a forked child and at exit.
    pub(crate) fn begin() -> Result<Self, Problem> {
        // The first process to compute owns the threads.
        let _ = OWNER.compare_exchange(0, std::process::id(), Ordering::AcqRel, Ordering::Acquire);
        if is_forked() {
            return Err(Problem::Failed(
                "this process was forked after fireclay was used, and lacks its threads: start processes with \
                 multiprocessing.get_context(\"spawn\"), or use fireclay only in the child"
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

/// The error for calls at exit.
pub(crate) fn ended() -> Problem {
    Problem::Failed("the interpreter is exiting".into())
}

/// Marks a computing thread until dropped.
pub(crate) struct Computing(u64);

impl Computing {
    /// Registers the thread; `stop` asks it to stop.
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

/// Stops all work. `atexit` calls this while other threads can still take the GIL.
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
