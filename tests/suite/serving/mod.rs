//! A server as its clients see it: good ones, bad ones, and many at a time.

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

mod fairness;
mod requests;
mod responses;

/// A folder with a small model of bytes that converses, and whose texts have no end but their length.
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

/// The program, serving; it ends with the test.
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
        // What it logs is read, so that it does not wait for a reader.
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
        // It may refuse before it has read all.
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

    /// Figures by name, those without labels.
    fn metric(&self, name: &str) -> f64 {
        let (status, text) = self.ask("GET /metrics HTTP/1.1", "");
        assert_eq!(status, 200);
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.and_then(|value| value.trim().parse().ok()).unwrap_or_else(|| panic!("no {name} in {text}"))
    }

    fn signal(&self, signal: &str) {
        let sent = Command::new("kill").args([signal, &self.child.id().to_string()]).status();
        assert!(sent.expect("kill is there").success());
    }

    /// Bytes that it has.
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

/// Requests of different lengths and settings, greedy and drawn.
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

#[test]
fn what_a_request_gets_wrong_is_named() {
    let folder = model_folder();
    let server = Server::start(folder.path(), &["--queue", "1", "--rows", "1", "--context", "4000"]);
    let text = |extra: Value| {
        let mut body = json!({ "prompt": "a", "max_tokens": 2 });
        body.as_object_mut().expect("an object").extend(extra.as_object().expect("an object").clone());
        server.post("/v1/completions", &body)
    };
    assert_eq!(
        text(json!({ "unknown": [1], "user": "x", "stop": null, "n": null })).0,
        200,
        "what nobody knows is told in the answer's head"
    );
    let wrong = [
        ("temperature", json!("hot")),
        ("temperature", json!(-1)),
        ("top_p", json!(0)),
        ("top_k", json!(-2)),
        ("n", json!(129)),
        ("max_tokens", json!(0)),
        ("stop", json!([""])),
        ("stop", json!(3)),
        ("seed", json!(1.5)),
        ("stream", json!("yes")),
        ("logit_bias", json!({ "300": 1 })),
        ("logit_bias", json!({ "3": 101 })),
        ("logprobs", json!(21)),
        ("model", json!(1)),
        ("prompt", json!([1, "a"])),
        ("prompt", json!([[]])),
        ("presence_penalty", json!(9)),
        ("stream_options", json!({})),
        ("best_of", json!(3)),
        ("suffix", json!("x")),
        ("skip_special_tokens", json!(false)),
        ("timeout", json!(0)),
        ("prompt_logprobs", json!(-1)),
        ("guided_json", json!(3)),
        ("guided_json", json!({ "type": "pot" })),
        ("guided_regex", json!("(")),
        ("guided_choice", json!([])),
        ("guided_grammar", json!("root ::= \"a\"")),
        ("guided_grammar", json!("start: missing")),
        ("stop_token_ids", json!([3])),
        ("min_tokens", json!(4)),
        ("ignore_eos", json!(true)),
        ("response_format", json!({ "type": "json_object", "schema": { "const": i64::MIN } })),
    ];
    for (field, value) in wrong {
        let (status, answer) = text(json!({ field: value }));
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(field)), "{value}: {answer}");
        let message = answer["error"]["message"].as_str().expect("a message");
        assert!(message.contains(field) || field == "prompt", "{message}");
    }
    // What asks for nothing is let through, and 2.0 is 2.
    let nothing =
        json!({ "guided_json": null, "min_tokens": 0, "ignore_eos": false, "max_tokens": 2.0, "temperature": 1e-8 });
    let (status, answer) = text(nothing);
    let written = answer["usage"]["completion_tokens"].as_u64();
    assert!(status == 200 && written.is_some_and(|tokens| (1..=2).contains(&tokens)), "{answer}");
    let (status, answer) = text(json!({ "max_tokens": 4000 }));
    assert_eq!((status, &answer["error"]["code"]), (400, &json!("context_length_exceeded")));
    let (status, answer) = text(json!({ "model": "another" }));
    assert_eq!((status, &answer["error"]["code"]), (404, &json!("model_not_found")));
    let chat = |messages: Value| server.post("/v1/chat/completions", &json!({ "messages": messages, "max_tokens": 2 }));
    assert_eq!(chat(json!([{ "role": "user", "content": "x" }])).0, 200);
    for (messages, param) in [
        (json!("hello"), "messages"),
        (json!([{ "role": "potter", "content": "x" }]), "messages[0].role"),
        (json!([{ "role": "user" }]), "messages[0].content"),
        (json!([{ "role": "user", "content": "x" }, 3]), "messages[1]"),
    ] {
        let (status, answer) = chat(messages);
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(param)), "{answer}");
    }
    let status = |head: &str, body: &str| server.ask(head, body).0;
    assert_eq!(status("GET /nowhere HTTP/1.1", ""), 404);
    assert_eq!(status("DELETE /v1/models HTTP/1.1", ""), 405);
    assert_eq!(status("POST /v1/completions HTTP/1.1\r\nContent-Type: text/plain", "{}"), 415);
    assert_eq!(status(&head("/v1/completions"), "{"), 400);
    assert_eq!(status(&head("/v1/completions"), "[]"), 400);
    assert_eq!(status(&head("/v1/completions"), &" ".repeat(5 << 20)), 413);
    assert_eq!(status(&head("/v1/completions"), &format!("{}1{}", "[".repeat(90_000), "]".repeat(90_000))), 400);

    // One is decoded and one waits: there is no room for a third.
    let long = json!({ "prompt": "a", "max_tokens": 3900, "stream": true }).to_string();
    let begin = || {
        let mut stream = server.connect();
        let length = long.len();
        write!(stream, "{}\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n{long}", head("/v1/completions"))
            .expect("it reads");
        stream
    };
    let _first = begin();
    while server.metric("fireclay_writing") < 1.0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let _second = begin();
    while server.metric("fireclay_queued") < 1.0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let (status, answer) = text(json!({}));
    assert_eq!((status, &answer["error"]["type"]), (429, &json!("rate_limit_error")));
}

