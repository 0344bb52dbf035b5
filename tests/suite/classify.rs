//! Sequence classification: transformers' logits and gradients (`tests/golden/classifiers.py`), a
//! rule that a small model learns, and the commands.

use std::fs;
use std::path::Path;
use std::process::Output;

use burn::backend::Autodiff;
use burn::module::AutodiffModule;
use burn::tensor::{Int, Tensor};
use fireclay::recipe::Recipe;
use fireclay::tasks::{Task, classify};
use fireclay::training::Trainer;
use fireclay::training::optim::ParameterGradients;
use fireclay_datasets::{LabelledBatch, PieceTokenizer};
use fireclay_kernels::{Backend, HeadLossOptions, RandomKey};
use fireclay_model::{ClassifierPooling, ModelFolder, Tokens, Transformer, TransformerConfig};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;

use crate::backend_test;
use crate::cli::{assert_refused, program, text, train};
use crate::compare::{Tolerance, assert_close, tolerance, values};
use crate::golden::{Golden, assert_near, by_hub_name, folder, with_values};

/// The golden cases, with the number of their labels.
const CASES: [(&str, usize); 3] = [("bert", 12), ("modernbert_mean", 3), ("modernbert_cls", 2)];

fn logits<B: Backend>(model: &Transformer<B>, golden: &Golden, device: &B::Device) -> Tensor<B, 2> {
    let lengths = golden.int::<B, 1>("lengths", device);
    let tokens = Tokens::from(golden.int::<B, 2>("tokens", device)).with_lengths(lengths.clone());
    model.classify(model.forward(tokens), Some(lengths)).expect("a head for labels")
}

/// The rows of a golden case as a batch.
fn batch(golden: &Golden) -> LabelledBatch {
    let numbers = |name: &str| golden.values(name).iter().map(|value| *value as u32).collect::<Vec<u32>>();
    let (tokens, lengths, labels) = (numbers("tokens"), numbers("lengths"), numbers("labels"));
    let rows = tokens.chunks(tokens.len() / lengths.len()).zip(&lengths).map(|(row, length)| &row[..*length as usize]);
    LabelledBatch::new(rows.zip(&labels).map(|(row, label)| (row, *label as i32)), 0)
}

backend_test!(logits_and_gradients_of_classifiers_are_those_of_transformers::<B>(device) {
    let wanted = if B::is_synchronous() { Tolerance::from(1e-5) } else { tolerance::<B>(&device) };
    for (name, count) in CASES {
        let golden = Golden::open(&format!("classifiers/{name}/golden.safetensors"));
        let files = ModelFolder::new(folder(&format!("classifiers/{name}")));
        assert_eq!(files.unknown_keys()?, Vec::<String>::new(), "{name}");
        let model = files.load::<Autodiff<B>>(&device)?;
        let head = model.config().classifier.clone().expect("a head for labels");
        assert_eq!(head.labels.len(), count);
        let ours = logits(&model.valid(), &golden, &device);
        assert_near::<B>(name, &values(&ours), golden.values("logits"), 2e-5, &device);
        let loss = classify::loss(&model, &batch(&golden), HeadLossOptions::new(), &device);
        assert_near::<B>(name, &values(&loss.clone().inner()), golden.values("loss"), 1e-5, &device);
        let gradients = ParameterGradients::take(&model, loss.backward()).into_inner();
        let gradients = by_hub_name(&with_values(model.valid(), gradients));
        for (key, (_, ours)) in &gradients {
            golden.assert_values(&format!("grad.{key}"), ours, wanted.or_zero());
        }
        assert_eq!(gradients.len(), golden.count("grad."), "{name}: as many gradients as parameters");
    }
    let labels = |name: &str| -> Vec<String> {
        let config = ModelFolder::new(folder(&format!("classifiers/{name}"))).config().expect("a config").1;
        config.classifier.expect("a head for labels").labels
    };
    assert_eq!(labels("modernbert_mean"), ["wet", "dry", "fired"]);
    assert_eq!(labels("bert")[9..], ["glaze 8", "glaze 10", "glaze 6"], "in the order of numbers");
});

