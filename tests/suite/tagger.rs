//! Encoders for utterances with types of words and a convolution over the embeddings.

use std::fs;
use std::path::Path;

use burn::backend::Autodiff;
use burn::module::AutodiffModule;
use burn::tensor::{Int, Tensor, TensorData, activation};
use fireclay::backend::RunContext;
use fireclay::inference::embedding::Embedder;
use fireclay::inference::loaded::{ModelToLoad, TokenRows};
use fireclay::inference::prediction::Predictor;
use fireclay::precision::{CachePrecision, Precision};
use fireclay::training::optim::ParameterGradients;
use fireclay_datasets::{Labels, PieceTokenizer};
use fireclay_kernels::HeadLossOptions;
use fireclay_model::{ModelFolder, Tokens, UtteranceTargets};

use crate::backend_test;
use crate::cli::{assert_refused, text, train};
use crate::compare::{tolerance, values};
use crate::golden::{Golden, assert_near, by_hub_name, folder, with_values};
use crate::utterances::{SMALL, done_line};

backend_test!(an_encoder_with_a_convolution_and_its_gradients_are_those_of_pytorch::<B>(device) {
    let golden = Golden::open("tagger/golden.safetensors");
    let model = ModelFolder::new(folder("tagger")).load::<Autodiff<B>>(&device)?;
    let int = |name: &str| golden.int::<Autodiff<B>, 2>(name, &device);
    let lengths = golden.int::<Autodiff<B>, 1>("lengths", &device);
    let tokens = Tokens::from(int("ids")).with_types(int("types")).with_lengths(lengths);
    let hidden = model.forward(tokens);
    let heads = model.heads.as_ref().expect("heads");
    let (intents, tags) = heads.logits(hidden.clone());
    // Padding has states, too, which nobody reads.
    let real = |ours: Vec<f32>, wanted: &[f32]| -> Vec<f32> {
        ours.into_iter().zip(wanted).map(|(ours, wanted)| if *wanted == 0.0 { 0.0 } else { ours }).collect()
    };
    for (name, ours) in [
        ("hidden", values(&hidden.clone().inner())),
        ("tags", values(&tags.inner())),
        ("intents", values(&intents.inner())),
    ] {
        assert_near::<B>(name, &real(ours, golden.values(name)), golden.values(name), 1e-5, &device);
    }

    let targets = UtteranceTargets { intents: int("intent_targets"), tags: int("tag_targets") };
    let loss = heads.loss(hidden, targets, (0.3, 1.0), HeadLossOptions::new());
    assert_near::<B>("loss", &values(&loss.clone().inner()), golden.values("loss"), 1e-5, &device);
    let gradients = ParameterGradients::take(&model, loss.backward()).into_inner();
    let gradients = by_hub_name(&with_values(model.valid(), gradients));
    assert_eq!(gradients.len(), golden.count("grad."), "as many gradients as parameters");
    for (name, (_, ours)) in &gradients {
        golden.assert_values(&format!("grad.{name}"), ours, tolerance::<B>(&device).at_least(1e-5));
    }
});

backend_test!(a_convolution_does_not_see_what_pads_a_row::<B>(device) {
    let golden = Golden::open("tagger/golden.safetensors");
    let model = ModelFolder::new(folder("tagger")).load::<B>(&device)?;
    let d_model = model.config().d_model;
    let read = |name: &str| golden.values(name).iter().map(|value| *value as i32).collect::<Vec<_>>();
    let (ids, types, lengths) = (read("ids"), read("types"), read("lengths"));
    let width = ids.len() / lengths.len();
    for (row, length) in lengths.iter().enumerate() {
        let real = *length as usize;
        let cells = row * width..row * width + real;
        for padding in [0, 1, 6] {
            let padded = |values: &[i32]| {
                let row = values.iter().copied().chain(std::iter::repeat_n(2, padding)).collect::<Vec<_>>();
                Tensor::<B, 2, Int>::from_data(TensorData::new(row, [1, real + padding]), &device)
            };
            let lengths = Tensor::<B, 1, Int>::from_data([*length], &device);
            let tokens = Tokens::from(padded(&ids[cells.clone()])).with_types(padded(&types[cells.clone()]));
            let hidden = values(&model.forward(tokens.with_lengths(lengths)));
            let wanted = &golden.values("hidden")[row * width * d_model..][..real * d_model];
            assert_near::<B>("a row", &hidden[..real * d_model], wanted, 1e-5, &device);
        }
    }
});

