//! GGUF files as models: see `tests/golden/gguf_files.py`.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use burn::tensor::{FloatDType, Int, Tensor, TensorData};
use fireclay_kernels::{Backend, BlockFormat, Format};
use fireclay_model::{
    ActivationKind, Family, MatrixDtype, ModelFolder, Positions, RotaryScaling, Transformer, TransformerConfig,
};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::Value;

use crate::backend_test;
use crate::cli::{assert_refused, program, text};
use crate::compare::values;
use crate::golden::{Golden, folder};

/// A value of a key.
#[derive(Clone)]
enum Key {
    U32(u32),
    I32s(Vec<i32>),
    F32(f32),
    Bool(bool),
    Text(&'static str),
}

/// A tensor: name, shape, type number, bytes.
type Described = (String, Vec<usize>, u32, Vec<u8>);

const F32: u32 = 0;

/// A file written by a test.
#[derive(Clone, Default)]
struct File {
    keys: Vec<(String, Key)>,
    tensors: Vec<Described>,
}

impl File {
    /// Adds or replaces a key.
    fn with(mut self, name: &str, value: Key) -> Self {
        self.keys.retain(|(known, _)| known != name);
        self.keys.push((name.into(), value));
        self
    }

    fn without(mut self, name: &str) -> Self {
        self.keys.retain(|(known, _)| known != name);
        self.tensors.retain(|(known, ..)| known != name);
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF\x03\0\0\0".to_vec();
        let string = |out: &mut Vec<u8>, text: &str| {
            out.extend((text.len() as u64).to_le_bytes());
            out.extend(text.as_bytes());
        };
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.keys.len() as u64).to_le_bytes());
        for (name, value) in &self.keys {
            string(&mut out, name);
            match value {
                Key::U32(value) => out.extend([&4u32.to_le_bytes()[..], &value.to_le_bytes()].concat()),
                Key::F32(value) => out.extend([&6u32.to_le_bytes()[..], &value.to_le_bytes()].concat()),
                Key::Bool(value) => out.extend([&7u32.to_le_bytes()[..], &[u8::from(*value)]].concat()),
                Key::Text(value) => {
                    out.extend(8u32.to_le_bytes());
                    string(&mut out, value);
                }
                Key::I32s(values) => {
                    out.extend([&9u32.to_le_bytes()[..], &5u32.to_le_bytes()].concat());
                    out.extend((values.len() as u64).to_le_bytes());
                    out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
                }
            }
        }
        let mut offset = 0u64;
        for (name, shape, kind, bytes) in &self.tensors {
            string(&mut out, name);
            out.extend((shape.len() as u32).to_le_bytes());
            out.extend(shape.iter().rev().flat_map(|length| (*length as u64).to_le_bytes()));
            out.extend(kind.to_le_bytes());
            out.extend(offset.to_le_bytes());
            offset += (bytes.len() as u64).next_multiple_of(32);
        }
        for (.., bytes) in &self.tensors {
            out.resize(out.len().next_multiple_of(32), 0);
            out.extend(bytes);
        }
        out
    }

    fn write(&self, path: &Path) {
        fs::write(path, self.bytes()).expect("writable");
    }
}

/// Pseudo-random bytes.
fn noise(seed: u64) -> impl FnMut() -> u8 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    }
}

/// The type number of a format.
fn number(format: BlockFormat) -> u32 {
    [2, 3, 6, 7, 8, 10, 11, 12, 13, 14]
        [BlockFormat::ALL.iter().position(|known| *known == format).expect("one of them")]
}

