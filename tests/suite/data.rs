//! Data of every format: tokenization, and error messages.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use fireclay_datasets::{Tokenizer, TokenizerKind};
use serde_json::Value;

use crate::cli::{TINY, assert_refused, program, text};

/// A very short run.
fn small() -> Vec<&'static str> {
    let run = [
        "--set",
        "seq_length=16",
        "--set",
        "context_length=16",
        "--set",
        "valid_tokens=200",
        "--set",
        "valid_every=2",
        "--set",
        "checkpoint_every=2",
        "--set",
        "sample_tokens=0",
        "--set",
        "steps=4",
    ];
    [&TINY[..], &run].concat()
}

/// `train` on the backend under test, with its tokens in `cache`.
fn train(cache: &Path, args: &[&str]) -> Command {
    let mut command = program();
    command.args(["train", "shakespeare-char-cpu", "--backend", crate::backend().as_str(), "--json"]);
    // A model to begin from has its own shape.
    let shape = ["d_model=", "n_layers=", "n_heads=", "context_length="];
    let is_shape = |pair: &[&str]| shape.iter().any(|key| pair[1].starts_with(key));
    let settings = small();
    for pair in settings.chunks(2).filter(|pair| !args.contains(&"--init") || !is_shape(pair)) {
        command.args(pair);
    }
    command.args(args).env("XDG_CACHE_HOME", cache);
    command
}

#[track_caller]
fn done(mut command: Command) -> Value {
    let output = command.output().expect("the program starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let stdout = String::from_utf8(output.stdout).expect("text");
    serde_json::from_str(stdout.lines().last().expect("a last line")).expect("JSON")
}

fn refused(mut command: Command) -> Output {
    command.output().expect("the program starts")
}

/// Lines of words, about 8 KB.
fn words() -> String {
    (0..400).map(|at| format!("line {at} of a potter's clay\n")).collect()
}

fn tokenizer(folder: &Path, size: usize) -> String {
    let path = folder.join(format!("tokenizer-{size}.json"));
    Tokenizer::train(TokenizerKind::Bpe(size), &words()).and_then(|made| made.save(&path)).expect("a tokenizer");
    path.display().to_string()
}

#[test]
fn a_text_gives_the_same_loss_in_every_form() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let json: String = words().lines().map(|line| format!("{}\n", serde_json::json!({ "body": line }))).collect();
    fs::write(at("a.jsonl"), &json).expect("writable");
    fs::write(at("a.jsonl.zst"), zstd_bytes(json.as_bytes())).expect("writable");
    let tokenizer = tokenizer(folder.path(), 300);
    let loss = |data: &Path, out: &str, more: &[&str]| {
        let out = at(out);
        let given = ["--data", text(data), "--out", text(&out), "--set", &format!("tokenizer={tokenizer}")];
        let done = done(train(folder.path(), &[&given[..], &["--set", "field=body"], more].concat()));
        (done["train_loss"].clone(), done["valid_loss"].clone())
    };
    let plain = loss(&at("a.jsonl"), "run-1", &[]);
    assert_eq!(loss(&at("a.jsonl.zst"), "run-2", &[]), plain);
    // Prepared tokens bring their tokenizer.
    let tokens = at("tokens");
    let mut prepare = program();
    prepare.args(["prepare", "--tokenizer", &tokenizer, "--field", "body", "--json"]);
    prepare.arg("--data").arg(at("a.jsonl")).arg("--out").arg(&tokens);
    let made = done(prepare);
    assert_eq!(made["documents"], 400);
    assert_eq!(loss(&tokens, "run-3", &[]), plain);
    // Separate documents, or documents held out one by one, give other rows.
    assert_ne!(loss(&at("a.jsonl"), "run-4", &["--set", "documents_apart=true"]), plain);
    assert_ne!(loss(&at("a.jsonl"), "run-5", &["--set", "holdout_by=document"]), plain);
}

/// A zstd frame with one uncompressed block (RFC 8878).
fn zstd_bytes(bytes: &[u8]) -> Vec<u8> {
    let mut frame = vec![0x28, 0xB5, 0x2F, 0xFD, 0xA0];
    frame.extend((bytes.len() as u32).to_le_bytes());
    frame.extend(&((bytes.len() as u32) << 3 | 1).to_le_bytes()[..3]);
    frame.extend(bytes);
    frame
}

