//! Mixtures of experts on the hub: Mixtral, Qwen3-MoE, OLMoE and gpt-oss.

use fireclay_kernels::ActivationKind;
use serde_json::{Map, Value, json};

use super::family::Family;
use super::fields::{Fields, activation_name, by_layer, layer_types, write_scaling};
use super::tensor::{HubTensor, whole};
use crate::config::{ConfigError, Positions, TransformerConfig};
use crate::rotary::RotaryScaling;

/// The gate of QuickGELU, which gpt-oss's experts have.
const QUICK_GELU: f64 = 1.702;

/// The tensors of a parameter of a mixture; names of the block begin with `layer`.
///
/// Each expert has its own, gate and up apart, but for gpt-oss: there experts are stacked
/// `[experts, d_input, d_output]`, with the columns of gate and up alternating.
pub(super) fn tensors(
    family: Family,
    config: &TransformerConfig,
    layer: &str,
    field: &str,
    path: &str,
) -> Option<Vec<HubTensor>> {
    let (d_model, d_ff, experts) = (config.d_model, config.d_ff, config.experts);
    let at = |name: &str| format!("{layer}{name}");
    if family == Family::GptOss {
        let stacked = |name: &str, transposed: bool, interleaved: Option<usize>| HubTensor {
            stacked: Some(experts),
            transposed,
            interleaved,
            ..whole(at(&format!("mlp.experts.{name}")), path)
        };
        return Some(vec![match field {
            "router" => whole(at("mlp.router.weight"), path),
            "router_bias" => whole(at("mlp.router.bias"), path),
            "up" => stacked("gate_up_proj", true, Some(2 * d_ff)),
            "up_bias" => stacked("gate_up_proj_bias", false, Some(2 * d_ff)),
            "down" => stacked("down_proj", true, None),
            "down_bias" => stacked("down_proj_bias", false, None),
            _ => return None,
        }]);
    }
    let (mixture, [gate, up, down]) = match family {
        Family::Mixtral => ("block_sparse_moe", ["w1", "w3", "w2"]),
        Family::Qwen3Moe | Family::Olmoe => ("mlp", ["gate_proj", "up_proj", "down_proj"]),
        _ => return None,
    };
    // The rows of each expert, and within them those of its projections.
    let each = |projections: &[&str], rows: usize| {
        let tensor = |(number, (expert, name)): (usize, (usize, &str))| HubTensor {
            rows: Some(number * rows..(number + 1) * rows),
            ..whole(at(&format!("{mixture}.experts.{expert}.{name}.weight")), path)
        };
        let names = (0..experts).flat_map(|expert| projections.iter().map(move |name| (expert, *name)));
        names.enumerate().map(tensor).collect()
    };
    Some(match field {
        "router" => vec![whole(at(&format!("{mixture}.gate.weight")), path)],
        "up" if config.gated => each(&[gate, up], d_ff),
        "down" => each(&[down], d_model),
        _ => return None,
    })
}

