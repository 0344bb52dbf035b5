//! Learning intents and slots, their metrics, and the commands for them.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Output, Stdio};

use burn::tensor::{Int, Tensor, TensorData};
use fireclay::recipe::Recipe;
use fireclay::tasks::{Batch, ClassificationReport, Task, intent_slot, scores};
use fireclay::training::Trainer;
use fireclay_datasets::{Utterance, UtteranceBatch};
use fireclay_kernels::HeadLossOptions;
use fireclay_kernels::recorder::{Copies, Recording, Source};
use fireclay_model::Tokens;
use serde_json::Value;

use crate::backend_test;
use crate::cli::{assert_refused, program, text, train};
use crate::compare::{relative_error, tolerance, values};

fn recipe(settings: &[(&str, &str)]) -> Recipe {
    let recipe = Recipe::shipped("home").expect("the default recipe");
    let small = [("d_model", "32"), ("n_layers", "1"), ("n_heads", "2"), ("batch_size", "32"), ("warmup_steps", "10")];
    let all = small.iter().chain(settings);
    all.fold(recipe, |recipe, (key, value)| recipe.with(key, value).expect("a known setting"))
}

fn batch(task: &Task, recipe: &Recipe, step: u64) -> UtteranceBatch {
    match task.batch(&recipe.training, step).expect("in memory") {
        Batch::Utterances(batch) => batch,
        Batch::Tokens(_) | Batch::Pairs(_) | Batch::Labelled(_) => panic!("utterances are asked for"),
    }
}

backend_test!(utterances_are_learnt_and_scored::<B>(device) {
    let recipe = recipe(&[
        ("steps", "200"),
        ("d_model", "64"),
        ("init_deviation", "0.06"),
        ("learning_rate", "5e-3"),
        ("dropout", "0"),
        ("split_words", "0"),
        ("hide_words", "0"),
        ("swap_values", "0"),
    ]);
    let mut trainer = Trainer::<B>::new(&recipe, recipe.task()?, device)?;
    let before = trainer.validate(0)?;
    for _ in 0..200 {
        trainer.train_step()?;
    }
    let after = trainer.validate(0)?;
    let scores = after.scores.expect("scores");
    assert!(after.is_better_than(&before) && after.loss < 0.5 * before.loss, "from {before:?} to {after:?}");
    assert!(scores.intent_accuracy > 60.0 && scores.slot_f1 > 40.0, "{scores:?}");
});

backend_test!(padding_changes_nothing::<B>(device) {
    let recipe = recipe(&[("dropout", "0"), ("batch_size", "5")]);
    let trainer = Trainer::<B>::new(&recipe, recipe.task()?, device.clone())?;
    let whole = (0..).map(|step| batch(trainer.task(), &recipe, step)).find(|batch| {
        let lengths = batch.lengths();
        lengths.iter().max() != lengths.iter().min()
    });
    let whole = whole.expect("rows of different lengths");
    let model = burn::module::AutodiffModule::valid(trainer.model());
    let hidden = |ids: &[i32], lengths: &[i32]| {
        let rows = lengths.len();
        let ids = Tensor::<B, 2, Int>::from_data(TensorData::new(ids.to_vec(), [rows, ids.len() / rows]), &device);
        let lengths = Tensor::<B, 1, Int>::from_data(lengths, &device);
        values(&model.forward(Tokens::from(ids).with_lengths(lengths)))
    };
    let (all, width) = (hidden(whole.ids(), whole.lengths()), whole.seq_length());
    let d_model = model.config().d_model;
    for (row, length) in whole.lengths().iter().enumerate() {
        let pieces = *length as usize;
        let alone = hidden(&whole.ids()[row * width..][..pieces], &[*length]);
        let among = &all[row * width * d_model..][..pieces * d_model];
        let worst = alone.iter().zip(among).map(|(a, b)| (a - b).abs()).fold(0.0f32, f32::max);
        assert!(
            f64::from(worst) < 10.0 * tolerance::<B>(&device).relative,
            "row {row} of {pieces} pieces is off by {worst}"
        );
    }
});

