//! The embedded corpus: short fireside tales drawn from a probabilistic grammar of our own.
//!
//! A story is a walk through `RULES`. At each choice the walk takes one alternative; at each
//! first mention - of the hero, of the animal that keeps the hero company, of what was lost - it
//! draws a row of a table in `SHEETS`. All that follows from a row, such as a pronoun, the cry
//! of the animal or the moral, is recalled later without any further choice. A reader that
//! remembers the first sentence therefore predicts the last one better than short contexts can.
//!
//! At every choice the alternatives begin with different tokens, so a text has only one derivation
//! and the information of a story is that of its choices. Stories are independent, which makes the
//! entropy rate of the corpus exactly
//!
//! ```text
//! expected information of a story / expected number of tokens in a story
//! ```
//!
//! and one pass over the grammar gives both expectations, without sampling.
//!
//! A token is a word together with the space before it, a punctuation mark, or the line break that
//! ends a story. The text of a story is its tokens with nothing between them.

mod data;

use std::collections::{BTreeMap, HashMap};

use self::data::{RULES, SHEETS};
use crate::random::Generator;

/// A story of the corpus.
#[derive(Clone, Debug, PartialEq)]
pub struct Story {
    /// The tokens; the last is the line break.
    pub tokens: Vec<u32>,
    /// Minus the logarithm of the story's probability, in nats.
    pub information: f64,
}

/// How a story begins, and who is in it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Beginning {
    pub(crate) text: String,
    /// The hero's name.
    pub(crate) hero: String,
    /// The hero's friend is such an animal.
    pub(crate) animal: String,
    /// The name of the animal.
    pub(crate) pet: String,
}

/// The story grammar, ready to tell stories and to say exactly how predictable they are.
#[derive(Debug)]
pub struct StoryGrammar {
    vocabulary: Vec<String>,
    tables: Vec<Table>,
    story: Vec<Part>,
    entropy_per_token: f64,
    mean_story_length: f64,
    longest_story: usize,
}

impl StoryGrammar {
    /// Compiles the grammar and measures it.
    pub fn new() -> Self {
        let mut compiler = Compiler::default();
        for &(fields, given, rows) in SHEETS {
            compiler.table(fields, given, rows);
        }
        let story = compiler.rule("@story", RULES);
        let mut grammar = Self {
            vocabulary: compiler.vocabulary,
            tables: compiler.tables,
            story,
            entropy_per_token: 0.0,
            mean_story_length: 0.0,
            longest_story: 0,
        };
        let untold = Bundle { probability: 1.0, ..Bundle::default() };
        let untold = Told::from([(vec![0; grammar.tables.len()], untold)]);
        let mut all = Bundle::default();
        for bundle in grammar.advance(&grammar.story, untold).values() {
            all.merge(bundle);
        }
        grammar.entropy_per_token = all.information / all.tokens;
        grammar.mean_story_length = all.tokens;
        grammar.longest_story = all.longest;
        grammar
    }

    /// Every token, in a fixed order; a token's index is its id.
    pub fn vocabulary(&self) -> Vec<String> {
        self.vocabulary.clone()
    }

    /// The exact entropy rate of the corpus, in nats per token.
    pub fn entropy_per_token(&self) -> f64 {
        self.entropy_per_token
    }

    /// The exact mean number of tokens in a story.
    pub fn mean_story_length(&self) -> f64 {
        self.mean_story_length
    }

    /// The exact number of tokens in the longest story.
    pub fn longest_story(&self) -> usize {
        self.longest_story
    }

    /// Tells a story of the endless corpus that `seed` names: the same one at every call.
    pub fn story(&self, seed: u64, index: u64) -> Story {
        let mut rng = Generator::new(seed, 0, index);
        let mut drawn = vec![0; self.tables.len()];
        let mut story = Story { tokens: Vec::new(), information: 0.0 };
        self.tell(&self.story, &mut rng, &mut drawn, &mut story);
        story
    }

