//! The table's rows: calls of an operation in one part of the model with equal input shapes.

use std::time::Duration;

use fireclay_kernels::recorder::{KernelReport, OpReport, Operand, Source};
use serde_json::{Value, json};

use super::Profile;

/// A lower bound of an operation's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// Memory: the time to move its bytes.
    Memory,
    /// Compute: the time of its products.
    Compute,
}

impl Bound {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Compute => "compute",
        }
    }
}

/// A row of the table.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The part of the model; empty outside of any.
    pub part: String,
    /// The operation, or the activity outside of any.
    pub op: String,
    /// Its kernels, longest first.
    pub kernels: Vec<KernelReport>,
    /// Shape and dtype of its inputs.
    pub inputs: Vec<Operand>,
    /// Calls in all units.
    pub calls: u64,
    /// Kernel launches in all units, if known.
    pub launches: Option<u64>,
    /// Time in all units; unknown if only calls were counted.
    pub time: Option<Duration>,
    /// Share of the total time.
    pub share: f64,
    /// Bytes that had to be moved, per second.
    pub bytes_per_second: Option<f64>,
    /// FLOP per second.
    pub flops_per_second: Option<f64>,
    /// Share of its limit reached, 0 to 1, and which limit that is.
    pub ceiling: Option<(f64, Bound)>,
}

impl Row {
    /// Part and operation.
    pub fn name(&self) -> String {
        if self.part.is_empty() { self.op.clone() } else { format!("{}: {}", self.part, self.op) }
    }

    pub(super) fn to_json(&self) -> Value {
        let seconds = |time: Option<Duration>| time.map(|time| time.as_secs_f64());
        let kernels = self.kernels.iter().map(|KernelReport { name, launches, time }| {
            let seconds = seconds(*time);
            json!({ "name": name, "launches": launches, "seconds": seconds })
        });
        json!({
            "part": self.part, "op": self.op, "calls": self.calls, "launches": self.launches,
            "inputs": self.inputs.iter().map(Operand::to_string).collect::<Vec<_>>(),
            "seconds": seconds(self.time), "share": self.share,
            "bytes_per_second": self.bytes_per_second, "flops_per_second": self.flops_per_second,
            "ceiling": self.ceiling.map(|(share, bound)| json!({ "share": share, "bound": bound.name() })),
            "kernels": kernels.collect::<Vec<_>>(),
        })
    }
}

pub(super) fn rows(profile: &Profile) -> Vec<Row> {
    let mut rows: Vec<Row> = profile.report.ops.iter().map(|op| row(profile, op)).collect();
    rows.push(outside(profile));
    let total: Duration = rows.iter().filter_map(|row| row.time).sum();
    for row in &mut rows {
        row.share = row.time.map_or(0.0, |time| time.as_secs_f64() / total.as_secs_f64().max(1e-12));
    }
    rows.retain(|row| row.calls > 0 || row.time.is_some_and(|time| time > Duration::ZERO));
    rows.sort_by_key(|row| std::cmp::Reverse(row.time));
    rows
}

fn row(profile: &Profile, op: &OpReport) -> Row {
    let time = match profile.report.source {
        Source::Cupti => op.work.device_time(),
        _ => op.host_time,
    };
    let seconds = time.map(|time| time.as_secs_f64()).filter(|seconds| *seconds > 0.0);
    let rate = |amount: u64| seconds.filter(|_| amount > 0).map(|seconds| amount as f64 / seconds);
    let memory = op.bytes as f64 / profile.ceilings.bytes_per_second;
    let dtype = op.inputs.first().map(|input| input.dtype);
    let peak = profile.ceilings.peaks.zip(dtype).map(|(peaks, dtype)| peaks.for_dtype(dtype));
    let compute = peak.filter(|_| op.flops > 0).map(|peak| op.flops as f64 / peak);
    // Products with unknown peak may be compute-bound.
    let floor = match compute {
        Some(compute) if compute > memory => Some((compute, Bound::Compute)),
        None if op.flops > 0 => None,
        _ => Some((memory, Bound::Memory)).filter(|_| op.bytes > 0),
    };
    Row {
        part: op.part.into(),
        op: op.name.into(),
        kernels: op.kernels.clone(),
        inputs: op.inputs.clone(),
        calls: op.calls,
        launches: op.work.launches,
        time,
        share: 0.0,
        bytes_per_second: rate(op.bytes),
        flops_per_second: rate(op.flops),
        ceiling: floor.zip(seconds).map(|((floor, bound), seconds)| (floor / seconds, bound)),
    }
}

/// Activity outside of operations: Burn's own, and on the host the rest of the program.
fn outside(profile: &Profile) -> Row {
    let report = &profile.report;
    let time = match report.source {
        Source::Cupti => report.outside.device_time(),
        Source::Calls => None,
        Source::Host | Source::Waits => {
            let inside: Duration = report.ops.iter().filter_map(|op| op.host_time).sum();
            Some(report.elapsed.saturating_sub(inside))
        }
    };
    Row {
        part: String::new(),
        op: "outside any operation".into(),
        kernels: report.kernels_outside.clone(),
        inputs: Vec::new(),
        calls: 0,
        launches: report.outside.launches,
        time,
        share: 0.0,
        bytes_per_second: None,
        flops_per_second: None,
        ceiling: None,
    }
}
