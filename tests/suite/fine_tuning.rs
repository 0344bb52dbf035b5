//! What fine-tuning is often reported to get wrong: a test for each.

use std::path::Path;

use burn::backend::{Autodiff, NdArray};
use burn::module::Param;
use burn::tensor::{Int, Tensor, TensorData};
use fireclay::inference::chat::{ChatTemplate, Dialogue};
use fireclay::recipe::Recipe;
use fireclay::recipe::schema::OptimizerKind;
use fireclay::tasks::chat::Masker;
use fireclay::training::optim::{Optimizer, ParameterGradients, Settings};
use fireclay::training::{Trainer, read_steps};
use fireclay_datasets::conversations::Conversations;
use fireclay_datasets::{IGNORED_TARGET, TextSource, TokenBatch, Tokenizer, TokenizerKind};
use fireclay_kernels::{Backend, Dropout, HeadLossOptions, RandomKey, backward, dropout};
use fireclay_model::{
    Adapter, Family, LoraConfig, LoraFiles, ModelFolder, Targets, Transformer, TransformerConfig, trained_parameters,
};
use serde_json::{Value, json};

use crate::adapters::linears;
use crate::backend_test;
use crate::chats::{base_and_chats, tokenizer, tune};
use crate::compare::{random, values};
use crate::golden::folder as golden;

fn furthest(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).fold(0f32, |most, (a, b)| if (a - b).abs() <= most { most } else { (a - b).abs() })
}

/// A recipe on the conversations that [`base_and_chats`] writes.
fn recipe(folder: &Path, settings: &[(&str, &str)]) -> Recipe {
    let mut recipe = Recipe::shipped("chat-full").expect("a good recipe");
    recipe.init = Some(folder.join("base"));
    let source = folder.join("chats.jsonl").display().to_string();
    let shared = [("source", source.as_str()), ("seq_length", "64"), ("batch_size", "4"), ("learning_rate", "1e-2")];
    recipe.with_all(shared.into_iter().chain(settings.iter().copied())).expect("known settings")
}

/// Rows with as many supervised tokens as asked for.
fn rows(supervised: &[usize]) -> TokenBatch {
    let mut batch = TokenBatch::packed(12);
    for (row, count) in supervised.iter().enumerate() {
        let tokens: Vec<u32> = (0..13).map(|at| (row * 31 + at * 7) as u32 % 90).collect();
        let flags: Vec<bool> = (0..13).map(|at| at > 12 - count).collect();
        batch.push_packed([(&tokens[..], &flags[..])]);
    }
    batch
}

backend_test!(accumulated_parts_of_uneven_supervision_have_the_gradient_of_one_batch::<B>(device) {
    let folder = tempfile::tempdir().expect("a folder");
    base_and_chats(folder.path());
    let step = |settings: &[(&str, &str)]| {
        let recipe = recipe(folder.path(), settings);
        let mut trainer =
            Trainer::<B>::new(&recipe, recipe.task().expect("conversations"), device.clone()).expect("a model");
        let output = trainer.train_on(rows(&[1, 12, 0, 5]));
        assert_eq!(output.tokens, 18);
        read_steps(&[output]).expect("figures")[0]
    };
    let (loss, norm) = step(&[]);
    let (parts_loss, parts_norm) = step(&[("batch_size", "1"), ("accumulation", "4")]);
    assert!((loss - parts_loss).abs() < 1e-5 * loss, "{loss}, and {parts_loss} in parts");
    assert!((norm - parts_norm).abs() < 1e-5 * norm, "{norm}, and {parts_norm} in parts");
});

