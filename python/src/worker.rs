//! A thread that owns a model and runs jobs in order; callers wait without the GIL.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fireclay::Failure;
use fireclay::backend::{BackendName, FoundBackend};
use fireclay::inference::generation::Interrupt;
use fireclay_kernels::reclaim_shared;
use pyo3::prelude::*;

use crate::errors::{Problem, device_failure};
use crate::mailbox::{Mailbox, Taken, mailbox};
use crate::notices;
use crate::process::{Computing, Waiting, ended, is_ending, is_forked};

/// Time between two checks for signals.
const LOOK: Duration = Duration::from_millis(20);
/// How long an interrupted call waits for its job before it leaves the job running.
const GRACE: Duration = Duration::from_millis(100);
/// How long dropping a model waits for its thread.
const END: Duration = Duration::from_secs(10);

enum Message<M: ?Sized> {
    Job(Box<dyn FnOnce(&mut M) + Send>),
    End,
}

/// The result of a job.
pub(crate) type Answer<R> = Mailbox<Result<R, Problem>>;

/// The handle of a thread with a model.
pub(crate) struct Worker<M: ?Sized> {
    messages: Sender<Message<M>>,
    /// Interrupts the current job.
    current: Arc<Mutex<Interrupt>>,
    /// Closed when the thread has finished.
    over: Mailbox<()>,
}

impl<M: ?Sized + Send + 'static> Worker<M> {
    /// Starts a thread that opens a model on `backend` (default: the best one), and returns what
    /// `tell` extracts from it.
    pub(crate) fn start<T: Send + 'static>(
        py: Python<'_>,
        backend: Option<BackendName>,
        open: impl FnOnce(FoundBackend) -> Result<Box<M>, Failure> + Send + 'static,
        tell: impl FnOnce(&M, BackendName) -> T + Send + 'static,
    ) -> PyResult<(Self, T)> {
        let _waiting = Waiting::begin().map_err(|problem| problem.raise(py))?;
        let (opened, answer) = mailbox();
        let (end, over) = mailbox::<()>();
        let (messages, asked) = channel::<Message<M>>();
        let current = Arc::new(Mutex::new(Interrupt::default()));
        let (to_end, interrupts) = (messages.clone(), current.clone());
        let computing = Computing::begin(move || {
            lock(&interrupts).store(true, Ordering::Release);
            // Fails only if the thread has finished.
            let _ = to_end.send(Message::End);
        });
        let thread = move || {
            let (_end, _computing) = (end, computing);
            let opening = || {
                let found = backend.unwrap_or_else(BackendName::best).found()?;
                let model = open(found)?;
                let told = tell(&*model, found.name());
                Ok((model, found, told))
            };
            let (mut model, found) = match caught(opening) {
                Ok((model, found, told)) => {
                    opened.put(Ok(told));
                    drop(opened);
                    (model, found)
                }
                Err(problem) => return opened.put(Err(problem)),
            };
            while let Ok(Message::Job(job)) = asked.recv() {
                found.enter(|| job(&mut *model));
                reclaim_shared();
            }
            found.enter(|| drop(model));
            reclaim_shared();
        };
        let spawned = std::thread::Builder::new().name("fireclay".into()).spawn(thread);
        spawned.map_err(|error| Problem::Failed(format!("no thread for a model: {error}")).raise(py))?;
        let told = wait(py, &answer, || {}).inspect_err(|_| {
            // The thread exits once it has loaded the model.
            let _ = messages.send(Message::End);
        })?;
        Ok((Self { messages, current, over }, told))
    }

    /// Queues `work`, which `interrupt` stops, and returns without waiting.
    pub(crate) fn ask<R: Send + 'static>(
        &self,
        interrupt: Interrupt,
        work: impl FnOnce(&mut M) -> Result<R, Failure> + Send + 'static,
    ) -> Result<Answer<R>, Problem> {
        let (post, answer) = mailbox();
        let current = self.current.clone();
        let job = move |model: &mut M| {
            *lock(&current) = interrupt;
            post.put(caught(|| work(model)));
        };
        let gone = |_| device_failure().unwrap_or_else(|| Problem::Failed("the model is closed".into()));
        self.messages.send(Message::Job(Box::new(job))).map_err(gone)?;
        Ok(answer)
    }

    /// Queues `work`, which `interrupt` stops, and waits for its result.
    pub(crate) fn call<R: Send + 'static>(
        &self,
        py: Python<'_>,
        interrupt: &Interrupt,
        work: impl FnOnce(&mut M) -> Result<R, Failure> + Send + 'static,
    ) -> PyResult<R> {
        let _waiting = Waiting::begin().map_err(|problem| problem.raise(py))?;
        let answer = self.ask(interrupt.clone(), work).map_err(|problem| problem.raise(py))?;
        wait(py, &answer, || interrupt.store(true, Ordering::Release))
    }

    /// Stops the thread, and waits until its model is dropped.
    pub(crate) fn close(&self, py: Python<'_>) {
        if is_forked() || is_ending() {
            return;
        }
        lock(&self.current).store(true, Ordering::Release);
        // Fails only if the thread has finished.
        let _ = self.messages.send(Message::End);
        py.detach(|| self.over.take(END));
    }
}

