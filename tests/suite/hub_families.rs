//! Logits, greedy tokens and gradients of families against transformers: see
//! `tests/golden/families.py`.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use burn::backend::Autodiff;
use burn::module::AutodiffModule;
use burn::tensor::{Int, Tensor, TensorData};
use fireclay::training::optim::ParameterGradients;
use fireclay_kernels::HeadLossOptions;
use fireclay_model::{AttentionDirection, GgufKind, ModelFolder, Tokens, Transformer, TransformerConfig};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Map, Value};

use crate::backend_test;
use crate::compare::{tolerance, values};
use crate::decoding::greedy;
use crate::golden::{Golden, assert_near, by_hub_name, folder, with_values};

/// Element `i` of the tensor that is number `k` by name.
fn weight(i: u64, k: u64) -> f64 {
    let modulus = 1u64 << 32;
    let mut x = (i * 2_654_435_761 + k * 40_503 + 12_345) % modulus;
    x ^= x >> 15;
    x = x * 2_246_822_519 % modulus;
    x ^= x >> 13;
    (x as f64 / modulus as f64 - 0.5) * 0.4
}

/// The weights that `tests/golden/families.py` gives tensors of these shapes, in a file as on the
/// hub.
fn weights(family: &str, shapes: &Map<String, Value>) -> Vec<u8> {
    let mut names: Vec<&String> = shapes.keys().collect();
    names.sort();
    let tensors = names.into_iter().enumerate().map(|(k, name)| {
        let shape: Vec<usize> = serde_json::from_value(shapes[name].clone()).expect("a shape");
        let is_scale = name.contains("norm") && name.ends_with("weight") && !family.starts_with("gemma");
        let value = |i: u64| (weight(i, k as u64) + f64::from(u8::from(is_scale))) as f32;
        let count = shape.iter().product::<usize>() as u64;
        let bytes: Vec<u8> = (0..count).flat_map(|i| value(i).to_le_bytes()).collect();
        (name, shape, bytes)
    });
    let tensors: Vec<_> = tensors.collect();
    let views: HashMap<&str, TensorView<'_>> = tensors
        .iter()
        .map(|(name, shape, bytes)| {
            (name.as_str(), TensorView::new(Dtype::F32, shape.clone(), bytes).expect("as many bytes as the shape says"))
        })
        .collect();
    safetensors::serialize(views, None).expect("a safetensors file")
}

/// A case in a folder of its own.
struct Case {
    name: String,
    folder: tempfile::TempDir,
    /// The file of its reference values.
    golden: &'static str,
}

/// The causal cases.
fn cases() -> Vec<Case> {
    all_cases().into_iter().filter(|case| !case.name.starts_with("modernbert")).collect()
}

fn all_cases() -> Vec<Case> {
    let (dense, experts) =
        (cases_of("families.json", "families.safetensors"), cases_of("experts.json", "experts.safetensors"));
    assert!(dense.len() >= 18 && experts.len() == 8, "all of them");
    dense.into_iter().chain(experts).collect()
}

fn cases_of(file: &str, reference: &'static str) -> Vec<Case> {
    let golden = fs::read_to_string(folder(file)).expect("a golden file");
    let golden: Vec<Value> = serde_json::from_str(&golden).expect("JSON");
    let case = |case: &Value| {
        let folder = tempfile::tempdir().expect("a folder");
        let family = case["config"]["model_type"].as_str().expect("a family");
        fs::write(folder.path().join("config.json"), case["config"].to_string()).expect("writable");
        let file = weights(family, case["shapes"].as_object().expect("shapes by name"));
        fs::write(folder.path().join("model.safetensors"), file).expect("writable");
        Case { name: case["name"].as_str().expect("a name").to_string(), folder, golden: reference }
    };
    golden.iter().map(case).collect()
}

backend_test!(logits_of_each_family_are_those_of_transformers::<B>(device) {
    for Case { name, folder, golden } in cases() {
        let golden = Golden::open(golden);
        let files = ModelFolder::new(folder.path());
        assert_eq!(files.unknown_keys()?, Vec::<String>::new(), "{name}");
        let model = files.load::<B>(&device)?;
        let tokens = golden.int::<B, 2>(&format!("{name}.tokens"), &device);
        let logits = model.logits(model.forward(tokens));
        assert_near::<B>(&name, &values(&logits), golden.values(&format!("{name}.logits")), 2e-5, &device);
    }
});

