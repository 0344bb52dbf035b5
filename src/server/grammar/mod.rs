//! Token-level grammars, which constrain output to a JSON schema, a tool call, a choice, or a given
//! grammar.
//!
//! Grammars come from untrusted clients: they are checked before compilation, compiled once per
//! request on separate threads, and limited while they are applied.

mod bounds;
mod compilers;
#[cfg(test)]
mod fuzz;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory, regex_to_lark};
use serde_json::{Value, json};
use tokio::sync::oneshot;

use self::bounds::{Counts, pass_over_formats};
use self::compilers::Compilers;
use super::tools::ToolStyle;
use crate::failure::Failure;
use crate::inference::generation::scheduler::TokenFilter;

/// Limits of a compiled grammar and its sequences; see `llguidance` for their meanings.
const LIMITS: ParserLimits = ParserLimits {
    max_items_in_row: 2_000,
    initial_lexer_fuel: 1_000_000,
    step_lexer_fuel: 200_000,
    step_max_items: 50_000,
    // About a KiB each, for all sequences of a request.
    max_lexer_states: 50_000,
    max_grammar_size: 200_000,
    precompute_large_lexemes: true,
    // They would be sent to the client.
    verbose_errors: false,
};

/// Microseconds that a request's grammar may take, in addition to those per token: the device waits
/// for it.
const SPARE: i64 = 2_000_000;
/// Microseconds per token.
const FOR_A_TOKEN: i64 = 5_000;

/// Maximum bytes of a reason.
const REASON_BYTES: usize = 300;

/// An output constraint.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Grammar {
    /// JSON of a schema.
    Json(Value),
    /// A regular expression for the whole output.
    Regex(String),
    /// One of these strings.
    Choice(Vec<String>),
    /// A Lark grammar.
    Lark(String),
    /// A tool call, given the tools' names and the schemas of their arguments.
    Calls {
        style: ToolStyle,
        tools: Vec<(String, Value)>,
        /// Whether several calls are allowed.
        several: bool,
        /// The alternative to calls; not calls, and not a Lark grammar.
        otherwise: Option<Box<Grammar>>,
    },
}

impl Grammar {
    /// The constraint in the compiler's form, if it is within limits.
    fn bounded(self) -> Result<TopLevelGrammar, Failure> {
        let mut counts = Counts::default();
        Ok(match self {
            Self::Json(schema) => TopLevelGrammar::from_json_schema(checked(schema, &mut counts)?),
            Self::Lark(grammar) => {
                counts.lark(&grammar)?;
                TopLevelGrammar::from_lark(grammar)
            }
            Self::Calls { style, tools, several, otherwise } => {
                let call = checked(style.schema(tools), &mut counts)?;
                let otherwise = otherwise.map(|other| other.rule("answer", &mut counts)).transpose()?;
                TopLevelGrammar::from_lark(style.grammar(&call, several, otherwise.as_deref()))
            }
            whole @ (Self::Regex(_) | Self::Choice(_)) => TopLevelGrammar::from_lark(whole.rule("start", &mut counts)?),
        })
    }

    /// A rule in Lark's syntax.
    fn rule(self, name: &str, counts: &mut Counts) -> Result<String, Failure> {
        match self {
            Self::Json(schema) => Ok(format!("{name}: %json {}\n", checked(schema, counts)?)),
            Self::Regex(pattern) => {
                counts.pattern(&pattern)?;
                // The whole output has to match anyway.
                let pattern = pattern.strip_prefix('^').unwrap_or(&pattern);
                let escaped = |text: &str| text.bytes().rev().take_while(|byte| *byte == b'\\').count() % 2 == 1;
                let pattern = pattern.strip_suffix('$').filter(|rest| !escaped(rest)).unwrap_or(pattern);
                match pattern.is_empty() {
                    true => Ok(format!("{name}: \"\"\n")),
                    false => Ok(format!("{name}: /{}/\n", regex_to_lark(pattern, ""))),
                }
            }
            Self::Choice(choices) => {
                counts.choices(&choices)?;
                // JSON leaves one control character unescaped that Lark strings cannot contain.
                let quoted = |choice: &String| Value::from(choice.as_str()).to_string().replace('\u{7F}', "\\u007f");
                let choices: Vec<String> = choices.iter().map(quoted).collect();
                Ok(format!("{name}: CHOICE\nCHOICE: {}\n", choices.join(" | ")))
            }
            Self::Lark(_) | Self::Calls { .. } => Err(Failure::usage("it cannot be combined with tool calls")),
        }
    }
}

