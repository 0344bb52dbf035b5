//! Quantized checkpoints: see `tests/golden/packed.py`.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use burn::tensor::{FloatDType, Int, Tensor, TensorData};
use fireclay_kernels::Backend;
use fireclay_model::{MatrixDtype, ModelFolder, Transformer};
use half::{bf16, f16};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::Value;

use crate::backend_test;
use crate::cli::{assert_refused, program, text};
use crate::compare::values;
use crate::golden::folder;

/// Each checkpoint, and the format that keeps its codes.
const CHECKPOINTS: [(&str, &str); 17] = [
    ("nf4", "NF4"),
    ("nf4_nested", "NF4"),
    // Blocks of the down projection cross the ends of its rows.
    ("fp4", "FP4"),
    ("bnb_int8", "INT8"),
    ("gptq_4", "Q4_0"),
    ("gptq_4_act_order", "F16"),
    ("gptq_8", "INT8"),
    ("gptq_3", "4 bits with zeros, groups of 32"),
    ("gptq_2", "4 bits with zeros, groups of 32"),
    ("awq", "4 bits with zeros, groups of 32"),
    ("fp8_block", "FP8"),
    ("fp8_tensor", "FP8"),
    ("fbgemm_fp8", "FP8"),
    ("float_quantized", "FP8"),
    ("int_quantized", "INT8"),
    ("packed_4", "Q4_0"),
    ("packed_4_zeros", "4 bits with zeros, groups of 32"),
];

fn golden() -> Vec<u8> {
    fs::read(folder("packed/golden.safetensors")).expect("a golden file")
}

fn logits<B: Backend>(model: &Transformer<B>, tokens: &[i32], device: &B::Device) -> Vec<f32> {
    let tokens = TensorData::new(tokens.to_vec(), [1, tokens.len()]);
    values(&model.logits(model.forward(Tensor::<B, 2, Int>::from_data(tokens, device))))
}

fn floats(view: &TensorView<'_>) -> Vec<f32> {
    view.data().chunks_exact(4).map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect()
}

