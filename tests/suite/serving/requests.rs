//! Fields of requests beyond the prompt.

use std::io::Write as _;

use fireclay_datasets::{Tokenizer, TokenizerKind};
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};

use super::{Server, head, model_folder};
use crate::backend;
use crate::cli::{assert_refused, program};
use crate::golden::folder;

#[test]
fn fields_that_are_unknown_are_named_and_a_strict_server_refuses_them() {
    let folder = model_folder();
    let server = Server::start(folder.path(), &[]);
    let body = json!({ "prompt": "a", "max_tokens": 2, "temprature": 0, "user": "mara" }).to_string();
    let (answer, _) = server.answer(&head("/v1/completions"), body.as_bytes());
    assert!(answer.contains("200 OK") && answer.contains("x-unknown-fields: temprature\r\n"), "{answer}");
    let named = format!("{}\r\nX-Request-ID: kiln-7", head("/v1/completions"));
    let (answer, _) = server.answer(&named, b"{\"prompt\": \"a\", \"max_tokens\": 1}");
    assert!(answer.contains("x-request-id: kiln-7") && !answer.contains("x-unknown-fields"), "{answer}");
    let strict = Server::start(folder.path(), &["--strict"]);
    let (status, answer) = strict.post("/v1/completions", &serde_json::from_str(&body).expect("JSON"));
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("temprature")));
}

#[test]
fn a_body_may_be_gzip() {
    let folder = model_folder();
    let server = Server::start(folder.path(), &[]);
    let zipped = |body: &[u8]| {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(body).expect("memory");
        encoder.finish().expect("memory")
    };
    let gzip = format!("{}\r\nContent-Encoding: gzip", head("/v1/completions"));
    let small = zipped(b"{\"prompt\": \"a\", \"max_tokens\": 1}");
    assert!(server.answer(&gzip, &small).0.contains("200 OK"));
    assert!(server.answer(&gzip, b"{}").0.contains("400 Bad"));
    assert!(server.answer(&gzip, &zipped(&vec![b' '; 50 << 20])).0.contains("413 "), "however small it was");
    let other = format!("{}\r\nContent-Encoding: br", head("/v1/completions"));
    assert!(server.answer(&other, b"{}").0.contains("415 "));
}

#[test]
fn pages_of_allowed_origins_may_ask_and_no_others() {
    let folder = model_folder();
    let server = Server::start(folder.path(), &["--allowed-origins", "https://pots.example,http://localhost:3000"]);
    let asked = |origin: &str| {
        let head = format!(
            "OPTIONS /v1/completions HTTP/1.1\r\nOrigin: {origin}\r\nAccess-Control-Request-Method: POST\r\n\
             Access-Control-Request-Headers: authorization, content-type"
        );
        server.answer(&head, b"").0
    };
    let answer = asked("https://pots.example");
    assert!(
        answer.contains("204 ") && answer.contains("access-control-allow-origin: https://pots.example"),
        "{answer}"
    );
    assert!(answer.contains("access-control-allow-headers: authorization, content-type"), "{answer}");
    assert!(!asked("https://evil.example").contains("access-control-allow-origin"));
    let (answer, _) = server.answer("GET /v1/models HTTP/1.1\r\nOrigin: http://localhost:3000", b"");
    assert!(answer.contains("access-control-allow-origin: http://localhost:3000"), "{answer}");
}

#[test]
fn tokens_of_texts_and_texts_of_tokens() {
    let folder = model_folder();
    let server = Server::start(folder.path(), &["--context", "200"]);
    let (status, answer) = server.post("/tokenize", &json!({ "prompt": "pot", "return_token_strs": true }));
    let wanted = json!({ "count": 3, "max_model_len": 200, "tokens": [79, 78, 83], "token_strs": ["p", "o", "t"] });
    assert_eq!((status, answer), (200, wanted));
    let (_, answer) = server.post("/detokenize", &json!({ "tokens": [79, 78, 83] }));
    assert_eq!(answer, json!({ "prompt": "pot" }));
    let (_, answer) = server.post("/tokenize", &json!({ "messages": [{ "role": "user", "content": "x" }] }));
    assert_eq!(answer["count"], "[user: x]".len());
    assert_eq!(server.post("/detokenize", &json!({ "tokens": [256] })).0, 400);
    assert_eq!(server.post("/tokenize", &json!({})).1["error"]["param"], "prompt");
    let (status, info) = server.ask("GET /tokenizer_info HTTP/1.1", "");
    assert!(status == 200 && info.contains("\"vocab_size\":256"), "{info}");
    let (_, models) = server.ask("GET /v1/models HTTP/1.1", "");
    assert!(models.contains("\"max_model_len\":200"), "{models}");
}

