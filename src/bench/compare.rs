//! Comparison with an earlier run, and with a peer program in the same run.

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use super::{Measurement, more_is_better, shown};
use crate::failure::Failure;

/// A line of an earlier run, or of a peer program.
#[derive(Clone, Debug, PartialEq)]
pub struct Earlier {
    /// What was measured.
    pub what: String,
    /// The case.
    pub case: String,
    /// The unit.
    pub unit: String,
    /// Value, minimum and maximum; all the same if only one value is given.
    pub values: [f64; 3],
}

/// A measurement compared with an earlier one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Comparison {
    /// Speed relative to the earlier run.
    pub speed: f64,
    /// Whether the ranges of both runs overlap, so that the difference may be noise.
    pub noise: bool,
}

/// A measurement compared with a peer's.
#[derive(Clone, Debug, PartialEq)]
pub struct Ratio {
    /// The peer's case.
    pub peer: String,
    /// The peer's value.
    pub value: f64,
    /// Speed relative to the peer.
    pub speed: f64,
}

impl Earlier {
    fn of(line: &Value) -> Option<Self> {
        let text = |name: &str| line[name].as_str().map(String::from);
        let value = line["value"].as_f64()?;
        let other = |name: &str| line[name].as_f64().unwrap_or(value);
        let unit = text("unit")?;
        let unit = if unit == "tok/s" { "tokens/s".into() } else { unit };
        Some(Self {
            what: text("what")?,
            case: text("case").unwrap_or_default(),
            unit,
            values: [value, other("min"), other("max")],
        })
    }
}

/// The measurements among JSON lines.
fn lines(text: &str) -> Vec<Earlier> {
    text.lines().filter_map(|line| Earlier::of(&serde_json::from_str(line).ok()?)).collect()
}

/// The measurements in a file of JSON lines, as `--json` prints them.
///
/// # Errors
/// If it cannot be read, or holds none.
pub fn read_lines(path: &Path) -> Result<Vec<Earlier>, Failure> {
    let text = std::fs::read_to_string(path).map_err(Failure::io(path))?;
    let found = lines(&text);
    match found.is_empty() {
        true => Err(Failure::new(format!("{}: no output of `fireclay bench --json`", path.display()))),
        false => Ok(found),
    }
}

/// Compares with the measurement of the same name in an earlier run, if any.
pub fn compare(now: &Measurement, earlier: &[Earlier]) -> Option<Comparison> {
    let then =
        earlier.iter().find(|then| (&*then.what, &*then.case, &*then.unit) == (&*now.what, &*now.case, now.unit))?;
    let [value, min, max] = then.values;
    let speed = speed(now.value, value, now.unit)?;
    Some(Comparison { speed, noise: now.min <= max && min <= now.max })
}

/// Speed of `ours` relative to `theirs`.
fn speed(ours: f64, theirs: f64, unit: &str) -> Option<f64> {
    let ratio = if more_is_better(unit) { ours / theirs } else { theirs / ours };
    ratio.is_finite().then_some(ratio)
}

impl Comparison {
    /// As text.
    pub fn to_text(self) -> String {
        match self {
            Self { speed, noise: true } => format!("{speed:.3} of the earlier run, within noise"),
            Self { speed, .. } if speed >= 1.0 => format!("{speed:.3} of the earlier run: faster"),
            Self { speed, .. } => format!("{speed:.3} of the earlier run: SLOWER"),
        }
    }
}

/// Runs a peer program in a shell and parses the JSON lines with "what", "case", "value" and "unit"
/// that it prints.
///
/// # Errors
/// If it cannot be run, fails, or prints none.
pub fn run_peer(command: &str) -> Result<Vec<Earlier>, Failure> {
    let (shell, flag) = if cfg!(windows) { ("cmd", "/C") } else { ("sh", "-c") };
    let failed = |reason: String| Failure::new(format!("--peer {command}: {reason}"));
    let output = Command::new(shell).args([flag, command]).stderr(std::process::Stdio::inherit()).output();
    let output = output.map_err(|error| failed(error.to_string()))?;
    let found = lines(&String::from_utf8_lossy(&output.stdout));
    match (output.status.success(), found.is_empty()) {
        (true, false) => Ok(found),
        (true, true) => Err(failed("it printed no JSON line with \"what\", \"case\", \"value\" and \"unit\"".into())),
        (false, _) => Err(failed(format!("it failed, {}", output.status))),
    }
}

