//! `/v1/completions`: prompts in, their continuations out.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Map, Value, json};

use super::constraints::Constraint;
use super::error::ApiError;
use super::fields::Fields;
use super::fill;
use super::generation::{
    Choices, MAX_SEQUENCES, Prompts, Settings, Whole, answer, named, prompt_logprobs, run_blocking, spelled,
    warn_unknown_fields,
};
use super::tokens::Spelling;
use super::{Asked, body};
use crate::inference::generation::scheduler::{MAX_TOP_LOGPROBS, OutputToken};
use crate::server::answers::{Piece, Taken};
use crate::server::served::ServedGenerator;

/// Default of max_tokens, as at OpenAI.
const MAX_TOKENS: usize = 16;
/// Maximum of logprobs.
const LOGPROBS: usize = MAX_TOP_LOGPROBS;

pub(super) async fn completions(asked: Asked, request: Request) -> Result<Response, ApiError> {
    let (State(shared), Extension(caller)) = asked;
    let fields = body(&shared, request).await?;
    let model = named(&shared, &fields)?;
    let record = Arc::clone(&caller.record);
    let (prompts, settings, taken, given, form) = run_blocking(&shared, model, move |shared, served| {
        let mut settings = Settings::read(shared, &fields, served.vocabulary)?;
        settings.top_logprobs = fields.count("logprobs", 0..=LOGPROBS)?;
        let echo = fields.flag("echo", false)?;
        let vllms = settings.prompt_top_logprobs.is_some();
        if echo && settings.top_logprobs.is_some() {
            settings.prompt_top_logprobs = settings.prompt_top_logprobs.max(settings.top_logprobs);
        }
        fields.refuse(&["tools"])?;
        let constraint = Constraint::read(&fields)?;
        if fields.count("best_of", 1..=usize::MAX)?.is_some_and(|best| best != settings.choices) {
            return Err(fields.wrong("best_of", "as n"));
        }
        let given = given(&fields, served)?;
        let suffix = fields.string("suffix")?.filter(|suffix| !suffix.is_empty());
        // The suffix is a part of a file, which may contain anything.
        let spelling = Spelling::read(&fields, suffix.is_none())?;
        if suffix.is_some() && given.iter().any(|prompt| matches!(prompt, Prompt::Tokens(_))) {
            return Err(fields.wrong("suffix", "left out where prompts are tokens"));
        }
        let tokens = |prompt: &Prompt| match prompt {
            Prompt::Tokens(tokens) => Ok(tokens.clone()),
            Prompt::Text(text) => match suffix {
                Some(suffix) => fill::tokens(served, spelling, text, suffix),
                None => spelling.tokens(served, "prompt", text),
            },
        };
        let prompts = given.iter().map(tokens).collect::<Result<Vec<_>, _>>()?;
        // Zero tokens are allowed for prompt log-probabilities.
        let least = usize::from(settings.prompt_top_logprobs.is_none() && !echo);
        let max_tokens = fields.count("max_tokens", least..=usize::MAX)?;
        // The default is limited by the context.
        let room = prompts.iter().map(|prompt| served.context.saturating_sub(prompt.len())).min().unwrap_or(0);
        let max_tokens = max_tokens.or((room > 0).then_some(MAX_TOKENS.min(room)));
        warn_unknown_fields(shared, &record, &fields)?;
        let taken = Taken {
            stop: settings.stop.clone(),
            calls: None,
            parallel_calls: true,
            prompts: Vec::new(),
            nothing: false,
        };
        let prompts = Prompts { model, prompts, max_tokens, constraint, field: "prompt" };
        let given: Vec<String> = given.into_iter().map(|prompt| prompt.text(served)).collect();
        let form = TextForm {
            logprobs: settings.top_logprobs,
            prompt_logprobs: vllms,
            echoed: if echo { given.clone() } else { Vec::new() },
            choices: settings.choices,
            offsets: Vec::new(),
        };
        Ok((prompts, settings, taken, given, form))
    })
    .await?;
    caller.record.prompt(prompts.prompts.iter().map(Vec::len).sum(), || given.into());
    answer(shared, caller, (prompts, settings, taken), form).await
}

enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

impl Prompt {
    fn text(self, served: &ServedGenerator) -> String {
        match self {
            Self::Text(text) => text,
            Self::Tokens(tokens) => tokens.into_iter().map(|token| spelled(served, token)).collect(),
        }
    }
}

