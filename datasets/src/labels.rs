//! Labels of utterances: intents, and slots as IOB2 tags.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::spans::slot_of;
use crate::utterance::Utterance;

/// The intents and slots of a training set, sorted; ids are indices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Labels {
    /// Names of the intents.
    pub intents: Vec<String>,
    /// Names of the slots, without `B-` and `I-`.
    pub slots: Vec<String>,
    /// Punctuation that occurs as a word of its own; other punctuation is noise.
    #[serde(default)]
    pub marks: Vec<String>,
    /// The words that have a type, in lower case and sorted; none if words have no types.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub words: Vec<String>,
    /// What training has each intent with; empty if intent and tags are decoded apart.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub intent_slots: BTreeMap<String, IntentSlots>,
}

/// The utterances of an intent in training.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IntentSlots {
    /// How many there are.
    pub utterances: usize,
    /// How many of them have each slot.
    pub slots: BTreeMap<String, usize>,
}

impl Labels {
    /// The labels of some utterances.
    pub fn of(train: &[Utterance]) -> Self {
        let intents: BTreeSet<&str> = train.iter().map(|utterance| utterance.intent.as_str()).collect();
        let tags = train.iter().flat_map(|utterance| &utterance.tags);
        let slots: BTreeSet<&str> = tags.filter_map(|tag| slot_of(tag)).map(|(slot, _)| slot).collect();
        let owned = |names: BTreeSet<&str>| names.into_iter().map(str::to_owned).collect();
        let words = train.iter().flat_map(|utterance| &utterance.words);
        let marks: BTreeSet<&str> = words.map(String::as_str).filter(|word| is_mark(word)).collect();
        Self {
            intents: owned(intents),
            slots: owned(slots),
            marks: owned(marks),
            words: Vec::new(),
            intent_slots: BTreeMap::new(),
        }
    }

    /// With the slots that each intent of `train` has, for decoding intent and tags together.
    pub fn with_intent_slots(mut self, train: &[Utterance]) -> Self {
        self.intent_slots.clear();
        for Utterance { intent, tags, .. } in train {
            let of_intent = self.intent_slots.entry(intent.clone()).or_default();
            of_intent.utterances += 1;
            let slots: BTreeSet<&str> = tags.iter().filter_map(|tag| slot_of(tag)).map(|(slot, _)| slot).collect();
            slots.into_iter().for_each(|slot| *of_intent.slots.entry(slot.to_owned()).or_default() += 1);
        }
        self
    }

    /// What a slot costs with an intent, in nats: `-ln(1 + n)` if `n` utterances of training would
    /// have both, were intents and slots independent, and none has. It is 0 if one has both, and if
    /// fewer than five would: then nothing follows from their absence (Cochran, 1954).
    pub fn novelty(&self, intent: &str, slot: &str) -> f64 {
        let count = |of_intent: &IntentSlots| of_intent.slots.get(slot).copied().unwrap_or(0);
        let of_intent = self.intent_slots.get(intent);
        if of_intent.is_some_and(|of_intent| count(of_intent) > 0) {
            return 0.0;
        }
        let all: f64 = self.intent_slots.values().map(|of_intent| of_intent.utterances as f64).sum();
        let with_slot: f64 = self.intent_slots.values().map(|of_intent| count(of_intent) as f64).sum();
        let with_intent = of_intent.map_or(0.0, |of_intent| of_intent.utterances as f64);
        let expected = with_intent * with_slot / all.max(1.0);
        if expected < LEAST_EXPECTED { 0.0 } else { -expected.ln_1p() }
    }

    /// With a type for each word that occurs more than once in `train`. Words that occur once are
    /// as unknown as those that do not occur, so that the model learns what to do with unknown
    /// words.
    pub fn with_word_types(mut self, train: &[Utterance]) -> Self {
        let mut counts = BTreeMap::<String, usize>::new();
        for word in train.iter().flat_map(|utterance| &utterance.words) {
            *counts.entry(word.to_lowercase()).or_default() += 1;
        }
        self.words = counts.into_iter().filter(|(_, count)| *count > 1).map(|(word, _)| word).collect();
        self
    }

    /// With the types of words of other labels.
    pub fn with_types_of(self, other: Self) -> Self {
        Self { words: other.words, ..self }
    }

