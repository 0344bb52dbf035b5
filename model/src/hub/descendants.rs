//! `config.json` of Llama's descendants with settings of their own: Gemma, OLMo, SmolLM3, Phi-3 and
//! Granite.

use fireclay_kernels::ActivationKind;
use serde_json::{Map, Value, json};

use super::family::Family;
use super::fields::{Fields, activation_name, by_layer, layer_types, write_scaling};
use crate::config::{ConfigError, NormPlacement, Positions, TransformerConfig};
use crate::rotary::RotaryScaling;

/// The default values of transformers.
struct Defaults {
    context_length: usize,
    /// `None` for the number of query heads.
    n_kv_heads: Option<usize>,
    /// `None` for the width of the residual stream over the number of query heads.
    head_dim: Option<usize>,
    norm_epsilon: f64,
    rotary_base: f64,
    tied_embeddings: bool,
    /// Layers from one with full attention to the next, if others have a window.
    window_pattern: usize,
}

impl Defaults {
    fn of(family: Family) -> Self {
        let llama = Self {
            context_length: 2048,
            n_kv_heads: None,
            head_dim: None,
            norm_epsilon: 1e-6,
            rotary_base: 1e4,
            tied_embeddings: false,
            window_pattern: 1,
        };
        let gemma = Self { n_kv_heads: Some(4), head_dim: Some(256), tied_embeddings: true, ..llama };
        match family {
            Family::Gemma2 => Self { context_length: 8192, window_pattern: 2, ..gemma },
            Family::Gemma3 => Self { context_length: 131_072, rotary_base: 1e6, window_pattern: 6, ..gemma },
            Family::Olmo2 => Self { norm_epsilon: 1e-5, ..llama },
            Family::Olmo3 => Self { norm_epsilon: 1e-5, rotary_base: 5e5, window_pattern: 4, ..llama },
            Family::SmolLm3 => {
                Self { context_length: 32_768, n_kv_heads: Some(4), rotary_base: 2e6, tied_embeddings: true, ..llama }
            }
            Family::Phi3 => Self { context_length: 4096, norm_epsilon: 1e-5, ..llama },
            _ => llama,
        }
    }
}

/// The rotary base of Gemma 3's and ModernBERT's layers with a window.
const LOCAL_BASE: f64 = 1e4;
/// The context of Phi-3's original training, where it is not given.
const PHI3_CONTEXT: usize = 4096;

