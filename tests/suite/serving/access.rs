//! Who may connect: API keys, hosts and TLS.

use super::*;

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