// With FIRECLAY_SAVED_CLASSIFIERS=FOLDER the models stay there, for `classifiers.py --check FOLDER`.
backend_test!(a_saved_classifier_has_the_same_labels_and_logits::<B>(device) {
    let kept = std::env::var("FIRECLAY_SAVED_CLASSIFIERS").ok();
    let golden = Golden::open("classifiers/modernbert_cls/golden.safetensors");
    let names = || (0..11).map(|at| format!("label {}", 10 - at)).collect::<Vec<String>>();
    let modernbert = TransformerConfig::modernbert(61, 40, 24, 4, 3, 8).with_dropout(0.1).with_labels(names());
    let mean = modernbert.classifier.clone().map(|mut head| {
        head.pooling = ClassifierPooling::Mean;
        head.bias = true;
        head
    });
    let own = |config: TransformerConfig| {
        config.with_init_deviation(0.3).init::<B>(5, &device).expect("a config that can be built")
    };
    let load = |name: &str| ModelFolder::new(folder(&format!("classifiers/{name}"))).load::<B>(&device);
    let models = [
        ("bert", load("bert")?),
        ("modernbert_mean", load("modernbert_mean")?),
        ("modernbert_cls", load("modernbert_cls")?),
        ("new_bert", own(TransformerConfig::bert(61, 40, 24, 2, 3).with_labels(names()))),
        ("new_modernbert", own(modernbert.clone())),
        ("new_modernbert_mean", own(modernbert.with_classifier(mean))),
    ];
    for (name, model) in models {
        let again = tempfile::tempdir().expect("a folder");
        let saved = kept.as_ref().map_or(again.path().to_path_buf(), |kept| Path::new(kept).join(name));
        fs::create_dir_all(&saved).expect("writable");
        let copy = ModelFolder::new(&saved);
        copy.save(&model)?;
        assert_eq!(&copy.config()?.1, model.config(), "{name}");
        assert_eq!(copy.unknown_keys()?, Vec::<String>::new(), "{name}");
        let wanted = logits(&model, &golden, &device);
        assert_close(name, &logits(&copy.load::<B>(&device)?, &golden, &device), &wanted, 0.0);
        if kept.is_some() {
            let numbers = |what: &str| golden.values(what).to_vec();
            let parts = [
                ("tokens", vec![4, 12], numbers("tokens")),
                ("lengths", vec![4], numbers("lengths")),
                ("logits", wanted.dims().to_vec(), values(&wanted)),
            ];
            let parts = parts.map(|(name, shape, values)| {
                (name, shape, values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>())
            });
            let views = parts.iter().map(|(name, shape, bytes)| {
                (*name, TensorView::new(Dtype::F32, shape.clone(), bytes).expect("as many bytes as the shape says"))
            });
            let file = safetensors::serialize(views, None).expect("a file");
            fs::write(saved.join("golden.safetensors"), file).expect("writable");
            let labels = &model.config().classifier.as_ref().expect("a head for labels").labels;
            fs::write(saved.join("labels.json"), serde_json::to_string(labels).expect("names")).expect("writable");
        }
    }
});

backend_test!(a_part_of_a_batch_drops_what_the_whole_drops_there::<B>(device) {
    let config = TransformerConfig::modernbert(61, 12, 24, 2, 3, 8).with_init_deviation(0.3);
    // Of the head alone.
    let mut config = config.with_labels(vec!["a".into(), "b".into(), "c".into()]);
    config.classifier.as_mut().expect("a head for labels").dropout = 0.5;
    let mut model = config.init::<B>(3, &device)?;
    let ids = Tensor::<B, 1, Int>::arange(1..49, &device).reshape([4, 12]);
    let of = |model: &Transformer<B>, ids| model.classify(model.forward(ids), None).expect("a head for labels");
    let plain = of(&model, ids.clone());
    model.set_dropout(Some(RandomKey::new(7)));
    let whole = of(&model, ids.clone());
    let moved = (whole.clone() - plain).abs().max().into_data().iter::<f32>().next().expect("a value");
    assert!(moved > 1e-2, "nothing is dropped");
    model.set_dropout_from(Some(RandomKey::new(7)), 2 * 12);
    let part = of(&model, ids.narrow(0, 2, 2));
    assert_close("the last two rows", &part, &whole.narrow(0, 2, 2), tolerance::<B>(&device));
});