pub(super) fn read(fields: &Fields<'_>, family: Family) -> Result<TransformerConfig, ConfigError> {
    let defaults = Defaults::of(family);
    let (d_model, n_heads) = (fields.size("hidden_size")?, fields.size("num_attention_heads")?);
    let n_layers = fields.size("num_hidden_layers")?;
    let context = fields.size_or("max_position_embeddings", defaults.context_length)?;
    let base = TransformerConfig::llama(fields.size("vocab_size")?, context, d_model, n_layers, n_heads);
    let n_kv_heads = match (fields.0.get("num_key_value_heads"), defaults.n_kv_heads) {
        (None, Some(heads)) => heads,
        _ => fields.size_or("num_key_value_heads", n_heads)?,
    };
    let head_dim = fields.size_or("head_dim", defaults.head_dim.unwrap_or(d_model / n_heads.max(1)))?;
    let attention_bias = family != Family::Phi3 && fields.flag_or("attention_bias", false)?;
    let feed_forward_bias = matches!(family, Family::SmolLm3 | Family::Granite) && fields.flag_or("mlp_bias", false)?;
    let (sliding_window, layer_windows) = windows(fields, family, n_layers, &defaults)?;
    let is_gemma = matches!(family, Family::Gemma2 | Family::Gemma3);
    let activation =
        if is_gemma { ("hidden_activation", ActivationKind::GeluTanh) } else { ("hidden_act", ActivationKind::Silu) };
    let (dropout, base) = (
        fields.number_or("attention_dropout", 0.0)?,
        TransformerConfig {
            n_kv_heads,
            head_dim,
            d_ff: fields.size("intermediate_size")?,
            norm_epsilon: fields.number_or("rms_norm_eps", defaults.norm_epsilon)?,
            activation: fields.activation(activation.0, activation.1)?,
            tied_embeddings: fields.flag_or("tie_word_embeddings", defaults.tied_embeddings)?,
            sliding_window,
            layer_windows,
            qkv_bias: attention_bias,
            output_bias: attention_bias,
            feed_forward_bias,
            ..base
        },
    );
    let rotary_dim = match family {
        Family::Phi3 => rotary_dim(fields, head_dim)?,
        _ => {
            fields.refuse_parts()?;
            None
        }
    };
    let rotated = rotary_dim.unwrap_or(head_dim);
    let (positions, window_positions, context_length) = match family {
        Family::Gemma3 | Family::Olmo3 => positions_by_kind(fields, family, context, rotated, defaults.rotary_base)?,
        _ => {
            let original = (family == Family::Phi3).then_some(PHI3_CONTEXT);
            let (positions, reach) =
                fields.rotary_part(context, rotated, defaults.rotary_base, original.unwrap_or(context))?;
            (positions, None, reach)
        }
    };
    let base = TransformerConfig { positions, window_positions, rotary_dim, context_length, dropout, ..base };
    Ok(match family {
        Family::Gemma2 | Family::Gemma3 => {
            let softcap = |name: &str| fields.get(name).map(|_| fields.number_or(name, 0.0)).transpose();
            fields.refuse(&[("use_bidirectional_attention", json!(false))])?;
            let scalar = fields.number_or("query_pre_attn_scalar", 256.0)?;
            let attention_softcap = match (family, fields.0.get("attn_logit_softcapping")) {
                (Family::Gemma2, None) => Some(50.0),
                (Family::Gemma2, _) => softcap("attn_logit_softcapping")?,
                (_, None | Some(Value::Null)) => None,
                // transformers reads it and passes it over.
                (_, Some(cap)) => {
                    return Err(ConfigError(format!(
                        "config.json: attn_logit_softcapping is {cap}; only null is supported in models of gemma3_text"
                    )));
                }
            };
            let logit_softcap = match (family, fields.0.get("final_logit_softcapping")) {
                (Family::Gemma2, None) => Some(30.0),
                _ => softcap("final_logit_softcapping")?,
            };
            TransformerConfig {
                norm_placement: NormPlacement::Both,
                qk_norm: family == Family::Gemma3,
                attention_scale: (scalar != head_dim as f64).then(|| scalar.powf(-0.5)),
                attention_softcap,
                logit_softcap,
                embedding_multiplier: (d_model as f64).sqrt(),
                ..base
            }
        }
        Family::Olmo2 | Family::Olmo3 => {
            TransformerConfig { norm_placement: NormPlacement::Output, qk_norm: true, joint_qk_norm: true, ..base }
        }
        Family::SmolLm3 => {
            TransformerConfig { layers_without_positions: layers_without_positions(fields, n_layers)?, ..base }
        }
        Family::Phi3 => {
            // transformers takes no other.
            if let Positions::Rotary { scaling, .. } = &base.positions
                && !matches!(scaling, RotaryScaling::None | RotaryScaling::LongRope { .. })
            {
                return Err(ConfigError("config.json: rope_scaling of phi3 is supported as longrope only".into()));
            }
            // One probability here.
            for name in ["resid_pdrop", "embd_pdrop"] {
                if fields.number_or(name, 0.0)? != dropout {
                    let shown = fields.get(name).cloned().unwrap_or_default();
                    return Err(ConfigError(format!(
                        "config.json: {name} is {shown}; only {dropout} is supported, as attention_dropout is"
                    )));
                }
            }
            base
        }
        Family::Granite => {
            let scale = fields.number_or("attention_multiplier", 1.0)?;
            TransformerConfig {
                attention_scale: (scale != 1.0 / (head_dim as f64).sqrt()).then_some(scale),
                embedding_multiplier: fields.number_or("embedding_multiplier", 1.0)?,
                residual_multiplier: fields.number_or("residual_multiplier", 1.0)?,
                logit_divisor: fields.number_or("logits_scaling", 1.0)?,
                ..base
            }
        }
        _ => base,
    })
}

