//! Cross-origin requests: refused unless their origin is allowed (CORS,
//! <https://fetch.spec.whatwg.org>).

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::{REQUEST_ID, Shared, UNKNOWN_FIELDS};
use crate::failure::Failure;

/// Response headers that a page may read.
const SHOWN: [&str; 3] = [REQUEST_ID, UNKNOWN_FIELDS, "retry-after"];

/// Checks that an origin is spelled as browsers do, such as `https://example.org:8080`, or `*` for
/// all.
///
/// # Errors
/// If it is not.
pub(in crate::server) fn check(origin: &str) -> Result<(), Failure> {
    let rest = origin.strip_prefix("https://").or_else(|| origin.strip_prefix("http://"));
    let host =
        |rest: &str| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_graphic() && !b"/?#@".contains(&byte));
    match origin == "*" || rest.is_some_and(host) {
        true => Ok(()),
        false => Err(Failure::usage(format!(
            "--allowed-origins {origin:?} is not an origin: write https://example.org or http://localhost:3000, \
             without a path; or * for all"
        ))),
    }
}

/// Allows requests from the given origins.
pub(super) async fn allow(State(shared): State<Arc<Shared>>, request: Request, next: Next) -> Response {
    let origin = request.headers().get(header::ORIGIN).cloned();
    let allowed = origin.filter(|origin| is_allowed(&shared.options.allowed_origins, origin));
    let asks_first = request.method() == Method::OPTIONS
        && request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
        && allowed.is_some();
    let wanted = request.headers().get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    let mut response = match asks_first {
        // Before a browser sends the key.
        true => StatusCode::NO_CONTENT.into_response(),
        false => next.run(request).await,
    };
    if !shared.options.allowed_origins.is_empty() {
        // Answers must not be cached across origins.
        response.headers_mut().append(header::VARY, HeaderValue::from_static("origin"));
    }
    if let Some(origin) = allowed {
        grant(response.headers_mut(), origin, wanted.filter(|_| asks_first));
    }
    response
}

fn is_allowed(allowed: &[String], origin: &HeaderValue) -> bool {
    allowed.iter().any(|other| other == "*" || other.as_bytes().eq_ignore_ascii_case(origin.as_bytes()))
}

fn grant(headers: &mut HeaderMap, origin: HeaderValue, wanted: Option<HeaderValue>) {
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    if let Ok(shown) = HeaderValue::from_str(&SHOWN.join(", ")) {
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, shown);
    }
    if let Some(wanted) = wanted {
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST"));
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted);
        headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("3600"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_origin_has_a_scheme_and_a_host_and_no_path() {
        for origin in ["*", "https://example.org", "http://localhost:3000", "http://[::1]:80"] {
            assert_eq!(check(origin), Ok(()), "{origin}");
        }
        for origin in ["", "example.org", "https://", "https://example.org/", "https://a b", "ftp://x"] {
            assert!(check(origin).is_err(), "{origin}");
        }
        let allowed = ["https://example.org".to_string()];
        assert!(is_allowed(&allowed, &HeaderValue::from_static("https://Example.org")));
        assert!(!is_allowed(&allowed, &HeaderValue::from_static("https://example.org.evil.net")));
    }
}
