//! Several processes that train one model together, on the CPU.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::cli::{TINY, program, text};

/// A small run on the CPU, with dropout, of six rows a step in two passes.
const RUN: [&str; 26] = [
    "train",
    "--backend",
    "cpu",
    "--plain",
    "--seed",
    "5",
    "--set",
    "batch_size=3",
    "--set",
    "accumulation=2",
    "--set",
    "dropout=0.2",
    "--set",
    "valid_tokens=600",
    "--set",
    "final_valid_tokens=0",
    "--set",
    "valid_every=4",
    "--set",
    "checkpoint_every=2",
    "--set",
    "schedule=constant",
    "--set",
    "warmup_steps=0",
    "--set",
    "sample_tokens=0",
];

fn command(out: &Path, args: &[&str]) -> Command {
    let mut command = program();
    command.args(RUN).args(&TINY[..6]).args(["--out", text(out)]).args(args);
    command
}

fn train(out: &Path, args: &[&str]) {
    let output = command(out, args).output().expect("the program starts");
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn resume(out: &Path, args: &[&str]) {
    let mut command = program();
    command.args(["train", "--backend", "cpu", "--plain", "--resume", "--out", text(out)]).args(args);
    let output = command.output().expect("the program starts");
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Losses and gradient norms of all steps, and losses of validations.
fn figures(out: &Path) -> Vec<f64> {
    let metrics = fs::read_to_string(out.join("metrics.jsonl")).expect("metrics");
    let lines = metrics.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let of = |line: Value| [line["loss"].as_f64(), line["gradient_norm"].as_f64()];
    lines.flat_map(of).flatten().collect()
}

#[track_caller]
fn assert_near(what: &str, found: &[f64], wanted: &[f64], relative: f64) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    for (at, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        assert!((found - wanted).abs() <= relative * wanted.abs(), "{what}: number {at} is {found}, not {wanted}");
    }
}

#[test]
fn two_and_three_ranks_learn_what_one_learns() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = |name: &str| folder.path().join(name);
    let all: [(&str, &[&str]); 5] = [
        ("one", &[]),
        ("two", &["--gpus", "2"]),
        ("three", &["--ranks", "3"]),
        ("two plain", &["--gpus", "2", "--set", "shard=none"]),
        ("three plain", &["--gpus", "3", "--set", "shard=none"]),
    ];
    for (name, args) in all {
        train(&out(name), &[&["--steps", "8"], args].concat());
    }
    let one = figures(&out("one"));
    assert_eq!(one.len(), 18, "eight steps and two validations");
    for (name, _) in &all[1..] {
        assert_near(name, &figures(&out(name)), &one, 2e-5);
    }
    for ranks in ["two", "three"] {
        let plain = format!("{ranks} plain");
        assert_eq!(figures(&out(ranks)), figures(&out(&plain)), "{ranks}: what is shared out changes no bit");
        for file in ["model.safetensors", "optimizer.safetensors"] {
            let read =
                |name: &str| fs::read(out(name).join("training/step-00000008").join(file)).expect("a checkpoint");
            assert_eq!(read(ranks), read(&plain), "{ranks}: {file}");
        }
    }
}

