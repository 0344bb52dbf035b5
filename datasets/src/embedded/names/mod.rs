//! The embedded utterances with open slots: requests to a town's desk about works, people and
//! places, whose names are built by rules and of which most in validation and test never occur in
//! training.
//!
//! An utterance is a line of `REQUESTS`. Its slots are filled from rules, which combine words and
//! parts of words. The words of a request also occur in names, and a name may be one of them:
//! "two", "the list", "find tomorrow". Some requests differ only in what the name is a name of.

mod data;

use std::collections::HashSet;

use self::data::{OPEN, REQUESTS, RULES, SLOT_RULES, WORDS};
use crate::random::Generator;
use crate::utterance::{Utterance, Utterances};

/// The name of the embedded utterances with open slots.
pub const EMBEDDED_NAMES: &str = "embedded:names";

const SEED: u64 = 0x005E_EDED_4A3E;

/// Training, validation and test.
const TRAIN: usize = 0;
const SIZES: [usize; 3] = [3000, 700, 1000];

/// Of a name, the most words.
const LONGEST_NAME: usize = 8;

/// In one of so many open slots, a name that training has already: some are popular.
const FAMILIAR: usize = 5;

/// The probability that validation and test take a word or part that training lacks.
const HELD_OUT_WORDS: f64 = 0.6;

impl Utterances {
    /// Utterances whose slots are open, from an embedded grammar: always the same ones.
    pub fn names() -> Self {
        let mut grammar = Grammar::new();
        let mut said = HashSet::new();
        let [train, valid, test] = [0, 1, 2].map(|part| {
            let mut utterances = Vec::with_capacity(SIZES[part]);
            for draw in 0.. {
                let (utterance, names) = grammar.say(part, draw);
                if !said.insert(utterance.words.clone()) {
                    continue;
                }
                utterances.push(utterance);
                if part == TRAIN {
                    grammar.learn(names);
                }
                if utterances.len() == SIZES[part] {
                    break;
                }
            }
            utterances
        });
        Self { train, valid, test }
    }
}

