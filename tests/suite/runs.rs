//! Records, reports, comparisons and sweeps of runs.

use std::fs;
use std::process::Command;

use serde_json::Value;

use crate::cli::{TINY, assert_refused, program, text, train};

/// A very short run.
fn small() -> Vec<&'static str> {
    let run = [
        "--json",
        "--set",
        "valid_tokens=200",
        "--set",
        "final_valid_tokens=0",
        "--steps",
        "6",
        "--set",
        "valid_every=2",
        "--set",
        "sample_tokens=8",
        "--plain",
    ];
    [&TINY[..], &run].concat()
}

fn lines(output: &std::process::Output) -> Vec<Value> {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let stdout = String::from_utf8_lossy(&output.stdout);
    stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

fn fireclay(args: &[&str]) -> Command {
    let mut command = program();
    command.args(args);
    command
}

#[test]
fn a_sweep_trains_every_combination_once_and_shows_them_beside_each_other() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("sweep");
    let sweep = ["--sweep", "learning_rate=0.001,0.01", "--sweep", "seed=1,2", "--out", text(&out)];
    let all = lines(&train(&[&small()[..], &sweep].concat()));
    let done = all.last().expect("a last line");
    assert_eq!(done["event"], "done");
    let runs = done["runs"].as_array().expect("runs");
    assert_eq!(runs.len(), 4);
    let names: Vec<&str> = runs.iter().filter_map(|run| run["name"].as_str()).collect();
    assert!(names.contains(&"learning_rate=0.001,seed=2"), "{names:?}");
    let losses: Vec<f64> = runs.iter().filter_map(|run| run["best_valid_loss"].as_f64()).collect();
    let best = losses.iter().copied().fold(f64::INFINITY, f64::min);
    let of_best = runs.iter().find(|run| run["folder"] == done["best"]).expect("the best is one of them");
    assert_eq!(of_best["best_valid_loss"].as_f64(), Some(best));
    assert!(losses.iter().any(|loss| *loss > best), "{losses:?}");
    assert_eq!(runs[3]["differs_in"]["training.seed"], 2);
    for name in ["compare.svg", "compare.html"] {
        assert!(out.join(name).exists(), "{name}");
    }
    // Again: nothing is left to train.
    let again = lines(&train(&[&small()[..], &sweep].concat()));
    assert_eq!(again.len(), 1, "{again:?}");
    let listed = lines(&fireclay(&["runs", text(folder.path()), "--json"]).output().expect("it starts"));
    assert_eq!(listed.len(), 4);
    assert!(listed.iter().all(|run| run["status"] == "done" && run["step"] == 6), "{listed:?}");
    let bad = [&small()[..], &["--sweep", "learning_rate=fast", "--out", text(&out)]].concat();
    assert_refused(&train(&bad), 2, &["learning_rate"]);
    let bad = [&small()[..], &["--sweep", "learning_rate", "--out", text(&out)]].concat();
    assert_refused(&train(&bad), 2, &["key=a,b,c"]);
}

#[test]
fn seeds_and_sweeps_use_no_run_with_other_settings() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("seeds");
    let seeds = ["--seeds", "1", "--seed", "7", "--out", text(&out)];
    let first = lines(&train(&[&small()[..], &seeds].concat()));
    let other = ["--set", "steps=5", "--set", "learning_rate=0.5"];
    let words = ["seed-7 already holds a run", "training.steps=6", "training.learning_rate=0.004", "another --out"];
    assert_refused(&train(&[&small()[..], &seeds, &other].concat()), 1, &words);
    let again = lines(&train(&[&small()[..], &seeds].concat()));
    assert_eq!(again.last(), first.last(), "equal settings are used again");
    assert!(again.iter().all(|line| line["event"] != "train"), "{again:?}");

    let out = folder.path().join("sweep");
    let sweep = ["--sweep", "seed=1", "--out", text(&out)];
    lines(&train(&[&small()[..], &sweep].concat()));
    // A value that the recipe leaves to its family, and a new member, which is not begun.
    let other = ["--set", "n_kv_heads=1", "--sweep", "seed=2,1", "--out", text(&out)];
    let words = ["seed=1 already holds a run", "no model.n_kv_heads", "another --out"];
    assert_refused(&train(&[&small()[..], &other].concat()), 1, &words);
    assert!(!out.join("seed=2").exists(), "all are checked before the first is trained");
}

