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

/// The values that fill each slot in the training split, in lower case.
#[derive(Clone, Debug, Default)]
pub struct TrainedValues(HashMap<String, HashSet<String>>);

impl TrainedValues {
    /// The values of some utterances.
    pub fn of(train: &[Utterance]) -> Self {
        let mut values = HashMap::<String, HashSet<String>>::new();
        for utterance in train {
            for span in spans(&utterance.tags) {
                values.entry(span.slot.clone()).or_default().insert(value(&utterance.words, &span));
            }
        }
        Self(values)
    }

    /// Whether this slot has this value in training.
    fn contain(&self, words: &[String], span: &Span) -> bool {
        self.0.get(&span.slot).is_some_and(|values| values.contains(&value(words, span)))
    }
}

/// The words of a span as they are compared.
fn value(words: &[String], span: &Span) -> String {
    words[span.words.clone()].join(" ").to_lowercase()
}

/// Scores with details.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ClassificationReport {
    /// The percentages.
    pub scores: Scores,
    /// Per slot.
    pub slots: BTreeMap<String, SpanCounts>,
    /// Per slot, the spans whose value fills it in training, too. A predicted span counts by its
    /// own value, so that every span is either seen or unseen.
    pub seen: BTreeMap<String, SpanCounts>,
    /// Per intent: how often it is expected, and how often then predicted.
    pub intents: BTreeMap<String, (usize, usize)>,
    /// `(expected, predicted, count)`, most frequent first.
    pub confusions: Vec<(String, String, usize)>,
}

impl std::ops::AddAssign for SpanCounts {
    fn add_assign(&mut self, other: Self) {
        self.present += other.present;
        self.found += other.found;
        self.right += other.right;
    }
}

impl std::ops::Sub for SpanCounts {
    type Output = Self;

    fn sub(self, part: Self) -> Self {
        Self { present: self.present - part.present, found: self.found - part.found, right: self.right - part.right }
    }
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

