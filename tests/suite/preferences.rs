//! Preference pairs (DPO): against TRL, see `tests/golden/preferences.py`, and as a run.

use std::collections::HashMap;
use std::path::Path;
use std::process::Output;

use burn::backend::Autodiff;
use burn::backend::NdArray;
use burn::module::{AutodiffModule, Module};
use burn::tensor::Tensor;
use fireclay::recipe::Recipe;
use fireclay::tasks::chat::Example;
use fireclay::tasks::preference::{PairBatch, loss_by, pair_losses};
use fireclay::training::optim::ParameterGradients;
use fireclay_datasets::Tokenizer;
use fireclay_kernels::backward;
use fireclay_model::{AdapterSaver, LoraFiles, ModelFolder, Transformer, TransformerConfig, trained_parameters};
use serde_json::{Value, json};

use crate::adapters::with_values;
use crate::backend_test;
use crate::compare::values;
use crate::golden::{assert_near, folder, read};

type Golden = HashMap<String, (Vec<usize>, Vec<f32>)>;

/// The pairs of the golden file, each `[chosen, rejected]`.
fn pairs(golden: &Golden) -> Vec<[Example; 2]> {
    let ids = |name: String| -> Vec<u32> { golden[&name].1.iter().map(|id| *id as u32).collect() };
    let example = |number: usize, side: &str| {
        let (prompt, answer) = (ids(format!("pair.{number}.prompt")), ids(format!("pair.{number}.{side}")));
        let supervised = [vec![false; prompt.len()], vec![true; answer.len()]].concat();
        Example { tokens: [prompt, answer].concat(), supervised }
    };
    (0..3).map(|number| ["chosen", "rejected"].map(|side| example(number, side))).collect()
}

fn recipe(loss: &str) -> Recipe {
    Recipe::shipped("dpo")
        .and_then(|recipe| recipe.with_all([("loss", loss), ("beta", "0.3")]))
        .expect("known settings")
}

backend_test!(losses_gradients_and_rewards_are_those_of_trl::<B>(device) {
    let golden = read(&folder("preferences.safetensors"));
    let pairs = pairs(&golden);
    let plain = ModelFolder::new(folder("llama"));
    let (family, _) = plain.config().expect("a config");
    let files = LoraFiles::open(&folder("adapters/llama")).expect("an adapter");
    let reference = plain.load::<Autodiff<B>>(&device).expect("a model").no_grad();
    // All pairs in one row, or in two with one pair in the last.
    for (ends, length) in [(&[0, 3][..], 64), (&[0, 2, 3][..], 40)] {
        for loss in ["sigmoid", "ipo", "sigmoid_norm"] {
            let model = plain.load::<Autodiff<B>>(&device).expect("a model");
            let model = model.with_lora(family, files.config(), Some(&files), 7).expect("the adapter fits");
            let row = |row: &std::ops::Range<usize>| pairs[row.clone()].iter().map(<[Example; 2]>::each_ref);
            let batch = PairBatch::new(length, ends.windows(2).map(|ends| row(&(ends[0]..ends[1]))));
            let (got, rewards) =
                loss_by(&model, &reference, &batch, &recipe(loss), 3, &device, |tokens| model.forward(tokens));
            let wanted = golden[&format!("{loss}.loss")].1[0];
            assert_near::<B>(loss, &values(&got.clone().inner()), &[wanted], 1e-5 * wanted.max(1.0), &device);
            let wanted = &golden[&format!("{loss}.rewards")].1;
            assert_near::<B>(&format!("{loss}: rewards"), &values(&rewards.inner()), wanted, 1e-5, &device);
            let gradients = backward(got, None);
            let trained = trained_parameters(&model);
            let gradients = ParameterGradients::take(&model, gradients).into_inner();
            let of_parameter =
                trained.iter().zip(gradients).map(|((_, id, _, _), gradient)| (*id, gradient.expect("a gradient")));
            let as_values = with_values(model.valid(), &of_parameter.collect());
            let out = tempfile::tempdir().expect("a folder");
            AdapterSaver { family, config: files.config() }.save(&as_values, out.path()).expect("writable");
            let ours = read(&out.path().join("adapter_model.safetensors"));
            let prefix = format!("{loss}.gradient.");
            let theirs: Vec<_> =
                golden.iter().filter_map(|(key, value)| Some((key.strip_prefix(&prefix)?, value))).collect();
            assert_eq!(ours.len(), theirs.len());
            for (key, (shape, wanted)) in theirs {
                let (own, got) = &ours[key];
                assert_eq!(own, shape, "{loss}: {key}");
                let scale = wanted.iter().fold(0f32, |most, value| most.max(value.abs()));
                assert_near::<B>(&format!("{loss}: {key}"), got, wanted, 1e-5 * scale.max(1.0), &device);
            }
        }
    }
});

