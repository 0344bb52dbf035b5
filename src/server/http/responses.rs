//! `/v1/responses`: OpenAI's newer API. A request is converted to one of `/v1/chat/completions`, so
//! that both are validated alike. Nothing is stored between requests.

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Map, Value, json};

use super::chat::{call_id, logprobs, task};
use super::error::ApiError;
use super::fields::Fields;
use super::generation::{Form, Head, Usage, answer, named, now, random, writer};
use super::{Asked, Shared, body};
use crate::inference::chat::ChatTemplate;
use crate::server::answers::Piece;
use crate::server::served::ServedGenerator;
use crate::server::tools::{ToolCall, ToolStyle};

/// OpenAI's fields that are not supported.
pub(super) const UNSUPPORTED: [&str; 6] =
    ["background", "context_management", "moderation", "prompt", "prompt_logprobs", "n"];
/// Fields that refer to stored responses.
const KEPT: [&str; 2] = ["previous_response_id", "conversation"];
/// Fields of a chat request and their names here.
pub(super) const RENAMED: [(&str, &str); 5] = [
    ("messages", "input"),
    ("response_format", "text.format"),
    ("max_completion_tokens", "max_output_tokens"),
    ("max_tokens", "max_output_tokens"),
    ("logprobs", "top_logprobs"),
];
/// Fields that a chat request lacks, or has in another form.
pub(super) const OWN: [&str; 14] = [
    "background",
    "chat_template_kwargs",
    "include",
    "input",
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "reasoning",
    "store",
    "text",
    "tool_choice",
    "tools",
    "truncation",
];
/// Levels of reasoning effort, as at OpenAI.
const EFFORTS: [&str; 6] = ["none", "minimal", "low", "medium", "high", "xhigh"];
/// Values of include that no item here has.
const NOT_THERE: &str = "reasoning.encrypted_content";
const LOGPROBS: &str = "message.output_text.logprobs";
/// Maximum entries of `metadata`.
const METADATA: usize = 16;

pub(super) async fn responses(asked: Asked, request: Request) -> Result<Response, ApiError> {
    let (State(shared), Extension(caller)) = asked;
    let fields = body(&shared, request).await?;
    let (chat, told) = translated(&shared, fields)?;
    let (prompts, settings, taken) = task(&shared, &caller, chat).await.map_err(own_name)?;
    let form = ResponseForm { told, logprobs: settings.top_logprobs.is_some(), ..ResponseForm::default() };
    answer(shared, caller, (prompts, settings, taken), form).await.map_err(own_name)
}

/// An error of the chat request, with the client's names of fields.
fn own_name(error: ApiError) -> ApiError {
    error.renamed(|name| {
        let name = name.replace(".function.", ".").replace(".json_schema", "");
        let renamed = RENAMED.into_iter().find_map(|(chat, own)| Some((own, name.strip_prefix(chat)?)));
        renamed.map_or(name.clone(), |(own, rest)| format!("{own}{rest}"))
    })
}

