//! The timeline, in the format of Perfetto and Chrome ("Trace Event Format", Google).

use std::time::Duration;

use serde_json::{Value, json};

use super::Profile;

/// The rows of the timeline.
const THREADS: [(u32, &str); 3] = [(1, "operations"), (2, "driver"), (3, "device")];

pub(super) fn trace(profile: &Profile) -> Value {
    let report = &profile.report;
    let process = format!("{} on {}", profile.name, profile.device);
    let mut events = vec![json!({ "ph": "M", "pid": 1, "name": "process_name", "args": { "name": process } })];
    for (thread, name) in THREADS {
        events.push(json!({ "ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": { "name": name } }));
    }
    let op_name = |op: Option<usize>| {
        let op = op.and_then(|op| report.ops.get(op))?;
        Some(if op.part.is_empty() { op.name.to_string() } else { format!("{}: {}", op.part, op.name) })
    };
    let mut event = |thread: u32, name: &str, op: Option<usize>, start: Duration, end: Duration| {
        let micros = |time: Duration| time.as_nanos() as f64 / 1e3;
        let inputs = op.and_then(|op| report.ops.get(op));
        let inputs = inputs.map(|op| op.inputs.iter().map(|input| input.to_string()).collect::<Vec<_>>().join(", "));
        events.push(json!({
            "ph": "X", "pid": 1, "tid": thread, "name": name,
            "ts": micros(start), "dur": micros(end.saturating_sub(start)),
            "args": { "operation": op_name(op), "inputs": inputs },
        }));
    };
    for span in &report.spans {
        event(1, &op_name(span.op).unwrap_or_default(), span.op, span.start, span.end);
    }
    if let Some(timeline) = &report.timeline {
        for call in &timeline.driver {
            event(2, call.kind, call.op, call.start, call.end);
        }
        for span in &timeline.device {
            event(3, &span.name, span.op, span.start, span.end);
        }
    }
    json!({ "traceEvents": events, "displayTimeUnit": "ms" })
}
