//! `/v1/completions`: texts in, what follows them out.

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Map, Value, json};

use super::constraints::Constraint;
use super::error::ApiError;
use super::fields::Fields;
use super::texts::{Form, Prompts, Settings, Whole, answer, apart, bounded, named, spelled};
use super::{Asked, body};
use crate::inference::generation::scheduler::WrittenToken;
use crate::server::answers::{Piece, Taken};
use crate::server::served::ServedWriter;

/// Tokens that follow where nothing else is asked for, as OpenAI has it.
const MAX_TOKENS: usize = 16;
/// The likeliest tokens that may be asked for.
const LOGPROBS: usize = 5;

pub(super) async fn completions(asked: Asked, request: Request) -> Result<Response, ApiError> {
    let (State(shared), Extension(caller)) = asked;
    let fields = body(&shared, request).await?;
    named(&shared, &fields)?;
    let (prompts, settings, taken, given, echo) = apart(&shared, move |shared, served| {
        let mut settings = Settings::read(shared, &fields, served.vocabulary)?;
        settings.likeliest = fields.count("logprobs", 0..=LOGPROBS)?;
        let echo = fields.flag("echo", false)?;
        if echo && settings.likeliest.is_some() {
            return Err(ApiError::param("echo", "the tokens of a prompt have no logprobs here: leave echo out"));
        }
        fields.refuse(&["tools"])?;
        let constraint = Constraint::read(&fields)?;
        if fields.get("suffix").is_some() {
            return Err(fields.wrong("suffix", "left out: nothing is written before it"));
        }
        if fields.count("best_of", 1..=usize::MAX)?.is_some_and(|best| best != settings.choices) {
            return Err(fields.wrong("best_of", "as n"));
        }
        let given = given(&fields, served, shared.options.limits.answers)?;
        let tokens = |prompt: &Prompt| match prompt {
            Prompt::Tokens(tokens) => Ok(tokens.clone()),
            Prompt::Text(text) => {
                bounded("prompt", text, served.context, served.longest_token)?;
                let tokens = served.tokenizer.encode_foreign_prompt(text);
                tokens.map_err(|error| ApiError::param("prompt", error.to_string()))
            }
        };
        let prompts = given.iter().map(tokens).collect::<Result<Vec<_>, _>>()?;
        let max_tokens = fields.count("max_tokens", 1..=usize::MAX)?;
        // No more than there is room for, where nobody said how many.
        let room = prompts.iter().map(|prompt| served.context.saturating_sub(prompt.len())).min().unwrap_or(0);
        let max_tokens = max_tokens.or((room > 0).then_some(MAX_TOKENS.min(room)));
        let taken = Taken { stop: settings.stop.clone(), calls: None, parallel_calls: true, prompts: Vec::new() };
        let prompts = Prompts { prompts, max_tokens, constraint, field: "prompt" };
        let given: Vec<String> = given.into_iter().map(|prompt| prompt.text(served)).collect();
        Ok((prompts, settings, taken, given, echo))
    })
    .await?;
    caller.record.prompt(prompts.prompts.iter().map(Vec::len).sum(), || given.clone().into());
    let echoed = if echo { given } else { Vec::new() };
    let form =
        TextForm { logprobs: settings.likeliest.is_some(), echoed, choices: settings.choices, offsets: Vec::new() };
    answer(shared, caller, (prompts, settings, taken), form).await
}

enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

impl Prompt {
    fn text(self, served: &ServedWriter) -> String {
        match self {
            Self::Text(text) => text,
            Self::Tokens(tokens) => tokens.into_iter().map(|token| spelled(served, token)).collect(),
        }
    }
}

/// Prompts, each a text or tokens; one alone need not be in an array.
fn given(fields: &Fields, served: &ServedWriter, most: usize) -> Result<Vec<Prompt>, ApiError> {
    let wanted = format!("a string, tokens below {}, or an array of up to {most} of these", served.vocabulary);
    let wrong = || fields.wrong("prompt", &wanted);
    let token = |value: &Value| {
        let token = value.as_u64().and_then(|token| u32::try_from(token).ok());
        token.filter(|token| (*token as usize) < served.vocabulary).ok_or_else(wrong)
    };
    let tokens = |values: &[Value]| values.iter().map(token).collect::<Result<Vec<u32>, ApiError>>();
    let one = |value: &Value| match value {
        Value::String(text) => Ok(Prompt::Text(text.clone())),
        Value::Array(values) => tokens(values).map(Prompt::Tokens),
        _ => Err(wrong()),
    };
    match fields.get("prompt") {
        Some(text @ Value::String(_)) => Ok(vec![one(text)?]),
        Some(Value::Array(values)) if values.first().is_some_and(Value::is_number) => {
            Ok(vec![Prompt::Tokens(tokens(values)?)])
        }
        Some(Value::Array(values)) if (1..=most).contains(&values.len()) => values.iter().map(one).collect(),
        _ => Err(wrong()),
    }
}

/// An answer in the form of completions.
struct TextForm {
    logprobs: bool,
    /// Prompts that stand before their texts.
    echoed: Vec<String>,
    /// Texts of each prompt.
    choices: usize,
    /// Characters of each text before a stream's next piece.
    offsets: Vec<usize>,
}

impl TextForm {
    fn logprobs(&self, served: &ServedWriter, tokens: &[WrittenToken], mut offset: usize) -> Value {
        if !self.logprobs || tokens.is_empty() {
            return Value::Null;
        }
        let (mut names, mut logprobs, mut likeliest, mut offsets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for token in tokens {
            let name = spelled(served, token.token);
            offsets.push(offset);
            offset += name.chars().count();
            names.push(name);
            logprobs.push(token.log_probability.map(|logprob| logprob.max(-9999.0)));
            let others =
                token.likeliest.iter().map(|(id, logprob)| (spelled(served, *id), json!(logprob.max(-9999.0))));
            likeliest.push(Value::Object(others.collect::<Map<String, Value>>()));
        }
        json!({ "tokens": names, "token_logprobs": logprobs, "top_logprobs": likeliest, "text_offset": offsets })
    }

    fn echo(&self, choice: usize) -> &str {
        self.echoed.get(choice / self.choices).map_or("", String::as_str)
    }
}

impl Form for TextForm {
    fn names(&self) -> [&'static str; 3] {
        ["cmpl", "text_completion", "text_completion"]
    }

    fn opening(&self, choice: usize) -> Option<Value> {
        let text = self.echo(choice);
        let opening = json!({ "index": choice, "text": text, "logprobs": null, "finish_reason": null });
        (!text.is_empty()).then_some(opening)
    }

    fn chunk(&mut self, served: &ServedWriter, piece: Piece) -> Value {
        self.offsets.resize(self.offsets.len().max(piece.choice + 1), 0);
        let logprobs = self.logprobs(served, &piece.tokens, self.offsets[piece.choice]);
        self.offsets[piece.choice] += piece.text.chars().count();
        json!({ "index": piece.choice, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish })
    }

    fn whole(&mut self, served: &ServedWriter, choice: usize, text: Whole) -> Value {
        let logprobs = self.logprobs(served, &text.tokens, 0);
        let words = format!("{}{}", self.echo(choice), text.text);
        json!({ "index": choice, "text": words, "logprobs": logprobs, "finish_reason": text.finish })
    }
}