/// A small run on the built-in names, with the recipe for data of one's own.
fn names(out: &Path, steps: &str, more: &[&str]) -> serde_json::Value {
    let run = ["--steps", steps, "--data", "embedded:names", "--json", "--out", text(out)];
    done_line(&train(&[&SMALL[..10], &SMALL[12..], &run, more].concat()))
}

#[test]
fn a_run_with_types_of_words_goes_on_to_the_same_bytes_and_gives_them_to_the_next() {
    let folder = tempfile::tempdir().expect("a folder");
    let [halves, whole, next] = ["halves", "whole", "next"].map(|name| folder.path().join(name));
    let constant = ["--set", "schedule=constant"];
    names(&halves, "3", &constant);
    names(&whole, "6", &constant);
    done_line(&train(&["--json", "--resume", "--out", text(&halves), "--steps", "6"]));
    let last = |out: &Path| fs::read(out.join("training/step-00000006/model.safetensors")).expect("a checkpoint");
    assert_eq!(last(&halves), last(&whole));

    let labels = |out: &Path| fs::read_to_string(out.join("labels.json")).expect("labels");
    let slow = ["--set", "learning_rate=0", "--set", "min_learning_rate=0", "--set", "weight_decay=0"];
    let init = ["--init", text(&whole), "--data", "embedded:names", "--json", "--out", text(&next)];
    done_line(&train(&[&SMALL[6..], &slow, &init].concat()));
    let bytes = |out: &Path| fs::read(out.join("model.safetensors")).expect("a model");
    assert_eq!((bytes(&whole), labels(&whole)), (bytes(&next), labels(&next)), "nothing was learnt");
    let fresh = folder.path().join("fresh");
    let refused = ["--init", text(&whole), "--out", text(&fresh), "--set", "word_types=false", "--plain"];
    assert_refused(&train(&[&SMALL[6..], &refused].concat()), 2, &["word_types", "new model"]);

    let refused =
        ["--task", "masked", "--init", text(&whole), "--data", "stories.txt", "--out", text(&fresh), "--plain"];
    fs::write(folder.path().join("stories.txt"), "the clay is dry. ".repeat(400)).expect("a writable folder");
    let masked = crate::cli::program().current_dir(folder.path()).arg("train").args(refused).output();
    assert_refused(&masked.expect("a program"), 2, &["words have types", "intent-slot"]);

    let (file, whole) = (whole.join("labels.json"), text(&whole).to_owned());
    let mut other: Labels = serde_json::from_str(&fs::read_to_string(&file).expect("labels")).expect("JSON");
    other.words.pop();
    fs::write(&file, serde_json::to_string(&other).expect("JSON")).expect("a writable folder");
    let predict =
        crate::cli::program().args(["predict", "--model", &whole, "--text", "x"]).output().expect("a program");
    assert_refused(&predict, 1, &["labels.json", "types of words"]);
}

