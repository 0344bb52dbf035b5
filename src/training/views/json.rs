//! Lines for programs: each event as JSON on stdout.

use crate::failure::Failure;
use crate::stdout;
use crate::training::events::{Event, Sink};

pub(super) struct Lines;

impl Sink for Lines {
    fn tell(&mut self, event: &Event) -> Result<(), Failure> {
        stdout::line(event.to_json());
        Ok(())
    }
}