/// The equivalent chat request, and the fields that the answer repeats.
fn translated(shared: &Shared, fields: Fields) -> Result<(Fields, Map<String, Value>), ApiError> {
    fields.refuse(&UNSUPPORTED)?;
    if let Some(field) = KEPT.into_iter().find(|field| fields.get(field).is_some()) {
        let message = format!("{field} is not supported: responses are not stored; send the conversation in input");
        return Err(ApiError::param(field, message));
    }
    if let Some((field, own)) = RENAMED.into_iter().find(|(field, _)| fields.get(field).is_some()) {
        return Err(ApiError::param(field, format!("{field} is a field of chat completions: responses have {own}")));
    }
    fields.flag("store", true)?;
    // The server has no tools of its own.
    fields.count("max_tool_calls", 1..=usize::MAX)?;
    if fields.string("truncation")?.is_some_and(|truncation| truncation != "disabled") {
        return Err(fields.wrong("truncation", "\"disabled\": the conversation is never truncated"));
    }
    let metadata = fields.object("metadata")?.map_or_else(Map::new, Fields::into_values);
    if metadata.len() > METADATA || !metadata.values().all(Value::is_string) {
        return Err(fields.wrong("metadata", &format!("an object of up to {METADATA} strings")));
    }
    let mut chat = Map::new();
    let format = format(&fields)?;
    let reasoning = fields.object("reasoning")?;
    let variables = variables(writer(shared, named(shared, &fields)?)?, &fields, reasoning.as_ref())?;
    if includes_logprobs(&fields)? || fields.get("top_logprobs").is_some() {
        chat.insert("logprobs".into(), true.into());
    }
    let written = [
        ("messages", Some(messages(&fields)?.into())),
        ("tools", tools(&fields)?.map(Value::from)),
        ("tool_choice", tool_choice(&fields)?),
        ("response_format", format.clone().map(chat_format)),
        ("max_completion_tokens", fields.count("max_output_tokens", 1..=usize::MAX)?.map(Value::from)),
        ("chat_template_kwargs", (!variables.is_empty()).then(|| variables.into())),
    ];
    chat.extend(written.into_iter().filter_map(|(field, value)| Some((field.to_string(), value?))));
    let given = |field: &str, otherwise: Value| fields.get(field).cloned().unwrap_or(otherwise);
    let told = [
        ("background", false.into()),
        ("instructions", given("instructions", Value::Null)),
        ("max_output_tokens", given("max_output_tokens", Value::Null)),
        ("max_tool_calls", given("max_tool_calls", Value::Null)),
        ("metadata", metadata.into()),
        ("parallel_tool_calls", given("parallel_tool_calls", true.into())),
        ("previous_response_id", Value::Null),
        (
            "reasoning",
            json!({ "effort": reasoning.as_ref().and_then(|reasoning| reasoning.get("effort")), "summary": null }),
        ),
        ("store", false.into()),
        ("temperature", given("temperature", json!(1.0))),
        ("text", json!({ "format": format.unwrap_or(json!({ "type": "text" })), "verbosity": "medium" })),
        ("tool_choice", given("tool_choice", "auto".into())),
        ("tools", given("tools", json!([]))),
        ("top_logprobs", given("top_logprobs", 0.into())),
        ("top_p", given("top_p", json!(1.0))),
        ("truncation", "disabled".into()),
        ("user", given("user", Value::Null)),
    ];
    let told = told.into_iter().map(|(field, value)| (field.to_string(), value)).collect();
    // The rest is as in a chat request.
    for (field, value) in fields.into_values().into_iter().filter(|(field, _)| !OWN.contains(&&field[..])) {
        chat.entry(field).or_insert(value);
    }
    Ok((Fields::made(chat), told))
}

/// The output format.
fn format(fields: &Fields) -> Result<Option<Value>, ApiError> {
    let Some(text) = fields.object("text")? else { return Ok(None) };
    if text.string("verbosity")?.is_some_and(|verbosity| verbosity != "medium") {
        return Err(text.wrong("verbosity", "\"medium\": this model supports no other"));
    }
    Ok(text.object("format")?.map(|format| Value::Object(format.into_values())))
}

/// A format in the chat API's form.
fn chat_format(mut format: Value) -> Value {
    match format["type"].as_str() {
        Some("json_schema") => {
            if let Some(fields) = format.as_object_mut() {
                fields.remove("type");
            }
            json!({ "type": "json_schema", "json_schema": format })
        }
        _ => format,
    }
}

/// Template variables: the request's, and the reasoning effort in the template's own terms.
fn variables(
    served: &ServedGenerator,
    fields: &Fields,
    reasoning: Option<&Fields>,
) -> Result<Map<String, Value>, ApiError> {
    let mut variables = fields.object("chat_template_kwargs")?.map_or_else(Map::new, Fields::into_values);
    let Some(reasoning) = reasoning else { return Ok(variables) };
    for summary in ["summary", "generate_summary"] {
        // There are no summaries.
        if reasoning.string(summary)?.is_some_and(|kind| kind != "auto") {
            return Err(reasoning.wrong(summary, "\"auto\" or left out: reasoning summaries are not supported"));
        }
    }
    let Some(effort) = reasoning.string("effort")? else { return Ok(variables) };
    if !EFFORTS.contains(&effort) {
        return Err(reasoning.wrong("effort", &format!("one of {}", EFFORTS.join(", "))));
    }
    let knows = |variable| served.template.as_ref().is_some_and(|template: &ChatTemplate| template.knows(variable));
    if knows("reasoning_effort") {
        variables.entry("reasoning_effort").or_insert(effort.into());
    } else if knows("enable_thinking") {
        variables.entry("enable_thinking").or_insert((effort != "none").into());
    } else if effort != "none" {
        return Err(reasoning.wrong("effort", "\"none\" or left out: this model's chat template does not support it"));
    }
    Ok(variables)
}

