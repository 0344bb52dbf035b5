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

/// Environment variable for a key that should not show in the process's arguments.
const KEY_VARIABLE: &str = "FIRECLAY_API_KEY";

#[derive(Args)]
pub(super) struct ServeArgs {
    /// Run or model folder, .gguf file, or model on the hub: OWNER/NAME, or OWNER/NAME:QUANT for
    /// one GGUF quantization, such as :Q4_K_M
    #[arg(long, value_name = "MODEL")]
    model: PathBuf,
    /// Folder of a LoRA adapter. One alone is merged into the weights. Several, or one with a name, are
    /// each served as a model of their own next to the base model; a request names one with "model"
    #[arg(long, value_name = "[NAME=]DIR")]
    adapter: Vec<String>,
    /// Model name in the API [default: the name on the hub, or the folder's]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Address to listen on; an address that other machines can reach needs an API key
    #[arg(long, value_name = "H", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    host: IpAddr,
    /// Port; 0 picks a free one
    #[arg(long, value_name = "P", default_value_t = 8000)]
    port: u16,
    /// API key that clients must send; or set FIRECLAY_API_KEY
    #[arg(long, value_name = "KEY")]
    api_key: Vec<String>,
    /// File with one API key per line
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Let other machines connect without an API key
    #[arg(long)]
    insecure: bool,
    /// Certificate chain for HTTPS, PEM
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Private key for HTTPS, PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Maximum number of sequences decoded concurrently; further requests wait [default: 16 on the
    /// CPU, 256 on a GPU]
    #[arg(long, value_name = "N")]
    rows: Option<usize>,
    /// Maximum length of a sequence in tokens, prompt and output together [default: the model's
    /// context]
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// Size of the KV cache in tokens: raise it if sequences are preempted [default: enough for --rows
    /// sequences of --context tokens, up to 4 GiB]
    #[arg(long, value_name = "N")]
    cache_tokens: Option<usize>,
    /// Token budget of a step: one token per decoding sequence, the rest for prefill. A larger
    /// budget speeds up prefill but lengthens the time between tokens [default: 4096 on CUDA, 2048
    /// elsewhere]
    #[arg(long, value_name = "N")]
    step_tokens: Option<usize>,
    /// Maximum number of waiting requests, at most half of them from one client; further ones are
    /// rejected
    #[arg(long, value_name = "N", default_value_t = 256)]
    queue: usize,
    /// Jinja chat template to use instead of the model's own
    #[arg(long, value_name = "FILE")]
    chat_template: Option<PathBuf>,
    /// Origins that may send cross-origin requests, such as https://example.org, comma-separated; *
    /// allows all
    #[arg(long, value_name = "ORIGINS", value_delimiter = ',')]
    allowed_origins: Vec<String>,
    /// Reject requests with unknown fields, instead of listing them in the response header
    /// x-unknown-fields
    #[arg(long)]
    strict: bool,
    /// Maximum number of open connections
    #[arg(long, value_name = "N", default_value_t = 1100)]
    connections: usize,
    /// Time limit of a request, in seconds
    #[arg(long, value_name = "S", default_value_t = 600)]
    request_seconds: u64,
    /// Time that running requests have to finish at shutdown, in seconds
    #[arg(long, value_name = "S", default_value_t = 30)]
    drain_seconds: u64,
    /// Log prompts and outputs
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
            return Err(Failure::usage(format!("--{flag} must be 1 or more")));
        }
    }
    if args.queue == 0 || args.connections == 0 {
        return Err(Failure::usage("--queue and --connections must be 1 or more"));
    }
    let (merged, adapters) = adapters(&args.adapter);
    let options = ServerOptions {
        adapters,
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
    let model = fetched_source(&args.model, merged.as_deref(), backend)?;
    let server = Server::bind(options)?;
    let (stop, handle) = (server.handle(), server.handle());
    let reload = move || {
        let read = keys(&args.api_key, args.api_key_file.as_deref()).and_then(|keys| handle.reload(&keys));
        match read {
            Ok(()) => eprintln!("reloaded keys and certificate"),
            Err(failure) => eprintln!("kept the old keys and certificate: {failure}"),
        }
    };
    drain_on_signals(move || stop.stop(), reload)?;
    let url = format!("{scheme}://{}", server.address());
    if open {
        eprintln!("warning: anyone who reaches {url} may use it");
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

/// A model's name in the API: its name on the hub, or its folder's.
fn name(model: &Path) -> String {
    let shown = model.display().to_string();
    if !model.exists() {
        return shown;
    }
    let whole = model.canonicalize().unwrap_or_else(|_| model.to_path_buf());
    whole.file_name().map_or(shown, |name| name.to_string_lossy().into_owned())
}

/// The adapter to merge, or the adapters to serve by their names.
fn adapters(given: &[String]) -> (Option<PathBuf>, Vec<(String, PathBuf)>) {
    let is_folder = |given: &str| !given.contains('=') || Path::new(given).exists();
    if let [folder] = given
        && is_folder(folder)
    {
        return (Some(folder.into()), Vec::new());
    }
    let named = |given: &String| match given.split_once('=') {
        Some((name, folder)) if !is_folder(given) => (name.to_string(), folder.into()),
        _ => (name(Path::new(given)), given.into()),
    };
    (None, given.iter().map(named).collect())
}

/// All API keys: of the arguments, the file and the environment.
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
