//! `/v1/score` and `/v1/rerank`, in vLLM's and Cohere's form. A cross-encoder scores each pair at
//! once; for other encoders the score is the cosine of the embeddings.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Value, json};

use super::encoders::{MAX_INPUTS, ask, encoder};
use super::error::ApiError;
use super::generation::{named, random, warn_unknown_fields};
use super::{Asked, Caller, Shared, body, json_response};
use crate::server::engine::Job;
use crate::server::served::{Served, ServedEncoder};

/// A score for each pair of `text_1` and `text_2`: one with each, or pairwise.
pub(super) async fn score(asked: Asked, request: Request) -> Result<Response, ApiError> {
    let (State(shared), Extension(caller)) = asked;
    let fields = body(&shared, request).await?;
    named(&shared, &fields)?;
    encoder(&shared)?;
    let (firsts, seconds) = (fields.strings("text_1", MAX_INPUTS)?, fields.strings("text_2", MAX_INPUTS)?);
    let pairs: Vec<(String, String)> = match (firsts.len(), seconds.len()) {
        (0, _) => return Err(fields.wrong("text_1", &format!("a string or up to {MAX_INPUTS} of them"))),
        (_, 0) => return Err(fields.wrong("text_2", &format!("a string or up to {MAX_INPUTS} of them"))),
        (1, _) => seconds.into_iter().map(|second| (firsts[0].clone(), second)).collect(),
        (one, other) if one == other => firsts.into_iter().zip(seconds).collect(),
        (one, _) => return Err(fields.wrong("text_2", &format!("{one} strings, as text_1 has"))),
    };
    warn_unknown_fields(&shared, &caller.record, &fields)?;
    let (scores, tokens) = scored(&shared, &caller, pairs).await?;
    let data = scores.iter().enumerate();
    let data: Vec<Value> = data.map(|(at, score)| json!({ "object": "score", "index": at, "score": score })).collect();
    let body = json!({
        "id": id("score"), "object": "list", "model": shared.options.name, "data": data, "usage": usage(tokens),
    });
    Ok(json_response(StatusCode::OK, &body))
}

/// Documents ranked by their score for a query.
pub(super) async fn rerank(asked: Asked, request: Request) -> Result<Response, ApiError> {
    let (State(shared), Extension(caller)) = asked;
    let fields = body(&shared, request).await?;
    named(&shared, &fields)?;
    encoder(&shared)?;
    let query = fields.string("query")?.ok_or_else(|| fields.wrong("query", "a string"))?.to_string();
    let wanted = format!("an array of 1 to {MAX_INPUTS} strings, or objects with text");
    let given = fields.array("documents")?.filter(|given| (1..=MAX_INPUTS).contains(&given.len()));
    let given = given.ok_or_else(|| fields.wrong("documents", &wanted))?;
    let text = |document: &Value| {
        let text = document.as_str().or_else(|| document["text"].as_str());
        text.map(str::to_string).ok_or_else(|| fields.wrong("documents", &wanted))
    };
    let documents = given.iter().map(text).collect::<Result<Vec<String>, ApiError>>()?;
    // At vLLM 0 means all.
    let most = fields.count("top_n", 0..=usize::MAX)?.filter(|most| *most > 0).unwrap_or(documents.len());
    let shows = fields.flag("return_documents", true)?;
    warn_unknown_fields(&shared, &caller.record, &fields)?;
    let pairs = documents.iter().map(|document| (query.clone(), document.clone())).collect();
    let (scores, tokens) = scored(&shared, &caller, pairs).await?;
    let mut order: Vec<usize> = (0..documents.len()).collect();
    order.sort_by(|one, other| scores[*other].total_cmp(&scores[*one]));
    let result = |at: usize| {
        let mut told = json!({ "index": at, "relevance_score": scores[at] });
        if shows {
            told["document"] = json!({ "text": documents[at] });
        }
        told
    };
    let body = json!({
        "id": id("rerank"), "model": shared.options.name, "usage": usage(tokens),
        "results": order.into_iter().take(most).map(result).collect::<Vec<Value>>(),
    });
    Ok(json_response(StatusCode::OK, &body))
}

fn id(kind: &str) -> String {
    format!("{kind}-{:016x}", random())
}

fn usage(tokens: usize) -> Value {
    json!({ "prompt_tokens": tokens, "total_tokens": tokens })
}

/// The score of each pair, and the number of tokens read.
async fn scored(
    shared: &Arc<Shared>,
    caller: &Caller,
    pairs: Vec<(String, String)>,
) -> Result<(Vec<f32>, usize), ApiError> {
    let work = Arc::clone(shared);
    let given = json!(pairs);
    let (of_pairs, of_texts) = tokio::task::spawn_blocking(move || {
        let Some(Served::Encoder(encoder)) = work.served.get() else { return Err(ApiError::stopping()) };
        let pair = |(first, second): &(String, String)| {
            let pair = encoder.tokenizer.encode_pair(first, second).map_err(wrong)?;
            fits(encoder, pair.0.len()).map(|()| pair)
        };
        let text = |text: &String| {
            let text =
                encoder.text_encoder.encode_foreign(text).map_err(|failure| ApiError::request(failure.to_string()))?;
            fits(encoder, text.ids.len()).map(|()| text)
        };
        Ok(match encoder.scores {
            true => (pairs.iter().map(pair).collect::<Result<Vec<_>, _>>()?, Vec::new()),
            // All pairs may share the first text.
            false => {
                let one = pairs.iter().all(|(first, _)| *first == pairs[0].0);
                let firsts = pairs.iter().take(if one { 1 } else { pairs.len() }).map(|(first, _)| first);
                let inputs = firsts.chain(pairs.iter().map(|(_, second)| second));
                (Vec::new(), inputs.map(text).collect::<Result<Vec<_>, _>>()?)
            }
        })
    })
    .await
    .unwrap_or_else(|_| Err(ApiError::server("the request could not be read")))?;
    let tokens = of_pairs.iter().map(|(ids, _)| ids.len()).chain(of_texts.iter().map(|text| text.ids.len())).sum();
    caller.record.prompt(tokens, || given.clone());
    if !of_pairs.is_empty() {
        return Ok((ask(shared, caller, |reply| Job::Score { pairs: of_pairs, reply }).await?, tokens));
    }
    let pairs = given.as_array().map_or(0, Vec::len);
    let embeddings = ask(shared, caller, |reply| Job::Embed { inputs: of_texts, reply }).await?;
    let (firsts, seconds) = embeddings.split_at(embeddings.len() - pairs);
    let cosine = |(at, second): (usize, &Vec<f32>)| {
        let first = firsts.get(at).or(firsts.first()).map_or(&[][..], Vec::as_slice);
        first.iter().zip(second).map(|(one, other)| one * other).sum()
    };
    Ok((seconds.iter().enumerate().map(cosine).collect(), tokens))
}

fn wrong(error: fireclay_datasets::DataError) -> ApiError {
    ApiError::request(error.to_string())
}

fn fits(encoder: &ServedEncoder, tokens: usize) -> Result<(), ApiError> {
    if (1..=encoder.context).contains(&tokens) {
        return Ok(());
    }
    let message = format!("the inputs have {tokens} tokens; the model accepts 1 to {}", encoder.context);
    Err(ApiError::request(message).with_code("context_length_exceeded"))
}
