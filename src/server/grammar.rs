//! Grammars over tokens: which may be next, so that a text is JSON, JSON of a schema, or a call of a tool.

use std::sync::{Arc, OnceLock};

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::inference::generation::scheduler::TokenFilter;

/// Makes grammars for a model's tokens.
pub(super) struct Grammars {
    token_bytes: Vec<Vec<u8>>,
    ends: Vec<u32>,
    /// Words of a bit for each token of the model.
    words: usize,
    /// Made at the first grammar: a large vocabulary takes a while.
    factory: OnceLock<Result<ParserFactory, String>>,
}

impl Grammars {
    pub(super) fn new(token_bytes: &[Vec<u8>], vocabulary: usize, ends: &[u32]) -> Self {
        // Tokens that the model has no row for are never written.
        let mut token_bytes = token_bytes.to_vec();
        token_bytes.resize(vocabulary, Vec::new());
        let mut ends: Vec<u32> = ends.iter().copied().filter(|end| (*end as usize) < vocabulary).collect();
        if ends.is_empty() {
            // One that the model does not have: texts end when they are complete.
            ends.push(token_bytes.len() as u32);
            token_bytes.push(Vec::new());
        }
        // Tokens that end a text are none of its words.
        for end in &ends {
            if let Some(bytes) = token_bytes.get_mut(*end as usize) {
                *bytes = [&[TokTrie::SPECIAL_TOKEN_MARKER][..], format!("<end {end}>").as_bytes()].concat();
            }
        }
        Self { token_bytes, ends, words: vocabulary.div_ceil(32), factory: OnceLock::new() }
    }

    fn factory(&self) -> Result<&ParserFactory, Failure> {
        let made = self.factory.get_or_init(|| {
            let info = TokRxInfo::new(self.token_bytes.len() as u32, self.ends[0]);
            let trie = TokTrie::from(&info, &self.token_bytes).with_eos_tokens(&self.ends);
            let tokens: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
            let mut factory = ParserFactory::new(&tokens, InferenceCapabilities::default(), &[])
                .map_err(|error| error.to_string())?;
            factory.quiet();
            factory.limits_mut().verbose_errors = false;
            Ok(factory)
        });
        made.as_ref().map_err(|reason| Failure::new(format!("no grammars for this tokenizer: {reason}")))
    }

    /// Texts that are JSON of a schema.
    ///
    /// # Errors
    /// If it is no schema, or none that can be followed.
    pub(super) fn json(&self, schema: &Value) -> Result<Box<dyn TokenFilter>, Failure> {
        self.filter(TopLevelGrammar::from_json_schema(one_line(schema.clone())))
    }

    /// Texts of a grammar in Lark's form.
    ///
    /// # Errors
    /// If it cannot be followed.
    pub(super) fn lark(&self, grammar: String) -> Result<Box<dyn TokenFilter>, Failure> {
        self.filter(TopLevelGrammar::from_lark(grammar))
    }

    fn filter(&self, grammar: TopLevelGrammar) -> Result<Box<dyn TokenFilter>, Failure> {
        let mut matcher = Matcher::new(self.factory()?.create_parser(grammar));
        if let Some(reason) = matcher.get_error() {
            return Err(Failure::usage(reason));
        }
        // What cannot begin cannot be written.
        matcher.compute_mask().map_err(|error| Failure::usage(error.to_string()))?;
        Ok(Box::new(GrammarFilter { matcher, words: self.words }))
    }
}

/// A schema whose texts have no spaces but those that Python's `json.dumps` puts there.
pub(super) fn one_line(mut schema: Value) -> Value {
    if schema == Value::Bool(true) {
        schema = json!({});
    }
    if let Value::Object(fields) = &mut schema {
        let spaces = json!({ "whitespace_flexible": false, "item_separator": ", ", "key_separator": ": " });
        fields.insert("x-guidance".into(), spaces);
    }
    schema
}

struct GrammarFilter {
    matcher: Matcher,
    words: usize,
}

impl TokenFilter for GrammarFilter {
    fn allowed(&mut self) -> Result<Vec<u32>, Failure> {
        let mask = self.matcher.compute_mask_or_eos().map_err(|error| Failure::new(error.to_string()))?;
        let mut words: Vec<u32> = mask.as_slice().iter().copied().take(self.words).collect();
        words.resize(self.words, 0);
        if words.iter().all(|word| *word == 0) {
            return Err(Failure::new("the grammar allows none of the model's tokens"));
        }
        Ok(words)
    }

