//! `run.json`: the record of a run, to list, compare and repeat it.

use std::fs;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use fireclay_model::TransformerConfig;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::ceilings::Peaks;
use crate::failure::Failure;
use crate::precision::Precision;
use crate::recipe::schema::Recipe;
use crate::run_folder::{RECORD, write_atomic};

/// The record of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunRecord {
    /// Version of the program.
    pub version: String,
    /// The command line.
    pub command: Vec<String>,
    /// The working directory.
    pub folder: String,
    /// Start time, in seconds since 1970.
    pub begun: u64,
    /// The steps at which it was resumed.
    #[serde(default)]
    pub resumed_at: Vec<u64>,
    /// The device.
    pub device: String,
    /// The operating system, and the CPU's model and cores.
    pub system: String,
    /// Parameters of the model.
    pub parameters: usize,
    /// FLOP per token in training, forward and backward.
    pub flops_per_token: f64,
    /// Peak FLOP/s of the device in the run's dtype, if known or given.
    pub peak_flops: Option<f64>,
    /// The recipe.
    pub recipe: Recipe,
}

impl RunRecord {
    /// The record of a new run.
    pub fn new(recipe: &Recipe, config: &TransformerConfig, device: String, command: Vec<String>) -> Self {
        let training = &recipe.training;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let half = !matches!(training.precision, Precision::F32 | Precision::Tf32);
        let peak_flops = match training.peak_tflops {
            // The peak of f32 products depends on their rounding mode.
            0.0 => Peaks::of(&device, training.precision.f32_products()).filter(|_| half).map(|peaks| peaks.half),
            given => Some(given * 1e12),
        };
        Self {
            version: env!("CARGO_PKG_VERSION").to_string(),
            command,
            folder: std::env::current_dir().map_or_else(|_| String::new(), |folder| folder.display().to_string()),
            begun: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
            resumed_at: Vec::new(),
            device,
            system: format!("{} {}, {cores} cores", std::env::consts::OS, std::env::consts::ARCH),
            parameters: config.parameter_count(),
            flops_per_token: config.training_flops(training.seq_length),
            peak_flops,
            recipe: recipe.clone(),
        }
    }

    /// Model FLOPs utilization at this speed (Chowdhery et al., 2022).
    pub fn utilization(&self, tokens_per_second: f64) -> Option<f64> {
        Some(tokens_per_second * self.flops_per_token / self.peak_flops?)
    }

    /// Writes it to a run's folder. A run resumed at step `resumed_at` keeps its original record.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(&self, folder: &Path, resumed_at: Option<u64>) -> Result<(), Failure> {
        let mut record = self.clone();
        if let (Some(step), Ok(first)) = (resumed_at, Self::read(folder)) {
            let Self { command, folder, begun, resumed_at, .. } = first;
            record = Self { command, folder, begun, resumed_at, ..record };
            record.resumed_at.push(step);
        }
        let text = serde_json::to_string_pretty(&record).map_err(|error| Failure::new(error.to_string()))?;
        write_atomic(&folder.join(RECORD), text.as_bytes())
    }

    /// The record of the run in `folder`; none for old runs.
    ///
    /// # Errors
    /// If it is damaged.
    pub fn find(folder: &Path) -> Result<Option<Self>, Failure> {
        if folder.join(RECORD).exists() { Self::read(folder).map(Some) } else { Ok(None) }
    }

    /// The run's settings that `recipe` has otherwise, each with its value in the run, if set there.
    pub fn differences(&self, recipe: &Recipe) -> Vec<(String, Option<Value>)> {
        let here = std::env::current_dir().unwrap_or_default();
        self.recipe.with_full_paths(Path::new(&self.folder)).differences(&recipe.with_full_paths(&here))
    }

    /// Reads the record of a run.
    ///
    /// # Errors
    /// If it is missing or damaged.
    pub fn read(folder: &Path) -> Result<Self, Failure> {
        let file = folder.join(RECORD);
        let text = fs::read_to_string(&file).map_err(Failure::io(&file))?;
        serde_json::from_str(&text)
            .map_err(|error| Failure::new(format!("{}: no record of a run: {error}", file.display())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpt2_takes_what_the_papers_say() {
        let config = TransformerConfig::gpt2(50_257, 1024, 768, 12, 12);
        // 6 * 123.7 million, and 6 * 12 * 768 * 1024.
        let flops = config.training_flops(1024);
        assert!((flops - 7.99e8).abs() < 0.01e8, "{flops:.3e}");
    }

    #[test]
    fn a_run_that_goes_on_keeps_how_it_began() {
        let folder = tempfile::tempdir().expect("a folder");
        let config = TransformerConfig::gpt2(100, 16, 8, 1, 1);
        let recipe = Recipe::shipped("stories").expect("a good recipe");
        let record = |command: &str| RunRecord::new(&recipe, &config, "H200".into(), vec![command.into()]);
        record("first").write(folder.path(), None).expect("writable");
        record("second").write(folder.path(), Some(30)).expect("writable");
        let read = RunRecord::read(folder.path()).expect("readable");
        assert_eq!((read.command, read.resumed_at), (vec!["first".to_string()], vec![30]));
        assert_eq!(read.peak_flops, None, "f32");
    }
}
