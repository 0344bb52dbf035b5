//! Views of a run, which receive its events.

mod dashboard;
mod json;
mod plain;
mod tensorboard;
mod wandb;

use std::path::Path;

use burn::train::Interrupter;
use fireclay_kernels::Backend;

pub use dashboard::{Dashboard, has_terminal, leave_terminal};
pub use wandb::Wandb;

use crate::failure::Failure;
use crate::runs::record::RunRecord;
use crate::training::events::{Event, Sink};
use crate::training::session::Session;

/// How a run is displayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    /// A dashboard that takes the terminal.
    Dashboard,
    /// Occasional lines on stderr.
    Plain,
    /// One JSON object per line on stdout.
    Json,
    /// No output; for runs with a listener.
    Silent,
}

/// Several views, each of which receives every event.
struct All(Vec<Box<dyn Sink>>);

impl Sink for All {
    fn tell(&mut self, event: &Event) -> Result<(), Failure> {
        self.0.iter_mut().try_for_each(|sink| sink.tell(event))
    }
}

/// Runs a session until it ends or is interrupted, with its view and a TensorBoard file in
/// `folder`. Returns whether it finished.
pub(crate) fn run<B: Backend>(
    session: &mut Session<B>,
    view: View,
    record: &RunRecord,
    (folder, wandb, listener): (&Path, Option<Wandb>, Option<Box<dyn Sink + Send>>),
    interrupter: Interrupter,
) -> Result<bool, Failure> {
    let mut sinks = All(vec![Box::new(tensorboard::EventFile::create(folder)?)]);
    match view {
        View::Dashboard => sinks.0.push(Box::new(Dashboard::open(record, session.trainer.step(), interrupter.clone()))),
        View::Plain => sinks.0.push(Box::new(plain::Lines::new(session.steps()))),
        View::Json => sinks.0.push(Box::new(json::Lines)),
        View::Silent => {}
    }
    if let Some(wandb) = wandb {
        sinks.0.push(Box::new(wandb));
    }
    if let Some(listener) = listener {
        sinks.0.push(listener);
    }
    session.run(&interrupter, &mut sinks)
}
