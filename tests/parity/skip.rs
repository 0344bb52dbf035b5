//! What a test leaves out, said aloud.

use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Set to 1 where nothing may be left out: a skip fails its test then.
const STRICT: &str = "FIRECLAY_TEST_STRICT";

/// Says that this test, or a part of it, is not run, and why: a line on standard error, past the harness, which shows what
/// tests print only where they fail.
///
/// # Panics
/// If `FIRECLAY_TEST_STRICT` is 1.
#[track_caller]
pub(crate) fn skip(reason: &str) {
    static SKIPS: AtomicUsize = AtomicUsize::new(0);
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    assert!(std::env::var(STRICT).as_deref() != Ok("1"), "{test} is skipped in part: {reason}");
    let count = SKIPS.fetch_add(1, Ordering::Relaxed) + 1;
    // Whoever has closed standard error does not read it.
    let _ = writeln!(std::io::stderr(), "\nskip {count}: {test}: {reason}");
}