backend_test!(greedy_tokens_of_each_family_are_those_of_transformers_in_a_batch_and_alone::<B>(device) {
    let steps = 64;
    for Case { name, folder, golden } in cases() {
        let golden = Golden::open(golden);
        let model = ModelFolder::new(folder.path()).load::<B>(&device)?;
        let numbers = |what: &str| -> Vec<u32> {
            golden.values(&format!("{name}.{what}")).iter().map(|value| *value as u32).collect()
        };
        let (prompts, lengths, wanted) = (numbers("prompts"), numbers("lengths"), numbers("greedy"));
        let prompts: Vec<&[u32]> =
            prompts.chunks(6).zip(&lengths).map(|(prompt, length)| &prompt[..*length as usize]).collect();
        let wanted: Vec<Vec<u32>> = wanted.chunks(steps).map(<[u32]>::to_vec).collect();
        assert_eq!(wanted.len(), prompts.len());
        assert_eq!(greedy(&model, &prompts, steps, &device), wanted, "{name} in a batch");
        assert_eq!(greedy(&model, &prompts[1..2], 16, &device), [&wanted[1][..16]], "{name} alone");
    }
});

backend_test!(gradients_of_each_family_are_those_of_transformers::<B>(device) {
    let mut checked = 0;
    for Case { name, folder, golden } in cases().into_iter().filter(|case| case.name.ends_with(".1")) {
        let golden = Golden::open(golden);
        let model = ModelFolder::new(folder.path()).load::<Autodiff<B>>(&device)?;
        let int = |what: &str| -> Tensor<Autodiff<B>, 2, Int> { golden.int(&format!("{name}.{what}"), &device) };
        let loss = model.loss(model.forward(int("tokens")), int("targets"), HeadLossOptions::new());
        assert_near::<B>(&name, &values(&loss.clone().inner()), golden.values(&format!("{name}.loss")), 1e-5, &device);
        let gradients = ParameterGradients::take(&model, loss.backward()).into_inner();
        // Stored less one, as parameters are; gradients are not.
        let offset = if name.starts_with("gemma") { 1.0 } else { 0.0 };
        let gradients = by_hub_name(&with_values(model.valid(), gradients));
        for (key, (_, ours)) in &gradients {
            let is_norm = key.contains("norm");
            let ours: Vec<f32> = ours.iter().map(|value| value + if is_norm { offset } else { 0.0 }).collect();
            golden.assert_values(&format!("{name}.grad.{key}"), &ours, tolerance::<B>(&device).at_least(1e-5));
            checked += 1;
        }
        assert_eq!(gradients.len(), golden.count(&format!("{name}.grad.")), "{name}: as many gradients as parameters");
    }
    assert!(checked > 100, "{checked} gradients");
});

backend_test!(hidden_states_of_encoders_and_their_gradients_are_those_of_transformers::<B>(device) {
    let golden = Golden::open("families.safetensors");
    let encoders: Vec<_> = all_cases().into_iter().filter(|case| case.name.starts_with("modernbert")).collect();
    assert_eq!(encoders.len(), 2);
    for Case { name, folder, .. } in encoders {
        let files = ModelFolder::new(folder.path());
        assert_eq!(files.unknown_keys()?, Vec::<String>::new(), "{name}");
        let model = files.load::<Autodiff<B>>(&device)?;
        let tokens = golden.int::<Autodiff<B>, 2>(&format!("{name}.tokens"), &device);
        let lengths = golden.int::<Autodiff<B>, 1>(&format!("{name}.lengths"), &device);
        let real = Tensor::<Autodiff<B>, 1, Int>::arange(0..20, &device).reshape([1, 20]).expand([3, 20]);
        let real = real.lower(lengths.clone().reshape([3, 1]).expand([3, 20])).float().reshape([3, 20, 1]);
        let hidden = model.forward(Tokens::from(tokens).with_lengths(lengths)) * real;
        assert_near::<B>(
            &name,
            &values(&hidden.clone().inner()),
            golden.values(&format!("{name}.hidden")),
            1e-5,
            &device,
        );
        if !name.ends_with(".1") {
            continue;
        }
        let upstream = golden.values(&format!("{name}.grad_output")).to_vec();
        let upstream = Tensor::<Autodiff<B>, 3>::from_data(TensorData::new(upstream, hidden.dims()), &device);
        let gradients = ParameterGradients::take(&model, (hidden * upstream).sum().backward()).into_inner();
        let gradients = by_hub_name(&with_values(model.valid(), gradients));
        for (key, (_, ours)) in &gradients {
            // As the model alone names them.
            let key = key.strip_prefix("model.").unwrap_or(key);
            golden.assert_values(&format!("{name}.grad.{key}"), ours, tolerance::<B>(&device).at_least(1e-5));
        }
        assert_eq!(gradients.len(), golden.count(&format!("{name}.grad.")), "{name}: as many gradients as parameters");
    }
});