backend_test!(a_step_on_utterances_sends_ids_tags_and_lengths_and_reads_nothing::<B>(device) {
    let recipe = recipe(&[]);
    let mut trainer = Trainer::<B>::new(&recipe, recipe.task()?, device.clone())?;
    let same = batch(trainer.task(), &recipe, 0);
    for _ in 0..5 {
        trainer.train_on(same.clone());
    }
    let recording = Recording::start::<B>(&device).expect("a recording");
    trainer.train_on(same.clone());
    let report = recording.stop().expect("a report");
    println!("{report}");
    assert!(report.fallbacks.is_empty(), "{report}");
    // One for the intents, one for the tags.
    assert_eq!(report.calls("head_loss"), 2, "{report}");
    match report.source {
        Source::Calls | Source::Host | Source::Waits => {
            assert_eq!(report.total.to_host, None, "nothing tells of copies here")
        }
        Source::Cupti => {
            let count = |copies: Option<Copies>| copies.map(|copies| (copies.count, copies.bytes));
            assert_eq!(count(report.total.to_host), Some((0, 0)), "nothing comes down: {report}");
            let cells = same.batch_size() * (3 * same.seq_length() + 1);
            // Burn's sum of the two heads' gradients of the hidden states uploads a number.
            let sent = count(report.total.to_device).expect("known on CUDA");
            assert!(sent.0 <= 5 && sent.1 <= 4 * cells as u64 + 8, "{report}");
            assert_eq!(report.total.synchronisations, Some(0), "{report}");
        }
    }
});

#[test]
fn spans_are_counted_as_seqeval_and_conlleval_count_them() {
    let file = Path::new("tests/golden/scores.json");
    let cases: Value = serde_json::from_str(&fs::read_to_string(file).expect("goldens")).expect("JSON");
    let cases = cases.as_array().expect("a list");
    assert!(cases.len() >= 30);
    let none = scores::TrainedValues::default();
    for case in cases {
        let sequences =
            |name: &str| -> Vec<Vec<String>> { serde_json::from_value(case[name].clone()).expect("sequences of tags") };
        let expected =
            sequences("meant").into_iter().map(|tags| Utterance { words: tags.clone(), tags, intent: "same".into() });
        let predicted = sequences("heard").into_iter().map(|tags| scores::Prediction { intent: "same".into(), tags });
        let report = ClassificationReport::new(&expected.collect::<Vec<_>>(), &predicted.collect::<Vec<_>>(), &none);
        let f1 = case["f1"].as_f64().expect("a number");
        assert!((report.scores.slot_f1 - f1).abs() < 1e-6, "{} instead of {f1} in {case}", report.scores.slot_f1);
        for (slot, wanted) in case["slots"].as_object().expect("slots") {
            let counts = report.slots[slot];
            for (name, count) in [("present", counts.present), ("found", counts.found), ("right", counts.right)] {
                assert_eq!(wanted[name].as_u64(), Some(count as u64), "{name} of {slot} in {case}");
            }
        }
    }
}

pub(crate) const SMALL: [&str; 14] = [
    "--set",
    "d_model=16",
    "--set",
    "n_layers=1",
    "--set",
    "n_heads=2",
    "--set",
    "batch_size=8",
    "--set",
    "valid_every=3",
    "--steps",
    "6",
    "--task",
    "intent-slot",
];

pub(crate) fn done_line(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let stdout = String::from_utf8_lossy(&output.stdout);
    serde_json::from_str(stdout.lines().last().expect("a last line")).expect("JSON")
}

