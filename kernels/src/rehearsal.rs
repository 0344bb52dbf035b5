//! Whether this thread is in a rehearsal: see [`compile_ahead`](crate::compile_ahead()).

use std::cell::Cell;
#[cfg(feature = "cuda")]
use std::marker::PhantomData;

thread_local! {
    static ON: Cell<bool> = const { Cell::new(false) };
}

/// The scope of a rehearsal.
#[cfg(feature = "cuda")]
#[must_use = "the rehearsal ends when this is dropped"]
pub(crate) struct Rehearsal(PhantomData<*const ()>);

/// Whether this thread is in a rehearsal: CUDA C++ kernels are not launched, and untried ones are
/// assumed to work.
pub(crate) fn is_on() -> bool {
    ON.get()
}

/// Starts a rehearsal on this thread.
#[cfg(feature = "cuda")]
pub(crate) fn begin() -> Rehearsal {
    ON.set(true);
    Rehearsal(PhantomData)
}

#[cfg(feature = "cuda")]
impl Drop for Rehearsal {
    fn drop(&mut self) {
        ON.set(false);
    }
}

/// Panics in a rehearsal: `op` writes into memory that the caller keeps.
#[track_caller]
pub(crate) fn refuse(op: &'static str) {
    assert!(!is_on(), "{op}: not in `compile_ahead`, where what it writes means nothing");
}