    /// How a story begins: two sentences.
    pub(crate) fn beginning(&self, seed: u64, index: u64) -> Beginning {
        let Story { tokens, .. } = self.story(seed, index);
        let word = |token: &u32| self.vocabulary.get(*token as usize).map_or("", String::as_str);
        let ends = tokens.iter().enumerate().filter(|(_, token)| word(token) == ".").map(|(at, _)| at + 1);
        let tokens = &tokens[..ends.take(2).last().unwrap_or(tokens.len())];
        let found = |table: &str| {
            let names: Vec<&str> = SHEETS
                .iter()
                .filter(|(fields, ..)| fields.split(" / ").next() == Some(table))
                .flat_map(|(_, _, rows)| rows.iter())
                .filter_map(|row| row.split(" / ").next()?.split(' ').next_back())
                .collect();
            let known = |token: &u32| names.contains(&word(token).trim_start());
            tokens.iter().find(|token| known(token)).map_or("", word).trim_start().to_string()
        };
        let (hero, animal, pet) = (found("hero"), found("animal"), found("pet"));
        Beginning { text: self.text(tokens), hero, animal, pet }
    }

    /// The text of some tokens.
    pub fn text(&self, tokens: &[u32]) -> String {
        let words = tokens.iter().flat_map(|&token| self.vocabulary.get(token as usize));
        words.map(String::as_str).collect()
    }

    fn field(&self, table: usize, row: usize, field: usize) -> &[u32] {
        &self.tables[table].rows[row].fields[field]
    }

    /// Walks through some parts, adding to the story.
    fn tell(&self, parts: &[Part], rng: &mut Generator, drawn: &mut [usize], story: &mut Story) {
        for part in parts {
            match part {
                Part::Word(token) => story.tokens.push(*token),
                &Part::Recall { table, field } => {
                    story.tokens.extend(self.field(table, drawn[table], field));
                }
                &Part::Draw(table) => {
                    let (row, probability) = rng.pick(self.tables[table].odds(drawn));
                    drawn[table] = row;
                    story.information -= probability.ln();
                    story.tokens.extend(self.field(table, row, 0));
                }
                Part::Choose(branches) => {
                    let (branch, probability) = rng.pick(branch_odds(branches));
                    story.information -= probability.ln();
                    self.tell(&branches[branch].parts, rng, drawn, story);
                }
            }
        }
    }

    /// Takes all stories at once through some parts.
    fn advance(&self, parts: &[Part], mut told: Told) -> Told {
        for part in parts {
            match part {
                Part::Word(_) => told.values_mut().for_each(|bundle| bundle.emit(1)),
                &Part::Recall { table, field } => {
                    for (drawn, bundle) in &mut told {
                        bundle.emit(self.field(table, drawn[table], field).len());
                    }
                }
                &Part::Draw(table) => {
                    let mut next = Told::new();
                    for (drawn, bundle) in told {
                        for (row, probability) in self.tables[table].odds(&drawn) {
                            let mut bundle = bundle.chosen(probability);
                            bundle.emit(self.field(table, row, 0).len());
                            let mut drawn = drawn.clone();
                            drawn[table] = if self.tables[table].matters { row } else { 0 };
                            next.entry(drawn).or_default().merge(&bundle);
                        }
                    }
                    told = next;
                }
                Part::Choose(branches) => {
                    let mut next = Told::new();
                    for (branch, probability) in branch_odds(branches) {
                        let mut taken = told.clone();
                        taken.values_mut().for_each(|bundle| *bundle = bundle.chosen(probability));
                        for (drawn, bundle) in self.advance(&branches[branch].parts, taken) {
                            next.entry(drawn).or_default().merge(&bundle);
                        }
                    }
                    told = next;
                }
            }
        }
        told
    }
}

impl Default for StoryGrammar {
    fn default() -> Self {
        Self::new()
    }
}