#[test]
fn training_on_utterances_ends_with_the_scores_of_the_test_data() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("run");
    let done = done_line(&train(&[&SMALL[..], &["--json", "--out", text(&out)]].concat()));
    for key in ["train_loss", "valid_loss", "intent_accuracy", "slot_f1", "sentence_accuracy", "tokens_per_second"] {
        assert!(done[key].as_f64().is_some_and(f64::is_finite), "{key} in {done}");
    }
    for key in ["slot_f1_seen", "slot_f1_unseen", "unseen_values"] {
        assert!(done[key].as_f64().is_some_and(f64::is_finite), "{key} in {done}");
    }
    let slots = done["slots"].as_object().expect("an object per slot");
    let present = slots.values().map(|slot| slot["present"].as_f64().expect("a count"));
    let unseen = slots
        .values()
        .map(|slot| slot["present"].as_f64().expect("a count") * slot["unseen_values"].as_f64().expect("a percentage"));
    let share = unseen.sum::<f64>() / present.sum::<f64>();
    assert!((share - done["unseen_values"].as_f64().expect("a percentage")).abs() < 0.01, "{share} in {done}");
    for name in ["config.json", "model.safetensors", "tokenizer.json", "labels.json", "metrics.jsonl", "loss.svg"] {
        assert!(out.join(name).exists(), "{name}");
    }
}

#[test]
fn training_on_utterances_goes_on_to_the_same_bytes() {
    let folder = tempfile::tempdir().expect("a folder");
    let (halves, whole) = (folder.path().join("halves"), folder.path().join("whole"));
    let begin = |out: &Path, steps: &str| {
        let args = ["--json", "--out", text(out), "--set", "schedule=constant", "--steps", steps];
        done_line(&train(&[&SMALL[..10], &SMALL[12..], &args].concat()));
    };
    begin(&halves, "3");
    begin(&whole, "6");
    done_line(&train(&["--json", "--resume", "--out", text(&halves), "--steps", "6"]));
    let last = |out: &Path| fs::read(out.join("training/step-00000006/model.safetensors")).expect("a checkpoint");
    assert_eq!(last(&halves), last(&whole));
}

#[test]
fn a_run_keeps_its_best_or_its_last_weights() {
    let folder = tempfile::tempdir().expect("a folder");
    // At a rate of 0 no validation is better than the first; at a high one the last weights are others.
    for (keep, rate, step) in [("best", "0", Some(1)), ("last", "0", Some(6)), ("last", "0.5", None)] {
        let out = folder.path().join(format!("{keep}{rate}"));
        let (kept, rate) = (format!("keep={keep}"), format!("learning_rate={rate}"));
        let more = ["--set", "valid_every=1", "--set", &kept, "--set", &rate, "--set", "min_learning_rate=0", "--json"];
        let done = done_line(&train(&[&SMALL[..8], &SMALL[10..], &more, &["--out", text(&out)]].concat()));
        assert!(step.is_none_or(|step| done["best_step"] == step), "{keep}: {done}");
        let weights = |folder: &Path| fs::read(folder.join("model.safetensors")).expect("a model");
        assert!(keep == "best" || weights(&out) == weights(&out.join("training/step-00000006")), "{rate}");
    }
    let new = folder.path().join("new");
    let refused = ["--set", "keep=last", "--set", "patience=2", "--out", text(&new)];
    assert_refused(&train(&[&SMALL[..], &refused].concat()), 2, &["training.patience", "keep=best"]);
}

#[test]
fn several_seeds_are_reported_as_mean_and_deviation() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("runs");
    let seeds = |count: &str| {
        let args = ["--json", "--seeds", count, "--seed", "5", "--out", text(&out)];
        let output = train(&[&SMALL[..], &args].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let stdout = String::from_utf8(output.stdout).expect("text");
        let lines: Vec<Value> = stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        let of = |event: &str| -> Vec<Value> { lines.iter().filter(|line| line["event"] == event).cloned().collect() };
        (of("seed"), of("train").len(), of("done").pop().expect("a done line"))
    };
    let (each, trained, done) = seeds("2");
    assert_eq!((each.len(), trained, done["seeds"].as_u64()), (2, 12, Some(2)), "{done}");
    for key in ["intent_accuracy", "slot_f1", "slot_f1_unseen", "sentence_accuracy", "valid_loss"] {
        let [first, second] = [0, 1].map(|seed| each[seed][key].as_f64().expect("a number"));
        let (mean, deviation) = (done[key]["mean"].as_f64(), done[key]["std"].as_f64());
        assert!((mean.expect("a mean") - (first + second) / 2.0).abs() < 1e-9, "{key} in {done}");
        assert!((deviation.expect("a deviation") - (first - second).abs() / 2f64.sqrt()).abs() < 1e-9, "{key}");
    }
    assert_ne!(each[0]["valid_loss"], each[1]["valid_loss"], "two seeds are two models");
    // Finished work is not repeated.
    let (again, trained, _) = seeds("3");
    assert_eq!((again.len(), trained), (3, 6));
    assert_eq!(&again[..2], &each[..]);
    // A run that ended after its last step, before its figures were written, writes them.
    std::fs::remove_file(out.join("seed-5/done.json")).expect("a finished run");
    let (again, trained, _) = seeds("3");
    assert_eq!((again.len(), trained), (3, 0));
    for key in ["steps", "best_step", "intent_accuracy", "slot_f1", "sentence_accuracy"] {
        assert_eq!(again[0][key], each[0][key], "{key}");
    }
}

