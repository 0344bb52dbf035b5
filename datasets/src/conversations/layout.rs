//! Layouts of records, and what each makes of a record.

use std::fmt;

use serde_json::{Map, Value, json};

use super::{Conversation, Preference};
use crate::sources::kind_of_value as kind;

/// How a record holds a conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// `messages`, as OpenAI and TRL have them.
    Messages,
    /// `prompt` and `completion`.
    PromptCompletion,
    /// `instruction`, `input` and `output`.
    Alpaca,
    /// `conversations` of `from` and `value`.
    ShareGpt,
    /// `chosen` and `rejected`.
    Preference,
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Messages => "messages (role, content)",
            Self::PromptCompletion => "prompts with completions",
            Self::Alpaca => "Alpaca records (instruction, input, output)",
            Self::ShareGpt => "ShareGPT conversations (from, value)",
            Self::Preference => "preference pairs (chosen, rejected)",
        })
    }
}

const KNOWN: &str = "messages; prompt and completion; instruction and output; conversations; or chosen and rejected";

impl Layout {
    /// The layout that a record's fields show.
    pub(super) fn of(record: &Map<String, Value>) -> Result<Self, String> {
        let has = |field: &str| record.get(field).is_some_and(|value| !value.is_null());
        let layouts = [
            (Self::Messages, ["messages", "messages"]),
            (Self::ShareGpt, ["conversations", "conversations"]),
            (Self::Preference, ["chosen", "rejected"]),
            (Self::PromptCompletion, ["prompt", "completion"]),
            (Self::Alpaca, ["instruction", "output"]),
        ];
        let found = layouts.into_iter().find(|(_, fields)| fields.iter().all(|field| has(field)));
        found.map(|(layout, _)| layout).ok_or_else(|| {
            let names: Vec<&str> = record.keys().take(12).map(String::as_str).collect();
            format!("has the fields {}, which are no conversation: looked for {KNOWN}", names.join(", "))
        })
    }

    /// The same for a reader of pairs: a record that has both continuations is a pair, whatever
    /// else it has.
    pub(super) fn of_pair(record: &Map<String, Value>) -> Result<Self, String> {
        let has = |field: &str| record.get(field).is_some_and(|value| !value.is_null());
        if has("chosen") && has("rejected") { Ok(Self::Preference) } else { Self::of(record) }
    }

    /// The conversation of a record.
    pub(super) fn conversation(self, mut record: Map<String, Value>) -> Result<Conversation, String> {
        match self {
            Self::Messages => with_options(messages(take(&mut record, "messages")?, Speaker::Assistant)?, &mut record),
            Self::PromptCompletion => {
                let prompt = turns(take(&mut record, "prompt")?, "user", Speaker::Nobody)?;
                let completion = turns(take(&mut record, "completion")?, "assistant", Speaker::Assistant)?;
                with_options(prompt.followed_by(completion), &mut record)
            }
            Self::Alpaca => {
                let mut all = Turns::default();
                if let Some(system) = text(&mut record, "system")?.filter(|text| !text.is_empty()) {
                    all.push(json!({ "role": "system", "content": system }), false);
                }
                let instruction = string(take(&mut record, "instruction")?, "instruction")?;
                let input = text(&mut record, "input")?.filter(|input| !input.is_empty());
                let asked = input.map_or(instruction.clone(), |input| format!("{instruction}\n\n{input}"));
                all.push(json!({ "role": "user", "content": asked }), false);
                let output = string(take(&mut record, "output")?, "output")?;
                all.push(json!({ "role": "assistant", "content": output }), true);
                with_options(all, &mut record)
            }
            Self::ShareGpt => {
                let mut all = Turns::default();
                if let Some(system) = text(&mut record, "system")?.filter(|text| !text.is_empty()) {
                    all.push(json!({ "role": "system", "content": system }), false);
                }
                with_options(all.followed_by(share_gpt(take(&mut record, "conversations")?)?), &mut record)
            }
            Self::Preference => Err("is a preference pair".into()),
        }
    }
}

