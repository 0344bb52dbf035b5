//! A server as its clients see it: well-behaved ones, misbehaving ones, and many at once.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use burn::backend::NdArray;
use fireclay_datasets::{Tokenizer, TokenizerKind};
use fireclay_model::{ModelFolder, Transformer, TransformerConfig};
use serde_json::{Value, json};

use crate::backend;
use crate::cli::program;

mod access;
mod clients;
mod errors;
mod fairness;
mod grammars;
mod requests;
mod responses;

/// A folder with a small byte-level chat model, which never generates a stop token.
fn model_folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let config = TransformerConfig::llama(256, 4096, 32, 2, 4).with_n_kv_heads(2).with_init_deviation(0.3);
    let model: Transformer<NdArray> = config.init(5, &Default::default()).expect("a good config");
    ModelFolder::new(folder.path()).save(&model).expect("a writable folder");
    let tokenizer = Tokenizer::train(TokenizerKind::Byte, "").expect("a tokenizer");
    tokenizer.save(&folder.path().join("tokenizer.json")).expect("a writable folder");
    let template = "{% for message in messages %}[{{ message.role }}: {{ message.content }}]{% endfor %}";
    std::fs::write(folder.path().join("chat_template.jinja"), template).expect("a writable folder");
    folder
}

/// A running server; it ends with the test.
struct Server {
    child: Child,
    address: SocketAddr,
    url: String,
}

impl Server {
    fn start(model: &Path, args: &[&str]) -> Self {
        let mut command = program();
        command
            .args(["serve", "--backend", backend().as_str(), "--port", "0", "--json", "--model"])
            .arg(model)
            .args(args);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("the program starts");
        let mut lines = BufReader::new(child.stdout.take().expect("its stdout"));
        let mut line = String::new();
        lines.read_line(&mut line).expect("a line");
        // Drain its log, so that it does not block.
        std::thread::spawn(move || std::io::copy(&mut lines, &mut std::io::sink()));
        let ready: Value = serde_json::from_str(&line).unwrap_or_else(|_| panic!("not ready: {line}"));
        let url = ready["url"].as_str().expect("an address").to_string();
        let address = url.rsplit('/').next().expect("a host").parse().expect("an address");
        Self { child, address, url }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_secs(120))).expect("a timeout");
        stream
    }

    /// The status of an answer and its body.
    fn ask(&self, head: &str, body: &str) -> (u16, String) {
        let mut stream = self.connect();
        let length = body.len();
        let request =
            format!("{head}\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}");
        // It may refuse before it has read everything.
        let _ = stream.write_all(request.as_bytes());
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8_lossy(&answer).into_owned();
        let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
        (status, answer.split_once("\r\n\r\n").map_or(String::new(), |(_, body)| body.to_string()))
    }

    /// The head of an answer, and its body.
    fn answer(&self, head: &str, body: &[u8]) -> (String, String) {
        let mut stream = self.connect();
        let length = body.len();
        write!(stream, "{head}\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n")
            .and_then(|()| stream.write_all(body))
            .expect("it reads");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        answer.split_once("\r\n\r\n").map(|(head, body)| (head.to_string(), body.to_string())).expect("a head")
    }

    fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, body) = self.ask(&head(path), &body.to_string());
        (status, serde_json::from_str(&body).unwrap_or(Value::Null))
    }

    fn text(&self, body: &Value) -> String {
        let (status, answer) = self.post("/v1/completions", body);
        assert_eq!(status, 200, "{answer}");
        answer["choices"][0]["text"].as_str().expect("a text").to_string()
    }

    /// A metric without labels, by name.
    fn metric(&self, name: &str) -> f64 {
        let (status, text) = self.ask("GET /metrics HTTP/1.1", "");
        assert_eq!(status, 200);
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.and_then(|value| value.trim().parse().ok()).unwrap_or_else(|| panic!("no {name} in {text}"))
    }

    fn signal(&self, signal: &str) {
        let sent = Command::new("kill").args([signal, &self.child.id().to_string()]).status();
        assert!(sent.expect("kill is installed").success());
    }

    /// Its resident memory in bytes.
    #[cfg(target_os = "linux")]
    fn memory(&self) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a line of it");
        1024.0 * line.split_whitespace().next().and_then(|kib| kib.parse::<f64>().ok()).expect("a number")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn head(path: &str) -> String {
    format!("POST {path} HTTP/1.1\r\nContent-Type: application/json")
}

/// Requests of different lengths and settings, greedy and sampled.
fn request(at: usize) -> Value {
    let prompt = format!("pot {} ", at % 7).repeat(1 + at % 9);
    let mut body = json!({ "prompt": prompt, "max_tokens": 5 + at % 40, "seed": at });
    match at % 3 {
        0 => body["temperature"] = 0.into(),
        1 => body["top_k"] = 9.into(),
        _ => body["presence_penalty"] = json!(0.5),
    }
    body
}

#[test]
fn a_text_is_the_same_alone_and_among_31_others() {
    let folder = model_folder();
    let server = Server::start(folder.path(), &[]);
    let alone: Vec<String> = (0..32).map(|at| server.text(&request(at))).collect();
    let together: Vec<String> = std::thread::scope(|scope| {
        let asked: Vec<_> = (0..32)
            .map(|at| {
                scope.spawn({
                    let server = &server;
                    move || server.text(&request(at))
                })
            })
            .collect();
        asked.into_iter().map(|asked| asked.join().expect("an answer")).collect()
    });
    assert_eq!(alone, together);
    assert!(alone.iter().collect::<std::collections::HashSet<_>>().len() > 25, "they differ");
}
