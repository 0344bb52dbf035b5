//! `/v1/chat/completions`: a conversation in, the model's answer out.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Map, Value, json};

use super::constraints::Constraint;
use super::error::ApiError;
use super::fields::Fields;
use super::generation::{
    Choices, Prompts, Settings, Whole, answer, bounded, named, prompt_logprobs, random, run_blocking, spelled,
    warn_unknown_fields,
};
use super::{Asked, Caller, Shared, body};
use crate::inference::chat::{ChatTemplate, Dialogue};
use crate::inference::generation::scheduler::{MAX_TOP_LOGPROBS, OutputToken};
use crate::server::answers::{Piece, Taken};
use crate::server::grammar::Grammar;
use crate::server::served::ServedGenerator;
use crate::server::tools::{Calls, ToolCall, ToolStyle};

/// Maximum messages of a conversation.
const MESSAGES: usize = 4096;
/// Maximum tools of a request.
const TOOLS: usize = 128;
/// Template variables that only the server sets.
const OWN_VARIABLES: [&str; 5] = ["messages", "tools", "add_generation_prompt", "bos_token", "eos_token"];

pub(super) async fn chat(asked: Asked, request: Request) -> Result<Response, ApiError> {
    let (State(shared), Extension(caller)) = asked;
    let fields = body(&shared, request).await?;
    let (prompts, settings, taken) = task(&shared, &caller, fields).await?;
    let form = ChatForm {
        logprobs: settings.top_logprobs.is_some(),
        prompt_logprobs: settings.prompt_top_logprobs.is_some(),
        calls: Vec::new(),
    };
    answer(shared, caller, (prompts, settings, taken), form).await
}

/// Reads a request: prompt, settings and form of the answer.
pub(super) async fn task(
    shared: &Arc<Shared>,
    caller: &Caller,
    fields: Fields,
) -> Result<(Prompts, Settings, Taken), ApiError> {
    let model = named(shared, &fields)?;
    let record = Arc::clone(&caller.record);
    let (prompts, settings, taken, dialogue) = run_blocking(shared, model, move |shared, served| {
        let mut settings = Settings::read(shared, &fields, served.vocabulary)?;
        let top = fields.count("top_logprobs", 0..=MAX_TOP_LOGPROBS)?;
        match fields.flag("logprobs", false)? {
            true => settings.top_logprobs = Some(top.unwrap_or(0)),
            false if top.is_some() => {
                return Err(ApiError::param("top_logprobs", "top_logprobs needs logprobs: true"));
            }
            false => {}
        }
        let (tokens, dialogue, tools) = conversation(served, &fields)?;
        let parallel_calls = fields.flag("parallel_tool_calls", true)?;
        let constraint = Constraint::read(&fields)?;
        let calls = served.tool_style.filter(|_| !tools.offered.is_empty()).map(|style| {
            // JSON of a schema may look like a call.
            let only = constraint.as_ref().map(|_| tools.offered.iter().map(|(name, _)| name.clone()).collect());
            Calls { style, only }
        });
        let constraint = tools.combined_with(served.tool_style, constraint, parallel_calls)?;
        let taken = Taken { stop: settings.stop.clone(), calls, parallel_calls, prompts: Vec::new(), nothing: false };
        fields.refuse(&["best_of", "continue_final_message", "echo"])?;
        if !fields.flag("add_generation_prompt", true)? {
            return Err(fields.wrong("add_generation_prompt", "true: the model always answers"));
        }
        if fields.strings("modalities", 4)?.iter().any(|kind| kind != "text") {
            return Err(fields.wrong("modalities", "[\"text\"]"));
        }
        let max_tokens = match fields.count("max_completion_tokens", 1..=usize::MAX)? {
            Some(most) => Some(most),
            None => fields.count("max_tokens", 1..=usize::MAX)?,
        };
        warn_unknown_fields(shared, &record, &fields)?;
        let prompts = Prompts { model, prompts: vec![tokens], max_tokens, constraint, field: "messages" };
        Ok((prompts, settings, taken, dialogue))
    })
    .await?;
    caller.record.prompt(prompts.prompts[0].len(), || Value::Array(dialogue.messages));
    Ok((prompts, settings, taken))
}

