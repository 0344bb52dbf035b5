//! Fine-tuning on conversations: what is supervised, rows, and training.

use std::path::Path;

use burn::tensor::Tensor;
use fireclay::inference::chat::ChatTemplate;
use fireclay::tasks::chat::{Example, Masker};
use fireclay_datasets::conversations::Conversations;
use fireclay_datasets::{IGNORED_TARGET, TokenBatch, Tokenizer};
use fireclay_kernels::HeadLossOptions;
use fireclay_model::{Tokens, TransformerConfig};
use serde_json::{Value, json};

use crate::backend_test;
use crate::compare::values;
use crate::golden::folder as golden;

pub(crate) fn tokenizer() -> Tokenizer {
    Tokenizer::load(&golden("chats").join("tokenizer.json")).expect("a tokenizer")
}

/// The examples of some records.
fn examples(template: &str, rows: &[Value]) -> Result<Vec<Example>, String> {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("chats.jsonl");
    let lines: Vec<String> = rows.iter().map(Value::to_string).collect();
    std::fs::write(&file, lines.join("\n")).expect("writable");
    let (tokenizer, read) = (tokenizer(), Conversations::read(&file).expect("conversations"));
    let template =
        ChatTemplate::new(template.into(), "<s>".into(), "</s>".into()).map_err(|error| error.to_string())?;
    let masker = Masker::new(&template, &tokenizer).map_err(|error| error.to_string())?;
    let all: Result<Vec<_>, _> = read.all.iter().map(|conversation| masker.examples(conversation)).collect();
    Ok(all.map_err(|error| error.to_string())?.concat())
}

/// What is supervised, as text, run by run.
fn supervised(Example { tokens, supervised }: &Example) -> Vec<String> {
    let (tokenizer, mut runs, mut at) = (tokenizer(), Vec::new(), 0);
    while at < tokens.len() {
        let count = supervised[at..].iter().take_while(|flag| **flag == supervised[at]).count();
        if supervised[at] {
            runs.push(tokenizer.decode_with_control(&tokens[at..at + count]).expect("decodes"));
        }
        at += count;
    }
    runs
}

fn turns(turns: &[(&str, &str)]) -> Value {
    turns.iter().map(|(role, content)| json!({ "role": role, "content": content })).collect()
}

const CHATML: &str = "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' \
                      -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif \
                      -%}";

#[test]
fn labels_are_those_of_trl() {
    let text = std::fs::read_to_string(golden("chats").join("labels.json")).expect("the golden file");
    let all: Value = serde_json::from_str(&text).expect("JSON");
    let cases = all["cases"].as_array().expect("cases");
    assert_eq!(cases.len(), 8);
    for case in cases {
        let name = case["name"].as_str().expect("a name");
        let template = case["template"].as_str().expect("a template");
        let ours = examples(template, case["rows"].as_array().expect("rows")).expect(name);
        let theirs = case["trl"].as_array().expect("what TRL has");
        assert_eq!(ours.len(), theirs.len(), "{name}");
        for (Example { tokens, supervised }, theirs) in ours.into_iter().zip(theirs) {
            let numbers = |key: &str| -> Vec<i64> {
                theirs[key].as_array().expect(key).iter().map(|number| number.as_i64().expect("a number")).collect()
            };
            let labels = numbers("labels");
            // Ours end with the last supervised token.
            let length = labels.iter().rposition(|label| *label != -100).expect("a label") + 1;
            let tokens: Vec<i64> = tokens.into_iter().map(i64::from).collect();
            assert_eq!(tokens, numbers("ids")[..length], "{name}");
            let ours: Vec<i64> =
                tokens.iter().zip(&supervised).map(|(token, learned)| if *learned { *token } else { -100 }).collect();
            assert_eq!(ours, labels[..length], "{name}");
        }
    }
}

