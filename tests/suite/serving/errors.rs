//! What a client gets wrong, and a template that cannot be read.

use super::*;

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
