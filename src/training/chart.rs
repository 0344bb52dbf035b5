//! Pictures of a run: `loss.svg`, and where utterances were judged, `confusion.svg`.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::failure::Failure;
use crate::plots::{Curve, confusion_matrix, curves};
use crate::run_folder::{CHART, CONFUSION, METRICS};
use crate::tasks::ClassificationReport;

/// Draws the losses in a run folder's `metrics.jsonl` into its `loss.svg`.
///
/// # Errors
/// If a file cannot be read or written.
pub(crate) fn draw(folder: &Path) -> Result<(), Failure> {
    let file = folder.join(METRICS);
    let text = fs::read_to_string(&file).map_err(Failure::io(&file))?;
    let lines: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let losses = |name: &str, event: &str| {
        let of_event = lines.iter().filter(|line| line["event"] == event);
        Curve::new(name, of_event.filter_map(|line| Some((line["step"].as_f64()?, line["loss"].as_f64()?))))
    };
    let losses = [losses("training", "train"), losses("validation", "valid")];
    if losses.iter().all(|curve| curve.points.is_empty()) {
        return Ok(());
    }
    curves("", ["step", "loss, nats a token"], &losses)?.save(&folder.join(CHART))
}

/// Draws which intents were taken for which into the folder's `confusion.svg`.
///
/// # Errors
/// If the file cannot be written.
pub(crate) fn draw_confusions(folder: &Path, report: &ClassificationReport) -> Result<(), Failure> {
    let (labels, counts) = report.confusion_matrix();
    if labels.is_empty() {
        return Ok(());
    }
    confusion_matrix("Intents of the test data", &labels, &counts)?.save(&folder.join(CONFUSION))
}