/// The prompt tokens of a request's conversation, and its tools.
pub(super) fn conversation(served: &ServedGenerator, fields: &Fields) -> Result<(Vec<u32>, Dialogue, Tools), ApiError> {
    // Report a broken template before missing features.
    if let Some(Err(failure)) = served.template.as_ref().map(ChatTemplate::check) {
        return Err(ApiError::request(format!("this model cannot chat: {failure}")));
    }
    let tools = Tools::read(served, fields)?;
    let dialogue = dialogue(fields, &tools)?;
    bounded("messages", &read_texts(&dialogue), served.context, served.longest_token)?;
    let template = served
        .template
        .as_ref()
        .ok_or_else(|| ApiError::request("this model has no chat template: use /v1/completions"))?;
    let tokens = template.tokens(&dialogue, &served.tokenizer);
    Ok((tokens.map_err(|failure| ApiError::param("messages", failure.to_string()))?, dialogue, tools))
}

/// The text of all messages, to bound its length.
fn read_texts(dialogue: &Dialogue) -> String {
    let fields = ["content", "reasoning_content"];
    dialogue.messages.iter().flat_map(|message| fields.iter().filter_map(|field| message[*field].as_str())).collect()
}

/// The tools of a request.
#[derive(Default)]
pub(super) struct Tools {
    /// As given.
    given: Value,
    /// Names and schemas of the allowed ones.
    offered: Vec<(String, Value)>,
    /// Whether a call is required.
    required: bool,
}

impl Tools {
    fn read(served: &ServedGenerator, fields: &Fields) -> Result<Self, ApiError> {
        let given = fields.array("tools")?.unwrap_or_default();
        if given.len() > TOOLS {
            return Err(fields.wrong("tools", &format!("an array of up to {TOOLS}")));
        }
        let mut offered = Vec::new();
        for (at, tool) in given.iter().enumerate() {
            let tool = Fields::of(&format!("tools[{at}]"), tool)?;
            if tool.string("type")?.is_some_and(|kind| kind != "function") {
                return Err(tool.wrong("type", "\"function\""));
            }
            let function = tool.object("function")?.ok_or_else(|| tool.wrong("function", "an object"))?;
            let name = function.string("name")?.ok_or_else(|| function.wrong("name", "a string"))?;
            let fits = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
            if name.is_empty() || name.len() > 64 || !name.chars().all(fits) {
                return Err(function.wrong("name", "1 to 64 letters, digits, _ and -"));
            }
            function.string("description")?;
            let schema = match function.object("parameters")? {
                Some(parameters) => Value::Object(parameters.into_values()),
                None => json!({ "type": "object", "properties": {} }),
            };
            offered.push((name.to_string(), schema));
        }
        let choice = fields.get("tool_choice");
        let chosen = |name: &str| offered.iter().find(|(other, _)| other == name).cloned();
        let (offered, required) = match choice {
            None => (offered, false),
            Some(Value::String(choice)) if choice == "auto" => (offered, false),
            Some(Value::String(choice)) if choice == "none" => return Ok(Self::default()),
            Some(Value::String(choice)) if choice == "required" => (offered, true),
            Some(Value::Object(_)) => {
                let choice = fields.object("tool_choice")?.ok_or_else(|| fields.wrong("tool_choice", "an object"))?;
                let function = choice.object("function")?.ok_or_else(|| choice.wrong("function", "an object"))?;
                let name = function.string("name")?.ok_or_else(|| function.wrong("name", "a string"))?;
                (vec![chosen(name).ok_or_else(|| function.wrong("name", "one of the tools"))?], true)
            }
            Some(_) => {
                return Err(fields.wrong("tool_choice", "\"none\", \"auto\", \"required\" or one of the tools"));
            }
        };
        if required && offered.is_empty() {
            return Err(ApiError::param("tool_choice", "tool_choice requires a call, but there are no tools"));
        }
        if !offered.is_empty() && served.tool_style.is_none() {
            return Err(ApiError::param(
                "tools",
                "this model's chat template has no tools, or an unsupported format of calls",
            ));
        }
        Ok(Self { given: if given.is_empty() { Value::Null } else { given.into() }, offered, required })
    }

    /// The constraint of an answer: a call if required; calls or the other constraint if allowed.
    fn combined_with(
        self,
        style: Option<ToolStyle>,
        constraint: Option<Constraint>,
        several: bool,
    ) -> Result<Option<Constraint>, ApiError> {
        let Some(style) = style.filter(|_| !self.offered.is_empty()) else { return Ok(constraint) };
        let (field, several, otherwise) = match constraint {
            None if !self.required => return Ok(None),
            None => ("tools".to_string(), false, None),
            // A format is for text, and a required call has none: clients send one for their next
            // request.
            Some(Constraint { field, .. }) if self.required && field == "response_format" => {
                ("tools".to_string(), false, None)
            }
            Some(Constraint { field, .. }) if self.required => {
                let message = format!("{field} cannot be combined with a required tool call");
                return Err(ApiError::param(field, message));
            }
            Some(Constraint { field, grammar: Grammar::Lark(_) }) => {
                let message = format!("{field} cannot be combined with tools: it needs tool_choice \"none\"");
                return Err(ApiError::param(field, message));
            }
            Some(Constraint { field, grammar }) => (field, several, Some(Box::new(grammar))),
        };
        let grammar = Grammar::Calls { style, tools: self.offered, several, otherwise };
        Ok(Some(Constraint { field, grammar }))
    }
}