/// Log-probabilities of tokens are the same in a prompt as in an output, whatever else is prefilled
/// and however it is split.
#[test]
fn log_probabilities_of_a_prompt_are_those_that_its_tokens_had_when_they_were_generated() {
    let folder = model_folder();
    let server = Server::start(folder.path(), &["--step-tokens", "48", "--rows", "4"]);
    let ask = |body: Value| {
        let (status, answer) = server.post("/v1/completions", &body);
        assert_eq!(status, 200, "{answer}");
        answer
    };
    let prompt: Vec<u32> = (0..90).map(|at| at * 7 % 251).collect();
    let made = ask(json!({ "prompt": prompt, "max_tokens": 150, "temperature": 0, "logprobs": 3, "n": 1 }));
    let told = &made["choices"][0]["logprobs"];
    let bytes = made["choices"][0]["text"].as_str().expect("a text");
    // The same tokens as a prompt; single bytes are not all characters, so they are identified by
    // position.
    let generated = told["token_logprobs"].as_array().expect("numbers");
    assert_eq!(generated.len(), 150, "{bytes}");
    let whole = ask(json!({ "prompt": prompt, "max_tokens": 150, "temperature": 0, "logprobs": 3, "echo": true }));
    let whole = &whole["choices"][0]["logprobs"];
    assert_eq!(whole["token_logprobs"].as_array().map(Vec::len), Some(240));
    assert_eq!(whole["token_logprobs"][0], Value::Null);
    assert_eq!(whole["top_logprobs"][0], Value::Null);
    assert_eq!(whole["text_offset"][90].as_u64(), Some(90), "one character a token");
    // A prompt that begins with the first one's tokens has the same values there.
    let longer: Vec<u32> = prompt.iter().copied().chain((0..60).map(|at| at * 5 % 251)).collect();
    let many: Vec<&Vec<u32>> = std::iter::repeat_n(&longer, 24).collect();
    let scored = ask(json!({ "prompt": many, "max_tokens": 0, "logprobs": 1, "echo": true }));
    assert_eq!(scored["choices"].as_array().map(Vec::len), Some(24));
    assert_eq!(scored["usage"]["completion_tokens"], 0);
    let number = |value: &Value| value.as_f64().expect("a number");
    for choice in scored["choices"].as_array().expect("choices") {
        let numbers = choice["logprobs"]["token_logprobs"].as_array().expect("numbers");
        assert_eq!((numbers.len(), &choice["finish_reason"]), (150, &json!("length")));
        for at in 1..90 {
            let (one, other) = (number(&numbers[at]), number(&whole["token_logprobs"][at]));
            assert!((one - other).abs() < 1e-4, "token {at}: {one} and {other}");
        }
        let top = choice["logprobs"]["top_logprobs"][120].as_object().expect("the most likely");
        assert_eq!(top.len(), 1);
        let best = top.values().next().map(number).expect("one");
        assert!(best >= number(&numbers[120]) - 1e-6);
    }
    // In vLLM's form, by ids, and in a chat.
    let vllms = ask(json!({ "prompt": [5, 6, 7], "max_tokens": 1, "prompt_logprobs": 2 }));
    let told = vllms["choices"][0]["prompt_logprobs"].as_array().expect("numbers").clone();
    assert!(told.len() == 3 && told[0].is_null() && told[1]["6"]["logprob"].is_number(), "{told:?}");
    let body = json!({ "messages": [{ "role": "user", "content": "x" }], "max_tokens": 1, "prompt_logprobs": 0 });
    let (_, chat) = server.post("/v1/chat/completions", &body);
    assert_eq!(chat["choices"][0]["prompt_logprobs"].as_array().map(Vec::len), Some("[user: x]".len()));
    let mut streamed = body;
    streamed["stream"] = true.into();
    let (_, events) = server.ask(&head("/v1/chat/completions"), &streamed.to_string());
    assert!(events.contains("\"prompt_logprobs\":[null,"), "{events}");
}

