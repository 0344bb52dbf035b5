//! A thread that owns a model: what is asked of it is done in order, and whoever asks waits without the interpreter's lock.

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

/// How often whoever waits looks for signals.
const LOOK: Duration = Duration::from_millis(20);
/// How long an interrupted call waits for its work to end, before it leaves the work to end by itself.
const GRACE: Duration = Duration::from_millis(100);
/// How long the end of a model is waited for.
const END: Duration = Duration::from_secs(10);

enum Message<M: ?Sized> {
    Job(Box<dyn FnOnce(&mut M) + Send>),
    End,
}

/// What comes of something that was asked for.
pub(crate) type Answer<R> = Mailbox<Result<R, Problem>>;

/// A thread with a model, by what it is asked through.
pub(crate) struct Worker<M: ?Sized> {
    messages: Sender<Message<M>>,
    /// Ends the work at hand.
    current: Arc<Mutex<Interrupt>>,
    /// Closed when the thread has ended.
    over: Mailbox<()>,
}

impl<M: ?Sized + Send + 'static> Worker<M> {
    /// A thread with what `open` gives on `backend`, or on the best one, and what `tell` says of it.
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
            // One that has ended needs no word.
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
        let told = wait(py, &answer, || {})?;
        Ok((Self { messages, current, over }, told))
    }

    /// Asks for `work`, which `interrupt` ends, and does not wait for what comes of it.
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

    /// Asks for `work`, which `interrupt` ends, and waits for what comes of it.
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

    /// Ends the thread, and waits until its model is gone.
    pub(crate) fn close(&self, py: Python<'_>) {
        if is_forked() || is_ending() {
            return;
        }
        lock(&self.current).store(true, Ordering::Release);
        // One that has ended needs no word.
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
        // Whoever loads the next model finds this one's memory free.
        Python::try_attach(|py| py.detach(|| self.over.take(END)));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What `work` gives; a panic is a problem, too.
pub(crate) fn caught<R>(work: impl FnOnce() -> Result<R, Failure>) -> Result<R, Problem> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(Problem::from),
        Err(payload) => Err(device_failure().unwrap_or_else(|| Problem::of_panic(&*payload))),
    }
}

/// What comes next, without the interpreter's lock; what is said meanwhile is logged.
///
/// A signal's exception has `stop` called, and is raised when the work has ended or [`GRACE`] is over.
pub(crate) fn wait<R: Send>(py: Python<'_>, answer: &Answer<R>, stop: impl Fn()) -> PyResult<R> {
    let result = match next(py, answer, &stop, GRACE) {
        Ok(Some(result)) => result.map_err(|problem| problem.raise(py)),
        Ok(None) => Err(nothing(py)),
        Err(error) => Err(error),
    };
    notices::log(py)?;
    result
}

/// Why nothing came.
pub(crate) fn nothing(py: Python<'_>) -> PyErr {
    device_failure().unwrap_or_else(|| Problem::Failed("the model is closed".into())).raise(py)
}

/// The next message; `None` when there will be none. A signal's exception has `stop` called, and is raised when the messages
/// have ended or `grace` is over, with what came until then lost; at once, and with nothing lost, where there is none.
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

/// Takes messages until there are no more, or for as long as `patience`.
fn drain<T>(mailbox: &Mailbox<T>, patience: Duration) {
    let until = Instant::now() + patience;
    while let Taken::Message(_) = mailbox.take(until.saturating_duration_since(Instant::now())) {}
}