#[test]
fn smoothing_expects_a_share_of_wrong_labels() {
    let device = Default::default();
    let vector = |values: [f32; 4]| Tensor::<NdArray, 1>::from_floats(values, &device);
    let (policy, reference) = (vector([-3.0, -5.0, -2.0, -1.0]), vector([-4.0, -4.0, -2.5, -2.5]));
    let lengths = || vector([1.0; 4]);
    let settings = recipe("sigmoid").preference;
    let losses =
        |smoothing: f64| values(&pair_losses(policy.clone(), reference.clone(), lengths(), &settings, smoothing));
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    for (at, margin) in [0.3 * 2.0, -0.3].into_iter().enumerate() {
        let wanted = -0.9 * sigmoid(margin).ln() - 0.1 * sigmoid(-margin).ln();
        assert!((f64::from(losses(0.1)[at]) - wanted).abs() < 1e-6);
        assert!((f64::from(losses(0.0)[at]) + sigmoid(margin).ln()).abs() < 1e-6);
    }
}

fn tokenizer() -> Tokenizer {
    Tokenizer::load(&folder("chats").join("tokenizer.json")).expect("a tokenizer")
}

/// A small model with a template, and pairs: the chosen answer is the word that was asked for.
fn base_and_pairs(folder: &Path) {
    let config = TransformerConfig::llama(tokenizer().vocab_size(), 96, 32, 1, 2);
    let model: Transformer<NdArray> = config.init(3, &Default::default()).expect("a config that holds together");
    let base = folder.join("base");
    std::fs::create_dir(&base).expect("writable");
    ModelFolder::new(&base).save(&model).expect("saves");
    tokenizer().save(&base.join("tokenizer.json")).expect("saves");
    let template = "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' -}}{%- \
                    endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}";
    std::fs::write(base.join("tokenizer_config.json"), json!({ "chat_template": template }).to_string())
        .expect("writable");
    let words = ["kiln", "cone", "clay", "glaze", "ash", "hot", "brief", "cools"];
    let line = |at: usize| {
        let [asked, other] = [at, at + 3].map(|at| words[at % words.len()]);
        json!({ "prompt": format!("Say {asked}. ({at})"), "chosen": asked, "rejected": other }).to_string()
    };
    std::fs::write(folder.join("pairs.jsonl"), (0..60).map(line).collect::<Vec<_>>().join("\n")).expect("writable");
    let chat = |at: usize| {
        let asked = words[at % words.len()];
        json!({ "prompt": format!("Say {asked}. ({at})"), "completion": asked }).to_string()
    };
    std::fs::write(folder.join("chats.jsonl"), (0..60).map(chat).collect::<Vec<_>>().join("\n")).expect("writable");
}

fn train(folder: &Path, args: &[&str]) -> Output {
    let mut command = crate::cli::program();
    command.current_dir(folder).args(["train", "--json", "--backend", crate::backend().as_str()]).args(args);
    command.output().expect("the program starts")
}

/// The settings of a run on pairs.
fn prefer<'a>(init: &'a str, out: &'a str, settings: &[&'a str]) -> Vec<&'a str> {
    let mut args = vec!["--task", "preference", "--init", init, "--data", "pairs.jsonl", "--out", out];
    let shared = ["batch_size=4", "seq_length=96", "warmup_steps=0", "schedule=constant", "beta=0.5"];
    let shared = shared.into_iter().chain(["learning_rate=5e-3", "valid_every=20", "checkpoint_every=20"]);
    for setting in shared.chain(settings.iter().copied()) {
        args.extend(["--set", setting]);
    }
    args
}