/// A chain of definitions, each of which leads to the next one.
fn chain(length: usize, link: impl Fn(Value) -> Value) -> Value {
    let definition = |at: usize| (format!("a{at}"), link(json!({ "$ref": format!("#/$defs/a{}", at + 1) })));
    let mut definitions: serde_json::Map<String, Value> = (0..length).map(definition).collect();
    definitions.insert(format!("a{length}"), json!({ "type": "integer" }));
    json!({ "$ref": "#/$defs/a0", "$defs": definitions })
}

#[test]
fn texts_keep_to_what_a_request_says_by_any_of_its_names() {
    let folder = model_folder();
    let server = Server::start(folder.path(), &[]);
    let asked = |path: &str, extra: Value| {
        let mut body = json!({
            "prompt": "a", "messages": [{ "role": "user", "content": "x" }], "max_tokens": 60, "n": 3, "logit_bias": {},
        });
        body.as_object_mut().expect("an object").extend(extra.as_object().expect("an object").clone());
        let (status, answer) = server.post(path, &body);
        assert_eq!(status, 200, "{extra}: {answer}");
        let choices = answer["choices"].as_array().expect("choices").clone();
        assert_eq!(choices.len(), 3);
        let text = |choice: Value| match &choice["text"] {
            Value::String(text) => text.clone(),
            _ => choice["message"]["content"].as_str().expect("a text").to_string(),
        };
        choices.into_iter().map(text).collect::<Vec<String>>()
    };
    let schema = json!({ "enum": ["celadon", "tenmoku"] });
    let format = json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": schema } });
    let is_json = |text: &str| text == "\"celadon\"" || text == "\"tenmoku\"";
    let is_choice = |text: &str| text == "red" || text == "blue";
    let is_five = |text: &str| text.len() == 5 && text.bytes().all(|byte| b"xy".contains(&byte));
    let grammar = "start: \"pot\" (\"-\" SIZE)~2\nSIZE: /[0-9]{2}/\n";
    let is_pot = |text: &str| text.len() == 9 && text.starts_with("pot-");
    for path in ["/v1/completions", "/v1/chat/completions"] {
        for (extra, is) in [
            (json!({ "response_format": format }), &is_json as &dyn Fn(&str) -> bool),
            (json!({ "guided_json": schema }), &is_json),
            (json!({ "guided_json": schema.to_string() }), &is_json),
            (json!({ "structured_outputs": { "json": schema } }), &is_json),
            (json!({ "guided_choice": ["red", "blue"] }), &is_choice),
            (json!({ "structured_outputs": { "choice": ["red", "blue"] } }), &is_choice),
            (json!({ "guided_regex": "^[xy]{5}$" }), &is_five),
            (json!({ "structured_outputs": { "regex": "[xy]{5}" } }), &is_five),
            (json!({ "guided_grammar": grammar }), &is_pot),
            (json!({ "structured_outputs": { "grammar": grammar } }), &is_pot),
            (json!({ "structured_outputs": { "json_object": true } }), &|text: &str| text.starts_with('{')),
        ] {
            for text in asked(path, extra.clone()) {
                assert!(is(&text), "{extra}: {text:?}");
            }
        }
    }
}

