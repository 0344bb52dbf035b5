//! The program's interface: output, streams, and exit codes.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// The program, which is next to the tests when they run on another machine.
fn binary() -> PathBuf {
    std::env::var_os("FIRECLAY_BINARY").map_or_else(|| env!("CARGO_BIN_EXE_fireclay").into(), PathBuf::from)
}

/// The program as a command, with a folder without which Wayland's library, loaded by some drivers,
/// prints a warning.
pub(crate) fn program() -> Command {
    let mut command = Command::new(binary());
    command.env("XDG_RUNTIME_DIR", std::env::temp_dir());
    // Keep tests' tokens and kernels out of the user's cache.
    command.env("XDG_CACHE_HOME", std::env::temp_dir().join("fireclay-tests"));
    command
}

fn fireclay(args: &[&str]) -> Output {
    program().args(args).output().expect("the program starts")
}

/// `train` on the backend under test.
pub(crate) fn train(args: &[&str]) -> Output {
    let backend = crate::backend().as_str();
    fireclay(&[&["train", "--backend", backend], args].concat())
}

/// The model of a very short run, as settings.
pub(crate) const TINY: [&str; 8] =
    ["--set", "d_model=16", "--set", "n_layers=1", "--set", "n_heads=2", "--set", "batch_size=2"];

/// A very short run.
fn small() -> Vec<&'static str> {
    let run = ["--set", "valid_tokens=200", "--set", "final_valid_tokens=0", "--steps", "4", "--set", "valid_every=2"];
    [&TINY[..], &run].concat()
}

/// One line on stderr that contains all of `words`, nothing on stdout, and this exit code.
#[track_caller]
pub(crate) fn assert_refused(output: &Output, code: i32, words: &[&str]) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{stderr}");
    let lines: Vec<&str> = stderr.lines().filter(|line| line.starts_with("fireclay: ")).collect();
    assert_eq!(lines.len(), 1, "one line says what is wrong: {stderr}");
    assert_eq!(stderr.lines().count(), 1, "and nothing else is said: {stderr}");
    for word in words {
        assert!(lines[0].contains(word), "'{word}' is not in: {stderr}");
    }
    assert!(output.stdout.is_empty());
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}

