//! Findings: conclusions from the figures, only where these support them.

use std::fmt::{self, Display, Formatter};

use fireclay_kernels::recorder::{Report, Source};

use super::{Bound, Profile, idle};

/// Idle share from which the device is reported as idle.
const IDLE: f64 = 0.3;
/// Share of time from which an operation far from its limit is reported, and how far.
const EXPENSIVE: f64 = 0.1;
const FAR: f64 = 0.5;
/// Kernels shorter than this are too short to compare with a limit.
const SHORT: f64 = 20e-6;
/// Maximum callers in a finding.
const NAMED: usize = 3;
/// Bytes per unit that may be read late.
const LATE: u64 = 4096;

/// What a verdict is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum VerdictKind {
    /// An operation ran its unfused reference instead of a fused kernel.
    Fallback,
    /// Data was copied between host and device.
    Copies,
    /// The host waited for the device.
    Sync,
    /// Allocations reached the driver.
    #[value(skip)]
    Allocations,
    /// The device had nothing to do.
    #[value(skip)]
    Idle,
    /// An operation is far from what the hardware could do.
    #[value(skip)]
    Slow,
}

impl VerdictKind {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fallback => "fallback",
            Self::Copies => "copies",
            Self::Sync => "sync",
            Self::Allocations => "allocations",
            Self::Idle => "idle",
            Self::Slow => "slow",
        }
    }
}

/// What the figures say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// What it is about.
    pub kind: VerdictKind,
    /// In words.
    pub text: String,
}

impl Display for Verdict {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind.name(), self.text)
    }
}

/// What the figures of a profile say, the gravest kinds first.
///
/// What is read late, for many units at once, costs them nothing, and is no verdict; nor are waits
/// for that.
pub fn verdicts(profile: &Profile) -> Vec<Verdict> {
    let (unit, count) = (profile.unit, profile.count.max(1) as f64);
    let mut verdicts = Vec::new();
    let mut say = |kind, text| verdicts.push(Verdict { kind, text });
    let report = &profile.report;

    for fallback in &report.fallbacks {
        let times = each(fallback.count as f64 / count);
        say(
            VerdictKind::Fallback,
            format!("{} ran its reference {times} per {unit}: {}", fallback.op, fallback.reason),
        );
    }

    for (direction, copies) in [("host", to_host(profile)), ("device", to_device(profile))] {
        let (times, bytes) = copies.iter().fold((0, 0), |sum, copy| (sum.0 + copy.times, sum.1 + copy.bytes));
        if times == 0 {
            continue;
        }
        let names: Vec<&str> = copies.iter().take(NAMED).map(|copy| &*copy.name).collect();
        let more = copies.len().saturating_sub(NAMED);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let (bytes, times) = (shown_bytes(bytes as f64 / count), each(times as f64 / count));
        say(
            VerdictKind::Copies,
            format!("{bytes} copied to the {direction} {times} per {unit} by {}{more}", names.join(", ")),
        );
    }

    if let Some(waits) = waits(report).filter(|waits| *waits as f64 >= count) {
        let waiting: Vec<String> = report
            .ops
            .iter()
            .filter(|op| op.work.synchronisations.is_some_and(|waits| waits > 0))
            .map(|op| caller(op.part, op.name))
            .collect();
        let outside = report.outside.synchronisations.is_some_and(|waits| waits > 0).then(|| caller("", ""));
        let by = waiting.into_iter().chain(outside).take(NAMED).collect::<Vec<_>>().join(", ");
        say(
            VerdictKind::Sync,
            format!("the host waited for the device {} per {unit}, in {by}", each(waits as f64 / count)),
        );
    }

    if let Some(allocations) = report.total.allocations.filter(|allocations| *allocations > 0) {
        let (steps, plural) = (profile.count, if profile.count == 1 { "" } else { "s" });
        say(
            VerdictKind::Allocations,
            format!("{allocations} allocations reached the driver in {steps} warm {unit}{plural}"),
        );
    }

    if let Some((busy, idle)) = profile.busy().zip(idle(report)) {
        let share = 1.0 - busy;
        if share >= IDLE {
            let mut text = format!("the device is idle {:.0}% of the time", 100.0 * share);
            let launches = report.total.launches.unwrap_or(0);
            let busy = idle.busy.as_secs_f64();
            // What a host does that only launches.
            let launching =
                idle.by.iter().filter(|(what, _)| what.ends_with(": launch") || what.starts_with("preparing"));
            let launching: f64 = launching.map(|(_, time)| time.as_secs_f64()).sum();
            if launches as f64 >= count && busy > 0.0 && launching >= 0.5 * idle.idle.as_secs_f64() {
                let (each, per_unit) = (1e6 * busy / launches as f64, launches as f64 / count);
                text += &format!(": launch-bound, {per_unit:.0} launches per {unit} of {each:.1} us");
            }
            if let Some((what, time)) = idle.by.first() {
                let share = 100.0 * time.as_secs_f64() / idle.idle.as_secs_f64().max(1e-12);
                text += &format!("; {share:.0}% of that the host is {what}");
            }
            say(VerdictKind::Idle, text);
        }
    }

    for row in profile.rows() {
        let runs = row.launches.unwrap_or(row.calls).max(1);
        let long = row.time.is_some_and(|time| time.as_secs_f64() / runs as f64 >= SHORT);
        let far = |(reached, _): &(f64, Bound)| row.share >= EXPENSIVE && *reached < FAR && long;
        if let Some((reached, bound)) = row.ceiling.filter(far) {
            let limit = match bound {
                Bound::Memory => "the memory limit",
                Bound::Compute => "the compute limit",
            };
            let (share, reached) = (100.0 * row.share, 100.0 * reached);
            say(
                VerdictKind::Slow,
                format!("{} takes {share:.0}% of the time, at {reached:.0}% of {limit}", row.name()),
            );
        }
    }
    verdicts
}