#[test]
fn turns_share_a_sequence_where_a_template_renders_them_alike_and_have_their_own_where_not() {
    let row = json!({ "messages": turns(&[("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]) });
    let shared = examples(CHATML, std::slice::from_ref(&row)).expect("examples");
    assert_eq!(shared.len(), 1);
    assert_eq!(supervised(&shared[0]), ["b<|im_end|>\n", "d<|im_end|>\n"]);
    // Leaves out what was thought before, as Qwen3's does.
    let thinking = CHATML
        .replace("m.content", "(m.content if loop.last or m.role != 'assistant' else m.content.split('</think>')[-1])");
    let turns = [("user", "a"), ("assistant", "<think>x</think>b"), ("user", "c"), ("assistant", "<think>y</think>d")];
    let apart = examples(&thinking, &[json!({ "messages": self::turns(&turns) })]).expect("examples");
    assert_eq!(apart.len(), 2);
    assert_eq!(supervised(&apart[0]), ["<think>x</think>b<|im_end|>\n"]);
    assert_eq!(supervised(&apart[1]), ["<think>y</think>d<|im_end|>\n"]);
    let whole = tokenizer().decode_with_control(&apart[1].tokens).expect("decodes");
    assert!(!whole.contains('x') && whole.contains("assistant\nb<|im_end|>"), "{whole}");
}

#[test]
fn a_mask_begins_and_ends_with_its_turn() {
    // The first token of a turn is supervised, be its content stripped or empty.
    let stripped = CHATML.replace("m.content", "m.content.strip()");
    let row = json!({ "messages": turns(&[("user", "a"), ("assistant", "  b \n"), ("user", "c"), ("assistant", "")]) });
    let one = &examples(&stripped, &[row]).expect("examples")[0];
    assert_eq!(supervised(one), ["b<|im_end|>\n", "<|im_end|>\n"]);
    // What is not to be learned is not, and what follows the last supervised turn is left out.
    let mut messages = turns(&[("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e")]);
    messages[1]["weight"] = 0.into();
    let one = &examples(CHATML, &[json!({ "messages": messages })]).expect("examples")[0];
    assert_eq!(supervised(one), ["d<|im_end|>\n"]);
    assert!(one.supervised.last() == Some(&true));
    // A message that spells a control token ends no turn.
    let row = json!({ "messages": turns(&[("user", "a<|im_end|>"), ("assistant", "b<|im_end|>c")]) });
    let one = &examples(CHATML, &[row]).expect("examples")[0];
    let end = tokenizer().token_id("<|im_end|>").expect("a control token");
    assert_eq!(one.tokens.iter().filter(|token| **token == end).count(), 2);
    // No token crosses into a turn: generation begins with a token of its own.
    let plain = "{%- for m in messages -%}{{- m.role + ': ' + m.content + ('</s>' if m.role == 'assistant' else \
                 '\n') -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- 'assistant: ' -}}{%- endif -%}";
    let one = &examples(plain, &[json!({ "messages": turns(&[("user", "a"), ("assistant", "kiln")]) })])
        .expect("examples")[0];
    assert_eq!(supervised(one), ["kiln</s>"]);
    let begins = one.supervised.iter().position(|flag| *flag).expect("a supervised token");
    assert_eq!(tokenizer().encode("user: a\nassistant: ").expect("encodes"), one.tokens[..begins]);
}

#[test]
fn what_generation_begins_from_is_what_training_has_before_an_answer() {
    let families: Value =
        serde_json::from_str(&std::fs::read_to_string(golden("templates.json")).expect("templates")).expect("JSON");
    let messages =
        turns(&[("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]);
    // Without the system message, once there is an answer.
    let mistral = families["families"]["mistral"].as_str().expect("a template");
    let all = examples(mistral, &[json!({ "messages": messages })]).expect("examples");
    let last = tokenizer().decode_with_control(&all.last().expect("an example").tokens).expect("decodes");
    assert!(last.contains("Be brief.") && last.ends_with("[/INST] d</s>"), "{last}");
}

#[test]
fn templates_by_which_nothing_can_be_learned_are_refused() {
    let row = json!({ "messages": turns(&[("user", "a"), ("assistant", "b")]) });
    let refused = |template: &str, row: &Value| examples(template, std::slice::from_ref(row)).expect_err("refused");
    let endless = CHATML.replace("<|im_end|>", "");
    assert!(refused(&endless, &row).contains("no control token"), "{}", refused(&endless, &row));
    let tools = json!({ "messages": row["messages"], "tools": [{ "type": "function" }] });
    assert!(refused(CHATML, &tools).contains("no use for them"));
    // Earlier messages change when the next comes, and the answer does not begin as the prompt
    // ends.
    let changing = "{{- messages|length }}{%- for m in messages -%}{{- m.role + m.content + '</s>' -}}{%- endfor -%}\
                    {%- if add_generation_prompt -%}{{- '<|im_start|>begin\\n' -}}{%- endif -%}";
    assert!(refused(changing, &row).contains("mark it with {% generation %}"), "{}", refused(changing, &row));
}

backend_test!(a_packed_row_has_the_loss_of_its_sequences_apart::<B>(device) {
    let sequences: [&[u32]; 3] = [&[3, 1, 4, 1, 5, 9], &[2, 6, 5, 3], &[5, 8, 9, 7, 9, 3, 2]];
    let flags: [&[bool]; 3] = [
        &[false, false, true, true, false, true],
        &[false, true, true, true],
        &[false, false, false, true, true, true, true],
    ];
    let configs = [TransformerConfig::llama(10, 16, 16, 2, 2), TransformerConfig::gpt2(10, 16, 16, 2, 2)];
    for config in configs {
        let model = config.init::<B>(3, &device).expect("a config that holds together");
        let loss = |rows: &[Vec<usize>], length: usize| {
            let mut batch = TokenBatch::packed(length);
            for row in rows {
                batch.push_packed(row.iter().map(|at| (sequences[*at], flags[*at])));
            }
            let count = batch.targets().iter().filter(|target| **target != IGNORED_TARGET).count();
            assert_eq!(count, 10);
            let on_device = batch.to_device::<B>(&device);
            let tokens =
                Tokens::from(on_device.inputs).with_document_starts(on_device.document_starts.expect("starts"));
            let loss: Tensor<B, 1> = model.loss(model.forward(tokens), on_device.targets, HeadLossOptions::new());
            values(&loss)[0]
        };
        let (packed, apart) = (loss(&[vec![0, 1, 2]], 16), loss(&[vec![0], vec![1], vec![2]], 8));
        assert!((packed - apart).abs() < 1e-5, "{packed} packed, {apart} apart");
    }
});

/// A small model without a chat template, and conversations: each answer is the word that was asked
/// for.
pub(crate) fn base_and_chats(folder: &Path) {
    let config = TransformerConfig::llama(tokenizer().vocab_size(), 64, 32, 1, 2);
    let device = Default::default();
    let model = config.init::<burn::backend::NdArray>(3, &device).expect("a config that holds together");
    let base = folder.join("base");
    std::fs::create_dir(&base).expect("writable");
    fireclay_model::ModelFolder::new(&base).save(&model).expect("saves");
    tokenizer().save(&base.join("tokenizer.json")).expect("saves");
    write_chats(folder, 0);
}

/// Conversations in which the answer to each word is the word that is `shift` places behind it.
fn write_chats(folder: &Path, shift: usize) {
    let words = ["kiln", "cone", "clay", "glaze", "ash", "hot", "brief", "cools"];
    let line = |at: usize| {
        let [asked, answer] = [at, at + shift].map(|at| words[at % words.len()]);
        json!({ "messages": turns(&[("user", &format!("Say {asked}. ({at})")), ("assistant", answer)]) }).to_string()
    };
    std::fs::write(folder.join("chats.jsonl"), (0..80).map(line).collect::<Vec<_>>().join("\n")).expect("writable");
}

pub(crate) fn tune(folder: &Path, out: &str, settings: &[&str]) -> std::process::Output {
    let mut command = crate::cli::program();
    command.current_dir(folder).args([
        "train",
        "--task",
        "chat",
        "--init",
        "base",
        "--data",
        "chats.jsonl",
        "--out",
        out,
    ]);
    command.args(["--plain", "--backend", crate::backend().as_str()]);
    let shared = [
        "batch_size=4",
        "seq_length=64",
        "learning_rate=5e-3",
        "warmup_steps=2",
        "valid_every=20",
        "checkpoint_every=20",
    ];
    let shared = shared.iter().chain(&["adapter=none"]);
    for setting in shared.chain(settings) {
        command.args(["--set", setting]);
    }
    command.output().expect("the program starts")
}

#[test]
fn a_base_model_learns_to_answer_and_its_folder_converses() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    base_and_chats(folder);
    let run = tune(folder, "run", &["steps=60"]);
    let told = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "{told}");
    // What is supervised shows itself before the first step.
    assert!(told.contains("messages (role, content): 80 conversations, 80 examples; "), "{told}");
    assert!(told.contains("<|assistant|>[[") && told.contains("<|end|>]]"), "{told}");
    let read = |name: &str| -> Value {
        serde_json::from_str(&std::fs::read_to_string(folder.join("run").join(name)).expect(name)).expect("JSON")
    };
    let end = Tokenizer::load(&folder.join("run/tokenizer.json")).expect("a tokenizer").token_id("<|end|>");
    assert_eq!(read("generation_config.json")["eos_token_id"], json!([end.expect("a control token")]));
    assert!(read("tokenizer_config.json")["chat_template"].as_str().expect("a template").contains("<|end|>"));
    let summary = read("done.json");
    let loss = summary["valid_loss"].as_f64().expect("a loss");
    assert!(loss < 1.5, "from 5.8 nats: {summary}");
    // Its template is the model's own from here on: going on needs nothing new.
    let again = tune(folder, "again", &["steps=1", "init=run"]);
    assert!(again.status.success(), "{}", String::from_utf8_lossy(&again.stderr));
}

#[test]
fn a_run_on_conversations_that_stops_goes_on_to_the_same_bytes() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    base_and_chats(folder);
    assert!(tune(folder, "whole", &["steps=30"]).status.success());
    assert!(tune(folder, "parts", &["steps=30", "checkpoint_every=10"]).status.success());
    // As if it had stopped after the second checkpoint.
    std::fs::remove_dir_all(folder.join("parts/training/step-00000030")).expect("a checkpoint");
    std::fs::remove_file(folder.join("parts/done.json")).expect("a summary");
    let mut command = crate::cli::program();
    let resumed = command
        .current_dir(folder)
        .args(["train", "--resume", "--plain", "--backend", crate::backend().as_str(), "--out", "parts"])
        .output()
        .expect("the program starts");
    assert!(resumed.status.success(), "{}", String::from_utf8_lossy(&resumed.stderr));
    let bytes =
        |run: &str| std::fs::read(folder.join(run).join("training/step-00000030/model.safetensors")).expect("a model");
    if crate::backend().as_str() == "cpu" {
        assert!(bytes("whole") == bytes("parts"));
    }
}

#[test]
fn conversations_that_teach_nothing_end_in_one_line() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    base_and_chats(folder);
    let refused = |lines: &str, settings: &[&str]| {
        std::fs::write(folder.join("chats.jsonl"), lines).expect("writable");
        let run = tune(folder, "none", settings);
        assert!(!run.status.success() && !folder.join("none/model.safetensors").exists());
        String::from_utf8_lossy(&run.stderr).into_owned()
    };
    let asked = json!({ "messages": turns(&[("user", "a"), ("user", "b")]) }).to_string();
    assert!(refused(&format!("{asked}\n{asked}"), &[]).contains("no message has the role 'assistant'"));
    let long = json!({ "messages": turns(&[("user", &"kiln ".repeat(90)), ("assistant", "b")]) }).to_string();
    assert!(refused(&format!("{long}\n{long}"), &[]).contains("seq_length=64"));
    let good = json!({ "messages": turns(&[("user", "a"), ("assistant", "b")]) }).to_string();
    assert!(refused(&good, &[]).contains("at least two"));
    let told = refused(&format!("{good}\n{{\"text\": \"x\"}}"), &[]);
    assert!(told.contains("record 2") && told.lines().count() == 1, "{told}");
}

#[test]
fn an_adapter_learns_to_answer_is_small_goes_on_and_merges() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    base_and_chats(folder);
    // The base knows the template's tokens then, so that nothing but the adapter is trained.
    assert!(tune(folder, "base2", &["steps=120"]).status.success());
    write_chats(folder, 1);
    let lora = ["init=base2", "adapter=lora", "rank=8", "steps=60", "learning_rate=1e-2", "checkpoint_every=30"];
    let run = tune(folder, "run", &lora);
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let done = |run: &str| -> Value {
        serde_json::from_str(&std::fs::read_to_string(folder.join(run).join("done.json")).expect("a summary"))
            .expect("JSON")
    };
    let loss = done("run")["valid_loss"].as_f64().expect("a loss");
    assert!(loss < 1.0, "other answers than the base's: {loss}");
    assert!(!folder.join("run/model.safetensors").exists());
    let adapter =
        std::fs::read(folder.join("run/training/step-00000060/adapter_model.safetensors")).expect("an adapter");
    // A run that stops goes on to the same bytes.
    assert!(tune(folder, "parts", &lora).status.success());
    std::fs::remove_dir_all(folder.join("parts/training/step-00000060")).expect("a checkpoint");
    std::fs::remove_file(folder.join("parts/done.json")).expect("a summary");
    let fireclay = |args: &[&str]| {
        let mut command = crate::cli::program();
        command.current_dir(folder).args(args).args(["--backend", crate::backend().as_str()]);
        let output = command.output().expect("the program starts");
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    fireclay(&["train", "--resume", "--plain", "--out", "parts"]);
    let again =
        std::fs::read(folder.join("parts/training/step-00000060/adapter_model.safetensors")).expect("an adapter");
    if crate::backend().as_str() == "cpu" {
        assert!(adapter == again);
    }
    // The run's folder, the base with the adapter, and the merged folder write the same.
    fireclay(&["merge", "--model", "base2", "--adapter", "run", "--out", "merged"]);
    let prompt = "<|user|>Say kiln. (3)<|end|><|assistant|>";
    let write = |model: &[&str]| {
        let rest = ["--prompt", prompt, "--temperature", "0", "--max-tokens", "12", "--json"];
        let told = fireclay(&[&["generate"], model, &rest[..]].concat());
        let line = told.lines().last().expect("a line");
        serde_json::from_str::<Value>(line).expect("JSON")["tokens"].clone()
    };
    let merged = write(&["--model", "merged"]);
    assert_eq!(write(&["--model", "run"]), merged);
    assert_eq!(write(&["--model", "base2", "--adapter", "run"]), merged);
    assert_ne!(write(&["--model", "base2"]), merged);
}

#[test]
fn new_tokens_are_trained_and_saved_with_an_adapter() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    base_and_chats(folder);
    let run = tune(folder, "run", &["adapter=lora", "rank=4", "steps=40"]);
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let config: Value =
        serde_json::from_str(&std::fs::read_to_string(folder.join("run/adapter_config.json")).expect("a config"))
            .expect("JSON");
    assert!(config["modules_to_save"].as_array().expect("a list").contains(&json!("embed_tokens")), "{config}");
    let tokens = Tokenizer::load(&folder.join("run/tokenizer.json")).expect("a tokenizer").vocab_size();
    let mut command = crate::cli::program();
    let merged = command.current_dir(folder).args(["merge", "--model", "base", "--adapter", "run", "--out", "merged"]);
    let merged = merged.args(["--backend", crate::backend().as_str()]).output().expect("the program starts");
    assert!(merged.status.success(), "{}", String::from_utf8_lossy(&merged.stderr));
    let (_, config) = fireclay_model::ModelFolder::new(folder.join("merged")).config().expect("a config");
    assert_eq!(config.vocab_size, tokens);
}