#[test]
fn training_prints_json_lines_and_a_done_line_only() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("run");
    let output = train(&[&["--json", "--out", text(&out)], &small()[..]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let stdout = String::from_utf8(output.stdout).expect("text");
    let lines: Vec<Value> = stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let events: Vec<&str> = lines.iter().filter_map(|line| line["event"].as_str()).collect();
    assert_eq!(events, ["train", "train", "valid", "sample", "train", "train", "valid", "sample", "done"]);
    assert!(lines[3]["text"].as_str().is_some_and(|text| !text.is_empty()), "{}", lines[3]);
    let done = &lines[8];
    for key in ["steps", "train_loss", "valid_loss", "tokens_per_second", "first_step_seconds", "source_entropy"] {
        assert!(done[key].as_f64().is_some_and(f64::is_finite), "{key} in {done}");
    }
    let model = ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"];
    for name in
        model.into_iter().chain(["metrics.jsonl", "run.json", "report.html", "loss.svg", "tensorboard", "training"])
    {
        assert!(out.join(name).exists(), "{name}");
    }
    let entries = fs::read_dir(out.join("training")).expect("checkpoints").flatten();
    let checkpoints = entries.filter(|entry| entry.path().is_dir()).count();
    assert_eq!(checkpoints, 2, "steps 2 and 4 were saved, and two are kept");
    let svg = fs::read_to_string(out.join("loss.svg")).expect("a chart");
    assert!(svg.starts_with("<svg") && svg.contains("validation"));
}

#[test]
fn a_trained_model_writes_the_same_text_for_the_same_seed() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("run");
    assert!(train(&[&["--plain", "--out", text(&out)], &small()[..]].concat()).status.success());
    let backend = crate::backend().as_str();
    let generate = |more: &[&str]| {
        let fixed = ["generate", "--backend", backend, "--model", text(&out), "--prompt", "There was once", "--json"];
        let output = fireclay(&[&fixed[..], &["--max-tokens", "12"], more].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let stdout = String::from_utf8(output.stdout).expect("text");
        let mut lines: Vec<Value> = stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        let done = lines.pop().expect("a last line");
        let streamed: String = lines.iter().filter_map(|line| line["text"].as_str()).collect();
        assert_eq!(done["text"].as_str(), Some(streamed.as_str()), "streamed and final text agree");
        assert_eq!((done["event"].as_str(), done["prompt_tokens"].as_u64()), (Some("done"), Some(3)));
        assert!(done["tokens"].as_array().is_some_and(|tokens| (1..=12).contains(&tokens.len())), "{done}");
        done["text"].as_str().map(str::to_string)
    };
    let seed = |seed| generate(&["--temperature", "1", "--seed", seed]);
    assert_eq!(seed("1"), seed("1"));
    assert_ne!(seed("1"), seed("2"));
    assert_eq!(generate(&["--temperature", "0"]), generate(&["--temperature", "0", "--seed", "9"]));
    let greedy = generate(&["--temperature", "0"]);
    assert_eq!(generate(&["--temperature", "1", "--top-k", "1"]), greedy);
    assert_eq!(generate(&["--temperature", "1", "--top-p", "0.000001"]), greedy);
    // Zero in f32, but a valid top-p.
    assert_eq!(generate(&["--temperature", "1", "--top-p", "1e-60"]), greedy);

    let context = ["generate", "--backend", backend, "--model", text(&out), "--prompt", "There was once"];
    assert_refused(&fireclay(&[&context[..], &["--max-tokens", "126"]].concat()), 1, &["context is 128", "125"]);
    let unknown = ["generate", "--backend", backend, "--model", text(&out), "--prompt", "Mara's smartphone"];
    assert_refused(&fireclay(&unknown), 1, &["vocabulary"]);
    let model = out.join("model.safetensors");
    let whole = fs::read(&model).expect("a model");
    fs::write(&model, &whole[..whole.len() / 2]).expect("a writable folder");
    assert_refused(&fireclay(&context), 1, &["model.safetensors", "truncated"]);
}

/// A short run on the test's own text: its output as JSON lines.
fn sampled(source: &str, out: &Path, settings: &[&str]) -> Output {
    let own = ["seq_length=16", "sample_tokens=40", "tokenizer=char", "holdout=0.2"];
    let settings = own.iter().chain(settings).flat_map(|setting| ["--set", setting]);
    let settings: Vec<&str> = small().into_iter().chain(settings).collect();
    train(&[&["--data", source, "--json", "--out", text(out)], &settings[..]].concat())
}

#[test]
fn samples_never_end_a_run() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("dna.txt");
    // Neither spaces nor line breaks, and a context that prompt and sample together exceed.
    fs::write(&file, "GATTACA".repeat(80)).expect("a writable folder");
    for (at, prompt) in ["", "sample_prompt=TACAGATTACA"].into_iter().enumerate() {
        let out = folder.path().join(format!("run-{at}"));
        let more: Vec<&str> = Some(prompt).filter(|prompt| !prompt.is_empty()).into_iter().collect();
        let output = sampled(text(&file), &out, &more);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let stdout = String::from_utf8(output.stdout).expect("text");
        let lines: Vec<Value> = stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        let samples: Vec<&Value> = lines.iter().filter(|line| line["event"] == "sample").collect();
        assert!(samples.len() == 2 && lines.iter().all(|line| line["event"] != "warning"), "{stdout}");
        assert!(samples.iter().all(|sample| sample["text"].as_str().is_some_and(|text| text.len() > 2)), "{stdout}");
    }
    let out = folder.path().join("refused");
    let refused = sampled(text(&file), &out, &["sample_prompt=GATTACAGATTACAGATTACA"]);
    assert_refused(&refused, 2, &["sample_prompt", "21 tokens", "16"]);
    assert_refused(&sampled(text(&file), &out, &["sample_prompt=GAX"]), 2, &["sample_prompt", "X"]);
    assert!(!out.exists(), "nothing was written");
}