#[test]
fn places_of_tokens_are_those_of_a_whole_answer_in_a_stream() {
    let folder = model_folder();
    let server = Server::start(folder.path(), &[]);
    for seed in 0..10 {
        // Bytes that are partly held back until a character is complete.
        let mut body = json!({ "prompt": "pot", "max_tokens": 50, "logprobs": 0, "seed": seed, "echo": seed % 2 == 0 });
        let (_, whole) = server.post("/v1/completions", &body);
        body["stream"] = true.into();
        let (_, events) = server.ask(&head("/v1/completions"), &body.to_string());
        let mut places = Vec::new();
        for event in events.lines().filter_map(|line| line.strip_prefix("data: {")) {
            let event: Value = serde_json::from_str(&format!("{{{event}")).expect("JSON");
            places.extend(event["choices"][0]["logprobs"]["text_offset"].as_array().cloned().unwrap_or_default());
        }
        assert_eq!(whole["choices"][0]["logprobs"]["text_offset"], Value::Array(places), "seed {seed}");
    }
}

#[test]
fn usage_tells_what_the_cache_had() {
    let folder = model_folder();
    let server = Server::start(folder.path(), &[]);
    let body = json!({ "prompt": "a pot of clay ".repeat(20), "max_tokens": 2, "temperature": 0 });
    let cached = || server.post("/v1/completions", &body).1["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    assert_eq!(cached(), Some(0));
    // Whole pages of 64 tokens.
    assert_eq!(cached(), Some(256));
    assert_eq!(server.metric("fireclay_prefix_cache_hits_total"), 256.0);
}

#[test]
fn a_prompt_with_a_suffix_has_the_tokens_that_mark_the_middle() {
    let folder = model_folder();
    let file = folder.path().join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_str(&std::fs::read_to_string(&file).expect("a file")).expect("JSON");
    // Instead of three bytes that the prompt does not contain.
    let names = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"];
    let vocabulary = tokenizer["model"]["vocab"].as_object_mut().expect("a vocabulary");
    vocabulary.retain(|_, id| id.as_u64().is_some_and(|id| id < 253));
    tokenizer["added_tokens"] = (0..3)
        .map(|at| {
            json!({ "id": 253 + at, "content": names[at], "special": true, "normalized": false, "lstrip": false,
                    "rstrip": false, "single_word": false })
        })
        .collect();
    let server = Server::start(folder.path(), &[]);
    let body = json!({ "prompt": "ab", "suffix": "c", "max_tokens": 1, "prompt_logprobs": 0 });
    let (status, answer) = server.post("/v1/completions", &body);
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("suffix")), "it has no such tokens");
    drop(server);
    std::fs::write(&file, tokenizer.to_string()).expect("writable");
    let server = Server::start(folder.path(), &[]);
    let (status, answer) = server.post("/v1/completions", &body);
    assert_eq!(status, 200, "{answer}");
    let told = answer["choices"][0]["prompt_logprobs"].as_array().expect("numbers");
    let ids: Vec<&str> =
        told.iter().skip(1).filter_map(|told| Some(told.as_object()?.keys().next()?.as_str())).collect();
    // a and b, the suffix's mark, c, and the middle's; the first token has no value.
    assert_eq!(ids, ["64", "65", "254", "66", "255"]);
    // The text of a mark stays text, unless special tokens are enabled.
    let count = |allowed: bool| {
        let mut body = body.clone();
        body["prompt"] = "a<|fim_middle|>".into();
        body["allow_special_tokens"] = allowed.into();
        server.post("/v1/completions", &body).1["usage"]["prompt_tokens"].as_u64()
    };
    assert_eq!((count(true), count(false)), (Some(6), Some(19)));
}