#[test]
fn any_text_gets_a_prediction() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("run");
    done_line(&train(&[&SMALL[..], &["--json", "--out", text(&out)]].concat()));
    let backend = crate::backend().as_str();
    let base = ["predict", "--backend", backend, "--model", text(&out), "--json"];
    let lines = |output: Output| -> Vec<Value> {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let stdout = String::from_utf8(output.stdout).expect("text");
        stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    };
    let sentences = [
        "turn on the kitchen lights".to_string(),
        String::new(),
        " \t ".into(),
        "🔥🔥 включи свет 火 ٣".into(),
        "play ".repeat(3000),
        "¿enciende\u{a0}la luz?".into(),
        "... 🔥".into(),
    ];
    let file = folder.path().join("lines.txt");
    fs::write(&file, sentences.join("\n")).expect("a writable folder");
    let read = lines(program().args(base).args(["--file", text(&file)]).output().expect("the program starts"));
    assert_eq!(read.len(), sentences.len());
    for (line, said) in read.iter().zip(&sentences) {
        assert_eq!(line["event"].as_str(), Some("prediction"));
        assert_eq!(line["text"].as_str(), Some(said.as_str()));
        let spoken = said.chars().any(char::is_alphanumeric);
        assert_eq!(line["intent"].is_string(), spoken, "{line}");
        let probability = line["probability"].as_f64().expect("a number");
        assert!(if spoken { probability > 0.0 && probability <= 1.0 + 1e-6 } else { probability == 0.0 }, "{line}");
        let characters: Vec<char> = said.chars().collect();
        for span in line["spans"].as_array().expect("spans") {
            let at = |name: &str| span[name].as_u64().expect("an offset") as usize;
            let there: String = characters[at("start")..at("end")].iter().collect();
            assert_eq!(span["text"].as_str(), Some(there.as_str()));
        }
    }
    let mut child =
        program().args(base).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the program starts");
    child.stdin.take().expect("a pipe").write_all(sentences[0].as_bytes()).expect("a reader");
    let piped = lines(child.wait_with_output().expect("an end"));
    let alone = lines(program().args(base).args(["--text", &sentences[0]]).output().expect("the program starts"));
    assert_eq!(piped, alone);
    assert_eq!(alone[0]["intent"], read[0]["intent"], "a batch changes nothing");

    // Lines before one that is not text are answered.
    let latin = folder.path().join("latin.txt");
    fs::write(&latin, b"turn on the lights\nol\xe9\nstop").expect("a writable folder");
    let output = program().args(base).args(["--file", text(&latin)]).output().expect("the program starts");
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("latin.txt, line 2") && said.lines().count() == 1, "{said}");
    assert_eq!(String::from_utf8_lossy(&output.stdout).lines().count(), 1);

    let missing = folder.path().join("nothing.txt");
    let output = program().args(base).args(["--file", text(&missing)]).output().expect("the program starts");
    assert_refused(&output, 1, &["nothing.txt"]);
    fs::write(out.join("labels.json"), r#"{"intents": ["one"], "slots": []}"#).expect("a writable folder");
    let output = program().args(base).args(["--text", "hello"]).output().expect("the program starts");
    assert_refused(&output, 1, &["labels.json", "1 intents"]);
}