/// The input of the chat template.
fn dialogue(fields: &Fields, tools: &Tools) -> Result<Dialogue, ApiError> {
    let given = fields.array("messages")?.ok_or_else(|| fields.wrong("messages", "an array"))?;
    if given.is_empty() || given.len() > MESSAGES {
        return Err(fields.wrong("messages", &format!("an array of 1 to {MESSAGES}")));
    }
    let messages = given.iter().enumerate().map(|(at, message)| {
        let path = format!("messages[{at}]");
        said(&Fields::of(&path, message)?)
    });
    let mut variables = match fields.object("chat_template_kwargs")? {
        None => Map::new(),
        Some(variables) => {
            if let Some(own) = OWN_VARIABLES.into_iter().find(|own| variables.get(own).is_some()) {
                return Err(variables.wrong(own, "left out"));
            }
            variables.into_values()
        }
    };
    // The template decides whether to use it.
    if let Some(effort) = fields.string("reasoning_effort")? {
        variables.entry("reasoning_effort").or_insert_with(|| effort.into());
    }
    Ok(Dialogue { messages: messages.collect::<Result<_, _>>()?, tools: tools.given.clone(), variables })
}

fn said(message: &Fields) -> Result<Value, ApiError> {
    let role = message.string("role")?;
    let role = match role {
        Some("developer") => "system",
        Some(role @ ("system" | "user" | "assistant" | "tool")) => role,
        _ => return Err(message.wrong("role", "\"system\", \"user\", \"assistant\" or \"tool\"")),
    };
    let calls = message.array("tool_calls")?.unwrap_or_default();
    let content = match message.get("content") {
        None if role == "assistant" && !calls.is_empty() => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            let part = |(at, part): (usize, &Value)| {
                let part = Fields::of(&message.name(&format!("content[{at}]")), part)?;
                match part.string("type")? {
                    Some("text") => Ok(part.string("text")?.ok_or_else(|| part.wrong("text", "a string"))?.to_string()),
                    _ => Err(part.wrong("type", "\"text\": this model accepts text only")),
                }
            };
            parts.iter().enumerate().map(part).collect::<Result<Vec<String>, ApiError>>()?.concat()
        }
        _ => return Err(message.wrong("content", "a string or an array of parts")),
    };
    let mut said = json!({ "role": role, "content": content });
    if !calls.is_empty() {
        let call = |(at, call): (usize, &Value)| {
            let call = Fields::of(&message.name(&format!("tool_calls[{at}]")), call)?;
            let function = call.object("function")?.ok_or_else(|| call.wrong("function", "an object"))?;
            let name = function.string("name")?.ok_or_else(|| function.wrong("name", "a string"))?;
            // Templates serialize arguments to JSON themselves. A call without any has `{}`.
            let arguments = match function.string("arguments")?.filter(|arguments| !arguments.trim().is_empty()) {
                None => json!({}),
                Some(arguments) => serde_json::from_str(arguments).unwrap_or_else(|_| Value::from(arguments)),
            };
            let mut told = json!({ "type": "function", "function": { "name": name, "arguments": arguments } });
            if let Some(id) = call.string("id")? {
                told["id"] = id.into();
            }
            Ok(told)
        };
        said["tool_calls"] = calls.iter().enumerate().map(call).collect::<Result<Vec<Value>, ApiError>>()?.into();
    }
    for field in ["name", "reasoning_content", "tool_call_id"] {
        if let Some(text) = message.string(field)? {
            said[field] = text.into();
        }
    }
    Ok(said)
}

/// An answer in the form of a chat completion.
struct ChatForm {
    logprobs: bool,
    /// Whether the answer has the prompt's log-probabilities.
    prompt_logprobs: bool,
    /// Number of calls of each choice so far.
    calls: Vec<usize>,
}

impl ChatForm {
    fn logprobs(&self, served: &ServedGenerator, tokens: &[OutputToken]) -> Value {
        if !self.logprobs {
            return Value::Null;
        }
        json!({ "content": logprobs(served, tokens), "refusal": null })
    }