impl<M: ?Sized> Drop for Worker<M> {
    fn drop(&mut self) {
        if is_forked() || is_ending() {
            return;
        }
        lock(&self.current).store(true, Ordering::Release);
        let _ = self.messages.send(Message::End);
        // So that its memory is free when the next model loads.
        Python::try_attach(|py| py.detach(|| self.over.take(END)));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `work`, and turns a panic into a problem.
pub(crate) fn caught<R>(work: impl FnOnce() -> Result<R, Failure>) -> Result<R, Problem> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(Problem::from),
        Err(payload) => Err(device_failure().unwrap_or_else(|| Problem::of_panic(&*payload))),
    }
}

/// Waits for a result without the GIL, and logs notices.
///
/// If a signal raises an exception, calls `stop`, and raises it when the job has finished or after
/// [`GRACE`].
pub(crate) fn wait<R: Send>(py: Python<'_>, answer: &Answer<R>, stop: impl Fn()) -> PyResult<R> {
    let result = match next(py, answer, &stop, GRACE) {
        Ok(Some(result)) => result.map_err(|problem| problem.raise(py)),
        Ok(None) => Err(nothing(py)),
        Err(error) => Err(error),
    };
    notices::log(py)?;
    result
}

/// The error for a mailbox that closed without a result.
pub(crate) fn nothing(py: Python<'_>) -> PyErr {
    device_failure().unwrap_or_else(|| Problem::Failed("the model is closed".into())).raise(py)
}

/// The next message, or `None` if the mailbox is closed. If a signal raises an exception, calls
/// `stop` and discards messages until the mailbox closes or `grace` has passed; without grace it
/// raises at once and discards nothing.
pub(crate) fn next<T: Send>(
    py: Python<'_>,
    mailbox: &Mailbox<T>,
    stop: &dyn Fn(),
    grace: Duration,
) -> PyResult<Option<T>> {
    loop {
        match py.detach(|| mailbox.take(LOOK)) {
            Taken::Message(message) => return Ok(Some(message)),
            Taken::Closed => return Ok(None),
            Taken::Nothing => {}
        }
        if let Some(problem) = device_failure() {
            return Err(problem.raise(py));
        }
        if let Err(error) = py.check_signals() {
            stop();
            if !grace.is_zero() {
                py.detach(|| drain(mailbox, grace));
            }
            return Err(error);
        }
        if is_ending() {
            stop();
            return Err(ended().raise(py));
        }
    }
}

/// Discards messages until the mailbox closes or `patience` has passed.
fn drain<T>(mailbox: &Mailbox<T>, patience: Duration) {
    let until = Instant::now() + patience;
    while let Taken::Message(_) = mailbox.take(until.saturating_duration_since(Instant::now())) {}
}
