//! Low-rank adapters against PEFT: see `tests/golden/adapters.py`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use burn::backend::{Autodiff, NdArray};
use burn::module::AutodiffModule;
use burn::tensor::{FloatDType, Int, Tensor, TensorData};
use fireclay::model_folder::{ModelSource, merge};
use fireclay::training::optim::ParameterGradients;
use fireclay_datasets::{Tokenizer, TokenizerKind};
use fireclay_kernels::{Backend, Format, HeadLossOptions, backward};
use fireclay_model::{AdapterSaver, Family, LoraFiles, ModelFolder, Transformer, trained_parameters};
use serde_json::Value;

use crate::backend_test;
use crate::compare::values;
use crate::golden::{folder, read};

/// Each adapter with the model that it is on.
const CASES: [(&str, &str); 6] = [
    ("llama", "llama"),
    ("qwen2_rslora", "qwen2"),
    ("qwen3_patterns", "qwen3"),
    ("gpt2_saved", "gpt2"),
    ("llama_dora", "llama"),
    ("llama_tokens", "llama"),
];

fn adapter(name: &str) -> PathBuf {
    folder("adapters").join(name)
}

fn open(name: &str) -> LoraFiles {
    LoraFiles::open(&adapter(name)).expect("an adapter that PEFT wrote")
}

struct Case<B: Backend> {
    golden: HashMap<String, (Vec<usize>, Vec<f32>)>,
    ids: Tensor<B, 2, Int>,
}

impl<B: Backend> Case<B> {
    fn of(name: &str, device: &B::Device) -> Self {
        let golden = read(&adapter(name).join("golden.safetensors"));
        let (shape, ids) = &golden["ids"];
        let ids: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
        let ids = Tensor::from_data(TensorData::new(ids, shape.clone()), device);
        Self { golden, ids }
    }

    /// How far a model's logits are from PEFT's.
    fn difference(&self, model: &Transformer<B>, device: &B::Device) -> f32 {
        let (shape, wanted) = &self.golden["logits"];
        let wanted = Tensor::<B, 3>::from_data(TensorData::new(wanted.clone(), shape.clone()), device);
        let off = (model.logits(model.forward(self.ids.clone())) - wanted).abs().max();
        values(&off)[0]
    }
}

fn loss<B: Backend>(model: &Transformer<B>, ids: &Tensor<B, 2, Int>) -> Tensor<B, 1> {
    let length = ids.dims()[1];
    let hidden = model.forward(ids.clone().narrow(1, 0, length - 1));
    model.loss(hidden, ids.clone().narrow(1, 1, length - 1), HeadLossOptions::new())
}

backend_test!(a_model_with_an_adapter_of_peft_has_its_logits::<B>(device) {
    for (name, base) in CASES {
        let case = Case::<B>::of(name, &device);
        let model =
            ModelFolder::new(folder(base)).with_adapter(open(name)).load::<B>(&device).expect("the adapter fits");
        let (without, with) = (
            case.difference(&ModelFolder::new(folder(base)).load::<B>(&device).expect("a model"), &device),
            case.difference(&model, &device),
        );
        assert!(with < 2e-4 && without > 0.05, "{name}: {with}, {without} without");
    }
});

