//! Whether this thread only rehearses what it computes: see [`compile_ahead`](crate::compile_ahead()).

use std::cell::Cell;
#[cfg(feature = "cuda")]
use std::marker::PhantomData;

thread_local! {
    static ON: Cell<bool> = const { Cell::new(false) };
}

/// The span of a rehearsal.
#[cfg(feature = "cuda")]
#[must_use = "the rehearsal ends when this is dropped"]
pub(crate) struct Rehearsal(PhantomData<*const ()>);

/// Whether this thread rehearses: kernels in CUDA C++ are not launched, and those that were not tried are taken to work.
pub(crate) fn is_on() -> bool {
    ON.get()
}

/// Begins a rehearsal on this thread.
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
