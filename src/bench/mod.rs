//! Benchmarks: training, decoding and single operations, repeated and compared with the hardware's
//! limits and a peer program. They need no files: weights and data are random.

mod compare;
mod decode;
mod kernels;
mod requests;
mod sizes;
mod train;

use std::time::Instant;

use fireclay_kernels::{Backend, F32Products};
use serde_json::{Value, json};

pub use compare::{Comparison, Earlier, Ratio, compare, peer_ratios, read_lines, run_peer};
pub use decode::DecodeBench;
pub use kernels::KernelBench;
pub use requests::RequestsBench;
pub use sizes::{DECODERS, TRAINERS};
pub use train::TrainBench;

use crate::failure::Failure;
use crate::precision::{CachePrecision, Precision};

/// Options of every benchmark.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// Sizes by name; empty for the benchmark's defaults.
    pub sizes: Vec<String>,
    /// Batch size, instead of the size's own.
    pub batch: Option<usize>,
    /// Sequence length, instead of the size's own.
    pub length: Option<usize>,
    /// Position of the last timed token when decoding.
    pub position: Option<usize>,
    /// Dtype, instead of the size's own.
    pub precision: Option<Precision>,
    /// Data type of the KV cache.
    pub cache: CachePrecision,
    /// Number of measurements per case.
    pub repeats: usize,
    /// The device's name, to look up its datasheet.
    pub device: String,
    /// TFLOP/s of its matrix products, instead of the datasheet's.
    pub peak: Option<f64>,
    /// Recipe settings of trained models, `KEY=VALUE`.
    pub settings: Vec<String>,
}

impl BenchOptions {
    /// How products of f32 are computed.
    fn products(&self) -> F32Products {
        self.precision.map_or(F32Products::Exact, Precision::f32_products)
    }
}

/// The measurements of a case.
#[derive(Clone, Debug, PartialEq)]
pub struct Measurement {
    /// What was measured: `train gpt2-124m`.
    pub what: String,
    /// The case: `B=16 T=1024`.
    pub case: String,
    /// `tokens/s`, `ms`, `GB/s`, `TFLOP/s`, `GB`.
    pub unit: &'static str,
    /// Median of the repeats.
    pub value: f64,
    /// The minimum.
    pub min: f64,
    /// The maximum.
    pub max: f64,
    /// All values, sorted.
    pub values: Vec<f64>,
    /// Share of the hardware's limit, 0 to 1, and the name of that limit, where known.
    pub ceiling: Option<(f64, &'static str)>,
}

/// Whether higher is better for a unit.
pub fn more_is_better(unit: &str) -> bool {
    !matches!(unit, "ms" | "us" | "s" | "GB")
}

impl Measurement {
    /// From several values.
    pub fn new(what: impl Into<String>, case: impl Into<String>, unit: &'static str, mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let middle = values.len() / 2;
        let value = match values.len() {
            0 => f64::NAN,
            count if count % 2 == 1 => values[middle],
            _ => (values[middle - 1] + values[middle]) / 2.0,
        };
        let (min, max) = (values.first().copied().unwrap_or(value), values.last().copied().unwrap_or(value));
        Self { what: what.into(), case: case.into(), unit, value, min, max, values, ceiling: None }
    }

    /// Adds the repeats of another measurement of the same case.
    pub fn joined(self, other: Self) -> Self {
        let share = self.ceiling;
        let joined = Self::new(self.what, self.case, self.unit, [self.values, other.values].concat());
        // The share is proportional to the value, inversely for a time.
        let ratio = if more_is_better(self.unit) { joined.value / self.value } else { self.value / joined.value };
        Self { ceiling: share.map(|(share, name)| (share * ratio, name)), ..joined }
    }

    /// Sets the share of a limit that it reaches.
    pub fn of(mut self, share: f64, ceiling: &'static str) -> Self {
        self.ceiling = share.is_finite().then_some((share, ceiling));
        self
    }

    /// As a JSON line.
    pub fn to_json(&self) -> Value {
        json!({
            "event": "bench", "what": self.what, "case": self.case, "value": self.value, "unit": self.unit,
            "min": self.min, "max": self.max, "repeats": self.values.len(),
            "ceiling": self.ceiling.map(|(share, name)| json!({ "share": share, "name": name })),
        })
    }

    /// As cells of a Markdown table, before those of peers.
    pub fn to_markdown(&self) -> String {
        let ceiling = self.ceiling.map_or(String::new(), |(share, name)| format!("{:.0}% of {name}", 100.0 * share));
        let [value, min, max] = [self.value, self.min, self.max].map(shown);
        format!("| {} | {} | {value} {} | {min} to {max} | {ceiling} |", self.what, self.case, self.unit)
    }

    /// As a line of text.
    pub fn to_text(&self) -> String {
        let ceiling = self.ceiling.map_or(String::new(), |(share, name)| format!("  {:.0}% of {name}", 100.0 * share));
        let Self { what, case, unit, .. } = self;
        let [value, min, max] = [self.value, self.min, self.max].map(shown);
        format!("{what:<28}  {case:<28}  {value:>11} {unit:<8}  {min} to {max}{ceiling}")
    }
}

/// With four significant digits, or all digits before the point.
pub fn shown(value: f64) -> String {
    let digits = if value.abs() >= 1000.0 { 0 } else { (3 - value.abs().max(1e-3).log10().floor() as i32).clamp(0, 6) };
    format!("{value:.0$}", digits as usize)
}

/// Seconds per call of `work`, measured `repeats` times. Each time makes as many calls as take a
/// quarter of a second, at least one, and waits for the device once after them.
pub(crate) fn seconds<B: Backend, T>(
    device: &B::Device,
    repeats: usize,
    mut work: impl FnMut() -> Result<T, Failure>,
) -> Result<Vec<f64>, Failure> {
    const SECONDS: f64 = 0.25;
    let sync = || B::sync(device).map_err(|error| Failure::new(format!("the device failed: {error:?}")));
    let mut run = |calls: usize| {
        let begun = Instant::now();
        for _ in 0..calls {
            drop(work()?);
        }
        sync()?;
        Ok::<f64, Failure>(begun.elapsed().as_secs_f64() / calls as f64)
    };
    // The first call compiles and allocates; a few more estimate the number of calls.
    run(1)?;
    let once = run(3)?;
    let calls = ((SECONDS / once.max(1e-7)).ceil() as usize).clamp(1, 100_000);
    (0..repeats).map(|_| run(calls)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_measurement_is_its_median_with_both_ends() {
        let odd = Measurement::new("a", "b", "ms", vec![3.0, 1.0, 2.0]);
        assert_eq!((odd.value, odd.min, odd.max, odd.values.len()), (2.0, 1.0, 3.0, 3));
        assert_eq!(Measurement::new("a", "b", "ms", vec![4.0, 1.0]).value, 2.5);
        assert!(
            odd.clone().of(0.5, "a copy").to_text().ends_with("1.000 to 3.000  50% of a copy"),
            "{}",
            odd.to_text()
        );
    }

    #[test]
    fn numbers_have_four_digits() {
        assert_eq!([247_600.4, 12.3456, 0.98765, 0.0].map(shown), ["247600", "12.35", "0.9877", "0.000000"]);
    }
}
