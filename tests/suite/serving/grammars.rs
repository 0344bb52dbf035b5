//! Output constrained by schemas and grammars, however large these are.

use super::*;

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
