//! ModernBERT's `config.json` and tensor names.

use fireclay_kernels::ActivationKind;
use serde_json::{Value, json};

use super::descendants::positions_by_kind;
use super::family::Family;
use super::fields::{Fields, activation_name, by_layer, layer_types, write_scaling};
use super::tensor::{HubTensor, whole};
use crate::config::{ConfigError, Positions, TransformerConfig};

pub(super) fn read(fields: &Fields<'_>) -> Result<TransformerConfig, ConfigError> {
    fields.refuse(&[("position_embedding_type", json!("absolute"))])?;
    fields.refuse_parts()?;
    let (d_model, n_heads) = (fields.size("hidden_size")?, fields.size("num_attention_heads")?);
    let n_layers = fields.size("num_hidden_layers")?;
    let context = fields.size_or("max_position_embeddings", 8192)?;
    let head_dim = fields.size_or("head_dim", d_model / n_heads.max(1))?;
    if head_dim != d_model / n_heads.max(1) {
        return Err(ConfigError(format!(
            "config.json: head_dim is {head_dim}; only hidden_size / num_attention_heads is supported"
        )));
    }
    let local = fields.size_or("local_attention", 128)?;
    // A token sees half of them on either side, and itself.
    let window = Some(local / 2 + 1);
    let windows = match layer_types(fields, window, n_layers)? {
        Some(windows) => windows,
        None => {
            let every = fields.size_or("global_attn_every_n_layers", 3)?;
            if every == 0 {
                return Err(ConfigError("config.json: global_attn_every_n_layers is 0; it must be at least 1".into()));
            }
            (0..n_layers.min(1 << 14)).map(|layer| window.filter(|_| !layer.is_multiple_of(every))).collect()
        }
    };
    let (sliding_window, layer_windows) = by_layer(windows);
    let (positions, window_positions, context_length) =
        positions_by_kind(fields, Family::ModernBert, context, head_dim, 160_000.0)?;
    let dropout = fields.number_or("attention_dropout", 0.0)?;
    // One probability here.
    for name in ["mlp_dropout", "embedding_dropout"] {
        if fields.number_or(name, 0.0)? != dropout {
            let shown = fields.get(name).cloned().unwrap_or_default();
            return Err(ConfigError(format!(
                "config.json: {name} is {shown}; only {dropout} is supported, as attention_dropout is"
            )));
        }
    }
    let bias = fields.flag_or("attention_bias", false)?;
    let base = TransformerConfig::modernbert(fields.size("vocab_size")?, context, d_model, n_layers, n_heads, local);
    Ok(TransformerConfig {
        context_length,
        positions,
        window_positions,
        sliding_window,
        layer_windows,
        d_ff: fields.size_or("intermediate_size", 1152)?,
        activation: fields.activation("hidden_activation", ActivationKind::GeluErf)?,
        norm_epsilon: fields.number_or("norm_eps", 1e-5)?,
        norm_bias: fields.flag_or("norm_bias", false)?,
        qkv_bias: bias,
        output_bias: bias,
        feed_forward_bias: fields.flag_or("mlp_bias", false)?,
        dropout,
        ..base
    })
}

pub(super) fn write(c: &TransformerConfig) -> Value {
    let windows: Vec<Option<usize>> = c.layers().map(|layer| layer.window).collect();
    let window = windows.iter().copied().flatten().max().unwrap_or(65);
    let kind = |window: &Option<usize>| if window.is_some() { "sliding_attention" } else { "full_attention" };
    let rotary = |positions: &Positions| match positions {
        Positions::Rotary { base, scaling } => {
            let scaling = write_scaling(scaling, c.context_length);
            let mut parameters = if scaling.is_object() { scaling } else { json!({ "rope_type": "default" }) };
            parameters["rope_theta"] = json!(base);
            (*base, parameters)
        }
        _ => (0.0, Value::Null),
    };
    let (base, full) = rotary(&c.positions);
    let (local_base, local) = rotary(c.window_positions.as_ref().unwrap_or(&c.positions));
    json!({
        "max_position_embeddings": c.context_length, "hidden_size": c.d_model, "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads, "intermediate_size": c.d_ff,
        "hidden_activation": activation_name(c.activation), "norm_eps": c.norm_epsilon, "norm_bias": c.norm_bias,
        "local_attention": 2 * window.saturating_sub(1), "layer_types": windows.iter().map(kind).collect::<Vec<_>>(),
        "global_rope_theta": base, "local_rope_theta": local_base,
        "rope_parameters": { "full_attention": full, "sliding_attention": local },
        "attention_bias": c.qkv_bias, "mlp_bias": c.feed_forward_bias, "attention_dropout": c.dropout,
        "mlp_dropout": c.dropout, "embedding_dropout": c.dropout,
        // The default of transformers may be beyond the vocabulary, which it refuses.
        "pad_token_id": null,
    })
}

/// The tensor of a parameter outside of the blocks.
pub(super) fn outer(field: &str, path: &str) -> Option<Vec<HubTensor>> {
    let name = match field {
        "embedding" => "model.embeddings.tok_embeddings.weight",
        "embedding_norm.gamma" => "model.embeddings.norm.weight",
        "embedding_norm.beta" => "model.embeddings.norm.bias",
        "final_norm.gamma" => "model.final_norm.weight",
        "final_norm.beta" => "model.final_norm.bias",
        "classifier.dense" => "head.dense.weight",
        "classifier.dense_bias" => "head.dense.bias",
        "classifier.norm.gamma" => "head.norm.weight",
        "classifier.norm.beta" => "head.norm.bias",
        "classifier.output" => "classifier.weight",
        "classifier.output_bias" => "classifier.bias",
        _ => return None,
    };
    Some(vec![whole(name.into(), path)])
}

/// The tensor of a parameter of block `layer`: queries, keys and values are one, and so are gate
/// and up.
pub(super) fn block(layer: &str, field: &str, path: &str) -> Option<Vec<HubTensor>> {
    let name = match field {
        "attention.qkv" => "attn.Wqkv.weight",
        "attention.qkv_bias" => "attn.Wqkv.bias",
        "attention.output" => "attn.Wo.weight",
        "attention.output_bias" => "attn.Wo.bias",
        "feed_forward.up" => "mlp.Wi.weight",
        "feed_forward.up_bias" => "mlp.Wi.bias",
        "feed_forward.down" => "mlp.Wo.weight",
        "feed_forward.down_bias" => "mlp.Wo.bias",
        "attention_norm.gamma" => "attn_norm.weight",
        "attention_norm.beta" => "attn_norm.bias",
        "feed_forward_norm.gamma" => "mlp_norm.weight",
        "feed_forward_norm.beta" => "mlp_norm.bias",
        _ => return None,
    };
    Some(vec![whole(format!("model.layers.{layer}.{name}"), path)])
}