#[test]
fn a_folder_of_utterances_trains_as_it_is_and_malformed_lines_are_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let data = folder.path().join("data");
    let out = folder.path().join("run");
    for (part, count) in [("train", 40), ("valid", 10), ("test", 10)] {
        fs::create_dir_all(data.join(part)).expect("a writable folder");
        let lines = |line: &dyn Fn(usize) -> String| (0..count).map(|at| line(at) + "\n").collect::<String>();
        let city = |at: usize| ["rome", "new\tyork", "oslo"][at % 3];
        // Some lines end with a space.
        let words = lines(&|at| format!("fly to {}{}", city(at), if at % 4 == 0 { " " } else { "" }));
        let tags = lines(&|at| format!("O O B-city{}{}", if at % 3 == 1 { " I-city" } else { "" }, [" ", ""][at % 2]));
        fs::write(data.join(part).join("seq.in"), words).expect("a writable folder");
        fs::write(data.join(part).join("seq.out"), tags).expect("a writable folder");
        let labels = lines(&|at| if part == "test" && at == 9 { "never_seen".into() } else { "flight ".into() });
        fs::write(data.join(part).join("label"), labels).expect("a writable folder");
    }
    let args = [&SMALL[..], &["--json", "--data", text(&data), "--out", text(&out)]].concat();
    let done = done_line(&train(&args));
    // One in ten has an intent that training lacks.
    assert_eq!(done["intent_accuracy"].as_f64(), Some(90.0), "{done}");

    let refused = |file: &str, line: usize, put: &str, words: &[&str]| {
        let path = data.join(file);
        let whole = fs::read_to_string(&path).expect("a file");
        let mut lines: Vec<&str> = whole.lines().collect();
        lines[line - 1] = put;
        fs::write(&path, lines.join("\n")).expect("a writable folder");
        let out = folder.path().join("refused");
        let args = [&SMALL[..], &["--plain", "--data", text(&data), "--out", text(&out)]].concat();
        assert_refused(&train(&args), 1, words);
        assert!(!out.exists(), "nothing was written");
        fs::write(&path, whole).expect("a writable folder");
    };
    refused("train/seq.out", 7, "O O", &["seq.out", "7"]);
    refused("valid/seq.out", 3, "O O X-city", &["valid", "3", "X-city"]);
    refused("test/label", 2, " ", &["test", "label", "2"]);
    let empty = folder.path().join("empty");
    fs::create_dir(&empty).expect("a writable folder");
    let elsewhere = folder.path().join("elsewhere");
    let args = [&SMALL[..], &["--plain", "--data", text(&empty), "--out", text(&elsewhere)]].concat();
    assert_refused(&train(&args), 1, &["empty", "seq.in", "jsonl"]);
}

#[test]
fn a_language_model_is_no_listener_and_a_listener_no_writer() {
    let folder = tempfile::tempdir().expect("a folder");
    let (utterances, stories) = (folder.path().join("utterances"), folder.path().join("stories"));
    done_line(&train(&[&SMALL[..], &["--json", "--out", text(&utterances)]].concat()));
    done_line(&train(&[&SMALL[..12], &["--json", "--out", text(&stories)]].concat()));
    let backend = crate::backend().as_str();
    let run = |args: &[&str]| program().args(args).args(["--backend", backend]).output().expect("the program starts");
    let predict = run(&["predict", "--model", text(&stories), "--text", "hello"]);
    assert_refused(&predict, 1, &["not trained on utterances", "--task intent-slot"]);
    let generate = run(&["generate", "--model", text(&utterances), "--prompt", "hello"]);
    assert_refused(&generate, 1, &["encoder"]);
    let mixed = train(&["stories", "--task", "intent-slot", "--plain"]);
    assert_refused(&mixed, 2, &["is not for task"]);
}

