//! The names of tensors in GGUF files.
//!
//! All matrices are `[d_output, d_input]`. `llama` rotates neighbouring elements, so the rows of
//! each head of queries and keys alternate between the two halves of the hub's order.

use super::Architecture;
use crate::config::TransformerConfig;
use crate::hub::{HubTensor, split_qkv, whole};

/// The embedding table, and the output projection, which is missing if embeddings are tied.
pub(crate) const EMBEDDING: &str = "token_embd.weight";
pub(crate) const HEAD: &str = "output.weight";
/// Factors of rotary frequencies, which the config uses.
pub(super) const FACTORS: [&str; 3] = ["rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"];

/// All tensors of a model, in the order of its parameters.
///
/// # Errors
/// If the architecture has no name for a parameter.
pub(crate) fn tensors(
    architecture: Architecture,
    config: &TransformerConfig,
    paths: &[String],
) -> Result<Vec<HubTensor>, String> {
    let mut tensors = Vec::with_capacity(paths.len());
    for path in paths {
        let named = match path.strip_prefix("blocks.").and_then(|rest| rest.split_once('.')) {
            Some((layer, field)) => block(architecture, config, layer, field, path),
            None => outer(path).map(|name| vec![whole(name.into(), path)]),
        };
        tensors.extend(named.ok_or_else(|| format!("{path} has no name in GGUF files of {}", architecture.name()))?);
    }
    Ok(tensors)
}

/// Whether a tensor of this name is allowed although the model does not read it.
pub(crate) fn ignores(name: &str) -> bool {
    FACTORS.contains(&name) || name.ends_with(".rope_freqs.weight") || name.ends_with(".attn_rot_embd.weight")
}

fn outer(path: &str) -> Option<&'static str> {
    Some(match path {
        "embedding" => EMBEDDING,
        "position_embedding" => "position_embd.weight",
        "head" => HEAD,
        "final_norm.gamma" => "output_norm.weight",
        "final_norm.beta" => "output_norm.bias",
        _ => return None,
    })
}

fn block(
    architecture: Architecture,
    config: &TransformerConfig,
    layer: &str,
    field: &str,
    path: &str,
) -> Option<Vec<HubTensor>> {
    let at = |name: &str| format!("blk.{layer}.{name}");
    let kind = if field.ends_with("bias") || field.ends_with("beta") { "bias" } else { "weight" };
    let name = match field {
        "attention.qkv" | "attention.qkv_bias" if architecture != Architecture::Gpt2 => {
            let mut parts = split_qkv(config, ["q", "k", "v"].map(|x| at(&format!("attn_{x}.{kind}"))), path);
            if architecture == Architecture::Llama {
                parts[..2].iter_mut().for_each(|part| part.interleaved = Some(config.head_dim));
            }
            return Some(parts);
        }
        "feed_forward.up" | "feed_forward.up_bias" if config.gated => {
            let d_ff = config.d_ff;
            let parts = [("gate", 0..d_ff), ("up", d_ff..2 * d_ff)];
            let part = |(name, rows)| HubTensor { rows: Some(rows), ..whole(at(&format!("ffn_{name}.{kind}")), path) };
            return Some(parts.into_iter().map(part).collect());
        }
        "attention.qkv" | "attention.qkv_bias" => "attn_qkv",
        "attention.output" | "attention.output_bias" => "attn_output",
        "attention.query_norm.gamma" => "attn_q_norm",
        "attention.key_norm.gamma" => "attn_k_norm",
        "feed_forward.up" | "feed_forward.up_bias" => "ffn_up",
        "feed_forward.down" | "feed_forward.down_bias" => "ffn_down",
        "attention_norm.gamma" | "attention_norm.beta" => "attn_norm",
        "feed_forward_norm.gamma" | "feed_forward_norm.beta" => "ffn_norm",
        _ => return None,
    };
    Some(vec![whole(at(&format!("{name}.{kind}")), path)])
}