fn lines(output: &Output) -> Vec<Value> {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let stdout = String::from_utf8_lossy(&output.stdout);
    stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

fn number(line: &Value, name: &str) -> f64 {
    line[name].as_f64().unwrap_or_else(|| panic!("no {name} in {line}"))
}

/// Asserts that a run has learned nothing at its first step, and to prefer what is chosen in the
/// end.
fn assert_learns(lines: &[Value], what: &str) {
    let first = lines.iter().find(|line| line["event"] == "train").expect("a step");
    assert!((number(first, "loss") - 2f64.ln()).abs() < 1e-5, "{what}: {first}");
    for reward in ["rewards/chosen", "rewards/rejected", "rewards/margins"] {
        assert!(number(first, reward).abs() < 1e-5, "{what}: {first}");
    }
    let done = lines.last().expect("a summary");
    assert!(number(done, "valid_loss") < 0.6 && number(done, "rewards/margins") > 0.3, "{what}: {done}");
    assert_eq!(number(done, "rewards/accuracies"), 1.0, "{what}: {done}");
}

#[test]
fn a_run_begins_at_its_reference_and_learns_to_prefer_what_is_chosen() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    base_and_pairs(folder);
    assert_learns(&lines(&train(folder, &prefer("base", "lora", &["steps=60", "rank=8"]))), "a fresh adapter");
    assert_learns(
        &lines(&train(folder, &prefer("base", "full", &["steps=60", "adapter=none", "packing=false"]))),
        "all weights",
    );
    // An adapter that has learned to answer is the reference of the run that continues it.
    let tuned = ["--task", "chat", "--init", "base", "--data", "chats.jsonl", "--out", "tuned", "--set", "steps=30"];
    let tuned =
        [&tuned[..], &["--set", "batch_size=4", "--set", "seq_length=96", "--set", "learning_rate=1e-3"]].concat();
    lines(&train(folder, &tuned));
    let again = train(folder, &prefer("tuned", "again", &["steps=60"]));
    assert_learns(&lines(&again), "a continued adapter");
    let config: Value =
        serde_json::from_str(&std::fs::read_to_string(folder.join("again/adapter_config.json")).expect("a config"))
            .expect("JSON");
    assert_eq!((&config["r"], &config["base_model_name_or_path"]), (&json!(16), &json!(folder.join("base"))));
    let refused = train(folder, &prefer("tuned", "other", &["rank=4"]));
    let told = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(2) && told.contains("lora.rank has no effect"), "{told}");
}

#[test]
fn a_run_on_pairs_that_stops_goes_on_with_its_reference_to_the_same_bytes() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    base_and_pairs(folder);
    // Without a template there are new tokens, which the reference has, too.
    std::fs::create_dir(folder.join("bare")).expect("writable");
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(folder.join("base").join(file), folder.join("bare").join(file)).expect("writable");
    }
    let of = [("adapter=lora", "adapter_model.safetensors"), ("adapter=none", "model.safetensors")];
    for (base, (adapter, file)) in ["base", "bare"].into_iter().flat_map(|base| of.map(|of| (base, of))) {
        let [whole, parts] = ["whole", "parts"].map(|run| format!("{run}-{base}-{adapter}"));
        lines(&train(folder, &prefer(base, &whole, &["steps=40", adapter])));
        lines(&train(folder, &prefer(base, &parts, &["steps=40", adapter])));
        std::fs::remove_dir_all(folder.join(&parts).join("training/step-00000040")).expect("a checkpoint");
        std::fs::remove_file(folder.join(&parts).join("done.json")).expect("a summary");
        lines(&train(folder, &["--resume", "--out", &parts]));
        let bytes =
            |run: &str| std::fs::read(folder.join(run).join("training/step-00000040").join(file)).expect("weights");
        if crate::backend().as_str() == "cpu" {
            assert!(bytes(&whole) == bytes(&parts), "{base}, {adapter}");
        }
    }
}

#[test]
fn pairs_that_teach_nothing_end_in_one_line() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    base_and_pairs(folder);
    let refused = |data: &str, settings: &[&str]| {
        std::fs::write(folder.join("pairs.jsonl"), data).expect("writable");
        let run = train(folder, &prefer("base", "none", settings));
        assert!(!run.status.success() && !folder.join("none").exists());
        let told = String::from_utf8_lossy(&run.stderr).into_owned();
        assert_eq!(told.lines().count(), 1, "{told}");
        told
    };
    let pair = |prompt: &str| json!({ "prompt": prompt, "chosen": "kiln", "rejected": "cone" }).to_string();
    let long = pair(&"kiln ".repeat(90));
    assert!(refused(&format!("{long}\n{long}"), &[]).contains("0 of 2 pairs fit into a row of seq_length=96"));
    let chat = json!({ "prompt": "q", "completion": "a" }).to_string();
    assert!(refused(&chat, &[]).contains("a preference pair has the fields chosen and rejected"));
    let two = format!("{}\n{}", pair("q"), pair("r"));
    assert!(refused(&two, &["beta=0"]).contains("preference.beta is 0"));
    let told = refused(&two, &["loss=ipo", "label_smoothing=0.1"]);
    assert!(told.contains("label_smoothing has no effect"), "{told}");
}
