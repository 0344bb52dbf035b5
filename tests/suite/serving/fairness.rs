//! One client that uses all it can get, and others.

use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};

use serde_json::{Value, json};

use super::{Server, model_folder};

/// Number of streams of one client.
const STREAMS: usize = 100;
/// Tokens of each, which fill the context.
const TOKENS: usize = 1000;

/// A connection from a local address.
fn connect_from(from: [u8; 4], to: SocketAddr) -> TcpStream {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let stream = runtime.block_on(async {
        let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
        socket.bind(SocketAddr::new(IpAddr::from(from), 0)).expect("an address of this machine");
        socket.connect(to).await.expect("it listens").into_std().expect("a stream")
    });
    stream.set_nonblocking(false).expect("a stream that waits");
    stream
}

/// Sends a request with a key.
fn send(mut stream: TcpStream, key: &str, body: &Value) -> BufReader<TcpStream> {
    let body = body.to_string();
    write!(
        stream,
        "{}\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer {key}\r\nContent-Length: {}\r\n\r\n{body}",
        super::head("/v1/completions"),
        body.len()
    )
    .expect("it reads");
    BufReader::new(stream)
}

/// The text of a complete answer.
fn text(reader: BufReader<TcpStream>) -> String {
    let lines: Vec<String> = reader.lines().map(|line| line.expect("text")).collect();
    let body = lines.last().expect("a body");
    let answer: Value = serde_json::from_str(body).unwrap_or_else(|_| panic!("no answer: {lines:?}"));
    answer["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{answer}")).to_string()
}

/// The text of a stream, and whether it is complete.
fn streamed(reader: BufReader<TcpStream>) -> (String, bool) {
    let (mut text, mut whole) = (String::new(), false);
    for line in reader.lines().map_while(Result::ok) {
        let Some(event) = line.strip_prefix("data: ") else { continue };
        whole |= event == "[DONE]";
        let event: Value = serde_json::from_str(event).unwrap_or_default();
        text.push_str(event["choices"][0]["text"].as_str().unwrap_or_default());
    }
    (text, whole)
}

/// Four clients with consecutive requests, while another has a hundred streams that would occupy
/// all slots for long.
fn clients_are_served_beside_one_with_a_hundred_streams(keys: [&str; 5], addresses: [[u8; 4]; 5]) {
    let folder = model_folder();
    let file = folder.path().join("keys");
    std::fs::write(&file, "first\nsecond\nthird\nfourth\nfifth\n").expect("writable");
    let mut args = vec!["--rows", "4", "--context", "1010"];
    if !keys[0].is_empty() {
        args.extend(["--api-key-file", file.to_str().expect("a path")]);
    }
    let server = Server::start(folder.path(), &args);
    let long = |at: usize| json!({ "prompt": format!("pot {at}"), "max_tokens": TOKENS, "seed": at, "stream": true });
    let good = |client: usize, at: usize| json!({ "prompt": format!("jug {client}"), "max_tokens": 20, "seed": at });
    let ask = |client: usize, body: &Value| send(connect_from(addresses[client], server.address), keys[client], body);
    // Their answers without others.
    let wanted: Vec<String> = (0..12).map(|at| text(ask(1 + at % 4, &good(1 + at % 4, at)))).collect();
    let (first, _) = streamed(ask(0, &long(0)));

    let streams: Vec<BufReader<TcpStream>> = (0..STREAMS).map(|at| ask(0, &long(at))).collect();
    let finished = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let finished = &finished;
        let reads: Vec<_> = streams
            .into_iter()
            .map(|stream| {
                scope.spawn(move || {
                    let read = streamed(stream);
                    finished.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    read
                })
            })
            .collect();
        let clients: Vec<_> = (1..5)
            .map(|client| {
                let ask = &ask;
                scope.spawn(move || {
                    (0..12)
                        .filter(|at| 1 + at % 4 == client)
                        .map(|at| (at, text(ask(client, &good(client, at)))))
                        .collect::<Vec<_>>()
                })
            })
            .collect();
        for client in clients {
            for (at, text) in client.join().expect("a good client") {
                assert_eq!(text, wanted[at], "request {at}");
            }
        }
        // Without shares they would wait until some of the streams are complete.
        let complete = finished.load(std::sync::atomic::Ordering::Relaxed);
        assert!(complete <= 4, "{complete} streams were complete before all others were served");
        let reads: Vec<(String, bool)> = reads.into_iter().map(|read| read.join().expect("a stream")).collect();
        assert_eq!(reads.iter().filter(|(_, whole)| *whole).count(), STREAMS, "a stream was cut");
        assert_eq!(reads[0].0, first, "one that was preempted says what it says alone");
    });
}

#[test]
fn clients_with_keys_are_served_beside_one_with_a_hundred_streams() {
    clients_are_served_beside_one_with_a_hundred_streams(
        ["first", "second", "third", "fourth", "fifth"],
        [[127, 0, 0, 1]; 5],
    );
}

#[cfg(target_os = "linux")]
#[test]
fn clients_with_addresses_are_served_beside_one_with_a_hundred_streams() {
    let address = |client: u8| [127, 0, 0, 1 + client];
    clients_are_served_beside_one_with_a_hundred_streams([""; 5], [0, 1, 2, 3, 4].map(address));
}
