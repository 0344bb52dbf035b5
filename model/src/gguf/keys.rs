//! GGUF metadata of a model config: the inverse of [`config`](super::config).

use fireclay_kernels::ActivationKind;

use super::Architecture;
use super::names::FACTORS;
use super::writer::GgufValue;
use crate::config::{ConfigError, Positions, TransformerConfig};
use crate::hub::Family;
use crate::rotary::RotaryScaling;

/// The metadata and rotary factors of a model, and notes on what llama.cpp computes differently.
pub(crate) struct Described {
    pub(crate) architecture: Architecture,
    pub(crate) keys: Vec<(String, GgufValue)>,
    /// Tensors with one factor per pair of a head's elements.
    pub(crate) factors: Vec<(&'static str, Vec<f32>)>,
    pub(crate) notes: Vec<String>,
}

fn cannot<T>(what: impl std::fmt::Display) -> Result<T, ConfigError> {
    Err(ConfigError(format!("{what}, which GGUF cannot express")))
}

/// Describes a model.
///
/// # Errors
/// Names the setting that GGUF cannot express.
pub(crate) fn of(family: Family, config: &TransformerConfig) -> Result<Described, ConfigError> {
    let c = config;
    let architecture = match family {
        Family::Gpt2 => Architecture::Gpt2,
        Family::Llama | Family::Mistral => Architecture::Llama,
        Family::Qwen2 => Architecture::Qwen2,
        Family::Qwen3 => Architecture::Qwen3,
        Family::Bert | Family::Fireclay => {
            return Err(ConfigError(format!(
                "model_type is '{}'; export supports gpt2, llama, mistral, qwen2 and qwen3",
                family.model_type()
            )));
        }
    };
    let is_gpt2 = architecture == Architecture::Gpt2;
    let usual = if is_gpt2 { ActivationKind::GeluTanh } else { ActivationKind::Silu };
    if c.activation != usual {
        return cannot(format!("activation is {:?}", c.activation));
    }
    if architecture == Architecture::Qwen3 && c.qkv_bias {
        return cannot("attention_bias is set");
    }
    if c.intents > 0 || c.tags > 0 {
        return cannot("heads for intents and tags are set");
    }
    let name = architecture.name();
    let mut keys = Vec::new();
    let mut put = |key: &str, value: GgufValue| keys.push((format!("{name}.{key}"), value));
    let size = |value: usize| GgufValue::Size(u32::try_from(value).unwrap_or(u32::MAX));
    put("context_length", size(c.context_length));
    put("embedding_length", size(c.d_model));
    put("block_count", size(c.n_layers));
    put("feed_forward_length", size(c.d_ff));
    put("attention.head_count", size(c.n_heads));
    put("attention.head_count_kv", size(c.n_kv_heads));
    put("vocab_size", size(c.vocab_size));
    let epsilon = if is_gpt2 { "attention.layer_norm_epsilon" } else { "attention.layer_norm_rms_epsilon" };
    put(epsilon, GgufValue::Number(c.norm_epsilon as f32));
    let (mut factors, mut notes) = (Vec::new(), Vec::new());
    let Positions::Rotary { base, scaling } = &c.positions else {
        return Ok(Described { architecture, keys, factors, notes });
    };
    put("attention.key_length", size(c.head_dim));
    put("attention.value_length", size(c.head_dim));
    put("rope.dimension_count", size(c.head_dim));
    put("rope.freq_base", GgufValue::Number(*base as f32));
    let window = c.layers().filter_map(|layer| layer.window).min().filter(|window| *window < c.context_length);
    if let Some(window) = window {
        if !c.layer_windows.is_empty() || architecture != Architecture::Llama {
            return cannot(format!("attention has a window of {window} tokens in a model of {}", family.model_type()));
        }
        put("attention.sliding_window", size(window));
        notes.push(format!(
            "llama.cpp ignores the sliding window of {window} tokens, and computes something else beyond it"
        ));
    }
    let mut scaled = |kind: &str, factor: f64, original: Option<usize>| {
        put("rope.scaling.type", kind.into());
        put("rope.scaling.factor", GgufValue::Number(factor as f32));
        if let Some(original) = original {
            put("rope.scaling.original_context_length", size(original));
        }
    };
    // Only this architecture has factor tensors.
    let has_factors = architecture == Architecture::Llama;
    match scaling {
        RotaryScaling::None => {}
        RotaryScaling::Linear { factor } => scaled("linear", *factor, None),
        RotaryScaling::Llama3 { .. } if has_factors => {
            let plain = RotaryScaling::None.frequencies(c.head_dim, *base);
            let bent = scaling.frequencies(c.head_dim, *base);
            factors.push((FACTORS[0], plain.iter().zip(bent).map(|(plain, bent)| (plain / bent) as f32).collect()));
        }
        RotaryScaling::Yarn { factor, attention_factor, beta_fast, beta_slow, original_context_length, truncate } => {
            if !truncate {
                return cannot("rope_scaling.truncate is false");
            }
            scaled("yarn", *factor, Some(*original_context_length));
            put("rope.scaling.yarn_beta_fast", GgufValue::Number(*beta_fast as f32));
            put("rope.scaling.yarn_beta_slow", GgufValue::Number(*beta_slow as f32));
            if let Some(magnitude) = attention_factor {
                let usual = 0.1 * factor.max(1.0).ln() + 1.0;
                put("rope.scaling.attn_factor", GgufValue::Number((magnitude / usual) as f32));
            }
        }
        RotaryScaling::LongRope { short_factors, magnitude } if has_factors => {
            scaled("longrope", 1.0, Some(c.context_length));
            put("rope.scaling.attn_factor", GgufValue::Number(*magnitude as f32));
            let short: Vec<f32> = short_factors.iter().map(|factor| *factor as f32).collect();
            factors.push((FACTORS[1], short.clone()));
            factors.push((FACTORS[2], short));
        }
        RotaryScaling::Llama3 { .. } => return cannot(format!("rope_type is llama3 in a model of {name}")),
        RotaryScaling::LongRope { .. } => return cannot(format!("rope_type is longrope in a model of {name}")),
    }
    Ok(Described { architecture, keys, factors, notes })
}
