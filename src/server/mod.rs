//! A model behind OpenAI's HTTP API: chat, completions, embeddings, utterances, and a chat page.
//!
//! ```text
//! connection -> http (checks, template, tokens) -> queue -> engine, on the thread that owns the device
//!      ^                                                       |
//!      '--- text, as JSON or events <- answers (stop strings) <-'  a channel of tokens per sequence
//! ```

mod answers;
mod engine;
mod grammar;
mod http;
mod keys;
mod log;
mod metrics;
mod queue;
mod schema;
mod served;
mod tools;

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::net::TcpListener;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

use self::engine::Engine;
use self::keys::Keys;
use self::metrics::Metrics;
use self::queue::Queue;
use self::served::Served;
use crate::backend::BackendName;
use crate::failure::Failure;
use crate::model_folder::ModelSource;
use crate::precision::{CachePrecision, Precision};

/// HTTP threads; the device has one of its own.
const HTTP_THREADS: usize = 2;
/// Threads that tokenize long inputs and compile grammars.
const TEXT_THREADS: usize = 4;
/// How long finished answers may take to leave.
const LEAVE: Duration = Duration::from_secs(5);

/// Where a server listens, and what it allows.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The address.
    pub host: IpAddr,
    /// The port; 0 picks a free one.
    pub port: u16,
    /// The model's name in the API.
    pub name: String,
    /// LoRA adapters by their names in the API, each served next to the model, on the same weights.
    pub adapters: Vec<(String, PathBuf)>,
    /// API keys, one of which each request must send; empty to require none.
    pub keys: Vec<String>,
    /// Whether it may listen beyond this machine without a key.
    pub insecure: bool,
    /// Certificate chain and private key, PEM files, for HTTPS.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// The request log's format and stream.
    pub log: LogFormat,
    /// A chat template to use instead of the model's own.
    pub chat_template: Option<PathBuf>,
    /// Whether prompts and answers are logged.
    pub log_texts: bool,
    /// Whether unknown fields are refused, instead of only named in the response header and the
    /// log.
    pub strict: bool,
    /// Allowed origins of cross-origin requests, such as `https://example.org`; `*` allows all.
    pub allowed_origins: Vec<String>,
    /// Limits of requests.
    pub limits: Limits,
}

impl ServerOptions {
    /// The names of the served models: the model's, then those of the adapters.
    fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.name.as_str()).chain(self.adapters.iter().map(|(name, _)| name.as_str()))
    }
}

/// Format of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// Human-readable lines on stderr.
    Text,
    /// One JSON object per line on stdout.
    Json,
    /// No log.
    Off,
}

/// Limits of requests.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Maximum number of sequences decoded concurrently; `None` for the device's default.
    pub rows: Option<usize>,
    /// Maximum tokens of a sequence, prompt included; `None` for the model's context.
    pub context: Option<usize>,
    /// Tokens in the KV cache; `None` for what the sequences need.
    pub cache_tokens: Option<usize>,
    /// Token budget of a step, decode and prefill together; `None` for the device's default.
    pub step_tokens: Option<usize>,
    /// Data type of the KV cache.
    pub cache: CachePrecision,
    /// Maximum number of waiting requests.
    pub queue: usize,
    /// Maximum size of a request body, in bytes.
    pub body_bytes: usize,
    /// Maximum number of answers per prompt.
    pub answers: usize,
    /// Maximum number of connections.
    pub connections: usize,
    /// Time limit of a request.
    pub request: Duration,
    /// Time that running answers have after the server is told to stop.
    pub drain: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            rows: None,
            context: None,
            cache_tokens: None,
            step_tokens: None,
            cache: CachePrecision::Auto,
            queue: 256,
            body_bytes: 4 << 20,
            answers: 128,
            connections: 1100,
            request: Duration::from_secs(600),
            drain: Duration::from_secs(30),
        }
    }
}

/// State of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The model is loading.
    Loading,
    /// Requests are answered.
    Ready,
    /// Running answers finish until this time; new requests are refused.
    Draining(Instant),
    /// Everything is done.
    Stopped,
}

/// State shared by the threads.
pub(crate) struct Shared {
    options: ServerOptions,
    keys: Keys,
    /// TLS, if configured.
    tls: RwLock<Option<TlsAcceptor>>,
    phase: watch::Sender<Phase>,
    served: OnceLock<Served>,
    queue: Queue,
    metrics: Metrics,
    /// Start time, in seconds since 1970.
    created: u64,
}