/// A schema within limits, ready to compile.
fn checked(mut schema: Value, counts: &mut Counts) -> Result<Value, Failure> {
    counts.schema(&schema)?;
    pass_over_formats(&mut schema);
    Ok(one_line(schema))
}

/// A schema without whitespace, except where Python's `json.dumps` puts it.
fn one_line(mut schema: Value) -> Value {
    if schema == Value::Bool(true) {
        schema = json!({});
    }
    if let Value::Object(fields) = &mut schema {
        let spaces = json!({ "whitespace_flexible": false, "item_separator": ", ", "key_separator": ": " });
        fields.insert("x-guidance".into(), spaces);
    }
    schema
}

/// Compiles grammars for a model's tokens.
pub(super) struct Grammars {
    token_bytes: Vec<Vec<u8>>,
    stop_tokens: Vec<u32>,
    /// 32-bit words of a token mask.
    words: usize,
    /// Created for the first grammar: a large vocabulary takes a while.
    factory: OnceLock<Result<ParserFactory, String>>,
    compilers: Arc<Compilers>,
}

/// The queue of grammars is full.
#[derive(Debug)]
pub(super) struct Full;

/// A filter, or an error.
pub(super) type Compiled = Result<GrammarFilter, Failure>;

impl Grammars {
    pub(super) fn new(token_bytes: &[Vec<u8>], vocabulary: usize, stop_tokens: &[u32]) -> Self {
        // Tokens without a row in the model are never generated.
        let mut token_bytes = token_bytes.to_vec();
        token_bytes.resize(vocabulary, Vec::new());
        let mut stop_tokens: Vec<u32> =
            stop_tokens.iter().copied().filter(|end| (*end as usize) < vocabulary).collect();
        if stop_tokens.is_empty() {
            // One that the model lacks: output then ends when it is complete.
            stop_tokens.push(token_bytes.len() as u32);
            token_bytes.push(Vec::new());
        }
        // Stop tokens are not part of the text.
        for end in &stop_tokens {
            if let Some(bytes) = token_bytes.get_mut(*end as usize) {
                *bytes = [&[TokTrie::SPECIAL_TOKEN_MARKER][..], format!("<end {end}>").as_bytes()].concat();
            }
        }
        Self {
            token_bytes,
            stop_tokens,
            words: vocabulary.div_ceil(32),
            factory: OnceLock::new(),
            compilers: Compilers::new(),
        }
    }

    fn factory(&self) -> Result<&ParserFactory, Failure> {
        let made = self.factory.get_or_init(|| {
            let info = TokRxInfo::new(self.token_bytes.len() as u32, self.stop_tokens[0]);
            let trie = TokTrie::from(&info, &self.token_bytes).with_eos_tokens(&self.stop_tokens);
            let tokens: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
            let mut factory = ParserFactory::new(&tokens, InferenceCapabilities::default(), &[])
                .map_err(|error| error.to_string())?;
            factory.quiet();
            *factory.limits_mut() = LIMITS;
            Ok(factory)
        });
        made.as_ref().map_err(|reason| Failure::new(format!("no grammars for this tokenizer: {reason}")))
    }

    /// Compiles a grammar on a separate thread. The caller must call [`mend`](Self::mend) at
    /// intervals while it waits.
    ///
    /// # Errors
    /// If too many are waiting.
    pub(super) fn ask(self: &Arc<Self>, grammar: Grammar) -> Result<oneshot::Receiver<Compiled>, Full> {
        let grammars = Arc::clone(self);
        self.compilers.ask(Box::new(move || grammars.compile(grammar)))
    }

    /// Gives up on grammars that take too long.
    pub(super) fn mend(&self) {
        self.compilers.mend();
    }

    /// A filter for a grammar. Needs a compiler thread's stack.
    fn compile(&self, grammar: Grammar) -> Compiled {
        let factory = self.factory()?;
        let compiled = catch_unwind(AssertUnwindSafe(|| {
            let mut matcher = Matcher::new(factory.create_parser(grammar.bounded()?));
            if let Some(reason) = matcher.get_error() {
                return Err(told(&reason));
            }
            // A grammar without a first token is useless.
            matcher.compute_mask().map_err(|error| told(&error.to_string()))?;
            Ok(GrammarFilter { matcher, words: self.words, spare: Arc::new(SPARE.into()) })
        }));
        compiled.unwrap_or_else(|_| Err(told("panic")))
    }
}