#[test]
fn ranks_learn_intents_and_slots_together() {
    let folder = tempfile::tempdir().expect("a folder");
    let run = |name: &str, ranks: &str| {
        let out = folder.path().join(name);
        let mut command = program();
        command.args(["train", "--task", "intent-slot", "--backend", "cpu", "--json", "--gpus", ranks, "--steps", "6"]);
        command.args(["--set", "d_model=16", "--set", "n_layers=1", "--set", "n_heads=2", "--set", "valid_every=3"]);
        let output = command.args(["--out", text(&out)]).output().expect("the program starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let stdout = String::from_utf8(output.stdout).expect("text");
        let done: Value = serde_json::from_str(stdout.lines().last().expect("lines")).expect("JSON");
        let scores = ["intent_accuracy", "slot_f1", "sentence_accuracy"].map(|name| done[name].clone());
        (figures(&out), scores)
    };
    let ((one, own), (three, theirs)) = (run("one", "1"), run("three", "3"));
    assert_near("three ranks", &three, &one, 2e-5);
    assert_eq!(theirs, own);
}

#[test]
fn a_run_goes_on_with_any_number_of_ranks() {
    let folder = tempfile::tempdir().expect("a folder");
    let (straight, changing) = (folder.path().join("straight"), folder.path().join("changing"));
    train(&straight, &["--steps", "12"]);
    train(&changing, &["--steps", "4", "--gpus", "2"]);
    resume(&changing, &["--steps", "8"]);
    resume(&changing, &["--steps", "12", "--gpus", "2"]);
    assert_near("2, 1 and 2 ranks", &figures(&changing), &figures(&straight), 1e-6);
}

/// A run that goes on until somebody ends it.
struct Endless {
    out: PathBuf,
    child: Child,
}

impl Endless {
    fn begin(out: &Path, args: &[&str]) -> Self {
        let steps = ["--steps", "1000000", "--set", "valid_every=1000000", "--gpus", "3"];
        let mut command = command(out, &[&steps[..], args].concat());
        let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the program starts");
        let endless = Self { out: out.to_path_buf(), child };
        let begun = Instant::now();
        while checkpoints(out).len() < 2 {
            assert!(begun.elapsed() < Duration::from_secs(60), "it saves");
            std::thread::sleep(Duration::from_millis(20));
        }
        endless
    }

    /// The process of a rank.
    fn rank(&self, rank: usize) -> String {
        let id = self.child.id();
        let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).expect("Linux");
        children.split_whitespace().nth(rank).expect("a rank").to_string()
    }

    /// How it ends within `limit`, and what it said.
    fn end(mut self, limit: Duration) -> (ExitStatus, String) {
        let begun = Instant::now();
        while self.child.try_wait().expect("a child").is_none() {
            if begun.elapsed() > limit {
                // It would go on without this test.
                signal("KILL", &self.child.id().to_string());
                panic!("it has not ended within {limit:?}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let output = self.child.wait_with_output().expect("it has ended");
        (output.status, String::from_utf8(output.stderr).expect("text"))
    }
}

fn checkpoints(out: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(out.join("training")).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.filter(|path| path.extension().is_none() && path.is_dir()).collect()
}

fn signal(name: &str, process: &str) {
    let status = Command::new("kill").args(["-s", name, process]).status().expect("kill");
    assert!(status.success());
}

/// One line on stderr that is an error, with these words.
#[track_caller]
fn assert_one_line(status: ExitStatus, stderr: &str, words: &[&str]) {
    assert_eq!(status.code(), Some(1), "{stderr}");
    let lines: Vec<&str> = stderr.lines().filter(|line| line.contains("fireclay: ")).collect();
    assert_eq!(lines.len(), 1, "one line says what is wrong: {stderr}");
    for word in words {
        assert!(lines[0].contains(word), "'{word}' is not in: {stderr}");
    }
}

/// The last checkpoint is whole: it goes on from there, on one rank.
#[track_caller]
fn assert_goes_on(out: &Path) {
    let last = checkpoints(out).into_iter().max().expect("a checkpoint");
    let step: u64 =
        last.file_name().and_then(|name| name.to_str()?.strip_prefix("step-")?.parse().ok()).expect("a step");
    resume(out, &["--steps", &(step + 2).to_string()]);
}

#[test]
fn a_rank_that_is_killed_ends_all_with_one_line() {
    let folder = tempfile::tempdir().expect("a folder");
    for (rank, wait) in [(2, 130), (1, 17), (0, 61)] {
        let out = folder.path().join(format!("rank {rank}"));
        let run = Endless::begin(&out, &[]);
        std::thread::sleep(Duration::from_millis(wait));
        signal("KILL", &run.rank(rank));
        let out = run.out.clone();
        let (status, stderr) = run.end(Duration::from_secs(10));
        assert_one_line(status, &stderr, &[&format!("rank {rank}"), "--resume"]);
        assert_goes_on(&out);
    }
}

#[test]
fn a_rank_that_stands_still_ends_all_with_one_line() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("run");
    let run = Endless::begin(&out, &[]);
    signal("STOP", &run.rank(1));
    let (status, stderr) = run.end(Duration::from_secs(10));
    assert_one_line(status, &stderr, &["rank 1", "no heartbeat", "--resume"]);
    assert_goes_on(&out);
}

#[test]
fn a_full_disk_ends_all_ranks_with_one_line() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("run");
    train(&out, &["--steps", "4", "--gpus", "2"]);
    let fireclay = program().get_program().to_owned();
    // No file may grow beyond 4 KiB: writing fails as it does on a full disk.
    let command = format!(
        "ulimit -f 8; trap '' XFSZ; exec '{}' train --resume --steps 8 --plain --backend cpu --gpus 2 --out '{}'",
        fireclay.display(),
        out.display()
    );
    let mut shell = Command::new("sh");
    shell.envs(program().get_envs().filter_map(|(name, value)| Some((name, value?))));
    let output = shell.args(["-c", &command]).output().expect("a shell");
    assert_one_line(output.status, &String::from_utf8_lossy(&output.stderr), &["the last checkpoint"]);
    resume(&out, &["--steps", "6"]);
}

#[test]
fn ranks_agree_on_the_step_that_they_stop_at() {
    let folder = tempfile::tempdir().expect("a folder");
    // To the whole command, to the first rank, and to another one.
    for (name, rank, code) in [("TERM", None, 143), ("INT", Some(0), 130), ("TERM", Some(2), 130)] {
        let out = folder.path().join(format!("{name} {rank:?}"));
        let run = Endless::begin(&out, &[]);
        let process = rank.map_or_else(|| run.child.id().to_string(), |rank| run.rank(rank));
        signal(name, &process);
        let (status, stderr) = run.end(Duration::from_secs(10));
        assert_eq!(status.code(), Some(code), "{name} to {rank:?}: {stderr}");
        assert!(stderr.contains("stopped and saved at step"), "{stderr}");
        assert_goes_on(&out);
    }
}

#[test]
fn what_ranks_cannot_do_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let refusals: [(&[&str], &[&str]); 4] = [
        (&["--gpus", "2", "--seeds", "2"], &["--seeds"]),
        (&["--gpus", "4"], &["batch_size is 3", "4 ranks"]),
        (&["--gpus", "2", "--set", "reduce=bf16"], &["training.reduce"]),
        (&["--gpus", "2", "--set", "shard=some"], &["shard"]),
    ];
    for (args, words) in refusals {
        let output = command(&folder.path().join("run"), args).output().expect("the program starts");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {stderr}");
        let lines: Vec<&str> =
            stderr.lines().filter(|line| line.contains("fireclay: ") || line.contains("error: ")).collect();
        assert_eq!(lines.len(), 1, "{stderr}");
        assert!(words.iter().all(|word| lines[0].contains(word)), "{words:?}: {stderr}");
    }
}
