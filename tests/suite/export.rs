//! `fireclay export`: GGUF files that are written here. See `tests/golden/gguf_files.py`, and
//! `tests/llama_cpp/` for what llama.cpp makes of them.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use burn::backend::NdArray;
use burn::tensor::{Int, Tensor, TensorData};
use fireclay_datasets::{Tokenizer, TokenizerKind};
use fireclay_kernels::BlockFormat;
use fireclay_model::{GgufKind, GgufValue, ModelFolder, Positions, RotaryScaling, TransformerConfig, named_parameters};
use safetensors::tensor::SafeTensors;

use crate::cli::{assert_refused, program, text};
use crate::compare::values;
use crate::golden::folder;

type B = NdArray;

const KINDS: [GgufKind; 6] =
    [GgufKind::F32, GgufKind::F16, GgufKind::Bf16, GgufKind::Q8_0, GgufKind::Q4_0, GgufKind::Q4KM];

fn export(model: &Path, kind: GgufKind, out: &Path) -> fireclay_model::WrittenGguf {
    let keys = [("general.name".to_string(), GgufValue::from("clay"))];
    let mut told = (0, 0);
    let mut progress = |done, total| told = (done, total);
    let device = Default::default();
    let written =
        ModelFolder::new(model).export_gguf::<B>(kind, &keys, out, &mut progress, &device).expect("a GGUF file");
    assert!(told.0 > 0 && told.0 <= told.1, "{told:?}");
    assert_eq!(written.bytes, fs::metadata(out).expect("a file").len());
    written
}

fn rms(values: impl Iterator<Item = f64> + Clone) -> f64 {
    (values.clone().map(|x| x * x).sum::<f64>() / values.count() as f64).sqrt()
}

#[test]
fn blocks_are_written_bit_for_bit_as_by_the_formats_own_package() {
    let bytes = fs::read(folder("gguf/written.safetensors")).expect("a golden file");
    let golden = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let floats = |name: &str| -> Vec<f32> {
        let data = golden.tensor(name).expect("a tensor").data();
        data.chunks_exact(4).map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect()
    };
    let weights = floats("weights");
    for format in BlockFormat::ALL.into_iter().filter(|format| format.is_written()) {
        let name = format.name();
        let mut blocks = vec![0xff; weights.len() / format.weights() * format.bytes()];
        format.quantize(&weights, &mut blocks);
        if let Ok(wanted) = golden.tensor(&format!("{name}.blocks")) {
            assert!(blocks == wanted.data(), "{name}");
            continue;
        }
        // Where a search is free to find better ones, they are no worse than llama.cpp's.
        let errors = floats(&format!("{name}.error"));
        let mut own = vec![0f32; weights.len()];
        format.dequantize(&blocks, &mut own);
        let mut ours = Vec::new();
        for ((own, weights), theirs) in own.chunks_exact(256).zip(weights.chunks_exact(256)).zip(&errors) {
            let error = rms(own.iter().zip(weights).map(|(a, b)| f64::from(a - b)));
            assert!(error <= 1.1 * f64::from(*theirs) + 1e-4, "{name}: {error}, and llama.cpp's {theirs}");
            ours.push(error);
        }
        let (own, theirs) = (rms(ours.into_iter()), rms(errors.iter().map(|error| f64::from(*error))));
        println!("{name}: root mean square error {own:.6}, llama.cpp's {theirs:.6}");
        assert!(own < theirs, "{name}: {own}, and llama.cpp's {theirs}");
    }
}