#[test]
fn a_mixture_names_texts_and_weights() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    fs::write(at("a.txt"), words()).expect("writable");
    fs::write(at("b.txt"), words().to_uppercase()).expect("writable");
    let mixed = |weights: [f64; 2], out: &str| {
        let corpora = format!("corpora={{{:?} = {:?}, {:?} = {:?}}}", at("a.txt"), weights[0], at("b.txt"), weights[1]);
        train(folder.path(), &["--set", &corpora, "--out", text(&at(out))])
    };
    assert_ne!(done(mixed([3.0, 1.0], "run-1"))["train_loss"], done(mixed([1.0, 3.0], "run-2"))["train_loss"]);
    assert_refused(&refused(mixed([0.0, 1.0], "run-3")), 2, &["a.txt is 0", "above 0"]);
    let both =
        ["--set", "corpora={\"a\" = 1.0}", "--set", "source=b.txt", "--out", text(&at("run-4"))].map(String::from);
    let both: Vec<&str> = both.iter().map(String::as_str).collect();
    assert_refused(&refused(train(folder.path(), &both)), 2, &["are both set"]);
    // A mixture resumes, and notices when one of its sources changes.
    let resume = || {
        let mut command = program();
        command.args(["train", "--resume", "--json", "--steps", "6", "--backend", crate::backend().as_str(), "--out"]);
        command.arg(at("run-1")).env("XDG_CACHE_HOME", folder.path());
        command
    };
    fs::write(at("b.txt"), words()).expect("writable");
    assert_refused(&refused(resume()), 1, &["corpus", "b.txt", "changed (sha256 was"]);
    fs::write(at("b.txt"), words().to_uppercase()).expect("writable");
    assert_eq!(done(resume())["steps"], 6);
}

#[test]
fn tokens_that_do_not_fit_a_run_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    fs::write(at("a.txt"), words()).expect("writable");
    let tokens = at("tokens");
    let small = tokenizer(folder.path(), 300);
    let mut prepare = program();
    prepare.args(["prepare", "--json", "--tokenizer", &small, "--data", text(&at("a.txt")), "--out", text(&tokens)]);
    done(prepare);
    let run =
        |more: &[&str]| train(folder.path(), &[&["--data", text(&tokens), "--out", text(&at("run"))], more].concat());
    let other = format!("tokenizer={}", tokenizer(folder.path(), 320));
    assert_refused(&refused(run(&["--set", &other])), 1, &["tokens", "prepared with another tokenizer"]);
    assert_refused(&refused(run(&["--set", "holdout_by=document"])), 1, &["was prepared for holdout_by=tail"]);
    let stdin = train(folder.path(), &["--data", "-", "--out", text(&at("run"))]);
    assert_refused(&refused(stdin), 2, &["fireclay prepare --data -"]);
    let (data, out) = (at("a.txt"), at("run"));
    let bytes =
        ["--set", "tokenizer=byte", "--set", "documents_apart=true", "--data", text(&data), "--out", text(&out)];
    let bytes = train(folder.path(), &bytes);
    assert_refused(&refused(bytes), 1, &["a.txt", "has no token that ends a document"]);
    // A damaged shard.
    let shard = tokens.join("train-00000.tokens");
    let mut bad = fs::read(&shard).expect("a shard");
    bad[100] ^= 1;
    fs::write(&shard, bad).expect("writable");
    assert_refused(&refused(run(&[])), 1, &["train-00000.tokens: is damaged", "checksum", "tokenize again"]);
    assert!(!at("run").exists(), "nothing is left of what came to nothing");
}

#[test]
fn text_that_is_none_is_refused_with_its_place() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let run = |name: &str, bytes: &[u8]| {
        fs::write(at(name), bytes).expect("writable");
        refused(train(folder.path(), &["--data", text(&at(name)), "--out", text(&at("run"))]))
    };
    assert_refused(&run("a.txt", b"good \xFF"), 1, &["a.txt", "is not UTF-8 text (byte 5)"]);
    assert_refused(&run("b.jsonl", b"{\"text\": \"a\"}\n{"), 1, &["b.jsonl, line 2"]);
    assert_refused(
        &run("c.jsonl", b"{\"title\": \"a\"}"),
        1,
        &["c.jsonl, line 1", "no field 'text'; it has title", "--field NAME"],
    );
    assert_refused(&run("d.parquet", b"PAR1"), 1, &["d.parquet", "is not Parquet"]);
    assert_refused(&run("e.gz", b"no"), 1, &["e.gz"]);
    assert_refused(&run("f.txt", b""), 1, &["f.txt", "holds no text"]);
    assert_refused(&run("g.json", b"\nonce upon"), 1, &["g.json, line 2", "'once upon' is neither", "name it .txt"]);
    assert_refused(&run("h.txt", b"nul\0"), 1, &["h.txt", "NUL byte (byte 3)"]);
    assert_refused(&run("i.csv", b"text\na\nb,c\n"), 1, &["i.csv, line 3", "2 fields"]);
}

