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
    (folder, wandb): (&Path, Option<Wandb>),
    interrupter: Interrupter,
) -> Result<bool, Failure> {
    let shown: Box<dyn Sink> = match view {
        View::Dashboard => Box::new(Dashboard::open(record, session.trainer.step(), interrupter.clone())),
        View::Plain => Box::new(plain::Lines::new(session.steps())),
        View::Json => Box::new(json::Lines),
    };
    let mut sinks = All(vec![shown, Box::new(tensorboard::EventFile::create(folder)?)]);
    if let Some(wandb) = wandb {
        sinks.0.push(Box::new(wandb));
    }
    session.run(&interrupter, &mut sinks)
}
