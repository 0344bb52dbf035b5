//! The page, the model, health and metrics.

use axum::Extension;
use axum::extract::{Path, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::error::ApiError;
use super::generation::unknown_model;
use super::{Asked, Shared, json_response};
use crate::server::Phase;
use crate::server::served::{Served, ServedGenerator};

/// The page may load nothing from other origins and cannot be framed.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

fn file(kind: &'static str, text: &'static str) -> Response {
    let mut response = ([(header::CONTENT_TYPE, kind), (header::CACHE_CONTROL, "no-cache")], text).into_response();
    response.headers_mut().insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    response.headers_mut().insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    response
}

pub(super) async fn page() -> Response {
    file("text/html; charset=utf-8", include_str!("../page/index.html"))
}

pub(super) async fn style() -> Response {
    file("text/css; charset=utf-8", include_str!("../page/page.css"))
}

pub(super) async fn script() -> Response {
    file("text/javascript; charset=utf-8", include_str!("../page/page.js"))
}

pub(super) async fn icon() -> Response {
    file("image/svg+xml", include_str!("../page/icon.svg"))
}

pub(super) async fn openapi() -> Response {
    file("application/json", include_str!("openapi.json"))
}

/// 200 when requests are answered, else 503.
pub(super) async fn health((State(shared), _): Asked) -> Response {
    let (status, state) = match shared.phase() {
        Phase::Ready => (StatusCode::OK, "ready"),
        Phase::Loading => (StatusCode::SERVICE_UNAVAILABLE, "loading"),
        Phase::Draining(_) | Phase::Stopped => (StatusCode::SERVICE_UNAVAILABLE, "draining"),
    };
    json_response(status, &json!({ "status": state }))
}

pub(super) async fn metrics((State(shared), _): Asked) -> Result<Response, ApiError> {
    let text = shared.metrics.text().map_err(|error| ApiError::server(error.to_string()))?;
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Ok(([(header::CONTENT_TYPE, kind)], text).into_response())
}

pub(super) async fn models((State(shared), _): Asked) -> Response {
    let models = served(&shared);
    json_response(StatusCode::OK, &json!({ "object": "list", "data": models }))
}

pub(super) async fn model((State(shared), Extension(_)): Asked, Path(id): Path<String>) -> Result<Response, ApiError> {
    let model = served(&shared).into_iter().find(|model| model["id"] == id.as_str());
    model.map(|model| json_response(StatusCode::OK, &model)).ok_or_else(|| unknown_model(&shared, &id))
}

/// The models, once loaded: the first, and those with an adapter on it.
fn served(shared: &Shared) -> Vec<Value> {
    let model = |name: &str, paths: Vec<&str>, context: usize| {
        let mut model = json!({
            "id": name, "object": "model", "created": shared.created, "owned_by": "fireclay",
            "context_length": context, "max_model_len": context, "paths": paths,
        });
        if name != shared.options.name {
            model["parent"] = shared.options.name.as_str().into();
        }
        model
    };
    match shared.served.get() {
        None => Vec::new(),
        Some(Served::Generators(writers)) => {
            let model = |writer: &ServedGenerator| {
                let converses = writer.template.as_ref().is_some_and(|template| template.check().is_ok());
                let chat = if converses { &["/v1/chat/completions", "/v1/responses"][..] } else { &[] };
                model(&writer.name, chat.iter().copied().chain(["/v1/completions"]).collect(), writer.context)
            };
            writers.iter().map(model).collect()
        }
        Some(Served::Encoder(encoder)) => {
            let predicts = encoder.predicts.then_some("/v1/utterances");
            let paths = predicts.into_iter().chain(["/v1/embeddings", "/v1/score", "/v1/rerank"]).collect();
            vec![model(&shared.options.name, paths, encoder.context)]
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::super::responses;
    use super::*;

    #[test]
    fn the_description_has_all_paths_and_fields() {
        let description: Value = serde_json::from_str(include_str!("openapi.json")).expect("JSON");
        let paths = description["paths"].as_object().expect("paths");
        let files = ["/", "/page.css", "/page.js", "/favicon.ico"];
        let missing =
            super::super::PATHS.into_iter().filter(|path| !files.contains(path) && !paths.contains_key(*path));
        assert_eq!(missing.collect::<Vec<&str>>(), [""; 0]);
        // Every field that a handler reads.
        let asked = |source: &'static str| -> HashSet<&'static str> {
            let names = source.split("fields.").skip(1).filter_map(|rest| rest.split_once("(\"")?.1.split('"').next());
            // Not the words of an error.
            names.filter(|name| !name.contains(' ')).collect()
        };
        let shared = concat!(include_str!("generation.rs"), include_str!("constraints.rs"));
        for (schema, sources) in [
            ("ChatRequest", vec![include_str!("chat.rs"), shared]),
            ("CompletionRequest", vec![include_str!("completions.rs"), shared]),
        ] {
            let known = description["components"]["schemas"][schema]["properties"].as_object().expect("properties");
            // `/detokenize` reads tokens in the same file.
            for field in sources.into_iter().flat_map(asked).filter(|field| *field != "tokens") {
                assert!(known.contains_key(field), "{schema} lacks {field}");
            }
        }
        let of = |schema: &str| description["components"]["schemas"][schema]["properties"].as_object();
        for field in asked(include_str!("tokens.rs")) {
            let known = ["TokenizeRequest", "DetokenizeRequest"].into_iter().filter_map(of);
            assert!(known.into_iter().any(|known| known.contains_key(field)), "no schema has {field}");
        }
        // A response is one sequence, and renames some fields of a chat.
        let renamed = responses::RENAMED.map(|(chat, _)| chat);
        let other = |field: &&str| renamed.contains(field) || responses::UNSUPPORTED.contains(field);
        let known = description["components"]["schemas"]["ResponseRequest"]["properties"].as_object();
        for field in responses::OWN.into_iter().chain(asked(shared)).filter(|field| !other(field)) {
            assert!(known.is_some_and(|known| known.contains_key(field)), "ResponseRequest lacks {field}");
        }
    }
}