impl Shared {
    fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    /// Refuses new requests and finishes running ones. Returns whether it was draining already.
    fn drain(&self) -> bool {
        let until = Instant::now() + self.options.limits.drain;
        let changed = self.phase.send_if_modified(|phase| match phase {
            Phase::Loading | Phase::Ready => {
                *phase = Phase::Draining(until);
                true
            }
            Phase::Draining(_) | Phase::Stopped => false,
        });
        self.queue.wake();
        !changed
    }
}

/// A listening server.
pub struct Server {
    shared: Arc<Shared>,
    runtime: Runtime,
    connections: JoinHandle<()>,
    address: SocketAddr,
}

/// Controls a server from another thread.
#[derive(Clone)]
pub struct ServerHandle(Arc<Shared>);

impl ServerHandle {
    /// Asks the server to finish its answers and end. Returns whether it was asked before.
    pub fn stop(&self) -> bool {
        self.0.drain()
    }

    /// Replaces the API keys and reloads the certificate. Running requests continue.
    ///
    /// # Errors
    /// If a key is empty, the keys become none or were none, or a certificate file cannot be used.
    /// The old ones stay in use then.
    pub fn reload(&self, keys: &[String]) -> Result<(), Failure> {
        let shared = &self.0;
        let tls = shared.options.tls.as_ref().map(|(cert, key)| http::tls(cert, key)).transpose()?;
        shared.keys.replace(keys)?;
        *shared.tls.write().unwrap_or_else(PoisonError::into_inner) = tls;
        Ok(())
    }
}

impl Server {
    /// Starts to listen. Requests are told that the model is loading.
    ///
    /// # Errors
    /// If the address is reachable from other machines without a key or permission, is taken, two
    /// models have one name, or a certificate file cannot be used.
    pub fn bind(options: ServerOptions) -> Result<Self, Failure> {
        let (host, port) = (options.host, options.port);
        let mut names = HashSet::new();
        if let Some(twice) = options.names().find(|name| !names.insert(*name)) {
            return Err(Failure::usage(format!(
                "two models are named {twice}: name an adapter with --adapter NAME=DIR"
            )));
        }
        if !host.is_loopback() && options.keys.is_empty() && !options.insecure {
            return Err(Failure::usage(format!(
                "--host {host} is reachable from other machines: set --api-key or --api-key-file, or --insecure"
            )));
        }
        let tls = options.tls.as_ref().map(|(cert, key)| http::tls(cert, key)).transpose()?;
        options.allowed_origins.iter().try_for_each(|origin| http::check_origin(origin))?;
        let keys = Keys::new(&options.keys)?;
        let runtime = Builder::new_multi_thread()
            .worker_threads(HTTP_THREADS)
            .max_blocking_threads(TEXT_THREADS)
            .thread_name("http")
            .enable_all()
            .build()
            .map_err(|error| Failure::new(format!("cannot start the server's threads: {error}")))?;
        let taken = |error: std::io::Error| Failure::new(format!("{host} port {port}: {error}"));
        let listener = runtime.block_on(TcpListener::bind((host, port))).map_err(taken)?;
        let address = listener.local_addr().map_err(taken)?;
        let shared = Arc::new(Shared {
            keys,
            tls: RwLock::new(tls),
            phase: watch::Sender::new(Phase::Loading),
            served: OnceLock::new(),
            queue: Queue::new(options.limits.queue),
            metrics: Metrics::new(&options.name),
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
            options,
        });
        let connections = runtime.spawn(http::serve(listener, Arc::clone(&shared)));
        Ok(Self { shared, runtime, connections, address })
    }

    /// The address it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// A handle to stop it and to replace its keys.
    pub fn handle(&self) -> ServerHandle {
        ServerHandle(Arc::clone(&self.shared))
    }

    /// Loads a model folder and answers requests until stopped. This thread owns the device. Calls
    /// `ready` when the model is loaded.
    ///
    /// # Errors
    /// If the model cannot be loaded or the device fails; running answers end with an error then.
    pub fn run(
        self,
        backend: BackendName,
        model: impl Into<ModelSource>,
        precision: Precision,
        ready: impl FnOnce() + Send,
    ) -> Result<(), Failure> {
        let engine = Engine { shared: Arc::clone(&self.shared), model: model.into(), precision, ready };
        let served = catch_unwind(AssertUnwindSafe(|| backend.run(engine)));
        let served = served.unwrap_or_else(|panic| {
            let reason = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
            Err(Failure::new(format!("the device thread failed: {}", reason.unwrap_or("no reason is known"))))
        });
        self.shared.phase.send_replace(Phase::Stopped);
        self.shared.queue.close();
        let Self { runtime, connections, .. } = self;
        // Let answers leave; slow clients are cut off.
        let _ = runtime.block_on(async { tokio::time::timeout(LEAVE, connections).await });
        runtime.shutdown_timeout(Duration::from_millis(100));
        served
    }
}
