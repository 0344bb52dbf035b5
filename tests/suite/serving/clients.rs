//! Clients that stall, send garbage or vanish, and a server that stops.

use super::*;

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
        // The sequences of clients that left end, and their pages are freed.
        let begun = Instant::now();
        while ["writing", "reading", "queued"].iter().any(|name| server.metric(&format!("fireclay_{name}")) > 0.0) {
            assert!(begun.elapsed() < Duration::from_secs(30), "sequences without clients go on");
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
                        "messages": [{ "role": "user", "content": "x" }], "prompt": "x",
                        "max_tokens": 1 + random.below(4),
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
                        let mut at = (0..=random.below(text.len())).rev();
                        text.truncate(at.find(|at| text.is_char_boundary(*at)).unwrap_or(0));
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