#[test]
fn schemas_and_grammars_that_are_too_large_are_refused_and_do_no_harm() {
    let folder = model_folder();
    let server = Server::start(folder.path(), &[]);
    let wanted = server.text(&request(3));
    let object = |inner: Value| json!({ "type": "object", "properties": { "a": inner }, "required": ["a"] });
    let names = |count: usize| (0..count).map(|at| (format!("p{at}"), json!({}))).collect::<serde_json::Map<_, _>>();
    for (schema, told) in [
        (chain(250, object), "too deep"),
        (chain(300, |inner| json!({ "type": "array", "items": inner })), "too deep"),
        (chain(300, |inner| json!({ "anyOf": [inner, { "type": "null" }] })), "too deep"),
        (json!({ "type": "object", "properties": names(5000) }), "2000 properties"),
        (json!({ "enum": (0..60_000).collect::<Vec<usize>>() }), "10000 values"),
        (json!({ "const": i64::MIN }), "too low"),
    ] {
        let format = json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": schema } });
        let tool = json!([{ "type": "function", "function": { "name": "heat", "parameters": schema } }]);
        for (path, extra) in [
            ("/v1/completions", json!({ "guided_json": schema, "n": 16 })),
            ("/v1/chat/completions", json!({ "response_format": format, "n": 16 })),
            ("/v1/chat/completions", json!({ "tools": tool, "tool_choice": "required" })),
        ] {
            let mut body = json!({ "prompt": "a", "messages": [{ "role": "user", "content": "x" }], "max_tokens": 3 });
            body.as_object_mut().expect("an object").extend(extra.as_object().expect("an object").clone());
            let (status, answer) = server.post(path, &body);
            let message = answer["error"]["message"].as_str().expect("a message");
            assert!(status == 400 && (message.contains(told) || extra["tools"].is_array()), "{path}: {answer}");
        }
    }
    // What is nested in the body itself is not read any deeper than that.
    let deep = (0..640).fold("{}".to_string(), |inner, _| format!("{{\"properties\":{{\"a\":{inner}}}}}"));
    let body = format!("{{\"prompt\":\"a\",\"guided_json\":{deep}}}");
    let (status, answer) = server.ask(&head("/v1/completions"), &body);
    assert!(status == 400 && answer.contains("recursion limit"), "{status} {answer}");
    // One that is small, and grows as it is followed.
    let grows = json!({ "prompt": "a", "max_tokens": 3000, "guided_grammar": "start: a\na: a a a | \"x\"\n" });
    let (status, answer) = server.post("/v1/completions", &grows);
    assert_eq!((status, &answer["error"]["code"]), (400, &json!("grammar_limit")), "{answer}");
    let mut streamed = grows;
    streamed["stream"] = true.into();
    let (status, answer) = server.ask(&head("/v1/completions"), &streamed.to_string());
    let last = answer.lines().rfind(|line| line.starts_with("data: ")).expect("events");
    assert!(status == 200 && last.contains("grammar_limit") && answer.contains("\"text\":\"x"), "{answer}");
    assert_eq!(server.text(&request(3)), wanted);
}

