//! Signals: Ctrl-C, SIGTERM (sent by Slurm and Kubernetes before they stop a job), and SIGHUP of a
//! closed terminal. A run stops and saves.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use burn::train::Interrupter;
use fireclay::Failure;
use fireclay::inference::generation::Interrupt;
use fireclay::training::{has_terminal, leave_terminal};

/// Exit code of a run that Ctrl-C ended, as in shells.
pub(super) const INTERRUPTED: u8 = 130;
/// Exit code of a run ended by SIGTERM or the end of its terminal.
const TERMINATED: u8 = 143;
const HUNG_UP: u8 = 129;

/// The last signal; zero for none.
static SIGNAL: AtomicI32 = AtomicI32::new(0);

/// The exit code of a run that a signal ended.
pub(super) fn signalled() -> ExitCode {
    ExitCode::from(code())
}

fn code() -> u8 {
    match SIGNAL.load(Ordering::Relaxed) {
        signal::TERM => TERMINATED,
        signal::HUP => HUNG_UP,
        _ => INTERRUPTED,
    }
}

/// Success, or the signal's exit code if `interrupt` is set.
pub(super) fn exit_code(interrupt: &Interrupt) -> ExitCode {
    if interrupt.load(Ordering::Relaxed) { signalled() } else { ExitCode::SUCCESS }
}

/// The first signal stops and saves the run; the second ends the program.
///
/// Launchers signal both a process and its group. A repetition within `pause` therefore does not
/// count.
pub(super) fn stop_on_signals(interrupter: Interrupter, pause: Duration) -> Result<(), Failure> {
    let mut first: Option<Instant> = None;
    on_signals(move || {
        if first.get_or_insert_with(Instant::now).elapsed() < pause && interrupter.should_stop() {
            return;
        }
        if interrupter.should_stop() {
            leave_terminal();
            std::process::exit(code().into());
        }
        interrupter.stop(Some("interrupted"));
        if !has_terminal() {
            eprintln!("stopping after this step; press Ctrl-C again to stop without saving");
        }
    })
}

/// Calls `pass` with each signal.
pub(super) fn pass_signals_on(pass: impl Fn(i32) + Send + 'static) -> Result<(), Failure> {
    on_signals(move || pass(SIGNAL.load(Ordering::Relaxed)))
}

/// Returns an interrupt that a signal sets. A second signal in a row ends the program, and with
/// `term_ends` so does the first SIGTERM.
pub(super) fn interrupt_on_signals(term_ends: bool) -> Result<Interrupt, Failure> {
    let interrupt = Interrupt::default();
    let set = Arc::clone(&interrupt);
    on_signals(move || {
        if set.swap(true, Ordering::Relaxed) || (term_ends && code() != INTERRUPTED) {
            std::process::exit(code().into());
        }
    })?;
    Ok(interrupt)
}

/// Ends the program on a signal, with the exit code that shells use for it.
pub(super) fn end_on_signals() -> Result<Interrupt, Failure> {
    on_signals(|| std::process::exit(code().into()))?;
    Ok(Interrupt::default())
}

/// The first signal asks a server to finish its answers, the second ends the program. SIGHUP calls
/// `reload`, unless it means that the server's terminal closed.
#[cfg(feature = "serve")]
pub(super) fn drain_on_signals(
    stop: impl Fn() -> bool + Send + 'static,
    reload: impl Fn() + Send + 'static,
) -> Result<(), Failure> {
    use std::io::IsTerminal;

    let on_terminal = std::io::stdin().is_terminal();
    on_signals(move || {
        let hung_up = on_terminal && !std::io::stdin().is_terminal();
        if code() == HUNG_UP && !hung_up {
            return reload();
        }
        if stop() {
            std::process::exit(code().into());
        }
        eprintln!("finishing started answers; press again to stop at once");
    })
}

/// Calls `handler` for each SIGINT, SIGTERM and SIGHUP, on a separate thread.
fn on_signals(handler: impl FnMut() + Send + 'static) -> Result<(), Failure> {
    signal::listen(handler).map_err(|error| Failure::new(format!("cannot handle signals: {error}")))
}

#[cfg(unix)]
mod signal {
    use std::sync::atomic::Ordering;

    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    use signal_hook::iterator::Signals;

    pub(super) const TERM: i32 = SIGTERM;
    pub(super) const HUP: i32 = SIGHUP;

    pub(super) fn listen(mut handler: impl FnMut() + Send + 'static) -> std::io::Result<()> {
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
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
    /// Only Ctrl-C is reported on this platform.
    pub(super) const TERM: i32 = -1;
    pub(super) const HUP: i32 = -2;

    pub(super) fn listen(handler: impl FnMut() + Send + 'static) -> Result<(), ctrlc::Error> {
        ctrlc::set_handler(handler)
    }
}
