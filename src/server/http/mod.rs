//! HTTP: routes, authorization, and response headers.

mod chat;
mod completions;
mod connections;
mod constraints;
mod cross_origin;
mod encoders;
pub(super) mod error;
mod fields;
mod fill;
mod generation;
mod info;
mod responses;
mod scores;
mod tokens;

use std::io::Read;
use std::net::IpAddr;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Router};
use flate2::read::MultiGzDecoder;
use futures_util::StreamExt;
use serde_json::Value;

use self::error::{ApiError, Reason};
use self::fields::Fields;
use super::keys::Client;
use super::log::Record;
use super::{Phase, Shared};

pub(super) use self::connections::{serve, tls};
pub(super) use self::cross_origin::check as check_origin;

/// All paths, except those of single models.
const PATHS: [&str; 18] = [
    "/",
    "/page.css",
    "/page.js",
    "/health",
    "/metrics",
    "/openapi.json",
    "/v1/models",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/utterances",
    "/v1/score",
    "/v1/rerank",
    "/favicon.ico",
    "/tokenize",
    "/detokenize",
    "/tokenizer_info",
];

/// Paths that need no key: the page, and health checks.
const OPEN: [&str; 6] = ["/", "/page.css", "/page.js", "/health", "/openapi.json", "/favicon.ico"];

/// The request's id.
const REQUEST_ID: &str = "x-request-id";
/// Names unknown fields of a request.
const UNKNOWN_FIELDS: &str = "x-unknown-fields";

/// The remote address of a connection.
#[derive(Clone, Copy)]
struct Peer(IpAddr);

/// The client of a request, and its log record.
#[derive(Clone)]
struct Caller {
    client: Client,
    record: Arc<Record>,
}

fn router(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/", get(info::page))
        .route("/page.css", get(info::style))
        .route("/page.js", get(info::script))
        .route("/favicon.ico", get(info::icon))
        .route("/health", get(info::health))
        .route("/metrics", get(info::metrics))
        .route("/openapi.json", get(info::openapi))
        .route("/v1/models", get(info::models))
        .route("/v1/models/{*id}", get(info::model))
        .route("/v1/chat/completions", post(chat::chat))
        .route("/v1/responses", post(responses::responses))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/embeddings", post(encoders::embeddings))
        .route("/v1/utterances", post(encoders::utterances))
        .route("/v1/score", post(scores::score))
        .route("/v1/rerank", post(scores::rerank))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/tokenizer_info", get(tokens::tokenizer_info))
        .fallback(nothing_there)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(Arc::clone(&shared), guard))
        .layer(from_fn_with_state(Arc::clone(&shared), cross_origin::allow))
        .with_state(shared)
}

async fn nothing_there(request: Request) -> ApiError {
    let path = request.uri().path();
    ApiError::request(format!("there is no {path}")).with_status(StatusCode::NOT_FOUND).with_code("unknown_url")
}

async fn wrong_method(request: Request) -> ApiError {
    let (method, path) = (request.method(), request.uri().path());
    let error = ApiError::request(format!("{path} does not support {method}"));
    error.with_status(StatusCode::METHOD_NOT_ALLOWED).with_code("method_not_allowed")
}

/// The request's id: the client's own if it is safe to log, else a new one.
fn request_id(headers: &HeaderMap) -> String {
    let given = headers.get(REQUEST_ID).and_then(|id| id.to_str().ok());
    let fits = |id: &&str| (1..=128).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic());
    given.filter(fits).map_or_else(|| format!("req-{:016x}", generation::random()), str::to_string)
}