#[test]
fn one_prompt_that_does_not_fit_leaves_the_others() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("run");
    assert!(train(&[&["--plain", "--out", text(&out)], &small()[..]].concat()).status.success());
    let prompts = folder.path().join("prompts.txt");
    fs::write(&prompts, format!("There was once\nThere was{}\nThere was once", " once".repeat(900))).expect("writable");
    let fixed = ["generate", "--backend", crate::backend().as_str(), "--model", text(&out), "--json"];
    let output =
        fireclay(&[&fixed[..], &["--prompts", text(&prompts), "--max-tokens", "4", "--temperature", "1e-8"]].concat());
    assert_eq!(output.status.code(), Some(1));
    let stdout = String::from_utf8(output.stdout).expect("text");
    let lines: Vec<Value> = stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let done: Vec<&Value> = lines.iter().filter(|line| line["event"] == "done").collect();
    assert!(done.len() == 2 && done[0]["text"] == done[1]["text"], "{stdout}");
    assert!(lines.iter().any(|line| line["event"] == "error" && line["prompt"] == 2), "{stdout}");
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(
        told.contains("prompt 2") && told.contains("shorten the prompt") && !told.contains("--max-tokens"),
        "{told}"
    );
}

#[test]
fn a_trained_model_is_evaluated_and_talked_to() {
    let folder = tempfile::tempdir().expect("a folder");
    let (data, out) = (folder.path().join("text.txt"), folder.path().join("run"));
    fs::write(&data, "the kiln is hot and the clay is wet\n".repeat(40)).expect("writable");
    let output = train(&[&["--data", text(&data), "--out", text(&out), "--json"], &small()[..]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let backend = crate::backend().as_str();
    let evaluate = |more: &[&str]| {
        let model = ["evaluate", "--backend", backend, "--model", text(&out), "--data", text(&data)];
        fireclay(&[&model, more].concat())
    };
    let output = evaluate(&["--json", "--context", "32"]);
    let done: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    let (loss, perplexity) = (done["loss"].as_f64().expect("a loss"), done["perplexity"].as_f64().expect("a number"));
    assert!(loss > 0.5 && loss < 4.0 && (loss.exp() / perplexity - 1.0).abs() < 1e-6, "{done}");
    assert_eq!(done["bytes"], 40 * 36);
    assert!(String::from_utf8_lossy(&evaluate(&[]).stdout).contains("bits per byte"));
    assert_refused(&evaluate(&["--context", "100000"]), 2, &["--context", "the model's own"]);
    assert_refused(&evaluate(&["--stride", "0"]), 2, &["--stride"]);

    let chat = || {
        let mut command = program();
        command.args(["chat", "--backend", backend, "--model", text(&out), "--max-tokens", "5", "--json"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the program starts");
        let lines = b"the kiln\n\n/nonsense\n/reset\nis hot\n";
        // Refused at once, before it reads standard input.
        let _ = child.stdin.take().expect("a pipe").write_all(lines);
        child.wait_with_output().expect("the program ends")
    };
    assert_refused(&chat(), 1, &["chat_template", "fireclay generate"]);
    fs::write(out.join("chat_template.jinja"), "{% for m in messages %}{{ m.content }}{% endfor %} ")
        .expect("writable");
    let output = chat();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && stderr.contains("/nonsense"), "{stderr}");
    let lines = String::from_utf8_lossy(&output.stdout);
    let events: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).expect("JSON lines")).collect();
    let done: Vec<&Value> = events.iter().filter(|event| event["event"] == "done").collect();
    assert_eq!(done.len(), 2, "two answers: {lines}");
    assert!(done.iter().all(|done| done["tokens"].as_array().is_some_and(|tokens| tokens.len() == 5)), "{lines}");
    fs::write(out.join("chat_template.jinja"), "{{ raise_exception('not today') }}").expect("writable");
    let output = chat();
    let lines = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.code() == Some(1) && lines.contains("not today"), "an answer that failed is told: {lines}");
}