#[test]
fn documents_are_ranked_by_a_model_with_a_head_for_it() {
    let folder = crate::golden::folder("cross_encoder");
    let golden = std::fs::read_to_string(folder.join("scores.json")).expect("the golden");
    let golden: Value = serde_json::from_str(&golden).expect("JSON");
    let server = Server::start(&folder, &[]);
    let (pairs, wanted) = (golden["pairs"].as_array().expect("pairs"), golden["scores"].as_array().expect("numbers"));
    let of = |part: usize| pairs.iter().map(|pair| pair[part].clone()).collect::<Vec<Value>>();
    let (status, answer) = server.post("/v1/score", &json!({ "text_1": of(0), "text_2": of(1) }));
    assert_eq!(status, 200, "{answer}");
    for (at, wanted) in wanted.iter().enumerate() {
        let score = answer["data"][at]["score"].as_f64().expect("a number");
        assert!((score - wanted.as_f64().expect("a number")).abs() < 1e-5, "{at}: {score}");
    }
    let documents = json!(["fire in the kiln", { "text": "a blue glaze" }, "the clay"]);
    let body = json!({ "query": "the clay is hot", "documents": documents, "top_n": 2 });
    let (_, answer) = server.post("/v1/rerank", &body);
    let results = answer["results"].as_array().expect("results");
    let score = |at: usize| results[at]["relevance_score"].as_f64().expect("a number");
    assert!(results.len() == 2 && score(0) >= score(1), "{answer}");
    let of_the_second = results.iter().find(|result| result["index"] == 1).expect("among the two");
    assert!(
        (of_the_second["relevance_score"].as_f64().expect("a number") - wanted[1].as_f64().expect("a number")).abs()
            < 1e-5
    );
    assert_eq!(of_the_second["document"]["text"], "a blue glaze");
    let (status, answer) = server.post("/v1/score", &json!({ "text_1": ["a", "b"], "text_2": ["c", "d", "e"] }));
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("text_2")));
    // Without a head, an encoder's score is the cosine.
    let (status, short) = server.post("/v1/embeddings", &json!({ "input": "the clay", "dimensions": 4 }));
    assert_eq!((status, short["data"][0]["embedding"].as_array().map(Vec::len)), (200, Some(4)));
}

#[test]
fn embeddings_of_an_encoder_whose_words_have_types_are_made_of_text() {
    let folder = tempfile::tempdir().expect("a folder");
    let data = ["--data", "embedded:names", "--json", "--out", folder.path().to_str().expect("a path")];
    crate::utterances::done_line(&crate::cli::train(&[&crate::utterances::SMALL[..], &data].concat()));
    let server = Server::start(folder.path(), &[]);
    let (status, answer) = server.post("/v1/embeddings", &json!({ "input": ["show the river", "river"] }));
    assert_eq!((status, answer["data"].as_array().map(Vec::len)), (200, Some(2)), "{answer}");
    for input in [json!([2, 7, 3]), json!([[2, 7, 3], [2, 3]])] {
        let (status, answer) = server.post("/v1/embeddings", &json!({ "input": input }));
        assert_eq!((status, &answer["error"]["param"]), (400, &json!("input")), "{answer}");
        assert!(answer["error"]["message"].as_str().is_some_and(|text| text.contains("have types")), "{answer}");
    }
    let (status, answer) = server.post("/v1/score", &json!({ "text_1": "river", "text_2": "river" }));
    let score = answer["data"][0]["score"].as_f64().expect("a number");
    assert!(status == 200 && (score - 1.0).abs() < 1e-3, "{answer}");
}

#[test]
fn a_template_of_a_file_takes_the_place_of_the_models_own() {
    let folder = model_folder();
    let file = folder.path().join("other.jinja");
    std::fs::write(&file, "{% for message in messages %}<{{ message.content }}>{% endfor %}").expect("writable");
    let server = Server::start(folder.path(), &["--chat-template", file.to_str().expect("a path")]);
    let (_, answer) = server.post("/tokenize", &json!({ "messages": [{ "role": "user", "content": "x" }] }));
    assert_eq!(answer["count"], 3);
}

#[cfg(unix)]
#[test]
fn a_hangup_has_keys_and_certificate_read_again() {
    let folder = model_folder();
    let file = folder.path().join("keys");
    std::fs::write(&file, "first\n").expect("writable");
    let server = Server::start(folder.path(), &["--api-key-file", file.to_str().expect("a path")]);
    let status = |key: &str| server.ask(&format!("GET /v1/models HTTP/1.1\r\nAuthorization: Bearer {key}"), "").0;
    assert_eq!((status("first"), status("second")), (200, 401));
    std::fs::write(&file, "second\n").expect("writable");
    server.signal("-HUP");
    while status("second") != 200 {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert_eq!(status("first"), 401);
    // An unreadable file changes nothing.
    std::fs::write(&file, "").expect("writable");
    server.signal("-HUP");
    std::thread::sleep(std::time::Duration::from_millis(200));
    assert_eq!(status("second"), 200);
}

/// A folder with the golden Llama, and a character for each of its tokens.
fn base_with_tokenizer() -> tempfile::TempDir {
    let base = tempfile::tempdir().expect("a folder");
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(folder("llama").join(file), base.path().join(file)).expect("a writable folder");
    }
    let characters: String = ('!'..).take(61).collect();
    let tokenizer = Tokenizer::train(TokenizerKind::Char, &characters).expect("a tokenizer");
    tokenizer.save(&base.path().join("tokenizer.json")).expect("a writable folder");
    base
}