#[test]
fn every_command_that_asks_for_a_field_takes_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let record = |line: &str| serde_json::json!({ "meta": { "body": format!("{line}\n") } });
    let records: Vec<Value> = words().lines().map(record).collect();
    fs::write(at("a.json"), serde_json::to_string_pretty(&records).expect("JSON")).expect("writable");
    // As short as the context of the run.
    fs::write(at("prompts.json"), "[\n{\"meta\": {\"body\": \"a potter\"}}]").expect("writable");
    let (data, prompts, tokenizer) = (at("a.json"), at("prompts.json"), tokenizer(folder.path(), 300));
    let (run, tokens, made) = (at("run"), at("tokens"), at("made.json"));
    let backend = crate::backend();
    // The run writes the model for the next commands.
    let commands: [&[&str]; 5] = [
        &["train", "shakespeare-char-cpu", "--json", "--backend", backend.as_str(), "--out", text(&run), "--data"],
        &["prepare", "--json", "--tokenizer", &tokenizer, "--out", text(&tokens), "--data"],
        &["tokenizer", "train", "--vocab-size", "280", "--out", text(&made), "--data"],
        &["evaluate", "--json", "--backend", backend.as_str(), "--model", text(&run), "--data"],
        &["generate", "--json", "--backend", backend.as_str(), "--model", text(&run), "--max-tokens", "1", "--prompts"],
    ];
    for arguments in commands {
        let command = |field: &[&str]| {
            let mut command = program();
            let file = if arguments[0] == "generate" { &prompts } else { &data };
            command.args(arguments).arg(file).args(field).env("XDG_CACHE_HOME", folder.path());
            if arguments[0] == "train" {
                command.args(small());
            }
            command.output().expect("the program starts")
        };
        assert_refused(&command(&[]), 1, &[".json, line 2: element 1", "it has meta.body", "--field NAME"]);
        let output = command(&["--field", "meta.body"]);
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    let manifest = fs::read_to_string(tokens.join("tokens.json")).expect("a manifest");
    let manifest: Value = serde_json::from_str(&manifest).expect("JSON");
    assert_eq!((&manifest["documents"], &manifest["field"]), (&400.into(), &"meta.body".into()));
    // A recipe's setting does the same, and standard input is JSON if it starts as JSON.
    let out = at("set");
    done(train(folder.path(), &["--data", text(&data), "--set", "field=meta.body", "--out", text(&out)]));
    let mut piped = program();
    piped.args(["prepare", "--json", "--tokenizer", &tokenizer, "--field", "meta.body", "--data", "-", "--out"]);
    piped.arg(at("piped")).stdin(fs::File::open(&data).expect("readable"));
    assert_eq!(done(piped)["documents"], 400);
}

/// A run whose tokens are truncated midway reports it, and saves its progress.
#[cfg(unix)]
#[test]
fn tokens_that_vanish_while_a_run_reads_them_end_it_with_a_checkpoint() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    fs::write(at("a.txt"), words()).expect("writable");
    let data = at("a.txt");
    let out = at("run");
    let long = ["--data", text(&data), "--out", text(&out), "--set", "steps=1000000", "--set", "valid_every=1000000"];
    let mut command = train(folder.path(), &[&long[..], &["--set", "checkpoint_every=1000000"]].concat());
    let child = command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn();
    let mut child = child.expect("the program starts");
    let begun = Instant::now();
    while fs::read_to_string(out.join("metrics.jsonl")).unwrap_or_default().lines().count() < 3 {
        assert!(begun.elapsed() < Duration::from_secs(300), "no step was taken");
        assert!(child.try_wait().expect("its state").is_none(), "it ended");
        std::thread::sleep(Duration::from_millis(10));
    }
    let tokens = fs::read_dir(at("fireclay/tokens")).expect("tokens").flatten().next().expect("a folder").path();
    let shard = fs::File::options().write(true).open(tokens.join("train-00000.tokens")).expect("a shard");
    shard.set_len(100).expect("shorter");
    let output = child.wait_with_output().expect("it ends");
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains("truncated while it was read") && told.contains("saved at step"), "{told}");
    let checkpoints = fs::read_dir(out.join("training")).expect("checkpoints").flatten();
    assert_eq!(checkpoints.filter(|entry| entry.path().is_dir()).count(), 1);
    fs::remove_dir_all(&tokens).expect("there");
    let mut resume = program();
    resume.args([
        "train",
        "--resume",
        "--json",
        "--backend",
        crate::backend().as_str(),
        "--out",
        text(&out),
        "--steps",
    ]);
    let state = fs::read_dir(out.join("training")).expect("checkpoints").flatten();
    let step = state.filter_map(|entry| entry.file_name().to_str()?.strip_prefix("step-")?.parse::<u64>().ok()).max();
    resume.arg((step.expect("a checkpoint") + 1).to_string()).env("XDG_CACHE_HOME", folder.path());
    done(resume);
}