#[test]
fn an_encoder_goes_on_from_another_ones_weights() {
    let folder = tempfile::tempdir().expect("a folder");
    let (first, second) = (folder.path().join("first"), folder.path().join("second"));
    done_line(&train(&[&SMALL[..], &["--json", "--out", text(&first)]].concat()));
    let slow = ["--set", "learning_rate=0", "--set", "min_learning_rate=0", "--set", "weight_decay=0"];
    let init = ["--init", text(&first), "--json", "--out", text(&second)];
    done_line(&train(&[&SMALL[6..], &slow, &init].concat()));
    let bytes = |out: &Path| fs::read(out.join("model.safetensors")).expect("a model");
    assert_eq!(bytes(&first), bytes(&second), "nothing was learnt, so nothing has changed");
    // Other labels get other heads, on the same encoder.
    let (data, other) = (folder.path().join("data"), folder.path().join("other"));
    fs::create_dir(&data).expect("a writable folder");
    for part in ["train", "valid", "test"] {
        let line = r#"{"text": "lights on", "intent": "light", "spans": [{"start": 0, "end": 6, "slot": "thing"}]}"#;
        fs::write(data.join(format!("{part}.jsonl")), line).expect("a writable folder");
    }
    let init = ["--init", text(&first), "--data", text(&data), "--json", "--out", text(&other), "--set", "dropout=0"];
    done_line(&train(&[&SMALL[6..], &slow, &init].concat()));
    let model = |out: &Path| fireclay_model::ModelFolder::new(out).config().expect("a config").1;
    assert_eq!((model(&other).intents, model(&other).tags, model(&other).dropout), (1, 3, 0.0));
    assert_eq!(model(&other).with_dropout(model(&first).dropout).with_intents(30).with_tags(61), model(&first));

    let third = folder.path().join("third");
    let no_tokenizer = ["--init", "tests/golden/gpt2", "--plain", "--out", text(&third)];
    assert_refused(&train(&[&SMALL[6..], &no_tokenizer].concat()), 1, &["tokenizer.json"]);
}

backend_test!(utterances_in_parts_give_the_gradients_of_the_whole::<B>(device) {
    let change = |accumulation: &str, batch_size: &str| {
        let settings = [
            ("accumulation", accumulation),
            ("batch_size", batch_size),
            ("dropout", "0"),
            // A large epsilon makes a step proportional to its gradient.
            ("epsilon", "1.0"),
            ("learning_rate", "0.3"),
            ("weight_decay", "0"),
        ];
        let recipe = recipe(&settings);
        let mut trainer = Trainer::<B>::new(&recipe, recipe.task().expect("utterances"), device.clone()).expect("one");
        let all = |trainer: &Trainer<B>| -> Vec<f32> {
            let named = fireclay_model::named_parameters(&burn::module::AutodiffModule::valid(trainer.model()));
            named.iter().flat_map(|(.., value)| values(value)).collect()
        };
        let before = all(&trainer);
        let loss = trainer.train_step().and_then(|step| step.loss()).expect("a loss");
        (loss, all(&trainer).iter().zip(&before).map(|(after, before)| after - before).collect::<Vec<f32>>())
    };
    let (whole, parts) = (change("1", "12"), change("4", "3"));
    let tolerance = tolerance::<B>(&device);
    assert!((parts.0 / whole.0 - 1.0).abs() < tolerance.relative, "losses {} and {}", parts.0, whole.0);
    let scale = whole.1.iter().fold(0.0f32, |max, change| max.max(change.abs()));
    assert!(scale > 1e-4, "the parameters have moved: {scale}");
    let error = relative_error(&parts.1, &whole.1);
    assert!(error < tolerance.relative, "the parameters' changes differ by {error:.2e}");
});

backend_test!(utterance_gradients_reach_every_parameter::<B>(device) {
    let recipe = recipe(&[("dropout", "0")]);
    let trainer = Trainer::<B>::new(&recipe, recipe.task()?, device.clone())?;
    let batch = batch(trainer.task(), &recipe, 0);
    let loss = intent_slot::loss(trainer.model(), &batch, (1.0, 1.0), HeadLossOptions::new(), &device);
    let gradients = fireclay::training::optim::ParameterGradients::take(trainer.model(), loss.backward());
    let names = fireclay_model::named_parameters(trainer.model());
    for ((name, ..), gradient) in names.into_iter().zip(gradients.into_inner()) {
        let gradient = gradient.unwrap_or_else(|| panic!("{name} took no part"));
        assert!(values(&gradient).iter().any(|value| *value != 0.0), "{name} has no gradient");
    }
});