    /// Number of types of pieces; 0 if words have no types.
    pub fn type_count(&self) -> usize {
        if self.words.is_empty() { 0 } else { FIRST_KNOWN_TYPE + self.words.len() }
    }

    /// The type of a word's first piece: 1 for unknown words, and from 2 on one for each known
    /// word. Other pieces have type 0.
    pub fn word_type(&self, word: &str) -> usize {
        match self.words.binary_search(&word.to_lowercase()) {
            _ if self.words.is_empty() => 0,
            Ok(place) => FIRST_KNOWN_TYPE + place,
            Err(_) => UNKNOWN_TYPE,
        }
    }

    /// Whether intents and slots are equal, so that one model serves both.
    pub fn same_names(&self, other: &Self) -> bool {
        (&self.intents, &self.slots) == (&other.intents, &other.slots)
    }

    /// Whether a word of running text is noise to a model with these labels.
    pub fn is_noise(&self, word: &str) -> bool {
        is_mark(word) && self.marks.iter().all(|mark| mark != word)
    }

    /// Number of tags: `O`, and two for each slot.
    pub fn tag_count(&self) -> usize {
        1 + 2 * self.slots.len()
    }

    /// The tag of an id: 0 is `O`, `1 + 2k` begins the `k`-th slot and `2 + 2k` continues it. An id
    /// from [`Self::tag_count`] on is `O` too.
    pub fn tag(&self, id: usize) -> String {
        let slot = id.checked_sub(1).and_then(|id| self.slots.get(id / 2));
        slot.map_or_else(|| "O".to_owned(), |slot| format!("{}-{slot}", if id % 2 == 1 { 'B' } else { 'I' }))
    }

    /// The id of a tag, if its slot is known.
    pub fn tag_id(&self, tag: &str) -> Option<usize> {
        if tag == "O" {
            return Some(0);
        }
        let (slot, begins) = slot_of(tag)?;
        let place = self.slots.iter().position(|known| known == slot)?;
        Some(2 * place + if begins { 1 } else { 2 })
    }

    /// The id of an intent, if it is known.
    pub fn intent_id(&self, intent: &str) -> Option<usize> {
        self.intents.iter().position(|known| known == intent)
    }
}

/// The type of unknown words.
pub(crate) const UNKNOWN_TYPE: usize = 1;

/// The type of the first known word.
const FIRST_KNOWN_TYPE: usize = 2;

/// With fewer utterances expected of an intent and a slot, it says nothing that there is none.
const LEAST_EXPECTED: f64 = 5.0;