#[test]
fn several_adapters_share_one_model_and_each_is_served_by_its_name() {
    let base = base_with_tokenizer();
    let adapters = ["llama", "llama_dora"].map(|name| folder("adapters").join(name));
    let [plain, dora] = adapters.each_ref().map(|adapter| adapter.to_str().expect("a text"));
    let asked = |model: &str| json!({ "model": model, "prompt": "A5K", "max_tokens": 12, "temperature": 0 });
    let tokens = |server: &Server, model: &str| {
        let (status, answer) = server.post("/v1/completions", &asked(model));
        assert_eq!((status, &answer["model"]), (200, &json!(model)), "{answer}");
        answer["choices"][0]["text"].as_str().expect("a text").to_string()
    };
    let alone = |args: &[&str]| {
        let server = Server::start(base.path(), &[args, &["--name", "m"]].concat());
        tokens(&server, "m")
    };
    let wanted = [alone(&[]), alone(&["--adapter", plain]), alone(&["--adapter", dora])];
    assert!(wanted[0] != wanted[1] && wanted[1] != wanted[2] && wanted[0] != wanted[2], "{wanted:?}");

    let magnitudes = format!("magnitudes={dora}");
    let server = Server::start(base.path(), &["--name", "m", "--adapter", plain, "--adapter", &magnitudes]);
    // At once, so that their sequences are decoded in turn.
    let names = ["m", "llama", "magnitudes"];
    let written: Vec<String> = std::thread::scope(|scope| {
        let threads = names.map(|name| scope.spawn(|| tokens(&server, name)));
        threads.into_iter().map(|thread| thread.join().expect("an answer")).collect()
    });
    assert_eq!(written, wanted);
    let (_, listed) = server.ask("GET /v1/models HTTP/1.1", "");
    let listed: Value = serde_json::from_str(&listed).expect("JSON");
    let listed: Vec<(&str, &Value)> = listed["data"]
        .as_array()
        .expect("models")
        .iter()
        .map(|model| (model["id"].as_str().expect("a name"), &model["parent"]))
        .collect();
    assert_eq!(listed, [("m", &Value::Null), ("llama", &json!("m")), ("magnitudes", &json!("m"))]);
    let (status, refused) = server.post("/v1/completions", &asked("other"));
    let message = refused["error"]["message"].as_str().expect("a message");
    assert_eq!((status, message), (404, "model \"other\" is not served here; \"m\", \"llama\", \"magnitudes\" are"));
}

#[test]
fn adapters_that_cannot_share_a_model_are_refused() {
    let base = model_folder();
    let saved = folder("adapters").join("llama_tokens");
    let saved = saved.to_str().expect("a text");
    let serve = |args: &[&str]| {
        let model = base.path().to_str().expect("a text");
        let fixed = ["serve", "--backend", backend().as_str(), "--port", "0", "--model", model];
        program().args(fixed).args(args).output().expect("the program starts")
    };
    let refused = serve(&["--adapter", &format!("a={saved}")]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{said}");
    assert!(said.contains("whole") && said.contains("fireclay merge"), "{said}");
    let twice = [format!("a={saved}"), format!("a={saved}")];
    assert_refused(&serve(&["--adapter", &twice[0], "--adapter", &twice[1]]), 2, &["two models are named a"]);
    // Two models with less memory than a sequence of each may need.
    let plain = folder("adapters").join("llama");
    let named = format!("a={}", plain.to_str().expect("a text"));
    let base = base_with_tokenizer();
    let mut command = program();
    let small = command.args(["serve", "--backend", backend().as_str(), "--port", "0", "--model"]).arg(base.path());
    let refused = small.args(["--adapter", &named, "--cache-tokens", "96"]).output().expect("the program starts");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{said}");
    assert!(said.contains("--cache-tokens 160") && said.contains("--context 48"), "{said}");
}