/// Whether log-probabilities were requested.
fn includes_logprobs(fields: &Fields) -> Result<bool, ApiError> {
    let mut found = false;
    for included in fields.array("include")?.unwrap_or_default() {
        match included.as_str() {
            Some(LOGPROBS) => found = true,
            Some(NOT_THERE) => {}
            _ => return Err(fields.wrong("include", &format!("an array of {LOGPROBS:?} and {NOT_THERE:?}"))),
        }
    }
    Ok(found)
}

/// Tools in the chat API's form.
fn tools(fields: &Fields) -> Result<Option<Vec<Value>>, ApiError> {
    let Some(tools) = fields.array("tools")? else { return Ok(None) };
    let tool = |(at, tool): (usize, &Value)| {
        let tool = Fields::of(&format!("tools[{at}]"), tool)?;
        if tool.string("type")? != Some("function") {
            return Err(tool.wrong("type", "\"function\": this server has no tools of its own"));
        }
        let mut function = tool.into_values();
        function.remove("type");
        Ok(json!({ "type": "function", "function": function }))
    };
    tools.iter().enumerate().map(tool).collect::<Result<_, _>>().map(Some)
}

fn tool_choice(fields: &Fields) -> Result<Option<Value>, ApiError> {
    let Some(choice @ Value::Object(_)) = fields.get("tool_choice") else {
        return Ok(fields.get("tool_choice").cloned());
    };
    let choice = Fields::of("tool_choice", choice)?;
    if choice.string("type")? != Some("function") {
        return Err(choice.wrong("type", "\"function\""));
    }
    let name = choice.string("name")?.ok_or_else(|| choice.wrong("name", "a string"))?;
    Ok(Some(json!({ "type": "function", "function": { "name": name } })))
}

/// The conversation in the chat API's form.
fn messages(fields: &Fields) -> Result<Vec<Value>, ApiError> {
    let mut said = Said::default();
    if let Some(instructions) = fields.string("instructions")? {
        said.words("system", instructions);
    }
    match fields.get("input") {
        Some(Value::String(text)) => said.words("user", text),
        Some(Value::Array(items)) => {
            for (at, item) in items.iter().enumerate() {
                said.item(&Fields::of(&format!("input[{at}]"), item)?)?;
            }
        }
        _ => return Err(fields.wrong("input", "a string or an array of items")),
    }
    Ok(said.messages)
}

/// Messages of the items read so far.
#[derive(Default)]
struct Said {
    messages: Vec<Value>,
    /// Reasoning that precedes the next item.
    thought: Option<String>,
}

impl Said {
    fn item(&mut self, item: &Fields) -> Result<(), ApiError> {
        match item.string("type")? {
            None | Some("message") => {
                let role = match item.string("role")? {
                    Some("developer") => "system",
                    Some(role @ ("system" | "user" | "assistant")) => role,
                    _ => return Err(item.wrong("role", "\"system\", \"developer\", \"user\" or \"assistant\"")),
                };
                self.words(role, &parts(item, "content")?);
            }
            Some("function_call") => {
                let name = item.string("name")?.ok_or_else(|| item.wrong("name", "a string"))?;
                let id = item.string("call_id")?.ok_or_else(|| item.wrong("call_id", "a string"))?;
                let arguments = item.string("arguments")?.unwrap_or_default();
                let function = json!({ "name": name, "arguments": arguments });
                self.call(json!({ "id": id, "type": "function", "function": function }));
            }
            Some("function_call_output") => {
                let id = item.string("call_id")?.ok_or_else(|| item.wrong("call_id", "a string"))?;
                let output = parts(item, "output")?;
                self.messages.push(json!({ "role": "tool", "tool_call_id": id, "content": output }));
            }
            Some("reasoning") => {
                // A summary is not the reasoning itself, and encrypted reasoning belongs to another
                // server.
                let thought = item.get("content").map(|_| parts(item, "content")).transpose()?;
                self.thought = thought.filter(|thought| !thought.is_empty());
            }
            Some("item_reference") => {
                let message = "item references are not supported: responses are not stored; send the item itself";
                return Err(ApiError::param(item.name("type"), message));
            }
            Some(_) => {
                let wanted = "\"message\", \"function_call\", \"function_call_output\" or \"reasoning\"";
                return Err(item.wrong("type", wanted));
            }
        }
        Ok(())
    }

