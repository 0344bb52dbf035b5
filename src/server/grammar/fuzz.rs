//! Random schemas and grammars, each of which is followed or refused, in time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

use super::{Grammar, Grammars};
use crate::inference::generation::scheduler::TokenFilter;
use crate::server::tools::ToolStyle;

/// Whether each is printed before it is compiled: what ends the process is the last one.
const SHOW: &str = "FIRECLAY_FUZZ_SHOW";
/// How many a long run has.
const COUNT: &str = "FIRECLAY_FUZZ_GRAMMARS";
/// The longest that one may take to compile, and the longest for the tokens of a step, however slow
/// the machine.
const COMPILE: Duration = Duration::from_secs(60);
const STEP: Duration = Duration::from_secs(10);
/// Tokens of each text.
const STEPS: usize = 24;

/// Numbers that only look random.
struct Random(u64);

impl Random {
    fn below(&mut self, most: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % most.max(1)
    }

    fn pick<'a, T>(&mut self, values: &'a [T]) -> &'a T {
        &values[self.below(values.len())]
    }

    fn often(&mut self, one_in: usize) -> bool {
        self.below(one_in) == 0
    }

    /// A count that is small most of the time.
    fn count(&mut self) -> usize {
        *self.pick(&[0, 1, 1, 2, 2, 3, 3, 4, 5, 7, 9, 30])
    }

    fn number(&mut self) -> Value {
        match self.below(8) {
            0 => json!(self.below(5)),
            1 => json!(-(self.below(1000) as i64)),
            2 => json!(self.below(1_000_000) as f64 / 700.0),
            3 => (*self.pick(&[u64::MAX, 1 << 53, 1 << 32, 1_000_000_000, 65_536, 1000])).into(),
            4 if self.often(200) => json!(i64::MIN),
            4 => json!(*self.pick(&[-9_007_199_254_740_993_i64, -1, 0])),
            5 if self.often(200) => json!(*self.pick(&[-1e308, 1e308])),
            5 => json!(*self.pick(&[1e-308, 0.1, 1e-9, 1e21, -0.0, -9e18])),
            _ => json!(self.below(40)),
        }
    }

    fn text(&mut self) -> String {
        match self.below(6) {
            0 => self.pick(&["", "a", "type", "$ref", "\u{0}\u{7f}", "é火🔥", "\"\\/", "</tool_call>"]).to_string(),
            1 => "x".repeat(self.below(200)),
            _ => format!("p{}", self.below(12)),
        }
    }

    fn pattern(&mut self) -> String {
        let parts = [
            "a",
            "b",
            ".",
            "\\d",
            "\\w",
            "\\s",
            "[a-z]",
            "[^\"]",
            "(",
            ")",
            "|",
            "*",
            "+",
            "?",
            "{2,5}",
            "{0,1000}",
            "{90}",
            "{1000000}",
            "^",
            "$",
            "\\b",
            "(?:",
            "(?i)",
            "(?=",
            "(?!",
            "\\1",
            "\\p{L}",
            "\\u00e9",
            "é",
            "🔥",
            "/",
            "\\",
            "[",
            "]",
            "\\\\",
            "\\/",
            "\n",
            "\"",
            "(a|b)*a(a|b){9}",
            "(a|b)*a(a|b){90}",
            "(x+x+)+y",
            "((a{30}){30}){30}",
            "[\\s\\S]",
        ];
        (0..1 + self.below(6)).map(|_| *self.pick(&parts)).collect()
    }

    /// Any value.
    fn value(&mut self, depth: usize) -> Value {
        match self.below(if depth == 0 { 5 } else { 7 }) {
            0 => Value::Null,
            1 => self.often(2).into(),
            2 => self.number(),
            3 | 4 => self.text().into(),
            5 => (0..self.count()).map(|_| self.value(depth - 1)).collect(),
            _ => (0..self.count()).map(|_| (self.text(), self.value(depth - 1))).collect(),
        }
    }

    fn schemas(&mut self, depth: usize) -> Value {
        (0..self.count().min(5)).map(|_| self.schema(depth)).collect()
    }

    fn named(&mut self, depth: usize) -> Value {
        (0..self.count()).map(|_| (self.text(), self.schema(depth))).collect()
    }

    /// A schema, which may be wrong.
    fn schema(&mut self, depth: usize) -> Value {
        if depth == 0 || self.often(12) {
            return match self.below(4) {
                0 => self.often(4).into(),
                1 => json!({ "$ref": self.reference() }),
                _ => json!({ "type": *self.pick(&["integer", "string", "boolean", "null", "number"]) }),
            };
        }
        let mut schema = Map::new();
        let kinds = ["object", "object", "array", "string", "number", "integer", "boolean", "null"];
        if !self.often(4) {
            let kind = if self.often(60) { "pot" } else { *self.pick(&kinds) };
            let kinds = json!([kind, *self.pick(&kinds)]);
            schema.insert("type".into(), if self.often(6) { kinds } else { kind.into() });
        }
        for _ in 0..1 + self.below(4) {
            let keys = [
                "properties",
                "properties",
                "required",
                "additionalProperties",
                "patternProperties",
                "minProperties",
                "maxProperties",
                "items",
                "prefixItems",
                "additionalItems",
                "minItems",
                "maxItems",
                "uniqueItems",
                "minLength",
                "maxLength",
                "pattern",
                "format",
                "minimum",
                "maximum",
                "exclusiveMinimum",
                "exclusiveMaximum",
                "multipleOf",
                "enum",
                "const",
                "anyOf",
                "oneOf",
                "allOf",
                "not",
                "if",
                "$ref",
                "$schema",
                "$id",
                "description",
                "default",
                "dependentRequired",
                "glaze",
                "x-guidance",
                "contains",
            ];
            let mut key = *self.pick(&keys);
            // Not followed, which is told at once.
            if ["uniqueItems", "not", "if", "contains", "dependentRequired", "oneOf", "$schema"].contains(&key)
                && !self.often(20)
            {
                key = "properties";
            }
            let value = match key {
                _ if self.often(60) => self.value(2),
                "properties" => self.named(depth - 1),
                "patternProperties" => {
                    (0..self.below(4)).map(|_| (self.pattern(), self.schema(depth - 1))).collect::<Map<_, _>>().into()
                }
                "required" | "dependentRequired" => (0..self.count()).map(|_| Value::from(self.text())).collect(),
                "prefixItems" | "anyOf" | "oneOf" | "allOf" => self.schemas(depth - 1),
                "minProperties" | "maxProperties" | "minItems" | "maxItems" | "minLength" | "maxLength" => {
                    if self.often(8) { self.number() } else { self.below(20).into() }
                }
                "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" | "multipleOf" => self.number(),
                "pattern" => self.pattern().into(),
                "format" => Value::from(*self.pick(&[
                    "date-time",
                    "email",
                    "uri",
                    "uuid",
                    "ipv6",
                    "duration",
                    "glaze",
                    "regex",
                ])),
                "enum" if self.often(30) => (0..self.below(9000)).map(|at| json!(format!("v{at}"))).collect(),
                "enum" => (0..self.count()).map(|_| self.value(2)).collect(),
                "const" | "default" | "x-guidance" => self.value(2),
                "$ref" => self.reference().into(),
                "$schema" => Value::from(*self.pick(&["http://json-schema.org/draft-07/schema#", "draft"])),
                "$id" | "description" | "glaze" => self.text().into(),
                "uniqueItems" => self.often(2).into(),
                _ => self.schema(depth - 1),
            };
            schema.insert(key.into(), value);
        }
        schema.into()
    }

    fn reference(&mut self) -> String {
        match self.below(8) {
            0 => "#".into(),
            1 => {
                (*self.pick(&["#/", "#/$defs", "http://example.org", "#a", "", "#/properties/p1", "#/$defs/d0/items"]))
                    .into()
            }
            _ => format!("#/$defs/d{}", self.below(6)),
        }
    }

    /// A schema with definitions, or one that is deep or large.
    fn whole_schema(&mut self) -> Value {
        let links = [
            |inner| json!({ "type": "object", "properties": { "a": inner }, "required": ["a"] }),
            |inner| json!({ "type": "array", "items": inner }),
            |inner| json!({ "anyOf": [inner, { "type": "null" }] }),
            |inner| json!({ "allOf": [inner, { "type": ["object", "integer"] }] }),
            |inner| json!({ "oneOf": [{ "type": "array", "items": inner }, { "type": "string" }] }),
            |inner| json!({ "type": "object", "additionalProperties": inner, "minProperties": 1 }),
        ];
        match self.below(16) {
            0 => {
                let (length, link) = (self.below(320), *self.pick(&links));
                let definition =
                    |at: usize| (format!("d{at}"), link(json!({ "$ref": format!("#/$defs/d{}", at + 1) })));
                let mut definitions: Map<String, Value> = (0..length).map(definition).collect();
                let last = if self.often(2) { json!({ "$ref": "#/$defs/d0" }) } else { json!({ "type": "integer" }) };
                definitions.insert(format!("d{length}"), last);
                json!({ "$ref": "#/$defs/d0", "$defs": definitions })
            }
            1 => (0..self.below(640)).fold(self.schema(2), |inner, _| (self.pick(&links))(inner)),
            2 => {
                let count = self.below(1500);
                let named: Map<String, Value> = (0..count).map(|at| (format!("n{at}"), self.schema(1))).collect();
                let required: Value = (0..count).filter(|_| self.often(3)).map(|at| json!(format!("n{at}"))).collect();
                let more = self.often(2);
                json!({ "type": "object", "properties": named, "required": required, "additionalProperties": more })
            }
            3 => {
                let (count, each) = (1 + self.below(12), self.below(1200));
                let values = |which: usize| (0..each).map(|at| json!(format!("{which}v{at}"))).collect::<Value>();
                let named: Map<String, Value> =
                    (0..count).map(|at| (format!("e{at}"), json!({ "enum": values(at) }))).collect();
                json!({ "type": "object", "properties": named })
            }
            4 => {
                let options = |random: &mut Self| (0..random.below(60)).map(|_| random.schema(1)).collect::<Value>();
                json!({ "allOf": [{ "anyOf": options(self) }, { "anyOf": options(self) }, { "oneOf": options(self) }] })
            }
            _ => {
                let mut schema = self.schema(4);
                if let Value::Object(fields) = &mut schema {
                    let definitions: Map<String, Value> = (0..6).map(|at| (format!("d{at}"), self.schema(3))).collect();
                    fields.insert("$defs".into(), definitions.into());
                }
                schema
            }
        }
    }

    /// The right side of a rule.
    fn expansion(&mut self, depth: usize) -> String {
        let operators = ["", "", "", "?", "*", "+", "{2,3}", "{0,1000}", "{9999999}", "~2", "~0..3"];
        let part = |random: &mut Self| {
            let atom = match random.below(if depth == 0 { 5 } else { 9 }) {
                0 => format!("r{}", random.below(6)),
                1 => format!("T{}", random.below(4)),
                2 => json!(random.text()).to_string(),
                3 => format!("/{}/", random.pattern().replace('/', "\\/")),
                4 => random
                    .pick(&[
                        "\"a\"..\"z\"",
                        "<[3]>",
                        "<[1-9]>",
                        "<end>",
                        "@r1",
                        "%regex {\"substring_chars\": \"pots\"}",
                    ])
                    .to_string(),
                5 => format!("({})", random.expansion(depth - 1)),
                6 => format!("[{}]", random.expansion(depth - 1)),
                7 => format!("%json {}", random.schema(2)),
                _ => format!("%lark {{ start: {} }}", random.expansion(depth - 1)),
            };
            format!("{}{atom}{}", if random.often(90) { "~" } else { "" }, random.pick(&operators))
        };
        let parts: Vec<String> = (0..1 + self.below(4)).map(|_| part(self)).collect();
        parts.join(*self.pick(&[" ", " ", " ", " | ", " | ", " & "]))
    }

    fn lark(&mut self) -> String {
        let chain = |count: usize, name: &str| -> String {
            (0..count).map(|at| format!("{name}{at}: \"a\" {name}{} | \"b\"\n", at + 1)).collect()
        };
        match self.below(12) {
            0 => format!("start: {}\"a\"{}\n", "(".repeat(self.below(4500)), ")".repeat(self.below(4500))),
            1 => {
                let count = self.below(4500);
                format!("start: c0\n{}c{count}: \"x\"\n", chain(count, "c"))
            }
            2 => {
                let count = self.below(4500);
                format!("start: C0\n{}C{count}: \"x\"\n", chain(count, "C"))
            }
            3 => self.pattern().repeat(self.below(200)),
            _ => {
                let mut grammar = format!("start: {}\n", self.expansion(3));
                for at in 0..6 {
                    grammar.push_str(&format!("r{at}: {}\n", self.expansion(2)));
                }
                for at in 0..4 {
                    let token = if self.often(3) {
                        self.expansion(1)
                    } else {
                        format!("/{}/", self.pattern().replace('/', "\\/"))
                    };
                    grammar.push_str(&format!("T{at}: {token}\n"));
                }
                if self.often(6) {
                    grammar.push_str("%ignore /[ \\t]+/\n");
                }
                grammar
            }
        }
    }

    /// The same text with some of it cut, doubled or changed.
    fn mutated(&mut self, text: &str) -> String {
        let mut letters: Vec<char> = text.chars().take(4000).collect();
        for _ in 0..1 + self.below(4) {
            let (at, other) = (self.below(letters.len()), self.below(letters.len()));
            let (begin, end) = (at.min(other), at.max(other).min(at.min(other) + 40));
            match self.below(3) {
                0 => drop(letters.drain(begin..end)),
                1 => {
                    let again = letters[begin..end].to_vec();
                    letters.splice(begin..begin, again);
                }
                _ => letters
                    .insert(begin, *self.pick(&['(', ')', '"', '/', '\\', ':', '{', '}', '|', '~', '&', '\n', 'é'])),
            }
        }
        letters.into_iter().collect()
    }

    fn grammar(&mut self) -> Grammar {
        match self.below(10) {
            0..=4 => {
                let schema = self.whole_schema();
                let text = if self.often(8) { self.mutated(&schema.to_string()) } else { String::new() };
                Grammar::Json(serde_json::from_str(&text).unwrap_or(schema))
            }
            5 | 6 => {
                let grammar = self.lark();
                Grammar::Lark(if self.often(4) { self.mutated(&grammar) } else { grammar })
            }
            7 => Grammar::Regex(self.pattern()),
            8 => Grammar::Choice((0..1 + self.below(40)).map(|_| self.text()).collect()),
            _ => {
                let style = *self.pick(&[ToolStyle::Tagged, ToolStyle::Listed, ToolStyle::Bare]);
                let tools = (0..1 + self.below(3)).map(|at| (format!("tool{at}"), self.whole_schema())).collect();
                let otherwise = match self.below(4) {
                    0 => None,
                    1 => Some(Grammar::Regex(self.pattern())),
                    _ => Some(Grammar::Json(self.whole_schema())),
                };
                Grammar::Calls { style, tools, several: self.often(2), otherwise: otherwise.map(Box::new) }
            }
        }
    }
}