backend_test!(a_step_without_a_supervised_token_changes_nothing::<B>(device) {
    let folder = tempfile::tempdir().expect("a folder");
    base_and_chats(folder.path());
    for (settings, count) in [(&[][..], 2), (&[("accumulation", "2"), ("batch_size", "1")][..], 2)] {
        let recipe = recipe(folder.path(), settings);
        let mut trainer =
            Trainer::<B>::new(&recipe, recipe.task().expect("conversations"), device.clone()).expect("a model");
        let before = values(&trainer.model().embedding.val().inner());
        let output = trainer.train_on(rows(&vec![0; count]));
        assert_eq!(read_steps(&[output]).expect("figures"), [(0.0, 0.0)]);
        assert_eq!(values(&trainer.model().embedding.val().inner()), before);
        // A part without one is no NaN in the whole.
        let output = trainer.train_on(rows(&[0, 3]));
        let (loss, norm) = read_steps(&[output]).expect("figures")[0];
        assert!(loss.is_finite() && norm.is_finite() && loss > 0.0, "{loss}, {norm}");
    }
});

#[test]
fn a_pad_token_that_is_the_end_token_is_supervised_as_end_and_ignored_as_padding() {
    // Rows are padded with token 0.
    let mut batch = TokenBatch::packed(6);
    batch.push_packed([(&[5, 6, 0][..], &[false, true, true][..])]);
    let ignored = IGNORED_TARGET;
    assert_eq!(batch.inputs(), [5, 6, 0, 0, 0, 0]);
    assert_eq!(batch.targets(), [6, 0, ignored, ignored, ignored, ignored]);
    assert_eq!(batch.target_count(), 2);
}