#[test]
fn text_that_cannot_be_learnt_from_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let out = path("run");
    let refused = |data: &Path, words: &[&str]| {
        let args = ["shakespeare-char-cpu", "--plain", "--data", text(data), "--out", text(&out)];
        assert_refused(&train(&args), 1, words);
    };
    refused(&path("missing.txt"), &["missing.txt", "No such file"]);
    fs::write(path("empty.txt"), "  \n").expect("a writable folder");
    refused(&path("empty.txt"), &["empty.txt", "no text"]);
    fs::write(path("binary.txt"), [104, 105, 0, 255]).expect("a writable folder");
    refused(&path("binary.txt"), &["binary.txt", "byte 2"]);
    fs::write(path("latin.txt"), [104, 105, 233, 32]).expect("a writable folder");
    refused(&path("latin.txt"), &["latin.txt", "byte 2"]);
    fs::write(path("short.txt"), "shorter than one block").expect("a writable folder");
    refused(&path("short.txt"), &["short.txt", "22 tokens", "64"]);
    fs::create_dir(path("folder")).expect("a writable folder");
    refused(&path("folder"), &["folder", "no text"]);
    assert_refused(&train(&["shakespeare-char-cpu", "--plain", "--out", text(&out)]), 2, &["--data"]);
    assert!(!out.exists(), "nothing was written");
}

#[test]
fn recipes_that_make_no_sense_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let (file, out) = (folder.path().join("recipe.toml"), folder.path().join("run"));
    let recipe = |toml: &str| {
        fs::write(&file, toml).expect("a writable folder");
        train(&[text(&file), "--plain", "--out", text(&out)])
    };
    assert_refused(&recipe("name = 'x'\n[training]\nsteps = 'many'"), 2, &["recipe.toml", "steps"]);
    assert_refused(&recipe("name = 'x'\n[training]\nlearning_rat = 1.0"), 2, &["learning_rat", "learning_rate"]);
    assert_refused(&recipe("name = 'x'\n[model]\nd_modle = 8"), 2, &["d_modle", "d_model"]);
    assert_refused(&recipe("name = 'x'\n[model\nd_model = 8"), 2, &["line 2"]);
    let contradiction = "name = 'x'\n[data]\nsource = 'stories'\n[model]\nn_heads = 3\nn_kv_heads = 2";
    assert_refused(&recipe(contradiction), 2, &["n_heads", "n_kv_heads"]);
    assert_refused(&train(&["--plain", "--out", text(&out), "--set", "stepps=3"]), 2, &["stepps", "steps"]);
    assert_refused(&train(&["--plain", "--out", text(&out), "--set", "steps"]), 2, &["key=value"]);
    assert_refused(&train(&["no-such-recipe"]), 2, &["no-such-recipe", "stories"]);
    assert!(!out.exists(), "nothing was written");
}

#[test]
fn the_model_that_a_recipe_begins_with_is_fetched_however_it_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("recipe.toml");
    fs::write(&file, "name = 'x'\ninit = 'owner/in-a-file'\n[data]\nsource = 'text.txt'").expect("a writable folder");
    let ways: [(&[&str], i32, &[&str]); 4] = [
        (&[text(&file)], 1, &["cannot reach http://127.0.0.1:9", "owner/in-a-file"]),
        (&["--data", "x", "--set", "init=owner/set"], 1, &["cannot reach http://127.0.0.1:9", "owner/set"]),
        (&["--init", "owner/in-an-option"], 1, &["cannot reach http://127.0.0.1:9", "owner/in-an-option"]),
        // Contradictions are reported before any download.
        (&["stories", "--set", "init=owner/set"], 2, &["embedded stories", "--data"]),
    ];
    for (args, code, words) in ways {
        // A local port without listener.
        let mut command = program();
        command.env("HF_ENDPOINT", "http://127.0.0.1:9").env("HF_HOME", folder.path());
        command
            .args(["train", "--backend", crate::backend().as_str(), "--plain", "--out"])
            .arg(folder.path().join("out"));
        let output = command.args(args).output().expect("the program starts");
        assert_refused(&output, code, words);
    }
}