/// What came of a run.
#[derive(Default, Debug)]
struct Outcome {
    refused: usize,
    reasons: BTreeMap<String, usize>,
    /// Outputs that exceeded a limit.
    broken: usize,
    longest_compile: Duration,
    longest_step: Duration,
    slow: Vec<(u64, Duration)>,
}

/// A vocabulary of bytes, some tokens of JSON, and words that are made up.
fn grammars(words: usize) -> Arc<Grammars> {
    let mut tokens: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    for text in ["{\"", "\": ", "\", \"", "true", "false", "null", "</tool_call>", "the ", "p1", "aaaa", "0000", "[[[["]
    {
        tokens.push(text.as_bytes().to_vec());
    }
    let mut random = Random(3);
    let letters = b" eeeettaaooiinnsshhrrddllccuummwwffggyyppbbvvkkxqjzETAOIN0123456789_-,.:\"{}";
    let mut word = || (0..2 + random.below(9)).map(|_| *random.pick(letters)).collect::<Vec<u8>>();
    let words: BTreeSet<Vec<u8>> = (0..words).map(|_| word()).collect();
    tokens.extend(words);
    let end = tokens.len() as u32;
    tokens.push(b"<end>".to_vec());
    Arc::new(Grammars::new(&tokens, tokens.len(), &[end]))
}

