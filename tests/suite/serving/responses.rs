//! Responses: the chat API in another form.

use serde_json::{Value, json};

use super::{Server, head, model_folder};

#[test]
fn a_response_says_what_a_chat_says() {
    let folder = model_folder();
    let server = Server::start(folder.path(), &[]);
    let settings = json!({ "temperature": 1, "seed": 5, "messages": null });
    let with = |more: Value| {
        let mut body = settings.clone();
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        body
    };
    let chat = with(json!({ "messages": [{ "role": "user", "content": "x" }], "max_tokens": 9 }));
    let (_, chat) = server.post("/v1/chat/completions", &chat);
    let asked = with(json!({ "input": "x", "max_output_tokens": 9, "metadata": { "kiln": "2" }, "store": true }));
    let (status, response) = server.post("/v1/responses", &asked);
    assert_eq!((status, &response["object"], &response["status"]), (200, &json!("response"), &json!("incomplete")));
    assert_eq!(response["incomplete_details"], json!({ "reason": "max_output_tokens" }));
    assert_eq!([&response["metadata"], &response["store"]], [&json!({ "kiln": "2" }), &json!(false)]);
    let text = &response["output"][0]["content"][0]["text"];
    assert_eq!(text, &chat["choices"][0]["message"]["content"]);
    assert_eq!(response["usage"]["input_tokens"], chat["usage"]["prompt_tokens"]);
    assert_eq!(response["usage"]["output_tokens"], 9);

    // As events: each has its name and number, and the last has everything.
    let mut streamed = asked;
    streamed["stream"] = true.into();
    let (_, events) = server.ask(&head("/v1/responses"), &streamed.to_string());
    let lines: Vec<&str> =
        events.lines().filter(|line| line.starts_with("event: ") || line.starts_with("data: ")).collect();
    let (mut said, mut last) = (String::new(), Value::Null);
    for (at, pair) in lines.chunks(2).enumerate() {
        let event: Value = serde_json::from_str(&pair[1]["data: ".len()..]).expect("JSON");
        assert_eq!(format!("event: {}", event["type"].as_str().expect("a type")), pair[0]);
        assert_eq!(event["sequence_number"], at);
        said.push_str(event["delta"].as_str().unwrap_or_default());
        last = event;
    }
    assert_eq!((&json!(said), &last["type"]), (text, &json!("response.incomplete")));
    assert_eq!(
        [&last["response"]["output"][0]["content"], &last["response"]["usage"]],
        [&response["output"][0]["content"], &response["usage"]]
    );

    for (field, value) in [
        ("previous_response_id", json!("resp_1")),
        ("conversation", json!("conv_1")),
        ("background", json!(true)),
        ("truncation", json!("auto")),
        ("include", json!(["file_search_call.results"])),
        ("n", json!(2)),
        ("messages", json!([])),
        ("response_format", json!({ "type": "text" })),
        ("metadata", json!({ "a": 1 })),
        ("input", json!([])),
        ("temperature", json!(3)),
    ] {
        let (status, answer) = server.post("/v1/responses", &with(json!({ "input": "x", field: value })));
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(field)), "{answer}");
    }
}

#[test]
fn how_much_to_think_reaches_the_template_in_its_own_words() {
    for (variable, effort, other) in [("reasoning_effort", "low", "medium"), ("enable_thinking", "high", "none")] {
        let folder = model_folder();
        let template =
            format!("{{{{ {variable} }}}}{{% for message in messages %}}{{{{ message.content }}}}{{% endfor %}}");
        std::fs::write(folder.path().join("chat_template.jinja"), template).expect("a writable folder");
        let server = Server::start(folder.path(), &[]);
        let read = |effort: &str| {
            let body = json!({ "input": "x", "max_output_tokens": 1, "reasoning": { "effort": effort } });
            let (status, answer) = server.post("/v1/responses", &body);
            assert_eq!((status, &answer["reasoning"]["effort"]), (200, &json!(effort)), "{answer}");
            answer["usage"]["input_tokens"].as_u64().expect("a number")
        };
        assert_ne!(read(effort), read(other), "{variable}");
    }
    let folder = model_folder();
    let server = Server::start(folder.path(), &[]);
    for (effort, status) in [("none", 200), ("high", 400), ("wild", 400)] {
        let body = json!({ "input": "x", "max_output_tokens": 1, "reasoning": { "effort": effort } });
        let (found, answer) = server.post("/v1/responses", &body);
        assert_eq!(found, status, "{answer}");
        assert!(status == 200 || answer["error"]["param"] == "reasoning.effort", "{answer}");
    }
}
