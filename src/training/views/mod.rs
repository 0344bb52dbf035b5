//! How a run is shown: each view is told the run's events.

mod dashboard;
mod json;
mod plain;

use burn::train::Interrupter;
use fireclay_kernels::Backend;

pub use plain::duration;

use crate::failure::Failure;
use crate::training::session::Session;

/// How a run shows itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    /// Burn's dashboard, which takes the terminal.
    Dashboard,
    /// A line now and then on stderr.
    Plain,
    /// A JSON object a line on stdout.
    Json,
}

/// Runs a session to its end or its interruption, and shows it. Gives the session back, and whether it came to its end.
pub(crate) fn run<B: Backend>(
    mut session: Session<B>,
    view: View,
    interrupter: Interrupter,
) -> (Session<B>, Result<bool, Failure>) {
    match view {
        View::Dashboard => dashboard::run(session, interrupter),
        View::Plain => {
            let mut lines = plain::Lines::new(session.steps());
            let ended = session.run(&interrupter, &mut lines);
            (session, ended)
        }
        View::Json => {
            let ended = session.run(&interrupter, &mut json::Lines);
            (session, ended)
        }
    }
}