    fn words(&mut self, role: &str, text: &str) {
        let thought = self.thought.take();
        match self.messages.last_mut() {
            // Many templates accept only one system message.
            Some(last) if role == "system" && last["role"] == "system" => {
                let before = last["content"].as_str().unwrap_or_default();
                last["content"] = format!("{before}\n\n{text}").into();
            }
            _ => {
                let mut message = json!({ "role": role, "content": text });
                if let Some(thought) = thought.filter(|_| role == "assistant") {
                    message["reasoning_content"] = thought.into();
                }
                self.messages.push(message);
            }
        }
    }

    /// A call belongs to the assistant message before it.
    fn call(&mut self, call: Value) {
        if self.thought.is_some() || self.messages.last().is_none_or(|last| last["role"] != "assistant") {
            self.words("assistant", "");
        }
        if let Some(last) = self.messages.last_mut() {
            match last["tool_calls"].as_array_mut() {
                Some(calls) => calls.push(call),
                None => last["tool_calls"] = json!([call]),
            }
        }
    }
}

/// A string, or the text of parts.
fn parts(item: &Fields, field: &str) -> Result<String, ApiError> {
    match item.get(field) {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) => {
            let part = |(at, part): (usize, &Value)| {
                let part = Fields::of(&item.name(&format!("{field}[{at}]")), part)?;
                let text = match part.string("type")? {
                    Some("input_text" | "output_text" | "reasoning_text" | "text") => "text",
                    Some("refusal") => "refusal",
                    _ => {
                        return Err(
                            part.wrong("type", "\"input_text\" or \"output_text\": this model accepts text only")
                        );
                    }
                };
                Ok(part.string(text)?.ok_or_else(|| part.wrong(text, "a string"))?.to_string())
            };
            parts.iter().enumerate().map(part).collect::<Result<Vec<String>, ApiError>>().map(|parts| parts.concat())
        }
        _ => Err(item.wrong(field, "a string or an array of parts")),
    }
}

/// An answer as a response: messages and calls in order.
#[derive(Default)]
struct ResponseForm {
    /// The fields repeated from the request.
    told: Map<String, Value>,
    logprobs: bool,
    /// Number of events so far.
    events: usize,
    /// Complete items.
    output: Vec<Value>,
    /// The current message.
    message: Option<Message>,
    /// Whitespace before a message; around calls it is dropped.
    spaces: String,
    /// Log-probabilities of tokens whose text is held back.
    tokens: Vec<Value>,
    finish: &'static str,
}

struct Message {
    id: String,
    text: String,
    logprobs: Vec<Value>,
}