#[test]
fn whoever_asks_for_no_grammar_does_not_wait_for_those_of_others() {
    let folder = model_folder();
    let server = Server::start(folder.path(), &[]);
    let small = || {
        let begin = Instant::now();
        server.text(&json!({ "prompt": "pot", "max_tokens": 2 }));
        begin.elapsed()
    };
    let longest = |times: &dyn Fn() -> bool| {
        let mut longest = Duration::ZERO;
        while times() {
            longest = longest.max(small());
        }
        longest
    };
    let begin = Instant::now();
    let alone = longest(&|| begin.elapsed() < Duration::from_millis(500));
    let values = |which: usize, count: usize| (0..count).map(|at| format!("{which}v{at}")).collect::<Vec<String>>();
    let enums = |count: usize| {
        let named = (0..12).map(|at| (format!("e{at}"), json!({ "enum": values(at, count) })));
        json!({ "type": "object", "properties": named.collect::<serde_json::Map<_, _>>() })
    };
    let many = (0..2000).map(|at| (format!("p{at}"), json!({ "type": "integer" }))).collect::<serde_json::Map<_, _>>();
    let many = json!({ "type": "object", "properties": many });
    let bodies: Vec<String> = [enums(20_000), enums(800), many]
        .into_iter()
        .map(|schema| json!({ "prompt": "a", "max_tokens": 30, "n": 4, "guided_json": schema }).to_string())
        .collect();
    let loaded = std::thread::scope(|scope| {
        let heavy: Vec<_> = (0..4)
            .map(|at| {
                let (server, bodies) = (&server, &bodies);
                scope.spawn(move || {
                    for round in 0..3 {
                        let (status, answer) = server.ask(&head("/v1/completions"), &bodies[(at + round) % 3]);
                        assert!(matches!(status, 200 | 400 | 429), "{status} {answer}");
                    }
                })
            })
            .collect();
        longest(&|| !heavy.iter().all(std::thread::ScopedJoinHandle::is_finished))
    });
    println!("a small text took {alone:?} at the most alone, and {loaded:?} loaded large schemas");
    assert!(loaded < alone + Duration::from_secs(5), "{loaded:?}, {alone:?} alone");
}

#[test]
fn a_template_that_cannot_be_read_stops_chats_alone() {
    let folder = model_folder();
    let template = "{% for message in messages %}{{ message.content }}{% endfor %}\n{% include 'other' %}";
    std::fs::write(folder.path().join("chat_template.jinja"), template).expect("a writable folder");
    let server = Server::start(folder.path(), &[]);
    let body = json!({ "prompt": "a", "max_tokens": 20, "temperature": 0 });
    assert!(!server.text(&body).is_empty());
    let body = json!({ "messages": [{ "role": "user", "content": "x" }], "max_tokens": 2 });
    let (status, answer) = server.post("/v1/chat/completions", &body);
    let message = answer["error"]["message"].as_str().unwrap_or_default();
    assert!(status == 400 && message.contains("line 2: the tag include"), "{status}: {answer}");
}