fn run(seeds: std::ops::Range<u64>, words: usize) -> Outcome {
    let grammars = grammars(words);
    let mut outcome = Outcome::default();
    let show = std::env::var_os(SHOW).is_some();
    for seed in seeds {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5eed);
        let grammar = random.grammar();
        if show {
            eprintln!("{seed}: {grammar:?}");
        }
        let begin = Instant::now();
        let mut receiver = grammars.ask(grammar).expect("room");
        let compiled = loop {
            match receiver.try_recv() {
                Ok(compiled) => break compiled,
                Err(_) => std::thread::sleep(Duration::from_micros(100)),
            }
            assert!(begin.elapsed() < COMPILE, "{seed}: no end of it");
        };
        let time = begin.elapsed();
        outcome.longest_compile = outcome.longest_compile.max(time);
        if time > Duration::from_millis(500) {
            outcome.slow.push((seed, time));
        }
        let mut filter = match compiled {
            Ok(filter) => filter,
            Err(failure) => {
                let reason = failure.to_string();
                assert_eq!(failure.exit_code(), 2, "{seed}: {reason}");
                let inside =
                    ["panic", "backtrace", "RUST_", ".rs:", "<non-verbose"].iter().any(|mark| reason.contains(mark));
                assert!(!inside && reason.len() < 400, "{seed}: {reason}");
                outcome.refused += 1;
                *outcome.reasons.entry(reason.chars().take(32).collect()).or_default() += 1;
                continue;
            }
        };
        for _ in 0..STEPS {
            let begin = Instant::now();
            let allowed = filter.allowed();
            let time = begin.elapsed();
            outcome.longest_step = outcome.longest_step.max(time);
            assert!(time < STEP, "{seed}: {time:?}");
            let Ok(allowed) = allowed else {
                outcome.broken += 1;
                break;
            };
            let tokens: Vec<u32> =
                (0..allowed.len() as u32 * 32).filter(|at| allowed[*at as usize / 32] >> (at % 32) & 1 == 1).collect();
            match filter.push(*random.pick(&tokens)) {
                Ok(false) => {}
                Ok(true) => break,
                Err(_) => {
                    outcome.broken += 1;
                    break;
                }
            }
        }
    }
    outcome
}