/// Prompts, each a string or tokens; a single one need not be in an array.
fn given(fields: &Fields, served: &ServedGenerator) -> Result<Vec<Prompt>, ApiError> {
    let wanted = format!("a string, tokens below {}, or an array of up to {MAX_SEQUENCES} of these", served.vocabulary);
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
        Some(Value::Array(values)) if (1..=MAX_SEQUENCES).contains(&values.len()) => values.iter().map(one).collect(),
        _ => Err(wrong()),
    }
}

/// An answer in the form of completions.
struct TextForm {
    /// Number of top log-probabilities per token.
    logprobs: Option<usize>,
    /// Whether prompt log-probabilities have their own field, as at vLLM.
    prompt_logprobs: bool,
    /// The prompts, if they are echoed.
    echoed: Vec<String>,
    /// Number of choices per prompt.
    choices: usize,
    /// Characters of each choice before the stream's next token.
    offsets: Vec<usize>,
}

impl TextForm {
    /// The logprobs object of tokens, the first of which starts at a character offset; and the
    /// offset after the last.
    fn logprobs(&self, served: &ServedGenerator, tokens: &[&OutputToken], mut offset: usize) -> (Value, usize) {
        let Some(count) = self.logprobs else { return (Value::Null, offset) };
        let (mut names, mut logprobs, mut top_logprobs, mut offsets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for token in tokens {
            let name = spelled(served, token.token);
            offsets.push(offset);
            offset += name.chars().count();
            names.push(name);
            logprobs.push(token.log_probability.map(|logprob| logprob.max(-9999.0)));
            let others = token.top_logprobs.iter().take(count);
            let others = others.map(|(id, logprob)| (spelled(served, *id), json!(logprob.max(-9999.0))));
            top_logprobs.push(match token.log_probability {
                Some(_) => Value::Object(others.collect::<Map<String, Value>>()),
                None => Value::Null,
            });
        }
        if tokens.is_empty() {
            return (Value::Null, offset);
        }
        let told = json!({
            "tokens": names, "token_logprobs": logprobs, "top_logprobs": top_logprobs, "text_offset": offsets,
        });
        (told, offset)
    }

    fn echo(&self, choice: usize) -> &str {
        self.echoed.get(choice / self.choices).map_or("", String::as_str)
    }

    /// Whether the prompt's tokens are among the choice's tokens.
    fn echoes_tokens(&self) -> bool {
        self.logprobs.is_some() && !self.echoed.is_empty()
    }

    /// The tokens in an answer, starting with the prompt's if they are echoed.
    fn told<'a>(&self, prompt: &'a [OutputToken], tokens: &'a [OutputToken]) -> Vec<&'a OutputToken> {
        let prompt = if self.echoes_tokens() { prompt } else { &[] };
        prompt.iter().chain(tokens).collect()
    }
}

impl Choices for TextForm {
    fn names(&self) -> [&'static str; 3] {
        ["cmpl-", "text_completion", "text_completion"]
    }

    fn opening(&self, choice: usize) -> Option<Value> {
        let text = self.echo(choice);
        let opening = json!({ "index": choice, "text": text, "logprobs": null, "finish_reason": null });
        (!text.is_empty()).then_some(opening)
    }

    fn chunk(&mut self, served: &ServedGenerator, piece: Piece) -> Value {
        self.offsets.resize(self.offsets.len().max(piece.choice + 1), 0);
        // The prompt's text has been sent. Later offsets follow from the tokens' text, also where a
        // part of it is held back.
        let tokens = self.told(&piece.prompt, &piece.tokens);
        let (logprobs, offset) = self.logprobs(served, &tokens, self.offsets[piece.choice]);
        self.offsets[piece.choice] = offset;
        let mut told =
            json!({ "index": piece.choice, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish });
        if self.prompt_logprobs && !piece.prompt.is_empty() {
            told["prompt_logprobs"] = prompt_logprobs(served, &piece.prompt);
        }
        told
    }

    fn whole(&mut self, served: &ServedGenerator, choice: usize, text: Whole) -> Value {
        let (logprobs, _) = self.logprobs(served, &self.told(&text.prompt, &text.tokens), 0);
        let words = format!("{}{}", self.echo(choice), text.text);
        let mut told = json!({ "index": choice, "text": words, "logprobs": logprobs, "finish_reason": text.finish });
        if self.prompt_logprobs {
            told["prompt_logprobs"] = prompt_logprobs(served, &text.prompt);
        }
        told
    }
}