/// The peer's measurements of the same thing, with ratios: the same `what` and unit, and every word
/// of our case in theirs. Of several peer runs, the median counts.
pub fn peer_ratios(ours: &Measurement, peer: &[Earlier]) -> Vec<Ratio> {
    let words =
        |case: &str| case.split([' ', ',']).filter(|word| !word.is_empty()).map(str::to_lowercase).collect::<Vec<_>>();
    let wanted = words(&ours.case);
    let same = |theirs: &&Earlier| {
        let has = words(&theirs.case);
        theirs.what == ours.what && theirs.unit == ours.unit && wanted.iter().all(|word| has.contains(word))
    };
    let mut by_case: HashMap<&str, Vec<f64>> = HashMap::new();
    let mut order = Vec::new();
    for theirs in peer.iter().filter(same) {
        let values = by_case.entry(&theirs.case).or_default();
        if values.is_empty() {
            order.push(&*theirs.case);
        }
        values.push(theirs.values[0]);
    }
    let ratio = |case: &&str| {
        let value = Measurement::new("", *case, ours.unit, by_case[case].clone()).value;
        Some(Ratio { peer: case.to_string(), value, speed: speed(ours.value, value, ours.unit)? })
    };
    order.iter().filter_map(ratio).collect()
}

impl Ratio {
    /// As text.
    pub fn to_text(&self) -> String {
        format!("{:.2} of {}, which has {}", self.speed, self.peer, shown(self.value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(values: &[f64], unit: &'static str) -> Measurement {
        Measurement::new("train x", "B=16 T=8", unit, values.to_vec())
    }

    #[test]
    fn a_change_within_the_repeats_is_noise() {
        let then = lines(
            "no line\n{\"event\":\"bench\",\"what\":\"train x\",\"case\":\"B=16 T=8\",\"value\":100.0,\
             \"unit\":\"tokens/s\",\"min\":95.0,\"max\":105.0}",
        );
        assert_eq!(compare(&measured(&[104.0, 108.0, 112.0], "tokens/s"), &then).map(|now| now.noise), Some(true));
        let slower = compare(&measured(&[50.0], "tokens/s"), &then).expect("the same case");
        assert!(slower == Comparison { speed: 0.5, noise: false } && slower.to_text().contains("SLOWER"));
        assert_eq!(compare(&measured(&[50.0], "ms"), &then), None, "another unit is another thing");
    }

    #[test]
    fn a_peer_is_matched_by_what_and_by_the_words_of_the_case() {
        let peer = lines(
            r#"{"what":"train x","case":"torch compile B=16 T=8","value":200,"unit":"tok/s"}
            {"what":"train x","case":"torch compile B=64 T=8","value":1,"unit":"tok/s"}
            {"what":"train x","case":"torch compile B=16 T=8","value":300,"unit":"tok/s"}"#,
        );
        let ratios = peer_ratios(&measured(&[500.0], "tokens/s"), &peer);
        assert_eq!(ratios, [Ratio { peer: "torch compile B=16 T=8".into(), value: 250.0, speed: 2.0 }]);
        assert!(speed(10.0, 20.0, "ms") == Some(2.0), "half the time is twice the speed");
    }

    #[test]
    fn a_peer_that_fails_or_says_nothing_is_told() {
        assert!(run_peer("exit 3").expect_err("it fails").to_string().contains("it failed"));
        assert!(run_peer("echo hello").expect_err("no line").to_string().contains("no JSON line"));
    }
}
