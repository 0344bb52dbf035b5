//! Plots of a run: `loss.svg`, and for utterances and labelled examples `confusion.svg`.

use std::path::Path;

use crate::failure::Failure;
use crate::plots::{confusion_matrix, curves};
use crate::run_folder::{CHART, CONFUSION};
use crate::runs::Run;
use crate::tasks::TestReport;

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

/// Plots the confusions of intents or labels to the folder's `confusion.svg`.
///
/// # Errors
/// If the file cannot be written.
pub(crate) fn draw_confusions(folder: &Path, report: &TestReport) -> Result<(), Failure> {
    let (labels, counts) = report.confusion_matrix();
    if labels.is_empty() {
        return Ok(());
    }
    let title = format!("{} of the {} data", report.subject(), report.part());
    confusion_matrix(&title, &labels, &counts)?.save(&folder.join(CONFUSION))
}