#[test]
fn a_sequence_has_one_bos_in_training_as_in_serving() {
    // The template writes the token, and the tokenizer adds it to a text.
    let text = std::fs::read_to_string(golden("chats").join("tokenizer.json")).expect("a tokenizer");
    let mut made: Value = serde_json::from_str(&text).expect("JSON");
    let bos = tokenizer().token_id("<s>").expect("a control token");
    let parts = json!([{ "SpecialToken": { "id": "<s>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }]);
    made["post_processor"] = json!({
        "type": "TemplateProcessing", "single": parts, "pair": parts,
        "special_tokens": { "<s>": { "id": "<s>", "ids": [bos], "tokens": ["<s>"] } },
    });
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("tokenizer.json");
    std::fs::write(&file, made.to_string()).expect("writable");
    let tokenizer = Tokenizer::load(&file).expect("a tokenizer");
    assert_eq!(tokenizer.encode_prompt("kiln").expect("encodes")[0], bos, "a text begins with it");
    let template = "{{ bos_token }}{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' + m.content + \
                    '<|im_end|>' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' \
                    -}}{%- endif -%}";
    let template = ChatTemplate::new(template.into(), "<s>".into(), "</s>".into()).expect("a template");
    let chats = folder.path().join("chats.jsonl");
    std::fs::write(&chats, json!({ "prompt": "kiln", "completion": "cone" }).to_string()).expect("writable");
    let chats = Conversations::read(&chats).expect("a conversation").all;
    let example =
        Masker::new(&template, &tokenizer).expect("a masker").examples(&chats[0]).expect("examples").remove(0);
    let count = |tokens: &[u32]| tokens.iter().filter(|token| **token == bos).count();
    assert_eq!((example.tokens[0], count(&example.tokens)), (bos, 1));
    let dialogue = Dialogue { messages: chats[0].messages[..1].to_vec(), ..Dialogue::default() };
    let prompt = template.tokens(&dialogue, &tokenizer).expect("encodes");
    assert_eq!((prompt[0], count(&prompt)), (bos, 1));
    assert_eq!(example.tokens[..prompt.len()], prompt[..], "training sees what generation begins from");
}

/// A small model with a fresh adapter on every linear layer.
fn with_fresh_lora<B: Backend>(dropout: f64, device: &B::Device) -> Transformer<Autodiff<B>> {
    let model = TransformerConfig::llama(40, 16, 32, 3, 4).init(3, device).expect("a config that holds together");
    let config = LoraConfig { rank: 4, alpha: 8.0, dropout, targets: Targets::AllLinear, ..LoraConfig::default() };
    model.with_lora(Family::Llama, &config, None, 5).expect("an adapter")
}

fn ids<B: Backend>(rows: usize, length: usize, device: &B::Device) -> Tensor<B, 2, Int> {
    let ids: Vec<i32> = (0..rows * length).map(|at| (at * at * 7 % 40) as i32).collect();
    Tensor::from_data(TensorData::new(ids, [rows, length]), device)
}

backend_test!(an_adapter_has_the_same_gradients_with_activation_checkpointing_and_all_of_b_moves::<B>(device) {
    let mut model = with_fresh_lora::<B>(0.0, &device);
    let (inputs, targets) = (ids::<Autodiff<B>>(2, 15, &device), ids::<Autodiff<B>>(2, 15, &device).flip([1]));
    let gradients = |model: &Transformer<Autodiff<B>>, every: Option<usize>| {
        let gradients = match every {
            None => backward(model.loss(model.forward(inputs.clone()), targets.clone(), HeadLossOptions::new()), None),
            Some(every) => {
                let (hidden, kept) = model.forward_with_checkpoints(inputs.clone(), every);
                model.backward(model.loss(hidden, targets.clone(), HeadLossOptions::new()), kept, None, || {})
            }
        };
        ParameterGradients::take(model, gradients)
    };
    let plain = gradients(&model, None);
    for every in [1, 2] {
        let again = gradients(&model, Some(every)).into_inner();
        assert_eq!(again.len(), 2 * 4 * 3);
        for (own, wanted) in again.into_iter().zip(plain.clone().into_inner()) {
            let [own, wanted] = [own, wanted].map(|gradient| values(&gradient.expect("a gradient")));
            let scale = wanted.iter().fold(1e-9f32, |most, value| most.max(value.abs()));
            assert!(furthest(&own, &wanted) < 1e-5 * scale.max(1e-3), "every {every}");
        }
    }
    let mut optimizer = Optimizer::new(OptimizerKind::AdamW, &model);
    let settings = Settings {
        learning_rate: 1e-2, beta_1: 0.9, beta_2: 0.999, epsilon: 1e-8, weight_decay: 0.0, max_grad_norm: None, step: 0,
    };
    (model, _) = optimizer.step(model, plain, settings);
    for (name, _, _, value) in trained_parameters(&model) {
        if name.contains("adapter.b") {
            let moved = values(&value.inner());
            assert!(moved.iter().all(|value| *value != 0.0), "{name}");
        }
    }
});

backend_test!(dropout_of_an_adapter_masks_its_input_alone::<B>(device) {
    let probability = 0.4;
    let mut model = with_fresh_lora::<B>(probability, &device);
    for linear in linears(&mut model) {
        let Some(Adapter { b, .. }) = &mut linear.adapter else { panic!("an adapter") };
        let own = random::<B, 2>(8, b.dims(), &device) * 0.3;
        *b = Param::from_tensor(Tensor::from_inner(own).require_grad()).into();
    }
    // Of one token each mask is a row: the same as an adapter whose columns are masked.
    let (key, token) = (RandomKey::new(21), ids::<Autodiff<B>>(1, 1, &device) + 7);
    let target = ids::<Autodiff<B>>(1, 1, &device) + 3;
    let mut masked = model.clone();
    let mut masks = Vec::new();
    for (number, linear) in linears(&mut masked).enumerate() {
        let Some(Adapter { a, dropout_probability, .. }) = &mut linear.adapter else { panic!("an adapter") };
        let [_, d_input] = a.dims();
        let mask = Dropout { probability, key: key.fold(0x6c6f_7261).fold(number as u64).from_row(0) };
        let mask = dropout(Tensor::<B, 2>::ones([1, d_input], &device), mask);
        let own = a.val().inner() * mask.clone();
        *a = Param::from_tensor(Tensor::from_inner(own).require_grad()).into();
        *dropout_probability = 0.0;
        masks.push(mask);
    }
    let zeros: usize = masks.iter().map(|mask| values(mask).iter().filter(|value| **value == 0.0).count()).sum();
    let all: usize = masks.iter().map(|mask| mask.dims()[1]).sum();
    assert!((0.25..0.55).contains(&(zeros as f64 / all as f64)), "{zeros} of {all} are dropped");
    let plain = values(&model.logits(model.forward(token.clone())).inner());
    model.set_dropout(Some(key));
    let of = |model: &Transformer<Autodiff<B>>| {
        let hidden = model.forward(token.clone());
        let logits = values(&model.logits(hidden.clone()).inner());
        let gradients = backward(model.loss(hidden, target.clone(), HeadLossOptions::new()), None);
        (logits, ParameterGradients::take(model, gradients).into_inner())
    };
    let ((logits, gradients), (wanted, wanted_gradients)) = (of(&model), of(&masked));
    assert!(furthest(&logits, &wanted) < 1e-5 && furthest(&logits, &plain) > 1e-2);
    let names = trained_parameters(&model).into_iter().map(|(name, ..)| name);
    let mut of_a = masks.into_iter();
    for ((name, gradient), wanted) in names.zip(gradients).zip(wanted_gradients) {
        let [gradient, wanted] = [gradient, wanted].map(|gradient| gradient.expect("a gradient"));
        let [_, width] = masked_dims(&name, &masked);
        // The gradient of what is masked is masked, too.
        let wanted = match name.contains("adapter.a") {
            true => wanted.reshape([-1, width as i32]) * of_a.next().expect("a mask"),
            false => wanted.reshape([-1, width as i32]),
        };
        assert!(furthest(&values(&gradient), &values(&wanted)) < 1e-5, "{name}");
    }
    // Without a key, as in validation, nothing is dropped.
    model.set_dropout(None);
    assert!(furthest(&values(&model.logits(model.forward(token)).inner()), &plain) < 1e-6);
});

/// The dims of a matrix of an adapter, by its path.
fn masked_dims<B: Backend>(name: &str, model: &Transformer<Autodiff<B>>) -> [usize; 2] {
    let (_, _, shape, _) = trained_parameters(model).into_iter().find(|(own, ..)| own == name).expect("a parameter");
    [shape[0], shape[1]]
}

#[test]
fn tied_embeddings_that_are_saved_merge_and_reload_to_the_same_logits() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    base_and_chats(folder);
    let device = Default::default();
    let mut config = TransformerConfig::llama(tokenizer().vocab_size(), 64, 32, 1, 2);
    config.tied_embeddings = true;
    let model: Transformer<NdArray> = config.init(3, &device).expect("a config that holds together");
    ModelFolder::new(folder.join("base")).save(&model).expect("saves");
    let run = tune(folder, "run", &["adapter=lora", "rank=4", "modules_to_save=embed_tokens", "steps=20"]);
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let mut command = crate::cli::program();
    let merged = command.current_dir(folder).args(["merge", "--model", "base", "--adapter", "run", "--out", "merged"]);
    let merged = merged.args(["--backend", "cpu"]).output().expect("the program starts");
    assert!(merged.status.success(), "{}", String::from_utf8_lossy(&merged.stderr));
    let ids = ids::<NdArray>(1, 12, &device);
    let logits = |model: Transformer<NdArray>| values(&model.logits(model.forward(ids.clone())));
    let files = LoraFiles::open(&folder.join("run")).expect("an adapter");
    let adapted = ModelFolder::new(folder.join("base")).with_adapter(files.clone());
    // The model that was trained: one table, and the adapter next to the weights.
    let trained = adapted.load_base::<NdArray>(&device).expect("a model");
    let trained = trained.with_lora(Family::Llama, files.config(), Some(&files), 7).expect("the adapter fits");
    let wanted = logits(trained);
    let (_, config) = ModelFolder::new(folder.join("merged")).config().expect("a config");
    assert!(config.vocab_size > tokenizer().vocab_size(), "the template's tokens are new");
    for (what, model) in [("merged", ModelFolder::new(folder.join("merged"))), ("adapted", adapted)] {
        assert!(furthest(&logits(model.load::<NdArray>(&device).expect("a model")), &wanted) < 1e-5, "{what}");
    }
    let untouched = logits(
        ModelFolder::new(folder.join("base")).load::<NdArray>(&device).expect("a model").with_vocabulary(
            &(0..config.vocab_size)
                .map(|row| (row < tokenizer().vocab_size()).then_some(row as u32))
                .collect::<Vec<_>>(),
        ),
    );
    assert!(furthest(&untouched, &wanted) > 1e-2, "training changed it");
}

#[test]
fn a_continued_adapter_keeps_its_dropout_and_drops_no_saved_table() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    base_and_chats(folder);
    let run = tune(folder, "run", &["adapter=lora", "rank=4", "lora_dropout=0.1", "steps=2"]);
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let continued = |init: &str, out: &str| {
        let mut command = crate::cli::program();
        let args = ["train", "--task", "chat", "--init", init, "--data", "chats.jsonl", "--out", out, "--steps", "2"];
        command.current_dir(folder).args(args).args(["--plain", "--backend", crate::backend().as_str()]);
        command.args(["--set", "batch_size=4", "--set", "seq_length=64"]).output().expect("the program starts")
    };
    let config = |run: &str| -> Value {
        let text = std::fs::read_to_string(folder.join(run).join("adapter_config.json")).expect("a config");
        serde_json::from_str(&text).expect("JSON")
    };
    let again = continued("run", "again");
    assert!(again.status.success(), "{}", String::from_utf8_lossy(&again.stderr));
    assert_eq!(config("again")["lora_dropout"], json!(0.1));
    // DoRA would leave it out.
    let run = tune(folder, "dora", &["adapter=lora", "rank=4", "dora=true", "steps=2"]);
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let mut dropped = config("dora");
    dropped["lora_dropout"] = json!(0.1);
    std::fs::write(folder.join("dora/adapter_config.json"), dropped.to_string()).expect("writable");
    let refused = continued("dora", "dora-again");
    let told = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(2) && told.contains("DoRA is trained without dropout"), "{told}");
    // As PEFT saves tables that have new rows.
    let mut unnamed = config("run");
    assert!(unnamed["modules_to_save"].as_array().is_some_and(|names| !names.is_empty()), "{unnamed}");
    unnamed["modules_to_save"] = Value::Null;
    std::fs::write(folder.join("run/adapter_config.json"), unnamed.to_string()).expect("writable");
    let refused = continued("run", "unnamed");
    let told = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(1) && told.contains("its modules_to_save do not name"), "{told}");
}

