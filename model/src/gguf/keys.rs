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
    if c.experts > 0 {
        return cannot(format!("experts is {}: a mixture of experts", c.experts));
    }
    let architecture = match family {
        Family::Gpt2 => Architecture::Gpt2,
        Family::Llama | Family::Mistral => Architecture::Llama,
        Family::Qwen2 => Architecture::Qwen2,
        Family::Qwen3 => Architecture::Qwen3,
        Family::Gemma2 => Architecture::Gemma2,
        Family::Gemma3 => Architecture::Gemma3,
        Family::Olmo2 | Family::Olmo3 => Architecture::Olmo2,
        Family::Phi3 => Architecture::Phi3,
        Family::Granite => Architecture::Granite,
        Family::SmolLm3 => Architecture::SmolLm3,
        _ => {
            return Err(ConfigError(format!(
                "model_type is '{}'; export supports gpt2, llama, mistral, qwen2, qwen3, gemma2, gemma3_text, olmo2, \
                 olmo3, phi3, granite and smollm3",
                family.model_type()
            )));
        }
    };
    let is_gpt2 = architecture == Architecture::Gpt2;
    let is_gemma = matches!(architecture, Architecture::Gemma2 | Architecture::Gemma3);
    let usual = if is_gpt2 || is_gemma { ActivationKind::GeluTanh } else { ActivationKind::Silu };
    if c.activation != usual {
        return cannot(format!("activation is {:?}", c.activation));
    }
    let is_biased = matches!(
        architecture,
        Architecture::Gpt2 | Architecture::Llama | Architecture::Qwen2 | Architecture::Granite | Architecture::SmolLm3
    );
    if !is_biased && c.qkv_bias {
        return cannot("attention_bias is set");
    }
    if c.intents > 0 || c.tags > 0 {
        return cannot("heads for intents and tags are set");
    }
    if c.classifier.is_some() {
        return cannot("classifier is set");
    }
    let name = architecture.name();
    let mut keys = Vec::new();
    let mut put = |key: &str, value: GgufValue| keys.push((format!("{name}.{key}"), value));
    let size = |value: usize| GgufValue::Size(u32::try_from(value).unwrap_or(u32::MAX));
    put("context_length", size(c.longest_context()));
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
    put("rope.dimension_count", size(c.rotated()));
    put("rope.freq_base", GgufValue::Number(*base as f32));
    let window = c.layers().filter_map(|layer| layer.window).min().filter(|window| *window < c.context_length);
    let patterned = matches!(architecture, Architecture::Gemma2 | Architecture::Gemma3 | Architecture::Olmo2);
    if patterned {
        window_keys(architecture, c, &mut put)?;
    } else if architecture == Architecture::Phi3 {
        if let Some(window) = window {
            put("attention.sliding_window", size(window));
        }
    } else if let Some(window) = window {
        if !c.layer_windows.is_empty() || architecture != Architecture::Llama {
            return cannot(format!("attention has a window of {window} tokens in a model of {}", family.model_type()));
        }
        put("attention.sliding_window", size(window));
        notes.push(format!(
            "llama.cpp ignores the sliding window of {window} tokens, and computes something else beyond it"
        ));
    }
    if let Some(cap) = c.attention_softcap {
        put("attn_logit_softcapping", GgufValue::Number(cap as f32));
    }
    if let Some(cap) = c.logit_softcap {
        put("final_logit_softcapping", GgufValue::Number(cap as f32));
    }
    if architecture == Architecture::Granite {
        put("attention.scale", GgufValue::Number(c.layer(0).attention_scale as f32));
        put("embedding_scale", GgufValue::Number(c.embedding_multiplier as f32));
        put("residual_scale", GgufValue::Number(c.residual_multiplier as f32));
        put("logit_scale", GgufValue::Number(c.logit_divisor as f32));
    } else if c.attention_scale.is_some() {
        return cannot("query_pre_attn_scalar is not head_dim");
    }
    if architecture == Architecture::SmolLm3
        && c.layers_without_positions.iter().copied().ne((0..c.n_layers).filter(|layer| layer % 4 == 3))
    {
        return cannot("no_rope_layers are not every fourth layer");
    }
    let mut scaled = |kind: &str, factor: f64, original: Option<usize>| {
        put("rope.scaling.type", kind.into());
        put("rope.scaling.factor", GgufValue::Number(factor as f32));
        if let Some(original) = original {
            put("rope.scaling.original_context_length", size(original));
        }
    };
    // Only this architecture has factor tensors.
    let has_factors = matches!(architecture, Architecture::Llama | Architecture::Phi3);
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
        RotaryScaling::LongRope { short_factors, long_factors, magnitude, .. } if has_factors => {
            scaled("longrope", 1.0, Some(c.context_length));
            put("rope.scaling.attn_factor", GgufValue::Number(*magnitude as f32));
            let short: Vec<f32> = short_factors.iter().map(|factor| *factor as f32).collect();
            let long = if long_factors.is_empty() { short_factors } else { long_factors };
            factors.push((FACTORS[1], short));
            factors.push((FACTORS[2], long.iter().map(|factor| *factor as f32).collect()));
        }
        RotaryScaling::Llama3 { .. } => return cannot(format!("rope_type is llama3 in a model of {name}")),
        RotaryScaling::LongRope { .. } => return cannot(format!("rope_type is longrope in a model of {name}")),
    }
    Ok(Described { architecture, keys, factors, notes })
}

/// The keys of windows in some layers, which follow a pattern.
///
/// # Errors
/// If windows or their positions are others than the architecture's.
fn window_keys(
    architecture: Architecture,
    c: &TransformerConfig,
    put: &mut impl FnMut(&str, GgufValue),
) -> Result<(), ConfigError> {
    let windows: Vec<Option<usize>> = c.layers().map(|layer| layer.window).collect();
    let Some(window) = windows.iter().copied().flatten().max() else {
        return match architecture {
            Architecture::Olmo2 => Ok(()),
            _ => cannot("layer_types has no sliding_attention"),
        };
    };
    let pattern = match architecture {
        Architecture::Gemma2 => 2,
        Architecture::Gemma3 => 6,
        _ => 4,
    };
    let usual = |(layer, own): (usize, &Option<usize>)| *own == Some(window).filter(|_| (layer + 1) % pattern != 0);
    if !windows.iter().enumerate().all(usual) {
        return cannot(format!("layer_types are not full_attention in every layer of {pattern} alone"));
    }
    put("attention.sliding_window", GgufValue::Size(u32::try_from(window).unwrap_or(u32::MAX)));
    match (&c.positions, &c.window_positions) {
        (_, None) => Ok(()),
        (Positions::Rotary { base, .. }, Some(Positions::Rotary { base: local, scaling: RotaryScaling::None })) => {
            if architecture == Architecture::Gemma3 {
                put("rope.freq_base_swa", GgufValue::Number(*local as f32));
                // Programs that do not know the key take this.
                return if *local == 1e4 { Ok(()) } else { cannot(format!("rope_local_base_freq is {local}")) };
            }
            if local == base { Ok(()) } else { cannot("rope_theta differs by layer_types") }
        }
        _ => cannot("rope_scaling of sliding_attention is set"),
    }
}