    /// Percentage of expected spans that these are, of these and `others` together.
    pub(crate) fn share_of(&self, others: Self) -> f64 {
        percent(self.present, self.present + others.present)
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
    /// Compares predictions with expectations. What fills a slot in training is in `trained`.
    pub fn new(expected: &[Utterance], predicted: &[Prediction], trained: &TrainedValues) -> Self {
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
            let mut count = |span: Span, counts: SpanCounts| {
                all += counts;
                if trained.contain(&expected.words, &span) {
                    *report.seen.entry(span.slot.clone()).or_default() += counts;
                }
                *report.slots.entry(span.slot).or_default() += counts;
            };
            for span in spans(&predicted.tags) {
                let right = usize::from(there.contains(&span));
                count(span, SpanCounts { present: 0, found: 1, right });
            }
            for span in there {
                count(span, SpanCounts { present: 1, found: 0, right: 0 });
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

    /// Spans with values that fill their slot in training, and spans with other values.
    pub fn seen_and_unseen(&self) -> (SpanCounts, SpanCounts) {
        let sum = |of: &BTreeMap<String, SpanCounts>| {
            of.values().fold(SpanCounts::default(), |mut sum, counts| {
                sum += *counts;
                sum
            })
        };
        let seen = sum(&self.seen);
        (seen, sum(&self.slots) - seen)
    }

    /// Of a slot, spans with values that fill it in training, and spans with other values.
    pub fn seen_and_unseen_of(&self, slot: &str) -> (SpanCounts, SpanCounts) {
        let of = |counts: &BTreeMap<String, SpanCounts>| counts.get(slot).copied().unwrap_or_default();
        let seen = of(&self.seen);
        (seen, of(&self.slots) - seen)
    }

    /// Whether a slot is open: training lacks at least a quarter of its values.
    pub fn is_open(&self, slot: &str) -> bool {
        let (seen, unseen) = self.seen_and_unseen_of(slot);
        unseen.present > 0 && unseen.share_of(seen) >= OPEN_FROM
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

/// The percentage of values unseen in training from which a slot is called open.
const OPEN_FROM: f64 = 25.0;

/// Number of confusions in a report.
const SHOWN_CONFUSIONS: usize = 8;

impl fmt::Display for ClassificationReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.slots.keys().chain(self.intents.keys()).map(|name| name.chars().count()).max().unwrap_or(0);
        let width = width.max("intent".len());
        writeln!(
            f,
            "{:<width$}  {:>7}  {:>9}  {:>6}  {:>6}  {:>8}  {:>7}  {:>9}",
            "slot", "present", "precision", "recall", "F1", "unseen %", "F1 seen", "F1 unseen"
        )?;
        // A slot none of whose values is of a kind has no F1 of it.
        let f1 = |counts: SpanCounts| match counts.present {
            0 => "-".to_owned(),
            _ => format!("{:.2}", counts.f1()),
        };
        let mut line = |name: &str, (seen, unseen): (SpanCounts, SpanCounts), mark: &str| {
            let mut all = seen;
            all += unseen;
            writeln!(
                f,
                "{name:<width$}  {:>7}  {:>9.2}  {:>6.2}  {:>6.2}  {:>8.1}  {:>7}  {:>9}{mark}",
                all.present,
                all.precision(),
                all.recall(),
                all.f1(),
                unseen.share_of(seen),
                f1(seen),
                f1(unseen),
            )
        };
        for slot in self.slots.keys() {
            line(slot, self.seen_and_unseen_of(slot), if self.is_open(slot) { "  open" } else { "" })?;
        }
        line("all", self.seen_and_unseen(), "")?;
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
            &TrainedValues::default(),
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
            &TrainedValues::default(),
        );
        assert_eq!(report.confusions, [("b".into(), "a".into(), 2), ("a".into(), "c".into(), 1)]);
        assert_eq!(report.scores.sentence_accuracy, 25.0);
        let (labels, counts) = report.confusion_matrix();
        assert_eq!(labels, ["a", "b", "c"]);
        assert_eq!(counts, [0, 0, 1, 2, 0, 0, 0, 0, 1], "a row for each that was expected");
        let shown = report.to_string();
        assert!(shown.contains("2 x b predicted as a"), "{shown}");
    }

    #[test]
    fn spans_are_seen_or_unseen_by_their_own_values() {
        let said = |words: &str, tags: &str| Utterance {
            words: words.split(' ').map(String::from).collect(),
            ..utterance("a", tags)
        };
        let trained = TrainedValues::of(&[said("Play Red Rain", "O B-x I-x"), said("in rome", "O B-y")]);
        // Seen and right; unseen, of which a seen part is found; a seen value in another slot.
        let expected = [
            said("play red rain", "O B-x I-x"),
            said("play red rain again", "O B-x I-x I-x"),
            said("play rome", "O B-x"),
        ];
        let predictions = [predicted("a", "O B-x I-x"), predicted("a", "O B-x I-x O"), predicted("a", "O B-x")];
        let report = ClassificationReport::new(&expected, &predictions, &trained);
        let (seen, unseen) = report.seen_and_unseen();
        assert_eq!(seen, SpanCounts { present: 1, found: 2, right: 1 });
        assert_eq!(unseen, SpanCounts { present: 2, found: 1, right: 1 });
        assert_eq!((report.seen["x"], report.slots["x"]), (seen, SpanCounts { present: 3, found: 3, right: 2 }));
        let shown = report.to_string();
        let line = shown.lines().nth(1).expect("a line for x");
        assert_eq!(
            line.split_whitespace().collect::<Vec<_>>(),
            ["x", "3", "66.67", "66.67", "66.67", "66.7", "66.67", "66.67", "open"]
        );
        assert!(report.is_open("x") && !report.is_open("y"));
        let closed = ClassificationReport::new(&expected[..1], &predictions[..1], &trained).to_string();
        assert!(closed.lines().nth(1).expect("a line").trim_end().ends_with("0.0   100.00          -"), "{closed}");
    }
}