    /// Calls in OpenAI's form, with their indices in a stream.
    fn calls(style: Option<ToolStyle>, calls: &[ToolCall], from: Option<usize>) -> Vec<Value> {
        let call = |(at, call): (usize, &ToolCall)| {
            let id = call_id(style);
            let mut told = json!({
                "id": id, "type": "function", "function": { "name": call.name, "arguments": call.arguments },
            });
            if let Some(from) = from {
                told["index"] = (from + at).into();
            }
            told
        };
        calls.iter().enumerate().map(call).collect()
    }
}

/// The log-probabilities of tokens, with the top alternatives.
pub(super) fn logprobs(served: &ServedGenerator, tokens: &[OutputToken]) -> Vec<Value> {
    let token = |token: u32, logprob: f32| {
        let bytes = served.token_bytes.get(token as usize);
        json!({ "token": spelled(served, token), "logprob": number(logprob), "bytes": bytes })
    };
    let told = tokens.iter().filter_map(|written| {
        let mut told = token(written.token, written.log_probability?);
        let others: Vec<Value> = written.top_logprobs.iter().map(|(id, logprob)| token(*id, *logprob)).collect();
        told["top_logprobs"] = others.into();
        Some(told)
    });
    told.collect()
}

/// A new call id.
pub(super) fn call_id(style: Option<ToolStyle>) -> String {
    style.unwrap_or(ToolStyle::Bare).id(random())
}

/// OpenAI's lowest value stands for anything less likely.
fn number(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}

impl Choices for ChatForm {
    fn names(&self) -> [&'static str; 3] {
        ["chatcmpl-", "chat.completion", "chat.completion.chunk"]
    }

    fn opening(&self, choice: usize) -> Option<Value> {
        let delta = json!({ "role": "assistant", "content": "" });
        Some(json!({ "index": choice, "delta": delta, "logprobs": null, "finish_reason": null }))
    }

    fn chunk(&mut self, served: &ServedGenerator, piece: Piece) -> Value {
        let mut delta = json!({});
        if !piece.text.is_empty() {
            delta["content"] = piece.text.into();
        }
        if !piece.calls.is_empty() {
            self.calls.resize(self.calls.len().max(piece.choice + 1), 0);
            delta["tool_calls"] = Self::calls(served.tool_style, &piece.calls, Some(self.calls[piece.choice])).into();
            self.calls[piece.choice] += piece.calls.len();
        }
        let logprobs = if piece.tokens.is_empty() { Value::Null } else { self.logprobs(served, &piece.tokens) };
        let mut told =
            json!({ "index": piece.choice, "delta": delta, "logprobs": logprobs, "finish_reason": piece.finish });
        if self.prompt_logprobs && !piece.prompt.is_empty() {
            told["prompt_logprobs"] = prompt_logprobs(served, &piece.prompt);
        }
        told
    }

    fn whole(&mut self, served: &ServedGenerator, choice: usize, text: Whole) -> Value {
        let logprobs = self.logprobs(served, &text.tokens);
        let mut message = json!({ "role": "assistant", "content": text.text, "refusal": null });
        if !text.calls.is_empty() {
            message["tool_calls"] = Self::calls(served.tool_style, &text.calls, None).into();
            if text.text.trim().is_empty() {
                message["content"] = Value::Null;
            }
        }
        let mut told =
            json!({ "index": choice, "message": message, "logprobs": logprobs, "finish_reason": text.finish });
        if self.prompt_logprobs {
            told["prompt_logprobs"] = prompt_logprobs(served, &text.prompt);
        }
        told
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_assistant_thought_and_called_reaches_the_template() {
        let said = |message: Value| said(&Fields::of("messages[0]", &message).expect("an object")).ok();
        let call = |function: Value| json!({ "type": "function", "function": function });
        let message = json!({
            "role": "assistant", "content": null, "reasoning_content": "Ask the kiln.", "tool_calls": [
                { "id": "a", "type": "function", "function": { "name": "heat", "arguments": "{\"kiln\": 2}" } },
                call(json!({ "name": "list", "arguments": "" })), call(json!({ "name": "list" })),
            ],
        });
        let wanted = json!({
            "role": "assistant", "content": "", "tool_calls": [
                { "type": "function", "function": { "name": "heat", "arguments": { "kiln": 2 } }, "id": "a" },
                call(json!({ "name": "list", "arguments": {} })), call(json!({ "name": "list", "arguments": {} })),
            ], "reasoning_content": "Ask the kiln.",
        });
        assert_eq!(said(message), Some(wanted));
        assert_eq!(said(json!({ "role": "assistant", "content": "x", "reasoning_content": 5 })), None);
    }
}
