//! A channel whose receiver is `Sync` and can wait with a timeout.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

struct Shared<T> {
    /// Queued messages, and whether the sender exists.
    state: Mutex<(VecDeque<T>, bool)>,
    changed: Condvar,
}

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, (VecDeque<T>, bool)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The sender; dropping it closes the mailbox.
pub(crate) struct Post<T>(Arc<Shared<T>>);

/// The receiver.
pub(crate) struct Mailbox<T>(Arc<Shared<T>>);

/// Result of [`Mailbox::take`].
pub(crate) enum Taken<T> {
    /// A message.
    Message(T),
    /// No message within the timeout.
    Nothing,
    /// No message, and the sender is gone.
    Closed,
}

/// A new mailbox with its sender.
pub(crate) fn mailbox<T>() -> (Post<T>, Mailbox<T>) {
    let shared = Arc::new(Shared { state: Mutex::new((VecDeque::new(), true)), changed: Condvar::new() });
    (Post(shared.clone()), Mailbox(shared))
}

impl<T> Post<T> {
    pub(crate) fn put(&self, message: T) {
        self.0.lock().0.push_back(message);
        self.0.changed.notify_one();
    }
}

impl<T> Drop for Post<T> {
    fn drop(&mut self) {
        self.0.lock().1 = false;
        self.0.changed.notify_all();
    }
}

impl<T> Mailbox<T> {
    /// Waits up to `patience` for the next message.
    pub(crate) fn take(&self, patience: Duration) -> Taken<T> {
        let until = Instant::now() + patience;
        let mut state = self.0.lock();
        loop {
            match (state.0.pop_front(), state.1) {
                (Some(message), _) => return Taken::Message(message),
                (None, false) => return Taken::Closed,
                (None, true) => {}
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Taken::Nothing;
            }
            state = self.0.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