#[test]
fn every_kind_of_file_gives_the_weights_back_that_it_was_made_of() {
    let scratch = tempfile::tempdir().expect("a folder");
    let device = Default::default();
    let wide = scratch.path().join("wide");
    fs::create_dir(&wide).expect("a folder");
    let config = TransformerConfig::llama(61, 32, 256, 3, 4).with_n_kv_heads(2).with_d_ff(512);
    ModelFolder::new(&wide).save(&config.init::<B>(5, &device).expect("a model")).expect("a folder");
    let goldens = ["gpt2", "llama", "llama3", "llama_linear", "llama_yarn", "mistral", "qwen2", "qwen3"];
    let models = goldens.into_iter().map(|name| (name, folder(name))).chain([("wide", wide)]);
    for (name, model) in models {
        let source = ModelFolder::new(&model).load::<B>(&device).expect("a model");
        let wanted: HashMap<String, Vec<f32>> =
            named_parameters(&source).into_iter().map(|(path, .., tensor)| (path, values(&tensor))).collect();
        for kind in KINDS {
            let out = scratch.path().join("model.gguf");
            let written = export(&model, kind, &out);
            let file = ModelFolder::new(&out);
            let (family, config) = file.config().expect("a config");
            let (own_family, own_config) = ModelFolder::new(&model).config().expect("a config");
            assert_eq!(family, own_family, "{name}");
            assert_eq!(config.context_length, own_config.context_length);
            assert_eq!(file.unknown_keys().expect("keys"), Vec::<String>::new(), "{name}");
            let read = file.load::<B>(&device).expect("a model");
            let mut worst = 0f64;
            for (path, .., tensor) in named_parameters(&read) {
                let (own, wanted) = (values(&tensor), &wanted[&path]);
                let off = rms(own.iter().zip(wanted).map(|(a, b)| f64::from(a - b)));
                worst = worst.max(off / rms(wanted.iter().map(|x| f64::from(*x))).max(1e-9));
            }
            // Relative to the weights' own size; another row in place of one would be 1.4.
            let most = match kind {
                GgufKind::F32 => 0.0,
                GgufKind::F16 => 3e-4,
                GgufKind::Bf16 => 2e-3,
                GgufKind::Q8_0 => 8e-3,
                GgufKind::Q4_0 => 0.12,
                GgufKind::Q4KM => 0.09,
            };
            assert!(worst <= most, "{name} as {kind:?}: {worst}");
            assert!(kind == GgufKind::F32 || worst > 0.0 || name == "gpt2", "{name} as {kind:?} loses nothing");
            if name == "wide" {
                let bits = written.bits_a_weight;
                let (least, most) = match kind {
                    GgufKind::Q4_0 => (4.5, 4.6),
                    GgufKind::Q4KM => (4.7, 5.4),
                    GgufKind::Q8_0 => (8.5, 8.5),
                    GgufKind::F32 => (32.0, 32.0),
                    _ => (16.0, 16.0),
                };
                assert!((least..=most).contains(&bits), "{kind:?}: {bits} bits per weight");
            }
        }
    }
}

#[test]
fn a_file_computes_what_its_folder_does_in_every_kind_of_rotary_scaling() {
    let (scratch, device) = (tempfile::tempdir().expect("a folder"), Default::default());
    let logits = |path: &Path| {
        let model = ModelFolder::new(path).load::<B>(&device).expect("a model");
        let tokens = TensorData::new((0..16).map(|at| at * 7 % 61).collect::<Vec<i32>>(), [1, 16]);
        values(&model.logits(model.forward(Tensor::<B, 2, Int>::from_data(tokens, &device))))
    };
    let scalings = [
        RotaryScaling::Linear { factor: 2.0 },
        RotaryScaling::Llama3 {
            factor: 8.0,
            low_frequency_factor: 1.0,
            high_frequency_factor: 4.0,
            original_context_length: 16,
        },
        RotaryScaling::Yarn {
            factor: 4.0,
            attention_factor: Some(1.3),
            beta_fast: 16.0,
            beta_slow: 2.0,
            original_context_length: 16,
            truncate: true,
        },
        RotaryScaling::LongRope {
            short_factors: vec![1.0, 1.5, 2.0, 4.0],
            long_factors: vec![1.0, 2.0, 4.0, 8.0],
            longest: 64,
            magnitude: 1.1,
        },
    ];
    let mut seen = Vec::new();
    for scaling in scalings {
        let model = scratch.path().join("model");
        fs::create_dir_all(&model).expect("a folder");
        let positions = Positions::Rotary { base: 1e4, scaling: scaling.clone() };
        let config = TransformerConfig::llama(61, 64, 32, 2, 4).with_positions(positions).with_init_deviation(0.15);
        ModelFolder::new(&model).save(&config.init::<B>(3, &device).expect("a model")).expect("a folder");
        let out = scratch.path().join("model.gguf");
        export(&model, GgufKind::F32, &out);
        let (own, wanted) = (logits(&out), logits(&model));
        let off = own.iter().zip(&wanted).fold(0f32, |most, (a, b)| most.max((a - b).abs()));
        assert!(off < 1e-4 && wanted.iter().any(|logit| logit.abs() > 0.3), "{scaling:?}: {off}");
        assert!(!seen.contains(&wanted), "{scaling:?} changes something");
        seen.push(wanted);
    }
}

