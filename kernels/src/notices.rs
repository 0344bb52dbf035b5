//! Words to people while work goes on: standard error has them, unless the program takes them.

use std::sync::OnceLock;

/// How much a notice matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// What is being done.
    Info,
    /// What may surprise.
    Note,
    /// What may be wrong.
    Warning,
}

static TAKEN: OnceLock<fn(Level, &str)> = OnceLock::new();

/// Has `take` told of each notice, in place of standard error; the first call in a process counts.
///
/// Notices come from any thread.
pub fn take_notices(take: fn(Level, &str)) {
    // A second one is passed over, as documented.
    let _ = TAKEN.set(take);
}

/// Tells people something.
pub fn notice(level: Level, text: &str) {
    match (TAKEN.get(), level) {
        (Some(take), _) => take(level, text),
        (None, Level::Info) => eprintln!("{text}"),
        (None, Level::Note) => eprintln!("note: {text}"),
        (None, Level::Warning) => eprintln!("warning: {text}"),
    }
}