#[test]
fn a_key_lets_in_and_another_host_does_not() {
    let folder = model_folder();
    let open = Server::start(folder.path(), &[]);
    let get = |server: &Server, extra: &str| {
        let mut stream = server.connect();
        write!(stream, "GET /v1/models HTTP/1.1\r\nConnection: close\r\n{extra}\r\n").expect("it reads");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        answer.split(' ').nth(1).and_then(|status| status.parse::<u16>().ok()).expect("a status")
    };
    let port = open.address.port();
    assert_eq!(get(&open, &format!("Host: 127.0.0.1:{port}\r\n")), 200);
    assert_eq!(get(&open, "Host: localhost\r\n"), 200);
    assert_eq!(get(&open, "Host: pots.example\r\n"), 403, "a name that was made to point here");
    drop(open);

    let keys = folder.path().join("keys");
    std::fs::write(&keys, "first\n\nsecond\n").expect("writable");
    let server = Server::start(folder.path(), &["--api-key-file", keys.to_str().expect("a path")]);
    for (given, status) in [("second", 200), ("first", 200), ("third", 401), ("firs", 401), ("", 401)] {
        assert_eq!(
            get(&server, &format!("Host: pots.example\r\nAuthorization: Bearer {given}\r\n")),
            status,
            "{given}"
        );
    }
    assert_eq!(get(&server, "Host: localhost\r\n"), 401);
    for (path, status) in [("/", 200), ("/health", 200), ("/page.js", 200), ("/openapi.json", 200), ("/metrics", 401)] {
        assert_eq!(server.ask(&format!("GET {path} HTTP/1.1"), "").0, status, "{path}");
    }
}

#[test]
fn a_server_that_would_be_open_to_all_does_not_start() {
    let refused = |args: &[&str]| {
        let output = program()
            .args(["serve", "--backend", "cpu", "--model"])
            .args(args)
            .env_remove("FIRECLAY_API_KEY")
            .output()
            .expect("the program runs");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).lines().last().unwrap_or_default().to_string())
    };
    let folder = model_folder();
    let folder = folder.path().to_str().expect("a path");
    let (code, told) = refused(&[folder, "--port", "0", "--host", "0.0.0.0"]);
    assert_eq!(code, Some(2));
    assert!(told.contains("--api-key") && told.contains("--insecure"), "{told}");
    let (code, told) = refused(&["/nowhere/at/all", "--port", "0"]);
    assert!(code == Some(1) && told.contains("/nowhere/at/all"), "{told}");
    let (code, told) = refused(&[folder, "--port", "0", "--tls-cert", "/nowhere.pem", "--tls-key", "/nowhere.key"]);
    assert!(code == Some(1) && told.contains("/nowhere.pem"), "{told}");
    let (code, told) = refused(&[folder, "--port", "0", "--context", "9999"]);
    assert!(code == Some(2) && told.contains("4096"), "{told}");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("its address").port().to_string();
    let (code, told) = refused(&[folder, "--port", &port]);
    assert!(code == Some(1) && told.contains(&port), "{told}");
}

/// A TLS connection as a client makes it that takes any certificate for good.
#[test]
fn texts_come_over_tls() {
    let folder = model_folder();
    let made = rcgen::generate_simple_self_signed(vec!["localhost".into()]).expect("a certificate");
    let (cert, key) = (folder.path().join("cert.pem"), folder.path().join("key.pem"));
    std::fs::write(&cert, made.cert.pem()).expect("writable");
    std::fs::write(&key, made.signing_key.serialize_pem()).expect("writable");
    let paths = [cert.to_str().expect("a path"), key.to_str().expect("a path")];
    let server = Server::start(folder.path(), &["--tls-cert", paths[0], "--tls-key", paths[1]]);
    let root = ureq::tls::Certificate::from_pem(made.cert.pem().as_bytes()).expect("a certificate");
    let roots = ureq::tls::RootCerts::new_with_certs(&[root]);
    let tls = ureq::tls::TlsConfig::builder().root_certs(roots).build();
    let agent: ureq::Agent = ureq::Agent::config_builder().tls_config(tls).build().into();
    let url = format!("https://localhost:{}/v1/completions", server.address.port());
    let body = json!({ "prompt": "a", "max_tokens": 5, "temperature": 0 }).to_string();
    let mut answer = agent.post(url).header("Content-Type", "application/json").send(&body).expect("an answer");
    let answer: Value = serde_json::from_str(&answer.body_mut().read_to_string().expect("text")).expect("JSON");
    assert_eq!(answer["usage"]["completion_tokens"], 5);
    // Plain HTTP gets nothing, and does no harm.
    assert_eq!(server.ask("GET /health HTTP/1.1", "").0, 0);
    assert!(server.url.starts_with("https://"));
}

