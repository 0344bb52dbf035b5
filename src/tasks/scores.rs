//! Metrics of utterance prediction (Tjong Kim Sang and Buchholz, 2000, "conlleval").

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;

use fireclay_datasets::{Span, Utterance, spans};
use serde::{Deserialize, Serialize};

/// Percentages over a set of utterances.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Scores {
    /// Intent accuracy.
    pub intent_accuracy: f64,
    /// F1 over the spans of all slots; a span counts if slot and both borders are right.
    pub slot_f1: f64,
    /// Utterances with the right intent and all tags right.
    pub sentence_accuracy: f64,
}

/// The prediction for an utterance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prediction {
    /// The intent.
    pub intent: String,
    /// A tag per word.
    pub tags: Vec<String>,
}

/// Span counts of a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpanCounts {
    /// Expected spans.
    pub present: usize,
    /// Predicted spans.
    pub found: usize,
    /// Correctly predicted spans.
    pub right: usize,
}

/// Scores with details.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ClassificationReport {
    /// The percentages.
    pub scores: Scores,
    /// Per slot.
    pub slots: BTreeMap<String, SpanCounts>,
    /// Per intent: how often it is expected, and how often then predicted.
    pub intents: BTreeMap<String, (usize, usize)>,
    /// `(expected, predicted, count)`, most frequent first.
    pub confusions: Vec<(String, String, usize)>,
}

impl SpanCounts {
    /// Percentage of predicted spans that are right.
    pub fn precision(&self) -> f64 {
        percent(self.right, self.found)
    }

    /// Percentage of expected spans that are found.
    pub fn recall(&self) -> f64 {
        percent(self.right, self.present)
    }

    /// The harmonic mean of both.
    pub fn f1(&self) -> f64 {
        percent(2 * self.right, self.present + self.found)
    }
}

fn percent(part: usize, whole: usize) -> f64 {
    if whole == 0 { 0.0 } else { 100.0 * part as f64 / whole as f64 }
}

impl ClassificationReport {
    /// Compares predictions with expectations.
    pub fn new(expected: &[Utterance], predicted: &[Prediction]) -> Self {
        let mut report = Self::default();
        let (mut intents, mut sentences, mut all) = (0, 0, SpanCounts::default());
        let mut confusions: BTreeMap<(&str, &str), usize> = BTreeMap::new();
        for (expected, predicted) in expected.iter().zip(predicted) {
            let same_intent = expected.intent == predicted.intent;
            intents += usize::from(same_intent);
            sentences += usize::from(same_intent && expected.tags == predicted.tags);
            let (count, right) = report.intents.entry(expected.intent.clone()).or_default();
            *count += 1;
            *right += usize::from(same_intent);
            if !same_intent {
                *confusions.entry((&expected.intent, &predicted.intent)).or_default() += 1;
            }
            let there: HashSet<Span> = spans(&expected.tags).into_iter().collect();
            for span in &there {
                report.slots.entry(span.slot.clone()).or_default().present += 1;
                all.present += 1;
            }
            for span in spans(&predicted.tags) {
                let right = usize::from(there.contains(&span));
                let counts = report.slots.entry(span.slot).or_default();
                counts.found += 1;
                counts.right += right;
                all.found += 1;
                all.right += right;
            }
        }
        report.scores = Scores {
            intent_accuracy: percent(intents, expected.len()),
            slot_f1: all.f1(),
            sentence_accuracy: percent(sentences, expected.len()),
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
        let mistaken = self.confusions.iter().flat_map(|(expected, predicted, _)| [expected, predicted]);
        let names: BTreeSet<&String> = self.intents.keys().chain(mistaken).collect();
        let at: HashMap<&String, usize> = names.iter().enumerate().map(|(at, name)| (*name, at)).collect();
        let mut counts = vec![0; names.len() * names.len()];
        let mut count = |expected: &String, predicted: &String, times: usize| {
            counts[at[expected] * names.len() + at[predicted]] += times;
        };
        for (intent, (_, right)) in &self.intents {
            count(intent, intent, *right);
        }
        for (expected, predicted, times) in &self.confusions {
            count(expected, predicted, *times);
        }
        (names.into_iter().cloned().collect(), counts)
    }
}

/// Number of confusions in a report.
const SHOWN_CONFUSIONS: usize = 8;

impl fmt::Display for ClassificationReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.slots.keys().chain(self.intents.keys()).map(|name| name.chars().count()).max().unwrap_or(0);
        let width = width.max("intent".len());
        writeln!(f, "{:<width$}  {:>7}  {:>9}  {:>6}  {:>6}", "slot", "present", "precision", "recall", "F1")?;
        for (slot, counts) in &self.slots {
            let (precision, recall, f1) = (counts.precision(), counts.recall(), counts.f1());
            writeln!(f, "{slot:<width$}  {:>7}  {precision:>9.2}  {recall:>6.2}  {f1:>6.2}", counts.present)?;
        }
        writeln!(f, "\n{:<width$}  {:>7}  {:>9}", "intent", "present", "predicted")?;
        for (intent, (count, right)) in &self.intents {
            writeln!(f, "{intent:<width$}  {count:>7}  {:>9.2}", percent(*right, *count))?;
        }
        if !self.confusions.is_empty() {
            writeln!(f, "\nmost frequent intent confusions")?;
            for (expected, predicted, count) in self.confusions.iter().take(SHOWN_CONFUSIONS) {
                writeln!(f, "{count:>4} x {expected} predicted as {predicted}")?;
            }
        }
        let Scores { intent_accuracy, slot_f1, sentence_accuracy } = self.scores;
        write!(
            f,
            "\nintent accuracy {intent_accuracy:.2}, slot F1 {slot_f1:.2}, sentence accuracy {sentence_accuracy:.2}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn utterance(intent: &str, tags: &str) -> Utterance {
        let tags: Vec<String> = tags.split(' ').map(String::from).collect();
        Utterance { words: tags.clone(), tags, intent: intent.into() }
    }

