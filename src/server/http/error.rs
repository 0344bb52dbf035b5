//! Errors in OpenAI's form.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::failure::Failure;

/// An error of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::server) struct ApiError {
    pub(in crate::server) status: StatusCode,
    kind: &'static str,
    pub(in crate::server) message: String,
    param: Option<String>,
    code: Option<&'static str>,
    retry_after: Option<u64>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, message: message.into(), param: None, code: None, retry_after: None }
    }

    /// The request is invalid.
    pub(super) fn request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// A field is invalid.
    pub(super) fn param(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::request(message) }
    }

    /// The same error, with the client's name of the field.
    pub(super) fn renamed(self, name: impl Fn(&str) -> String) -> Self {
        let Some(old) = self.param else { return self };
        let new = name(&old);
        Self { message: self.message.replace(&old, &new), param: Some(new), ..self }
    }

    pub(super) fn with_code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    pub(super) fn with_status(self, status: StatusCode) -> Self {
        Self { status, ..self }
    }

    /// The queue is full.
    pub(super) fn busy(retry_after: u64) -> Self {
        let message = "too many requests are waiting: try again later";
        let error = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message);
        Self { retry_after: Some(retry_after), ..error }.with_code("queue_full")
    }

    /// The server is loading or stopping.
    pub(super) fn unavailable(message: &str) -> Self {
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message);
        Self { retry_after: Some(5), ..error }
    }

    pub(in crate::server) fn stopping() -> Self {
        Self::unavailable("the server is stopping").with_code("stopping")
    }

    pub(in crate::server) fn too_slow() -> Self {
        let message = "the answer exceeded the server's time limit";
        Self::new(StatusCode::GATEWAY_TIMEOUT, "server_error", message).with_code("timeout")
    }

    /// A constraint failed while generating.
    pub(in crate::server) fn grammar() -> Self {
        let message = "the text could not be kept to its schema or grammar: it grows beyond what is computed for a \
                       request, or allows none of the model's tokens";
        Self::request(message).with_code("grammar_limit")
    }

    /// An error of the server.
    pub(in crate::server) fn server(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    pub(super) fn json(&self) -> Value {
        json!({ "error": { "message": self.message, "type": self.kind, "param": self.param, "code": self.code } })
    }
}

impl From<Failure> for ApiError {
    fn from(failure: Failure) -> Self {
        match failure.exit_code() {
            2 => Self::request(failure.to_string()),
            _ => Self::server(failure.to_string()),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = super::json_response(self.status, &self.json());
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response.extensions_mut().insert(Reason(self.message));
        response
    }
}

/// The reason, for the log.
#[derive(Clone)]
pub(super) struct Reason(pub(super) String);