/// Authorizes a request and creates its log record.
async fn guard(State(shared): State<Arc<Shared>>, mut request: Request, next: Next) -> Response {
    let address = request.extensions().get::<Peer>().map_or(IpAddr::from([0, 0, 0, 0]), |peer| peer.0);
    let path = request.uri().path().to_string();
    // Unknown paths count as one, since anyone can make up more.
    let known = PATHS.into_iter().find(|known| *known == path).unwrap_or("other");
    let id = request_id(request.headers());
    let record = Record::new(Arc::clone(&shared), (address, id.clone()), request.method().as_str(), &path, known);
    let record = Arc::new(record);
    let mut response = match allowed(&shared, request.method(), &path, request.headers()) {
        Ok(key) => {
            let client = key.map_or_else(|| Client::of_address(address), Client::Key);
            request.extensions_mut().insert(Caller { client, record: Arc::clone(&record) });
            next.run(request).await
        }
        Err(error) => error.into_response(),
    };
    if let Some(Reason(reason)) = response.extensions_mut().remove() {
        record.error(&reason);
    }
    record.status(response.status().as_u16());
    if response.extensions().get::<generation::Streams>().is_some() {
        record.streams();
    }
    let unknown = record.unknown_fields();
    if !unknown.is_empty()
        && let Ok(names) = HeaderValue::from_str(&unknown.join(", ").escape_default().to_string())
    {
        response.headers_mut().insert(UNKNOWN_FIELDS, names);
    }
    if let Ok(id) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// The index of the request's key, if one is required.
fn allowed(shared: &Shared, method: &Method, path: &str, headers: &HeaderMap) -> Result<Option<usize>, ApiError> {
    let options = &shared.options;
    // Guards against DNS rebinding.
    if shared.keys.is_empty() && options.host.is_loopback() && !options.insecure && !is_local(headers) {
        let error = ApiError::request("this server answers requests to this machine only; --insecure allows others");
        return Err(error.with_status(StatusCode::FORBIDDEN).with_code("wrong_host"));
    }
    let mut key = None;
    if !shared.keys.is_empty() && !OPEN.contains(&path) {
        let given = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let bearer = given.and_then(|value| value.split_once(' '));
        let bearer = bearer.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer")).map(|(_, key)| key.trim());
        let refused = |message: &str| {
            ApiError::request(message).with_status(StatusCode::UNAUTHORIZED).with_code("invalid_api_key")
        };
        let given = bearer.ok_or_else(|| refused("missing API key: send `Authorization: Bearer KEY`"))?;
        key = Some(shared.keys.find(given).ok_or_else(|| refused("invalid API key"))?);
    }
    if method == Method::POST && path.starts_with("/v1/") {
        match shared.phase() {
            Phase::Loading => return Err(ApiError::unavailable("the model is loading").with_code("loading")),
            Phase::Draining(_) | Phase::Stopped => return Err(ApiError::stopping()),
            Phase::Ready => {}
        }
    }
    Ok(key)
}

/// Whether a request names this machine by address or as `localhost`.
fn is_local(headers: &HeaderMap) -> bool {
    let Some(host) = headers.get(header::HOST).and_then(|host| host.to_str().ok()) else { return true };
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let name = name.trim_start_matches('[').trim_end_matches(']');
    name.parse::<IpAddr>().is_ok() || name == "localhost" || name.ends_with(".localhost")
}

fn json_response(status: StatusCode, body: &Value) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}

/// The fields of a request's body, a JSON object.
async fn body(shared: &Shared, request: Request) -> Result<Fields, ApiError> {
    let (parts, body) = request.into_parts();
    let kind = parts.headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    // A page of another origin cannot send this type without a preflight request.
    if !kind.split(';').next().is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json")) {
        let error = ApiError::request("the body must be JSON: `Content-Type: application/json`");
        return Err(error.with_status(StatusCode::UNSUPPORTED_MEDIA_TYPE));
    }
    let most = shared.options.limits.body_bytes;
    let read = tokio::time::timeout(BODY_TIME, whole(body, most)).await;
    let late = ApiError::request("the body took too long to arrive").with_status(StatusCode::REQUEST_TIMEOUT);
    let bytes = read.map_err(|_| late)??;
    let coding = parts.headers.get(header::CONTENT_ENCODING).map_or("", |value| value.to_str().unwrap_or("?"));
    match coding.trim().to_ascii_lowercase().as_str() {
        "" | "identity" => Fields::parse(&bytes),
        "gzip" | "x-gzip" => Fields::parse(&unzipped(&bytes, most)?),
        other => {
            let error = ApiError::request(format!("the body's encoding must be identity or gzip, not {other}"));
            Err(error.with_status(StatusCode::UNSUPPORTED_MEDIA_TYPE))
        }
    }
}

/// Decompresses gzip, up to `most` bytes.
fn unzipped(bytes: &[u8], most: usize) -> Result<Vec<u8>, ApiError> {
    let mut read = Vec::new();
    let all = MultiGzDecoder::new(bytes).take(most as u64 + 1).read_to_end(&mut read);
    all.map_err(|error| ApiError::request(format!("the body is not valid gzip: {error}")))?;
    if read.len() > most { Err(too_large(most)) } else { Ok(read) }
}

fn too_large(most: usize) -> ApiError {
    ApiError::request(format!("the body has more than {most} bytes")).with_status(StatusCode::PAYLOAD_TOO_LARGE)
}

/// Time limit of a request's body.
const BODY_TIME: std::time::Duration = std::time::Duration::from_secs(30);

async fn whole(body: Body, most: usize) -> Result<Vec<u8>, ApiError> {
    let mut stream = body.into_data_stream();
    let mut bytes = Vec::new();
    while let Some(chunk) = stream.next().await {
        let chunk = chunk.map_err(|error| ApiError::request(format!("the body broke off: {error}")))?;
        if bytes.len() + chunk.len() > most {
            return Err(too_large(most));
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}

type Asked = (State<Arc<Shared>>, Extension<Caller>);
