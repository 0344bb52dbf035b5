//! Explicit skips.

use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Set to 1 to forbid skips, which then fail their tests.
const STRICT: &str = "FIRECLAY_TEST_STRICT";

/// Reports that this test, or a part of it, is skipped, and why: a line on stderr, past the
/// harness, which only shows the output of failed tests.
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
    // Stderr may be closed.
    let _ = writeln!(std::io::stderr(), "\nskip {count}: {test}: {reason}");
}