/// Reads a `config.json`.
pub(super) fn read(fields: &Fields<'_>, family: Family) -> Result<TransformerConfig, ConfigError> {
    let (d_model, n_heads) = (fields.size("hidden_size")?, fields.size("num_attention_heads")?);
    let n_layers = fields.size("num_hidden_layers")?;
    // The defaults of transformers.
    let (context, kv_heads, epsilon, base) = match family {
        Family::Mixtral => (4096 * 32, 8, 1e-5, 1e6),
        Family::Qwen3Moe => (32_768, 4, 1e-6, 1e4),
        Family::GptOss => (131_072, 8, 1e-5, 150_000.0),
        _ => (4096, n_heads, 1e-5, 1e4),
    };
    // Null means the number of query heads.
    let kv_heads = if fields.0.get("num_key_value_heads").is_some() { n_heads } else { kv_heads };
    let context_length = fields.size_or("max_position_embeddings", context)?;
    let head_dim = if family == Family::GptOss { 64 } else { d_model / n_heads.max(1) };
    let head_dim = fields.size_or("head_dim", head_dim)?;
    let llama = TransformerConfig::llama(fields.size("vocab_size")?, context_length, d_model, n_layers, n_heads);
    let (positions, context_length) = match family {
        // Without parameters, those of the published models.
        Family::GptOss if fields.get("rope_parameters").is_none() && fields.get("rope_scaling").is_none() => {
            let scaling = RotaryScaling::Yarn {
                factor: 32.0,
                attention_factor: None,
                beta_fast: 32.0,
                beta_slow: 1.0,
                original_context_length: 4096,
                truncate: false,
            };
            (Positions::Rotary { base: fields.number_or("rope_theta", base)?, scaling }, context_length)
        }
        _ => {
            fields.refuse_parts()?;
            fields.rotary_part(context_length, head_dim, base, context_length)?
        }
    };
    let experts = match family {
        // Either name, as transformers has it.
        Family::Qwen3Moe => fields.size_by(["num_local_experts", "num_experts"]),
        Family::Olmoe => fields.size_by(["num_experts", "num_local_experts"]),
        _ => fields.size_by(["num_local_experts", "num_experts"]),
    };
    let (experts_per_token, (sliding_window, layer_windows)) =
        (fields.size("num_experts_per_tok")?, windows(fields, family, n_layers)?);
    let base = TransformerConfig {
        context_length,
        n_kv_heads: fields.size_or("num_key_value_heads", kv_heads)?,
        head_dim,
        d_ff: fields.size("intermediate_size")?,
        norm_epsilon: fields.number_or("rms_norm_eps", epsilon)?,
        activation: fields.activation("hidden_act", ActivationKind::Silu)?,
        tied_embeddings: fields.flag_or("tie_word_embeddings", false)?,
        dropout: fields.number_or("attention_dropout", 0.0)?,
        positions,
        sliding_window,
        layer_windows,
        experts: experts?,
        experts_per_token,
        ..llama
    };
    Ok(match family {
        Family::Mixtral => {
            fields.refuse(&[("router_jitter_noise", json!(0.0))])?;
            base
        }
        Family::Qwen3Moe => {
            let dense_layers = dense_layers(fields, n_layers)?;
            let bias = fields.flag_or("attention_bias", false)?;
            let (dense, d_ff) = (base.d_ff, fields.size_or("moe_intermediate_size", 768)?);
            TransformerConfig {
                qk_norm: true,
                qkv_bias: bias,
                output_bias: bias,
                router_normalized: fields.flag_or("norm_topk_prob", false)?,
                d_ff,
                dense_d_ff: (!dense_layers.is_empty() && dense != d_ff).then_some(dense),
                dense_layers,
                ..base
            }
        }
        Family::Olmoe => {
            let bias = fields.flag_or("attention_bias", false)?;
            TransformerConfig {
                qk_norm: true,
                joint_qk_norm: true,
                qkv_bias: bias,
                output_bias: bias,
                qkv_clip: fields.get("clip_qkv").map(|_| fields.number_or("clip_qkv", 0.0)).transpose()?,
                router_normalized: fields.flag_or("norm_topk_prob", false)?,
                ..base
            }
        }
        _ => {
            fields.refuse(&[
                ("swiglu_alpha", json!(QUICK_GELU)),
                ("experts_per_token", json!(experts_per_token)),
                // What it says is not what experts compute.
                ("hidden_act", json!("silu")),
            ])?;
            let bias = fields.flag_or("attention_bias", true)?;
            TransformerConfig {
                activation: ActivationKind::QuickGelu,
                qkv_bias: bias,
                output_bias: bias,
                feed_forward_bias: true,
                attention_sinks: true,
                router_bias: true,
                expert_limit: Some(fields.number_or("swiglu_limit", 7.0)?),
                ..base
            }
        }
    })
}

/// The window of all layers, or else of each.
fn windows(fields: &Fields<'_>, family: Family, n_layers: usize) -> Result<(Option<usize>, Vec<usize>), ConfigError> {
    let window = fields.optional_size("sliding_window")?;
    let window = match family {
        Family::Mixtral => window,
        Family::Qwen3Moe => match fields.flag_or("use_sliding_window", false)? {
            // Null is no window.
            true if fields.0.get("sliding_window").is_none() => Some(4096),
            true => window,
            false => None,
        },
        Family::GptOss if fields.0.get("sliding_window").is_none() => Some(128),
        Family::GptOss => window,
        // There is none, whatever the file says.
        _ => None,
    };
    if window == Some(0) {
        return Err(ConfigError("config.json: sliding_window is 0; it must be at least 1".into()));
    }
    if family != Family::GptOss {
        return Ok((window, Vec::new()));
    }
    // The allowed maximum, which is checked later.
    let n_layers = n_layers.min(1 << 14);
    let alternating = || (0..n_layers).map(|layer| window.filter(|_| layer.is_multiple_of(2))).collect();
    Ok(by_layer(layer_types(fields, window, n_layers)?.unwrap_or_else(alternating)))
}