fn tokens(golden: &SafeTensors<'_>) -> Vec<i32> {
    let data = golden.tensor("tokens").expect("tokens").data();
    data.chunks_exact(4).map(|x| i32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect()
}

fn furthest(own: &[f32], wanted: &[f32]) -> f32 {
    assert_eq!(own.len(), wanted.len());
    // NaN is far, too.
    own.iter().zip(wanted).fold(0.0, |most, (a, b)| if (a - b).abs() <= most { most } else { (a - b).abs() })
}

#[test]
fn matrices_are_dequantized_bit_for_bit_as_by_the_packages_that_made_them() {
    let bytes = golden();
    let golden = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let (name, mut wrong) = ("model.layers.0.mlp.down_proj.weight", Vec::new());
    for (checkpoint, _) in CHECKPOINTS {
        let model = ModelFolder::new(folder(&format!("packed/{checkpoint}")));
        let ([rows, columns], own) = model.tensor::<2>(name).expect("a matrix").expect("there is one");
        assert_eq!(rows, 64);
        let own: Vec<f32> = own.chunks_exact(columns).step_by(3).flatten().copied().collect();
        let wanted = golden.tensor(&format!("{checkpoint}.down_proj")).expect("a golden tensor");
        // Some packages round to 16 bits in the end.
        let own: Vec<u8> = match wanted.dtype() {
            Dtype::F16 => own.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
            Dtype::BF16 => own.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
            _ => own.iter().flat_map(|x| x.to_le_bytes()).collect(),
        };
        let differ = own.chunks_exact(2).zip(wanted.data().chunks_exact(2)).filter(|(a, b)| a != b).count();
        if own != wanted.data() {
            wrong.push(format!("{checkpoint}: {differ} of {} halves differ", own.len() / 2));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let (shape, own) =
        ModelFolder::new(folder("packed/mxfp4")).tensor::<3>("x").expect("a stack").expect("there is one");
    assert_eq!(shape, [2, 6, 64]);
    assert!(own == floats(&golden.tensor("mxfp4.x").expect("a golden tensor")), "mxfp4");
}

backend_test!(quantized_checkpoints_compute_what_transformers_does_of_them::<B>(device) {
    let bytes = golden();
    let golden = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    for (checkpoint, format) in CHECKPOINTS {
        let files = ModelFolder::new(folder(&format!("packed/{checkpoint}")));
        let wanted = floats(&golden.tensor(&format!("{checkpoint}.logits")).expect("golden logits"));
        assert!(wanted.iter().any(|logit| logit.abs() > 0.3));
        let own = logits(&files.load::<B>(&device)?, &tokens(&golden), &device);
        let off = furthest(&own, &wanted);
        println!("{checkpoint}: {off:.1e}");
        assert!(off < 1e-3, "{checkpoint}: {off}");

        let mut read = (0, 0);
        let mut progress = |done, total| read = (done, total);
        let mut stored = files.load_in::<B>(MatrixDtype::Stored, &mut progress, &device)?;
        assert_eq!(read.0, read.1, "{checkpoint}");
        let formats = stored.formats();
        let kept = formats.iter().filter(|(path, _)| path.starts_with("blocks.")).map(|(_, format)| *format);
        let kept: Vec<&str> = kept.map(|format| format.map_or("floats", |format| format.name())).collect();
        let down = if checkpoint == "fp4" { "F16" } else { format };
        assert_eq!(kept, [format, format, format, down], "{checkpoint}");
        let own = logits(&stored, &tokens(&golden), &device);
        let off = furthest(&own, &wanted);
        println!("{checkpoint} as stored: {off:.1e}");
        // The CPU's integer kernels round inputs to bytes; f16 rounds weights that no format keeps.
        let most = match (format, down) {
            ("Q4_0", _) => 0.1,
            (_, "F16") => 5e-3,
            _ => 1e-3,
        };
        assert!(off < most, "{checkpoint} as it is stored: {off}");
    }
    let int8 =
        ModelFolder::new(folder("packed/nf4")).load_in::<B>(fireclay_kernels::Format::Int8, &mut |_, _| {}, &device)?;
    let own = logits(&int8, &tokens(&golden), &device);
    let wanted = floats(&golden.tensor("nf4.logits").expect("golden logits"));
    assert!((1e-4..0.2).contains(&furthest(&own, &wanted)), "quantized once more: {}", furthest(&own, &wanted));
    let mut float = ModelFolder::new(folder("packed/nf4")).load_in::<B>(FloatDType::F32, &mut |_, _| {}, &device)?;
    assert!(float.formats().iter().all(|(_, format)| format.is_none()));
});

/// A folder with some of its tensors changed.
fn changed(checkpoint: &str, out: &Path, change: impl Fn(&str, Vec<usize>) -> Option<(String, Vec<usize>)>) {
    let source = folder(&format!("packed/{checkpoint}"));
    let bytes = fs::read(source.join("model.safetensors")).expect("a golden file");
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let mut views = HashMap::new();
    for (name, view) in file.tensors() {
        let size: usize = view.shape().iter().product();
        let Some((name, shape)) = change(&name, view.shape().to_vec()) else { continue };
        let bytes = &view.data()[..shape.iter().product::<usize>() * view.data().len() / size.max(1)];
        views.insert(name, TensorView::new(view.dtype(), shape, bytes).expect("whole"));
    }
    fs::write(out.join("model.safetensors"), safetensors::serialize(views, None).expect("a file")).expect("writable");
    fs::copy(source.join("config.json"), out.join("config.json")).expect("a copy");
}

#[test]
fn a_checkpoint_that_lacks_a_part_or_has_another_shape_is_refused() {
    type B = burn::backend::NdArray;
    let scratch = tempfile::tempdir().expect("a folder");
    let refusal = || {
        ModelFolder::new(scratch.path()).load::<B>(&Default::default()).map(|_| ()).expect_err("damaged").to_string()
    };
    for (checkpoint, part) in [
        ("nf4", "q_proj.weight.absmax"),
        ("nf4", "q_proj.weight.quant_map"),
        ("nf4_nested", "q_proj.weight.nested_quant_map"),
        ("bnb_int8", "q_proj.weight"),
        ("gptq_4", "q_proj.scales"),
        ("gptq_4", "q_proj.qzeros"),
        ("awq", "q_proj.scales"),
        ("fp8_block", "q_proj.weight"),
        ("packed_4_zeros", "q_proj.weight_zero_point"),
    ] {
        changed(checkpoint, scratch.path(), |name, shape| (!name.ends_with(part)).then(|| (name.into(), shape)));
        let message = refusal();
        assert!(message.contains(part) && message.contains("is missing"), "{checkpoint} {part}: {message}");
        changed(checkpoint, scratch.path(), |name, mut shape| {
            if name.ends_with(part) {
                shape[0] -= 1;
            }
            Some((name.into(), shape))
        });
        let message = refusal();
        assert!(message.contains("q_proj"), "{checkpoint} {part}: {message}");
    }
    // A scale is no longer read as one, and what is left is no float.
    changed("fp8_tensor", scratch.path(), |name, shape| (!name.ends_with("_scale_inv")).then(|| (name.into(), shape)));
    assert_eq!(ModelFolder::new(scratch.path()).is_quantized().ok(), Some(true));
    let message = refusal();
    assert!(message.contains("weight_scale_inv is missing"), "{message}");
}

#[test]
fn damaged_codes_are_an_error_or_a_model_and_never_a_panic() {
    type B = burn::backend::NdArray;
    let scratch = tempfile::tempdir().expect("a folder");
    for checkpoint in ["nf4_nested", "gptq_4_act_order"] {
        let source = folder(&format!("packed/{checkpoint}"));
        fs::copy(source.join("config.json"), scratch.path().join("config.json")).expect("a copy");
        let whole = fs::read(source.join("model.safetensors")).expect("a golden file");
        for at in (0..whole.len()).step_by(whole.len() / 150) {
            let mut bytes = whole.clone();
            bytes[at] ^= [0xff, 0x01, 0x80][at % 3];
            fs::write(scratch.path().join("model.safetensors"), &bytes).expect("writable");
            let files = ModelFolder::new(scratch.path());
            let _ = files.load_in::<B>(MatrixDtype::Stored, &mut |_, _| {}, &Default::default());
        }
    }
}

#[test]
fn the_program_says_what_a_quantized_checkpoint_is_and_refuses_what_it_cannot_read() {
    let scratch = tempfile::tempdir().expect("a folder");
    let config = fs::read_to_string(folder("packed/gptq_4/config.json")).expect("a config");
    fs::copy(folder("packed/gptq_4/model.safetensors"), scratch.path().join("model.safetensors")).expect("a copy");
    let with = |key: &str, value: Value| {
        let mut config: Value = serde_json::from_str(&config).expect("JSON");
        config["quantization_config"][key] = value;
        fs::write(scratch.path().join("config.json"), config.to_string()).expect("writable");
        program()
            .args(["generate", "--backend", "cpu", "--prompt", "x", "--model", text(scratch.path())])
            .output()
            .expect("it starts")
    };
    assert_refused(&with("quant_method", "hqq".into()), 1, &["config.json", "'hqq'", "gptq"]);
    assert_refused(&with("bits", 5.into()), 1, &["config.json", "quantization_config.bits is 5"]);
    assert_refused(&with("hue", 5.into()), 1, &["quantization_config.hue is 5"]);
}
