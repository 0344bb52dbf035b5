//! What the figures say, in words, and only where they bear it out.

use std::fmt::{self, Display, Formatter};

use fireclay_kernels::recorder::Transfers;

use super::{Bound, Profile, idle};

/// Share of idle time from which on the device is said to be idle.
const IDLE: f64 = 0.3;
/// Share of the time from which on an operation far from its ceiling is named, and how far that is.
const EXPENSIVE: f64 = 0.1;
const FAR: f64 = 0.5;

/// What a verdict is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum VerdictKind {
    /// An operation ran its reference.
    Fallback,
    /// Data crossed between host and device.
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
/// A copy or a wait counts where it happens at least once in each unit: what is read late, for many units at once, costs
/// them nothing.
pub fn verdicts(profile: &Profile) -> Vec<Verdict> {
    let (unit, count) = (profile.unit, profile.count.max(1) as f64);
    let mut verdicts = Vec::new();
    let mut say = |kind, text| verdicts.push(Verdict { kind, text });
    let report = &profile.report;

    for fallback in &report.fallbacks {
        let times = each(fallback.count as f64 / count);
        say(VerdictKind::Fallback, format!("{} ran its reference {times} a {unit}: {}", fallback.op, fallback.reason));
    }

    let mut copied = |what: &str, name: String, times: u64, bytes: u64| {
        if times as f64 >= count {
            let (bytes, times) = (shown_bytes(bytes as f64 / count), each(times as f64 / count));
            say(VerdictKind::Copies, format!("{bytes} copied to the {what} {times} a {unit} by {name}"));
        }
    };
    // CUPTI knows of every copy; elsewhere there is what callers told of.
    if report.timeline.is_some() {
        for op in &report.ops {
            let name = if op.part.is_empty() { op.name.to_string() } else { format!("{}: {}", op.part, op.name) };
            for (what, copies) in [("host", op.work.to_host), ("device", op.work.to_device)] {
                let copies = copies.unwrap_or_default();
                copied(what, name.clone(), copies.count, copies.bytes);
            }
        }
        let to_host = report.outside.to_host.unwrap_or_default();
        copied("host", "code outside any operation".into(), to_host.count, to_host.bytes);
        if let (true, Some(to_device)) = (profile.unit == "token", report.outside.to_device) {
            copied("device", "code outside any operation".into(), to_device.count, to_device.bytes);
        }
    } else {
        for Transfers { part, op, count, bytes } in &report.reads {
            copied("host", caller(part, op), *count, *bytes);
        }
        // What is learnt from has to be uploaded.
        for Transfers { part, op, count, bytes } in report.uploads.iter().filter(|_| profile.unit == "token") {
            copied("device", caller(part, op), *count, *bytes);
        }
    }

    if let Some(waits) = report.total.synchronisations.filter(|waits| *waits as f64 >= count) {
        let waiting: Vec<String> = report
            .ops
            .iter()
            .filter(|op| op.work.synchronisations.is_some_and(|waits| waits > 0))
            .map(|op| caller(op.part, op.name))
            .collect();
        let by = if waiting.is_empty() { "code outside any operation".into() } else { waiting.join(", ") };
        say(
            VerdictKind::Sync,
            format!("the host waited for the device {} a {unit}, in {by}", each(waits as f64 / count)),
        );
    }

    if let Some(allocations) = report.total.allocations.filter(|allocations| *allocations > 0) {
        let (steps, plural) = (profile.count, if profile.count == 1 { "" } else { "s" });
        say(
            VerdictKind::Allocations,
            format!("{allocations} allocations reached the driver in {steps} warm {unit}{plural}"),
        );
    }

    if let Some(idle) = idle(report) {
        let elapsed = report.elapsed.as_secs_f64().max(1e-12);
        let share = idle.idle.as_secs_f64() / elapsed;
        if share >= IDLE {
            let mut text = format!("the device was idle {:.0}% of the time", 100.0 * share);
            let launches = report.total.launches.unwrap_or(0);
            let busy = idle.busy.as_secs_f64();
            // What a host does that only launches.
            let launching =
                idle.by.iter().filter(|(what, _)| what.ends_with(": launch") || what.starts_with("preparing"));
            let launching: f64 = launching.map(|(_, time)| time.as_secs_f64()).sum();
            if launches as f64 >= count && busy > 0.0 && launching >= 0.5 * idle.idle.as_secs_f64() {
                let (each, per_unit) = (1e6 * busy / launches as f64, launches as f64 / count);
                text += &format!(": launch-bound, {per_unit:.0} launches a {unit} of {each:.1} us");
            }
            if let Some((what, time)) = idle.by.first() {
                let share = 100.0 * time.as_secs_f64() / idle.idle.as_secs_f64().max(1e-12);
                text += &format!("; {share:.0}% of that the host was {what}");
            }
            say(VerdictKind::Idle, text);
        }
    }

    for row in profile.rows() {
        if let Some((reached, bound)) = row.ceiling.filter(|(reached, _)| row.share >= EXPENSIVE && *reached < FAR) {
            let limit = match bound {
                Bound::Memory => "what memory would allow",
                Bound::Compute => "what the matrix units could compute",
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

fn caller(part: &str, op: &str) -> String {
    match (part, op) {
        ("", "") => "code outside any operation".into(),
        ("", op) => op.into(),
        (part, "") => part.into(),
        (part, op) => format!("{part}: {op}"),
    }
}

/// How often, on average.
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