impl Message {
    fn part(&self) -> Value {
        json!({ "type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs })
    }

    fn item(&self, status: &str, content: Vec<Value>) -> Value {
        json!({ "id": self.id, "type": "message", "status": status, "role": "assistant", "content": content })
    }
}

/// A new item id.
fn item_id(kind: &str) -> String {
    format!("{kind}_{:016x}{:016x}", random(), random())
}

impl ResponseForm {
    fn event(&mut self, name: &str, mut told: Value) -> String {
        told["type"] = name.into();
        told["sequence_number"] = self.events.into();
        self.events += 1;
        format!("event: {name}\ndata: {told}\n\n")
    }

    fn response(&self, head: &Head, status: &str, usage: Option<Usage>) -> Value {
        let mut response = Value::Object(self.told.clone());
        let incomplete = (status == "incomplete").then(|| json!({ "reason": "max_output_tokens" }));
        let completed = matches!(status, "completed" | "incomplete").then(now);
        for (field, value) in [
            ("id", json!(head.id)),
            ("object", json!("response")),
            ("created_at", json!(head.created)),
            ("completed_at", json!(completed)),
            ("model", json!(head.model)),
            ("status", json!(status)),
            ("output", json!(self.output)),
            ("error", Value::Null),
            ("incomplete_details", json!(incomplete)),
            ("usage", json!(usage.map(usage_json))),
        ] {
            response[field] = value;
        }
        response
    }

    fn words(&mut self, text: &str) -> Vec<String> {
        self.spaces.push_str(text);
        if self.message.is_none() && self.spaces.trim().is_empty() {
            return Vec::new();
        }
        let mut events = self.open();
        events.extend(self.say());
        events
    }

    /// Adds held-back whitespace to the message.
    fn say(&mut self) -> Option<String> {
        let message = self.message.as_mut().filter(|_| !self.spaces.is_empty())?;
        let (delta, logprobs) = (std::mem::take(&mut self.spaces), std::mem::take(&mut self.tokens));
        message.text.push_str(&delta);
        message.logprobs.extend(logprobs.clone());
        let told = json!({
            "item_id": message.id, "output_index": self.output.len(), "content_index": 0, "delta": delta,
            "logprobs": logprobs,
        });
        Some(self.event("response.output_text.delta", told))
    }

    /// Starts a message, unless there is one.
    fn open(&mut self) -> Vec<String> {
        if self.message.is_some() {
            return Vec::new();
        }
        let message = Message { id: item_id("msg"), text: String::new(), logprobs: Vec::new() };
        let (at, id, part) = (self.output.len(), message.id.clone(), message.part());
        let item = message.item("in_progress", Vec::new());
        self.message = Some(message);
        vec![
            self.event("response.output_item.added", json!({ "output_index": at, "item": item })),
            self.event(
                "response.content_part.added",
                json!({ "item_id": id, "output_index": at, "content_index": 0, "part": part }),
            ),
        ]
    }

    /// Ends the current message, if any.
    fn close(&mut self, status: &str) -> Vec<String> {
        let Some(message) = self.message.take() else { return Vec::new() };
        let (at, id, part) = (self.output.len(), &message.id, message.part());
        let item = message.item(status, vec![part.clone()]);
        self.output.push(item.clone());
        vec![
            self.event(
                "response.output_text.done",
                json!({
                    "item_id": id, "output_index": at, "content_index": 0, "text": message.text,
                    "logprobs": message.logprobs,
                }),
            ),
            self.event(
                "response.content_part.done",
                json!({ "item_id": id, "output_index": at, "content_index": 0, "part": part }),
            ),
            self.event("response.output_item.done", json!({ "output_index": at, "item": item })),
        ]
    }

    fn call(&mut self, style: Option<ToolStyle>, call: ToolCall) -> Vec<String> {
        let mut events = self.close("completed");
        // Those of the call.
        self.tokens.clear();
        self.spaces.clear();
        let ToolCall { name, arguments } = call;
        let (at, id, call_id) = (self.output.len(), item_id("fc"), call_id(style));
        let item = |status: &str, arguments: &str| {
            json!({
                "id": id, "type": "function_call", "status": status, "call_id": call_id, "name": name,
                "arguments": arguments,
            })
        };
        let (begun, whole) = (item("in_progress", ""), item("completed", &arguments));
        self.output.push(whole.clone());
        events.extend([
            self.event("response.output_item.added", json!({ "output_index": at, "item": begun })),
            self.event(
                "response.function_call_arguments.delta",
                json!({ "item_id": id, "output_index": at, "delta": arguments }),
            ),
            self.event(
                "response.function_call_arguments.done",
                json!({ "item_id": id, "output_index": at, "name": name, "arguments": arguments }),
            ),
            self.event("response.output_item.done", json!({ "output_index": at, "item": whole })),
        ]);
        events
    }

    /// The status of a complete answer.
    fn status(&self) -> &'static str {
        if self.finish == "length" { "incomplete" } else { "completed" }
    }

    /// Ends the current item. An answer without output gets an empty message.
    fn finish(&mut self) -> Vec<String> {
        let mut events = Vec::new();
        if self.message.is_none() && self.output.is_empty() {
            events.extend(self.open());
            events.extend(self.say());
        }
        if let Some(message) = &mut self.message {
            message.logprobs.append(&mut self.tokens);
        }
        events.extend(self.close(self.status()));
        events
    }
}

/// Usage in the Responses API's terms.
fn usage_json(usage: Usage) -> Value {
    let Usage { prompt, cached, written } = usage;
    json!({
        "input_tokens": prompt, "input_tokens_details": { "cached_tokens": cached, "cache_write_tokens": 0 },
        "output_tokens": written, "output_tokens_details": { "reasoning_tokens": 0 },
        "total_tokens": prompt + written,
    })
}

impl Form for ResponseForm {
    fn prefix(&self) -> &'static str {
        "resp_"
    }