backend_test!(a_prediction_gives_words_the_types_of_training::<B>(device) {
    let folder = tempfile::tempdir().expect("a folder");
    names(folder.path(), "6", &["--set", "learning_rate=0.02", "--set", "warmup_steps=0", "--set", "init_deviation=0.3"]);
    let model = ModelFolder::new(folder.path()).load::<B>(&device)?;
    let labels = fs::read_to_string(folder.path().join("labels.json")).expect("labels");
    let labels: Labels = serde_json::from_str(&labels).expect("JSON");
    let pieces = PieceTokenizer::load(&folder.path().join("tokenizer.json")).expect("a tokenizer");
    let predictor = Predictor::<B>::open(folder.path(), Precision::F32, device.clone())?;
    let said = ["show the quxly river", "show the river river", "quxly quxly"];
    let predicted = predictor.predict(&said)?;
    for (said, predicted) in said.iter().zip(predicted) {
        let probability = |typed: bool| {
            let (mut ids, mut types) = (vec![pieces.cls() as i32], vec![0]);
            for word in said.split(' ') {
                types.push(if typed { labels.word_type(word) as i32 } else { 0 });
                ids.extend(pieces.word(word).into_iter().map(|piece| piece as i32));
                types.resize(ids.len(), 0);
            }
            ids.extend(pieces.sep().map(|sep| sep as i32));
            types.resize(ids.len(), 0);
            let row = |row: Vec<i32>| {
                let length = row.len();
                Tensor::<B, 2, Int>::from_data(TensorData::new(row, [1, length]), &device)
            };
            let hidden = model.forward(Tokens::from(row(ids)).with_types(row(types)));
            let (intents, _) = model.heads.as_ref().expect("heads").logits(hidden);
            values(&activation::softmax(intents, 1)).into_iter().fold(0.0f32, f32::max)
        };
        let off = (predicted.probability - f64::from(probability(true))).abs();
        assert!(off < 10.0 * tolerance::<B>(&device).relative, "{said}: off by {off}");
        let untyped = (probability(true) - probability(false)).abs();
        assert!(untyped > 1e-3, "{said}: types matter by {untyped} only");
    }
    assert_eq!(labels.word_type("quxly"), 1);
    assert!(labels.word_type("River") > 1);
});

backend_test!(an_embedding_gives_words_the_types_of_training::<B>(device) {
    let folder = tempfile::tempdir().expect("a folder");
    let strong = ["--set", "learning_rate=0.02", "--set", "warmup_steps=0", "--set", "init_deviation=0.3"];
    names(folder.path(), "6", &strong);
    let model = ModelFolder::new(folder.path()).load::<B>(&device)?;
    let predicted = Predictor::<B>::open(folder.path(), Precision::F32, device.clone())?;
    let labels = fs::read_to_string(folder.path().join("labels.json")).expect("labels");
    let labels: Labels = serde_json::from_str(&labels).expect("JSON");
    let pieces = PieceTokenizer::load(&folder.path().join("tokenizer.json")).expect("a tokenizer");
    let of_predictor = Embedder::of(predicted.model().clone(), folder.path(), device.clone())?;
    for embedder in [of_predictor, Embedder::<B>::open(folder.path(), Precision::F32, device.clone())?] {
        // Noise is dropped, as in predictions, and rows of different lengths are padded.
        let said = ["show the quxly river", "River!", "quxly quxly's quxly"];
        let encoded = said.iter().map(|said| embedder.text_encoder().encode(said)).collect::<Result<Vec<_>, _>>()?;
        let embeddings = embedder.embed(&encoded)?;
        for ((said, encoded), embedding) in said.iter().zip(&encoded).zip(embeddings) {
            let (mut ids, mut types) = (vec![pieces.cls() as i32], vec![0]);
            for word in said.trim_end_matches('!').split(' ') {
                types.push(labels.word_type(word) as i32);
                ids.extend(pieces.word(word).into_iter().map(|piece| piece as i32));
                types.resize(ids.len(), 0);
            }
            ids.extend(pieces.sep().map(|sep| sep as i32));
            types.resize(ids.len(), 0);
            assert_eq!(encoded.ids.iter().map(|id| *id as i32).collect::<Vec<_>>(), ids, "{said}");
            let mean = |types: &[i32]| -> Vec<f32> {
                let row = |row: &[i32]| {
                    Tensor::<B, 2, Int>::from_data(TensorData::new(row.to_vec(), [1, row.len()]), &device)
                };
                let hidden = values(&model.forward(Tokens::from(row(&ids)).with_types(row(types))));
                let d_model = hidden.len() / ids.len();
                let sums: Vec<f64> = (0..d_model)
                    .map(|at| hidden.iter().skip(at).step_by(d_model).map(|value| f64::from(*value)).sum())
                    .collect();
                let length = sums.iter().map(|sum| sum * sum).sum::<f64>().sqrt();
                sums.iter().map(|sum| (sum / length) as f32).collect()
            };
            assert_near::<B>(said, &embedding, &mean(&types), 1e-5, &device);
            let untyped = mean(&vec![0; ids.len()]);
            let apart = embedding.iter().zip(&untyped).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(apart > 1e-2, "{said}: types matter by {apart} only");
        }
        let refused = embedder.embed(&[encoded[0].ids.clone().into()]).expect_err("ids have no types");
        assert!(refused.exit_code() == 2 && refused.to_string().contains("words of this model have types"), "{refused}");
    }
    let (model, cache) = (folder.path().to_path_buf(), CachePrecision::Auto);
    let loaded = ModelToLoad { model, precision: Precision::F32, cache }.run(RunContext::<B>::only(device.clone()))?;
    assert!(loaded.embed(&["show the river".into()])?[0].iter().all(|value| value.is_finite()));
    let rows = TokenRows { ids: vec![2, 7, 3], length: 3 };
    let states = loaded.hidden_states(&rows).err().map(|failure| failure.to_string());
    let attention = loaded.attention(&rows).err().map(|failure| failure.to_string());
    for refused in [states, attention] {
        assert!(refused.as_ref().is_some_and(|refused| refused.contains("have types")), "{refused:?}");
    }
});

