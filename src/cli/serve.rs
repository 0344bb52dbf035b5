//! `fireclay serve`.

use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use fireclay::Failure;
use fireclay::server::{Limits, LogFormat, Server, ServerOptions};
use fireclay::stdout;
use serde_json::json;

use super::arguments::{DtypeArgs, RunArgs, fetched_source};
use super::signals::drain_on_signals;

/// Where a key may stand that nobody is to see among the arguments.
const KEY_VARIABLE: &str = "FIRECLAY_API_KEY";

#[derive(Args)]
pub(super) struct ServeArgs {
    /// The model's folder or .gguf file, or its name on the hub: OWNER/NAME, or OWNER/NAME:Q4_K_M
    /// of GGUF files
    #[arg(long, value_name = "MODEL")]
    model: PathBuf,
    /// A LoRA adapter for the model: its folder
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// What requests call it [default: the name on the hub, or the folder's]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// The address to listen on; others than this machine's own ask for a key
    #[arg(long, value_name = "H", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    host: IpAddr,
    /// The port; 0 takes one that is free
    #[arg(long, value_name = "P", default_value_t = 8000)]
    port: u16,
    /// A key that requests have to have; FIRECLAY_API_KEY in the environment is another way to say it
    #[arg(long, value_name = "KEY")]
    api_key: Vec<String>,
    /// A file with a key on each line
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Let everyone in who reaches the address
    #[arg(long)]
    insecure: bool,
    /// HTTPS: the certificate chain, PEM
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// HTTPS: its private key, PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Texts that are written at a time [default: 16 on the CPU, 256 on a GPU]
    #[arg(long, value_name = "N")]
    rows: Option<usize>,
    /// Tokens of a text with its prompt, at the most [default: the model's context]
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// Tokens that the cache holds [default: as many as the rows may need, up to 4 GiB]
    #[arg(long, value_name = "N")]
    cache_tokens: Option<usize>,
    /// Tokens of a step, one for each text that is written and the rest of prompts: with more, prompts are read faster, and texts wait longer beside
    /// them [default: 4096 on CUDA, 2048 elsewhere]
    #[arg(long, value_name = "N")]
    step_tokens: Option<usize>,
    /// Maximum number of requests that wait; a client has half of it, and more are refused
    #[arg(long, value_name = "N", default_value_t = 256)]
    queue: usize,
    /// A Jinja template for conversations, in place of the model's own
    #[arg(long, value_name = "FILE")]
    chat_template: Option<PathBuf>,
    /// Origins whose pages may ask, such as https://example.org, separated by commas; * for all
    #[arg(long, value_name = "ORIGINS", value_delimiter = ',')]
    allowed_origins: Vec<String>,
    /// Refuse requests with fields that are unknown here, in place of naming them in
    /// x-unknown-fields
    #[arg(long)]
    strict: bool,
    /// Connections at a time
    #[arg(long, value_name = "N", default_value_t = 1100)]
    connections: usize,
    /// Seconds for an answer
    #[arg(long, value_name = "S", default_value_t = 600)]
    request_seconds: u64,
    /// Seconds that answers have to become complete once the server is told to stop
    #[arg(long, value_name = "S", default_value_t = 30)]
    drain_seconds: u64,
    /// Prompts and answers in the log, too
    #[arg(long)]
    log_texts: bool,
    #[command(flatten)]
    run: RunArgs,
    #[command(flatten)]
    dtypes: DtypeArgs,
}