    fn predicted(intent: &str, tags: &str) -> Prediction {
        Prediction { intent: intent.into(), tags: tags.split(' ').map(String::from).collect() }
    }

    #[test]
    fn a_span_counts_only_whole_and_with_its_slot() {
        let expected = [utterance("a", "O B-x I-x O"), utterance("a", "B-y O O O"), utterance("b", "O O O B-x")];
        let report = ClassificationReport::new(
            &expected,
            &[predicted("a", "O B-x O O"), predicted("a", "B-x O O O"), predicted("b", "O O O B-x")],
        );
        assert_eq!(report.slots["x"], SpanCounts { present: 2, found: 3, right: 1 });
        assert_eq!(report.slots["y"], SpanCounts { present: 1, found: 0, right: 0 });
        assert!((report.scores.slot_f1 - 100.0 * 2.0 / 6.0).abs() < 1e-9);
        assert_eq!(report.scores.intent_accuracy, 100.0);
        assert!((report.scores.sentence_accuracy - 100.0 / 3.0).abs() < 1e-9);
    }

    #[test]
    fn confusions_are_listed_by_how_often_they_happen() {
        let expected = [utterance("a", "O"), utterance("b", "O"), utterance("b", "O"), utterance("c", "O")];
        let report = ClassificationReport::new(
            &expected,
            &[predicted("c", "O"), predicted("a", "O"), predicted("a", "O"), predicted("c", "O")],
        );
        assert_eq!(report.confusions, [("b".into(), "a".into(), 2), ("a".into(), "c".into(), 1)]);
        assert_eq!(report.scores.sentence_accuracy, 25.0);
        let (labels, counts) = report.confusion_matrix();
        assert_eq!(labels, ["a", "b", "c"]);
        assert_eq!(counts, [0, 0, 1, 2, 0, 0, 0, 0, 1], "a row for each that was expected");
        let shown = report.to_string();
        assert!(shown.contains("2 x b predicted as a"), "{shown}");
    }
}