/// Examples in which two words occur among others, with the one that comes first as their label.
fn ruled(count: u32) -> String {
    const OTHERS: [&str; 7] = ["the", "potter", "wheel", "turns", "slowly", "today", "again"];
    let key = RandomKey::new(11);
    let line = |row: u32| {
        let pick = |column: u32, below: usize| (key.uniform(row, column) * below as f64) as usize;
        let mut words: Vec<&str> = (0..2 + pick(0, 6) as u32).map(|at| OTHERS[pick(at + 10, 7)]).collect();
        let pair = if pick(1, 2) == 0 { ["kiln", "glaze"] } else { ["glaze", "kiln"] };
        let first = pick(2, words.len());
        words.insert(first, pair[0]);
        let second = first + 1 + pick(3, words.len() - first);
        words.insert(second, pair[1]);
        format!("\"{}\",{}\n", words.join(" "), pair[0])
    };
    std::iter::once("text,label\n".to_string()).chain((0..count).map(line)).collect()
}

/// A small classifier.
const SMALL: [(&str, &str); 12] = [
    ("d_model", "32"),
    ("n_layers", "2"),
    ("n_heads", "2"),
    ("dropout", "0"),
    ("init_deviation", "0.06"),
    ("pieces", "120"),
    ("seq_length", "16"),
    ("learning_rate", "3e-3"),
    ("warmup_steps", "10"),
    ("batch_size", "32"),
    ("steps", "150"),
    ("label_smoothing", "0.05"),
];

backend_test!(a_small_model_learns_which_of_two_words_comes_first::<B>(device) {
    let folder = tempfile::tempdir().expect("a folder");
    let data = folder.path().join("order.csv");
    fs::write(&data, ruled(1200)).expect("writable");
    // A step is slow where each launch is.
    let poolings = if B::is_synchronous() { &["mean", "cls"][..] } else { &["mean"] };
    for pooling in poolings {
        let head = format!("{{ pooling = '{pooling}' }}");
        let recipe = Recipe::shipped("classify").expect("a shipped recipe");
        let settings = SMALL.into_iter().chain([("data.source", text(&data)), ("classifier", &head)]);
        let recipe = recipe.with_all(settings).expect("known settings");
        let mut trainer = Trainer::<B>::new(&recipe, recipe.task()?, device.clone())?;
        let Task::Classify(task) = trainer.task() else { panic!("labelled examples are asked for") };
        assert_eq!(task.labels(), ["glaze", "kiln"]);
        let before = trainer.validate(0)?;
        for _ in 0..150 {
            trainer.train_step()?;
        }
        let after = trainer.validate(0)?;
        let (first, last) = (before.classes.expect("scores"), after.classes.expect("scores"));
        assert!(after.is_better_than(&before) && first.accuracy < 75.0, "from {before:?} to {after:?}");
        assert!(last.accuracy > 95.0 && last.macro_f1 > 95.0, "{pooling}: {last:?}");
    }
});

/// Arguments for a few steps on `data`.
fn short<'a>(data: &'a str, out: &'a str) -> Vec<String> {
    let settings = SMALL.into_iter().filter(|(key, _)| *key != "steps");
    let settings = settings.flat_map(|(key, value)| ["--set".to_string(), format!("{key}={value}")]);
    let args = ["--task", "classify", "--data", data, "--out", out, "--json"].map(String::from);
    args.into_iter().chain(settings).collect()
}

fn run(args: &[String]) -> Output {
    train(&args.iter().map(String::as_str).collect::<Vec<_>>())
}

fn last_line(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let stdout = String::from_utf8_lossy(&output.stdout);
    serde_json::from_str(stdout.lines().last().expect("a line")).expect("JSON")
}