/// The window of all layers, or else of each.
fn windows(
    fields: &Fields<'_>,
    family: Family,
    n_layers: usize,
    defaults: &Defaults,
) -> Result<(Option<usize>, Vec<usize>), ConfigError> {
    let default = if family == Family::Phi3 { None } else { Some(4096) };
    let window = match (family, fields.0.get("sliding_window")) {
        (Family::Olmo2 | Family::Granite, _) => return Ok((None, Vec::new())),
        (Family::SmolLm3, _) if !fields.flag_or("use_sliding_window", false)? => None,
        (Family::SmolLm3, None) => None,
        (_, None) => default,
        (_, Some(_)) => fields.optional_size("sliding_window")?,
    };
    if window == Some(0) {
        return Err(ConfigError("config.json: sliding_window is 0; it must be at least 1".into()));
    }
    if family == Family::Phi3 {
        return Ok((window, Vec::new()));
    }
    if let Some(types) = layer_types(fields, window, n_layers)? {
        return Ok(by_layer(types));
    }
    // The allowed maximum, which is checked later.
    let n_layers = n_layers.min(1 << 14);
    if family == Family::SmolLm3 {
        let without = layers_without_positions(fields, n_layers)?;
        return Ok(by_layer((0..n_layers).map(|layer| window.filter(|_| without.contains(&layer))).collect()));
    }
    let pattern = match family {
        Family::Gemma3 => fields.size_or("sliding_window_pattern", defaults.window_pattern)?,
        _ => defaults.window_pattern,
    };
    if pattern == 0 {
        return Err(ConfigError("config.json: sliding_window_pattern is 0; it must be at least 1".into()));
    }
    Ok(by_layer((1..=n_layers).map(|layer| window.filter(|_| !layer.is_multiple_of(pattern))).collect()))
}

/// SmolLM3's layers without rotary positions.
fn layers_without_positions(fields: &Fields<'_>, n_layers: usize) -> Result<Vec<usize>, ConfigError> {
    let n_layers = n_layers.min(1 << 14);
    let Some(rotates) = fields.get("no_rope_layers") else {
        let interval = fields.size_or("no_rope_layer_interval", 4)?;
        if interval == 0 {
            return Err(ConfigError("config.json: no_rope_layer_interval is 0; it must be at least 1".into()));
        }
        return Ok((0..n_layers).filter(|layer| (layer + 1).is_multiple_of(interval)).collect());
    };
    let rotates = rotates.as_array().filter(|rotates| rotates.len() >= n_layers);
    let flags = rotates.and_then(|rotates| {
        rotates[..n_layers].iter().map(|flag| flag.as_u64().filter(|flag| *flag < 2)).collect::<Option<Vec<_>>>()
    });
    let flags = flags.ok_or_else(|| Fields::wrong("no_rope_layers", "a list with 0 or 1 for each layer"))?;
    Ok((0..n_layers).filter(|layer| flags[*layer] == 0).collect())
}

/// Phi-3's number of rotating elements of a head, if it is not all.
fn rotary_dim(fields: &Fields<'_>, head_dim: usize) -> Result<Option<usize>, ConfigError> {
    let inner = ["rope_scaling", "rope_parameters"].into_iter().find_map(|name| {
        let scaling = Fields(fields.get(name)?);
        scaling.get("partial_rotary_factor").is_some().then(|| scaling.number_or("partial_rotary_factor", 1.0))
    });
    let share = match inner {
        Some(share) => share?,
        None => fields.number_or("partial_rotary_factor", 1.0)?,
    };
    if !(share > 0.0 && share <= 1.0) {
        return Err(ConfigError(format!(
            "config.json: partial_rotary_factor is {share}; it must be above 0, and 1 at most"
        )));
    }
    let rotated = (head_dim as f64 * share) as usize;
    Ok((rotated != head_dim).then_some(rotated))
}

/// Positions of layers with full attention and of those with a window, and the context.
pub(super) fn positions_by_kind(
    fields: &Fields<'_>,
    family: Family,
    context_length: usize,
    rotated: usize,
    base: f64,
) -> Result<(Positions, Option<Positions>, usize), ConfigError> {
    let nothing = Value::Null;
    let nested = |kind: &str| {
        let of = |name: &str| fields.get(name).and_then(|scaling| scaling.get(kind)).filter(|own| !own.is_null());
        of("rope_parameters").or_else(|| of("rope_scaling"))
    };
    let is_flat =
        |scaling: &&Value| ["full_attention", "sliding_attention"].iter().all(|kind| scaling.get(kind).is_none());
    let flat = || ["rope_scaling", "rope_parameters"].into_iter().find_map(|name| fields.get(name).filter(is_flat));
    let global = if family == Family::ModernBert { "global_rope_theta" } else { "rope_theta" };
    let base = fields.number_or(global, base)?;
    let local = match family {
        Family::Gemma3 => fields.number_or("rope_local_base_freq", LOCAL_BASE)?,
        Family::ModernBert => fields.number_or("local_rope_theta", LOCAL_BASE)?,
        _ => base,
    };
    let full = Fields(nested("full_attention").or_else(flat).unwrap_or(&nothing));
    let (full, reach) = fields.scaled(&full, base, context_length, rotated, context_length)?;
    let window = Fields(nested("sliding_attention").unwrap_or(&nothing));
    let (window, window_reach) = fields.scaled(&window, local, context_length, rotated, context_length)?;
    Ok((full, Some(window), reach.min(window_reach)))
}