#[test]
fn a_folder_that_cannot_be_written_is_refused_at_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("file");
    fs::write(&file, "in the way").expect("a writable folder");
    assert_refused(&train(&["--plain", "--out", text(&file.join("run"))]), 1, &["file/run"]);
    if Path::new("/sys/kernel").exists() {
        // Read-only even for root.
        assert_refused(&train(&["--plain", "--out", "/sys/kernel/run"]), 1, &["/sys/kernel/run"]);
    }
}

#[test]
fn a_run_is_never_overwritten() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("run");
    let begin = [&["--plain", "--out", text(&out)], &small()[..]].concat();
    assert!(train(&begin).status.success());
    let before = fs::read(out.join("model.safetensors")).expect("a model");
    assert_refused(&train(&begin), 1, &["already holds a run", "--resume"]);
    assert_refused(&train(&["--resume", "--plain", "--out", text(&out)]), 1, &["already at step 4", "--steps"]);
    assert_eq!(fs::read(out.join("model.safetensors")).expect("a model"), before);
    for file in ["model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json"]
    {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join(file), "someone's").expect("a writable folder");
        let args = [&["--plain", "--out", text(folder.path())], &small()[..]].concat();
        assert_refused(&train(&args), 1, &["already holds a model", file]);
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1, "nothing else is written with {file}");
    }
    let missing = folder.path().join("nothing");
    assert_refused(&train(&["--resume", "--plain", "--out", text(&missing)]), 1, &["no checkpoint"]);
}

#[cfg(unix)]
#[test]
fn a_full_disk_stops_the_run_and_harms_no_checkpoint() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("run");
    assert!(train(&[&["--plain", "--out", text(&out)], &small()[..]].concat()).status.success());
    let before = fs::read(out.join("model.safetensors")).expect("a model");
    // Files are limited to 4 KiB: writing fails as on a full disk.
    let command = format!(
        "ulimit -f 8; trap '' XFSZ; exec '{}' train --resume --steps 8 --plain --backend {} --out '{}'",
        binary().display(),
        crate::backend().as_str(),
        out.display()
    );
    let mut shell = Command::new("sh");
    // With the kernels cached by the first run, which need no space.
    shell.envs(program().get_envs().filter_map(|(name, value)| Some((name, value?))));
    let output = shell.args(["-c", &command]).output().expect("a shell");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    let lines: Vec<&str> = stderr.lines().filter(|line| line.starts_with("fireclay: ")).collect();
    assert!(lines.len() == 1 && lines[0].contains("is intact"), "{stderr}");
    assert_eq!(fs::read(out.join("model.safetensors")).expect("a model"), before);
    assert!(train(&["--resume", "--steps", "6", "--plain", "--out", text(&out)]).status.success(), "room again");
}

#[test]
fn a_damaged_checkpoint_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("run");
    assert!(train(&[&["--plain", "--out", text(&out)], &small()[..]].concat()).status.success());
    let resume = ["--resume", "--steps", "8", "--plain", "--out", text(&out)];
    for name in ["optimizer.safetensors", "model.safetensors", "state.json"] {
        let file = out.join("training/step-00000004").join(name);
        let whole = fs::read(&file).expect("a checkpoint");
        // A new file: the model is also hard-linked in the folder itself.
        fs::remove_file(&file).and_then(|()| fs::write(&file, &whole[..whole.len() / 2])).expect("a writable folder");
        assert_refused(&train(&resume), 1, &[name]);
        fs::write(&file, whole).expect("a writable folder");
    }
    assert!(train(&resume).status.success());
}