/// Copies of a caller, in all units.
struct Copying {
    name: String,
    times: u64,
    bytes: u64,
}

/// Waits that left the device without work, if known.
fn waits(report: &Report) -> Option<u64> {
    report.total.synchronisations.map(|waits| waits.saturating_sub(report.waits_while_busy))
}

/// Copies to the host that cost device time: those within operations, and others that are waited
/// for in each unit or exceed [`LATE`] bytes. Tokens and losses read late, many units at once, are
/// neither.
fn to_host(profile: &Profile) -> Vec<Copying> {
    let (report, count) = (&profile.report, profile.count.max(1));
    let waits = match report.timeline {
        Some(_) => waits(report).unwrap_or(0),
        // The recorder waited after each operation, so nothing could be read late.
        None if report.source == Source::Waits => 0,
        None => report.reads.iter().map(|read| read.count).sum::<u64>().saturating_sub(report.waits_while_busy),
    };
    let late = |times: u64, bytes: u64| times > 0 && waits < count && bytes < LATE * count;
    let found = match &report.timeline {
        Some(_) => {
            let outside = report.outside.to_host.unwrap_or_default();
            let within = report.ops.iter().map(|op| (caller(op.part, op.name), op.work.to_host.unwrap_or_default()));
            let within = within.map(|(name, copies)| Copying { name, times: copies.count, bytes: copies.bytes });
            let outside = Copying { name: caller("", ""), times: outside.count, bytes: outside.bytes };
            within.chain(Some(outside).filter(|copy| !late(copy.times, copy.bytes))).collect()
        }
        None => {
            let told = report.reads.iter().filter(|read| !read.op.is_empty() || !late(read.count, read.bytes));
            told.map(|read| Copying { name: caller(read.part, read.op), times: read.count, bytes: read.bytes })
                .collect()
        }
    };
    largest_first(found)
}

/// Copies to the device, except for the inputs, which must go there.
fn to_device(profile: &Profile) -> Vec<Copying> {
    let report = &profile.report;
    let decodes = profile.unit == "token";
    let found = match &report.timeline {
        Some(_) => {
            let outside = report.outside.to_device.unwrap_or_default();
            let within = report.ops.iter().map(|op| (caller(op.part, op.name), op.work.to_device.unwrap_or_default()));
            let within = within.map(|(name, copies)| Copying { name, times: copies.count, bytes: copies.bytes });
            let outside = Copying { name: caller("", ""), times: outside.count, bytes: outside.bytes };
            within.chain(Some(outside).filter(|_| decodes)).collect()
        }
        None => {
            let told = report.uploads.iter().filter(|upload| decodes || !upload.op.is_empty());
            told.map(|upload| Copying {
                name: caller(upload.part, upload.op),
                times: upload.count,
                bytes: upload.bytes,
            })
            .collect()
        }
    };
    largest_first(found)
}

/// One per caller, largest first.
fn largest_first(copies: Vec<Copying>) -> Vec<Copying> {
    let mut joined: Vec<Copying> = Vec::new();
    for copy in copies.into_iter().filter(|copy| copy.times > 0) {
        match joined.iter_mut().find(|other| other.name == copy.name) {
            Some(other) => {
                other.times += copy.times;
                other.bytes += copy.bytes;
            }
            None => joined.push(copy),
        }
    }
    joined.sort_by_key(|copy| std::cmp::Reverse(copy.bytes));
    joined
}

fn caller(part: &str, op: &str) -> String {
    match (part, op) {
        ("", "") => "code outside any operation".into(),
        ("", op) => op.into(),
        (part, "") => part.into(),
        (part, op) => format!("{part}: {op}"),
    }
}

/// The average count.
fn each(times: f64) -> String {
    match times {
        1.0 => "once".into(),
        times if times.fract() == 0.0 => format!("{times} times"),
        times => format!("{times:.2} times"),
    }
}

pub(super) fn shown_bytes(bytes: f64) -> String {
    match bytes {
        bytes if bytes < 1e3 => format!("{bytes:.0} B"),
        bytes if bytes < 1e6 => format!("{:.1} KB", bytes / 1e3),
        bytes if bytes < 1e9 => format!("{:.1} MB", bytes / 1e6),
        bytes => format!("{:.2} GB", bytes / 1e9),
    }
}