    fn push(&mut self, token: u32) -> Result<bool, Failure> {
        self.matcher.consume_token(token).map_err(|error| Failure::new(error.to_string()))?;
        Ok(self.matcher.is_stopped())
    }
}

#[cfg(test)]
mod tests {
    use fireclay_datasets::{Tokenizer, TokenizerKind};

    use super::*;
    use crate::server::tools::ToolStyle;

    /// What a filter lets through of a text, byte by byte, and whether it is complete.
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

    fn bytes() -> (Tokenizer, Grammars) {
        let tokenizer = Tokenizer::train(TokenizerKind::Byte, "").expect("a tokenizer");
        let grammars = Grammars::new(&tokenizer.token_bytes(), 300, &[]);
        (tokenizer, grammars)
    }

    #[test]
    fn only_json_of_the_schema_is_let_through() {
        let (tokenizer, grammars) = bytes();
        let schema = json!({
            "type": "object", "properties": { "glaze": { "enum": ["red", "blue"] }, "heat": { "type": "integer" } },
            "required": ["glaze", "heat"], "additionalProperties": false,
        });
        let follow = |text: &str| read(&mut *grammars.json(&schema).expect("a schema"), &tokenizer, text);
        assert_eq!(follow("{\"glaze\": \"blue\", \"heat\": 900}"), Ok(true));
        assert_eq!(follow("{\"glaze\": \"b"), Ok(false));
        assert_eq!(follow("{\"glaze\": \"green\""), Err("{\"glaze\": \"".into()));
        assert_eq!(follow(" {"), Err(String::new()));
    }

    #[test]
    fn references_of_a_tool_are_to_its_own_schema() {
        let (tokenizer, grammars) = bytes();
        // As Pydantic writes models within models; both tools call theirs by one name.
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
        for tools in [&tools[..1], &tools] {
            let grammar = ToolStyle::Bare.grammar(tools);
            let follow = |text: &str| read(&mut *grammars.lark(grammar.clone()).expect("a grammar"), &tokenizer, text);
            let call = |arguments: &str| format!("{{\"name\": \"heat\", \"parameters\": {arguments}}}");
            assert_eq!(follow(&call("{\"pots\": [{\"size\": 4, \"lid\": \"flat\"}]}")), Ok(true));
            assert!(follow(&call("{\"pots\": [{\"size\": \"4\"")).is_err());
            assert!(follow(&call("{\"pots\": [{\"size\": 4, \"lid\": \"round\"")).is_err());
        }
        let grammar = ToolStyle::Bare.grammar(&tools);
        let follow = |text: &str| read(&mut *grammars.lark(grammar.clone()).expect("a grammar"), &tokenizer, text);
        assert_eq!(follow("{\"name\": \"glaze\", \"parameters\": {\"pots\": [{\"size\": \"4\"}]}}"), Ok(true));
    }

    #[test]
    fn a_schema_that_cannot_be_followed_is_refused() {
        let (_, grammars) = bytes();
        for schema in [json!({ "type": "nonsense" }), json!({ "$ref": "http://example.org/x" }), json!(3), json!(false)]
        {
            let refused = grammars.json(&schema).err().map(|failure| failure.exit_code());
            assert_eq!(refused, Some(2), "{schema}");
        }
    }

    #[test]
    fn a_call_is_one_of_a_tool_that_there_is() {
        let (tokenizer, grammars) = bytes();
        let heat = json!({ "type": "object", "properties": { "to": { "type": "integer" } }, "required": ["to"] });
        let tools = [("heat".to_string(), heat), ("wait".to_string(), json!({ "type": "object", "properties": {} }))];
        let style = super::super::tools::ToolStyle::Tagged;
        let follow = |text: &str| {
            let mut filter = grammars.lark(style.grammar(&tools)).expect("a grammar");
            read(&mut *filter, &tokenizer, text)
        };
        let call = "<tool_call>\n{\"name\": \"heat\", \"arguments\": {\"to\": 9}}\n</tool_call>";
        assert_eq!(follow(call), Ok(true));
        assert_eq!(follow("<tool_call>\n{\"name\": \"cool\""), Err("<tool_call>\n{\"name\": \"".into()));
    }
}