#[test]
fn an_adapter_is_trained_on_the_bits_that_a_quantized_folder_has() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    let text = "the kiln cools while the potter counts jugs, and nobody hurries. ".repeat(40);
    std::fs::write(folder.join("book.txt"), &text).expect("writable");
    let source = TextSource::open(&folder.join("book.txt"), "text").expect("a text");
    let characters = Tokenizer::train_on(TokenizerKind::Char, &[source]).expect("a tokenizer");
    for base in ["packed/nf4", "packed/nf4_nested", "packed/awq", "llama"] {
        let copy = folder.join(base);
        std::fs::create_dir_all(&copy).expect("writable");
        for file in ["config.json", "model.safetensors"] {
            std::fs::copy(golden(base).join(file), copy.join(file)).expect("writable");
        }
        characters.save(&copy.join("tokenizer.json")).expect("saves");
    }
    let train = |base: &str, settings: &[&str]| {
        let mut command = crate::cli::program();
        let out = format!("run-{}-{}", base.replace('/', "-"), settings.concat());
        command.current_dir(folder).args(["train", "--init", base, "--data", "book.txt", "--plain", "--out", &out]);
        command.args(["--backend", crate::backend().as_str(), "--steps", "8"]);
        let shared = ["adapter=lora", "rank=4", "seq_length=16", "batch_size=4", "sample_tokens=0", "valid_tokens=200"];
        for setting in shared.iter().chain(&["learning_rate=2e-2", "warmup_steps=0"]).chain(settings) {
            command.args(["--set", setting]);
        }
        let run = command.output().expect("the program starts");
        let told = String::from_utf8_lossy(&run.stderr).into_owned();
        assert!(run.status.success(), "{base} {settings:?}: {told}");
        let done = std::fs::read_to_string(folder.join(&out).join("done.json")).expect("a summary");
        let done: Value = serde_json::from_str(&done).expect("JSON");
        assert!(done["valid_loss"].as_f64().expect("a loss") < 4.0, "{base} {settings:?}: {done}");
        told
    };
    for (base, settings, format) in [
        ("packed/nf4", &[][..], "NF4"),
        ("packed/nf4_nested", &[][..], "NF4"),
        ("packed/awq", &["base=stored"][..], "4 bits with zeros, groups of 32"),
        ("packed/nf4", &["base=float"][..], "floats"),
        ("packed/nf4", &["base=int8"][..], "INT8"),
        ("llama", &[][..], "floats"),
        ("llama", &["base=int8", "dora=true"][..], "INT8"),
    ] {
        let told = train(base, settings);
        assert!(told.contains(&format!("M on {format} is trained")), "{base} {settings:?}: {told}");
        assert!(told.contains("of memory: weights"), "{told}");
    }
}

