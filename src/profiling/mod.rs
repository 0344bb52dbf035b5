//! Where the time of real work goes: a few warm steps are recorded, and turned into a table, verdicts, a trace, a page.

mod html;
mod idle;
mod rows;
mod run;
mod table;
mod trace;
mod verdicts;

use std::path::Path;

use fireclay_kernels::recorder::{Memory, Report, Source};
use serde_json::{Value, json};

pub use idle::{Idle, idle};
pub use rows::{Bound, Row};
pub use run::{ProfileGeneration, ProfileOptions, ProfilePrediction, ProfileTraining};
pub use verdicts::{Verdict, VerdictKind, verdicts};

use crate::ceilings::Ceilings;
use crate::failure::Failure;
use crate::run_folder::write_atomic;

/// What was recorded of some work.
#[derive(Clone, Debug)]
pub struct Profile {
    /// The work: `train gpt2-124m`.
    pub name: String,
    /// What it was done in: step, token, batch.
    pub unit: &'static str,
    /// How many of these were recorded.
    pub count: u64,
    /// Seconds of one, not recorded.
    pub seconds: f64,
    /// The device's name.
    pub device: String,
    /// What was recorded.
    pub report: Report,
    /// What the hardware could do.
    pub ceilings: Ceilings,
    /// Memory of the device, or of the process where the device is the host.
    pub memory: Option<Memory>,
    /// Why the device's own records are missing, where they should be there.
    pub note: Option<String>,
}

impl Profile {
    /// What all recorded times are times of.
    pub fn clock(&self) -> &'static str {
        match self.report.source {
            Source::Cupti => "device times, recorded by CUPTI",
            Source::Host => "times are the host's, which is the device",
            Source::Waits => {
                "this device has no clock that can be read: each operation was waited for, and its time is the host's, \
                 the wait included"
            }
            Source::Calls => "no times: only calls were counted",
        }
    }

    /// Seconds of one unit, while it was recorded.
    pub fn recorded_seconds(&self) -> f64 {
        self.report.elapsed.as_secs_f64() / self.count.max(1) as f64
    }

    /// The share of a unit in which the device has something to do, 0 to 1: its time while recorded, of a unit that was not,
    /// since recording makes the host slower and leaves the kernels as they are.
    pub fn busy(&self) -> Option<f64> {
        let busy = idle(&self.report)?.busy.as_secs_f64() / self.count.max(1) as f64;
        Some((busy / self.seconds.max(1e-12)).min(1.0))
    }

    /// The table, the most expensive operation first.
    pub fn rows(&self) -> Vec<Row> {
        rows::rows(self)
    }

    /// The table and the totals, as one JSON object.
    pub fn to_json(&self) -> Value {
        let idle = idle(&self.report);
        json!({
            "event": "profile", "name": self.name, "unit": self.unit, "count": self.count, "device": self.device,
            "seconds": self.seconds, "recorded_seconds": self.recorded_seconds(),
            "source": self.report.source.to_string(),
            "ceilings": {
                "bytes_per_second": self.ceilings.bytes_per_second,
                "flops_per_second": self.ceilings.peaks.map(|peaks| json!({ "half": peaks.half, "single": peaks.single })),
            },
            "memory": self.memory.map(|memory| json!({ "in_use": memory.in_use, "reserved": memory.reserved })),
            "busy": self.busy(),
            "idle": idle.map(|idle| idle.by.into_iter().map(|(what, time)| json!({ "host": what, "seconds": time.as_secs_f64() })).collect::<Vec<_>>()),
            "rows": self.rows().iter().map(Row::to_json).collect::<Vec<_>>(),
            "verdicts": verdicts(self).iter().map(|verdict| json!({ "kind": verdict.kind.name(), "text": verdict.text })).collect::<Vec<_>>(),
            "report": serde_json::from_str::<Value>(&self.report.to_json()).unwrap_or_default(),
        })
    }

    /// Writes what happened when, for Perfetto or Chrome's `about:tracing`.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write_trace(&self, path: &Path) -> Result<(), Failure> {
        write_atomic(path, trace::trace(self).to_string().as_bytes())
    }

    /// Writes a page with the table, a flame graph and the roofline.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write_html(&self, path: &Path) -> Result<(), Failure> {
        write_atomic(path, html::page(self)?.as_bytes())
    }
}