#[test]
fn a_classifier_is_trained_resumed_to_the_same_bytes_evaluated_and_asked() {
    let folder = tempfile::tempdir().expect("a folder");
    let data = folder.path().join("order");
    fs::create_dir(&data).expect("writable");
    let lines = ruled(300);
    let lines: Vec<&str> = lines.lines().collect();
    for (name, part) in [("train.csv", &lines[1..201]), ("dev.csv", &lines[201..251]), ("test.csv", &lines[251..])] {
        fs::write(data.join(name), format!("Sentence,class\n{}\n", part.join("\n"))).expect("writable");
    }
    let (halves, whole) = (folder.path().join("halves"), folder.path().join("whole"));
    let begin = |out: &Path, steps: &str| {
        let more = ["--set", "schedule=constant", "--set", "dropout=0.1", "--steps", steps].map(String::from);
        run(&[short(text(&data), text(out)), more.to_vec()].concat())
    };
    last_line(&begin(&halves, "4"));
    let output = begin(&whole, "8");
    let done = last_line(&output);
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(told.contains("text in the field 'Sentence', labels in 'class'"), "{told}");
    last_line(&train(&["--resume", "--json", "--out", text(&halves), "--steps", "8"]));
    let last = |out: &Path| fs::read(out.join("training/step-00000008/model.safetensors")).expect("a checkpoint");
    assert_eq!(last(&halves), last(&whole));
    for name in ["tokenizer.json", "confusion.svg", "report.html"] {
        assert!(whole.join(name).exists(), "{name}");
    }

    let backend = crate::backend().as_str();
    let asked = |args: &[&str]| program().args(args).args(["--backend", backend, "--json"]).output().expect("it runs");
    let evaluated = last_line(&asked(&["evaluate", "--model", text(&whole), "--data", text(&data)]));
    assert_eq!((&evaluated["part"], &evaluated["examples"]), (&"test".into(), &50.into()), "{evaluated}");
    for key in ["accuracy", "macro_f1"] {
        let [trained, again] = [&done, &evaluated].map(|line| line[key].as_f64().expect("a number"));
        assert!((trained - again).abs() < 1e-3, "{key}: {done} and {evaluated}");
    }
    let present = ["glaze", "kiln"].map(|label| evaluated["labels"][label]["present"].as_u64().expect("a number"));
    assert_eq!(present[0] + present[1], 50);
    let predicted = asked(&["predict", "--model", text(&whole), "--text", "the kiln and the glaze"]);
    let predicted = last_line(&predicted);
    assert!(["glaze", "kiln"].contains(&predicted["label"].as_str().expect("a label")), "{predicted}");
    assert!((0.5..=1.0).contains(&predicted["probability"].as_f64().expect("a number")), "{predicted}");
    assert!(predicted.get("intent").is_none() && predicted["event"] == "prediction", "{predicted}");
    let long = "kiln glaze ".repeat(40);
    let output = asked(&["predict", "--model", text(&whole), "--text", &long]);
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(told.contains("1 example is truncated to the model's context of 16 tokens"), "{told}");
}

#[test]
fn what_cannot_be_classified_is_refused_in_one_line() {
    let folder = tempfile::tempdir().expect("a folder");
    let put = |name: &str, content: &str| {
        let path = folder.path().join(name);
        fs::write(&path, content).expect("writable");
        path
    };
    let out = folder.path().join("run");
    let refused = |data: &Path, more: &[&str], code: i32, words: &[&str]| {
        let args = ["--task", "classify", "--data", text(data), "--out", text(&out), "--json"];
        assert_refused(&train(&[&args[..], more].concat()), code, words);
        assert!(!out.join("config.json").exists());
    };
    let plain = put("plain.csv", "line,stars\na,1\nb,2\n");
    refused(&plain, &[], 1, &["record 1 has the fields line, stars", "--field NAME"]);
    refused(&plain, &["--field", "line"], 1, &["known as a label", "label_field=NAME"]);
    refused(&plain, &["--field", "lines"], 1, &["no field 'lines'; it has line, stars"]);
    let same = put("same.csv", "text,label\na,x\nb,x\nc,x\n");
    let good = put("good.csv", "text,label\na,x\nb,y\nc,x\na,y\n");
    // After the line that says which fields were found.
    for (data, more, wanted) in [
        (&same, &[][..], "all examples have the label 'x'"),
        (&good, &["--set", "attention=causal"][..], "a label depends on the whole text"),
        (&good, &["--set", "tokenizer=bpe"][..], "data.tokenizer is 'bpe'"),
        (&good, &["classify-tune"][..], "a pretrained encoder (--init MODEL) has its own"),
    ] {
        let args = ["--task", "classify", "--data", text(data), "--out", text(&out), "--json"];
        let told = train(&[&args[..], more].concat());
        let stderr = String::from_utf8_lossy(&told.stderr).into_owned();
        assert!(!told.status.success() && stderr.contains(wanted), "{stderr}");
    }
    refused(&plain, &["--set", "intent_weight=0.5"], 2, &["training.intent_weight has no effect"]);
    refused(&plain, &["--set", "adapter=lora"], 2, &["training.adapter is lora"]);
    let cross = crate::golden::folder("cross_encoder");
    let asked = program().args(["predict", "--model", text(&cross), "--text", "a"]).output().expect("it runs");
    assert_refused(&asked, 1, &["cross_encoder", "a single output"]);
}

