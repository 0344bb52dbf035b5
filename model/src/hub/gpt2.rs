//! GPT-2's tensor names. Its matrices are stored as `[d_input, d_output]`.

use super::tensor::{HubTensor, whole};

/// The tensor of a parameter outside of the blocks.
pub(super) fn outer(field: &str, path: &str) -> Option<Vec<HubTensor>> {
    let name = match field {
        "embedding" => "transformer.wte.weight",
        "position_embedding" => "transformer.wpe.weight",
        "head" => "lm_head.weight",
        "final_norm.gamma" => "transformer.ln_f.weight",
        "final_norm.beta" => "transformer.ln_f.bias",
        _ => return None,
    };
    Some(vec![whole(name.into(), path)])
}

/// The tensor of a parameter of block `layer`.
pub(super) fn block(layer: &str, field: &str, path: &str) -> Option<Vec<HubTensor>> {
    let (name, transposed) = match field {
        "attention.qkv" => ("attn.c_attn.weight", true),
        "attention.qkv_bias" => ("attn.c_attn.bias", false),
        "attention.output" => ("attn.c_proj.weight", true),
        "attention.output_bias" => ("attn.c_proj.bias", false),
        "feed_forward.up" => ("mlp.c_fc.weight", true),
        "feed_forward.up_bias" => ("mlp.c_fc.bias", false),
        "feed_forward.down" => ("mlp.c_proj.weight", true),
        "feed_forward.down_bias" => ("mlp.c_proj.bias", false),
        "attention_norm.gamma" => ("ln_1.weight", false),
        "attention_norm.beta" => ("ln_1.bias", false),
        "feed_forward_norm.gamma" => ("ln_2.weight", false),
        "feed_forward_norm.beta" => ("ln_2.bias", false),
        _ => return None,
    };
    Some(vec![HubTensor { transposed, ..whole(format!("transformer.h.{layer}.{name}"), path) }])
}