/// What clients do that stall, send garbage or vanish.
fn misbehave(server: &Server, at: usize) -> Option<TcpStream> {
    let mut stream = server.connect();
    let body = json!({ "prompt": "on ", "max_tokens": 300, "stream": true, "n": 2 }).to_string();
    let long = format!("{}\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n", head("/v1/completions"), body.len());
    let whole = body.replace("\"stream\":true", "\"stream\":null");
    let sent = match at % 9 {
        // Nothing at all, half a head, half a body.
        0 => Ok(()),
        1 => stream.write_all(&long.as_bytes()[..40]),
        2 => stream.write_all(&[long.as_bytes(), &body.as_bytes()[..20]].concat()),
        // Garbage, in HTTP's place and within it.
        3 => stream.write_all(&(0..2000).map(|byte| (byte * at) as u8).collect::<Vec<u8>>()),
        4 => stream.write_all(format!("{long}{}", "x".repeat(body.len())).as_bytes()),
        // A text that nobody reads, two whose client has gone, one whose client goes after a while.
        6 => stream.write_all(format!("{long}{whole}").as_bytes()),
        5 | 7 => stream.write_all(format!("{long}{body}").as_bytes()),
        _ => stream.write_all(format!("{long}{body}").as_bytes()).and_then(|()| {
            let mut some = [0; 300];
            stream.set_read_timeout(Some(Duration::from_millis(20)))?;
            let _ = stream.read(&mut some);
            Ok(())
        }),
    };
    // It may have closed already.
    drop(sent);
    // Those that vanish do so now.
    (at % 9 < 6).then_some(stream)
}

#[cfg(target_os = "linux")]
#[test]
fn a_thousand_bad_clients_do_no_harm_to_sixteen_good_ones() {
    let folder = model_folder();
    let server = Server::start(folder.path(), &["--connections", "1200"]);
    let good = |server: &Server| -> Vec<String> { (0..16).map(|at| server.text(&request(at))).collect() };
    let wanted = good(&server);
    let storm = |server: &Server| {
        std::thread::scope(|scope| {
            let bad = scope.spawn(move || (0..1000).filter_map(|at| misbehave(server, at)).collect::<Vec<_>>());
            let asked: Vec<_> = (0..16)
                .map(|at| scope.spawn(move || (0..3).map(|_| retried(server, &request(at))).collect::<Vec<String>>()))
                .collect();
            for (asked, wanted) in asked.into_iter().zip(&wanted) {
                assert!(asked.join().expect("an answer").iter().all(|text| text == wanted));
            }
            drop(bad.join().expect("they come and go"));
        });
        // All texts of those that have gone end, and their pages return.
        let begun = Instant::now();
        while ["writing", "reading", "queued"].iter().any(|name| server.metric(&format!("fireclay_{name}")) > 0.0) {
            assert!(begun.elapsed() < Duration::from_secs(30), "texts that nobody waits for go on");
            std::thread::sleep(Duration::from_millis(50));
        }
        assert_eq!(server.metric("fireclay_cache_pages"), server.metric("fireclay_cache_pages_left"));
    };
    // At first the server and its allocator grow to what so many connections take.
    storm(&server);
    storm(&server);
    let before = server.memory();
    // How far the allocator has given back what it had depends on the moment; what leaks grows with each storm.
    let mut after = f64::INFINITY;
    for _ in 0..4 {
        storm(&server);
        after = server.memory();
        if after < 1.05 * before {
            break;
        }
    }
    assert!(after < 1.05 * before, "{:.1} MB before, {:.1} after", before / 1e6, after / 1e6);
    assert_eq!(good(&server), wanted);
}

