//! `/tokenize`, `/detokenize` and `/tokenizer_info`, in vLLM's form.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Value, json};

use super::chat::conversation;
use super::error::ApiError;
use super::fields::Fields;
use super::generation::{bounded, named, spelled, warn_unknown_fields, writer};
use super::{Asked, body, json_response};
use crate::server::served::{Served, ServedGenerator, begins};

/// How a text is tokenized.
#[derive(Clone, Copy)]
pub(super) struct Spelling {
    /// Whether the tokenizer's own tokens, such as BOS, are added.
    add_special: bool,
    /// Whether the text of a special token is parsed as that token.
    allow_special: bool,
}

impl Spelling {
    /// Reads the settings of a request. Special tokens are parsed by default: `/v1/completions` is
    /// for complete prompts, and untrusted text belongs in a chat.
    pub(super) fn read(fields: &Fields, allow_special: bool) -> Result<Self, ApiError> {
        Ok(Self {
            add_special: fields.flag("add_special_tokens", true)?,
            allow_special: fields.flag("allow_special_tokens", allow_special)?,
        })
    }

    /// The same for a part of a prompt to which the tokenizer's own tokens are added outside, and
    /// whether they are wanted.
    pub(super) fn of_part(self) -> (Self, bool) {
        (Self { add_special: false, ..self }, self.add_special)
    }

    pub(super) fn tokens(self, served: &ServedGenerator, field: &str, text: &str) -> Result<Vec<u32>, ApiError> {
        bounded(field, text, served.context, served.longest_token)?;
        let tokenizer = &served.tokenizer;
        let tokens = match (self.add_special, self.allow_special) {
            (true, true) => tokenizer.encode_prompt(text),
            (true, false) => tokenizer.encode_foreign_prompt(text),
            (false, true) => tokenizer.encode(text),
            (false, false) => tokenizer.encode_foreign(text),
        };
        tokens.map_err(|error| ApiError::param(field, error.to_string()))
    }
}

/// The tokens of a text or a conversation.
pub(super) async fn tokenize(asked: Asked, request: Request) -> Result<Response, ApiError> {
    let (State(shared), Extension(caller)) = asked;
    let fields = body(&shared, request).await?;
    let model = named(&shared, &fields)?;
    let (work, record) = (Arc::clone(&shared), Arc::clone(&caller.record));
    let made = tokio::task::spawn_blocking(move || {
        let served = writer(&work, model)?;
        let strings = fields.flag("return_token_strs", false)?;
        let tokens = match fields.string("prompt")? {
            Some(text) => Spelling::read(&fields, true)?.tokens(served, "prompt", text)?,
            None if fields.get("messages").is_some() => conversation(served, &fields)?.0,
            None => return Err(fields.wrong("prompt", "a string, or give messages")),
        };
        warn_unknown_fields(&work, &record, &fields)?;
        let spelled: Value = match strings {
            true => tokens.iter().map(|token| spelled(served, *token)).collect::<Vec<String>>().into(),
            false => Value::Null,
        };
        Ok(json!({
            "count": tokens.len(), "max_model_len": served.context, "tokens": tokens, "token_strs": spelled,
        }))
    })
    .await;
    let answer = made.unwrap_or_else(|_| Err(ApiError::server("the request could not be read")))?;
    Ok(json_response(StatusCode::OK, &answer))
}

/// The text of tokens.
pub(super) async fn detokenize(asked: Asked, request: Request) -> Result<Response, ApiError> {
    let (State(shared), Extension(caller)) = asked;
    let fields = body(&shared, request).await?;
    let served = writer(&shared, named(&shared, &fields)?)?;
    let most = format!("an array of tokens below {}", served.vocabulary);
    let given = fields.array("tokens")?.ok_or_else(|| fields.wrong("tokens", &most))?;
    let token = |value: &Value| {
        let token = value.as_u64().and_then(|token| u32::try_from(token).ok());
        token.filter(|token| (*token as usize) < served.vocabulary).ok_or_else(|| fields.wrong("tokens", &most))
    };
    let tokens = given.iter().map(token).collect::<Result<Vec<u32>, ApiError>>()?;
    warn_unknown_fields(&shared, &caller.record, &fields)?;
    let bytes: Vec<u8> = tokens.iter().flat_map(|token| served.bytes_of(*token)).collect();
    Ok(json_response(StatusCode::OK, &json!({ "prompt": String::from_utf8_lossy(&bytes) })))
}

/// What clients need to know of a tokenizer to count tokens.
pub(super) async fn tokenizer_info((State(shared), _): Asked) -> Result<Response, ApiError> {
    let (tokenizer, template, ends, context) = match shared.served.get() {
        Some(Served::Generators(models)) => {
            let served = &models[0];
            let template = served.template.as_ref().map(|template| template.source().to_string());
            (&served.tokenizer, template, served.stop_tokens.clone(), served.context)
        }
        Some(Served::Encoder(served)) => (&served.tokenizer, None, Vec::new(), served.context),
        None => return Err(ApiError::unavailable("the model is loading").with_code("loading")),
    };
    let name = |token: Option<u32>| token.and_then(|token| tokenizer.token(token));
    let begin = begins(tokenizer);
    Ok(json_response(
        StatusCode::OK,
        &json!({
            "tokenizer_class": "fireclay", "vocab_size": tokenizer.vocab_size(), "model_max_length": context,
            "bos_token": name(begin), "bos_token_id": begin, "eos_token": name(ends.first().copied()),
            "eos_token_id": ends.first(), "chat_template": template,
        }),
    ))
}