/// One step of a walk through the grammar.
#[derive(Debug)]
enum Part {
    /// Writes a token.
    Word(u32),
    /// Draws a row of a table and writes its first field.
    Draw(usize),
    /// Writes a field of the row drawn earlier.
    Recall { table: usize, field: usize },
    /// Walks through one of several alternatives.
    Choose(Vec<Branch>),
}

/// An alternative of a choice.
#[derive(Debug)]
struct Branch {
    weight: u32,
    parts: Vec<Part>,
}

/// A compiled table.
#[derive(Debug)]
struct Table {
    /// The table whose row decides the weights of this one's rows.
    given: Option<usize>,
    rows: Vec<Row>,
    /// Whether the row drawn bears on the weights or the length of what follows.
    matters: bool,
}

/// A row of a [`Table`].
#[derive(Debug)]
struct Row {
    /// One weight for each row of the deciding table.
    weights: Vec<u32>,
    fields: Vec<Vec<u32>>,
}

/// Turns weights into indices and probabilities, leaving out what has no weight.
fn odds(weights: impl Iterator<Item = u32> + Clone) -> impl Iterator<Item = (usize, f64)> {
    let total: u32 = weights.clone().sum();
    let possible = weights.enumerate().filter(|&(_, weight)| weight > 0);
    possible.map(move |(index, weight)| (index, f64::from(weight) / f64::from(total)))
}

fn branch_odds(branches: &[Branch]) -> impl Iterator<Item = (usize, f64)> {
    odds(branches.iter().map(|branch| branch.weight))
}

impl Table {
    /// The odds of the rows, given those drawn so far from other tables.
    fn odds(&self, drawn: &[usize]) -> impl Iterator<Item = (usize, f64)> {
        let decider = self.given.map_or(0, |table| drawn[table]);
        odds(self.rows.iter().map(move |row| row.weights.get(decider).copied().unwrap_or(0)))
    }
}

/// All stories at some point of the grammar, bundled by the rows that matter from there on.
///
/// Rows that do not matter are taken for the first of their table, which leaves few bundles.
type Told = BTreeMap<Vec<usize>, Bundle>;

/// A bundle of stories, or rather of their beginnings.
#[derive(Clone, Default)]
struct Bundle {
    probability: f64,
    /// Sum over the stories of probability times information.
    information: f64,
    /// Sum over the stories of probability times tokens.
    tokens: f64,
    longest: usize,
}

impl Bundle {
    /// The stories that take an alternative of this probability.
    fn chosen(&self, probability: f64) -> Self {
        Self {
            probability: self.probability * probability,
            information: (self.information - self.probability * probability.ln()) * probability,
            tokens: self.tokens * probability,
            longest: self.longest,
        }
    }

    /// Adds tokens to every story.
    fn emit(&mut self, tokens: usize) {
        self.tokens += self.probability * tokens as f64;
        self.longest += tokens;
    }

    fn merge(&mut self, other: &Self) {
        self.probability += other.probability;
        self.information += other.information;
        self.tokens += other.tokens;
        self.longest = self.longest.max(other.longest);
    }
}

type Rules<'a> = &'a [(&'a str, &'a str)];
type Lexemes<'a> = std::slice::Iter<'a, String>;

/// Splits grammar text into words, marks and brackets.
fn lexemes(text: &str) -> Vec<String> {
    let mut spaced = String::new();
    for c in text.chars() {
        match c {
            '{' | '|' | '}' | '.' | ',' => spaced.extend([' ', c, ' ']),
            _ => spaced.push(c),
        }
    }
    spaced.split_whitespace().map(str::to_owned).collect()
}

/// Turns the text of the grammar into tables and parts.
///
/// It cannot fail: what it does not know becomes a word of the vocabulary, where tests find it.
#[derive(Default)]
struct Compiler {
    vocabulary: Vec<String>,
    ids: HashMap<String, u32>,
    tables: Vec<Table>,
    /// The table and the column of every field.
    fields: HashMap<&'static str, (usize, usize)>,
}

