//! HTTP client for the hub. The token goes only to the hub's host, redirects are followed one by
//! one, and stalled transfers fail.

use std::fmt;
use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::time::Duration;

use ureq::http::header::{AUTHORIZATION, CONTENT_LENGTH, CONTENT_RANGE, ETAG, LOCATION, RANGE};
use ureq::http::{HeaderMap, Response, StatusCode, Uri};
use ureq::{Agent, Body};

/// Maximum redirects per request.
const MOST_REDIRECTS: usize = 10;
/// Connection timeout.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// Why a file could not be downloaded.
#[derive(Debug, thiserror::Error)]
pub(super) enum FetchError {
    /// The network failed.
    #[error("{}", cause(.0))]
    Network(#[from] ureq::Error),
    /// The response was not successful.
    #[error("http status: {0}")]
    Status(u16),
    /// A header is missing or invalid.
    #[error("header {0} is missing or invalid")]
    Header(&'static str),
    #[error("too many redirects")]
    Redirects,
    /// The content does not match the hub's metadata.
    #[error("its sha256 is {found} instead of the hub's {expected}; run the same command again to download it anew")]
    Hash { expected: String, found: String },
    #[error("another fireclay process is downloading it (it holds {}): wait for it, then try again", .0.display())]
    Locked(PathBuf),
    #[error(transparent)]
    Io(#[from] io::Error),
}

fn cause(error: &ureq::Error) -> &dyn fmt::Display {
    match error {
        ureq::Error::Io(error) => error,
        error => error,
    }
}

impl FetchError {
    pub(super) fn status(&self) -> Option<u16> {
        if let Self::Status(status) = self { Some(*status) } else { None }
    }

    /// Whether a retry may succeed: the network failed or the hub is busy, not the file system.
    pub(super) fn is_passing(&self) -> bool {
        use ErrorKind::{ConnectionAborted, ConnectionReset, InvalidData, Other, TimedOut, UnexpectedEof};
        match self {
            Self::Network(error) => {
                use ureq::Error::{ConnectionFailed, HostNotFound, Io, Timeout};
                match error {
                    // A refused connection will not recover in half a minute.
                    Io(error) => error.kind() != ErrorKind::ConnectionRefused,
                    error => matches!(error, ConnectionFailed | HostNotFound | Timeout(_)),
                }
            }
            Self::Status(status) => matches!(status, 408 | 429 | 500..),
            Self::Io(error) => {
                let kind = error.kind();
                matches!(kind, ConnectionAborted | ConnectionReset | InvalidData | Other | TimedOut | UnexpectedEof)
            }
            _ => false,
        }
    }
}

/// A response of the hub, or of a host that it redirects to.
pub(super) struct Answer {
    /// The commit of the file.
    pub(super) commit: Option<String>,
    /// The hub's ETag of the content; the sha256 of a large file.
    pub(super) etag: Option<String>,
    pub(super) response: Response<Body>,
}

impl Answer {
    /// Size of the whole file, also if only a range of it was sent.
    pub(super) fn total_size(&self) -> Result<u64, FetchError> {
        let header = if self.is_partial() { CONTENT_RANGE } else { CONTENT_LENGTH };
        let said = text(self.response.headers(), header.as_str());
        let total = said.as_deref().and_then(|said| said.rsplit('/').next()?.parse().ok());
        total.ok_or(FetchError::Header("content-range"))
    }

    /// Offset of the body's first byte in the file.
    pub(super) fn begin(&self) -> Result<u64, FetchError> {
        if !self.is_partial() {
            return Ok(0);
        }
        let said = text(self.response.headers(), CONTENT_RANGE.as_str());
        let begin = said.as_deref().and_then(|said| said.strip_prefix("bytes ")?.split('-').next()?.parse().ok());
        begin.ok_or(FetchError::Header("content-range"))
    }

    fn is_partial(&self) -> bool {
        self.response.status() == StatusCode::PARTIAL_CONTENT
    }
}

/// A connection to one hub.
pub(super) struct Client {
    agent: Agent,
    hub: Uri,
    token: Option<String>,
}

impl Client {
    /// For the hub at `endpoint`; a transfer that receives nothing for `stall` fails.
    pub(super) fn new(endpoint: &str, token: Option<String>, stall: Duration) -> Result<Self, FetchError> {
        let hub = endpoint.parse().ok().filter(|hub: &Uri| hub.scheme().is_some() && hub.authority().is_some());
        let hub = hub.ok_or_else(|| ureq::Error::BadUri(format!("{endpoint} is not a URL")))?;
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_per_read(Some(stall));
        Ok(Self { agent: config.build().into(), hub, token })
    }

    /// Requests a path of the hub, or a range of its bytes.
    pub(super) fn get(&self, path: &str, range: Option<&str>) -> Result<Answer, FetchError> {
        let mut url = format!("{}{path}", self.hub.to_string().trim_end_matches('/'));
        let (mut commit, mut etag, mut linked) = (None, None, None);
        for _ in 0..=MOST_REDIRECTS {
            let uri: Uri = url.parse().map_err(|_| FetchError::Header("location"))?;
            let mut request = self.agent.get(&uri);
            if let Some(range) = range {
                request = request.header(RANGE, range);
            }
            let on_hub = self.is_hub(&uri);
            if let Some(token) = self.token.as_ref().filter(|_| on_hub) {
                request = request.header(AUTHORIZATION, format!("Bearer {token}"));
            }
            let response = request.call()?;
            let headers = response.headers();
            if on_hub {
                commit = text(headers, "x-repo-commit").or(commit);
                linked = text(headers, "x-linked-etag").or(linked);
                etag = text(headers, ETAG.as_str()).or(etag);
            }
            let status = response.status();
            match status.as_u16() {
                301 | 302 | 303 | 307 | 308 => {
                    let location = text(headers, LOCATION.as_str()).ok_or(FetchError::Header("location"))?;
                    url = self.redirected(&uri, &location).ok_or(FetchError::Header("location"))?;
                }
                _ if status.is_success() => {
                    let etag = linked.or(etag).map(|etag| etag.replace('"', "").trim_start_matches("W/").to_string());
                    return Ok(Answer { commit, etag, response });
                }
                status => return Err(FetchError::Status(status)),
            }
        }
        Err(FetchError::Redirects)
    }

    fn is_hub(&self, uri: &Uri) -> bool {
        uri.scheme() == self.hub.scheme() && uri.authority() == self.hub.authority()
    }

    /// The target of a redirect: on the same host, or at an address that is no less secure.
    pub(super) fn redirected(&self, from: &Uri, location: &str) -> Option<String> {
        let (scheme, host) = (from.scheme_str()?, from.authority()?);
        if location.starts_with("//") {
            return Some(format!("{scheme}:{location}"));
        }
        if location.starts_with('/') {
            return Some(format!("{scheme}://{host}{location}"));
        }
        let to: Uri = location.parse().ok()?;
        let safe = match to.scheme_str()? {
            "https" => true,
            "http" => self.hub.scheme_str() == Some("http"),
            _ => false,
        };
        safe.then(|| location.to_string())
    }
}

fn text(headers: &HeaderMap, name: &str) -> Option<String> {
    headers.get(name)?.to_str().ok().map(String::from)
}
