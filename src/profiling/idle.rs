//! The device's idle time, and what the host did meanwhile.

use std::collections::HashMap;
use std::time::Duration;

use fireclay_kernels::recorder::Report;

/// Device time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Idle {
    /// Busy.
    pub busy: Duration,
    /// Idle.
    pub idle: Duration,
    /// The idle time by activity of the host, longest first.
    pub by: Vec<(String, Duration)>,
}

type Interval = (Duration, Duration);

/// Computes it from a report's timeline, if there is one.
pub fn idle(report: &Report) -> Option<Idle> {
    let timeline = report.timeline.as_ref()?;
    let device = union(timeline.device.iter().map(|span| (span.start, span.end)));
    let busy = device.iter().map(|(start, end)| *end - *start).sum();
    let gaps = gaps(&device, report.elapsed);

    // A driver call is more specific than the operation around it.
    let mut by: HashMap<String, Duration> = HashMap::new();
    let mut left = gaps.clone();
    let mut kinds: HashMap<&'static str, Vec<Interval>> = HashMap::new();
    for call in &timeline.driver {
        kinds.entry(call.kind).or_default().push((call.start, call.end));
    }
    for (kind, calls) in kinds {
        let calls = union(calls);
        *by.entry(format!("in the driver: {kind}")).or_default() += overlap(&left, &calls);
        left = without(&left, &calls);
    }
    let mut ops: HashMap<String, Vec<Interval>> = HashMap::new();
    for span in &report.spans {
        if let Some(op) = span.op.and_then(|op| report.ops.get(op)) {
            let name = if op.part.is_empty() { op.name.to_string() } else { format!("{}: {}", op.part, op.name) };
            ops.entry(name).or_default().push((span.start, span.end));
        }
    }
    for (name, spans) in ops {
        let spans = union(spans);
        *by.entry(format!("preparing {name}")).or_default() += overlap(&left, &spans);
        left = without(&left, &spans);
    }
    let between: Duration = left.iter().map(|(start, end)| *end - *start).sum();
    *by.entry("between operations".into()).or_default() += between;
    let mut by: Vec<_> = by.into_iter().filter(|(_, time)| *time > Duration::ZERO).collect();
    by.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    let idle = gaps.iter().map(|(start, end)| *end - *start).sum();
    Some(Idle { busy, idle, by })
}

/// The union of intervals, in order.
fn union(intervals: impl IntoIterator<Item = Interval>) -> Vec<Interval> {
    let mut sorted: Vec<Interval> = intervals.into_iter().filter(|(start, end)| start < end).collect();
    sorted.sort();
    let mut joined: Vec<Interval> = Vec::new();
    for (start, end) in sorted {
        match joined.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => joined.push((start, end)),
        }
    }
    joined
}

/// The part of `0..end` in none of the intervals.
fn gaps(intervals: &[Interval], end: Duration) -> Vec<Interval> {
    without(&[(Duration::ZERO, end)], intervals)
}

/// The difference of two ordered lists of disjoint intervals.
fn without(a: &[Interval], b: &[Interval]) -> Vec<Interval> {
    let (mut left, mut at) = (Vec::new(), 0);
    for &(mut start, end) in a {
        while at < b.len() && b[at].1 <= start {
            at += 1;
        }
        let mut next = at;
        while next < b.len() && b[next].0 < end && start < end {
            if b[next].0 > start {
                left.push((start, b[next].0));
            }
            start = start.max(b[next].1);
            next += 1;
        }
        if start < end {
            left.push((start, end));
        }
    }
    left
}

/// The total overlap of `a` and `b`.
fn overlap(a: &[Interval], b: &[Interval]) -> Duration {
    let all: Duration = a.iter().map(|(start, end)| *end - *start).sum();
    let left: Duration = without(a, b).iter().map(|(start, end)| *end - *start).sum();
    all - left
}

#[cfg(test)]
mod tests {
    use super::*;

    fn intervals(numbers: &[(u64, u64)]) -> Vec<Interval> {
        numbers.iter().map(|(start, end)| (Duration::from_nanos(*start), Duration::from_nanos(*end))).collect()
    }

    #[test]
    fn intervals_are_joined_cut_and_measured() {
        let joined = union(intervals(&[(5, 7), (1, 3), (2, 4), (7, 8), (9, 9)]));
        assert_eq!(joined, intervals(&[(1, 4), (5, 8)]));
        assert_eq!(gaps(&joined, Duration::from_nanos(10)), intervals(&[(0, 1), (4, 5), (8, 10)]));
        assert_eq!(gaps(&[], Duration::from_nanos(2)), intervals(&[(0, 2)]));
        assert_eq!(
            without(&intervals(&[(0, 10), (20, 30)]), &intervals(&[(2, 3), (8, 22), (29, 40)])),
            intervals(&[(0, 2), (3, 8), (22, 29)])
        );
        assert_eq!(overlap(&intervals(&[(0, 10), (20, 30)]), &intervals(&[(8, 22)])), Duration::from_nanos(4));
    }
}
