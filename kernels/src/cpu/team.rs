//! Work that the calling thread shares with others of the pool.
//!
//! A pool's `par_iter` hands all of the work to its own threads and sleeps; here the caller begins
//! at once, and others take pieces as soon as they are awake. One that is late finds nothing, and
//! nobody waits for it: where other programs keep the processors busy, work slows down in
//! proportion, and no thread spins for longer than some microseconds.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::Thread;

/// Work of pieces, for threads that outlive it.
struct Job {
    /// What is done with a piece; it is called only between entering and leaving.
    work: *const (dyn Fn(usize) + Sync),
    pieces: usize,
    next: AtomicUsize,
    /// Helpers that have entered and not left, and whether the job is closed.
    state: AtomicUsize,
    failed: AtomicBool,
    caller: Thread,
}

const CLOSED: usize = 1 << (usize::BITS - 1);
/// Rounds that the caller looks for helpers that have a last piece, before it sleeps.
const ROUNDS: usize = 2000;

// SAFETY: `work` is `Sync`, and alive for as long as any thread has entered.
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
            // SAFETY: the caller waits for all that entered before what it borrows ends.
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

    /// Lets no more helpers in, and waits for those that are.
    fn close(&self) {
        self.state.fetch_or(CLOSED, Ordering::Acquire);
        let mut round = 0;
        while self.state.load(Ordering::Acquire) != CLOSED {
            round += 1;
            if round < ROUNDS { std::hint::spin_loop() } else { std::thread::park() }
        }
    }
}

/// Calls `work` with each of so many pieces, on this thread and on others that have time.
///
/// # Panics
/// If `work` does.
pub(crate) fn for_pieces(pieces: usize, work: impl Fn(usize) + Sync) {
    let helpers = rayon::current_num_threads().min(pieces).saturating_sub(1);
    if helpers == 0 {
        return (0..pieces).for_each(work);
    }
    let work: &(dyn Fn(usize) + Sync) = &work;
    // SAFETY: only the lifetime is another. `close` waits for all that call it before this function ends, on every way out.
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
