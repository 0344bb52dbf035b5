//! Runs as a single-file page: interactive curves, samples, settings, and the command of each.

use serde_json::{Value, json};

use super::Run;

/// The page, with placeholders for title and data.
const PAGE: &str = include_str!("page.html");
/// Maximum points per curve; more are averaged.
const POINTS: usize = 2000;

/// The page of some runs.
pub(super) fn page(title: &str, runs: &[Run]) -> String {
    let data = Value::Array(runs.iter().map(of_run).collect()).to_string();
    // Text of a run must not end the script element.
    let data = data.replace('<', "\\u003c");
    let title = title.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    PAGE.replace("{{title}}", &title).replace("{{runs}}", &data)
}

fn of_run(run: &Run) -> Value {
    let curve = |event: &str, field: &str| thinned(run.curve("", event, field).points);
    let of_kind = |kind: &str| run.events.iter().filter(|event| event["event"] == kind).cloned().collect::<Vec<_>>();
    json!({
        "name": run.name(),
        "record": run.record,
        "settings": run.settings(),
        "done": run.done,
        "curves": {
            "training loss": curve("train", "loss"),
            "validation loss": curve("valid", "loss"),
            "learning rate": curve("train", "learning_rate"),
            "gradient norm": curve("train", "gradient_norm"),
            "tokens per second": curve("train", "tokens_per_second"),
            "intent accuracy": curve("valid", "intent_accuracy"),
            "slot F1": curve("valid", "slot_f1"),
            "sentence accuracy": curve("valid", "sentence_accuracy"),
        },
        "samples": of_kind("sample"),
        "confusions": of_kind("confusions").last(),
        "warnings": of_kind("warning"),
    })
}

/// Means of neighbouring points, to reduce their number.
fn thinned(points: Vec<(f64, f64)>) -> Vec<[f64; 2]> {
    let each = points.len().div_ceil(POINTS).max(1);
    let mean = |part: &[(f64, f64)]| {
        let sum = part.iter().fold((0.0, 0.0), |sum, point| (sum.0 + point.0, sum.1 + point.1));
        [sum.0 / part.len() as f64, sum.1 / part.len() as f64]
    };
    points.chunks(each).map(mean).collect()
}