backend_test!(adapters_that_are_trained_have_the_loss_and_gradients_of_peft::<B>(device) {
    for (name, base) in CASES {
        let case = Case::<Autodiff<B>>::of(name, &device);
        let (files, plain) = (open(name), ModelFolder::new(folder(base)));
        let (family, _) = plain.config().expect("a config");
        // Modules that are saved whole untie the head from the table.
        let model = plain.with_adapter(files.clone()).load_base::<Autodiff<B>>(&device).expect("a model");
        let model = model.with_lora(family, files.config(), Some(&files), 7).expect("the adapter fits");
        let got = loss(&model, &case.ids);
        let wanted = case.golden["loss"].1[0];
        assert!((values(&got.clone().inner())[0] - wanted).abs() < 1e-4, "{name}");
        let mut gradients = backward(got, None);
        model.mask_adapter_gradients(&mut gradients);
        let trained = trained_parameters(&model);
        let gradients = ParameterGradients::take(&model, gradients).into_inner();
        // As if they were the values, so that they are written under PEFT's names.
        let mut of_parameter = HashMap::new();
        for ((_, id, _, _), gradient) in trained.iter().zip(gradients) {
            of_parameter.insert(*id, gradient.expect("a gradient"));
        }
        let as_values = crate::adapters::with_values(model.valid(), &of_parameter);
        let out = tempfile::tempdir().expect("a folder");
        AdapterSaver { family, config: files.config() }.save(&as_values, out.path()).expect("writable");
        let ours = read(&out.path().join("adapter_model.safetensors"));
        let theirs: Vec<_> =
            case.golden.iter().filter_map(|(key, value)| Some((key.strip_prefix("gradient.")?, value))).collect();
        assert_eq!(ours.len(), theirs.len(), "{name}");
        for (key, (shape, wanted)) in theirs {
            let (own, got) = &ours[key];
            assert_eq!(own, shape, "{name}: {key}");
            let scale = wanted.iter().fold(0f32, |most, value| most.max(value.abs()));
            let off = got.iter().zip(wanted).fold(0f32, |most, (a, b)| most.max((a - b).abs()));
            // What is written is scaled where the modules of one parameter have scales of their
            // own.
            if name != "qwen3_patterns" {
                assert!(off < 1e-3 * scale + 1e-6, "{name}: {key} is {off} off, of {scale}");
            }
        }
    }
});

backend_test!(a_merged_folder_has_the_logits_of_the_adapter::<B>(device) {
    for (name, base) in CASES {
        let case = Case::<B>::of(name, &device);
        let out = tempfile::tempdir().expect("a folder");
        let out = out.path().join("merged");
        merge::<B>(&ModelSource::from(folder(base)).with_adapter(adapter(name)), &out, &device)
            .expect("the adapter fits");
        let model = ModelFolder::new(&out).load_in::<B>(FloatDType::F32, &mut |_, _| {}, &device).expect("a model");
        let off = case.difference(&model, &device);
        assert!(off < 2e-4, "{name}: {off}");
        let again = merge::<B>(&ModelSource::from(folder(base)).with_adapter(adapter(name)), &out, &device);
        assert!(again.expect_err("it holds a model").to_string().contains("already holds a model"));
    }
});

backend_test!(an_adapter_is_written_as_it_was_read::<B>(device) {
    for (name, base) in CASES {
        let (files, plain) = (open(name), ModelFolder::new(folder(base)));
        let (family, _) = plain.config().expect("a config");
        let model = plain.with_adapter(files.clone()).load_base::<B>(&device).expect("a model");
        let model = model.with_lora(family, files.config(), Some(&files), 7).expect("the adapter fits");
        let out = tempfile::tempdir().expect("a folder");
        AdapterSaver { family, config: files.config() }.save(&model, out.path()).expect("writable");
        let [first, again] =
            [adapter(name), out.path().into()].map(|folder| read(&folder.join("adapter_model.safetensors")));
        assert_eq!(first.len(), again.len(), "{name}");
        for (key, (shape, wanted)) in first {
            let (own, got) = &again[&key];
            let off = got.iter().zip(&wanted).fold(0f32, |most, (a, b)| most.max((a - b).abs()));
            assert!(*own == shape && off < 1e-6, "{name}: {key} is {off} off");
        }
        let config = LoraFiles::read_config(out.path()).expect("a config");
        assert_eq!(&config, files.config());
    }
});

#[test]
fn adapters_that_do_not_fit_are_refused_by_name() {
    let refused = |base: &str, folder: &Path| {
        let device = Default::default();
        let files = LoraFiles::open(folder).map_err(|error| error.to_string());
        let load = |files| {
            let model = ModelFolder::new(crate::golden::folder(base)).with_adapter(files);
            model.load::<burn::backend::NdArray>(&device).map(|_| ()).map_err(|error| error.to_string())
        };
        files.and_then(load).expect_err("refused")
    };
    // On another family.
    let family = refused("gpt2", &adapter("llama"));
    assert!(family.contains("which") && family.contains("does not have"), "{family}");
    let copy = tempfile::tempdir().expect("a folder");
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        std::fs::copy(adapter("llama").join(file), copy.path().join(file)).expect("writable");
    }
    let config = copy.path().join("adapter_config.json");
    let text = std::fs::read_to_string(&config).expect("a config");
    std::fs::write(&config, text.replace("\"lora_bias\": false", "\"lora_bias\": true")).expect("writable");
    assert!(refused("llama", copy.path()).contains("lora_bias is true"));
    std::fs::write(&config, text).expect("writable");
    let weights = copy.path().join("adapter_model.safetensors");
    let bytes = std::fs::read(&weights).expect("weights");
    std::fs::write(&weights, &bytes[..bytes.len() - 8]).expect("writable");
    assert!(refused("llama", copy.path()).contains("truncated"));
    std::fs::remove_file(&weights).expect("a file");
    assert!(refused("llama", copy.path()).contains("adapter_model.safetensors"));
}

