//! The dashboard of a run in the terminal.
//!
//! The training thread only records events. Another thread redraws up to four times a second, and
//! only changed cells are sent to the terminal.

mod renderer;
mod screen;
mod state;

use std::io::{self, IsTerminal};
use std::process::exit;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use burn::train::Interrupter;
use crossterm::cursor::{Hide, Show};
use crossterm::event::{self, Event as Input, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use crossterm::execute;
use crossterm::terminal::{EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode};
use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;

use self::state::{About, State};
use crate::failure::Failure;
use crate::runs::record::RunRecord;
use crate::training::events::{Event, Sink};

/// Interval between checks for news.
const PAUSE: Duration = Duration::from_millis(250);
/// Interval of clock updates without other news.
const TICK: Duration = Duration::from_secs(1);
/// Exit code of a run ended at once, as shells have it for Ctrl-C.
const INTERRUPTED: i32 = 130;

/// Whether the dashboard owns the terminal.
static IN_TERMINAL: AtomicBool = AtomicBool::new(false);

/// Restores the terminal if the dashboard owns it. Returns whether it did. For code that ends the
/// program immediately.
pub fn leave_terminal() -> bool {
    let had = IN_TERMINAL.swap(false, Ordering::Relaxed);
    if had {
        // The terminal may be closed.
        let _ = execute!(io::stdout(), LeaveAlternateScreen, Show);
        let _ = disable_raw_mode();
    }
    had
}

/// Whether the dashboard owns the terminal, so that other output would be lost.
pub fn has_terminal() -> bool {
    IN_TERMINAL.load(Ordering::Relaxed)
}

fn enter_terminal() -> io::Result<()> {
    enable_raw_mode()?;
    IN_TERMINAL.store(true, Ordering::Relaxed);
    execute!(io::stdout(), EnterAlternateScreen, Hide)
}

/// The dashboard of a run: figures, losses, remaining time, samples.
///
/// It receives a run's events, or, as a renderer of burn-train, a `Learner`'s metrics. `q` and
/// Ctrl-C ask the run to stop and save; a second one ends the program. Dropping it restores the
/// terminal.
pub struct Dashboard {
    state: Arc<Mutex<State>>,
    closed: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    metrics: renderer::Metrics,
}

impl Dashboard {
    /// Opens the dashboard of a run that starts after `step`.
    pub fn open(record: &RunRecord, step: u64, interrupter: Interrupter) -> Self {
        Self::new(About::of(record), step, interrupter)
    }

    /// Opens the dashboard of a burn-train `Learner` named `title`.
    pub fn for_learner(title: &str, interrupter: Interrupter) -> Self {
        Self::new(About::titled(title), 0, interrupter)
    }

    fn new(about: About, step: u64, interrupter: Interrupter) -> Self {
        let state = Arc::new(Mutex::new(State::new(about, step)));
        let closed = Arc::new(AtomicBool::new(false));
        let thread = {
            let (state, closed) = (Arc::clone(&state), Arc::clone(&closed));
            let work = move || {
                // Without a terminal the run continues undisplayed.
                let _ = show(&state, &closed, &interrupter);
                leave_terminal();
            };
            thread::Builder::new().name("dashboard".into()).spawn(work).ok()
        };
        Self { state, closed, thread, metrics: renderer::Metrics::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
    }
}

fn locked(state: &Mutex<State>) -> MutexGuard<'_, State> {
    // The state is consistent at all times.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Sink for Dashboard {
    fn tell(&mut self, event: &Event) -> Result<(), Failure> {
        self.state().note(event);
        Ok(())
    }
}

impl Drop for Dashboard {
    fn drop(&mut self) {
        self.closed.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Redraws until it is closed or the terminal is gone.
fn show(state: &Mutex<State>, closed: &AtomicBool, interrupter: &Interrupter) -> io::Result<()> {
    enter_terminal()?;
    let mut terminal = Terminal::new(CrosstermBackend::new(io::stdout()))?;
    let mut drawn: Option<Instant> = None;
    let mut has_keys = io::stdin().is_terminal();
    while !closed.load(Ordering::Relaxed) {
        {
            let mut state = locked(state);
            if interrupter.should_stop() {
                state.stop();
            }
            let is_old = drawn.is_none_or(|drawn| drawn.elapsed() >= TICK);
            if state.take_news() || is_old {
                if state.take_wipe() {
                    // Something else may have written over it.
                    terminal.clear()?;
                }
                terminal.draw(|frame| screen::draw(frame, &state))?;
                drawn = Some(Instant::now());
            }
        }
        let until = Instant::now() + PAUSE;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            if !has_keys {
                thread::sleep(left);
                break;
            }
            match next_input(left) {
                Ok(Some(Input::Key(key))) if key.kind == KeyEventKind::Press => press(key, state, interrupter),
                Ok(Some(Input::Resize(..))) => locked(state).renew(),
                Ok(_) => {}
                Err(_) => has_keys = false,
            }
            if closed.load(Ordering::Relaxed) || locked(state).has_news_of_keys() {
                break;
            }
        }
    }
    Ok(())
}

/// Terminal input within a time limit.
///
/// # Errors
/// If the terminal is gone: crossterm itself would loop forever.
#[cfg(unix)]
fn next_input(within: Duration) -> io::Result<Option<Input>> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let stdin = io::stdin();
    let mut keys = [PollFd::new(&stdin, PollFlags::IN)];
    let within = Timespec { tv_sec: within.as_secs() as i64, tv_nsec: i64::from(within.subsec_nanos()) };
    match poll(&mut keys, Some(&within)) {
        Ok(_) if keys[0].revents().intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL) => {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        // A resize arrives as a signal.
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    if event::poll(Duration::ZERO)? { event::read().map(Some) } else { Ok(None) }
}

#[cfg(not(unix))]
fn next_input(within: Duration) -> io::Result<Option<Input>> {
    if event::poll(within)? { event::read().map(Some) } else { Ok(None) }
}

/// Handles a key.
fn press(key: KeyEvent, state: &Mutex<State>, interrupter: &Interrupter) {
    let control = key.modifiers.contains(KeyModifiers::CONTROL);
    match key.code {
        KeyCode::Char('c') if control => stop(state, interrupter),
        KeyCode::Char('q') => stop(state, interrupter),
        KeyCode::Char('l') if control => locked(state).wipe(),
        KeyCode::Char('l') => locked(state).toggle_log(),
        _ => {}
    }
}

/// The first call asks the run to stop and save, the second ends the program.
fn stop(state: &Mutex<State>, interrupter: &Interrupter) {
    if interrupter.should_stop() {
        leave_terminal();
        exit(INTERRUPTED);
    }
    interrupter.stop(Some("interrupted"));
    locked(state).stop();
}
