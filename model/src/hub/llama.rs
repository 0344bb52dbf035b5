//! Tensor names of Llama, Mistral, Qwen2 and Qwen3.

use super::tensor::{HubTensor, split_qkv, whole};
use crate::config::TransformerConfig;

/// The tensor of a parameter outside of the blocks.
pub(super) fn outer(field: &str, path: &str) -> Option<Vec<HubTensor>> {
    let name = match field {
        "embedding" => "model.embed_tokens.weight",
        "head" => "lm_head.weight",
        "final_norm.gamma" => "model.norm.weight",
        _ => return None,
    };
    Some(vec![whole(name.into(), path)])
}

/// The tensors of a parameter of block `layer`: queries, keys and values are separate, and so are
/// gate and up.
pub(super) fn block(config: &TransformerConfig, layer: &str, field: &str, path: &str) -> Option<Vec<HubTensor>> {
    let at = |name: &str| format!("model.layers.{layer}.{name}");
    let kind = if field.ends_with("bias") { "bias" } else { "weight" };
    let name = match field {
        "attention.qkv" | "attention.qkv_bias" => {
            let names = ["q", "k", "v"].map(|x| at(&format!("self_attn.{x}_proj.{kind}")));
            return Some(split_qkv(config, names, path));
        }
        "feed_forward.up" | "feed_forward.up_bias" if config.gated => {
            let rows =
                |rows, name: &str| HubTensor { rows: Some(rows), ..whole(at(&format!("mlp.{name}.{kind}")), path) };
            let d_ff = config.d_ff;
            return Some(vec![rows(0..d_ff, "gate_proj"), rows(d_ff..2 * d_ff, "up_proj")]);
        }
        "feed_forward.up" | "feed_forward.up_bias" => format!("mlp.up_proj.{kind}"),
        "feed_forward.down" | "feed_forward.down_bias" => format!("mlp.down_proj.{kind}"),
        "attention.output" | "attention.output_bias" => format!("self_attn.o_proj.{kind}"),
        "attention.query_norm.gamma" => "self_attn.q_norm.weight".into(),
        "attention.key_norm.gamma" => "self_attn.k_norm.weight".into(),
        "attention_norm.gamma" => "input_layernorm.weight".into(),
        "feed_forward_norm.gamma" => "post_attention_layernorm.weight".into(),
        _ => return None,
    };
    Some(vec![whole(at(&name), path)])
}