/// A text, asked for again while the queue is full.
fn retried(server: &Server, body: &Value) -> String {
    for _ in 0..600 {
        let (status, answer) = server.post("/v1/completions", body);
        match status {
            200 => return answer["choices"][0]["text"].as_str().expect("a text").to_string(),
            429 => std::thread::sleep(Duration::from_millis(50)),
            _ => panic!("{status}: {answer}"),
        }
    }
    panic!("there was never room");
}

/// Numbers that only look random.
struct Random(u64);

impl Random {
    fn below(&mut self, most: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % most
    }

    fn pick<'a, T>(&mut self, values: &'a [T]) -> &'a T {
        &values[self.below(values.len())]
    }

    /// Any value.
    fn value(&mut self, depth: usize) -> Value {
        match self.below(if depth == 0 { 9 } else { 11 }) {
            0 => Value::Null,
            1 => (self.below(2) == 0).into(),
            2 => (self.below(40) as i64 - 5).into(),
            3 => json!(self.below(1000) as f64 / 300.0 - 1.0),
            4 => self.pick(&[json!(u64::MAX), json!(i64::MIN), json!(1e308), json!(-0.0), json!(1e-9)]).clone(),
            5 | 6 => Value::from(*self.pick(&[
                "",
                "a",
                "user",
                "assistant",
                "auto",
                "json_schema",
                "\u{0}\u{FFFF}",
                "{% x %}",
                "é火🔥",
                "<|im_end|>",
                "function",
                "object",
                "text",
                "required",
                "$ref",
                "[[[[",
                "\\d+(a|b)*",
                "function_call",
                "output_text",
            ])),
            7 | 8 => "long ".repeat(self.below(60)).into(),
            9 => (0..self.below(4)).map(|_| self.value(depth - 1)).collect(),
            _ => {
                let names = [
                    "role",
                    "content",
                    "type",
                    "function",
                    "name",
                    "parameters",
                    "json_schema",
                    "schema",
                    "properties",
                    "3",
                ];
                (0..self.below(4)).map(|_| ((*self.pick(&names)).to_string(), self.value(depth - 1))).collect()
            }
        }
    }
}

/// A request for a chat as one for a response.
fn as_response(mut body: Value) -> Value {
    let Some(fields) = body.as_object_mut() else { return body };
    fields.remove("prompt");
    for (chat, own) in [("messages", "input"), ("max_tokens", "max_output_tokens")] {
        let value = fields.remove(chat).unwrap_or_default();
        fields.entry(own).or_insert(value);
    }
    if let Some(format) = fields.remove("response_format") {
        let format = format
            .get("json_schema")
            .map(|schema| json!({ "type": "json_schema", "name": "x", "schema": schema.get("schema") }));
        fields.insert("text".into(), json!({ "format": format }));
    }
    if let Some(tool) = body.get_mut("tools").and_then(|tools| tools.get_mut(0))
        && let Some(function) = tool["function"].as_object()
    {
        let mut flat = function.clone();
        flat.insert("type".into(), "function".into());
        *tool = flat.into();
    }
    body
}