backend_test!(a_pretrained_head_is_kept_for_the_same_labels_and_its_dense_layer_for_others::<B>(device) {
    let root = tempfile::tempdir().expect("a folder");
    let words = ["clay", "is", "wet", "dry", "today"];
    for name in ["bert", "modernbert_mean"] {
        let golden = folder(&format!("classifiers/{name}"));
        let model = root.path().join(name);
        fs::create_dir(&model).expect("writable");
        for file in ["config.json", "model.safetensors"] {
            fs::copy(golden.join(file), model.join(file)).expect("a golden file");
        }
        let tokenizer = PieceTokenizer::train_on(words.into_iter().cycle().take(20), 61)?;
        tokenizer.save(&model.join("tokenizer.json"))?;
        let stored = ModelFolder::new(&model).load::<B>(&device)?;
        let head = stored.classifier.expect("a head for labels");
        let labels = head.settings().labels.clone();
        let started = |given: &[String]| -> Result<_, fireclay::Failure> {
            let lines = given.iter().cycle().take(4 * given.len()).zip(words.iter().cycle());
            let line = |(label, word)| format!("{{\"text\": \"clay is {word}\", \"label\": {label}}}\n");
            let lines: String = lines.map(line).collect();
            let data = root.path().join("data.jsonl");
            fs::write(&data, lines).expect("writable");
            let recipe = Recipe::shipped("classify-tune")?;
            let (init, source) = (("init", text(&model)), ("data.source", text(&data)));
            let recipe = recipe.with_all([init, source, ("seq_length", "12"), ("holdout", "0.05")])?;
            let trainer = Trainer::<B>::new(&recipe, recipe.task()?, device.clone())?;
            Ok(trainer.model().valid().classifier.expect("a head for labels"))
        };
        let quoted = |labels: &[String]| labels.iter().map(|label| format!("\"{label}\"")).collect::<Vec<_>>();
        let mut turned = quoted(&labels);
        turned.reverse();
        // By name in another order, and by number.
        let numbers: Vec<String> = (0..labels.len()).map(|at| at.to_string()).collect();
        for given in [turned, numbers] {
            let same = started(&given)?;
            assert_eq!(same.settings().labels, labels, "{name}");
            assert_close(name, &same.output.val(), &head.output.val(), 0.0);
            assert_close(name, &same.dense.val(), &head.dense.val(), 0.0);
        }
        let others = started(&quoted(&["x".into(), "y".into(), "z".into()]))?;
        assert_eq!(others.settings().labels, ["x", "y", "z"]);
        assert_eq!(others.settings().pooling, head.settings().pooling);
        assert_eq!(others.output.val().dims()[0], 3);
        assert_close(name, &others.dense.val(), &head.dense.val(), 0.0);
        if let (Some(ours), Some(theirs)) = (&others.norm, &head.norm) {
            assert_close(name, &ours.gamma.val(), &theirs.gamma.val(), 0.0);
        }
        if let (Some(ours), Some(theirs)) = (&others.dense_bias, &head.dense_bias) {
            assert_close(name, &ours.val(), &theirs.val(), 0.0);
        }
    }
});
