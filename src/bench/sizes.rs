//! Models and batches by name.

use burn::tensor::FloatDType;
use fireclay_model::{Family, LoraConfig, TransformerConfig};

use crate::failure::Failure;
use crate::recipe::Recipe;

/// Sizes of `bench train`; other parts of a recipe's name are fixed.
pub const TRAINERS: [&str; 13] = [
    "gpt2-124m",
    "gpt2-124m-experts",
    "shakespeare-char",
    "llama-1b",
    "qwen3-0.6b-full",
    "qwen3-0.6b-lora",
    "llama-8b-lora",
    "gemma-3-1b",
    "phi-4-mini",
    "intent-slot",
    "cpu-4x128",
    "cpu-6x384",
    "cpu-6x256",
];

/// Sizes of `bench decode`.
pub const DECODERS: [&str; 11] = [
    "qwen3-0.6b",
    "qwen3-30b-a3b",
    "gpt-oss-20b",
    "llama-15m",
    "gpt2-124m",
    "llama-1b",
    "qwen2.5-0.5b",
    "llama-8b",
    "qwen3-4b",
    "gemma-3-1b",
    "phi-4-mini",
];

/// Training of a language model.
pub(super) struct TrainSize {
    pub(super) what: String,
    /// Prefix of the case, before batch and length.
    pub(super) label: &'static str,
    pub(super) recipe: Recipe,
    pub(super) vocab_size: usize,
    /// The model, if the recipe has no settings for its shape.
    pub(super) config: Option<TransformerConfig>,
    /// An adapter on all linear layers instead of all weights, which are in the activations' dtype
    /// then, and what names the layers.
    pub(super) adapter: Option<(Family, LoraConfig)>,
}

/// For models of their own shape.
const LARGE_ROWS: &[(&str, &str)] =
    &[("batch_size", "4"), ("seq_length", "2048"), ("accumulation", "1"), ("precision", "bf16")];

/// A named language model to train.
pub(super) fn trainer(name: &str) -> Result<TrainSize, Failure> {
    let (recipe, settings, vocab_size, what, label): (_, &[(&str, &str)], _, _, _) = match name {
        "gpt2-124m" => ("gpt2-124m", &[("accumulation", "1")], 50_304, "train gpt2-124m", ""),
        // As many parameters take part in a token as in the dense model.
        "gpt2-124m-experts" => (
            "gpt2-124m",
            &[("accumulation", "1"), ("experts", "16"), ("experts_per_token", "2"), ("d_ff", "1536")],
            50_304,
            "train gpt2-124m",
            "2 of 16 experts",
        ),
        "shakespeare-char" => ("shakespeare-char-gpu", &[("precision", "bf16")], 65, "train step", "char 6x384"),
        "llama-1b" => (
            "llama-15m",
            &[
                ("d_model", "2048"),
                ("n_layers", "16"),
                ("n_heads", "32"),
                ("n_kv_heads", "8"),
                ("d_ff", "8192"),
                ("batch_size", "4"),
                ("seq_length", "2048"),
                ("accumulation", "1"),
                ("precision", "bf16"),
            ],
            50_257,
            "train step",
            "llama 1b 16x2048",
        ),
        "qwen3-0.6b-full" => ("llama-15m", FINE_TUNING, 151_936, "train step", "qwen3 0.6b, all weights"),
        "qwen3-0.6b-lora" => ("llama-15m", FINE_TUNING, 151_936, "train step", "qwen3 0.6b, LoRA of rank 16"),
        "llama-8b-lora" => ("llama-15m", TWO_ROWS, 128_256, "train step", "llama 8b, LoRA of rank 16"),
        "cpu-4x128" => (
            "shakespeare-char-cpu",
            &[("d_model", "128"), ("n_layers", "4"), ("n_heads", "4"), ("seq_length", "64"), ("batch_size", "12")],
            65,
            "train",
            "4 layers of 128",
        ),
        "cpu-6x384" => (
            "shakespeare-char-cpu",
            &[("d_model", "384"), ("n_layers", "6"), ("n_heads", "6"), ("seq_length", "256"), ("batch_size", "8")],
            65,
            "train",
            "6 layers of 384",
        ),
        "cpu-6x256" => (
            "shakespeare-char-cpu",
            &[("d_model", "256"), ("n_layers", "6"), ("n_heads", "8"), ("seq_length", "64"), ("batch_size", "32")],
            8192,
            "train",
            "6 layers of 256, V=8192",
        ),
        "gemma-3-1b" => ("llama-15m", LARGE_ROWS, 262_144, "train step", "gemma 3 1b"),
        "phi-4-mini" => ("llama-15m", LARGE_ROWS, 200_064, "train step", "phi 4 mini"),
        _ => return Err(unknown("train", name, &TRAINERS)),
    };
    let recipe = Recipe::shipped(recipe)?.with_all(settings.iter().copied().chain([("schedule", "constant")]))?;
    let config = match name {
        "qwen3-0.6b-full" | "qwen3-0.6b-lora" => Some(decoder("qwen3-0.6b")?.0),
        "llama-8b-lora" => Some(decoder("llama-8b")?.0),
        _ if settings == LARGE_ROWS => Some(decoder(name)?.0),
        _ => None,
    };
    let family = match name {
        "qwen3-0.6b-lora" => Some(Family::Qwen3),
        "llama-8b-lora" => Some(Family::Llama),
        _ => None,
    };
    let adapter = family.map(|family| (family, LoraConfig { rank: 16, alpha: 32.0, ..LoraConfig::default() }));
    Ok(TrainSize { what: what.into(), label, recipe, vocab_size, config, adapter })
}

