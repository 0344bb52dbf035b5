//! Work shared between the calling thread and rayon's pool.
//!
//! rayon's `par_iter` hands all work to the pool, and the caller sleeps. Here the caller starts at
//! once, and pool threads take pieces as soon as they are awake. Nobody waits for a late thread: if
//! other programs use the cores, work slows down in proportion. No thread spins for more than a few
//! microseconds.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::Thread;

/// Work in pieces. Pool threads may outlive it.
struct Job {
    /// Processes a piece. Called only by threads that have entered and not left.
    work: *const (dyn Fn(usize) + Sync),
    pieces: usize,
    next: AtomicUsize,
    /// Number of helpers that have entered and not left, and the flag `CLOSED`.
    state: AtomicUsize,
    failed: AtomicBool,
    caller: Thread,
}

const CLOSED: usize = 1 << (usize::BITS - 1);
/// Spins of the caller before it sleeps until the last helper leaves.
const ROUNDS: usize = 2000;

// SAFETY: `work` is `Sync`, and outlives every thread that has entered.
unsafe impl Send for Job {}
// SAFETY: as above.
unsafe impl Sync for Job {}

impl Job {
    fn take_pieces(&self) {
        loop {
            let piece = self.next.fetch_add(1, Ordering::Relaxed);
            if piece >= self.pieces {
                return;
            }
            // SAFETY: the caller keeps `work` alive until all helpers have left.
            unsafe { (*self.work)(piece) };
        }
    }

    fn help(&self) {
        let entered = |state: usize| (state & CLOSED == 0).then_some(state + 1);
        if self.state.fetch_update(Ordering::Acquire, Ordering::Relaxed, entered).is_err() {
            return;
        }
        if catch_unwind(AssertUnwindSafe(|| self.take_pieces())).is_err() {
            self.failed.store(true, Ordering::Relaxed);
        }
        if self.state.fetch_sub(1, Ordering::Release) == CLOSED + 1 {
            self.caller.unpark();
        }
    }

    /// Admits no more helpers, and waits until all have left.
    fn close(&self) {
        self.state.fetch_or(CLOSED, Ordering::Acquire);
        let mut round = 0;
        while self.state.load(Ordering::Acquire) != CLOSED {
            round += 1;
            if round < ROUNDS { std::hint::spin_loop() } else { std::thread::park() }
        }
    }
}

/// Calls `work` once for each of `pieces`, on this thread and on idle threads of the pool.
///
/// # Panics
/// If `work` does.
pub(crate) fn for_pieces(pieces: usize, work: impl Fn(usize) + Sync) {
    let helpers = rayon::current_num_threads().min(pieces).saturating_sub(1);
    if helpers == 0 {
        return (0..pieces).for_each(work);
    }
    let work: &(dyn Fn(usize) + Sync) = &work;
    // SAFETY: only the lifetime changes. `close` runs before this function returns or unwinds, and
    // waits for all helpers.
    let work = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), *const (dyn Fn(usize) + Sync + 'static)>(work) };
    let job = Arc::new(Job {
        work,
        pieces,
        next: AtomicUsize::new(0),
        state: AtomicUsize::new(0),
        failed: AtomicBool::new(false),
        caller: std::thread::current(),
    });
    for _ in 0..helpers {
        let job = Arc::clone(&job);
        rayon::spawn(move || job.help());
    }
    let own = catch_unwind(AssertUnwindSafe(|| job.take_pieces()));
    job.close();
    if let Err(panic) = own {
        resume_unwind(panic);
    }
    assert!(!job.failed.load(Ordering::Relaxed), "a helper panicked");
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    #[test]
    fn each_piece_is_done_once() {
        for pieces in [0, 1, 2, 3, 100, 5000] {
            let done: Vec<AtomicU32> = (0..pieces).map(|_| AtomicU32::new(0)).collect();
            for_pieces(pieces, |piece| {
                done[piece].fetch_add(1, Ordering::Relaxed);
            });
            assert!(done.iter().all(|done| done.load(Ordering::Relaxed) == 1), "{pieces}");
        }
    }

    #[test]
    fn work_within_work_is_done_too() {
        let done = AtomicU32::new(0);
        for_pieces(8, |_| {
            for_pieces(8, |_| {
                done.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert_eq!(done.into_inner(), 64);
    }

    #[test]
    fn a_panic_reaches_the_caller_when_all_have_stopped() {
        for at in [0, 50, 99] {
            let result = catch_unwind(|| for_pieces(100, |piece| assert!(piece != at, "piece {at}")));
            assert!(result.is_err(), "{at}");
        }
        let done = AtomicU32::new(0);
        for_pieces(10, |_| {
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(done.into_inner(), 10);
    }
}
