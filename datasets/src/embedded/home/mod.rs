//! The embedded utterances: requests to a home assistant, sampled from our own grammar.
//!
//! An utterance is a walk through a line of `INTENTS`, which samples slot values from `VALUES`. The
//! same words occur in many slots: only their context tells whether "forty" is a brightness or a
//! volume, "georgia" a person or a place, and "turn off the oven" a command or the text of a
//! message.
//!
//! Some lines and values are excluded from the training split, and the validation and test splits
//! each have their own. Excluded lines consist of words that also occur in training.

mod data;

use std::collections::HashSet;

use self::data::{FRAGMENTS, INTENTS, VALUES};
use crate::random::Generator;
use crate::spans::spans;
use crate::utterance::{Utterance, Utterances};

/// The seed of the embedded utterances.
const SEED: u64 = 0x0F1E_C1A7;

/// Offsets of training, validation and test in triples.
const TRAIN: usize = 0;
const VALID: usize = 1;
const TEST: usize = 2;

/// Sizes of the training, validation and test splits.
const SIZES: [usize; 3] = [12_000, 500, 1000];

/// The embedded utterances, without duplicates.
fn utterances() -> Utterances {
    let grammar = Grammar::new();
    let mut said = HashSet::new();
    let [train, valid, test] = [TRAIN, VALID, TEST].map(|part| {
        let fresh = |utterance: &Utterance| !repeats_itself(utterance) && said.insert(utterance.words.clone());
        (0..).map(|draw| grammar.say(part, draw)).filter(fresh).take(SIZES[part]).collect()
    });
    Utterances { train, valid, test }
}

impl Utterances {
    /// Utterances to a home assistant from an embedded grammar: always the same ones.
    pub fn home() -> Self {
        utterances()
    }
}

/// Whether two slots of the same name have the same value, as in "add milk and milk".
fn repeats_itself(utterance: &Utterance) -> bool {
    let mut values = HashSet::new();
    spans(&utterance.tags).into_iter().any(|span| !values.insert((span.slot, &utterance.words[span.words])))
}