#[test]
fn conversations_that_are_cut_off_leave_no_nan() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    base_and_chats(folder);
    // Some answers are cut off, some wholly.
    let line = |at: usize| {
        let (prompt, completion) = ("kiln ".repeat(1 + at % 40), "cone ".repeat(1 + at % 5));
        json!({ "prompt": prompt, "completion": completion }).to_string()
    };
    std::fs::write(folder.join("chats.jsonl"), (0..60).map(line).collect::<Vec<_>>().join("\n")).expect("writable");
    for packing in ["packing=true", "packing=false"] {
        let out = packing.replace('=', "-");
        let run = tune(folder, &out, &["seq_length=24", "steps=12", "batch_size=1", packing]);
        let told = String::from_utf8_lossy(&run.stderr);
        assert!(run.status.success() && told.contains(" cut at 24 tokens") && told.contains(" dropped as"), "{told}");
        let metrics = std::fs::read_to_string(folder.join(&out).join("metrics.jsonl")).expect("metrics");
        for line in metrics.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON")) {
            assert!(line["loss"].as_f64().is_none_or(f64::is_finite), "{line}");
        }
    }
}

#[test]
fn a_control_token_within_an_answer_that_is_cut_off_ends_no_generation() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    base_and_chats(folder);
    // The template begins an answer with a control token.
    let template = "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' + ('<s>' if m.role == 'assistant' \
                    else '') + m.content + '<|im_end|>' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- \
                    '<|im_start|>assistant\n' -}}{%- endif -%}";
    std::fs::write(folder.join("base/tokenizer_config.json"), json!({ "chat_template": template }).to_string())
        .expect("writable");
    let line = |at: usize| {
        let answer = "cone ".repeat(if at.is_multiple_of(2) { 1 } else { 80 });
        json!({ "prompt": format!("Say cone. ({at})"), "completion": answer }).to_string()
    };
    std::fs::write(folder.join("chats.jsonl"), (0..20).map(line).collect::<Vec<_>>().join("\n")).expect("writable");
    let run = tune(folder, "run", &["steps=1"]);
    let told = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success() && told.contains("10 cut at 64 tokens"), "{told}");
    let generation = std::fs::read_to_string(folder.join("run/generation_config.json")).expect("a config");
    let generation: Value = serde_json::from_str(&generation).expect("JSON");
    let end = tokenizer().token_id("<|im_end|>").expect("a control token");
    assert_eq!(generation["eos_token_id"], json!([end]));
}

