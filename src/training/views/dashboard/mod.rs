//! The dashboard of a run in the terminal.
//!
//! The thread that trains only notes what happened. Another draws four times a second, if there is something new, and what has
//! changed on the screen is all that is sent to the terminal.

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

/// Time between two looks at what is new.
const PAUSE: Duration = Duration::from_millis(250);
/// Time after which the clock is drawn again, though nothing else is new.
const TICK: Duration = Duration::from_secs(1);
/// Exit code of a run that is ended at once, as shells have it for Ctrl-C.
const INTERRUPTED: i32 = 130;

/// Whether the terminal is the dashboard's.
static IN_TERMINAL: AtomicBool = AtomicBool::new(false);

/// Gives the terminal back as it was, if the dashboard has it; returns whether it had. For whoever ends the program on the spot.
pub fn leave_terminal() -> bool {
    let had = IN_TERMINAL.swap(false, Ordering::Relaxed);
    if had {
        // A terminal that is gone needs nothing.
        let _ = execute!(io::stdout(), LeaveAlternateScreen, Show);
        let _ = disable_raw_mode();
    }
    had
}

/// Whether the dashboard has the terminal, so that what is written there would be lost in it.
pub fn has_terminal() -> bool {
    IN_TERMINAL.load(Ordering::Relaxed)
}

fn enter_terminal() -> io::Result<()> {
    enable_raw_mode()?;
    IN_TERMINAL.store(true, Ordering::Relaxed);
    execute!(io::stdout(), EnterAlternateScreen, Hide)
}

/// A run in the terminal: figures, losses, time left, what the model writes.
///
/// It is told of a run's events, or, as a renderer of burn-train, of a `Learner`'s metrics. `q` and Ctrl-C ask the run to stop and save, a
/// second one ends the program. Dropped, it gives the terminal back.
pub struct Dashboard {
    state: Arc<Mutex<State>>,
    closed: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    metrics: renderer::Metrics,
}

impl Dashboard {
    /// Takes the terminal for a run that begins behind `step`.
    pub fn open(record: &RunRecord, step: u64, interrupter: Interrupter) -> Self {
        Self::new(About::of(record), step, interrupter)
    }

    /// Takes the terminal for a `Learner` of burn-train that goes by the name `title`.
    pub fn for_learner(title: &str, interrupter: Interrupter) -> Self {
        Self::new(About::titled(title), 0, interrupter)
    }

    fn new(about: About, step: u64, interrupter: Interrupter) -> Self {
        let state = Arc::new(Mutex::new(State::new(about, step)));
        let closed = Arc::new(AtomicBool::new(false));
        let thread = {
            let (state, closed) = (Arc::clone(&state), Arc::clone(&closed));
            let work = move || {
                // Without a terminal there is nothing to draw on; the run goes on.
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
    // Notes are whole at every moment.
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

/// Draws until it is closed, or the terminal is gone.
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

/// What comes from the terminal within a time.
///
/// # Errors
/// If it is gone: crossterm itself would read from one that is gone without end.
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
        // A new size comes as a signal.
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    if event::poll(Duration::ZERO)? { event::read().map(Some) } else { Ok(None) }
}

#[cfg(not(unix))]
fn next_input(within: Duration) -> io::Result<Option<Input>> {
    if event::poll(within)? { event::read().map(Some) } else { Ok(None) }
}

/// Does what a key asks for.
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

/// The first time asks the run to stop and save, the second time ends the program.
fn stop(state: &Mutex<State>, interrupter: &Interrupter) {
    if interrupter.should_stop() {
        leave_terminal();
        exit(INTERRUPTED);
    }
    interrupter.stop(Some("interrupted"));
    locked(state).stop();
}