pub(super) fn serve(mut args: ServeArgs) -> Result<ExitCode, Failure> {
    args.run.select_kernels()?;
    args.run.without_recipe("serve")?;
    let sizes = [
        ("rows", args.rows),
        ("context", args.context),
        ("cache-tokens", args.cache_tokens),
        ("step-tokens", args.step_tokens),
    ];
    for (flag, value) in sizes {
        if value == Some(0) {
            return Err(Failure::usage(format!("--{flag} 0 leaves nothing to write with")));
        }
    }
    if args.queue == 0 || args.connections == 0 {
        return Err(Failure::usage("--queue and --connections have to be 1 or more"));
    }
    let options = ServerOptions {
        host: args.host,
        port: args.port,
        name: args.name.unwrap_or_else(|| name(&args.model)),
        keys: keys(&args.api_key, args.api_key_file.as_deref())?,
        insecure: args.insecure,
        tls: args.tls_cert.zip(args.tls_key),
        log: if args.run.json { LogFormat::Json } else { LogFormat::Text },
        chat_template: args.chat_template,
        log_texts: args.log_texts,
        strict: args.strict,
        allowed_origins: args.allowed_origins,
        limits: Limits {
            rows: args.rows,
            context: args.context,
            cache_tokens: args.cache_tokens,
            step_tokens: args.step_tokens,
            cache: args.dtypes.cache_dtype,
            queue: args.queue,
            connections: args.connections,
            request: Duration::from_secs(args.request_seconds.clamp(1, 86_400)),
            drain: Duration::from_secs(args.drain_seconds.min(86_400)),
            ..Limits::default()
        },
    };
    let (json, called) = (args.run.json, options.name.clone());
    let scheme = if options.tls.is_some() { "https" } else { "http" };
    let open = options.keys.is_empty() && !options.host.is_loopback();
    let backend = args.run.backend();
    let model = fetched_source(&args.model, args.adapter.as_deref(), backend)?;
    let server = Server::bind(options)?;
    let (stop, handle) = (server.handle(), server.handle());
    let reload = move || {
        let read = keys(&args.api_key, args.api_key_file.as_deref()).and_then(|keys| handle.reload(&keys));
        match read {
            Ok(()) => eprintln!("keys and certificate are read again"),
            Err(failure) => eprintln!("keys and certificate stay as they are: {failure}"),
        }
    };
    drain_on_signals(move || stop.stop(), reload)?;
    let url = format!("{scheme}://{}", server.address());
    if open {
        eprintln!("anyone who reaches {url} may use it");
    }
    eprintln!("loading {called}");
    let ready = move || {
        if json {
            stdout::line(json!({ "event": "ready", "url": url, "model": called, "backend": backend.as_str() }));
        }
        eprintln!(
            "{called} answers on {backend}: {url}/v1, and a page to chat on at {url}",
            backend = backend.as_str()
        );
    };
    server.run(backend, model, args.dtypes.precision, ready)?;
    eprintln!("stopped");
    Ok(ExitCode::SUCCESS)
}

/// What a model is called: its name on the hub, or its folder's.
fn name(model: &Path) -> String {
    let shown = model.display().to_string();
    if !model.exists() {
        return shown;
    }
    let whole = model.canonicalize().unwrap_or_else(|_| model.to_path_buf());
    whole.file_name().map_or(shown, |name| name.to_string_lossy().into_owned())
}

/// All keys that are given, in whichever way.
fn keys(given: &[String], file: Option<&Path>) -> Result<Vec<String>, Failure> {
    let mut keys = given.to_vec();
    if let Ok(key) = std::env::var(KEY_VARIABLE) {
        keys.push(key);
    }
    if let Some(file) = file {
        let failed = |reason: &dyn std::fmt::Display| Failure::new(format!("{}: {reason}", file.display()));
        let text = std::fs::read_to_string(file).map_err(|error| failed(&error))?;
        // Lines that begin with # are comments.
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        let lines: Vec<String> = lines.map(String::from).collect();
        if lines.is_empty() {
            return Err(failed(&"no key in it"));
        }
        keys.extend(lines);
    }
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comment_in_a_key_file_is_no_key() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), "# of the potters\n kiln \n\n  # old: glaze\nwheel\n").expect("writable");
        assert_eq!(keys(&[], Some(file.path())).expect("keys"), ["kiln", "wheel"]);
        std::fs::write(file.path(), "# none\n").expect("writable");
        assert!(keys(&[], Some(file.path())).is_err());
    }
}