/// The keys of a family, besides those of all.
pub(super) fn write(family: Family, c: &TransformerConfig) -> Value {
    let mut own = Map::new();
    let mut put = |fields: Value| own.extend(fields.as_object().cloned().unwrap_or_default());
    put(json!({
        "max_position_embeddings": c.longest_context(), "hidden_size": c.d_model,
        "num_hidden_layers": c.n_layers, "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv_heads, "head_dim": c.head_dim, "intermediate_size": c.d_ff,
        "rms_norm_eps": c.norm_epsilon, "attention_dropout": c.dropout,
        // The default of transformers may be beyond the vocabulary, which it refuses.
        "pad_token_id": null,
    }));
    let is_gemma = matches!(family, Family::Gemma2 | Family::Gemma3);
    put(match is_gemma {
        true => json!({ "hidden_activation": activation_name(c.activation) }),
        false => json!({ "hidden_act": activation_name(c.activation) }),
    });
    if family != Family::Phi3 {
        put(json!({ "attention_bias": c.qkv_bias }));
    }
    if matches!(family, Family::SmolLm3 | Family::Granite) {
        put(json!({ "mlp_bias": c.feed_forward_bias }));
    }
    let windows: Vec<Option<usize>> = c.layers().map(|layer| layer.window).collect();
    let window = windows.iter().copied().flatten().max();
    let kind = |window: &Option<usize>| if window.is_some() { "sliding_attention" } else { "full_attention" };
    let types: Vec<&str> = windows.iter().map(kind).collect();
    let rotary = |positions: &Positions| match positions {
        Positions::Rotary { base, scaling } => (*base, write_scaling(scaling, c.context_length)),
        _ => (0.0, Value::Null),
    };
    let (base, scaling) = rotary(&c.positions);
    // As versions 4 and 5 of transformers name them.
    let parameters = |base: f64, scaling: &Value| {
        let mut parameters = scaling.clone();
        if !parameters.is_object() {
            parameters = json!({ "rope_type": "default" });
        }
        parameters["rope_theta"] = json!(base);
        parameters
    };
    put(json!({ "rope_theta": base, "rope_scaling": scaling }));
    match family {
        Family::Gemma3 | Family::Olmo3 => {
            let (local, local_scaling) = rotary(c.window_positions.as_ref().unwrap_or(&c.positions));
            put(json!({ "rope_parameters": {
                "full_attention": parameters(base, &scaling), "sliding_attention": parameters(local, &local_scaling),
            } }));
            if family == Family::Gemma3 {
                put(json!({ "rope_local_base_freq": local }));
            }
        }
        Family::Phi3 => {
            let share = c.rotated() as f64 / c.head_dim as f64;
            put(json!({
                "partial_rotary_factor": share, "sliding_window": c.sliding_window, "resid_pdrop": c.dropout,
                "embd_pdrop": c.dropout, "original_max_position_embeddings": c.context_length,
            }));
        }
        _ => {}
    }
    if matches!(family, Family::Gemma2 | Family::Gemma3 | Family::Olmo3 | Family::SmolLm3) {
        put(json!({ "layer_types": types }));
    }
    match family {
        // One for all, also if no layer has it.
        Family::Gemma2 | Family::Gemma3 | Family::Olmo3 => put(json!({ "sliding_window": window.unwrap_or(4096) })),
        Family::SmolLm3 => {
            let rotates = |layer: usize| u8::from(!c.layers_without_positions.contains(&layer));
            put(json!({
                "use_sliding_window": window.is_some(), "sliding_window": window,
                "no_rope_layers": (0..c.n_layers).map(rotates).collect::<Vec<_>>(),
            }));
        }
        _ => {}
    }
    if is_gemma {
        let scalar = c.attention_scale.map_or(c.head_dim as f64, |scale| scale.powi(-2));
        // transformers wants an integer.
        let whole = (scalar - scalar.round()).abs() < 1e-9 * scalar;
        put(json!({
            "query_pre_attn_scalar": if whole { json!(scalar.round() as u64) } else { json!(scalar) },
            "final_logit_softcapping": c.logit_softcap, "attn_logit_softcapping": c.attention_softcap,
        }));
    }
    if family == Family::Granite {
        put(json!({
            "attention_multiplier": c.attention_scale.unwrap_or(1.0 / (c.head_dim as f64).sqrt()),
            "embedding_multiplier": c.embedding_multiplier, "residual_multiplier": c.residual_multiplier,
            "logits_scaling": c.logit_divisor,
        }));
    }
    Value::Object(own)
}