impl Compiler {
    /// The id of a word or mark.
    fn token(&mut self, lexeme: &str) -> u32 {
        let token = match (lexeme, lexeme.strip_prefix('^')) {
            ("." | ",", _) => lexeme.to_owned(),
            ("¶", _) => "\n".to_owned(),
            (_, Some(opening)) => opening.to_owned(),
            (_, None) => format!(" {lexeme}"),
        };
        let next = self.vocabulary.len() as u32;
        *self.ids.entry(token).or_insert_with_key(|token| {
            self.vocabulary.push(token.clone());
            next
        })
    }

    /// Compiles a table.
    fn table(&mut self, fields: &'static str, given: &str, rows: &[&str]) {
        for (column, field) in fields.split(" / ").enumerate() {
            self.fields.insert(field, (self.tables.len(), column));
        }
        let given = self.fields.get(given).map(|field| field.0);
        if let Some(table) = given {
            self.tables[table].matters = true;
        }
        let rows: Vec<Row> = rows.iter().map(|row| self.row(row)).collect();
        let length = |row: &Row| row.fields.iter().map(Vec::len).collect::<Vec<_>>();
        let matters = rows.windows(2).any(|pair| length(&pair[0]) != length(&pair[1]));
        self.tables.push(Table { given, rows, matters });
    }

    fn row(&mut self, text: &str) -> Row {
        let (weights, fields) = text.split_at(text.find(char::is_alphabetic).unwrap_or(0));
        let mut fields_of_row = Vec::new();
        for field in fields.split(" / ") {
            fields_of_row.push(lexemes(field).iter().map(|lexeme| self.token(lexeme)).collect());
        }
        let weights = weights.split_whitespace().flat_map(str::parse).collect();
        Row { weights, fields: fields_of_row }
    }

    /// Compiles the text of a rule, given the rules that it may use.
    fn rule(&mut self, text: &str, below: Rules) -> Vec<Part> {
        self.branch(&mut lexemes(text).iter(), below).0.parts
    }

    /// Reads an alternative and the `|` or `}` after it, and tells whether that was a `|`.
    fn branch(&mut self, lexemes: &mut Lexemes, below: Rules) -> (Branch, bool) {
        let mut branch = Branch { weight: 1, parts: Vec::new() };
        while let Some(lexeme) = lexemes.next() {
            let name = lexeme.strip_prefix('@');
            let rule = name.and_then(|name| below.iter().position(|rule| rule.0 == name));
            if lexeme == "|" || lexeme == "}" {
                return (branch, lexeme == "|");
            } else if lexeme == "{" {
                let choice = self.choice(lexemes, below);
                branch.parts.push(choice);
            } else if let Some(rule) = rule {
                branch.parts.extend(self.rule(below[rule].1, &below[rule + 1..]));
            } else if let Ok(weight) = lexeme.parse() {
                branch.weight = weight;
            } else {
                branch.parts.push(self.part(lexeme));
            }
        }
        (branch, false)
    }

    /// Reads the alternatives of a choice, up to its `}`.
    fn choice(&mut self, lexemes: &mut Lexemes, below: Rules) -> Part {
        let mut branches = Vec::new();
        loop {
            let (branch, more) = self.branch(lexemes, below);
            branches.push(branch);
            if !more {
                return Part::Choose(branches);
            }
        }
    }

