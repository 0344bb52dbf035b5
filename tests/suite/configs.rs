//! Spellings of `config.json`: each has the loss that transformers has, or is refused by the name of what is not supported.

use std::collections::HashMap;
use std::fs;

use burn::tensor::{Int, Tensor, TensorData};
use fireclay_kernels::HeadLossOptions;
use fireclay_model::{ModelFolder, Transformer};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;

use crate::backend_test;
use crate::golden::folder;

/// The weights that `tests/golden/configs.py` gives tensors of these shapes, in a file as on the hub.
fn weights(shapes: &serde_json::Map<String, Value>) -> Vec<u8> {
    let mut names: Vec<&String> = shapes.keys().collect();
    names.sort();
    let tensors = names.into_iter().enumerate().map(|(k, name)| {
        let shape: Vec<usize> = serde_json::from_value(shapes[name].clone()).expect("a shape");
        let scale = name.ends_with("weight") && (name.contains("norm") || name.contains("ln_"));
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

backend_test!(settings_of_config_json_are_used_as_in_transformers_or_refused_by_name::<B>(device) {
    let golden = fs::read_to_string(folder("configs.json")).expect("a golden file");
    let golden: Value = serde_json::from_str(&golden).expect("JSON");
    let tokens: Vec<i32> = serde_json::from_value(golden["tokens"].clone()).expect("tokens");
    let ids = |values: &[i32]| -> Tensor<B, 2, Int> {
        Tensor::from_data(TensorData::new(values.to_vec(), [1, values.len()]), &device)
    };
    let files: Vec<Vec<u8>> = golden["shapes"].as_array().expect("shapes").iter()
        .map(|shapes| weights(shapes.as_object().expect("shapes by name"))).collect();
    let cases = golden["cases"].as_array().expect("cases");
    assert!(cases.len() > 60, "all of them");
    let mut wrong = Vec::new();
    for case in cases {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("config.json"), case["config"].to_string()).expect("writable");
        let file = &files[case["shapes"].as_u64().expect("a number") as usize];
        fs::write(folder.path().join("model.safetensors"), file).expect("writable");
        let loaded = ModelFolder::new(folder.path()).load::<B>(&device).map_err(|error| error.to_string());
        let loss = loaded.map(|model: Transformer<B>| {
            let hidden = model.forward(ids(&tokens[..tokens.len() - 1]));
            let loss = model.loss(hidden, ids(&tokens[1..]), HeadLossOptions::new());
            loss.into_data().iter::<f64>().next().expect("a loss")
        });
        let fine = match (&loss, case["loss"].as_f64(), case["refused"].as_str()) {
            (Ok(loss), Some(wanted), None) => (loss - wanted).abs() < 1e-4,
            (Err(message), None, Some(key)) => message.contains(key),
            _ => false,
        };
        if !fine {
            wrong.push(format!("{}: {loss:?}, and not {} {}", case["config"], case["loss"], case["refused"]));
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
});