/// A compiler's error, shortened and without internals.
fn told(reason: &str) -> Failure {
    const LIMIT: [&str; 7] = ["too big", "too large", "too many", "fuel", "limit", "level exceeded", "too complex"];
    let reason = reason.split("\n<").next().unwrap_or_default().trim();
    if reason.starts_with("panic") || reason.is_empty() {
        return Failure::usage("it cannot be compiled to a grammar");
    }
    if LIMIT.iter().any(|mark| reason.contains(mark)) {
        return Failure::usage("it is too large: its grammar exceeds the limit of a request");
    }
    let end = (0..=REASON_BYTES.min(reason.len())).rev().find(|end| reason.is_char_boundary(*end)).unwrap_or(0);
    Failure::usage(format!("{}{}", &reason[..end], if end < reason.len() { ".." } else { "" }))
}

/// Constrains a sequence to a grammar.
pub(super) struct GrammarFilter {
    matcher: Matcher,
    words: usize,
    /// Microseconds left for all sequences of the request.
    spare: Arc<AtomicI64>,
}

impl GrammarFilter {
    /// A filter for another sequence of the same request. Both share their lexer states.
    pub(super) fn again(&self) -> Self {
        Self { matcher: self.matcher.clone(), words: self.words, spare: Arc::clone(&self.spare) }
    }

    /// Runs a part of a step, if the next one is still within the limit.
    fn timed<T>(&mut self, part: impl FnOnce(&mut Self) -> Result<T, Failure>) -> Result<T, Failure> {
        let begin = Instant::now();
        let done = part(self)?;
        let took = i64::try_from(begin.elapsed().as_micros()).unwrap_or(i64::MAX);
        // One thread runs the steps of all sequences.
        let left = self.spare.load(Ordering::Relaxed).saturating_sub(took).saturating_add(FOR_A_TOKEN / 2).min(SPARE);
        self.spare.store(left, Ordering::Relaxed);
        if left < 0 { Err(Failure::usage("the grammar takes too long")) } else { Ok(done) }
    }
}

impl TokenFilter for GrammarFilter {
    fn allowed(&mut self) -> Result<Vec<u32>, Failure> {
        self.timed(|filter| {
            let mask = filter.matcher.compute_mask_or_eos().map_err(|error| told(&error.to_string()))?;
            let mut words: Vec<u32> = mask.as_slice().iter().copied().take(filter.words).collect();
            words.resize(filter.words, 0);
            if words.iter().all(|word| *word == 0) {
                return Err(Failure::usage("the grammar allows none of the model's tokens"));
            }
            Ok(words)
        })
    }