/// The pair of a record. Without a prompt, or if the continuations repeat it, the messages that both
/// begin with are it.
pub(super) fn preference(mut record: Map<String, Value>) -> Result<Preference, String> {
    let (chosen, rejected) = (take(&mut record, "chosen")?, take(&mut record, "rejected")?);
    let prompt = record.remove("prompt").filter(|prompt| !prompt.is_null());
    let (prompt, chosen, rejected) = match prompt {
        Some(prompt) => {
            let prompt = turns(prompt, "user", Speaker::Nobody)?;
            let chosen = turns(chosen, "assistant", Speaker::Assistant)?;
            let rejected = turns(rejected, "assistant", Speaker::Assistant)?;
            match (chosen.repeats(&prompt), rejected.repeats(&prompt)) {
                (true, true) => split_shared(chosen, rejected),
                (false, false) => (prompt, chosen, rejected),
                _ => return Err("repeats its prompt in one of chosen and rejected, and not in the other".into()),
            }
        }
        None if chosen.is_string() => return Err("lacks the field prompt".into()),
        None => split_shared(messages(chosen, Speaker::Assistant)?, messages(rejected, Speaker::Assistant)?),
    };
    if chosen == rejected {
        return Err("prefers one of two that are the same".into());
    }
    if !chosen.supervised.contains(&true) || !rejected.supervised.contains(&true) {
        return Err("has a continuation without a message of the assistant".into());
    }
    let both = |turns: Turns| with_options(prompt.clone().followed_by(turns), &mut record.clone());
    Ok(Preference { chosen: both(chosen)?, rejected: both(rejected)? })
}

/// The messages that both conversations begin with, and the rest of each.
fn split_shared(mut chosen: Turns, mut rejected: Turns) -> (Turns, Turns, Turns) {
    let shared = chosen.messages.iter().zip(&rejected.messages).take_while(|(a, b)| a == b).count();
    let mut prompt = chosen.split_to(shared);
    rejected.split_to(shared);
    prompt.supervised.fill(false);
    (prompt, chosen, rejected)
}

/// Whose messages are supervised.
#[derive(Clone, Copy, PartialEq)]
enum Speaker {
    Assistant,
    Nobody,
}

/// Messages, and which of them are supervised.
#[derive(Clone, Default, PartialEq)]
struct Turns {
    messages: Vec<Value>,
    supervised: Vec<bool>,
}

impl Turns {
    fn push(&mut self, message: Value, supervised: bool) {
        self.messages.push(message);
        self.supervised.push(supervised);
    }

    fn followed_by(mut self, next: Self) -> Self {
        self.messages.extend(next.messages);
        self.supervised.extend(next.supervised);
        self
    }

    /// Whether they begin with those of `prompt`, maybe after a system message.
    fn repeats(&self, prompt: &Self) -> bool {
        let content = |message: &Value| match &message["content"] {
            Value::String(text) => Value::from(text.trim()),
            other => other.clone(),
        };
        let alike = |(own, asked): (&Value, &Value)| own["role"] == asked["role"] && content(own) == content(asked);
        let begins = |own: &[Value]| own.len() >= prompt.messages.len() && own.iter().zip(&prompt.messages).all(alike);
        let behind_system = match self.messages.split_first() {
            Some((first, rest)) if first["role"] == "system" => begins(rest),
            _ => false,
        };
        begins(&self.messages) || behind_system
    }

    /// Takes out the first `count`.
    fn split_to(&mut self, count: usize) -> Self {
        let (messages, supervised) = (self.messages.split_off(count), self.supervised.split_off(count));
        std::mem::replace(self, Self { messages, supervised })
    }
}

/// With the options that the record has apart from its messages.
fn with_options(turns: Turns, record: &mut Map<String, Value>) -> Result<Conversation, String> {
    let tools = match record.remove("tools").unwrap_or_default() {
        Value::String(text) if text.trim().is_empty() => Value::Null,
        Value::String(text) => {
            serde_json::from_str(&text).map_err(|error| format!("has tools that are no JSON: {error}"))?
        }
        other => other,
    };
    let tools = match tools {
        Value::Array(all) if all.is_empty() => Value::Null,
        Value::Array(_) | Value::Null => tools,
        other => return Err(format!("has tools that are {}, and no array", kind(&other))),
    };
    let variables = match record.remove("chat_template_kwargs").unwrap_or_default() {
        Value::Object(variables) => variables,
        Value::Null => Map::new(),
        other => return Err(format!("has chat_template_kwargs that are {}, and no object", kind(&other))),
    };
    let Turns { messages, supervised } = turns;
    Ok(Conversation { messages, tools, variables, supervised })
}

