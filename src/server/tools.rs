//! Tool calls: the formats in which models spell them, and parsing.

use serde_json::{Map, Value, json};

use crate::inference::chat::ChatTemplate;

/// The format of a model's tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ToolStyle {
    /// `<tool_call>{"name": .., "arguments": {..}}</tool_call>`, several allowed, with text around
    /// them: Hermes, Qwen.
    Tagged,
    /// `[TOOL_CALLS] [{"name": .., "arguments": {..}}, ..]`, nothing else: Mistral up to Nemo. The
    /// mark is a control token and does not appear in the text.
    Listed,
    /// `{"name": .., "parameters": {..}}` alone: Llama 3.
    Bare,
}

const BEGIN: &str = "<tool_call>";
const END: &str = "</tool_call>";
const LIST: &str = "[TOOL_CALLS]";
/// Follows the mark in templates of later Mistral models, whose calls are `name[ARGS]{..}`: without
/// their control tokens, names and text are ambiguous.
const UNKNOWN: &str = "[ARGS]";

impl ToolStyle {
    /// The format of a template, if it supports tools.
    pub(super) fn of(template: &ChatTemplate) -> Option<Self> {
        let source = template.source();
        let spells = |mark| source.contains(mark);
        match template.knows("tools") {
            true if spells(BEGIN) => Some(Self::Tagged),
            true if spells(UNKNOWN) => None,
            true if spells(LIST) => Some(Self::Listed),
            true => Some(Self::Bare),
            false => None,
        }
    }

    /// A new call id: Mistral's templates require nine letters and digits.
    pub(super) fn id(self, random: u64) -> String {
        match self {
            Self::Listed => format!("{:09x}", random >> 28),
            Self::Tagged | Self::Bare => format!("call_{random:016x}"),
        }
    }

    /// The name of the arguments' field.
    fn arguments(self) -> &'static str {
        match self {
            Self::Tagged | Self::Listed => "arguments",
            Self::Bare => "parameters",
        }
    }

    /// The schema of a call of one of these tools, each given by name and arguments' schema.
    pub(super) fn schema(self, tools: Vec<(String, Value)>) -> Value {
        // Each schema gets a place of its own, since its references start at its own root.
        let mut places = Map::new();
        let mut call = |(at, (name, mut schema)): (usize, (String, Value))| {
            let (name, place) = (json!({ "const": name }), format!("tool{at}"));
            move_references(&mut schema, &place);
            let mut properties = Map::new();
            properties.insert("name".into(), name);
            properties.insert(self.arguments().into(), json!({ "$ref": format!("#/$defs/{place}") }));
            places.insert(place, schema);
            json!({
                "type": "object", "properties": properties, "required": ["name", self.arguments()],
                "additionalProperties": false,
            })
        };
        let mut calls: Vec<Value> = tools.into_iter().enumerate().map(&mut call).collect();
        let mut schema = if calls.len() == 1 { calls.remove(0) } else { json!({ "anyOf": calls }) };
        schema["$defs"] = places.into();
        schema
    }

    /// A Lark grammar of one call, of several if `several`, or of the rule `answer`.
    pub(super) fn grammar(self, schema: &Value, several: bool, answer: Option<&str>) -> String {
        let more = |between: &str| if several { format!(" (\"{between}\" call)*") } else { String::new() };
        let calls = match self {
            Self::Tagged => format!("calls: call{}\ncall: \"{BEGIN}\\n\" json \"\\n{END}\"\n", more("\\n")),
            Self::Listed => format!("calls: \"[\" call{} \"]\"\ncall: json\n", more(", ")),
            Self::Bare => "calls: json\n".to_string(),
        };
        let start = if answer.is_some() { "calls | answer" } else { "calls" };
        format!("start: {start}\n{calls}json: %json {schema}\n{}", answer.unwrap_or_default())
    }
}

/// Rewrites a schema's references to itself to `#/$defs/PLACE`, its new place.
fn move_references(schema: &mut Value, place: &str) {
    super::schema::each_schema(schema, &mut |fields| {
        if let Some(Value::String(target)) = fields.get_mut("$ref")
            && target.starts_with('#')
        {
            *target = format!("#/$defs/{place}{}", &target[1..]);
        }
    });
}

/// The calls that an answer may have.
#[derive(Clone, Debug)]
pub(super) struct Calls {
    pub(super) style: ToolStyle,
    /// Names of the tools, if an answer is either only calls or has none.
    pub(super) only: Option<Vec<String>>,
}

