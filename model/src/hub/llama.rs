//! Tensor names of Llama and its descendants.

use super::experts;
use super::family::Family;
use super::tensor::{HubTensor, split_qkv, whole};
use crate::config::TransformerConfig;

/// The tensor of a parameter outside of the blocks.
pub(super) fn outer(family: Family, field: &str, path: &str) -> Option<Vec<HubTensor>> {
    let name = match field {
        "embedding" => "model.embed_tokens.weight",
        "head" => "lm_head.weight",
        "final_norm.gamma" => "model.norm.weight",
        _ => return None,
    };
    Some(vec![HubTensor { offset: offset(family, field), ..whole(name.into(), path) }])
}

/// What is added to a stored tensor: Gemma's norms multiply by one plus their weight.
fn offset(family: Family, field: &str) -> f32 {
    let is_gemma = matches!(family, Family::Gemma2 | Family::Gemma3);
    if is_gemma && field.ends_with("norm.gamma") { 1.0 } else { 0.0 }
}

/// The norms of a block.
fn norm(family: Family, field: &str) -> Option<&'static str> {
    let is_gemma = matches!(family, Family::Gemma2 | Family::Gemma3);
    let is_olmo = matches!(family, Family::Olmo2 | Family::Olmo3);
    Some(match field {
        "attention.query_norm.gamma" => "self_attn.q_norm.weight",
        "attention.key_norm.gamma" => "self_attn.k_norm.weight",
        "attention_norm.gamma" if is_olmo => "post_attention_layernorm.weight",
        "feed_forward_norm.gamma" if is_olmo => "post_feedforward_layernorm.weight",
        "attention_output_norm.gamma" if is_gemma => "post_attention_layernorm.weight",
        "feed_forward_norm.gamma" if is_gemma => "pre_feedforward_layernorm.weight",
        "feed_forward_output_norm.gamma" if is_gemma => "post_feedforward_layernorm.weight",
        "attention_norm.gamma" => "input_layernorm.weight",
        "feed_forward_norm.gamma" => "post_attention_layernorm.weight",
        _ => return None,
    })
}

/// The tensors of a parameter of block `layer`: queries, keys and values are separate, and so are
/// gate and up, but for Phi-3.
pub(super) fn block(
    family: Family,
    config: &TransformerConfig,
    layer: &str,
    field: &str,
    path: &str,
) -> Option<Vec<HubTensor>> {
    let at = |name: &str| format!("model.layers.{layer}.{name}");
    if let Some(field) = field.strip_prefix("feed_forward.experts.") {
        return experts::tensors(family, config, &at(""), field, path);
    }
    let kind = if field.ends_with("bias") { "bias" } else { "weight" };
    let name = match field {
        "attention.qkv" if family == Family::Phi3 => "self_attn.qkv_proj.weight".into(),
        "feed_forward.up" if family == Family::Phi3 => "mlp.gate_up_proj.weight".into(),
        "attention.qkv" | "attention.qkv_bias" => {
            let names = ["q", "k", "v"].map(|x| at(&format!("self_attn.{x}_proj.{kind}")));
            return Some(split_qkv(config, names, path));
        }
        "feed_forward.up" | "feed_forward.up_bias" if config.gated => {
            let rows =
                |rows, name: &str| HubTensor { rows: Some(rows), ..whole(at(&format!("mlp.{name}.{kind}")), path) };
            // Of models with experts, these are the dense layers.
            let d_ff = config.dense_d_ff.unwrap_or(config.d_ff);
            return Some(vec![rows(0..d_ff, "gate_proj"), rows(d_ff..2 * d_ff, "up_proj")]);
        }
        "feed_forward.up" | "feed_forward.up_bias" => format!("mlp.up_proj.{kind}"),
        "feed_forward.down" | "feed_forward.down_bias" => format!("mlp.down_proj.{kind}"),
        "attention.sinks" if family == Family::GptOss => "self_attn.sinks".into(),
        "attention.output" | "attention.output_bias" => format!("self_attn.o_proj.{kind}"),
        _ => norm(family, field)?.into(),
    };
    Some(vec![HubTensor { offset: offset(family, field), ..whole(at(&name), path) }])
}