    fn begun(&mut self, head: &Head, _count: usize) -> Vec<String> {
        let response = json!({ "response": self.response(head, "in_progress", None) });
        ["response.created", "response.in_progress"].map(|name| self.event(name, response.clone())).into()
    }

    fn more(&mut self, _head: &Head, served: &ServedGenerator, piece: Piece) -> Vec<String> {
        if self.logprobs {
            self.tokens.extend(logprobs(served, &piece.tokens));
        }
        self.finish = piece.finish.unwrap_or(self.finish);
        let mut events = self.words(&piece.text);
        for call in piece.calls {
            events.extend(self.call(served.tool_style, call));
        }
        events
    }

    fn ended(&mut self, head: &Head, usage: Usage) -> Vec<String> {
        let mut events = self.finish();
        let status = self.status();
        let response = json!({ "response": self.response(head, status, Some(usage)) });
        events.push(self.event(&format!("response.{status}"), response));
        events
    }

    fn failed(&mut self, head: &Head, error: &ApiError) -> Vec<String> {
        let mut events = self.close("incomplete");
        let mut response = self.response(head, "failed", None);
        let code = if error.status.is_client_error() { "invalid_prompt" } else { "server_error" };
        response["error"] = json!({ "code": code, "message": error.message });
        events.push(self.event("response.failed", json!({ "response": response })));
        events
    }