    /// Reads a first mention, a recall or a word.
    fn part(&mut self, lexeme: &str) -> Part {
        let field = self.fields.get(lexeme.trim_matches(['[', ']', '<', '>']));
        match field {
            Some(&(table, _)) if lexeme.starts_with('[') => Part::Draw(table),
            Some(&(table, field)) if lexeme.starts_with('<') => Part::Recall { table, field },
            _ => Part::Word(self.token(lexeme)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// The tokens that can come first in some parts, given those that can follow them. Tokens that
    /// can begin two alternatives of a choice are noted as clashes.
    fn first(grammar: &StoryGrammar, parts: &[Part], follow: BTreeSet<u32>, clashes: &mut String) -> BTreeSet<u32> {
        let opening = |table: usize, field: usize| {
            let rows = grammar.tables[table].rows.iter();
            rows.map(|row| row.fields[field][0]).collect()
        };
        parts.iter().rev().fold(follow, |follow, part| match part {
            Part::Word(token) => BTreeSet::from([*token]),
            Part::Draw(table) => opening(*table, 0),
            Part::Recall { table, field } => opening(*table, *field),
            Part::Choose(branches) => {
                let mut seen = BTreeSet::new();
                for branch in branches {
                    for token in first(grammar, &branch.parts, follow.clone(), clashes) {
                        if !seen.insert(token) {
                            clashes.push_str(&grammar.text(&[token]));
                        }
                    }
                }
                seen
            }
        })
    }

    #[test]
    fn alternatives_begin_with_different_tokens() {
        let grammar = StoryGrammar::new();
        let mut clashes = String::new();
        first(&grammar, &grammar.story, BTreeSet::new(), &mut clashes);
        assert_eq!(clashes, "");
        for table in &grammar.tables {
            let names: BTreeSet<_> = table.rows.iter().map(|row| row.fields[0][0]).collect();
            assert_eq!(names.len(), table.rows.len());
        }
    }

    #[test]
    fn probabilities_sum_to_one() {
        fn check_sum(odds: impl Iterator<Item = (usize, f64)>) {
            assert!((odds.map(|(_, probability)| probability).sum::<f64>() - 1.0).abs() < 1e-12);
        }
        fn check(parts: &[Part]) {
            for part in parts {
                if let Part::Choose(branches) = part {
                    check_sum(branch_odds(branches));
                    branches.iter().for_each(|branch| check(&branch.parts));
                }
            }
        }
        let grammar = StoryGrammar::new();
        check(&grammar.story);
        for table in &grammar.tables {
            let deciders = table.given.map_or(1, |given| grammar.tables[given].rows.len());
            assert!(table.rows.iter().all(|row| row.weights.len() == deciders));
            (0..deciders).for_each(|row| check_sum(table.odds(&vec![row; grammar.tables.len()])));
        }
    }

    #[test]
    fn rows_are_drawn_once_and_before_they_are_recalled() {
        fn check(tables: &[Table], parts: &[Part], drawn: &mut BTreeSet<usize>) {
            for part in parts {
                match part {
                    Part::Word(_) => {}
                    Part::Draw(table) => {
                        assert!(tables[*table].given.is_none_or(|given| drawn.contains(&given)));
                        assert!(drawn.insert(*table));
                    }
                    Part::Recall { table, .. } => assert!(drawn.contains(table)),
                    Part::Choose(branches) => {
                        let before = drawn.clone();
                        check(tables, &branches[0].parts, drawn);
                        for branch in &branches[1..] {
                            let mut other = before.clone();
                            check(tables, &branch.parts, &mut other);
                            assert_eq!(&other, drawn);
                        }
                    }
                }
            }
        }
        let grammar = StoryGrammar::new();
        check(&grammar.tables, &grammar.story, &mut BTreeSet::new());
    }

    #[test]
    fn exact_expectations_match_sampled_ones() {
        let grammar = StoryGrammar::new();
        let (mut information, mut tokens) = (0.0, 0.0);
        for index in 0..200_000 {
            let story = grammar.story(11, index);
            information += story.information;
            tokens += story.tokens.len() as f64;
        }
        let entropy = information / tokens;
        assert!((0.5..0.9).contains(&entropy));
        assert!((entropy / grammar.entropy_per_token() - 1.0).abs() < 0.003);
        assert!((tokens / 200_000.0 / grammar.mean_story_length() - 1.0).abs() < 0.003);
    }

    /// Splits text as the regex `` ?[A-Za-z'-]+|[.,!?;:"]|\n`` would.
    fn split(text: &str) -> Vec<String> {
        let mut tokens = Vec::<String>::new();
        let mut in_word = false;
        for c in text.chars() {
            let letter = c.is_ascii_alphabetic() || "'-".contains(c);
            assert!(letter || " .,!?;:\"\n".contains(c), "{c:?} is of no token");
            match tokens.last_mut() {
                Some(word) if letter && in_word => word.push(c),
                _ => tokens.push(c.to_string()),
            }
            in_word = letter || c == ' ';
        }
        tokens
    }

    #[test]
    fn splitting_a_story_gives_its_tokens() {
        let grammar = StoryGrammar::new();
        for index in 0..5_000 {
            let story = grammar.story(3, index);
            let text = grammar.text(&story.tokens);
            let tokens = story.tokens.iter().map(|&token| grammar.text(&[token]));
            assert_eq!(split(&text), tokens.collect::<Vec<_>>());
            assert_eq!(text.find('\n'), Some(text.len() - 1));
        }
    }

    #[test]
    fn a_story_depends_on_its_seed_and_index_only() {
        let (grammar, again) = (StoryGrammar::new(), StoryGrammar::default());
        assert_eq!(grammar.vocabulary(), again.vocabulary());
        assert_eq!(grammar.story(5, 8), again.story(5, 8));
        for (seed, index) in [(5, 9), (6, 8), (8, 5)] {
            assert_ne!(grammar.story(5, 8), grammar.story(seed, index));
        }
    }

    #[test]
    fn a_bigram_model_misses_most_of_the_structure() {
        let grammar = StoryGrammar::new();
        let corpus = |seed, stories| -> Vec<usize> {
            let tokens = (0..stories).flat_map(|index| grammar.story(seed, index).tokens);
            tokens.map(|token| token as usize).collect()
        };
        let size = grammar.vocabulary().len();
        let mut counts = vec![vec![0.01; size]; size];
        for pair in corpus(1, 20_000).windows(2) {
            counts[pair[0]][pair[1]] += 1.0;
        }
        let totals: Vec<f64> = counts.iter().map(|row| row.iter().sum()).collect();
        let text = corpus(2, 5_000);
        let pairs = text.windows(2).map(|pair| (totals[pair[0]] / counts[pair[0]][pair[1]]).ln());
        let loss = pairs.sum::<f64>() / (text.len() - 1) as f64;
        assert!(loss > 1.8 * grammar.entropy_per_token(), "{loss} nats per token");
    }

    #[test]
    fn a_story_keeps_to_the_rows_it_drew() {
        let words = |row: &Row| -> BTreeSet<u32> {
            let fields = row.fields.iter().filter(|field| field.len() == 1);
            fields.map(|field| field[0]).collect()
        };
        let grammar = StoryGrammar::new();
        for index in 0..5_000 {
            let story = grammar.story(4, index).tokens;
            let text = grammar.text(&story);
            for table in &grammar.tables {
                let any: BTreeSet<u32> = table.rows.iter().flat_map(words).collect();
                let mut said: BTreeSet<u32> = story.iter().copied().collect();
                // "they" and "them" may also be the villagers or the wares.
                let vague = |&token: &u32| [" they", " them"].contains(&&*grammar.text(&[token]));
                said.retain(|token| any.contains(token) && !vague(token));
                assert!(table.rows.iter().any(|row| said.is_subset(&words(row))), "{text}");
            }
        }
    }

    #[test]
    fn no_story_is_longer_than_the_longest() {
        let grammar = StoryGrammar::new();
        let lengths = (0..50_000).map(|index| grammar.story(9, index).tokens.len());
        assert!(lengths.max() <= Some(grammar.longest_story()));
        assert!(grammar.longest_story() <= 128);
    }

    #[test]
    fn the_vocabulary_is_small_and_distinct() {
        let vocabulary = StoryGrammar::new().vocabulary();
        let distinct: BTreeSet<_> = vocabulary.iter().collect();
        assert_eq!(distinct.len(), vocabulary.len());
        assert!((250..=400).contains(&vocabulary.len()));
        assert!(vocabulary.iter().all(|token| split(token) == [token.as_str()]));
    }
}