/// A folder with a small model and a tokenizer.
fn trained(path: &Path, kind: TokenizerKind) -> Tokenizer {
    let words = "The kiln's clay is fired at 1250 degrees; bricks, pots and tiles. ".repeat(8);
    let tokenizer = Tokenizer::train(kind, &words).expect("a tokenizer");
    fs::create_dir_all(path).expect("a folder");
    tokenizer.save(&path.join("tokenizer.json")).expect("writable");
    // More rows than tokens, as many models have.
    let config = TransformerConfig::qwen2(tokenizer.vocab_size() + 3, 64, 32, 2, 4).with_n_kv_heads(2);
    let config = config.with_init_deviation(0.2);
    ModelFolder::new(path).save(&config.init::<B>(9, &Default::default()).expect("a model")).expect("writable");
    tokenizer
}

fn run(command: &str, model: &Path, more: &[&str]) -> std::process::Output {
    program().args([command, "--model", text(model)]).args(more).output().expect("the program starts")
}

#[test]
fn an_exported_model_writes_and_chats_as_its_folder_does() {
    let scratch = tempfile::tempdir().expect("a folder");
    let model = scratch.path().join("model");
    let tokenizer = trained(&model, TokenizerKind::Bpe(300));
    let template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}";
    fs::write(model.join("chat_template.jinja"), template).expect("writable");
    let settings = r#"{"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}"#;
    fs::write(model.join("tokenizer_config.json"), settings).expect("writable");
    let out = scratch.path().join("model.gguf");
    let output = run("export", &model, &["--gguf", "f32", "--out", text(&out), "--json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "", "nothing of it is left out");
    let done: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON line");
    assert_eq!((&done["event"], &done["bits_a_weight"]), (&"done".into(), &32.0.into()));
    assert_eq!(done["bytes"], fs::metadata(&out).expect("a file").len());
    assert_eq!(fs::read_dir(scratch.path()).expect("a folder").count(), 2, "and nothing else");

    let metadata = ModelFolder::new(&out).gguf_metadata().expect("a file").expect("a GGUF file");
    assert_eq!(metadata.string("general.name").expect("a text"), Some("model"));
    assert_eq!(metadata.string("tokenizer.chat_template").expect("a text"), Some(template));
    assert_eq!(metadata.string("tokenizer.ggml.pre").expect("a text"), Some("gpt-2"));
    assert_eq!(metadata.size("tokenizer.ggml.eos_token_id").expect("an id"), tokenizer.token_id("<|endoftext|>"));
    assert_eq!(metadata.strings("tokenizer.ggml.tokens").expect("tokens").map(<[_]>::len), Some(303));

    let ask = ["--prompt", "The kiln is 12", "--max-tokens", "24", "--temperature", "0", "--json"];
    let backend = ["--backend", "cpu"];
    let of = |model: &Path| {
        let output = run("generate", model, &[&ask[..], &backend].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let stdout = String::from_utf8(output.stdout).expect("text");
        let done: serde_json::Value = serde_json::from_str(stdout.lines().last().expect("a line")).expect("JSON");
        (done["tokens"].clone(), done["text"].clone())
    };
    let (own, wanted) = (of(&out), of(&model));
    assert!(wanted.0.as_array().is_some_and(|tokens| tokens.len() > 3), "{wanted:?}");
    assert_eq!(own, wanted);
}

#[test]
fn what_cannot_be_exported_is_refused_in_one_line() {
    let scratch = tempfile::tempdir().expect("a folder");
    let at = |name: &str| scratch.path().join(name);
    let out = at("out.gguf");
    let refused = |model: &Path, words: &[&str]| {
        assert_refused(&run("export", model, &["--gguf", "q8_0", "--out", text(&out)]), 1, words);
        assert!(!out.exists() && !out.with_extension("partial").exists());
    };
    trained(&at("letters"), TokenizerKind::Char);
    refused(&at("letters"), &["letters", "model is WordLevel", "not BPE"]);
    refused(&folder("gguf/qwen2.gguf"), &["qwen2.gguf", "already a GGUF file"]);
    refused(&folder("bert"), &["bert", "an encoder"]);
    refused(&folder("llama"), &["tokenizer.json"]);
    refused(&at("nothing"), &["nothing"]);
    let model = at("model");
    trained(&model, TokenizerKind::Bpe(300));
    let within = at("missing").join("out.gguf");
    let output = run("export", &model, &["--gguf", "f16", "--out", text(&within)]);
    assert_refused(&output, 1, &["out.gguf", "No such file"]);
    assert_refused(&run("export", &model, &["--gguf", "f16", "--out", text(&model)]), 1, &["model"]);

    let tokenizer = fs::read_to_string(model.join("tokenizer.json")).expect("a file");
    let changed = |from: &str, to: &str, words: &[&str]| {
        assert!(tokenizer.contains(from), "{from}");
        fs::write(model.join("tokenizer.json"), tokenizer.replacen(from, to, 1)).expect("writable");
        refused(&model, words);
    };
    changed("\"normalizer\": null", r#""normalizer": {"type": "Lowercase"}"#, &["normalizer is Lowercase"]);
    changed("\"add_prefix_space\": false", "\"add_prefix_space\": true", &["add_prefix_space is true"]);
    changed("\"dropout\": null", "\"dropout\": 0.1", &["dropout is 0.1"]);
    changed("\"ignore_merges\": false", "\"ignore_merges\": true", &["ignore_merges"]);
    fs::write(model.join("tokenizer.json"), &tokenizer).expect("writable");

    // A value that f16 has none for.
    let large = TransformerConfig::qwen2(303, 64, 32, 1, 4).with_init_deviation(1e5);
    ModelFolder::new(&model).save(&large.init::<B>(9, &Default::default()).expect("a model")).expect("writable");
    let output = run("export", &model, &["--gguf", "f16", "--out", text(&out)]);
    assert_refused(&output, 1, &["a value has magnitude", "which F16 cannot store"]);
    let output = run("export", &model, &["--gguf", "bf16", "--out", text(&out)]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(run("export", &model, &["--out", text(&out)]).status.code(), Some(2));
    assert_eq!(run("export", &model, &["--gguf", "q9", "--out", text(&out)]).status.code(), Some(2));
}

/// Log-probabilities of the next token behind each of `tokens`.
fn own_logarithms(path: &Path, tokens: &[u32]) -> Vec<Vec<f64>> {
    let device = Default::default();
    let model = ModelFolder::new(path).load::<B>(&device).expect("a model");
    let tokens: Vec<i32> = tokens.iter().map(|token| *token as i32).collect();
    let tokens = TensorData::new(tokens.clone(), [1, tokens.len()]);
    let logits = model.logits(model.forward(Tensor::<B, 2, Int>::from_data(tokens, &device)));
    let [.., vocabulary] = logits.dims();
    let logits = values(&logits);
    let row = |row: &[f32]| {
        let most = f64::from(row.iter().copied().fold(f32::MIN, f32::max));
        let sum: f64 = row.iter().map(|logit| (f64::from(*logit) - most).exp()).sum();
        row.iter().map(|logit| f64::from(*logit) - most - sum.ln()).collect()
    };
    logits.chunks_exact(vocabulary).map(row).collect()
}

fn first_two(row: &[f64]) -> (usize, f64) {
    let mut order: Vec<usize> = (0..row.len()).collect();
    order.sort_by(|a, b| row[*b].total_cmp(&row[*a]));
    (order[0], row[order[0]] - row[order[1]])
}

/// Exports a model in every kind and compares llama.cpp's logits for the files with those of the
/// folder, over the first tokens of a text. Run as `tests/llama_cpp` says:
///
/// ```sh
/// export FIRECLAY_LLAMA_CPP=FOLDER_OF_NODE_MODULES FIRECLAY_MODEL=FOLDER FIRECLAY_TEXT=FILE
/// cargo test .. -- --ignored llama_cpp
/// ```
#[test]
#[ignore = "needs npm's node-llama-cpp, a model and a text"]
fn llama_cpp_computes_of_our_files_what_we_do() {
    let of =
        |name: &str| std::path::PathBuf::from(std::env::var_os(name).unwrap_or_else(|| panic!("{name} is not set")));
    let (packages, model) = (of("FIRECLAY_LLAMA_CPP"), of("FIRECLAY_MODEL"));
    let text: String = fs::read_to_string(of("FIRECLAY_TEXT")).expect("a text").chars().take(4000).collect();
    let script = std::env::current_dir().expect("a folder").join("tests/llama_cpp/probabilities.mjs");
    let tokenizer = Tokenizer::load(&model.join("tokenizer.json")).expect("a tokenizer");
    let all = tokenizer.encode_prompt(&text).expect("tokens");
    let (_, config) = ModelFolder::new(&model).config().expect("a config");
    let tokens = &all[..all.len().min(config.context_length - 1).min(500)];
    let scratch = tempfile::tempdir().expect("a folder");
    let [file, request, out] = ["model.gguf", "request.json", "out.f32"].map(|name| scratch.path().join(name));
    fs::write(&request, serde_json::json!({ "text": text, "tokens": tokens }).to_string()).expect("writable");
    let folder = own_logarithms(&model, tokens);
    for kind in KINDS {
        let name = format!("{kind:?}").to_lowercase();
        let name = if kind == GgufKind::Q4KM { "q4_k_m" } else { &name };
        let output = run("export", &model, &["--gguf", name, "--out", crate::cli::text(&file)]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let output = std::process::Command::new("node")
            .args([&script, &file, &request, &out])
            .current_dir(&packages)
            .output()
            .expect("node starts");
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        let answer: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let theirs: Vec<u32> = serde_json::from_value(answer["tokens"].clone()).expect("ids");
        assert_eq!(theirs, tokenizer.encode(&text).expect("tokens"), "{name}: llama.cpp cuts the text otherwise");
        let vocabulary = folder[0].len();
        assert_eq!(answer["vocabulary"], vocabulary);
        let bytes = fs::read(&out).expect("probabilities");
        let floats: Vec<f64> =
            bytes.chunks_exact(4).map(|x| f64::from(f32::from_le_bytes([x[0], x[1], x[2], x[3]]))).collect();
        let own = own_logarithms(&file, tokens);
        let (mut divergence, mut agree, mut clear, mut wrong, mut error) = (0.0, 0, 0, 0, 0f64);
        for (at, theirs) in floats.chunks_exact(vocabulary).enumerate() {
            assert!((theirs.iter().sum::<f64>() - 1.0).abs() < 1e-3, "{name}: probabilities");
            let (first, margin) = first_two(&folder[at]);
            // How far the format moves logarithms of what is not unlikely.
            let moved = folder[at].iter().zip(&own[at]).filter(|(own, _)| **own > -10.0);
            let moved = moved.fold(0f64, |most, (a, b)| most.max((a - b).abs()));
            error = error.max(moved);
            let logarithms: Vec<f64> = theirs.iter().map(|p| p.max(1e-30).ln()).collect();
            divergence +=
                folder[at].iter().zip(&logarithms).map(|(own, theirs)| own.exp() * (own - theirs)).sum::<f64>();
            let same = first_two(&logarithms).0 == first;
            agree += usize::from(same);
            // Both of two may move, and llama.cpp rounds inputs of products, too.
            if margin > 2.0 * moved + 0.1 {
                clear += 1;
                wrong += usize::from(!same);
            }
        }
        divergence /= tokens.len() as f64;
        let bytes = fs::metadata(&file).expect("a file").len() as f64 / 1e6;
        println!(
            "{name}: {bytes:.1} MB, KL divergence {divergence:.6}, top-1 agrees {agree} of {}, {wrong} wrong of \
             {clear} whose margin exceeds the format's error (at most {error:.3})",
            tokens.len()
        );
        assert_eq!(wrong, 0, "{name}");
        assert!(clear > tokens.len() / 4, "{name}: {clear} of {}", tokens.len());
        let most = match kind {
            GgufKind::F32 | GgufKind::F16 | GgufKind::Bf16 => 1e-3,
            GgufKind::Q8_0 => 0.01,
            GgufKind::Q4_0 | GgufKind::Q4KM => 0.2,
        };
        assert!(divergence < most, "{name}: {divergence}");
    }
}