    fn whole(
        &mut self,
        head: &Head,
        served: &ServedGenerator,
        _count: usize,
        pieces: Vec<Piece>,
        usage: Usage,
    ) -> Value {
        for piece in pieces {
            self.more(head, served, piece);
        }
        self.finish();
        self.response(head, self.status(), Some(usage))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(value: Value) -> Fields {
        Fields::parse(value.to_string().as_bytes()).expect("an object")
    }

    #[test]
    fn items_become_the_messages_of_a_chat() {
        let call = |id: &str| {
            let arguments = "{}";
            json!({ "type": "function_call", "call_id": id, "name": "heat", "arguments": arguments, "id": "fc_1" })
        };
        let called =
            |id: &str| json!({ "id": id, "type": "function", "function": { "name": "heat", "arguments": "{}" } });
        let said = |kind: &str, text: &str| json!([{ "type": kind, "text": text, "annotations": [] }]);
        let asked = request(json!({
            "instructions": "You fire pots.",
            "input": [
                { "role": "developer", "content": "Be brief." },
                { "type": "message", "role": "user", "content": said("input_text", "Fire it.") },
                { "type": "reasoning", "id": "rs_1", "summary": [], "content": said("reasoning_text", "It is cold.") },
                { "type": "message", "role": "assistant", "id": "msg_1", "content": said("output_text", "I will.") },
                call("a"),
                call("b"),
                { "type": "function_call_output", "call_id": "a", "output": "hot" },
                { "type": "function_call_output", "call_id": "b", "output": said("input_text", "hot, too") },
                { "type": "reasoning", "summary": [] },
                call("c"),
            ],
        }));
        let wanted = json!([
            { "role": "system", "content": "You fire pots.\n\nBe brief." },
            { "role": "user", "content": "Fire it." },
            {
                "role": "assistant", "content": "I will.", "reasoning_content": "It is cold.",
                "tool_calls": [called("a"), called("b")],
            },
            { "role": "tool", "tool_call_id": "a", "content": "hot" },
            { "role": "tool", "tool_call_id": "b", "content": "hot, too" },
            { "role": "assistant", "content": "", "tool_calls": [called("c")] },
        ]);
        assert_eq!(messages(&asked).map(Value::from), Ok(wanted));
        let alone = request(json!({ "input": "Fire it." }));
        assert_eq!(messages(&alone).map(Value::from), Ok(json!([{ "role": "user", "content": "Fire it." }])));
    }

    #[test]
    fn an_item_that_cannot_be_read_is_named() {
        for (input, name) in [
            (json!([{ "role": "tool", "content": "x" }]), "input[0].role"),
            (json!([{ "role": "user" }]), "input[0].content"),
            (json!([{ "role": "user", "content": "x" }, 3]), "input[1]"),
            (json!([{ "role": "user", "content": [{ "type": "input_image" }] }]), "input[0].content[0].type"),
            (json!([{ "role": "user", "content": [{ "type": "input_text" }] }]), "input[0].content[0].text"),
            (json!([{ "type": "function_call", "name": "heat" }]), "input[0].call_id"),
            (json!([{ "type": "function_call_output", "output": "x" }]), "input[0].call_id"),
            (json!([{ "type": "item_reference", "id": "msg_1" }]), "input[0].type"),
            (json!([{ "type": "web_search_call" }]), "input[0].type"),
            (json!(3), "input"),
        ] {
            let error = messages(&request(json!({ "input": input }))).expect_err("it cannot be read").json();
            assert_eq!(error["error"]["param"], name, "{error}");
        }
    }

    #[test]
    fn words_and_calls_are_items_in_the_order_in_which_they_come() {
        let mut form = ResponseForm::default();
        let call = |name: &str| ToolCall { name: name.into(), arguments: "{}".into() };
        let mut events = form.words("I look. ");
        events.extend(form.call(None, call("heat")));
        events.extend(form.words("\n"));
        events.extend(form.call(None, call("wait")));
        events.extend(form.words("\n"));
        events.extend(form.words("Done."));
        events.extend(form.finish());
        let told = |item: &Value| match item["type"].as_str() {
            Some("message") => item["content"][0]["text"].clone(),
            _ => item["name"].clone(),
        };
        let items: Vec<Value> = form.output.iter().map(told).collect();
        assert_eq!(items, ["I look. ", "heat", "wait", "\nDone."]);
        assert!(form.output.iter().all(|item| item["status"] == "completed"));
        for (at, event) in events.iter().enumerate() {
            let data = event.split_once("data: ").expect("data").1;
            let event: Value = serde_json::from_str(data).expect("JSON");
            assert_eq!(event["sequence_number"], at);
            assert!(event["output_index"].as_u64().is_some_and(|index| index < 4), "{event}");
        }
        // Whitespace counts as text if there are no calls; no output at all is an empty message.
        for text in ["\n", ""] {
            let mut form = ResponseForm::default();
            assert!(form.words(text).is_empty());
            form.finish();
            assert_eq!(form.output.iter().map(told).collect::<Vec<Value>>(), [text]);
        }
    }

    #[test]
    fn a_stream_that_breaks_off_says_why() {
        let head = Head { id: "resp_1".into(), created: 1, number: 0, model: "m".into(), usage: false };
        let mut form = ResponseForm::default();
        form.begun(&head, 1);
        form.words("Once");
        let events = form.failed(&head, &ApiError::too_slow());
        let last =
            events.last().and_then(|event| event.strip_prefix("event: response.failed\ndata: ")).expect("a failure");
        let response = &serde_json::from_str::<Value>(last).expect("JSON")["response"];
        assert_eq!([&response["status"], &response["error"]["code"]], ["failed", "server_error"]);
        assert_eq!(response["error"]["message"], ApiError::too_slow().message);
        assert_eq!(
            [&response["output"][0]["status"], &response["output"][0]["content"][0]["text"]],
            ["incomplete", "Once"]
        );
    }

    #[test]
    fn what_a_chat_refuses_has_the_name_that_the_client_gave() {
        for (chat, own) in [
            ("messages", "input"),
            ("tools[3].function.name", "tools[3].name"),
            ("tool_choice.function.name", "tool_choice.name"),
            ("response_format.json_schema.schema", "text.format.schema"),
            ("response_format.type", "text.format.type"),
            ("max_completion_tokens", "max_output_tokens"),
            ("temperature", "temperature"),
        ] {
            let error = own_name(ApiError::param(chat, format!("{chat} has to be something else"))).json();
            let wanted = [json!(own), format!("{own} has to be something else").into()];
            assert_eq!([&error["error"]["param"], &error["error"]["message"]], [&wanted[0], &wanted[1]]);
        }
    }
}