#[cfg(unix)]
#[test]
fn a_disk_that_fills_while_tokens_are_written_loses_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let (data, out) = (folder.path().join("a.txt"), folder.path().join("tokens"));
    fs::write(&data, words().repeat(40)).expect("writable");
    let tokenizer = tokenizer(folder.path(), 300);
    let mut prepare = program();
    prepare.args(["prepare", "--json", "--tokenizer", &tokenizer, "--data", text(&data), "--out", text(&out)]);
    // Files are limited to 64 KB, as on a full disk.
    let limited = "ulimit -f 64; trap '' XFSZ; exec \"$0\" \"$@\"";
    let mut command = Command::new("bash");
    command.args(["-c", limited]).arg(prepare.get_program()).args(prepare.get_args());
    assert_refused(&command.output().expect("it starts"), 1, &["train-00000.tokens", "File too large"]);
    let left: Vec<_> = fs::read_dir(&out).expect("a folder").flatten().map(|entry| entry.file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().ends_with("partial")), "{left:?}");
    assert!(done(prepare)["tokens"].as_u64().is_some_and(|tokens| tokens > 50_000), "the same command goes on");
}

#[test]
fn tokens_of_nobody_knows_what_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let (data, out) = (folder.path().join("a.txt"), folder.path().join("tokens"));
    fs::write(&data, words()).expect("writable");
    fs::create_dir(&out).expect("writable");
    fs::write(out.join("tokens.json"), "{}").expect("writable");
    let tokenizer = tokenizer(folder.path(), 300);
    let mut prepare = program();
    prepare.args(["prepare", "--tokenizer", &tokenizer, "--data", text(&data), "--out", text(&out)]);
    assert_refused(&prepare.output().expect("it starts"), 1, &["tokens.json", "not a manifest of tokens"]);
}

#[test]
fn a_model_to_begin_from_keeps_its_tokenizer_or_takes_a_new_one_on_request() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    fs::write(at("a.txt"), words()).expect("writable");
    let (old, new) = (tokenizer(folder.path(), 300), tokenizer(folder.path(), 340));
    let run = |tokenizer: &str, out: &str, more: &[&str]| {
        let (data, out, tokenizer) = (at("a.txt"), at(out), format!("tokenizer={tokenizer}"));
        let given = ["--data", text(&data), "--out", text(&out), "--set", &tokenizer];
        train(folder.path(), &[&given[..], more].concat())
    };
    done(run(&old, "first", &["--set", "learning_rate=0.01", "--set", "steps=60"]));
    let first = at("first");
    let init = ["--init", text(&first)];
    done(run(&old, "second", &init));
    assert_refused(&refused(run(&new, "third", &init)), 2, &["tokenizer-340.json", "resize_embedding=true"]);
    let resized = [&init[..], &["--set", "resize_embedding=true", "--set", "learning_rate=0"]].concat();
    let resized = done(run(&new, "fourth", &resized));
    let config = fs::read_to_string(at("fourth/config.json")).expect("a config");
    assert!(config.contains("\"vocab_size\": 340"), "{config}");
    // The embeddings of shared tokens are kept: the model is better than a new one.
    let fresh = done(run(&new, "fifth", &["--set", "learning_rate=0"]));
    let loss = |done: &Value| done["valid_loss"].as_f64().expect("a loss");
    assert!(loss(&resized) < loss(&fresh) - 0.3, "{} and {}", loss(&resized), loss(&fresh));
}
