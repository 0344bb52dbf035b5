//! Ctrl-C, and what Slurm and Kubernetes send before they take a machine: a run stops, and saves.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use burn::train::Interrupter;
use fireclay::Failure;
use fireclay::generation::Interrupt;

/// Exit code of a run that Ctrl-C ended, as shells have it.
pub(super) const INTERRUPTED: u8 = 130;
/// And of one that SIGTERM ended.
const TERMINATED: u8 = 143;

/// The last signal; zero for none.
static SIGNAL: AtomicI32 = AtomicI32::new(0);

/// The exit code of a run that a signal ended.
pub(super) fn signalled() -> ExitCode {
    ExitCode::from(code())
}

fn code() -> u8 {
    if SIGNAL.load(Ordering::Relaxed) == signal::TERM { TERMINATED } else { INTERRUPTED }
}

/// Success, or that a signal set `interrupt`.
pub(super) fn exit_code(interrupt: &Interrupt) -> ExitCode {
    if interrupt.load(Ordering::Relaxed) { signalled() } else { ExitCode::SUCCESS }
}

/// The first signal asks the run to stop and save, the second ends the program.
pub(super) fn stop_on_signals(interrupter: Interrupter) -> Result<(), Failure> {
    on_signals(move || {
        if interrupter.should_stop() {
            std::process::exit(code().into());
        }
        eprintln!("stopping after this step; once more to stop without saving");
        interrupter.stop(Some("interrupted"));
    })
}

/// Set by a signal; a second one in a row ends the program, and so does SIGTERM at once where `term_ends`.
pub(super) fn interrupt_on_signals(term_ends: bool) -> Result<Interrupt, Failure> {
    let interrupt = Interrupt::default();
    let set = Arc::clone(&interrupt);
    on_signals(move || {
        if set.swap(true, Ordering::Relaxed) || (term_ends && code() == TERMINATED) {
            std::process::exit(code().into());
        }
    })?;
    Ok(interrupt)
}

/// Calls `handler`, on a thread of its own, for each SIGINT and SIGTERM.
fn on_signals(handler: impl FnMut() + Send + 'static) -> Result<(), Failure> {
    signal::listen(handler).map_err(|error| Failure::new(format!("signals cannot be handled: {error}")))
}

#[cfg(unix)]
mod signal {
    use std::sync::atomic::Ordering;

    use signal_hook::consts::{SIGINT, SIGTERM};
    use signal_hook::iterator::Signals;

    pub(super) const TERM: i32 = SIGTERM;

    pub(super) fn listen(mut handler: impl FnMut() + Send + 'static) -> std::io::Result<()> {
        let mut signals = Signals::new([SIGINT, SIGTERM])?;
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            for signal in signals.forever() {
                super::SIGNAL.store(signal, Ordering::Relaxed);
                handler();
            }
        })?;
        Ok(())
    }
}

#[cfg(not(unix))]
mod signal {
    /// No other signal than Ctrl-C is told of.
    pub(super) const TERM: i32 = -1;

    pub(super) fn listen(handler: impl FnMut() + Send + 'static) -> Result<(), ctrlc::Error> {
        ctrlc::set_handler(handler)
    }
}
