//! The pre-tokenizer patterns of byte-level BPE, by their names in GGUF files
//! (`tokenizer.ggml.pre`).
//!
//! Each equals that of the `tokenizer.json` of the models it is named for: expressions are applied
//! in order, and each match is a piece of its own.

/// An expression whose matches are pieces.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rule(pub(super) &'static str);

/// A pre-tokenizer, with related settings.
#[derive(Clone, Debug)]
pub(super) struct Pattern {
    /// None for GPT-2's own.
    pub(super) rules: &'static [Rule],
    /// Whether a piece that is a token is kept whole, whatever the merges.
    pub(super) whole_words: bool,
    /// Whether BOS is added if the file does not say.
    pub(super) adds_begin: bool,
    /// Whether text is normalized to NFC.
    pub(super) normalizes: bool,
}

const DEFAULT: &str = "default";

pub(super) const GPT2: Rule = Rule(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+");
pub(super) const DIGIT: Rule = Rule(r"\p{N}");
pub(super) const DIGITS: Rule = Rule(r"\p{N}+");
const THREE_DIGITS: Rule = Rule("[0-9][0-9][0-9]");
const LINE_END: Rule = Rule(r"[\r\n]");
/// Chinese, Japanese and Korean.
const IDEOGRAPHS: Rule = Rule("[一-龥ࠀ-一가-퟿]+");
const LLAMA3: Rule = Rule(concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
));
const QWEN2: Rule = Rule(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
const TEKKEN: Rule = Rule(concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
));
const GPT4O: Rule = Rule(concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
));
/// Letters of scripts with case.
const CASED: Rule = Rule(r"\s?[\p{Lu}\p{Ll}\p{Lt}]+");
const DEEPSEEK_MARKS: Rule = Rule(r"\s?[!-/:-~！-／：-～‘-‟　-。]+");
const DEEPSEEK3: Rule = Rule(concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"##,
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
));

/// Names of equal patterns, and their rules.
const PATTERNS: &[(&[&str], &[Rule])] = &[
    (&[DEFAULT], &[Rule(r"[\p{P}\$\+<=>\^~\|]+"), GPT2, DIGITS, THREE_DIGITS]),
    (&["gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "mpt", "olmo", "jais"], &[]),
    (&["llama-bpe", "llama3", "llama-v3", "falcon3", "dbrx", "smaug-bpe"], &[LLAMA3]),
    (&["qwen2", "deepseek-r1-qwen", "stablelm2"], &[QWEN2]),
    (&["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"], &[DIGIT, GPT2]),
    (&["tekken"], &[TEKKEN]),
    (&["gpt-4o", "llama4"], &[GPT4O]),
    (&["falcon"], &[Rule(r"[\p{P}\$\+<=>\^~\|`]+"), GPT2, THREE_DIGITS]),
    (&["deepseek-llm"], &[LINE_END, CASED, DEEPSEEK_MARKS, Rule(r"\s+$"), IDEOGRAPHS, DIGITS]),
    (&["deepseek-coder"], &[LINE_END, Rule(r"\s?\p{L}+"), Rule(r"\s?\p{P}+"), IDEOGRAPHS, DIGIT]),
    (&["deepseek-v3"], &[Rule(r"\p{N}{1,3}"), Rule("[一-龥぀-ゟ゠-ヿ]+"), DEEPSEEK3]),
];

impl Pattern {
    /// The name of the pattern that cuts by these rules, with the other settings that go with it.
    pub(super) fn name_of(rules: &[String], whole_words: bool, normalizes: bool) -> Option<&'static str> {
        // Those of GPT-2 are what ByteLevel has of its own.
        let is = |known: &[Rule]| match known {
            [] => rules == [GPT2.0],
            known => known.iter().map(|rule| rule.0).eq(rules.iter().map(String::as_str)),
        };
        let names = PATTERNS.iter().filter(|(_, known)| is(known)).flat_map(|(names, _)| names.iter());
        names.copied().find(|name| {
            let (pattern, _) = Self::named(Some(name));
            pattern.whole_words == whole_words && pattern.normalizes == normalizes
        })
    }

    /// The pattern of a name, and the assumption if it is missing or unknown.
    pub(super) fn named(name: Option<&str>) -> (Self, Option<String>) {
        let find = |name: &str| PATTERNS.iter().find(|(names, _)| names.contains(&name)).map(|(_, rules)| *rules);
        let (rules, assumed) = match (name, name.and_then(find)) {
            (_, Some(rules)) => (rules, None),
            (name, None) => {
                let why = name.map_or("names no pre-tokenizer pattern".into(), |name| {
                    format!("has the unknown pre-tokenizer pattern '{name}'")
                });
                let rules = find(DEFAULT).unwrap_or_default();
                (rules, Some(format!("the tokenizer {why}: assuming '{DEFAULT}', which may give other tokens")))
            }
        };
        let is = |names: &[&str]| name.is_some_and(|name| names.contains(&name));
        let pattern = Self {
            rules,
            whole_words: is(&["llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"]),
            adds_begin: is(&["llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"]),
            normalizes: is(&["qwen2"]),
        };
        (pattern, assumed)
    }
}