/// A call.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ToolCall {
    pub(super) name: String,
    /// JSON.
    pub(super) arguments: String,
}

/// Extracts the calls from streamed text.
pub(super) struct ToolCalls {
    style: ToolStyle,
    only: Option<Vec<String>>,
    /// Text that may still become a call.
    held: String,
    /// Whether the answer has no calls.
    words: bool,
    /// Whether it had one.
    called: bool,
}

impl ToolCalls {
    pub(super) fn new(Calls { style, only }: Calls) -> Self {
        Self { style, only, held: String::new(), words: false, called: false }
    }

    /// Adds text. Returns plain text and the calls that it completes.
    pub(super) fn push(&mut self, text: &str) -> (String, Vec<ToolCall>) {
        self.held.push_str(text);
        let (mut words, mut calls) = (String::new(), Vec::new());
        if self.words || self.begins_without_calls() {
            self.words = true;
            return (std::mem::take(&mut self.held), calls);
        }
        match self.style {
            ToolStyle::Tagged => loop {
                let Some(at) = self.held.find(BEGIN) else {
                    // Hold back the longest suffix that may begin a call.
                    let begins = |at: &usize| BEGIN.starts_with(&self.held[*at..]);
                    let kept = self.held.char_indices().map(|(at, _)| at).find(begins).unwrap_or(self.held.len());
                    words.extend(self.held.drain(..kept));
                    break;
                };
                words.extend(self.held.drain(..at));
                let Some(end) = self.held.find(END) else { break };
                let whole: String = self.held.drain(..end + END.len()).collect();
                match self.call(&whole[BEGIN.len()..end]) {
                    Some(call) => calls.push(call),
                    None => words.push_str(&whole),
                }
            },
            // Known at the end of the text.
            ToolStyle::Listed | ToolStyle::Bare => {}
        }
        self.called |= !calls.is_empty();
        (words, calls)
    }

    /// Whether a text with this beginning has no calls.
    fn begins_without_calls(&self) -> bool {
        let text = self.held.trim_start();
        match self.style {
            ToolStyle::Tagged => {
                self.only.is_some() && !self.called && !text.starts_with(BEGIN) && !BEGIN.starts_with(text)
            }
            ToolStyle::Listed => !text.starts_with('[') && !text.is_empty(),
            ToolStyle::Bare => !text.starts_with('{') && !text.is_empty(),
        }
    }

    /// The end of the text: returns what is left.
    pub(super) fn finish(self) -> (String, Vec<ToolCall>) {
        let calls = match self.style {
            _ if self.words => None,
            // A model that stops at the end of a turn may omit the last tag.
            ToolStyle::Tagged => self.held.strip_prefix(BEGIN).and_then(|rest| Some(vec![self.call(rest)?])),
            ToolStyle::Listed => self.calls(&self.held),
            ToolStyle::Bare => self.call(&self.held).map(|call| vec![call]),
        };
        match calls.or_else(|| Some(vec![self.cut(&self.held)?])) {
            Some(calls) => (String::new(), calls),
            None => (self.held, Vec::new()),
        }
    }

    /// A call that is cut off: its name and the arguments so far, which are then invalid JSON, as
    /// at OpenAI.
    fn cut(&self, text: &str) -> Option<ToolCall> {
        let text = text.trim_start();
        let inside = match self.style {
            ToolStyle::Tagged => text.strip_prefix(BEGIN)?,
            ToolStyle::Listed => text.strip_prefix(LIST).unwrap_or(text).trim_start().strip_prefix('[')?,
            ToolStyle::Bare => text,
        };
        let rest = inside.trim_start().strip_prefix('{')?.trim_start().strip_prefix("\"name\"")?;
        let rest = rest.trim_start().strip_prefix(':')?.trim_start();
        let mut values = serde_json::Deserializer::from_str(rest).into_iter::<String>();
        let name = values.next()?.ok()?;
        // Complete JSON that is not a call, or names no tool, belongs to the answer's own schema.
        let is_whole = serde_json::from_str::<serde::de::IgnoredAny>(inside.trim()).is_ok();
        if is_whole || self.only.as_ref().is_some_and(|only| !only.contains(&name)) {
            return None;
        }
        let rest = rest[values.byte_offset()..].trim_start().strip_prefix(',')?.trim_start();
        let rest = rest.strip_prefix(&format!("\"{}\"", self.style.arguments()))?;
        let arguments = rest.trim_start().strip_prefix(':')?.trim_start();
        // All arguments are complete; only the end of the call is missing.
        let mut values = serde_json::Deserializer::from_str(arguments).into_iter::<Value>();
        let arguments = match values.next() {
            Some(Ok(_)) => &arguments[..values.byte_offset()],
            _ => arguments,
        };
        Some(ToolCall { name, arguments: arguments.to_string() })
    }

