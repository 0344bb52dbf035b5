//! How fast it is: training, decoding and single operations, repeated, beside the hardware's ceilings and a peer program.
//! Nothing here needs a file: weights and data are drawn at random.

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

/// What can be asked of every benchmark.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// Sizes by name; the benchmark's own where there are none.
    pub sizes: Vec<String>,
    /// Rows in place of the size's own.
    pub batch: Option<usize>,
    /// Tokens of a row in place of the size's own.
    pub length: Option<usize>,
    /// Where the last token stands that is timed in decoding.
    pub position: Option<usize>,
    /// Dtype in place of the size's own.
    pub precision: Option<Precision>,
    /// What the cache keeps keys and values as.
    pub cache: CachePrecision,
    /// How often each case is measured.
    pub repeats: usize,
    /// The device's name, for its datasheet.
    pub device: String,
    /// TFLOP/s of its matrix products, in place of the datasheet's.
    pub peak: Option<f64>,
    /// Settings of the recipes that are trained, in place of their own, `KEY=VALUE`.
    pub settings: Vec<String>,
}

impl BenchOptions {
    /// How products of f32 are computed.
    fn products(&self) -> F32Products {
        self.precision.map_or(F32Products::Exact, Precision::f32_products)
    }
}

/// A case, measured several times.
#[derive(Clone, Debug, PartialEq)]
pub struct Measurement {
    /// What was measured: `train gpt2-124m`.
    pub what: String,
    /// With what: `B=16 T=1024`.
    pub case: String,
    /// `tokens/s`, `ms`, `GB/s`, `TFLOP/s`, `GB`.
    pub unit: &'static str,
    /// Median of the repeats.
    pub value: f64,
    /// The least of them.
    pub min: f64,
    /// The most of them.
    pub max: f64,
    /// All of them, in order of size.
    pub values: Vec<f64>,
    /// Share of what the hardware allows, 0 to 1, and which of its ceilings that is, where it is known.
    pub ceiling: Option<(f64, &'static str)>,
}

/// Whether more of a unit is better.
pub fn more_is_better(unit: &str) -> bool {
    !matches!(unit, "ms" | "us" | "s" | "GB")
}

impl Measurement {
    /// Of several values.
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

    /// With the repeats of another measurement of the same case.
    pub fn joined(self, other: Self) -> Self {
        let share = self.ceiling;
        let joined = Self::new(self.what, self.case, self.unit, [self.values, other.values].concat());
        // The share follows the value; a time's falls as it grows.
        let ratio = if more_is_better(self.unit) { joined.value / self.value } else { self.value / joined.value };
        Self { ceiling: share.map(|(share, name)| (share * ratio, name)), ..joined }
    }

    /// With the share of a ceiling that it reaches.
    pub fn of(mut self, share: f64, ceiling: &'static str) -> Self {
        self.ceiling = share.is_finite().then_some((share, ceiling));
        self
    }

    /// As one line for programs.
    pub fn to_json(&self) -> Value {
        json!({
            "event": "bench", "what": self.what, "case": self.case, "value": self.value, "unit": self.unit,
            "min": self.min, "max": self.max, "repeats": self.values.len(),
            "ceiling": self.ceiling.map(|(share, name)| json!({ "share": share, "name": name })),
        })
    }

    /// As the cells of a table's row, up to those of peers.
    pub fn to_markdown(&self) -> String {
        let ceiling = self.ceiling.map_or(String::new(), |(share, name)| format!("{:.0}% of {name}", 100.0 * share));
        let [value, min, max] = [self.value, self.min, self.max].map(shown);
        format!("| {} | {} | {value} {} | {min} to {max} | {ceiling} |", self.what, self.case, self.unit)
    }

    /// As one line for people.
    pub fn to_text(&self) -> String {
        let ceiling = self.ceiling.map_or(String::new(), |(share, name)| format!("  {:.0}% of {name}", 100.0 * share));
        let Self { what, case, unit, .. } = self;
        let [value, min, max] = [self.value, self.min, self.max].map(shown);
        format!("{what:<28}  {case:<28}  {value:>11} {unit:<8}  {min} to {max}{ceiling}")
    }
}

/// Four digits, or all that stand before the point.
pub fn shown(value: f64) -> String {
    let digits = if value.abs() >= 1000.0 { 0 } else { (3 - value.abs().max(1e-3).log10().floor() as i32).clamp(0, 6) };
    format!("{value:.0$}", digits as usize)
}

/// Seconds of one call of `work`, `repeats` times: each time as many calls as take a quarter of a second, and one at
/// least, the device waited for once behind all of them.
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
    // What is compiled or taken first does not count; some calls more tell how many are needed.
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