#[test]
fn two_conversations_that_fit_are_enough_wherever_they_are() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    base_and_chats(folder);
    let (fits, long) = (("kiln".to_string(), "cone"), ("kiln ".repeat(90), "cone"));
    let write = |lines: Vec<Value>| {
        let lines: Vec<String> = lines.iter().map(Value::to_string).collect();
        std::fs::write(folder.join("chats.jsonl"), lines.join("\n")).expect("writable");
    };
    let chat = |(prompt, completion): &(String, &str)| json!({ "prompt": prompt, "completion": completion });
    for first in [0, 4, 8] {
        write((0..10).map(|at| chat(if at / 2 * 2 == first { &fits } else { &long })).collect());
        let run = tune(folder, &format!("run-{first}"), &["steps=1"]);
        let told = String::from_utf8_lossy(&run.stderr);
        assert!(run.status.success() && told.contains("8 dropped as"), "{first}: {told}");
    }
    let unanswered = json!({ "prompt": "kiln", "completion": [{ "role": "user", "content": "cone" }] });
    write(vec![chat(&long), chat(&fits), unanswered, chat(&long)]);
    let run = tune(folder, "none", &["steps=1"]);
    let told = String::from_utf8_lossy(&run.stderr);
    assert!(!run.status.success() && told.lines().count() == 1, "{told}");
    for part in ["1 of 4 conversations", "2 dropped", "seq_length=64", "1 dropped", "the role 'assistant'"] {
        assert!(told.contains(part), "{part}: {told}");
    }
}

