//! Profiles of real work: records a few warm steps and reports a table, findings, a trace, a page.

mod html;
mod idle;
mod rows;
mod run;
mod table;
mod trace;
mod verdicts;

use std::path::Path;
use std::time::Duration;

use fireclay_kernels::recorder::{Memory, Report, Source};
use serde_json::{Value, json};

pub use idle::{Idle, idle};
pub use rows::{Bound, Row};
pub use run::{ProfileGeneration, ProfileOptions, ProfilePrediction, ProfileTraining};
pub use verdicts::{Verdict, VerdictKind, verdicts};

use crate::ceilings::Ceilings;
use crate::failure::Failure;
use crate::run_folder::write_atomic;

/// A recorded profile.
#[derive(Clone, Debug)]
pub struct Profile {
    /// The work: `train gpt2-124m`.
    pub name: String,
    /// Its unit: step, token, batch.
    pub unit: &'static str,
    /// Number of recorded units.
    pub count: u64,
    /// Seconds per unit, unrecorded.
    pub seconds: f64,
    /// The device's name.
    pub device: String,
    /// The recording.
    pub report: Report,
    /// The hardware's limits.
    pub ceilings: Ceilings,
    /// Memory of the device, or of the process on the CPU.
    pub memory: Option<Memory>,
    /// Why the device's own times are missing, if they should be available.
    pub note: Option<String>,
}

impl Profile {
    /// The clock of all recorded times.
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

    /// Seconds per unit while recording.
    pub fn recorded_seconds(&self) -> f64 {
        self.report.elapsed.as_secs_f64() / self.count.max(1) as f64
    }

    /// The busy share of the device, 0 to 1: its recorded time relative to an unrecorded unit,
    /// since recording slows the host and not the kernels.
    pub fn busy(&self) -> Option<f64> {
        let busy = idle(&self.report)?.busy.as_secs_f64() / self.count.max(1) as f64;
        Some((busy / self.seconds.max(1e-12)).min(1.0))
    }

    /// The table's rows, most expensive first.
    pub fn rows(&self) -> Vec<Row> {
        rows::rows(self)
    }

    /// Table and totals as one JSON object.
    pub fn to_json(&self) -> Value {
        let peaks = self.ceilings.peaks.map(|peaks| json!({ "half": peaks.half, "single": peaks.single }));
        let idle = idle(&self.report).map(|idle| {
            let host = |(what, time): (String, Duration)| json!({ "host": what, "seconds": time.as_secs_f64() });
            idle.by.into_iter().map(host).collect::<Vec<_>>()
        });
        let verdict = |verdict: &Verdict| json!({ "kind": verdict.kind.name(), "text": verdict.text });
        json!({
            "event": "profile", "name": self.name, "unit": self.unit, "count": self.count, "device": self.device,
            "seconds": self.seconds, "recorded_seconds": self.recorded_seconds(),
            "source": self.report.source.to_string(),
            "ceilings": {
                "bytes_per_second": self.ceilings.bytes_per_second,
                "flops_per_second": peaks,
            },
            "memory": self.memory.map(|memory| json!({ "in_use": memory.in_use, "reserved": memory.reserved })),
            "busy": self.busy(),
            "idle": idle,
            "rows": self.rows().iter().map(Row::to_json).collect::<Vec<_>>(),
            "verdicts": verdicts(self).iter().map(verdict).collect::<Vec<_>>(),
            "report": serde_json::from_str::<Value>(&self.report.to_json()).unwrap_or_default(),
        })
    }

    /// Writes a timeline for Perfetto or Chrome's `about:tracing`.
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