/// Random blocks, with small scales where a block has f16.
fn blocks(format: BlockFormat, weights: usize, seed: u64) -> Vec<u8> {
    let halves: &[usize] = match format {
        BlockFormat::Q4_0 | BlockFormat::Q5_0 | BlockFormat::Q8_0 => &[0],
        BlockFormat::Q4_1 | BlockFormat::Q5_1 | BlockFormat::Q4K | BlockFormat::Q5K => &[0, 2],
        BlockFormat::Q2K => &[80, 82],
        BlockFormat::Q3K => &[108],
        BlockFormat::Q6K => &[208],
    };
    // So that weights are about 0.05.
    let scale = match format {
        BlockFormat::Q8_0 => 0.0008,
        BlockFormat::Q2K => 0.004,
        BlockFormat::Q4K => 0.0002,
        BlockFormat::Q5K => 0.0001,
        BlockFormat::Q3K => 0.0015,
        BlockFormat::Q6K => 0.00005,
        _ => 0.008,
    };
    let mut next = noise(seed);
    let mut bytes: Vec<u8> = (0..weights / format.weights() * format.bytes()).map(|_| next()).collect();
    for (at, block) in bytes.chunks_exact_mut(format.bytes()).enumerate() {
        for half in halves {
            let sign = if at % 2 == 0 { scale } else { -scale };
            block[*half..half + 2].copy_from_slice(&half::f16::from_f32(sign).to_le_bytes());
        }
    }
    bytes
}

/// Metadata of a small Llama, without a tokenizer.
fn llama_keys(d_model: u32, layers: u32) -> File {
    let file = File::default().with("general.architecture", Key::Text("llama"));
    let sizes = [
        ("context_length", 32),
        ("embedding_length", d_model),
        ("block_count", layers),
        ("feed_forward_length", d_model),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
    ];
    let file = sizes.into_iter().fold(file, |file, (name, size)| file.with(&format!("llama.{name}"), Key::U32(size)));
    file.with("llama.attention.layer_norm_rms_epsilon", Key::F32(1e-5))
}

/// Names and shapes of its tensors, with the hub's names.
fn llama_tensors(d: usize, layers: usize, vocab: usize) -> Vec<(String, String, Vec<usize>)> {
    let mut tensors = vec![
        ("token_embd.weight".to_string(), "model.embed_tokens.weight".to_string(), vec![vocab, d]),
        ("output.weight".into(), "lm_head.weight".into(), vec![vocab, d]),
        ("output_norm.weight".into(), "model.norm.weight".into(), vec![d]),
    ];
    for layer in 0..layers {
        for (name, hub, shape) in [
            ("attn_q", "self_attn.q_proj", vec![d, d]),
            ("attn_k", "self_attn.k_proj", vec![d / 2, d]),
            ("attn_v", "self_attn.v_proj", vec![d / 2, d]),
            ("attn_output", "self_attn.o_proj", vec![d, d]),
            ("ffn_gate", "mlp.gate_proj", vec![d, d]),
            ("ffn_up", "mlp.up_proj", vec![d, d]),
            ("ffn_down", "mlp.down_proj", vec![d, d]),
            ("attn_norm", "input_layernorm", vec![d]),
            ("ffn_norm", "post_attention_layernorm", vec![d]),
        ] {
            tensors.push((format!("blk.{layer}.{name}.weight"), format!("model.layers.{layer}.{hub}.weight"), shape));
        }
    }
    tensors
}