/// A step of a walk.
#[derive(Debug)]
enum Part {
    /// Emits a word.
    Word(&'static str),
    /// Emits a value of a table, tagged with a slot.
    Slot(&'static str, usize),
    /// Takes one of several alternatives.
    Choose(Vec<Vec<Part>>),
}

/// The parsed grammar.
struct Grammar {
    /// Intents and lines: for training, validation and the test.
    lines: [Vec<(&'static str, Vec<Part>)>; 3],
    /// Values of each table: for all splits, validation only, and test only.
    values: Vec<[Vec<Vec<Part>>; 3]>,
}

impl Grammar {
    fn new() -> Self {
        let mut lines = [const { Vec::new() }; 3];
        for &(intent, text) in INTENTS {
            for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
                let (part, line) = match (line.strip_prefix("? "), line.strip_prefix("! ")) {
                    (Some(line), _) => (VALID, line),
                    (_, Some(line)) => (TEST, line),
                    _ => (TRAIN, line),
                };
                lines[part].push((intent, parse(line)));
            }
        }
        let entries = |text: &'static str| -> Vec<Vec<Part>> {
            text.split(',').map(str::trim).filter(|entry| !entry.is_empty()).map(parse).collect()
        };
        Self { lines, values: VALUES.iter().map(|(_, columns)| columns.map(entries)).collect() }
    }

    /// An utterance of a split. A fifth of the held-out ones use a line that training lacks, and
    /// one in fourteen of their slots a value that it lacks.
    fn say(&self, part: usize, draw: u64) -> Utterance {
        let mut rng = Generator::new(SEED, part as u64, draw);
        let lines = if rng.below(5) == 0 { &self.lines[part] } else { &self.lines[TRAIN] };
        let (intent, line) = &lines[rng.below(lines.len())];
        let mut utterance = Utterance { words: Vec::new(), tags: Vec::new(), intent: (*intent).to_owned() };
        self.walk(line, part, None, &mut rng, &mut utterance);
        utterance
    }

    /// Walks through parts, inside or outside of a slot's value.
    fn walk(&self, parts: &[Part], part: usize, slot: Option<&str>, rng: &mut Generator, said: &mut Utterance) {
        let first = said.words.len();
        for step in parts {
            match step {
                Part::Word(word) => {
                    said.words.push((*word).to_owned());
                    said.tags.push("O".to_owned());
                }
                Part::Choose(branches) => self.walk(&branches[rng.below(branches.len())], part, None, rng, said),
                Part::Slot(slot, table) => {
                    let [all, ..] = &self.values[*table];
                    let own = &self.values[*table][part];
                    let values = if rng.below(14) == 0 && !own.is_empty() { own } else { all };
                    self.walk(&values[rng.below(values.len())], part, Some(slot), rng, said);
                }
            }
        }
        if let Some(slot) = slot {
            let prefixes = std::iter::once('B').chain(std::iter::repeat('I'));
            for (tag, prefix) in said.tags[first..].iter_mut().zip(prefixes) {
                *tag = format!("{prefix}-{slot}");
            }
        }
    }
}

/// Parses a line or value.
///
/// It cannot fail: unknown syntax becomes a word, which tests find.
fn parse(text: &'static str) -> Vec<Part> {
    let mut lexemes = Vec::new();
    let mut rest = text;
    // Brackets of choices are tokens of their own; those of slots, dashes and quotes belong to
    // their words.
    while let Some(at) = rest.find(['(', '|', ')']) {
        lexemes.extend(rest[..at].split_whitespace());
        lexemes.push(&rest[at..=at]);
        rest = &rest[at + 1..];
    }
    lexemes.extend(rest.split_whitespace());
    alternative(&mut lexemes.into_iter()).0
}

/// Parses an alternative and the `|` or `)` after it. Returns whether that was a `|`.
fn alternative(lexemes: &mut std::vec::IntoIter<&'static str>) -> (Vec<Part>, bool) {
    let mut parts = Vec::new();
    while let Some(lexeme) = lexemes.next() {
        match lexeme {
            "|" | ")" => return (parts, lexeme == "|"),
            "(" => {
                let mut branches = Vec::new();
                loop {
                    let (branch, more) = alternative(lexemes);
                    branches.push(branch);
                    if !more {
                        break;
                    }
                }
                parts.push(Part::Choose(branches));
            }
            _ => match FRAGMENTS.iter().find(|(name, _)| *name == lexeme) {
                Some((_, text)) => parts.extend(parse(text)),
                None => parts.push(slot(lexeme).unwrap_or(Part::Word(lexeme))),
            },
        }
    }
    (parts, false)
}

/// The slot of `[slot]` or `[slot:table]`.
fn slot(lexeme: &'static str) -> Option<Part> {
    let inner = lexeme.strip_prefix('[')?.strip_suffix(']')?;
    let (slot, table) = inner.split_once(':').unwrap_or((inner, inner));
    VALUES.iter().position(|(name, _)| *name == table).map(|table| Part::Slot(slot, table))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{BTreeMap, BTreeSet};

    use crate::labels::Labels;
    use crate::spans::slot_of;

    /// The words that parts can emit outside of slots, or inside them if they are a value's.
    fn words_of(parts: &[Part], words: &mut BTreeSet<&'static str>) {
        for part in parts {
            match part {
                Part::Word(word) => _ = words.insert(word),
                Part::Slot(..) => {}
                Part::Choose(branches) => branches.iter().for_each(|branch| words_of(branch, words)),
            }
        }
    }

    /// All strings of a value.
    fn value_texts(parts: &[Part]) -> Vec<String> {
        parts.iter().fold(vec![String::new()], |before, part| {
            let after: Vec<String> = match part {
                Part::Word(word) => vec![(*word).to_owned()],
                Part::Slot(..) => panic!("a slot in a value"),
                Part::Choose(branches) => branches.iter().flat_map(|branch| value_texts(branch)).collect(),
            };
            let join = |first: &String| {
                after.iter().map(|second| format!("{first} {second}").trim().to_owned()).collect::<Vec<_>>()
            };
            before.iter().flat_map(join).collect()
        })
    }

    /// The values of each slot in some utterances.
    fn values(utterances: &[Utterance]) -> BTreeMap<String, BTreeSet<String>> {
        let mut values = BTreeMap::<String, BTreeSet<String>>::new();
        for utterance in utterances {
            for span in spans(&utterance.tags) {
                values.entry(span.slot).or_default().insert(utterance.words[span.words].join(" "));
            }
        }
        values
    }

    #[test]
    fn there_are_many_intents_and_slots_in_every_part() {
        let home = utterances();
        let labels = Labels::of(&home.train);
        assert_eq!((labels.intents.len(), labels.slots.len()), (30, 30));
        assert_eq!(labels.intents.len(), INTENTS.len());
        assert_eq!(Labels::of(&home.valid), labels);
        assert_eq!(Labels::of(&home.test), labels);
        assert_eq!([&home.train, &home.valid, &home.test].map(Vec::len), SIZES);
    }

    #[test]
    fn no_text_comes_twice() {
        let home = utterances();
        let all = [home.train, home.valid, home.test].concat();
        let distinct: BTreeSet<_> = all.iter().map(|utterance| &utterance.words).collect();
        assert_eq!(distinct.len(), all.len());
    }

    #[test]
    fn the_utterances_are_always_the_same() {
        assert_eq!(utterances(), utterances());
        // FNV-1a over all words, tags and intents.
        let home = utterances();
        let mut sum = 0xCBF2_9CE4_8422_2325_u64;
        for utterance in [home.train, home.valid, home.test].concat() {
            let Utterance { words, tags, intent } = utterance;
            for byte in format!("{}\n{}\n{intent}\n", words.join(" "), tags.join(" ")).bytes() {
                sum = (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3);
            }
        }
        assert_eq!(sum, 0x3CBD_4CAC_C331_3DF7, "{sum:#X}");
    }

    #[test]
    fn tags_are_well_formed() {
        let home = utterances();
        for Utterance { words, tags, .. } in [home.train, home.valid, home.test].concat() {
            assert_eq!(words.len(), tags.len());
            let mut open = None;
            for tag in &tags {
                let slot = slot_of(tag);
                assert!(slot.is_some() || tag == "O", "{tag}");
                let slot = slot.map(|(slot, begins)| {
                    assert!(begins || open == Some(slot), "{words:?} {tags:?}");
                    slot
                });
                open = slot;
            }
        }
    }

    #[test]
    fn words_are_lower_case_letters() {
        let home = utterances();
        for word in [home.train, home.valid, home.test].concat().iter().flat_map(|utterance| &utterance.words) {
            assert!(word.chars().all(|c| c.is_ascii_lowercase() || c == '\''), "{word}");
        }
    }

    #[test]
    fn every_intent_has_lines_that_only_the_test_has() {
        let grammar = Grammar::new();
        for (intent, _) in INTENTS {
            let lines = |part: usize| grammar.lines[part].iter().filter(|(of, _)| of == intent).count();
            assert!(lines(TRAIN) >= 5 && lines(VALID) >= 1 && lines(TEST) >= 2, "{intent}");
        }
    }

    #[test]
    fn held_out_lines_are_made_of_words_from_other_lines() {
        let grammar = Grammar::new();
        let words = |part: usize| {
            let mut words = BTreeSet::new();
            grammar.lines[part].iter().for_each(|(_, line)| words_of(line, &mut words));
            words
        };
        let known = words(TRAIN);
        for part in [VALID, TEST] {
            let unknown: Vec<_> = words(part).into_iter().filter(|word| !known.contains(word)).collect();
            assert!(unknown.is_empty(), "{unknown:?}");
        }
    }

    /// Utterances with the words of each value replaced by its slot's name: the line's template.
    fn shapes(utterances: &[Utterance]) -> BTreeSet<(String, Vec<String>)> {
        let shape = |utterance: &Utterance| {
            let words = utterance.words.iter().zip(&utterance.tags);
            let words = words.filter_map(|(word, tag)| match slot_of(tag) {
                None => Some(word.clone()),
                Some((slot, begins)) => begins.then(|| format!("[{slot}]")),
            });
            (utterance.intent.clone(), words.collect())
        };
        utterances.iter().map(shape).collect()
    }

    #[test]
    fn an_eighth_of_the_test_is_said_in_ways_that_training_never_has() {
        let grammar = Grammar::new();
        let said = |part: usize, lines: usize| -> Vec<Utterance> {
            let said = |draw| {
                let mut rng = Generator::new(SEED + 1, part as u64, draw);
                let (intent, line) = &grammar.lines[lines][rng.below(grammar.lines[lines].len())];
                let mut said = Utterance { words: Vec::new(), tags: Vec::new(), intent: (*intent).to_owned() };
                grammar.walk(line, part, None, &mut rng, &mut said);
                said
            };
            (0..60_000).map(said).collect()
        };
        let trained = shapes(&said(TRAIN, TRAIN));
        let home = utterances();
        for part in [VALID, TEST] {
            let held_out = shapes(&said(part, part));
            let shared: Vec<_> = held_out.intersection(&trained).collect();
            assert!(shared.is_empty(), "{shared:?}");
        }
        let of_train = shapes(&home.train);
        let news = home.test.iter().filter(|one| shapes(&[(*one).clone()]).is_disjoint(&of_train)).count();
        assert!(news >= home.test.len() / 8, "{news}");
    }

    #[test]
    fn held_out_values_are_never_trained_on() {
        let grammar = Grammar::new();
        let home = utterances();
        let [trained, tested] = [&home.train, &home.test].map(|part| values(part));
        let mut held_out = BTreeMap::<&str, BTreeSet<String>>::new();
        for ((name, _), entries) in VALUES.iter().zip(&grammar.values) {
            let all = entries
                .each_ref()
                .map(|part| part.iter().flat_map(|value| value_texts(value)).collect::<BTreeSet<_>>());
            assert!(all[TRAIN].is_disjoint(&all[VALID]) && all[TRAIN].is_disjoint(&all[TEST]), "{name}");
            assert!(all[VALID].is_disjoint(&all[TEST]), "{name}");
            if !all[TEST].is_empty() {
                assert!(!all[VALID].is_empty(), "{name}");
                held_out.insert(name, all[TEST].clone());
            }
        }
        let (mut news, mut all) = (0, 0);
        for (slot, held_out) in held_out {
            // A few tables serve slots of other names.
            let Some(trained) = trained.get(slot) else { continue };
            assert!(trained.is_disjoint(&held_out), "{slot}");
            news += tested[slot].difference(trained).count();
            all += tested[slot].len();
        }
        assert!(20 * news >= all && news > 30, "{news} of {all}");
    }

    #[test]
    fn the_same_words_stand_in_many_slots() {
        let mut slots = BTreeMap::<String, BTreeSet<String>>::new();
        for (slot, values) in values(&utterances().train) {
            values.into_iter().for_each(|value| _ = slots.entry(value).or_default().insert(slot.clone()));
        }
        let of = |value: &str| slots[value].iter().map(String::as_str).collect::<Vec<_>>().join(" ");
        assert_eq!(of("georgia"), "artist city contact topic");
        assert_eq!(of("kitchen"), "list phrase room");
        assert!(slots["eighteen"].len() >= 4, "{}", of("eighteen"));
        assert!(slots.values().filter(|slots| slots.len() > 1).count() > 60);
    }

    #[test]
    fn utterances_are_as_short_as_speech() {
        let home = utterances();
        for (name, part) in [("train", &home.train), ("valid", &home.valid), ("test", &home.test)] {
            let longest = part.iter().map(|utterance| utterance.words.len()).max();
            assert!(longest <= Some(26), "{name}: {longest:?}");
        }
    }
}