#[test]
fn the_closing_line_says_which_model_is_kept() {
    let folder = tempfile::tempdir().expect("a folder");
    for (keep, wanted) in [("keep=last", "the last model, of step 6, is in"), ("keep=best", "lowest validation loss")] {
        let out = folder.path().join(keep);
        let args = [&small()[..], &["--set", keep, "--out", text(&out)]].concat();
        let args: Vec<&str> = args.into_iter().filter(|word| *word != "--json").collect();
        let output = train(&args);
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && told.contains(wanted), "{told}");
    }
}

#[test]
fn runs_are_compared_by_what_differs() {
    let folder = tempfile::tempdir().expect("a folder");
    let [a, b] = ["a", "b"].map(|name| folder.path().join(name));
    lines(&train(&[&small()[..], &["--out", text(&a)]].concat()));
    lines(&train(&[&small()[..], &["--out", text(&b), "--set", "schedule=wsd"]].concat()));
    let mut command = fireclay(&["compare", text(&a), text(&b)]);
    let output = command.current_dir(folder.path()).output().expect("it starts");
    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(table.contains("training.schedule") && table.contains("wsd") && table.contains("cosine"), "{table}");
    assert!(!table.contains("d_model"), "only what differs: {table}");
    assert!(folder.path().join("compare.svg").exists() && folder.path().join("compare.html").exists());
    let nothing = folder.path().join("nothing");
    assert_refused(&fireclay(&["compare", text(&nothing)]).output().expect("it starts"), 1, &["holds no run"]);
    assert_refused(&fireclay(&["runs", text(&nothing)]).output().expect("it starts"), 1, &["no such folder"]);
    let report = fs::read_to_string(a.join("report.html")).expect("a report");
    for part in ["validation loss", "--steps", "What it writes", "training.learning_rate"] {
        assert!(report.contains(part), "{part}");
    }
}

#[test]
fn patience_ends_a_run_that_gets_no_better() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("run");
    let flat = ["--set", "learning_rate=0", "--set", "patience=2", "--set", "steps=100", "--out", text(&out)];
    let args = [&small()[..], &flat].concat();
    let args: Vec<&str> = args.iter().copied().filter(|word| *word != "--steps" && *word != "6").collect();
    let all = lines(&train(&args));
    let done = all.last().expect("a last line");
    assert_eq!((&done["steps"], &done["stopped_early"], &done["best_step"]), (&6.into(), &true.into(), &2.into()));
    assert!(
        all.iter()
            .any(|line| line["event"] == "warning"
                && line["text"].as_str().is_some_and(|text| text.contains("patience")))
    );
}

#[test]
fn validations_are_counted_in_tokens_on_request() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("run");
    // 2 rows of 128 tokens per step: 600 are reached after three steps.
    let tokens = ["--set", "valid_every_tokens=600", "--set", "seq_length=128", "--out", text(&out)];
    let all = lines(&train(&[&small()[..], &tokens].concat()));
    let valid = all.iter().filter(|line| line["event"] == "valid").filter_map(|line| line["step"].as_u64());
    assert_eq!(valid.collect::<Vec<_>>(), [3, 6]);
}

#[test]
fn weights_and_biases_is_told_through_its_own_client() {
    let folder = tempfile::tempdir().expect("a folder");
    let (out, told) = (folder.path().join("run"), folder.path().join("told.jsonl"));
    // A fake client that records its input.
    let client = format!(
        "import json\nfile = open({:?}, 'w')\nclass Run:\n    def log(self, values, step):\n        \
         print(json.dumps([step, sorted(values)]), file=file, flush=True)\n    def finish(self):\n        \
         print('finished', file=file, flush=True)\ndef init(**given):\n    \
         print(json.dumps([given['project'], given['config']['recipe']['name']]), file=file, flush=True)\n    \
         return Run()\nHtml = str\n",
        told.display().to_string()
    );
    fs::write(folder.path().join("wandb.py"), client).expect("writable");
    let run = |path: &str, out: &str| {
        let mut command = program();
        command
            .args(["train", "--backend", crate::backend().as_str()])
            .args(small())
            .args(["--wandb", "kiln", "--out", out]);
        command.env("PYTHONPATH", path).output().expect("it starts")
    };
    lines(&run(text(folder.path()), text(&out)));
    let told = fs::read_to_string(told).expect("what it was told");
    assert!(told.starts_with("[\"kiln\", \"stories\"]\n"), "{told}");
    assert!(told.contains("[2, [\"valid/loss\"") && told.contains("[2, [\"sample\"]]"), "{told}");
    assert!(told.trim_end().ends_with("finished"), "{told}");
    let nothing = folder.path().join("nothing");
    let output = run(text(&nothing), text(&folder.path().join("other")));
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains("--wandb") && told.contains("No module named 'wandb'"), "{told}");
}