/// The same model as a GGUF file in a format, and as a hub folder of its weights.
fn pair(format: BlockFormat, folder: &Path) -> PathBuf {
    const D: usize = 256;
    let mut file = llama_keys(D as u32, 1);
    let mut hub = Vec::new();
    for (at, (name, own, shape)) in llama_tensors(D, 1, 61).into_iter().enumerate() {
        let size = shape.iter().product();
        let mut weights = vec![0f32; size];
        if shape.len() == 1 {
            weights.fill(1.0);
            let bytes = weights.iter().flat_map(|weight| weight.to_le_bytes()).collect();
            file.tensors.push((name, shape.clone(), F32, bytes));
        } else {
            let bytes = blocks(format, size, at as u64 + 1);
            format.dequantize(&bytes, &mut weights);
            if own.ends_with("q_proj.weight") || own.ends_with("k_proj.weight") {
                let rows: Vec<&[f32]> = weights.chunks_exact(D).collect();
                let head_dim = D / 4;
                // Row 2 i of a head is row i of its first half, row 2 i + 1 that of its second.
                let row = |row: usize| {
                    let (head, half, pair) = (row / head_dim, row / (head_dim / 2) % 2, row % (head_dim / 2));
                    rows[head * head_dim + 2 * pair + half]
                };
                weights = (0..shape[0]).flat_map(row).copied().collect();
            }
            file.tensors.push((name, shape.clone(), number(format), bytes));
        }
        let bytes: Vec<u8> = weights.iter().flat_map(|weight| weight.to_le_bytes()).collect();
        hub.push((own, shape, bytes));
    }
    let views: HashMap<&str, TensorView<'_>> = hub
        .iter()
        .map(|(name, shape, bytes)| (&name[..], TensorView::new(Dtype::F32, shape.clone(), bytes).expect("whole")))
        .collect();
    fs::write(folder.join("model.safetensors"), safetensors::serialize(views, None).expect("a file"))
        .expect("writable");
    let config = serde_json::json!({
        "model_type": "llama", "vocab_size": 61, "max_position_embeddings": 32, "hidden_size": D,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": D,
        "rms_norm_eps": 1e-5,
    });
    fs::write(folder.join("config.json"), config.to_string()).expect("writable");
    let path = folder.join("model.gguf");
    file.write(&path);
    path
}

fn logits<B: Backend>(model: &Transformer<B>, tokens: &[i32], device: &B::Device) -> Vec<f32> {
    let tokens = TensorData::new(tokens.to_vec(), [1, tokens.len()]);
    values(&model.logits(model.forward(Tensor::<B, 2, Int>::from_data(tokens, device))))
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).fold(0.0, |largest, (a, b)| if (a - b).abs() <= largest { largest } else { (a - b).abs() })
}

#[test]
fn blocks_are_dequantized_bit_for_bit_as_by_the_formats_own_package() {
    let bytes = fs::read(folder("gguf/blocks.safetensors")).expect("a golden file");
    let golden = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    for format in BlockFormat::ALL {
        let of = |part: &str| golden.tensor(&format!("{}.{part}", format.name())).expect("a tensor").data().to_vec();
        let blocks = of("blocks");
        let mut values = vec![0f32; blocks.len() / format.bytes() * format.weights()];
        format.dequantize(&blocks, &mut values);
        let own: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        assert!(own == of("values"), "{}", format.name());
    }
}

backend_test!(logits_of_gguf_files_are_those_of_transformers::<B>(device) {
    let golden = Golden::open("gguf/models.safetensors");
    for name in ["llama", "llama3", "llama_mixed", "mistral", "qwen2", "qwen3", "gpt2"] {
        let model = ModelFolder::new(folder(&format!("gguf/{name}.gguf"))).load::<B>(&device)?;
        let tokens: Vec<i32> = golden.values(&format!("{name}.tokens")).iter().map(|token| *token as i32).collect();
        let own = logits(&model, &tokens, &device);
        let wanted = golden.values(&format!("{name}.logits"));
        let difference = largest_difference(&own, wanted);
        assert!(difference < 1e-3 && wanted.iter().any(|logit| logit.abs() > 0.1), "{name}: {difference}");
    }
});

backend_test!(a_quantized_file_computes_as_its_dequantized_weights_in_every_format::<B>(device) {
    let tokens: Vec<i32> = (0..20).map(|at| at * 17 % 61).collect();
    for format in BlockFormat::ALL {
        let folder = tempfile::tempdir().expect("a folder");
        let path = pair(format, folder.path());
        let gguf = logits(&ModelFolder::new(&path).load::<B>(&device)?, &tokens, &device);
        let hub = logits(&ModelFolder::new(folder.path()).load::<B>(&device)?, &tokens, &device);
        let (difference, name) = (largest_difference(&gguf, &hub), format.name());
        assert!(difference < 1e-3 && hub.iter().any(|logit| logit.abs() > 0.1), "{name}: {difference}");
        // Other precisions load one tensor at a time, as from a folder.
        let of = |path: &Path| -> Result<Vec<f32>, fireclay::Failure> {
            let model = ModelFolder::new(path).load_in::<B>(Format::Int8, &mut |_, _| {}, &device)?;
            Ok(logits(&model, &tokens, &device))
        };
        let difference = largest_difference(&of(&path)?, &of(folder.path())?);
        assert!(difference < 1e-3, "{name} in INT8: {difference}");
        let mut read = (0, 0);
        ModelFolder::new(&path).load_in::<B>(FloatDType::F32, &mut |done, total| read = (done, total), &device)?;
        assert!(read.0 == read.1 && read.1 < fs::metadata(&path).expect("a file").len(), "{read:?}");
    }
});