/// The mean Kullback-Leibler divergence over rows of logits, in nats.
fn divergence(wanted: &[f32], own: &[f32], vocabulary: usize) -> f64 {
    let logs = |row: &[f32]| -> Vec<f64> {
        let sum: f64 = row.iter().map(|logit| f64::from(*logit).exp()).sum();
        row.iter().map(|logit| f64::from(*logit) - sum.ln()).collect()
    };
    let rows = wanted.chunks(vocabulary).zip(own.chunks(vocabulary)).map(|(wanted, own)| {
        let (wanted, own) = (logs(wanted), logs(own));
        wanted.iter().zip(own).map(|(p, q)| p.exp() * (p - q)).sum::<f64>()
    });
    rows.sum::<f64>() / (wanted.len() / vocabulary) as f64
}

#[test]
fn merging_reports_the_divergence_of_each_precision_from_the_adapter() {
    let place = tempfile::tempdir().expect("a folder");
    let place = place.path();
    let base = place.join("base");
    std::fs::create_dir(&base).expect("a writable folder");
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(folder("llama").join(file), base.join(file)).expect("a writable folder");
    }
    let characters: String = ('!'..).take(61).collect();
    let tokenizer = Tokenizer::train(TokenizerKind::Char, &characters).expect("a tokenizer");
    tokenizer.save(&base.join("tokenizer.json")).expect("a writable folder");
    let text: String = characters.chars().step_by(3).chain(characters.chars().rev().step_by(2)).collect();
    std::fs::write(place.join("text.txt"), &text).expect("a writable folder");
    let adapter = adapter("llama");
    let mut command = crate::cli::program();
    let merged = command.current_dir(place).args(["merge", "--model", "base", "--out", "merged", "--adapter"]);
    let merged = merged.arg(&adapter).args(["--data", "text.txt", "--backend", "cpu", "--json"]);
    let merged = merged.output().expect("the program starts");
    assert!(merged.status.success(), "{}", String::from_utf8_lossy(&merged.stderr));
    let told: Value = serde_json::from_slice(&merged.stdout).expect("JSON");

    let device = Default::default();
    let ids = tokenizer.encode(&text).expect("tokens").into_iter().map(|id| id as i32).collect::<Vec<_>>();
    let shape = [1, ids.len()];
    let ids = Tensor::<NdArray, 2, Int>::from_data(TensorData::new(ids, shape), &device);
    let logits = |model: Transformer<NdArray>| values(&model.logits(model.forward(ids.clone())));
    let files = open("llama");
    let base = ModelFolder::new(base).load::<NdArray>(&device).expect("a model");
    let wanted = logits(base.with_lora(Family::Llama, files.config(), Some(&files), 0).expect("the adapter fits"));
    let merged = ModelFolder::new(place.join("merged"));
    for (name, format) in [("bf16", Format::Bf16), ("int8", Format::Int8)] {
        let own = logits(merged.load_in::<NdArray>(format, &mut |_, _| {}, &device).expect("a model"));
        let wanted = divergence(&wanted, &own, 61);
        let told = told["divergence"][name].as_f64().expect("a divergence");
        assert!(wanted > 1e-8 && (told - wanted).abs() < 0.02 * wanted + 1e-7, "{name}: {told}, not {wanted}");
    }
    // Rows of this model are too short for the groups of NF4, and stay as they are.
    for name in ["f32", "nf4"] {
        let told = told["divergence"][name].as_f64().expect("a divergence");
        assert!(told.abs() < 1e-6, "{name}: {told}");
    }
}
