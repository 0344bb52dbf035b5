//! Recorded runs: reading, listing, comparing.

mod compare;
mod page;
pub mod record;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde_json::{Map, Value};

use crate::failure::Failure;
use crate::plots::Curve;
use crate::run_folder::{DONE, METRICS, REPORT, checkpoints, is_locked, write_atomic};

pub use compare::{Comparison, Difference};
pub use record::RunRecord;

/// A run and its records.
#[derive(Clone, Debug)]
pub struct Run {
    /// Its folder.
    pub folder: PathBuf,
    /// Its record; none for old runs.
    pub record: Option<RunRecord>,
    /// The lines of its `metrics.jsonl`.
    pub events: Vec<Value>,
    /// The figures of its `done` line, if finished.
    pub done: Option<Value>,
}

/// Status of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Finished.
    Done,
    /// Training now.
    Running,
    /// Stopped; it can be resumed.
    Stopped,
}

impl Status {
    /// The status as a word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Running => "running",
            Self::Stopped => "stopped",
        }
    }
}

impl Run {
    /// Reads the folder of a run.
    ///
    /// # Errors
    /// If it holds no run, or a file is damaged.
    pub fn read(folder: &Path) -> Result<Self, Failure> {
        let file = folder.join(METRICS);
        let text = match fs::read(&file) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let shown = folder.display();
                return Err(Failure::new(format!("{shown} holds no run: it has no {METRICS}")));
            }
            Err(error) => return Err(Failure::io(&file)(error)),
        };
        // The last line of a running run may be incomplete.
        let events = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        let record = RunRecord::find(folder)?;
        let done = fs::read_to_string(folder.join(DONE)).ok().and_then(|text| serde_json::from_str(&text).ok());
        Ok(Self { folder: folder.to_path_buf(), record, events, done })
    }

    /// The runs in a folder and in its subfolders, newest first.
    pub fn list(folder: &Path) -> Vec<Self> {
        fn find(folder: &Path, depth: usize, found: &mut Vec<(SystemTime, Run)>) {
            for path in fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()) {
                if !path.is_dir() {
                    continue;
                }
                let written = fs::metadata(path.join(METRICS)).and_then(|meta| meta.modified());
                match (written, Run::read(&path)) {
                    (Ok(written), Ok(run)) => found.push((written, run)),
                    _ if depth > 0 => find(&path, depth - 1, found),
                    _ => {}
                }
            }
        }
        let mut found = Vec::new();
        find(folder, 1, &mut found);
        found.sort_by_key(|(written, _)| std::cmp::Reverse(*written));
        found.into_iter().map(|(_, run)| run).collect()
    }

    /// Its name: the last part of its path.
    pub fn name(&self) -> String {
        self.folder.file_name().map_or_else(|| self.folder.display().to_string(), |name| name.to_string_lossy().into())
    }

    /// Its status.
    pub fn status(&self) -> Status {
        if is_locked(&self.folder) {
            return Status::Running;
        }
        let last = checkpoints(&self.folder).last().map(|(step, _)| *step);
        match (&self.done, last) {
            (Some(done), Some(last)) if done["steps"].as_u64().is_some_and(|steps| steps < last) => Status::Stopped,
            (Some(_), _) => Status::Done,
            (None, _) => Status::Stopped,
        }
    }

    /// The last recorded step.
    pub fn step(&self) -> u64 {
        self.events.iter().filter_map(|event| event["step"].as_u64()).max().unwrap_or(0)
    }

    /// The best validation: step and loss. The one before the first step has no model.
    pub fn best(&self) -> Option<(u64, f64)> {
        let valid = self.events.iter().filter(|event| event["event"] == "valid");
        let losses = valid.filter_map(|event| Some((event["step"].as_u64()?, event["loss"].as_f64()?)));
        losses.filter(|(step, _)| *step > 0).min_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// Tokens per second: of the whole run if finished, else of its last steps.
    pub fn tokens_per_second(&self) -> Option<f64> {
        let last = || self.events.iter().rev().find_map(|event| event["tokens_per_second"].as_f64());
        self.done.as_ref().and_then(|done| done["tokens_per_second"].as_f64()).or_else(last)
    }

    /// A field of the events of one kind, over steps.
    pub fn curve(&self, name: &str, event: &str, field: &str) -> Curve {
        let of_kind = self.events.iter().filter(|line| line["event"] == event);
        Curve::new(name, of_kind.filter_map(|line| Some((line["step"].as_f64()?, line[field].as_f64()?))))
    }

    /// Its settings by full name, as in a recipe.
    pub fn settings(&self) -> Map<String, Value> {
        self.record.as_ref().map_or_else(Map::new, |record| record.recipe.settings())
    }
}

/// Writes the report page of a run into its folder.
///
/// # Errors
/// If the run cannot be read, or the page cannot be written.
pub fn write_report(folder: &Path) -> Result<(), Failure> {
    let run = Run::read(folder)?;
    write_atomic(&folder.join(REPORT), page::page(&run.name(), &[run]).as_bytes())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_validation_before_training_is_never_the_best() {
        let valid = |step: u64, loss: f64| json!({"event": "valid", "step": step, "loss": loss});
        let of = |events: Vec<Value>| Run { folder: PathBuf::from("run"), record: None, events, done: None }.best();
        assert_eq!(of(vec![valid(0, 1.0), valid(2, 3.0), valid(4, 2.0)]), Some((4, 2.0)));
        assert_eq!(of(vec![valid(0, 1.0)]), None);
    }
}
