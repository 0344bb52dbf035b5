//! Plots of a run: `loss.svg`, and for utterances `confusion.svg`.

use std::path::Path;

use crate::failure::Failure;
use crate::plots::{confusion_matrix, curves};
use crate::run_folder::{CHART, CONFUSION};
use crate::runs::Run;
use crate::tasks::ClassificationReport;

/// Plots the losses in a run folder's `metrics.jsonl` to its `loss.svg`.
///
/// # Errors
/// If a file cannot be read or written.
pub(crate) fn draw(folder: &Path) -> Result<(), Failure> {
    let run = Run::read(folder)?;
    let losses = [run.curve("training", "train", "loss"), run.curve("validation", "valid", "loss")];
    if losses.iter().all(|curve| curve.points.is_empty()) {
        return Ok(());
    }
    curves("", ["step", "loss, nats per token"], &losses)?.save(&folder.join(CHART))
}

/// Plots the intent confusions to the folder's `confusion.svg`.
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