/// How far predictions of `own` logits, in rows of `vocabulary`, are from those of `wanted`: the
/// mean of their KL divergences, in nats, and the rows where the first token differs although the
/// margin is larger than the rows' own difference.
fn divergence(own: &[f32], wanted: &[f32], vocabulary: usize) -> (f64, usize) {
    let log_softmax = |row: &[f32]| -> Vec<f64> {
        let max = row.iter().fold(f64::NEG_INFINITY, |max, x| max.max(f64::from(*x)));
        let sum = row.iter().map(|x| (f64::from(*x) - max).exp()).sum::<f64>().ln();
        row.iter().map(|x| f64::from(*x) - max - sum).collect()
    };
    let top = |row: &[f32]| (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])).expect("a vocabulary");
    let rows = own.chunks_exact(vocabulary).zip(wanted.chunks_exact(vocabulary));
    let (mut nats, mut count, mut wrong) = (0.0, 0, 0);
    for (own, wanted) in rows {
        let (p, q) = (log_softmax(wanted), log_softmax(own));
        nats += p.iter().zip(q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
        count += 1;
        let (first, furthest) = (top(wanted), largest_difference(own, wanted));
        let second = wanted.iter().enumerate().filter(|(at, _)| *at != first).map(|(_, x)| *x).fold(f32::MIN, f32::max);
        wrong += usize::from(top(own) != first && wanted[first] - second > 2.0 * furthest);
    }
    (nats / f64::from(count), wrong)
}

backend_test!(a_file_predicts_as_it_is_stored_what_its_dequantized_weights_do::<B>(device) {
    let tokens: Vec<i32> = (0..30).map(|at| at * 17 % 61).collect();
    let stored = |path: &Path, tokens: &[i32]| -> Result<Vec<f32>, fireclay::Failure> {
        let model = ModelFolder::new(path).load_in::<B>(MatrixDtype::Stored, &mut |_, _| {}, &device)?;
        // A prompt of many tokens, and few.
        let few = logits(&model, &tokens[..3], &device);
        let all = logits(&model, tokens, &device);
        let vocabulary = all.len() / tokens.len();
        let (nats, _) = divergence(&few, &all[..3 * vocabulary], vocabulary);
        assert!(nats < 1e-4, "{}: {nats} nats between few rows and many", path.display());
        Ok(all)
    };
    for format in BlockFormat::ALL {
        let folder = tempfile::tempdir().expect("a folder");
        let path = pair(format, folder.path());
        let wanted = logits(&ModelFolder::new(folder.path()).load::<B>(&device)?, &tokens, &device);
        let (nats, wrong) = divergence(&stored(&path, &tokens)?, &wanted, 61);
        assert!(nats < 1e-3 && wrong == 0, "{}: {nats} nats, {wrong} wrong", format.name());
        let encodings = ModelFolder::new(&path).encodings()?;
        assert_eq!(encodings[0].0, format.name());
        // Nothing is asked for: the file's own format.
        let wrong = divergence(&wanted.iter().rev().copied().collect::<Vec<_>>(), &wanted, 61).0;
        assert!(wrong > 10.0 * nats && wrong > 1e-2, "{}: {wrong} nats of a wrong order", format.name());
    }
    let golden = Golden::open("gguf/models.safetensors");
    for name in ["llama", "llama3", "llama_mixed", "mistral", "qwen2", "qwen3", "gpt2"] {
        let tokens: Vec<i32> = golden.values(&format!("{name}.tokens")).iter().map(|token| *token as i32).collect();
        let wanted = golden.values(&format!("{name}.logits"));
        let own = stored(&folder(&format!("gguf/{name}.gguf")), &tokens)?;
        let (nats, wrong) = divergence(&own, wanted, wanted.len() / tokens.len());
        assert!(nats < 1e-3 && wrong == 0, "{name}: {nats} nats, {wrong} wrong");
    }
});