#[test]
fn random_schemas_and_grammars_are_followed_or_refused() {
    let outcome = run(0..300, 0);
    assert!((30..270).contains(&outcome.refused), "{outcome:?}");
}

/// The long form: `FIRECLAY_FUZZ_GRAMMARS=20000 cargo test --lib -- --ignored --nocapture
/// many_random_schemas`.
#[test]
#[ignore = "takes minutes"]
fn many_random_schemas_and_grammars_are_followed_or_refused() {
    let count = std::env::var(COUNT).ok().and_then(|count| count.parse().ok()).unwrap_or(2000);
    let outcome = run(1000..1000 + count, 30_000);
    eprintln!("{count} grammars: {outcome:?}; {}", memory());
}

/// Memory of this process at its most, as Linux tells it.
fn memory() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    status.lines().find(|line| line.starts_with("VmHWM")).unwrap_or("unknown").to_string()
}

/// What grammars take that are as large as is let in, with a vocabulary like those of large models.
#[test]
#[ignore = "prints times"]
fn the_largest_grammars_that_are_let_in_are_timed() {
    let begin = Instant::now();
    let grammars = grammars(130_000);
    let compile = |grammar| grammars.ask(grammar).expect("room").blocking_recv().expect("an answer");
    compile(Grammar::Json(json!({}))).map(drop).expect("a grammar");
    eprintln!("first: {:?}, {}", begin.elapsed(), memory());
    let count =
        |name: &str, otherwise: usize| std::env::var(name).ok().and_then(|n| n.parse().ok()).unwrap_or(otherwise);
    let (names, values) = (count("NAMES", 1000), count("VALUES", 5000));
    let named = |schema: Value| (0..names).map(|at| (format!("property{at}"), schema.clone())).collect::<Map<_, _>>();
    let choices = |which: usize, count: usize| {
        (0..count).map(|at| format!("{which}value{}", at * 7919 % 100_000)).collect::<Vec<_>>()
    };
    let enums =
        (0..10).map(|at| (format!("e{at}"), json!({ "enum": choices(at, values / 10) }))).collect::<Map<_, _>>();
    let integer = json!({ "type": "integer", "minimum": 3, "maximum": 70_000 });
    let pattern = json!({ "type": "string", "pattern": "^[a-z]+(-[a-z0-9]{2,9})*$" });
    let required: Vec<String> = (0..names).map(|at| format!("property{at}")).collect();
    let nested = |inner: Value| json!({ "type": "object", "properties": { "a": inner } });
    for (name, grammar) in [
        ("optional properties", Grammar::Json(json!({ "type": "object", "properties": named(integer.clone()) }))),
        (
            "required properties",
            Grammar::Json(json!({ "type": "object", "properties": named(integer), "required": required })),
        ),
        (
            "one of each property",
            Grammar::Json(json!({
                "type": "object", "properties": named(json!({})), "additionalProperties": false, "maxProperties": 1,
            })),
        ),
        ("strings with patterns", Grammar::Json(json!({ "type": "object", "properties": named(pattern) }))),
        ("an enum", Grammar::Json(json!({ "enum": choices(0, values) }))),
        ("ten enums", Grammar::Json(json!({ "type": "object", "properties": enums }))),
        ("choices", Grammar::Choice(choices(0, values))),
        ("deep", Grammar::Json((0..398).fold(json!({}), |inner, _| nested(inner)))),
        (
            "many of anyOf",
            Grammar::Json(json!({ "anyOf": (0..999).map(|at| json!({
            "type": "object", "properties": { format!("a{at}"): { "type": "string" } }, "required": [format!("a{at}")],
        })).collect::<Vec<_>>() })),
        ),
        (
            "many of oneOf",
            Grammar::Json(json!({ "oneOf": (0..499).map(|at| json!({
            "type": "object", "properties": { "kind": { "const": format!("a{at}") }, format!("a{at}"): {} },
            "required": ["kind"],
        })).collect::<Vec<_>>() })),
        ),
        (
            "products",
            Grammar::Json(json!({ "allOf": (0..3).map(|which| json!({ "anyOf": (0..60).map(|at| json!({
            "type": "object", "properties": { format!("p{which}x{at}"): { "type": "integer" } },
        })).collect::<Vec<_>>() })).collect::<Vec<_>>() })),
        ),
        (
            "a large object in each of many",
            Grammar::Json(json!({
                "allOf": [
                    { "anyOf": vec![json!({ "type": ["object", "string"] }); 900] },
                    { "type": "object", "properties": named(json!({})) },
                ],
            })),
        ),
        (
            "patterns combined",
            Grammar::Json(json!({ "allOf": (0..2).map(|which| json!({ "anyOf": (0..200).map(|at| json!({
                "type": "string", "pattern": format!("^(a|b)*{}(a|b){{{},9}}$", ["a", "b"][which], at % 7),
            })).collect::<Vec<_>>() })).collect::<Vec<_>>() })),
        ),
        (
            "patterns of names in each of many",
            Grammar::Json(json!({
                "allOf": [
                    { "anyOf": (0..900).map(|at| json!({
                        "type": "object", "properties": { format!("q{at}"): {} },
                    })).collect::<Vec<_>>() },
                    { "type": "object", "patternProperties": (b'a'..=b'p').map(|letter| {
                        (format!("^{}(a|b)*a(a|b){{7}}$", letter as char), json!({}))
                    }).collect::<Map<_, _>>() },
                ],
            })),
        ),
        ("a long string", Grammar::Json(json!({ "type": "string", "minLength": 5, "maxLength": 100_000 }))),
        ("an ambiguous grammar", Grammar::Lark("start: a\na: a a | /[a-z]/ | /[a-z]+/\n".into())),
        ("an exponential expression", Grammar::Regex("(a|b|[a-z ])*a[a-z ]{200}".into())),
        ("a long expression", Grammar::Regex("[a-z]{3,9}(-|_|\\d+)?".repeat(700))),
        (
            "substrings",
            Grammar::Lark(format!(
                "start: %regex {{ \"substring_chars\": {:?} }}\n",
                "the pots are fired ".repeat(3000)
            )),
        ),
    ] {
        let begin = Instant::now();
        let compiled = compile(grammar);
        let time = begin.elapsed();
        let mut random = Random(7);
        let (mut steps, mut longest, mut end) = (Vec::new(), Duration::ZERO, String::new());
        match compiled {
            Err(failure) => end = failure.to_string(),
            Ok(mut filter) => {
                while steps.len() < 200 {
                    let begin = Instant::now();
                    let allowed = filter.allowed();
                    steps.push(begin.elapsed());
                    longest = longest.max(begin.elapsed());
                    let allowed = match allowed {
                        Ok(allowed) => allowed,
                        Err(failure) => {
                            end = failure.to_string();
                            break;
                        }
                    };
                    let tokens: Vec<u32> = (0..allowed.len() as u32 * 32)
                        .filter(|at| allowed[*at as usize / 32] >> (at % 32) & 1 == 1)
                        .collect();
                    if !matches!(filter.push(*random.pick(&tokens)), Ok(false)) {
                        break;
                    }
                }
            }
        }
        let sum: Duration = steps.iter().sum();
        eprintln!(
            "{name}: {time:?}, {} steps of {:?} to {longest:?}, {}; {end}",
            steps.len(),
            sum / steps.len().max(1) as u32,
            memory()
        );
    }
}