    /// A list of calls, and nothing else.
    fn calls(&self, text: &str) -> Option<Vec<ToolCall>> {
        let text = text.trim();
        let listed: Vec<Value> = serde_json::from_str(text.strip_prefix(LIST).unwrap_or(text)).ok()?;
        let calls: Option<Vec<ToolCall>> = listed.iter().map(|value| self.called(value)).collect();
        calls.filter(|calls| !calls.is_empty())
    }

    fn call(&self, text: &str) -> Option<ToolCall> {
        self.called(&serde_json::from_str(text.trim()).ok()?)
    }

    fn called(&self, value: &Value) -> Option<ToolCall> {
        let name = value["name"].as_str()?.to_string();
        if let Some(only) = &self.only {
            // Anything else is JSON of the answer's own schema.
            let whole =
                value[self.style.arguments()].is_object() && value.as_object().is_some_and(|call| call.len() == 2);
            if !whole || !only.contains(&name) {
                return None;
            }
        }
        let arguments = value.get(self.style.arguments()).or(value.get("arguments")).unwrap_or(&Value::Null);
        let arguments = match arguments {
            Value::Null => "{}".to_string(),
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        Some(ToolCall { name, arguments })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(style: ToolStyle, pieces: &[&str]) -> (String, Vec<ToolCall>) {
        taken_of(Calls { style, only: None }, pieces)
    }

    fn taken_of(calls: Calls, pieces: &[&str]) -> (String, Vec<ToolCall>) {
        let mut tools = ToolCalls::new(calls);
        let (mut words, mut calls) = (String::new(), Vec::new());
        for piece in pieces {
            let (more, called) = tools.push(piece);
            words.push_str(&more);
            calls.extend(called);
        }
        let (more, called) = tools.finish();
        words.push_str(&more);
        calls.extend(called);
        (words, calls)
    }

    fn call(name: &str, arguments: &str) -> ToolCall {
        ToolCall { name: name.into(), arguments: arguments.into() }
    }

    #[test]
    fn calls_are_taken_out_of_the_words_however_they_come() {
        let text = "I look. <tool_call>\n{\"name\": \"heat\", \"arguments\": {\"to\": 900}}\n</tool_call>\n<tool_call>\
                    {\"name\": \"wait\"}</tool_call> a < b";
        let wanted = ("I look. \n a < b".to_string(), vec![call("heat", "{\"to\":900}"), call("wait", "{}")]);
        assert_eq!(taken(ToolStyle::Tagged, &[text]), wanted);
        let characters: Vec<String> = text.chars().map(String::from).collect();
        let characters: Vec<&str> = characters.iter().map(String::as_str).collect();
        assert_eq!(taken(ToolStyle::Tagged, &characters), wanted);
    }

    #[test]
    fn what_is_no_call_stays_a_text() {
        for text in ["<tool_call>not JSON</tool_call>", "<tool", "<tool_call>{\"name\": 3}</tool_call>x"] {
            assert_eq!(taken(ToolStyle::Tagged, &[text]), (text.to_string(), vec![]));
        }
        let unended = "<tool_call>{\"name\": \"heat\", \"arguments\": \"{}\"}";
        assert_eq!(taken(ToolStyle::Tagged, &[unended]), (String::new(), vec![call("heat", "{}")]));
    }

    #[test]
    fn a_call_that_is_cut_keeps_its_name_and_what_there_is_of_its_arguments() {
        let cut = vec![call("heat", "{\"to\": 90")];
        assert_eq!(
            taken(ToolStyle::Tagged, &["<tool_call>\n{\"name\": \"heat\", \"arguments\": {\"to\": 90"]),
            (String::new(), cut.clone())
        );
        assert_eq!(
            taken(ToolStyle::Listed, &["[{\"name\": \"heat\", \"arguments\": {\"to\": 90"]),
            (String::new(), cut.clone())
        );
        assert_eq!(taken(ToolStyle::Bare, &["{\"name\": \"heat\", \"parameters\": {\"to\": 90"]), (String::new(), cut));
        let whole = "{\"name\": \"heat\", \"parameters\": {\"to\": 90}";
        assert_eq!(taken(ToolStyle::Bare, &[whole]), (String::new(), vec![call("heat", "{\"to\": 90}")]));
        let nameless = "{\"name\": \"he";
        assert_eq!(taken(ToolStyle::Bare, &[nameless]), (nameless.to_string(), vec![]));
    }

    #[test]
    fn listed_calls_are_the_whole_text() {
        let pieces = [" [{\"name\": \"heat\", \"argu", "ments\": {\"to\": 900}}, {\"name\": \"wait\"}]"];
        let wanted = vec![call("heat", "{\"to\":900}"), call("wait", "{}")];
        assert_eq!(taken(ToolStyle::Listed, &pieces), (String::new(), wanted.clone()));
        let marked = format!("{LIST} {}", pieces.concat().trim());
        assert_eq!(taken(ToolStyle::Listed, &[&marked]), (String::new(), wanted));
        for text in
            ["[1, 2]", "[]", "[a] list", "[{\"name\": \"heat\"}, 3]", "Hello [", "[{\"name\": \"heat\"}] and words"]
        {
            assert_eq!(taken(ToolStyle::Listed, &[text]), (text.to_string(), vec![]));
        }
    }

    #[test]
    fn a_template_says_how_calls_are_spelled() {
        let style = |text: &str| {
            let template = ChatTemplate::new(format!("{{{{ tools }}}}{text}"), String::new(), String::new());
            ToolStyle::of(&template.expect("a template"))
        };
        assert_eq!(style("<tool_call>"), Some(ToolStyle::Tagged));
        assert_eq!(style("[TOOL_CALLS] ["), Some(ToolStyle::Listed));
        assert_eq!(style("[TOOL_CALLS]name[ARGS]"), None);
        assert_eq!(style(""), Some(ToolStyle::Bare));
        let without = ChatTemplate::new("{{ messages }}".into(), String::new(), String::new()).expect("a template");
        assert_eq!(ToolStyle::of(&without), None);
        let id = ToolStyle::Listed.id(u64::MAX);
        assert!(id.len() == 9 && id.chars().all(|letter| letter.is_ascii_alphanumeric()), "{id}");
    }

    #[test]
    fn a_bare_call_is_the_whole_text() {
        let pieces = ["{\"name\": \"heat\", \"para", "meters\": {\"to\": 900}}"];
        assert_eq!(taken(ToolStyle::Bare, &pieces), (String::new(), vec![call("heat", "{\"to\":900}")]));
        assert_eq!(taken(ToolStyle::Bare, &["Hello {", "}"]), ("Hello {}".to_string(), vec![]));
        assert_eq!(taken(ToolStyle::Bare, &["{\"a\": 1}"]), ("{\"a\": 1}".to_string(), vec![]));
    }

    #[test]
    fn json_beside_calls_is_a_call_of_a_tool_that_there_is_and_nothing_else() {
        let only = |style| Calls { style, only: Some(vec!["heat".into()]) };
        let called = |style, text: &str| {
            let pieces: Vec<String> = text.chars().map(String::from).collect();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            assert_eq!(taken_of(only(style), &pieces), taken_of(only(style), &[text]), "{text}");
            taken_of(only(style), &pieces)
        };
        let heat = "{\"name\": \"heat\", \"parameters\": {\"to\": 9}}";
        let wanted = call("heat", "{\"to\":9}");
        assert_eq!(called(ToolStyle::Bare, heat), (String::new(), vec![wanted.clone()]));
        let heat = heat.replace("parameters", "arguments");
        assert_eq!(called(ToolStyle::Listed, &format!("[{heat}]")), (String::new(), vec![wanted.clone()]));
        let two = format!("<tool_call>\n{heat}\n</tool_call>\n<tool_call>\n{heat}\n</tool_call>");
        assert_eq!(called(ToolStyle::Tagged, &two), ("\n".into(), vec![wanted.clone(), wanted]));
        for (style, text) in [
            (ToolStyle::Bare, "{\"name\": \"Ada\", \"parameters\": {}}"),
            (ToolStyle::Bare, "{\"name\": \"heat\"}"),
            (ToolStyle::Bare, "{\"name\": \"heat\", \"parameters\": {}, \"x\": 1}"),
            (ToolStyle::Listed, "[{\"name\": \"Ada\", \"arguments\": {}}]"),
            (ToolStyle::Tagged, "{\"note\": \"<tool_call>{\\\"name\\\": 1}</tool_call>\"}"),
            (ToolStyle::Tagged, "\"<tool_call>{\"name\": \"heat\", \"arguments\": {}}</tool_call>\""),
        ] {
            assert_eq!(called(style, text), (text.to_string(), vec![]));
        }
    }
}