#[test]
fn metadata_becomes_the_config_of_the_hub() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    let base = || {
        let mut file = llama_keys(64, 1);
        let tensors = llama_tensors(64, 1, 61).into_iter();
        file.tensors = tensors
            .map(|(name, _, shape)| (name, shape.clone(), F32, vec![0; 4 * shape.iter().product::<usize>()]))
            .collect();
        file
    };
    let read = |file: File| {
        file.write(&path);
        ModelFolder::new(&path).config().map_err(|error| error.to_string())
    };
    let llama = TransformerConfig {
        d_ff: 64,
        norm_epsilon: 1e-5,
        ..TransformerConfig::llama(61, 32, 64, 1, 4).with_n_kv_heads(2)
    };
    let llama = TransformerConfig { residual_scaling: llama.residual_scaling, ..llama };
    let rotary = |base: f64, scaling: RotaryScaling| Positions::Rotary { base, scaling };
    let scaled = |kind: &'static str| {
        let file =
            base().with("llama.rope.scaling.type", Key::Text(kind)).with("llama.rope.scaling.factor", Key::F32(4.0));
        file.with("llama.rope.scaling.original_context_length", Key::U32(8))
    };
    assert_eq!(read(base()), Ok((Family::Llama, llama.clone())));
    assert_eq!(read(base().without("output.weight")), Ok((Family::Llama, llama.clone().with_tied_embeddings(true))));
    let base_5e5 = llama.clone().with_positions(rotary(5e5, RotaryScaling::None));
    assert_eq!(read(base().with("llama.rope.freq_base", Key::F32(5e5))), Ok((Family::Llama, base_5e5)));
    let linear = llama.clone().with_positions(rotary(1e4, RotaryScaling::Linear { factor: 4.0 }));
    assert_eq!(read(scaled("linear")), Ok((Family::Llama, linear.clone())));
    assert_eq!(read(base().with("llama.rope.scale_linear", Key::F32(4.0))), Ok((Family::Llama, linear)));
    let yarn = RotaryScaling::Yarn {
        factor: 4.0,
        attention_factor: None,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_context_length: 8,
        truncate: true,
    };
    assert_eq!(read(scaled("yarn")), Ok((Family::Llama, llama.clone().with_positions(rotary(1e4, yarn)))));
    let window = llama.clone().with_sliding_window(Some(5));
    assert_eq!(read(base().with("llama.attention.sliding_window", Key::U32(5))), Ok((Family::Mistral, window)));
    assert_eq!(read(base().with("llama.attention.sliding_window", Key::U32(32))), Ok((Family::Llama, llama.clone())));
    let each = base().with("llama.attention.head_count_kv", Key::I32s(vec![2]));
    assert_eq!(read(each), Ok((Family::Llama, llama.clone())));
    assert_eq!(llama.activation, ActivationKind::Silu);

    let mut half = base();
    half.tensors.push(("rope_freqs.weight".into(), vec![7], F32, vec![0; 28]));
    let attention = scaled("linear").with("llama.rope.scaling.attn_factor", Key::F32(2.0));
    for (file, words) in [
        (base().with("general.architecture", Key::Text("mamba")), ["'mamba'", "llama, qwen2"]),
        (base().without("general.architecture"), ["general.architecture", "missing"]),
        (base().with("general.architecture", Key::U32(1)), ["general.architecture", "not a text"]),
        (base().with("general.type", Key::Text("mmproj")), ["general.type", "mmproj"]),
        (base().without("llama.block_count"), ["llama.block_count", "missing"]),
        (base().without("llama.attention.layer_norm_rms_epsilon"), ["layer_norm_rms_epsilon", "missing"]),
        (base().without("token_embd.weight"), ["token_embd.weight", "missing"]),
        (base().with("llama.block_count", Key::F32(1.0)), ["llama.block_count", "not a size"]),
        (base().with("llama.expert_count", Key::U32(8)), ["llama.expert_count is 8", "not supported"]),
        (base().with("llama.logit_scale", Key::F32(0.5)), ["llama.logit_scale is 0.5", "not supported"]),
        (base().with("llama.residual_scale", Key::F32(0.5)), ["llama.residual_scale", "not supported"]),
        (base().with("llama.attention.scale", Key::F32(0.5)), ["llama.attention.scale", "0.25 is supported"]),
        (base().with("llama.attention.causal", Key::Bool(false)), ["llama.attention.causal", "causal"]),
        (
            base().with("llama.use_parallel_residual", Key::Bool(true)),
            ["use_parallel_residual is true", "not supported"],
        ),
        (base().with("llama.rope.dimension_count", Key::U32(8)), ["llama.rope.dimension_count is 8", "heads of 16"]),
        (base().with("llama.attention.value_length", Key::U32(8)), ["llama.attention.value_length is 8", "16"]),
        (
            base().with("llama.attention.head_count", Key::I32s(vec![4, 2])),
            ["llama.attention.head_count", "differs between layers"],
        ),
        (scaled("su"), ["llama.rope.scaling.type is 'su'", "not supported"]),
        (scaled("longrope"), ["rope_factors_short.weight", "missing"]),
        (attention, ["llama.rope.scaling.attn_factor", "yarn"]),
        (half, ["rope_freqs.weight", "8 numbers above 0"]),
    ] {
        let message = read(file).expect_err(words[0]);
        assert!(
            words.iter().all(|word| message.contains(word)) && message.contains("model.gguf"),
            "{words:?}: {message}"
        );
    }
    base().with("llama.kiln.heat", Key::F32(1.5)).with("general.kiln", Key::U32(1)).write(&path);
    assert_eq!(ModelFolder::new(&path).unknown_keys().expect("good"), ["llama.kiln.heat"]);
}

