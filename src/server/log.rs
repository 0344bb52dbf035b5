//! One log line per request, when its answer is complete, without its content unless enabled.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::{LogFormat, Shared};
use crate::stdout;

/// The log record of a request. Written and counted when its last holder drops it.
pub(super) struct Record {
    shared: Arc<Shared>,
    address: IpAddr,
    method: String,
    path: String,
    /// The request's id: the client's own, or a new one.
    id: String,
    /// The path, normalized for metrics.
    known: &'static str,
    begun: Instant,
    facts: Mutex<Facts>,
}

#[derive(Default)]
struct Facts {
    status: Option<u16>,
    prompt_tokens: usize,
    tokens: usize,
    first_token: Option<f64>,
    error: Option<String>,
    unknown: Vec<String>,
    prompt: Option<Value>,
    answer: String,
    streams: bool,
    complete: bool,
}

impl Record {
    pub(super) fn new(
        shared: Arc<Shared>,
        (address, id): (IpAddr, String),
        method: &str,
        path: &str,
        known: &'static str,
    ) -> Self {
        let (method, path) = (method.to_string(), path.to_string());
        Self { shared, address, method, path, id, known, begun: Instant::now(), facts: Mutex::default() }
    }

    /// Unknown fields of its body.
    pub(super) fn unknown(&self, fields: Vec<String>) {
        self.facts(|facts| facts.unknown = fields);
    }

    /// The fields given to [`unknown`](Self::unknown).
    pub(super) fn unknown_fields(&self) -> Vec<String> {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner).unknown.clone()
    }

    fn facts(&self, change: impl FnOnce(&mut Facts)) {
        change(&mut self.facts.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub(super) fn status(&self, status: u16) {
        self.facts(|facts| facts.status = Some(status));
    }

    /// The answer is an event stream, whose status says little.
    pub(super) fn streams(&self) {
        self.facts(|facts| facts.streams = true);
    }

    /// The last event was sent.
    pub(super) fn complete(&self) {
        self.facts(|facts| facts.complete = true);
    }

    pub(super) fn error(&self, reason: &str) {
        self.facts(|facts| facts.error = Some(reason.to_string()));
    }

    pub(super) fn prompt(&self, tokens: usize, text: impl FnOnce() -> Value) {
        let text = self.shared.options.log_texts.then(text);
        self.facts(|facts| {
            facts.prompt_tokens = tokens;
            facts.prompt = text;
        });
        self.shared.metrics.prompt(tokens as u64);
    }

    /// A sequence is complete.
    pub(super) fn finished(&self, reason: &str) {
        self.shared.metrics.finished(reason);
    }

    /// New output of an answer.
    pub(super) fn written(&self, tokens: usize, text: &str) {
        if tokens == 0 && text.is_empty() {
            return;
        }
        let (seconds, with_text) = (self.begun.elapsed().as_secs_f64(), self.shared.options.log_texts);
        let mut first = false;
        self.facts(|facts| {
            first = facts.first_token.is_none() && tokens > 0;
            if first {
                facts.first_token = Some(seconds);
            }
            facts.tokens += tokens;
            if with_text {
                facts.answer.push_str(text);
            }
        });
        self.shared.metrics.written(tokens as u64, first.then_some(seconds));
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let seconds = self.begun.elapsed().as_secs_f64();
        let facts = std::mem::take(&mut *self.facts.lock().unwrap_or_else(PoisonError::into_inner));
        // As in nginx: the client left before the answer was complete.
        let status = facts.status.filter(|_| facts.complete || !facts.streams).unwrap_or(499);
        self.shared.metrics.request(self.known, status, seconds);
        let quiet = matches!(self.path.as_str(), "/health" | "/metrics") && status < 400;
        match self.shared.options.log {
            LogFormat::Json if !quiet => {
                let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
                let mut line = json!({
                    "event": "request", "time": time, "address": self.address, "method": self.method, "path": self.path,
                    "status": status, "seconds": seconds, "prompt_tokens": facts.prompt_tokens, "tokens": facts.tokens,
                    "first_token_seconds": facts.first_token, "error": facts.error, "request_id": self.id,
                });
                if !facts.unknown.is_empty() {
                    line["unknown_fields"] = facts.unknown.into();
                }
                if let Some(prompt) = facts.prompt {
                    line["prompt"] = prompt;
                    line["answer"] = facts.answer.into();
                }
                stdout::line(line);
            }
            LogFormat::Text if !quiet => {
                let Self { address, method, path, .. } = self;
                let mut line = format!("{address} {method} {path} {status} {:.0} ms", 1e3 * seconds);
                if facts.tokens > 0 {
                    let first = 1e3 * facts.first_token.unwrap_or_default();
                    let rate = facts.tokens as f64 / seconds.max(1e-9);
                    line += &format!(
                        ", {} tokens after {}, the first after {first:.0} ms, {rate:.0}/s",
                        facts.tokens, facts.prompt_tokens
                    );
                }
                if !facts.unknown.is_empty() {
                    line += &format!(", unknown fields: {}", facts.unknown.join(", ").escape_debug());
                }
                if let Some(error) = facts.error {
                    line += &format!(": {error}");
                }
                eprintln!("{line}");
                if let Some(prompt) = facts.prompt {
                    eprintln!("{}", json!({ "prompt": prompt, "answer": facts.answer }));
                }
            }
            _ => {}
        }
    }
}