    fn push(&mut self, token: u32) -> Result<bool, Failure> {
        self.timed(|filter| {
            filter.matcher.consume_token(token).map_err(|error| told(&error.to_string()))?;
            Ok(filter.matcher.is_stopped())
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use fireclay_datasets::{Tokenizer, TokenizerKind};
    use serde_json::Map;

    use super::*;

    /// What a filter accepts of a text, byte by byte, and whether it is complete.
    fn read(filter: &mut dyn TokenFilter, tokenizer: &Tokenizer, text: &str) -> Result<bool, String> {
        let mut complete = false;
        for (at, token) in tokenizer.encode(text).expect("bytes").into_iter().enumerate() {
            let allowed = filter.allowed().map_err(|failure| failure.to_string())?;
            if allowed[token as usize / 32] >> (token % 32) & 1 == 0 {
                return Err(text[..at].to_string());
            }
            complete = filter.push(token).map_err(|failure| failure.to_string())?;
        }
        Ok(complete)
    }

    fn bytes() -> (Tokenizer, Arc<Grammars>) {
        let tokenizer = Tokenizer::train(TokenizerKind::Byte, "").expect("a tokenizer");
        let grammars = Grammars::new(&tokenizer.token_bytes(), 300, &[]);
        (tokenizer, Arc::new(grammars))
    }

    fn compiled(grammars: &Arc<Grammars>, grammar: Grammar) -> Compiled {
        grammars.ask(grammar).expect("room").blocking_recv().expect("an answer")
    }

    /// What a grammar accepts of a text.
    fn follow(grammar: &Grammar, text: &str) -> Result<bool, String> {
        let (tokenizer, grammars) = bytes();
        read(&mut compiled(&grammars, grammar.clone()).expect("a grammar"), &tokenizer, text)
    }

    /// Why a grammar is refused as the client's error, and how long that takes.
    fn refused(grammar: Grammar) -> (String, Duration) {
        let (_, grammars) = bytes();
        let begin = Instant::now();
        let failure = compiled(&grammars, grammar).err().expect("it is refused");
        assert_eq!(failure.exit_code(), 2, "{failure}");
        let reason = failure.to_string();
        assert!(reason.len() < 400 && !reason.contains("backtrace") && !reason.contains(".rs"), "{reason}");
        (reason, begin.elapsed())
    }

    /// A chain of definitions, each of which refers to the next.
    fn chain(length: usize, link: impl Fn(Value) -> Value) -> Value {
        let next = |at: usize| match at + 1 == length {
            true => json!({ "type": "integer" }),
            false => json!({ "$ref": format!("#/$defs/a{}", at + 1) }),
        };
        let definitions = (0..length).map(|at| (format!("a{at}"), link(next(at)))).collect::<Map<_, _>>();
        json!({ "$ref": "#/$defs/a0", "$defs": definitions })
    }

    fn object(inner: Value) -> Value {
        json!({ "type": "object", "properties": { "a": inner }, "required": ["a"], "additionalProperties": false })
    }

    #[test]
    fn only_json_of_the_schema_is_let_through() {
        let schema = Grammar::Json(json!({
            "type": "object", "properties": { "glaze": { "enum": ["red", "blue"] }, "heat": { "type": "integer" } },
            "required": ["glaze", "heat"], "additionalProperties": false,
        }));
        assert_eq!(follow(&schema, "{\"glaze\": \"blue\", \"heat\": 900}"), Ok(true));
        assert_eq!(follow(&schema, "{\"glaze\": \"b"), Ok(false));
        assert_eq!(follow(&schema, "{\"glaze\": \"green\""), Err("{\"glaze\": \"".into()));
        assert_eq!(follow(&schema, " {"), Err(String::new()));
    }

    #[test]
    fn a_regular_expression_is_of_the_whole_text() {
        for pattern in ["[a-c]{2}/\\d+", "^[a-c]{2}/\\d+$"] {
            let pattern = Grammar::Regex(pattern.into());
            assert_eq!(follow(&pattern, "ab/12"), Ok(false));
            assert_eq!(follow(&pattern, "abc"), Err("ab".into()));
        }
        assert_eq!(follow(&Grammar::Regex("a\\$".into()), "a$"), Ok(true));
        assert_eq!(follow(&Grammar::Regex("a\\\\$".into()), "a\\"), Ok(true));
    }

    #[test]
    fn a_choice_is_one_of_the_texts_whatever_they_are() {
        let choices = ["red", "redder", "a \"b\" \\ /x/ | y", "line\nbreak", "é火🔥", "\u{1}\u{7f}"];
        let choice = Grammar::Choice(choices.map(String::from).to_vec());
        for text in choices {
            assert!(follow(&choice, text).is_ok(), "{text:?}");
        }
        assert_eq!(follow(&choice, "rex"), Err("re".into()));
        assert_eq!(follow(&choice, "redder"), Ok(true));
    }

    #[test]
    fn a_grammar_is_larks_with_what_llguidance_adds() {
        let grammar = "%llguidance { \"no_forcing\": true }\nstart: \"pot \" NUMBER (\",\" object)?\nNUMBER: /[0-9]+/\n\
                       object: %json { \"type\": \"boolean\" }\n";
        assert_eq!(follow(&Grammar::Lark(grammar.into()), "pot 12,true"), Ok(true));
        assert_eq!(follow(&Grammar::Lark(grammar.into()), "pot x"), Err("pot ".into()));
        for wrong in ["", "start: \"a", "start: missing", "start: A\nA: A", "%import nothing", "start: /(/", "a: \"b\""]
        {
            refused(Grammar::Lark(wrong.into()));
        }
        refused(Grammar::Regex("(".into()));
    }

    #[test]
    fn references_of_a_tool_are_to_its_own_schema() {
        // As Pydantic writes nested models; both tools use one name.
        let of = |kind: &str| {
            json!({
                "type": "object", "properties": { "pots": { "type": "array", "items": { "$ref": "#/$defs/Pot" } } },
                "required": ["pots"], "additionalProperties": false,
                "$defs": { "Pot": {
                    "type": "object", "properties": { "size": { "type": kind }, "lid": { "$ref": "#/$defs/Lid" } },
                    "required": ["size"], "additionalProperties": false,
                }, "Lid": { "enum": ["flat", "domed"] } },
            })
        };
        let tools = [("heat".to_string(), of("integer")), ("glaze".to_string(), of("string"))];
        let calls = |tools: &[(String, Value)]| Grammar::Calls {
            style: ToolStyle::Bare,
            tools: tools.to_vec(),
            several: false,
            otherwise: None,
        };
        for tools in [&tools[..1], &tools] {
            let call = |arguments: &str| {
                follow(&calls(tools), &format!("{{\"name\": \"heat\", \"parameters\": {arguments}}}"))
            };
            assert_eq!(call("{\"pots\": [{\"size\": 4, \"lid\": \"flat\"}]}"), Ok(true));
            assert!(call("{\"pots\": [{\"size\": \"4\"").is_err());
            assert!(call("{\"pots\": [{\"size\": 4, \"lid\": \"round\"").is_err());
        }
        let other = "{\"name\": \"glaze\", \"parameters\": {\"pots\": [{\"size\": \"4\"}]}}";
        assert_eq!(follow(&calls(&tools), other), Ok(true));
    }

    #[test]
    fn a_schema_that_cannot_be_followed_is_refused() {
        for schema in [json!({ "type": "nonsense" }), json!({ "$ref": "http://example.org/x" }), json!(3), json!(false)]
        {
            refused(Grammar::Json(schema));
        }
        // The compiler cuts this name within a character.
        let reason = refused(Grammar::Json(json!({ "minItems": format!("{}é{}", "a".repeat(98), "b".repeat(99)) }))).0;
        assert!(!reason.contains("panic"), "{reason}");
    }

    #[test]
    fn a_call_is_one_of_a_tool_that_there_is() {
        let heat = json!({ "type": "object", "properties": { "to": { "type": "integer" } }, "required": ["to"] });
        let tools =
            vec![("heat".to_string(), heat), ("wait".to_string(), json!({ "type": "object", "properties": {} }))];
        let calls = Grammar::Calls { style: ToolStyle::Tagged, tools, several: false, otherwise: None };
        let call = "<tool_call>\n{\"name\": \"heat\", \"arguments\": {\"to\": 9}}\n</tool_call>";
        assert_eq!(follow(&calls, call), Ok(true));
        assert_eq!(follow(&calls, "<tool_call>\n{\"name\": \"cool\""), Err("<tool_call>\n{\"name\": \"".into()));
    }

    #[test]
    fn an_answer_beside_tools_is_calls_or_what_its_schema_says() {
        let heat = json!({
            "type": "object", "properties": { "to": { "$ref": "#/$defs/n" } }, "$defs": { "n": { "type": "integer" } },
        });
        let schema = json!({
            "type": "object", "properties": { "name": { "$ref": "#/$defs/n" } }, "required": ["name"],
            "$defs": { "n": { "enum": ["Ada", "Bo"] } }, "additionalProperties": false,
        });
        let of = |style, several, otherwise| Grammar::Calls {
            style,
            tools: vec![("heat".to_string(), heat.clone())],
            several,
            otherwise: Some(Box::new(otherwise)),
        };
        let call = |arguments: &str| format!("{{\"name\": \"heat\", \"{arguments}\": {{\"to\": 9}}}}");
        let tagged = format!("<tool_call>\n{}\n</tool_call>", call("arguments"));
        let listed = call("arguments");
        for (style, one, two) in [
            (ToolStyle::Tagged, tagged.clone(), format!("{tagged}\n{tagged}")),
            (ToolStyle::Listed, format!("[{listed}]"), format!("[{listed}, {listed}]")),
            (ToolStyle::Bare, call("parameters"), String::new()),
        ] {
            let grammar = of(style, false, Grammar::Json(schema.clone()));
            assert_eq!(follow(&grammar, &one), Ok(true), "{one}");
            assert_eq!(follow(&grammar, "{\"name\": \"Ada\"}"), Ok(true));
            assert_eq!(follow(&grammar, "{\"name\": \"Cy"), Err("{\"name\": \"".into()));
            assert_eq!(follow(&grammar, "Well"), Err(String::new()));
            assert!(two.is_empty() || follow(&grammar, &two).is_err(), "{two}");
            let grammar = of(style, true, Grammar::Json(schema.clone()));
            assert!(follow(&grammar, &two).is_ok(), "{two}");
            assert!(follow(&of(style, true, Grammar::Choice(vec!["yes".into(), "no".into()])), "no").is_ok());
            assert!(follow(&of(style, true, Grammar::Regex("y+".into())), "yyy").is_ok());
        }
        refused(of(ToolStyle::Bare, true, Grammar::Lark("start: \"a\"".into())));
    }

    #[test]
    fn the_deepest_schemas_that_are_let_in_are_compiled() {
        let array = |inner: Value| json!({ "type": "array", "items": inner });
        let any = |inner: Value| json!({ "anyOf": [{ "type": "array", "items": inner }, { "type": "null" }] });
        for schema in [
            chain(bounds::DEPTH / 2 - 1, object),
            chain(bounds::DEPTH / 2 - 1, array),
            chain(bounds::DEPTH / 3 - 1, any),
            (0..bounds::DEPTH - 1).fold(json!({ "type": "integer" }), |inner, _| object(inner)),
            json!({ "const": (0..bounds::DEPTH - 3).fold(json!(1), |inner, _| json!([inner])) }),
        ] {
            let (_, grammars) = bytes();
            compiled(&grammars, Grammar::Json(schema)).map(drop).expect("a grammar");
        }
    }

    #[test]
    fn schemas_beyond_the_bounds_are_refused_at_once() {
        let deep = |schema: Value| {
            let (reason, time) = refused(Grammar::Json(schema));
            assert!(
                reason.contains("too deeply: at most 400") && time < Duration::from_secs(1),
                "{reason} in {time:?}"
            );
        };
        deep(chain(250, object));
        deep((0..640).fold(json!({ "type": "integer" }), |inner, _| object(inner)));
        deep(chain(300, |inner| json!({ "type": "array", "items": inner })));
        deep(chain(300, |inner| json!({ "anyOf": [inner, { "type": "null" }] })));
        let large = |grammar: Grammar, told: &str| {
            let (reason, time) = refused(grammar);
            assert!(reason.contains(told) && time < Duration::from_secs(1), "{reason} in {time:?}");
        };
        let names =
            |count: usize| (0..count).map(|at| (format!("p{at}"), json!({ "type": "integer" }))).collect::<Map<_, _>>();
        large(Grammar::Json(json!({ "type": "object", "properties": names(5000) })), "properties are allowed");
        let values = |which: usize| (0..60_000).map(|at| format!("{which}v{at}")).collect::<Vec<_>>();
        let enums = (0..12).map(|at| (format!("p{at}"), json!({ "enum": values(at) }))).collect::<Map<_, _>>();
        large(Grammar::Json(json!({ "type": "object", "properties": enums })), "values to choose from are allowed");
        large(Grammar::Choice(values(0)), "values to choose from are allowed");
        large(Grammar::Regex("a?".repeat(40_000)), "bytes of regular expressions are allowed");
        large(Grammar::Lark("(".repeat(20_000)), "brackets are allowed");
        let rules = (0..5000).map(|at| format!("r{at}: r{}\n", at + 1)).collect::<String>();
        large(Grammar::Lark(format!("start: r0\n{rules}")), "are allowed");
        let heat = |at: usize| (format!("heat{at}"), json!({ "type": "object", "properties": names(100) }));
        let tools = (0..128).map(heat).collect();
        large(
            Grammar::Calls { style: ToolStyle::Bare, tools, several: true, otherwise: None },
            "properties are allowed",
        );
    }

    #[test]
    fn grammars_that_grow_are_refused_or_bounded_while_texts_are_written() {
        for grammar in [
            Grammar::Regex("(a|b|c)*a(a|b|c){2000}".into()),
            Grammar::Regex("((((a{90}){90}){90}){90})".into()),
            Grammar::Lark("start: a\na: a a a | \"x\"\n".into()),
            Grammar::Lark("start: A{1,2000000000}\nA: /[a-z]{1,1000000}/ & ~/.*b.*/\n".into()),
            Grammar::Lark("start: A{1,2000000000}\nA: /[a-z]{1,9000}/ & ~/.*b.*/\n".into()),
            Grammar::Json(json!({ "type": "array", "minItems": 1_000_000_000, "items": { "type": "integer" } })),
            Grammar::Json(json!({ "type": "string", "minLength": 9, "maxLength": 1_000_000_000 })),
        ] {
            let (_, grammars) = bytes();
            let begin = Instant::now();
            let filter = compiled(&grammars, grammar.clone());
            assert!(begin.elapsed() < Duration::from_secs(10), "{grammar:?}: {:?}", begin.elapsed());
            let Ok(mut filter) = filter else { continue };
            for _ in 0..300 {
                let begin = Instant::now();
                let Ok(allowed) = filter.allowed() else { break };
                assert!(begin.elapsed() < Duration::from_secs(1), "{grammar:?}");
                let token = (0..256).find(|token| allowed[*token as usize / 32] >> (token % 32) & 1 == 1);
                if token.is_none_or(|token| !matches!(filter.push(token), Ok(false))) {
                    break;
                }
            }
        }
    }

    #[test]
    fn a_grammar_that_takes_longer_with_each_token_is_given_up() {
        let (tokenizer, grammars) = bytes();
        let x = tokenizer.encode("x").expect("bytes")[0];
        let filter = compiled(&grammars, Grammar::Lark("start: a\na: a a a | \"x\"\n".into())).expect("a grammar");
        let mut filters = [filter.again(), filter.again()];
        let begin = Instant::now();
        let steps = (0..3000).take_while(|at| {
            let text = &mut filters[at % 2];
            text.allowed().and_then(|_| text.push(x)).is_ok()
        });
        let steps = steps.count();
        // Some steps left time for both sequences.
        assert!((100..3000).contains(&steps), "{steps}");
        assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", begin.elapsed());
    }

    #[test]
    fn an_unknown_format_is_passed_over() {
        let schema = |format: &str| Grammar::Json(json!({ "type": "string", "format": format }));
        assert_eq!(follow(&schema("glaze"), "\"celadon\""), Ok(true));
        assert_eq!(follow(&schema("date"), "\"celadon\""), Err("\"".into()));
    }

    #[test]
    fn texts_of_a_request_share_a_grammar_and_go_their_own_ways() {
        let (tokenizer, grammars) = bytes();
        let filter = compiled(&grammars, Grammar::Choice(vec!["red".into(), "blue".into()])).expect("a grammar");
        let mut filters: Vec<GrammarFilter> = (0..16).map(|_| filter.again()).collect();
        drop(filter);
        for (at, text) in filters.iter_mut().enumerate() {
            let (begin, other) = if at % 2 == 0 { ("re", "u") } else { ("bl", "d") };
            assert_eq!(read(text, &tokenizer, begin), Ok(false));
            assert!(read(text, &tokenizer, other).is_err());
        }
        for (at, text) in filters.iter_mut().enumerate() {
            assert_eq!(read(text, &tokenizer, if at % 2 == 0 { "d" } else { "ue" }), Ok(true));
        }
    }

    #[test]
    fn numbers_that_the_compiler_cannot_turn_round_are_refused() {
        let least = json!(i64::MIN);
        for schema in [
            json!({ "const": least }),
            json!({ "enum": [1, [{ "a": least }]] }),
            json!({ "type": "integer", "minimum": -1e300, "maximum": -1e300 }),
            json!({ "allOf": [{ "minimum": -1e19 }, { "type": "integer", "maximum": -1e19 }] }),
            json!({ "type": "integer", "minimum": least, "exclusiveMaximum": least }),
        ] {
            assert!(refused(Grammar::Json(schema)).0.contains("-9200000000000000000"));
        }
        for schema in
            [json!({ "const": u64::MAX }), json!({ "type": "integer", "minimum": -9e18, "maximum": u64::MAX })]
        {
            let (_, grammars) = bytes();
            compiled(&grammars, Grammar::Json(schema)).map(drop).expect("a grammar");
        }
    }

    #[test]
    fn reasons_have_no_insides() {
        for (reason, wanted) in [
            ("at 3(1): no rule\n<non-verbose/>", "at 3(1): no rule"),
            (
                "panic: index out of bounds\n<backtrace>\n 0: rust_begin_unwind\n</backtrace>",
                "it cannot be compiled to a grammar",
            ),
            ("initial lexer configuration (grammar) too big (limit for this grammar: 3)", "it is too large"),
        ] {
            assert!(told(reason).to_string().starts_with(wanted), "{}", told(reason));
        }
        assert!(told(&"é".repeat(900)).to_string().len() < 310);
    }
}