backend_test!(a_file_that_cannot_be_read_is_refused_in_one_line::<B>(device) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    let mut base = llama_keys(64, 1);
    let tensors = llama_tensors(64, 1, 61).into_iter();
    base.tensors = tensors
        .map(|(name, _, shape)| (name, shape.clone(), F32, vec![0; 4 * shape.iter().product::<usize>()]))
        .collect();
    let refusal = |bytes: Vec<u8>| {
        fs::write(&path, bytes).expect("writable");
        let message = ModelFolder::new(&path).load::<B>(&device).map(|_| ()).expect_err("no model").to_string();
        assert!(message.contains("model.gguf") && !message.contains('\n'), "{message}");
        message
    };
    let whole = base.bytes();
    fs::write(&path, &whole).expect("writable");
    ModelFolder::new(&path).load::<B>(&device)?;
    let edited = |at: usize, bytes: &[u8]| {
        let mut edited = whole.clone();
        edited[at..at + bytes.len()].copy_from_slice(bytes);
        refusal(edited)
    };
    assert!(edited(0, b"GGML").contains("not a GGUF file"));
    assert!(edited(0, b"tjgg").contains("older than GGUF"));
    assert!(edited(4, &1u32.to_le_bytes()).contains("version 1;"));
    assert!(edited(4, &4u32.to_le_bytes()).contains("version 4"));
    assert!(edited(4, &3u32.to_be_bytes()).contains("big-endian"));
    assert!(refusal(whole[..whole.len() - 1].to_vec()).contains("truncated"));
    assert!(refusal(Vec::new()).contains("truncated"));
    let with = |edit: &dyn Fn(&mut File)| {
        let mut file = base.clone();
        edit(&mut file);
        refusal(file.bytes())
    };
    let key = |file: &mut File, name: &str, value: Key| *file = file.clone().with(name, value);
    assert!(with(&|file| key(file, "general.alignment", Key::U32(24))).contains("general.alignment is 24"));
    assert!(with(&|file| key(file, "general.alignment", Key::U32(0))).contains("general.alignment is 0"));
    assert!(
        with(&|file| file.keys.push(("llama.block_count".into(), Key::U32(1))))
            .contains("duplicate key llama.block_count")
    );
    assert!(with(&|file| file.tensors.push(file.tensors[2].clone())).contains("duplicate tensor output_norm.weight"));
    for (kind, name) in
        [(20, "IQ4_NL"), (16, "IQ2_XXS"), (9, "Q8_1"), (34, "TQ1_0"), (39, "MXFP4"), (26, "I32"), (77, "type 77")]
    {
        let message = with(&|file| file.tensors[3].2 = kind);
        assert!(message.contains(name) && message.contains("blk.0.attn_q.weight"), "{message}");
    }
    // Rows of 64 are not multiples of blocks of 256.
    let message = with(&|file| file.tensors[3].2 = 12);
    assert!(message.contains("blk.0.attn_q.weight") && message.contains("Q4_K has blocks of 256"), "{message}");
    let message = with(&|file| {
        file.tensors.remove(3);
    });
    assert!(message.contains("do not fit the metadata: blk.0.attn_q.weight is missing"), "{message}");
    let message = with(&|file| file.tensors.push(("blk.0.kiln.weight".into(), vec![1], F32, vec![0; 4])));
    assert!(message.contains("blk.0.kiln.weight is not part of such a model"), "{message}");
    let message = with(&|file| file.tensors[3].1 = vec![32, 128]);
    assert!(message.contains("blk.0.attn_q.weight has shape [32, 128] instead of [64, 64]"), "{message}");
    // The last tensor's offset: overlapping the first, misaligned, and beyond the end.
    let name = b"blk.0.ffn_norm.weight";
    let at = whole.windows(name.len()).position(|window| window == name).expect("a tensor") + name.len() + 4 + 8 + 4;
    assert!(edited(at, &0u64.to_le_bytes()).contains("overlap"));
    assert!(edited(at, &8u64.to_le_bytes()).contains("not a multiple of 32"));
    assert!(edited(at, &(1u64 << 40).to_le_bytes()).contains("truncated"));
    assert!(edited(at, &(u64::MAX - 31).to_le_bytes()).contains("damaged"));
    let message = ModelFolder::new(folder.path().join("none.gguf")).config().expect_err("no file").to_string();
    assert!(message.contains("none.gguf"), "{message}");
});