#[test]
fn ten_thousand_odd_requests_get_an_answer_and_do_no_harm() {
    let folder = model_folder();
    let server = Server::start(folder.path(), &["--context", "200"]);
    let wanted = server.text(&request(3));
    let fields = [
        "messages",
        "prompt",
        "input",
        "n",
        "stream",
        "stream_options",
        "stop",
        "seed",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "logprobs",
        "top_logprobs",
        "logit_bias",
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "tools",
        "tool_choice",
        "max_tokens",
        "echo",
        "best_of",
        "max_completion_tokens",
        "chat_template_kwargs",
        "repetition_penalty",
        "presence_penalty",
        "encoding_format",
        "instructions",
        "text",
        "include",
        "reasoning",
        "metadata",
    ];
    let schema = json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": { "type": "object" } } });
    let tool = json!([{ "type": "function", "function": { "name": "heat", "parameters": { "type": "object" } } }]);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (server, schema, tool, fields) = (&server, &schema, &tool, &fields);
            scope.spawn(move || {
                let mut random = Random(thread);
                for round in 0..2500 {
                    let path = *random.pick(&[
                        "/v1/chat/completions",
                        "/v1/responses",
                        "/v1/completions",
                        "/v1/embeddings",
                        "/v1/utterances",
                    ]);
                    let mut body = json!({
                        "messages": [{ "role": "user", "content": "x" }], "prompt": "x", "max_tokens": 1 + random.below(4),
                    });
                    if random.below(6) == 0 {
                        body["response_format"] = schema.clone();
                    }
                    if random.below(6) == 0 {
                        body["tools"] = tool.clone();
                    }
                    for _ in 0..random.below(4) {
                        let value = random.value(4);
                        match random.below(4) {
                            // Somewhere within.
                            0 => body["messages"][0][*random.pick(&["role", "content", "tool_calls", "name"])] = value,
                            1 if body["response_format"].is_object() => {
                                body["response_format"]["json_schema"] = json!({ "name": "x", "schema": value });
                            }
                            _ => body[*random.pick(fields)] = value,
                        }
                        if !body["messages"][0].is_object() {
                            break;
                        }
                    }
                    if path == "/v1/responses" {
                        body = as_response(body);
                    }
                    let mut text = body.to_string();
                    if random.below(10) == 0 {
                        let at = (0..=random.below(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
                        text.truncate(at);
                    }
                    let (status, answer) = server.ask(&head(path), &text);
                    let good = status == 200 || ((400..500).contains(&status) && answer.contains("\"error\""));
                    assert!(good, "round {round}: {status} {answer} for {path} {text}");
                    assert!(!answer.contains("\"server_error\""), "round {round}: {answer} for {path} {text}");
                }
            });
        }
    });
    assert_eq!(server.text(&request(3)), wanted);
}

#[cfg(unix)]
#[test]
fn a_server_that_is_stopped_leaves_no_answer_cut_short_without_a_word() {
    let folder = model_folder();
    // Time enough for some of the answers, and then for none.
    for (drain, all_whole) in [("60", true), ("0", false)] {
        let mut server = Server::start(folder.path(), &["--drain-seconds", drain]);
        let ends: Vec<String> = std::thread::scope(|scope| {
            let asked: Vec<_> = (0..12)
                .map(|at| {
                    let server = &server;
                    scope.spawn(move || {
                        let body = json!({ "prompt": "on ", "max_tokens": 3000, "stream": at % 3 != 0, "seed": at });
                        let (status, answer) = server.ask(&head("/v1/completions"), &body.to_string());
                        assert!(status == 200 || status == 503, "{status}");
                        answer
                    })
                })
                .collect();
            while server.metric("fireclay_writing") < 12.0 {
                std::thread::sleep(Duration::from_millis(5));
            }
            server.signal("-TERM");
            let begun = Instant::now();
            while all_whole && begun.elapsed() < Duration::from_millis(300) {
                // While it drains, it says so, and takes nothing new.
                let (status, told) = server.ask("GET /health HTTP/1.1", "");
                if status == 503 {
                    assert!(told.contains("draining"));
                    let (status, answer) = server.post("/v1/completions", &json!({ "prompt": "a" }));
                    assert_eq!((status, &answer["error"]["code"]), (503, &json!("stopping")));
                    break;
                }
            }
            asked.into_iter().map(|asked| asked.join().expect("an answer")).collect()
        });
        let whole = |answer: &&String| answer.contains("data: [DONE]") || answer.contains("\"usage\":{");
        let told = |answer: &&String| answer.contains("\"code\":\"stopping\"");
        assert!(ends.iter().all(|answer| whole(&answer) || told(&answer)), "cut short: {ends:?}");
        assert_eq!(ends.iter().filter(whole).count() == 12, all_whole);
        assert_eq!(server.child.wait().expect("it ends").code(), Some(0));
    }
}