#[test]
fn a_run_without_a_model_yet_says_how_to_go_on() {
    let folder = tempfile::tempdir().expect("a folder");
    let run = folder.path().join("run");
    fs::create_dir_all(run.join("training/step-00000072")).expect("a writable folder");
    let run = text(&run);
    let go_on = &["step 72", "--resume --out", run];
    assert_refused(&fireclay(&["generate", "--backend", "cpu", "--model", run, "--prompt", "a"]), 1, go_on);
    assert_refused(&fireclay(&["export", "--model", run, "--gguf", "f16", "--out", "model.gguf"]), 1, go_on);
}

#[test]
fn a_run_that_diverges_says_where_and_why() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("run");
    let hot = ["--set", "learning_rate=1e30", "--set", "max_grad_norm=0", "--set", "warmup_steps=0"];
    let output = train(&[&["--plain", "--out", text(&out)], &small()[..], &hot[..]].concat());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    let last = stderr.lines().last().unwrap_or("");
    for word in ["diverged at step", "checkpoint", "likely cause", "learning_rate="] {
        assert!(last.contains(word), "'{word}' is not in: {last}");
    }
}

#[test]
fn a_tokenizer_is_trained_and_used() {
    let folder = tempfile::tempdir().expect("a folder");
    let (data, file) = (folder.path().join("data"), folder.path().join("tokenizer.json"));
    fs::create_dir(&data).expect("a writable folder");
    let line = "The potter's wheel turns, and the clay turns with it. ";
    fs::write(data.join("a.txt"), line.repeat(40)).expect("a writable folder");
    fs::write(data.join("b.txt"), line.repeat(40)).expect("a writable folder");
    let make = |size: &str, out: &Path| {
        fireclay(&["tokenizer", "train", "--data", text(&data), "--vocab-size", size, "--out", text(out)])
    };
    assert_refused(&make("100", &file), 1, &["257", "100"]);
    assert!(make("280", &file).status.success());
    let out = folder.path().join("run");
    let tokenizer = format!("tokenizer={}", text(&file));
    let own = ["--data", text(&data), "--set", &tokenizer, "--set", "seq_length=8", "--json", "--out", text(&out)];
    let output = train(&[&own[..], &small()[..]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let config = fs::read_to_string(out.join("config.json")).expect("a config");
    let config: Value = serde_json::from_str(&config).expect("JSON");
    assert_eq!((config["model_type"].as_str(), config["vocab_size"].as_u64()), (Some("gpt2"), Some(280)));
}

#[test]
fn devices_are_listed_and_absent_backends_named() {
    let output = fireclay(&["devices", "--json"]);
    assert!(output.status.success());
    let stdout = String::from_utf8(output.stdout).expect("text");
    let lines: Vec<Value> = stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let names: Vec<&str> = lines.iter().filter_map(|line| line["backend"].as_str()).collect();
    assert_eq!(names, ["cuda", "vulkan", "wgpu", "cpu"]);
    assert_eq!(lines.iter().filter(|line| line["default"] == true).count(), 1);
    for line in lines.iter().filter(|line| line["devices"].as_array().is_some_and(Vec::is_empty)) {
        let (name, missing) = (line["backend"].as_str().unwrap_or(""), line["missing"].as_str().unwrap_or(""));
        assert!(missing.contains(name), "{line}");
        let folder = tempfile::tempdir().expect("a folder");
        let out = folder.path().join("run");
        let output = fireclay(&["train", "--plain", "--steps", "1", "--backend", name, "--out", text(&out)]);
        assert_refused(&output, 1, &[missing]);
    }
}

#[test]
fn arguments_that_are_wrong_exit_with_two() {
    for args in [&["train", "--steps", "many"][..], &["train", "--task", "poetry"], &["generate"], &["fly"]] {
        let output = fireclay(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(output.stdout.is_empty() && !output.stderr.is_empty(), "{args:?}");
    }
}