/// Settings of fine-tuning, other than the model's.
const FINE_TUNING: &[(&str, &str)] =
    &[("batch_size", "8"), ("seq_length", "2048"), ("accumulation", "1"), ("precision", "bf16")];

const TWO_ROWS: &[(&str, &str)] =
    &[("batch_size", "2"), ("seq_length", "2048"), ("accumulation", "1"), ("precision", "bf16")];

/// A named decoder: its shape, and its dtype where the device supports it.
pub(super) fn decoder(name: &str) -> Result<(TransformerConfig, FloatDType), Failure> {
    match name {
        "qwen3-0.6b" => {
            let config = TransformerConfig::qwen3(151_936, 32_768, 1024, 28, 16, 128);
            Ok((config.with_n_kv_heads(8).with_d_ff(3072).with_tied_embeddings(true), FloatDType::BF16))
        }
        "qwen3-30b-a3b" => {
            let config = TransformerConfig::qwen3_moe(151_936, 32_768, 2048, 48, 32, 128);
            Ok((config.with_n_kv_heads(4).with_d_ff(768), FloatDType::BF16))
        }
        "gpt-oss-20b" => {
            let config = TransformerConfig::gpt_oss(201_088, 32_768, 2880, 24, 64, 128);
            Ok((config.with_n_kv_heads(8).with_head_dim(64), FloatDType::BF16))
        }
        "llama-15m" => Ok((TransformerConfig::llama(32_000, 1024, 288, 6, 6).with_d_ff(768), FloatDType::F32)),
        "gpt2-124m" => Ok((TransformerConfig::gpt2(50_257, 1024, 768, 12, 12), FloatDType::BF16)),
        // Llama 3.2's.
        "llama-1b" => {
            let config = TransformerConfig::llama(128_256, 32_768, 2048, 16, 32).with_n_kv_heads(8).with_d_ff(8192);
            Ok((config.with_tied_embeddings(true), FloatDType::BF16))
        }
        "qwen2.5-0.5b" => {
            let config = TransformerConfig::qwen2(151_936, 32_768, 896, 24, 14).with_n_kv_heads(2).with_d_ff(4864);
            Ok((config.with_tied_embeddings(true), FloatDType::BF16))
        }
        // Llama 3.1's.
        "llama-8b" => {
            let config = TransformerConfig::llama(128_256, 32_768, 4096, 32, 32).with_n_kv_heads(8).with_d_ff(14_336);
            Ok((config, FloatDType::BF16))
        }
        "qwen3-4b" => {
            let config = TransformerConfig::qwen3(151_936, 32_768, 2560, 36, 32, 128);
            Ok((config.with_n_kv_heads(8).with_d_ff(9728).with_tied_embeddings(true), FloatDType::BF16))
        }
        "gemma-3-1b" => {
            let config = TransformerConfig::gemma3(262_144, 32_768, 1152, 26, 4, 512);
            Ok((config.with_head_dim(256).with_n_kv_heads(1).with_d_ff(6912), FloatDType::BF16))
        }
        // Three quarters of each head rotate.
        "phi-4-mini" => {
            let config = TransformerConfig::llama(200_064, 4096, 3072, 32, 24).with_n_kv_heads(8).with_d_ff(8192);
            Ok((config.with_rotary_dim(Some(96)).with_tied_embeddings(true), FloatDType::BF16))
        }
        _ => Err(unknown("decode", name, &DECODERS)),
    }
}

fn unknown(bench: &str, name: &str, known: &[&str]) -> Failure {
    Failure::usage(format!("--size {name}: bench {bench} knows {}", known.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_is_a_model_of_as_many_parameters_as_its_original() {
        let parameters = |name: &str| {
            let (config, _) = decoder(name).expect("a known size");
            config.validate().expect("a valid config");
            config.parameter_count() as f64 / 1e9
        };
        // In billions, as their authors count them.
        for (name, wanted) in [
            ("qwen3-0.6b", 0.596),
            ("qwen3-4b", 4.022),
            ("qwen3-30b-a3b", 30.53),
            ("gpt-oss-20b", 20.91),
            ("llama-1b", 1.236),
            ("llama-8b", 8.030),
            ("qwen2.5-0.5b", 0.494),
            ("gemma-3-1b", 1.000),
            ("phi-4-mini", 3.836),
            ("gpt2-124m", 0.124),
            // With a head of its own, unlike the original.
            ("llama-15m", 0.0244),
        ] {
            let own = parameters(name);
            assert!((own / wanted - 1.0).abs() < 5e-3, "{name}: {own} billion parameters instead of {wanted}");
        }
        for name in TRAINERS {
            assert!(name == "intent-slot" || trainer(name).is_ok(), "{name}");
        }
        DECODERS.iter().for_each(|name| assert!(parameters(name) > 0.0));
    }
}