#[test]
fn a_step_above_the_memory_limit_is_refused_before_the_first_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    base_and_chats(folder);
    for (limit, code, parts) in [
        ("1MB", 1, ["training.memory_limit is 1 MB, and a step needs about", "saves about"]),
        ("lots", 2, ["training.memory_limit is lots", "24GB"]),
    ] {
        let run = tune(folder, "refused", &["steps=2", &format!("memory_limit={limit}")]);
        let told = String::from_utf8_lossy(&run.stderr);
        assert_eq!(run.status.code(), Some(code), "{limit}: {told}");
        assert!(parts.iter().all(|part| told.contains(part)), "{limit}: {told}");
        assert!(!folder.join("refused").exists(), "{limit}: nothing is left");
    }
    let run = tune(folder, "allowed", &["steps=2", "memory_limit=100 GB"]);
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
}

#[test]
fn a_model_of_the_stories_is_taught_to_answer_by_the_embedded_conversations() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    let fireclay = |args: &[&str]| {
        let mut command = crate::cli::program();
        command.current_dir(folder).args(args).args(["--backend", crate::backend().as_str(), "--json"]);
        let output = command.output().expect("the program starts");
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        serde_json::from_str::<Value>(stdout.lines().last().expect("a line")).expect("JSON")
    };
    fireclay(&[
        "train",
        "--steps",
        "600",
        "--set",
        "valid_every=600",
        "--set",
        "checkpoint_every=600",
        "--out",
        "stories",
    ]);
    let done = fireclay(&["train", "stories-chat", "--init", "stories", "--out", "chat"]);
    let percent = |name: &str| done[name].as_f64().unwrap_or_else(|| panic!("no {name} in {done}"));
    assert!(percent("first_answer_accuracy") < 5.0 && percent("answer_accuracy") > 95.0, "{done}");
    // It answers, and stops behind the answer.
    let prompt = "<|user|>Once a patient potter called Agnes lived in a quiet river town. Her best friend was a fat \
                  goose called Biscuit.<|end|><|assistant|>";
    let answer =
        fireclay(&["generate", "--model", "chat", "--prompt", prompt, "--temperature", "0", "--max-tokens", "40"]);
    assert_eq!(answer["text"], "There was Agnes and a goose called Biscuit.");
    assert_eq!(answer["tokens"].as_array().expect("tokens").len(), 10, "{answer}");
}
