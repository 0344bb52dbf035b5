//! `/v1/embeddings` and `/v1/utterances`, for encoders.

use axum::Extension;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::error::ApiError;
use super::fields::Fields;
use super::generation::{named, warn_unknown_fields};
use super::{Asked, Caller, Shared, body, json_response};
use crate::failure::Failure;
use crate::inference::text_encoder::EncodedText;
use crate::server::engine::Job;
use crate::server::served::{Served, ServedEncoder};

/// Maximum inputs of a request, as at OpenAI.
pub(super) const MAX_INPUTS: usize = 2048;

pub(super) async fn embeddings(asked: Asked, request: Request) -> Result<Response, ApiError> {
    let (State(shared), Extension(caller)) = asked;
    let fields = body(&shared, request).await?;
    named(&shared, &fields)?;
    let encoder = encoder(&shared)?;
    let base64 = match fields.string("encoding_format")? {
        None | Some("float") => false,
        Some("base64") => true,
        Some(_) => return Err(fields.wrong("encoding_format", "\"float\" or \"base64\"")),
    };
    let dimensions = fields.count("dimensions", 1..=encoder.width)?.unwrap_or(encoder.width);
    let record = std::sync::Arc::clone(&caller.record);
    let work = std::sync::Arc::clone(&shared);
    let (inputs, given) = tokio::task::spawn_blocking(move || {
        let Some(Served::Encoder(encoder)) = work.served.get() else { return Err(ApiError::stopping()) };
        let given = fields.get("input").cloned().unwrap_or(Value::Null);
        let tokens = tokens(&fields, encoder)?;
        warn_unknown_fields(&work, &record, &fields)?;
        Ok((tokens, given))
    })
    .await
    .unwrap_or_else(|_| Err(ApiError::server("the request could not be read")))?;
    let count: usize = inputs.iter().map(|input| input.ids.len()).sum();
    caller.record.prompt(count, || given);
    let embeddings = ask(&shared, &caller, |reply| Job::Embed { inputs, reply }).await?;
    let told = |embedding: Vec<f32>| match (base64, shortened(embedding, dimensions)) {
        (true, embedding) => {
            BASE64.encode(embedding.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>()).into()
        }
        (false, embedding) => Value::from(embedding),
    };
    let data = embeddings.into_iter().enumerate();
    let data = data.map(|(at, embedding)| json!({ "object": "embedding", "index": at, "embedding": told(embedding) }));
    let body = json!({
        "object": "list", "data": data.collect::<Vec<Value>>(), "model": shared.options.name,
        "usage": { "prompt_tokens": count, "total_tokens": count },
    });
    Ok(json_response(StatusCode::OK, &body))
}

/// The first elements of an embedding, normalized: for models trained for it (Kusupati et al.,
/// 2022, "Matryoshka Representation Learning").
fn shortened(mut embedding: Vec<f32>, dimensions: usize) -> Vec<f32> {
    if dimensions < embedding.len() {
        embedding.truncate(dimensions);
        let length = embedding.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt().max(1e-12);
        embedding.iter_mut().for_each(|value| *value = (f64::from(*value) / length) as f32);
    }
    embedding
}

pub(super) async fn utterances(asked: Asked, request: Request) -> Result<Response, ApiError> {
    let (State(shared), Extension(caller)) = asked;
    let fields = body(&shared, request).await?;
    named(&shared, &fields)?;
    if !encoder(&shared)?.predicts {
        return Err(ApiError::request(
            "this model was not trained on utterances: it does not predict intents and slots",
        ));
    }
    let inputs = fields.strings("input", MAX_INPUTS)?;
    if inputs.is_empty() {
        return Err(fields.wrong("input", &format!("a string or up to {MAX_INPUTS} of them")));
    }
    warn_unknown_fields(&shared, &caller.record, &fields)?;
    caller.record.prompt(0, || inputs.clone().into());
    let asked = inputs.clone();
    let predictions = ask(&shared, &caller, |reply| Job::Predict { inputs: asked, reply }).await?;
    let data = inputs.iter().zip(predictions).enumerate().map(|(at, (text, prediction))| {
        let mut told = prediction.json(text);
        told["index"] = at.into();
        told
    });
    let body = json!({ "object": "list", "data": data.collect::<Vec<Value>>(), "model": shared.options.name });
    Ok(json_response(StatusCode::OK, &body))
}

pub(super) fn encoder(shared: &Shared) -> Result<&ServedEncoder, ApiError> {
    match shared.served.get() {
        Some(Served::Encoder(encoder)) => Ok(encoder),
        Some(Served::Generators(_)) => Err(ApiError::request("this model generates text: it is not an encoder")),
        None => Err(ApiError::unavailable("the model is loading").with_code("loading")),
    }
}

/// Runs a job on the device.
pub(super) async fn ask<T>(
    shared: &Shared,
    caller: &Caller,
    job: impl FnOnce(oneshot::Sender<Result<T, Failure>>) -> Job,
) -> Result<T, ApiError> {
    let (reply, answer) = oneshot::channel();
    if shared.queue.push(caller.client, 0, vec![job(reply)]).is_err() {
        return Err(ApiError::busy(1));
    }
    let answer = timeout(shared.options.limits.request, answer).await.map_err(|_| ApiError::too_slow())?;
    Ok(answer.map_err(|_| ApiError::stopping())??)
}

/// The inputs, each a string or tokens.
fn tokens(fields: &Fields, encoder: &ServedEncoder) -> Result<Vec<EncodedText>, ApiError> {
    let wanted = format!("a string, tokens below {}, or an array of up to {MAX_INPUTS} of these", encoder.vocabulary);
    let wrong = || fields.wrong("input", &wanted);
    let token = |value: &Value| {
        let token = value.as_u64().and_then(|token| u32::try_from(token).ok());
        token.filter(|token| (*token as usize) < encoder.vocabulary).ok_or_else(wrong)
    };
    let refused = |failure: Failure| ApiError::param("input", failure.to_string());
    let given = |values: &[Value]| {
        encoder.text_encoder.takes_ids().map_err(refused)?;
        let ids = values.iter().map(token).collect::<Result<Vec<u32>, ApiError>>();
        ids.map(EncodedText::from)
    };
    let one = |value: &Value| match value {
        Value::String(text) => encoder.text_encoder.encode_foreign(text).map_err(refused),
        Value::Array(values) => given(values),
        _ => Err(wrong()),
    };
    let inputs = match fields.get("input") {
        Some(text @ Value::String(_)) => vec![one(text)?],
        Some(Value::Array(values)) if values.first().is_some_and(Value::is_number) => vec![given(values)?],
        Some(Value::Array(values)) if (1..=MAX_INPUTS).contains(&values.len()) => {
            values.iter().map(one).collect::<Result<_, _>>()?
        }
        _ => return Err(wrong()),
    };
    let lengths = inputs.iter().map(|input| input.ids.len());
    match lengths.into_iter().find(|length| *length == 0 || *length > encoder.context) {
        Some(length) => {
            let message = format!("an input has {length} tokens; the model accepts 1 to {}", encoder.context);
            Err(ApiError::param("input", message).with_code("context_length_exceeded"))
        }
        None => Ok(inputs),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shortened_embedding_has_length_one() {
        assert_eq!(shortened(vec![0.6, 0.0, 0.8], 3), [0.6, 0.0, 0.8]);
        let short = shortened(vec![0.36, 0.48, 0.8], 2);
        assert!(short.iter().zip([0.6, 0.8]).all(|(value, wanted)| (value - wanted).abs() < 1e-6), "{short:?}");
    }
}
