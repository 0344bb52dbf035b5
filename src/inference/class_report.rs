//! How well a classifier predicts labels.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Percentages over a set of examples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ClassScores {
    /// Examples with the right label.
    pub accuracy: f64,
    /// The mean F1 of the labels that occur or are predicted, each counted alike.
    pub macro_f1: f64,
}

/// Counts of a label.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LabelCounts {
    /// Examples that have it.
    pub present: usize,
    /// Examples for which it is predicted.
    pub predicted: usize,
    /// Examples for which it is predicted, and which have it.
    pub right: usize,
}

/// Scores with details.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ClassReport {
    /// The part of the data: `test`, or `validation` if there is no such part.
    pub part: &'static str,
    /// The percentages.
    pub scores: ClassScores,
    /// Number of examples.
    pub examples: usize,
    /// Per label that occurs or is predicted.
    pub labels: BTreeMap<String, LabelCounts>,
    /// `(expected, predicted, count)`, most frequent first.
    pub confusions: Vec<(String, String, usize)>,
}

impl LabelCounts {
    /// Percentage of the examples for which it is predicted that have it.
    pub fn precision(&self) -> f64 {
        percent(self.right, self.predicted)
    }

    /// Percentage of the examples that have it for which it is predicted.
    pub fn recall(&self) -> f64 {
        percent(self.right, self.present)
    }

    /// The harmonic mean of both.
    pub fn f1(&self) -> f64 {
        percent(2 * self.right, self.present + self.predicted)
    }
}

fn percent(part: usize, whole: usize) -> f64 {
    if whole == 0 { 0.0 } else { 100.0 * part as f64 / whole as f64 }
}

impl ClassReport {
    /// Compares predictions with expectations, `(expected, predicted)` for each text.
    pub fn new<'a>(part: &'static str, pairs: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let mut report = Self { part, ..Self::default() };
        let mut confusions: BTreeMap<(&str, &str), usize> = BTreeMap::new();
        let mut right = 0;
        for (expected, predicted) in pairs {
            report.examples += 1;
            report.labels.entry(expected.into()).or_default().present += 1;
            let counts = report.labels.entry(predicted.into()).or_default();
            counts.predicted += 1;
            if expected == predicted {
                counts.right += 1;
                right += 1;
            } else {
                *confusions.entry((expected, predicted)).or_default() += 1;
            }
        }
        let sum: f64 = report.labels.values().map(LabelCounts::f1).sum();
        report.scores = ClassScores {
            accuracy: percent(right, report.examples),
            macro_f1: sum / report.labels.len().max(1) as f64,
        };
        report.confusions = confusions
            .into_iter()
            .map(|((expected, predicted), count)| (expected.into(), predicted.into(), count))
            .collect();
        // The sort is stable: equal counts stay in order of name.
        report.confusions.sort_by_key(|(.., count)| std::cmp::Reverse(*count));
        report
    }

    /// The confusion matrix: labels, and a row of counts per expected label.
    pub fn confusion_matrix(&self) -> (Vec<String>, Vec<usize>) {
        let names: BTreeSet<&String> = self.labels.keys().collect();
        let at: HashMap<&String, usize> = names.iter().enumerate().map(|(at, name)| (*name, at)).collect();
        let mut counts = vec![0; names.len() * names.len()];
        for (label, own) in &self.labels {
            counts[at[label] * (names.len() + 1)] = own.right;
        }
        for (expected, predicted, times) in &self.confusions {
            counts[at[expected] * names.len() + at[predicted]] = *times;
        }
        (names.into_iter().cloned().collect(), counts)
    }

    /// Figures of each label as a JSON object.
    pub fn labels_json(&self) -> Value {
        let of = |(label, counts): (&String, &LabelCounts)| {
            let figures = json!({
                "present": counts.present, "predicted": counts.predicted, "precision": counts.precision(),
                "recall": counts.recall(), "f1": counts.f1(),
            });
            (label.clone(), figures)
        };
        Value::Object(self.labels.iter().map(of).collect())
    }
}

/// Number of confusions in a report.
const SHOWN_CONFUSIONS: usize = 8;

impl fmt::Display for ClassReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.labels.keys().map(|name| name.chars().count()).max().unwrap_or(0).max("label".len());
        writeln!(f, "{:<width$}  {:>7}  {:>9}  {:>6}  {:>6}", "label", "present", "precision", "recall", "F1")?;
        for (label, counts) in &self.labels {
            let (precision, recall, f1) = (counts.precision(), counts.recall(), counts.f1());
            writeln!(f, "{label:<width$}  {:>7}  {precision:>9.2}  {recall:>6.2}  {f1:>6.2}", counts.present)?;
        }
        if !self.confusions.is_empty() {
            writeln!(f, "\nmost frequent confusions")?;
            for (expected, predicted, count) in self.confusions.iter().take(SHOWN_CONFUSIONS) {
                writeln!(f, "{count:>4} x {expected} predicted as {predicted}")?;
            }
        }
        let ClassScores { accuracy, macro_f1 } = self.scores;
        write!(f, "\naccuracy {accuracy:.2}, macro F1 {macro_f1:.2}, of {} examples", self.examples)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_counted_and_averaged_alike() {
        let pairs = [("a", "a"), ("a", "a"), ("a", "b"), ("b", "a"), ("c", "a"), ("a", "d")];
        let report = ClassReport::new("test", pairs);
        assert_eq!(report.labels["a"], LabelCounts { present: 4, predicted: 4, right: 2 });
        assert_eq!(report.labels["d"], LabelCounts { present: 0, predicted: 1, right: 0 });
        assert!((report.scores.accuracy - 100.0 / 3.0).abs() < 1e-9);
        // As f1_score(average="macro") of scikit-learn: 0.5, 0, 0 and 0.
        assert!((report.scores.macro_f1 - 12.5).abs() < 1e-9, "{:?}", report.scores);
        let (labels, counts) = report.confusion_matrix();
        assert_eq!(labels, ["a", "b", "c", "d"]);
        assert_eq!(counts, [2, 1, 0, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        let shown = report.to_string();
        assert!(shown.contains("1 x a predicted as b") && shown.ends_with("macro F1 12.50, of 6 examples"), "{shown}");
    }
}