/// Whether a word has neither letters nor digits.
fn is_mark(word: &str) -> bool {
    !word.chars().any(char::is_alphanumeric)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ops::Range;

    use crate::spans::spans;

    fn labels() -> Labels {
        let utterance = |tags: &[&str], intent: &str| Utterance {
            words: tags.iter().map(|_| "word".to_owned()).collect(),
            tags: tags.iter().map(|tag| (*tag).to_owned()).collect(),
            intent: intent.to_owned(),
        };
        Labels::of(&[utterance(&["O", "B-room", "I-room"], "wave"), utterance(&["I-city", "O"], "ask")])
    }

    #[test]
    fn labels_are_sorted_and_distinct() {
        assert_eq!(labels().intents, ["ask", "wave"]);
        assert_eq!(labels().slots, ["city", "room"]);
    }

    #[test]
    fn words_have_types_and_those_that_occur_once_are_unknown() {
        let said = |words: &str| Utterance {
            words: words.split(' ').map(str::to_owned).collect(),
            tags: Vec::new(),
            intent: "ask".into(),
        };
        let train = [said("Play Rome and play"), said("rome is far")];
        let types = |labels: &Labels| ["play", "PLAY", "rome", "far", "new"].map(|word| labels.word_type(word));
        let (plain, typed) = (Labels::of(&train), Labels::of(&train).with_word_types(&train));
        assert_eq!((plain.type_count(), types(&plain)), (0, [0; 5]));
        assert_eq!((typed.type_count(), types(&typed)), (4, [2, 2, 3, 1, 1]));
        // Labels of older models have no types.
        let text = serde_json::to_string(&plain).expect("JSON");
        assert!(!text.contains("words"), "{text}");
        assert_eq!(types(&plain.with_types_of(typed.clone())), types(&typed));
    }

    #[test]
    fn a_slot_costs_the_more_with_an_intent_the_more_often_both_would_meet_by_chance() {
        let said = |intent: &str, tags: &str| Utterance {
            words: Vec::new(),
            tags: tags.split(' ').map(str::to_owned).collect(),
            intent: intent.into(),
        };
        let times = |count: usize, utterance: Utterance| std::iter::repeat_n(utterance, count);
        let train: Vec<Utterance> = times(10, said("ask", "B-city I-city B-city"))
            .chain(times(20, said("ask", "O")))
            .chain(times(30, said("wave", "B-room")))
            .chain(times(1, said("jump", "B-rope")))
            .collect();
        let (apart, joint) = (Labels::of(&train), Labels::of(&train).with_intent_slots(&train));
        let slots = |labels: &Labels, intent: &str| ["city", "room", "rope"].map(|slot| labels.novelty(intent, slot));
        // Of 61 utterances, 14.8 would ask and have a room, and 4.9 would wave and have a city.
        let room = -(30.0 * 30.0 / 61.0f64).ln_1p();
        for (intent, wanted) in [("ask", [0.0, room, 0.0]), ("wave", [0.0; 3]), ("jump", [0.0; 3]), ("new", [0.0; 3])] {
            assert_eq!(slots(&joint, intent), wanted, "{intent}");
            assert_eq!(slots(&apart, intent), [0.0; 3]);
        }
        let text = serde_json::to_string(&joint).expect("JSON");
        assert_eq!(serde_json::from_str::<Labels>(&text).expect("labels"), joint);
        assert!(!serde_json::to_string(&apart).expect("JSON").contains("intent_slots"));
    }

    #[test]
    fn tags_and_ids_are_each_others_inverse() {
        let labels = labels();
        let tags: Vec<String> = (0..labels.tag_count()).map(|id| labels.tag(id)).collect();
        assert_eq!(tags, ["O", "B-city", "I-city", "B-room", "I-room"]);
        for (id, tag) in tags.iter().enumerate() {
            assert_eq!(labels.tag_id(tag), Some(id));
        }
        assert_eq!(labels.tag(5), "O");
        for unknown in ["B-song", "B-", "X-city", "", "city"] {
            assert_eq!(labels.tag_id(unknown), None, "{unknown}");
        }
        assert_eq!(labels.intent_id("wave"), Some(1));
        assert_eq!(labels.intent_id("leave"), None);
    }

    #[test]
    fn marks_that_training_lacks_are_noise() {
        let utterance =
            |word: &str| Utterance { words: vec![word.into()], tags: vec!["O".into()], intent: "ask".into() };
        let labels = Labels::of(&["?", "st.", "-", "8"].map(utterance));
        assert_eq!(labels.marks, ["-", "?"]);
        let noise = ["?", ".", "🔥", "st.", "8"].map(|word| labels.is_noise(word));
        assert_eq!(noise, [false, true, true, false, false]);
    }

    #[test]
    fn labels_survive_json() {
        let text = serde_json::to_string(&labels()).expect("plain names");
        assert_eq!(serde_json::from_str::<Labels>(&text).expect("what was written"), labels());
    }

    #[test]
    fn spans_follow_conlleval() {
        let found = |tags: &[&str]| -> Vec<(String, Range<usize>)> {
            spans(tags).into_iter().map(|span| (span.slot, span.words)).collect()
        };
        let span = |slot: &str, words| (slot.to_owned(), words);
        assert_eq!(found(&[]), []);
        assert_eq!(found(&["O", "O"]), []);
        assert_eq!(found(&["B-a", "I-a", "O", "B-a"]), [span("a", 0..2), span("a", 3..4)]);
        assert_eq!(found(&["B-a", "B-a", "I-a"]), [span("a", 0..1), span("a", 1..3)]);
        assert_eq!(found(&["I-a", "I-a", "I-b"]), [span("a", 0..2), span("b", 2..3)]);
        assert_eq!(found(&["B-a", "I-b", "I-b", "O", "I-a"]), [span("a", 0..1), span("b", 1..3), span("a", 4..5)]);
    }
}