/// A step of a line or of a rule.
#[derive(Debug)]
enum Part {
    Word(&'static str),
    /// Expands a rule.
    Rule(usize),
    /// Makes one word of several parts.
    Joined(Vec<Part>),
    /// Expands a rule and tags its words.
    Slot(&'static str, usize),
    Choose(Vec<Vec<Part>>),
}

/// What a name stands for.
enum Rule {
    /// Ways to say it.
    Ways(Vec<Vec<Part>>),
    /// Words of all splits, of validation alone and of the test alone.
    Words([Vec<&'static str>; 3]),
}

/// The names of an open rule in training, in order and as a set.
#[derive(Default)]
struct Known {
    order: Vec<Vec<String>>,
    all: HashSet<Vec<String>>,
}

struct Grammar {
    requests: Vec<(&'static str, Vec<Part>)>,
    rules: Vec<Rule>,
    /// For each rule, if it is open.
    known: Vec<Option<Known>>,
}

impl Grammar {
    fn new() -> Self {
        let lines = |text: &'static str| text.lines().map(str::trim).filter(|line| !line.is_empty());
        let requests = REQUESTS.iter().flat_map(|(intent, text)| lines(text).map(|line| (*intent, parse(line))));
        let ways = RULES.iter().map(|(_, text)| Rule::Ways(lines(text).map(parse).collect()));
        let words = WORDS.iter().map(|(_, parts)| Rule::Words(parts.map(|part| part.split_whitespace().collect())));
        let rules: Vec<Rule> = ways.chain(words).collect();
        let known = RULES.iter().map(|(name, _)| OPEN.contains(name).then(Known::default));
        let known = known.chain(WORDS.iter().map(|_| None)).collect();
        Self { requests: requests.collect(), rules, known }
    }

    /// An utterance of a split, and the names in it with their rules.
    fn say(&self, part: usize, draw: u64) -> (Utterance, Vec<(usize, Vec<String>)>) {
        let mut rng = Generator::new(SEED, part as u64, draw);
        let intents = REQUESTS.len();
        let intent = REQUESTS[rng.below(intents)].0;
        let ways: Vec<&Vec<Part>> = self.requests.iter().filter(|(of, _)| *of == intent).map(|(_, way)| way).collect();
        let mut said = Said { words: Vec::new(), tags: Vec::new(), names: Vec::new() };
        self.request(ways[rng.below(ways.len())], part, &mut rng, &mut said);
        (Utterance { words: said.words, tags: said.tags, intent: intent.to_owned() }, said.names)
    }

    fn request(&self, parts: &[Part], part: usize, rng: &mut Generator, said: &mut Said) {
        for step in parts {
            match step {
                Part::Slot(slot, rule) => {
                    let value = self.value(*rule, part, rng);
                    let tags = std::iter::once('B').chain(std::iter::repeat('I'));
                    said.tags.extend(tags.take(value.len()).map(|prefix| format!("{prefix}-{slot}")));
                    said.words.extend(value.iter().cloned());
                    if self.known[*rule].is_some() {
                        said.names.push((*rule, value));
                    }
                }
                Part::Choose(branches) => self.request(&branches[rng.below(branches.len())], part, rng, said),
                other => {
                    self.expand(std::slice::from_ref(other), part, rng, &mut said.words);
                    said.tags.resize(said.words.len(), "O".to_owned());
                }
            }
        }
    }

    /// A value of a rule. Of an open one, it is familiar, or new: in validation and test, one that
    /// training lacks.
    fn value(&self, rule: usize, part: usize, rng: &mut Generator) -> Vec<String> {
        let familiar = self.known[rule].as_ref().filter(|known| !known.order.is_empty() && rng.below(FAMILIAR) == 0);
        if let Some(Known { order, .. }) = familiar {
            return order[rng.below(order.len())].clone();
        }
        loop {
            let mut words = Vec::new();
            self.expand(&[Part::Rule(rule)], part, rng, &mut words);
            let trained = self.known[rule].as_ref().is_some_and(|known| known.all.contains(&words));
            if words.len() <= LONGEST_NAME && (part == TRAIN || !trained) {
                return words;
            }
        }
    }

    fn expand(&self, parts: &[Part], part: usize, rng: &mut Generator, words: &mut Vec<String>) {
        for step in parts {
            match step {
                Part::Word(word) => words.push((*word).to_owned()),
                Part::Rule(rule) | Part::Slot(_, rule) => match &self.rules[*rule] {
                    Rule::Ways(ways) => self.expand(&ways[rng.below(ways.len())], part, rng, words),
                    Rule::Words(parts) => {
                        let own = part != TRAIN && rng.chance(HELD_OUT_WORDS);
                        let list = if own { &parts[part] } else { &parts[TRAIN] };
                        words.push(list[rng.below(list.len())].to_owned());
                    }
                },
                Part::Joined(parts) => {
                    let mut joined = Vec::new();
                    self.expand(parts, part, rng, &mut joined);
                    words.push(joined.concat());
                }
                Part::Choose(branches) => self.expand(&branches[rng.below(branches.len())], part, rng, words),
            }
        }
    }

    /// Notes that training has these names.
    fn learn(&mut self, names: Vec<(usize, Vec<String>)>) {
        for (rule, name) in names {
            if let Some(known) = &mut self.known[rule] {
                known.all.insert(name.clone());
                known.order.push(name);
            }
        }
    }
}

/// What has been said of an utterance.
struct Said {
    words: Vec<String>,
    tags: Vec<String>,
    names: Vec<(usize, Vec<String>)>,
}

/// The index of a rule, or of a list of words.
fn rule(name: &str) -> Option<usize> {
    let names = RULES.iter().map(|(name, _)| *name).chain(WORDS.iter().map(|(name, _)| *name));
    names.into_iter().position(|known| known == name)
}

/// Parses a line. It cannot fail: unknown syntax becomes a word, which tests find.
fn parse(text: &'static str) -> Vec<Part> {
    let mut lexemes = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find(['(', '|', ')']) {
        lexemes.extend(rest[..at].split_whitespace());
        lexemes.push(&rest[at..=at]);
        rest = &rest[at + 1..];
    }
    lexemes.extend(rest.split_whitespace());
    branches(&mut lexemes.into_iter()).remove(0)
}

/// Parses the branches up to a closing bracket or to the end.
fn branches(lexemes: &mut std::vec::IntoIter<&'static str>) -> Vec<Vec<Part>> {
    let mut branches_of = vec![Vec::new()];
    while let Some(lexeme) = lexemes.next() {
        let step = match lexeme {
            ")" => break,
            "|" => {
                branches_of.push(Vec::new());
                continue;
            }
            "(" => Part::Choose(branches(lexemes)),
            _ if lexeme.contains('+') => Part::Joined(lexeme.split('+').map(symbol).collect()),
            _ => symbol(lexeme),
        };
        if let Some(branch) = branches_of.last_mut() {
            branch.push(step);
        }
    }
    branches_of
}

/// A word, `<rule>`, `[slot]` or `[slot:rule]`.
fn symbol(lexeme: &'static str) -> Part {
    if let Some(index) = lexeme.strip_prefix('<').and_then(|name| name.strip_suffix('>')).and_then(rule) {
        return Part::Rule(index);
    }
    let slot = lexeme.strip_prefix('[').and_then(|inner| inner.strip_suffix(']')).and_then(|slot| {
        let of = SLOT_RULES.iter().find(|(name, _)| *name == slot).map_or(slot, |(_, of)| of);
        Some(Part::Slot(slot, rule(of)?))
    });
    slot.unwrap_or(Part::Word(lexeme))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{BTreeMap, BTreeSet};

    use crate::labels::Labels;
    use crate::spans::spans;

    type Values = BTreeMap<String, Vec<Vec<String>>>;

    fn values(utterances: &[Utterance]) -> Values {
        let mut values = Values::new();
        for utterance in utterances {
            for span in spans(&utterance.tags) {
                values.entry(span.slot).or_default().push(utterance.words[span.words].to_vec());
            }
        }
        values
    }

    fn slots_that_are_open() -> BTreeSet<&'static str> {
        OPEN.into_iter().chain(SLOT_RULES.map(|(slot, _)| slot)).collect()
    }

    #[test]
    fn seven_intents_share_slots_in_every_part() {
        let names = Utterances::names();
        let labels = Labels::of(&names.train);
        assert_eq!((labels.intents.len(), labels.slots.len()), (7, 11));
        assert_eq!((Labels::of(&names.valid), Labels::of(&names.test)), (labels.clone(), labels));
        assert_eq!([&names.train, &names.valid, &names.test].map(Vec::len), SIZES);
        let mut intents = BTreeMap::<String, BTreeSet<String>>::new();
        for utterance in &names.train {
            for span in spans(&utterance.tags) {
                intents.entry(span.slot).or_default().insert(utterance.intent.clone());
            }
        }
        assert!(intents.values().filter(|intents| intents.len() > 1).count() >= 7, "{intents:?}");
        assert!(intents["work"].len() >= 5);
    }

    #[test]
    fn the_utterances_are_always_the_same_and_none_comes_twice() {
        let names = Utterances::names();
        assert_eq!(names, Utterances::names());
        let all = [names.train, names.valid, names.test].concat();
        assert_eq!(all.iter().map(|utterance| &utterance.words).collect::<BTreeSet<_>>().len(), all.len());
        // FNV-1a over all words, tags and intents.
        let mut sum = 0xCBF2_9CE4_8422_2325_u64;
        for Utterance { words, tags, intent } in all {
            assert_eq!(words.len(), tags.len());
            for byte in format!("{}\n{}\n{intent}\n", words.join(" "), tags.join(" ")).bytes() {
                sum = (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3);
            }
        }
        assert_eq!(sum, 0x5B4F_F689_0705_001A, "{sum:#X}");
    }

    #[test]
    fn words_are_lower_case_letters() {
        let names = Utterances::names();
        for word in [names.train, names.valid, names.test].concat().iter().flat_map(|utterance| &utterance.words) {
            assert!(!word.is_empty() && word.chars().all(|c| c.is_ascii_lowercase() || c == '\''), "{word}");
        }
    }

    #[test]
    fn most_names_of_validation_and_test_never_occur_in_training() {
        let names = Utterances::names();
        let trained = values(&names.train);
        for part in [&names.valid, &names.test] {
            for (slot, found) in values(part) {
                let known: BTreeSet<_> = trained[&slot].iter().collect();
                let unseen = found.iter().filter(|value| !known.contains(value)).count();
                let share = unseen as f64 / found.len() as f64;
                match slots_that_are_open().contains(&slot[..]) {
                    true => assert!(share > 0.6 && share < 0.95, "{slot}: {share}"),
                    false => assert!(share < 0.3, "{slot}: {share}"),
                }
            }
        }
    }

    #[test]
    fn names_have_one_to_eight_words_and_most_have_several() {
        let names = Utterances::names();
        for part in [&names.train, &names.valid, &names.test] {
            let lengths: Vec<usize> = values(part).into_values().flatten().map(|value| value.len()).collect();
            let with = |length: usize| lengths.iter().filter(|other| **other == length).count();
            assert!((1..=LONGEST_NAME).all(|length| with(length) > 0));
            assert_eq!((1..=LONGEST_NAME).map(with).sum::<usize>(), lengths.len());
            let (several, long) = (lengths.len() - with(1), (5..=LONGEST_NAME).map(with).sum::<usize>());
            assert!(2 * several > lengths.len() && 20 * long > lengths.len(), "{several}, {long}");
        }
    }

    #[test]
    fn function_words_and_the_words_of_requests_occur_in_names() {
        let names = Utterances::names();
        let mut outside = BTreeSet::new();
        for utterance in &names.train {
            let words = utterance.words.iter().zip(&utterance.tags);
            outside.extend(words.filter(|(_, tag)| *tag == "O").map(|(word, _)| word.clone()));
        }
        let works = &values(&names.test)["work"];
        let with = |word: &str| works.iter().filter(|work| work.iter().any(|part| part == word)).count();
        assert!(["who", "of", "for", "in"].map(with).iter().all(|count| *count >= 10));
        let plain = works.iter().filter(|work| work.iter().all(|word| outside.contains(word))).count();
        assert!(20 * plain >= works.len(), "{plain} of {}", works.len());
    }

    #[test]
    fn utterances_are_as_short_as_speech() {
        let names = Utterances::names();
        for part in [&names.train, &names.valid, &names.test] {
            assert!(part.iter().map(|utterance| utterance.words.len()).max() <= Some(34));
        }
    }
}