/// Qwen3-MoE's layers without experts: those in a list, and all but each n-th.
fn dense_layers(fields: &Fields<'_>, n_layers: usize) -> Result<Vec<usize>, ConfigError> {
    let step = fields.size_or("decoder_sparse_step", 1)?;
    if step == 0 {
        return Err(ConfigError("config.json: decoder_sparse_step is 0; it must be at least 1".into()));
    }
    let listed = match fields.get("mlp_only_layers") {
        None => Vec::new(),
        Some(list) => {
            let sizes = list.as_array().and_then(|list| list.iter().map(Value::as_u64).collect::<Option<Vec<_>>>());
            sizes.ok_or_else(|| Fields::wrong("mlp_only_layers", "a list of layers"))?
        }
    };
    let is_dense = |layer: &usize| !(layer + 1).is_multiple_of(step) || listed.contains(&(*layer as u64));
    Ok((0..n_layers.min(1 << 14)).filter(is_dense).collect())
}

/// The keys of a family, besides those of all.
pub(super) fn write(family: Family, c: &TransformerConfig) -> Value {
    let mut own = Map::new();
    let mut put = |fields: Value| own.extend(fields.as_object().cloned().unwrap_or_default());
    put(json!({
        "max_position_embeddings": c.longest_context(), "hidden_size": c.d_model,
        "num_hidden_layers": c.n_layers, "num_attention_heads": c.n_heads, "num_key_value_heads": c.n_kv_heads,
        "head_dim": c.head_dim, "rms_norm_eps": c.norm_epsilon, "attention_dropout": c.dropout,
        "intermediate_size": if family == Family::Qwen3Moe { c.dense_d_ff.unwrap_or(c.d_ff) } else { c.d_ff },
        "num_experts_per_tok": c.experts_per_token, "output_router_logits": false,
        // The default of transformers may be beyond the vocabulary, which it refuses.
        "pad_token_id": null,
    }));
    put(match family {
        Family::Olmoe => json!({ "num_experts": c.experts }),
        Family::Qwen3Moe => json!({ "num_local_experts": c.experts, "num_experts": c.experts }),
        _ => json!({ "num_local_experts": c.experts }),
    });
    put(match family {
        Family::GptOss => json!({ "hidden_act": "silu" }),
        _ => json!({ "hidden_act": activation_name(c.activation) }),
    });
    if let Positions::Rotary { base, scaling } = &c.positions {
        let scaling = write_scaling(scaling, c.context_length);
        let mut parameters = if scaling.is_object() { scaling.clone() } else { json!({ "rope_type": "default" }) };
        parameters["rope_theta"] = json!(base);
        // As versions 4 and 5 of transformers name them. Without either, gpt-oss has its own.
        put(json!({ "rope_theta": base, "rope_parameters": parameters, "rope_scaling": scaling }));
    }
    put(match family {
        Family::Mixtral => json!({ "sliding_window": c.sliding_window }),
        Family::Qwen3Moe => json!({
            "attention_bias": c.qkv_bias, "norm_topk_prob": c.router_normalized, "moe_intermediate_size": c.d_ff,
            "decoder_sparse_step": 1, "mlp_only_layers": c.dense_layers, "max_window_layers": 0,
            "use_sliding_window": c.sliding_window.is_some(), "sliding_window": c.sliding_window,
        }),
        Family::Olmoe => json!({
            "attention_bias": c.qkv_bias, "norm_topk_prob": c.router_normalized, "clip_qkv": c.qkv_clip,
        }),
        _ => {
            let windows: Vec<Option<usize>> = c.layers().map(|layer| layer.window).collect();
            let kind = |window: &Option<usize>| if window.is_some() { "sliding_attention" } else { "full_attention" };
            json!({
                "attention_bias": c.qkv_bias, "swiglu_alpha": QUICK_GELU, "swiglu_limit": c.expert_limit,
                // One for all, also if no layer has it.
                "sliding_window": windows.iter().copied().flatten().max().unwrap_or(128),
                "layer_types": windows.iter().map(kind).collect::<Vec<_>>(),
            })
        }
    });
    Value::Object(own)
}
