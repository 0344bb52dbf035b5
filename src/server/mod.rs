//! A model behind HTTP, by OpenAI's API: chat, completions, embeddings, utterances, and a page to chat on.
//!
//! ```text
//! connection -> http (checks, template, tokens) -> queue -> engine, on the thread that owns the device
//!      ^                                                       |
//!      '--- text, as JSON or events <- answers (stop texts) <--'  a channel of tokens for each text
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
use crate::precision::{CachePrecision, Precision};

/// Threads that speak HTTP; the device has one of its own.
const HTTP_THREADS: usize = 2;
/// Threads that make tokens of long texts, and compile grammars.
const TEXT_THREADS: usize = 4;
/// How long answers may take to leave when all is done.
const LEAVE: Duration = Duration::from_secs(5);

/// Where a server listens, and what it allows.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The address.
    pub host: IpAddr,
    /// The port; 0 takes one that is free.
    pub port: u16,
    /// What the model is called.
    pub name: String,
    /// Keys, one of which each request has to have, unless there are none.
    pub keys: Vec<String>,
    /// Whether it may listen beyond this machine without a key.
    pub insecure: bool,
    /// Certificate chain and private key, PEM files: HTTPS.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// What is told of requests, on which stream.
    pub log: LogFormat,
    /// A template for conversations, in place of the model's own.
    pub chat_template: Option<PathBuf>,
    /// Whether the log has prompts and answers.
    pub log_texts: bool,
    /// Whether a field that is unknown here is refused, and not only named in the answer's head and
    /// the log.
    pub strict: bool,
    /// Pages of which origins may ask, such as `https://example.org`; `*` is all.
    pub allowed_origins: Vec<String>,
    /// What requests may take.
    pub limits: Limits,
}

/// The form of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// Lines for people, on stderr.
    Text,
    /// A JSON object a line, on stdout.
    Json,
    /// None.
    Off,
}

/// What requests may take.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Texts that are written at a time; as many as suit the device where `None`.
    pub rows: Option<usize>,
    /// Tokens of a text, with its prompt; the model's context where `None`.
    pub context: Option<usize>,
    /// Tokens that the cache holds; as many as suit the rows where `None`.
    pub cache_tokens: Option<usize>,
    /// Tokens of a step: of prompts no more are read while texts are written; as many as suit the device where `None`.
    pub step_tokens: Option<usize>,
    /// What it keeps keys and values as.
    pub cache: CachePrecision,
    /// Requests that wait.
    pub queue: usize,
    /// Bytes of a request's body.
    pub body_bytes: usize,
    /// Answers to each prompt of a request.
    pub answers: usize,
    /// Connections at a time.
    pub connections: usize,
    /// Time for an answer.
    pub request: Duration,
    /// Time that running answers have once the server is told to stop.
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

/// What the server is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The model is not there yet.
    Loading,
    /// It answers.
    Ready,
    /// It finishes what it has begun until then, and takes nothing more.
    Draining(Instant),
    /// All is done.
    Stopped,
}

/// What the threads share.
pub(crate) struct Shared {
    options: ServerOptions,
    keys: Keys,
    /// Where it speaks HTTPS.
    tls: RwLock<Option<TlsAcceptor>>,
    phase: watch::Sender<Phase>,
    served: OnceLock<Served>,
    queue: Queue,
    metrics: Metrics,
    /// When it began, in seconds since 1970.
    created: u64,
}

impl Shared {
    fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    /// Takes nothing more, and finishes what there is; whether it was asked to before.
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

/// A server that listens.
pub struct Server {
    shared: Arc<Shared>,
    runtime: Runtime,
    connections: JoinHandle<()>,
    address: SocketAddr,
}

/// Speaks to a server from another thread.
#[derive(Clone)]
pub struct ServerHandle(Arc<Shared>);

impl ServerHandle {
    /// Asks the server to finish its answers and end; whether it was asked before.
    pub fn stop(&self) -> bool {
        self.0.drain()
    }

    /// Takes other keys, and reads the certificate's files again. What is being answered goes on.
    ///
    /// # Errors
    /// If a key is empty, there were keys and none is left, or a file of the certificate cannot be
    /// used. All stays as it is then.
    pub fn reload(&self, keys: &[String]) -> Result<(), Failure> {
        let shared = &self.0;
        let tls = shared.options.tls.as_ref().map(|(cert, key)| http::tls(cert, key)).transpose()?;
        shared.keys.replace(keys)?;
        *shared.tls.write().unwrap_or_else(PoisonError::into_inner) = tls;
        Ok(())
    }
}

impl Server {
    /// Listens, and says that the model is loading.
    ///
    /// # Errors
    /// If the address is beyond this machine and there is neither a key nor leave to do without, it is taken, or a file of the
    /// certificate cannot be used.
    pub fn bind(options: ServerOptions) -> Result<Self, Failure> {
        let (host, port) = (options.host, options.port);
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

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What ends it, and gives it other keys.
    pub fn handle(&self) -> ServerHandle {
        ServerHandle(Arc::clone(&self.shared))
    }

    /// Loads a model's folder and answers until it is stopped. The device is this thread's. `ready` is told when the model is
    /// there.
    ///
    /// # Errors
    /// If the model cannot be loaded, or the device fails: what is being answered ends with an error then.
    pub fn run(
        self,
        backend: BackendName,
        model: PathBuf,
        precision: Precision,
        ready: impl FnOnce() + Send,
    ) -> Result<(), Failure> {
        let engine = Engine { shared: Arc::clone(&self.shared), model, precision, ready };
        let served = catch_unwind(AssertUnwindSafe(|| backend.run(engine)));
        let served = served.unwrap_or_else(|panic| {
            let reason = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
            Err(Failure::new(format!("the device thread failed: {}", reason.unwrap_or("no reason is known"))))
        });
        self.shared.phase.send_replace(Phase::Stopped);
        self.shared.queue.close();
        let Self { runtime, connections, .. } = self;
        // Answers leave; whoever does not take them has to do without.
        let _ = runtime.block_on(async { tokio::time::timeout(LEAVE, connections).await });
        runtime.shutdown_timeout(Duration::from_millis(100));
        served
    }
}