/// A golden file's model in several parts: tensors are distributed in turn.
fn parts(file: &File, folder: &Path, count: u32) -> Vec<PathBuf> {
    let part = |part: u32| {
        let path = folder.join(format!("model-{:05}-of-{count:05}.gguf", part + 1));
        let mut own = if part == 0 { file.clone() } else { File::default() };
        own = own.with("split.no", Key::U32(part)).with("split.count", Key::U32(count));
        own = own.with("split.tensors.count", Key::U32(file.tensors.len() as u32));
        let tensors = file.tensors.iter().enumerate().filter(|(at, _)| *at as u32 % count == part);
        own.tensors = tensors.map(|(_, tensor)| tensor.clone()).collect();
        own.write(&path);
        path
    };
    (0..count).map(part).collect()
}

backend_test!(parts_are_one_model_and_a_missing_one_is_named::<B>(device) {
    let folder = tempfile::tempdir().expect("a folder");
    let mut file = llama_keys(64, 1);
    for (at, (name, _, shape)) in llama_tensors(64, 1, 61).into_iter().enumerate() {
        let mut next = noise(at as u64 + 1);
        let value = |_| (f32::from(next()) / 256.0 - 0.5).to_le_bytes();
        let bytes = (0..shape.iter().product::<usize>()).flat_map(value).collect();
        file.tensors.push((name, shape, F32, bytes));
    }
    let alone = folder.path().join("alone.gguf");
    file.write(&alone);
    let tokens: Vec<i32> = (0..12).collect();
    let wanted = logits(&ModelFolder::new(&alone).load::<B>(&device)?, &tokens, &device);
    let paths = parts(&file, folder.path(), 3);
    assert_eq!(logits(&ModelFolder::new(&paths[0]).load::<B>(&device)?, &tokens, &device), wanted);

    let refusal = |path: &Path| ModelFolder::new(path).config().expect_err("refused").to_string();
    let message = refusal(&paths[1]);
    assert!(message.contains("part 2 of 3") && message.contains("model-00001-of-00003.gguf"), "{message}");
    let renamed = folder.path().join("renamed.gguf");
    fs::copy(&paths[0], &renamed).expect("a copy");
    let message = refusal(&renamed);
    assert!(message.contains("part 1 of 3") && message.contains("-00001-of-00003.gguf"), "{message}");
    fs::remove_file(&paths[2]).expect("a file");
    let message = refusal(&paths[0]);
    assert!(message.contains("part 3 of 3 is missing") && message.contains("model-00003-of-00003.gguf"), "{message}");
    fs::copy(&paths[1], &paths[2]).expect("a copy");
    assert!(refusal(&paths[0]).contains("is not part 3 of 3"));
    File::default().with("split.no", Key::U32(2)).with("split.count", Key::U32(3)).write(&paths[2]);
    let message = refusal(&paths[0]);
    assert!(message.contains("its parts have 8 tensors instead of 12"), "{message}");
});