#[test]
fn a_prediction_weighs_intent_and_slots_together() {
    let folder = tempfile::tempdir().expect("a folder");
    names(folder.path(), "60", &["--set", "learning_rate=0.02", "--set", "warmup_steps=0"]);
    let file = folder.path().join("labels.json");
    let mut labels: Labels = serde_json::from_str(&fs::read_to_string(&file).expect("labels")).expect("JSON");
    let of_visits = &labels.intent_slots["visit"].slots;
    assert!(of_visits["town"] > 0 && !of_visits.contains_key("work"));
    assert_eq!(labels.intent_slots.values().map(|of_intent| of_intent.utterances).sum::<usize>(), 3000);
    let predicted = |labels: &Labels| {
        fs::write(&file, serde_json::to_string(labels).expect("JSON")).expect("a writable folder");
        let predictor = Predictor::<burn::backend::NdArray>::open(folder.path(), Precision::F32, Default::default())
            .expect("a model");
        let said = ["show the river", "find the old mill by anna"];
        predictor.predict(&said).expect("predictions").remove(0)
    };
    let joint = predicted(&labels);
    // One intent alone has any slots: the others cost more than they bring.
    let mut moved = 0;
    for intent in labels.intents.clone() {
        for (name, of_intent) in &mut labels.intent_slots {
            of_intent.utterances = 1 << 40;
            let count = if *name == intent { 1 << 40 } else { 0 };
            of_intent.slots = labels.slots.iter().map(|slot| (slot.clone(), count)).collect();
        }
        let prediction = predicted(&labels);
        assert!(prediction.spans.is_empty() || prediction.intent.as_ref() == Some(&intent), "{prediction:?}");
        moved += usize::from(!prediction.spans.is_empty() && prediction.intent != joint.intent);
    }
    assert!(moved > 0, "no intent follows the slots: {joint:?}");
    labels.intent_slots.clear();
    let apart = predicted(&labels);
    assert!(!apart.spans.is_empty(), "{apart:?}");
}