/// Messages, or a string that is the one message of `role`.
fn turns(value: Value, role: &str, speaker: Speaker) -> Result<Turns, String> {
    if let Value::String(content) = value {
        let mut all = Turns::default();
        all.push(json!({ "role": role, "content": content }), speaker == Speaker::Assistant);
        return Ok(all);
    }
    messages(value, speaker)
}

fn messages(value: Value, speaker: Speaker) -> Result<Turns, String> {
    let mut all = Turns::default();
    for (number, mut message) in objects(value, "messages")? {
        message.retain(|_, value| !value.is_null());
        let Some(role) = message.get("role").and_then(Value::as_str) else {
            return Err(format!("message {number} has no role"));
        };
        let mut supervised = speaker == Speaker::Assistant && role == "assistant";
        match message.get("content") {
            None | Some(Value::String(_) | Value::Array(_)) => {}
            Some(other) => return Err(format!("message {number}: content is {}", kind(other))),
        }
        if let Some(weight) = message.remove("weight") {
            match weight.as_f64() {
                Some(0.0) => supervised = false,
                Some(1.0) => {}
                _ => return Err(format!("message {number}: weight is {weight}, and not 0 or 1")),
            }
        }
        all.push(message.into(), supervised);
    }
    Ok(all)
}

fn share_gpt(value: Value) -> Result<Turns, String> {
    let mut all = Turns::default();
    for (number, mut turn) in objects(value, "conversations")? {
        let wrong = |reason: String| format!("turn {number}: {reason}");
        let from = string(take(&mut turn, "from").map_err(&wrong)?, "from").map_err(&wrong)?;
        let value = string(take(&mut turn, "value").map_err(&wrong)?, "value").map_err(&wrong)?;
        let role = match from.as_str() {
            "human" | "user" => "user",
            "gpt" | "assistant" | "model" | "chatgpt" | "function_call" => "assistant",
            "system" => "system",
            "tool" | "observation" | "function_response" => "tool",
            other => return Err(wrong(format!("nothing is known of the speaker '{other}'"))),
        };
        if from == "function_call" {
            let calls: Value = serde_json::from_str(&value).map_err(|error| wrong(format!("no JSON call: {error}")))?;
            let calls = if let Value::Array(calls) = calls { calls } else { vec![calls] };
            let calls: Vec<Value> =
                calls.into_iter().map(|call| json!({ "type": "function", "function": call })).collect();
            all.push(json!({ "role": "assistant", "tool_calls": calls }), true);
            continue;
        }
        all.push(json!({ "role": role, "content": value }), role == "assistant");
    }
    Ok(all)
}

/// An object and its number, from 1.
type Numbered = (usize, Map<String, Value>);

/// The objects of an array, numbered from 1.
fn objects(value: Value, field: &str) -> Result<Vec<Numbered>, String> {
    // Columns of tables hold arrays as text.
    let value = match value {
        Value::String(text) => serde_json::from_str(&text).map_err(|_| format!("has {field} that are a string"))?,
        other => other,
    };
    let Value::Array(values) = value else {
        return Err(format!("has {field} that are {}, and no array", kind(&value)));
    };
    if values.is_empty() {
        return Err(format!("has no {field}"));
    }
    let object = |(at, value)| match value {
        Value::Object(object) => Ok((at + 1, object)),
        _ => Err(format!("message {} is no object", at + 1)),
    };
    values.into_iter().enumerate().map(object).collect()
}

fn take(record: &mut Map<String, Value>, field: &str) -> Result<Value, String> {
    record.remove(field).filter(|value| !value.is_null()).ok_or_else(|| format!("lacks the field {field}"))
}

fn string(value: Value, field: &str) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text),
        other => Err(format!("has a field {field} that is {}, and no string", kind(&other))),
    }
}

/// The string in a field that may be missing or null.
fn text(record: &mut Map<String, Value>, field: &str) -> Result<Option<String>, String> {
    record.remove(field).filter(|value| !value.is_null()).map(|value| string(value, field)).transpose()
}