/// The program with a model, on the backend under test.
fn with_model(command: &str, model: &Path, more: &[&str]) -> std::process::Output {
    let backend = crate::backend().as_str();
    program()
        .args([command, "--backend", backend, "--model", text(model)])
        .args(more)
        .output()
        .expect("the program starts")
}

#[test]
fn every_command_takes_a_gguf_file_as_a_model() {
    let model = folder("gguf/qwen2.gguf");
    let output =
        with_model("generate", &model, &["--prompt", "The kiln", "--max-tokens", "5", "--temperature", "0", "--json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "", "a good file is no reason for a warning");
    let stdout = String::from_utf8(output.stdout).expect("text");
    let done: Value = serde_json::from_str(stdout.lines().last().expect("a line")).expect("JSON");
    assert!(done["tokens"].as_array().is_some_and(|tokens| !tokens.is_empty()), "{done}");

    let data = tempfile::tempdir().expect("a folder");
    let text_file = data.path().join("text.txt");
    fs::write(&text_file, "Fireclay bricks keep the heat of the kiln. ".repeat(20)).expect("writable");
    let output = with_model("evaluate", &model, &["--data", text(&text_file), "--context", "32", "--json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

    let out = data.path().join("run");
    let output = crate::cli::train(&[
        "--init",
        text(&model),
        "--data",
        text(&text_file),
        "--steps",
        "1",
        "--set",
        "seq_length=16",
        "--set",
        "batch_size=2",
        "--plain",
        "--out",
        text(&out),
    ]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let (family, config) = ModelFolder::new(&out).config().expect("a config");
    assert_eq!((family, config), ModelFolder::new(&model).config().expect("a config"));

    let output = with_model("generate", &folder("gguf/llama.gguf"), &["--prompt", "x"]);
    assert_refused(&output, 1, &["llama.gguf", "no tokenizer", "tokenizer.ggml.model is missing"]);
    let output = with_model("predict", &model, &["--text", "x"]);
    assert_refused(&output, 1, &["qwen2.gguf", "not trained on utterances"]);
    let output = with_model("generate", &folder("gguf"), &["--prompt", "x"]);
    assert_refused(&output, 1, &["there is no config.json, but gemma2.gguf", "instead of its folder"]);
    let damaged = data.path().join("damaged.gguf");
    fs::write(&damaged, &fs::read(&model).expect("a file")[..5000]).expect("writable");
    assert_refused(&with_model("generate", &damaged, &["--prompt", "x"]), 1, &["damaged.gguf", "truncated"]);
    assert_refused(&with_model("generate", &data.path().join("no.gguf"), &["--prompt", "x"]), 1, &["no.gguf"]);
}