// With FIRECLAY_SAVED_FAMILIES=FOLDER the models stay there, for `families.py --check FOLDER`.
backend_test!(a_saved_model_of_each_family_has_the_same_config_and_logits::<B>(device) {
    let kept = std::env::var("FIRECLAY_SAVED_FAMILIES").ok();
    for Case { name, folder, golden } in all_cases() {
        let golden = Golden::open(golden);
        let files = ModelFolder::new(folder.path());
        let (_, config) = files.config()?;
        let model = files.load::<B>(&device)?;
        let again = tempfile::tempdir().expect("a folder");
        let saved = match &kept {
            Some(kept) => Path::new(kept).join(&name),
            None => again.path().to_path_buf(),
        };
        fs::create_dir_all(&saved).expect("writable");
        let copy = ModelFolder::new(&saved);
        copy.save(&model)?;
        // The family may be another that has the same model.
        assert_eq!(copy.config()?.1, config, "{name}");
        assert_eq!(copy.unknown_keys()?, Vec::<String>::new(), "{name}");
        let tokens = golden.int::<B, 2>(&format!("{name}.tokens"), &device);
        let is_encoder = config.attention == AttentionDirection::Bidirectional;
        let output = |model: &Transformer<B>| match model.forward(tokens.clone()) {
            hidden if is_encoder => hidden,
            hidden => model.logits(hidden),
        };
        let wanted = output(&model);
        // A norm's weight may be rounded as one is added to it.
        assert_near::<B>(&name, &values(&output(&copy.load::<B>(&device)?)), &values(&wanted), 1e-6, &device);
        if kept.is_some() {
            let kind = if is_encoder { "hidden" } else { "logits" };
            let tokens = ("tokens", tokens.dims().to_vec(), values(&tokens.float()));
            let parts = [tokens, (kind, wanted.dims().to_vec(), values(&wanted))].map(|(name, shape, values)| {
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                (name, shape, bytes)
            });
            let views = parts.iter().map(|(name, shape, bytes)| {
                (*name, TensorView::new(Dtype::F32, shape.clone(), bytes).expect("as many bytes as the shape says"))
            });
            let file = safetensors::serialize(views, None).expect("a file");
            fs::write(saved.join("golden.safetensors"), file).expect("writable");
        }
    }
});

backend_test!(gguf_files_of_each_family_have_the_logits_of_transformers::<B>(device) {
    let golden = Golden::open("gguf/families.safetensors");
    for name in ["gemma2", "gemma3", "olmo2", "olmo3", "phi3", "granite", "smollm3"] {
        let files = ModelFolder::new(folder(&format!("gguf/{name}.gguf")));
        assert_eq!(files.unknown_keys()?, Vec::<String>::new(), "{name}");
        let model = files.load::<B>(&device)?;
        let logits = model.logits(model.forward(golden.int::<B, 2>(&format!("{name}.tokens"), &device)));
        assert_near::<B>(name, &values(&logits), golden.values(&format!("{name}.logits")), 5e-5, &device);
    }
});

backend_test!(a_model_of_each_family_is_the_same_as_a_gguf_file_or_refused::<B>(device) {
    let presets = [
        ("gemma2", TransformerConfig::gemma2(61, 96, 24, 3, 4, 5).with_n_kv_heads(2)),
        ("gemma3", TransformerConfig::gemma3(61, 96, 24, 7, 4, 5).with_n_kv_heads(1)),
    ];
    let mut folders: Vec<_> = cases().into_iter().map(|case| (case.name, case.folder)).collect();
    for (name, config) in presets {
        let folder = tempfile::tempdir().expect("a folder");
        ModelFolder::new(folder.path()).save(&config.with_init_deviation(0.2).init::<B>(7, &device)?)?;
        folders.push((name.into(), folder));
    }
    let mut written = Vec::new();
    for (name, folder) in folders {
        let files = ModelFolder::new(folder.path());
        let out = folder.path().join("model.gguf");
        if let Err(error) = files.export_gguf::<B>(GgufKind::F32, &[], &out, &mut |_, _| {}, &device) {
            let message = error.to_string();
            assert!(message.contains("GGUF cannot express"), "{name}: {message}");
            continue;
        }
        let tokens = Tensor::<B, 2, Int>::from_data(
            TensorData::new((0..40).map(|at| at * 7 % 61).collect::<Vec<i32>>(), [2, 20]),
            &device,
        );
        let [ours, wanted] = [ModelFolder::new(&out), files].map(|files| {
            let model = files.load::<B>(&device).unwrap_or_else(|error| panic!("{name}: {error}"));
            values(&model.logits(model.forward(tokens.clone())))
        });
        assert_near::<B>(&name, &ours, &wanted, 2e-5, &device);
        written.push(name);
    }
    let expected =
        ["smollm3.1", "phi3.1", "phi3.2", "olmo2.1", "olmo3.1", "granite.1", "granite.2", "gemma2", "gemma3"];
    assert_eq!(written, expected);
});
