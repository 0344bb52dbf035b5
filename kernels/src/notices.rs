//! Messages for users: printed to standard error unless the program handles them.

use std::sync::OnceLock;

/// Severity of a notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Progress.
    Info,
    /// Unexpected but harmless.
    Note,
    /// A possible error.
    Warning,
}

static TAKEN: OnceLock<fn(Level, &str)> = OnceLock::new();

/// Calls `take` with each notice instead of printing it; the first call in a process counts.
///
/// Notices come from any thread.
pub fn take_notices(take: fn(Level, &str)) {
    // A second call is ignored, as documented.
    let _ = TAKEN.set(take);
}

/// Reports `text` to the user.
pub fn notice(level: Level, text: &str) {
    match (TAKEN.get(), level) {
        (Some(take), _) => take(level, text),
        (None, Level::Info) => eprintln!("{text}"),
        (None, Level::Note) => eprintln!("note: {text}"),
        (None, Level::Warning) => eprintln!("warning: {text}"),
    }
}
