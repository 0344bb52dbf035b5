//! Variants of `config.json`: each has the loss that transformers computes, or is refused with the
//! name of the unsupported setting.

use std::collections::HashMap;
use std::fs;

use burn::tensor::{Int, Tensor, TensorData};
use fireclay_kernels::{Backend, HeadLossOptions};
use fireclay_model::{ModelFolder, Transformer, TransformerConfig};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;

use crate::backend_test;
use crate::decoding::greedy;
use crate::golden::folder;

/// The weights that `tests/golden/configs.py` gives tensors of these shapes, in a file as on the
/// hub.
fn weights(shapes: &serde_json::Map<String, Value>) -> Vec<u8> {
    let mut names: Vec<&String> = shapes.keys().collect();
    names.sort();
    let tensors = names.into_iter().enumerate().map(|(k, name)| {
        let shape: Vec<usize> = serde_json::from_value(shapes[name].clone()).expect("a shape");
        let scale = name.ends_with("weight") && ["norm", "ln_", "LayerNorm"].iter().any(|norm| name.contains(norm));
        let value = |i: usize| (0.2 * (0.7391 * i as f64 + k as f64).sin() + f64::from(u8::from(scale))) as f32;
        let bytes: Vec<u8> = (0..shape.iter().product()).flat_map(|i| value(i).to_le_bytes()).collect();
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

/// Deviations from transformers.
fn difference<B: Backend>(model: &Transformer<B>, tokens: &[i32], case: &Value, device: &B::Device) -> Option<String> {
    let ids = |values: &[i32]| -> Tensor<B, 2, Int> {
        Tensor::from_data(TensorData::new(values.to_vec(), [1, values.len()]), device)
    };
    if let Some(wanted) = case["states"].as_f64() {
        let states: Vec<f64> = model.forward(ids(tokens)).into_data().iter::<f64>().collect();
        let sum: f64 = states.iter().enumerate().map(|(i, state)| state * (0.1 * i as f64).sin()).sum();
        return ((sum - wanted).abs() > 2e-3).then(|| format!("states {sum}, and not {wanted}"));
    }
    let hidden = model.forward(ids(&tokens[..tokens.len() - 1]));
    let loss = model.loss(hidden, ids(&tokens[1..]), HeadLossOptions::new());
    let loss = loss.into_data().iter::<f64>().next().expect("a loss");
    let wanted = case["loss"].as_f64().expect("a loss");
    if (loss - wanted).abs() > 1e-4 {
        return Some(format!("loss {loss}, and not {wanted}"));
    }
    let prompt: Vec<u32> = tokens[..8].iter().map(|token| *token as u32).collect();
    let wanted: Vec<u32> = serde_json::from_value(case["greedy"].clone()).expect("tokens");
    let greedy = greedy(model, &[&prompt], wanted.len(), device).remove(0);
    (greedy != wanted).then(|| format!("tokens {greedy:?}, and not {wanted:?}"))
}

backend_test!(settings_of_config_json_are_used_as_in_transformers_or_refused_by_name::<B>(device) {
    let golden = fs::read_to_string(folder("configs.json")).expect("a golden file");
    let golden: Value = serde_json::from_str(&golden).expect("JSON");
    let tokens: Vec<i32> = serde_json::from_value(golden["tokens"].clone()).expect("tokens");
    let files: Vec<Vec<u8>> = golden["shapes"].as_array().expect("shapes").iter()
        .map(|shapes| weights(shapes.as_object().expect("shapes by name"))).collect();
    let cases = golden["cases"].as_array().expect("cases");
    assert!(cases.len() > 120, "all of them");
    let mut wrong = Vec::new();
    for case in cases {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("config.json"), case["config"].to_string()).expect("writable");
        let file = &files[case["shapes"].as_u64().expect("a number") as usize];
        fs::write(folder.path().join("model.safetensors"), file).expect("writable");
        let files = ModelFolder::new(folder.path());
        let loaded = files.load::<B>(&device).map_err(|error| error.to_string());
        let fault = match (loaded, case["refused"].as_str()) {
            (Err(message), Some(key)) if message.contains(key) => None,
            (Err(message), _) => Some(message),
            (Ok(_), Some(key)) => Some(format!("{key} is not refused")),
            (Ok(model), None) => difference(&model, &tokens, case, &device),
        };
        let unknown = files.unknown_keys().unwrap_or_default();
        if let Some(fault) = fault.or_else(|| (!unknown.is_empty()).then(|| format!("unknown: {unknown:?}"))) {
            wrong.push(format!("{}: {fault}", case["config"]));
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
});

/// A tensor of a file: name, shape, dtype and bytes.
type Kept = (String, Vec<usize>, Dtype, Vec<u8>);

/// A folder of a small Llama with tied embeddings, with other settings, and with its tensors
/// changed by `edit`.
fn llama<B: Backend>(more: Value, edit: impl FnOnce(&mut Vec<Kept>), device: &B::Device) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let model = TransformerConfig::llama(4, 8, 4, 1, 1).with_tied_embeddings(true).init::<B>(1, device);
    let model = model.expect("a config that holds together");
    ModelFolder::new(folder.path()).save(&model).expect("writable");
    let [config, weights] = ["config.json", "model.safetensors"].map(|name| folder.path().join(name));
    let mut json: Value = serde_json::from_slice(&fs::read(&config).expect("a config")).expect("JSON");
    more.as_object().expect("fields").iter().for_each(|(key, value)| json[key] = value.clone());
    fs::write(&config, json.to_string()).expect("writable");
    let bytes = fs::read(&weights).expect("a file");
    let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let own = tensors
        .iter()
        .map(|(name, view)| (name.to_string(), view.shape().to_vec(), view.dtype(), view.data().to_vec()));
    let mut own: Vec<Kept> = own.collect();
    edit(&mut own);
    let views = own.iter().map(|(name, shape, dtype, bytes)| {
        (name, TensorView::new(*dtype, shape.clone(), bytes).expect("as many bytes as the shape says"))
    });
    fs::write(&weights, safetensors::serialize(views, None).expect("a file")).expect("writable");
    folder
}

/// A matrix `[4, 4]` of numbers from `first` on that every dtype represents.
fn matrix(name: &str, dtype: Dtype, first: usize) -> Kept {
    let values = (first..first + 16).map(|at| [0.5f32, -1.0, 0.25, 2.0, -0.125, 1.5, 0.0][at % 7]);
    let e4m3 = |value: f32| match value {
        0.5 => 0x30,
        -1.0 => 0xb8,
        0.25 => 0x28,
        2.0 => 0x40,
        -0.125 => 0xa0,
        1.5 => 0x3c,
        _ => 0,
    };
    let bytes = match dtype {
        Dtype::F64 => values.flat_map(|value| f64::from(value).to_le_bytes()).collect(),
        Dtype::F8_E4M3 | Dtype::I8 => values.map(e4m3).collect(),
        _ => values.flat_map(f32::to_le_bytes).collect(),
    };
    (name.to_string(), vec![4, 4], dtype, bytes)
}

backend_test!(what_is_stored_counts_of_a_tied_pair_and_in_every_dtype::<B>(device) {
    let (table, head) = ("model.embed_tokens.weight", "lm_head.weight");
    let logits = |stored: &[Kept], more: Value| -> Result<Vec<f32>, String> {
        let replace = |tensors: &mut Vec<Kept>| {
            tensors.retain(|(name, ..)| name != table);
            tensors.extend(stored.iter().cloned());
        };
        let folder = llama::<B>(more, replace, &device);
        let model = ModelFolder::new(folder.path()).load::<B>(&device).map_err(|error| error.to_string())?;
        let ids = Tensor::<B, 2, Int>::from_data([[0, 1, 2, 3]], &device);
        Ok(model.logits(model.forward(ids)).into_data().iter::<f32>().collect())
    };
    let none = || serde_json::json!({});
    let tied = logits(&[matrix(table, Dtype::F32, 0)], none()).expect("a pair that is one");
    assert!(tied.iter().any(|logit| *logit != 0.0));
    for dtype in [Dtype::F64, Dtype::F8_E4M3] {
        assert_eq!(logits(&[matrix(table, dtype, 0)], none()), Ok(tied.clone()), "{dtype:?}");
    }
    // Either of them may be stored, or both.
    assert_eq!(logits(&[matrix(head, Dtype::F32, 0)], none()), Ok(tied.clone()));
    let both = [matrix(table, Dtype::F32, 0), matrix(head, Dtype::F32, 0)];
    assert_eq!(logits(&both, none()), Ok(tied.clone()));
    // One that differs is used, whatever the config says, as in transformers.
    let own = [matrix(table, Dtype::F32, 0), matrix(head, Dtype::F32, 1)];
    let untied = logits(&own, serde_json::json!({ "tie_word_embeddings": false })).expect("a head of its own");
    assert_ne!(untied, tied);
    assert_eq!(logits(&own, none()), Ok(untied));
    // Integers are refused by name.
    let message = logits(&[matrix(table, Dtype::I8, 0)], none()).expect_err("integers");
    assert!(message.contains("I8") && message.contains(table), "{message}");
});

backend_test!(keys_that_nobody_knows_are_named_and_weights_that_are_quantized_refused::<B>(device) {
    let rotary = serde_json::json!({ "rope_type": "linear", "factor": 2.0, "warp": 3 });
    let more = serde_json::json!({ "logit_scale": 0.5, "_tool": 1, "torch_dtype": "float16", "rope_scaling": rotary });
    let folder = llama::<B>(more, |_| {}, &device);
    let unknown = ModelFolder::new(folder.path()).unknown_keys().expect("a config");
    assert_eq!(unknown, ["logit_scale", "rope_scaling.warp"]);
    let more = serde_json::json!({ "quantization_config": { "quant_method": "hqq" } });
    let folder = llama::<B>(more, |_| {}, &device);
    let refused = ModelFolder::new(folder.path()).load::<B>(&device).expect_err("no HQQ").to_string();
    assert!(refused.contains("quantization_config") && refused.contains("hqq"), "{refused}");
});

backend_test!(norms_of_the_oldest_checkpoints_are_found_by_their_old_names::<B>(device) {
    let config = TransformerConfig::bert(20, 8, 8, 1, 2);
    let model = config.init::<B>(1, &device).expect("a config that holds together");
    let folder = tempfile::tempdir().expect("a folder");
    let files = ModelFolder::new(folder.path());
    files.save(&model)?;
    let path = folder.path().join("model.safetensors");
    let bytes = fs::read(&path).expect("a file");
    let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let older = tensors.iter().map(|(name, view)| {
        (name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"), view)
    });
    let older: Vec<_> = older.collect();
    assert!(older.iter().filter(|(name, _)| name.ends_with("LayerNorm.gamma")).count() == 3);
    fs::write(&path, safetensors::serialize(older, None).expect("a file")).expect("writable");
    let again = files.load::<B>(&device)?;
    let ids = || Tensor::<B, 2, Int>::from_data([[0, 1, 2, 3]], &device);
    let [ours, wanted] =
        [&again, &model].map(|model| model.forward(ids()).into_data().iter::<f32>().collect::<Vec<_>>());
    assert_eq!(ours, wanted);
});
