//! BERT's tensor names.

use super::tensor::{HubTensor, split_qkv, whole};
use crate::config::TransformerConfig;

/// The tensor of a parameter outside of the blocks.
pub(super) fn outer(field: &str, path: &str) -> Option<Vec<HubTensor>> {
    let name = match field {
        "embedding" => "embeddings.word_embeddings.weight",
        "position_embedding" => "embeddings.position_embeddings.weight",
        "token_type_embedding" => "embeddings.token_type_embeddings.weight",
        "head" => "cls.predictions.decoder.weight",
        "embedding_norm.gamma" => "embeddings.LayerNorm.weight",
        "embedding_norm.beta" => "embeddings.LayerNorm.bias",
        "classifier.dense" => "bert.pooler.dense.weight",
        "classifier.dense_bias" => "bert.pooler.dense.bias",
        "classifier.output" => "classifier.weight",
        "classifier.output_bias" => "classifier.bias",
        _ => return None,
    };
    Some(vec![whole(name.into(), path)])
}

/// Gives a tensor of the encoder the name that it has in a model with a head.
pub(super) fn prefix(tensor: &mut HubTensor) {
    if !["bert.", "classifier.", "cls.", "intent_head.", "tag_head."].iter().any(|own| tensor.name.starts_with(own)) {
        tensor.name.insert_str(0, "bert.");
    }
}

/// The tensors of a parameter of block `layer`: queries, keys and values are separate.
pub(super) fn block(config: &TransformerConfig, layer: &str, field: &str, path: &str) -> Option<Vec<HubTensor>> {
    let at = |name: &str| format!("encoder.layer.{layer}.{name}");
    let kind = if field.ends_with("bias") { "bias" } else { "weight" };
    let name = match field {
        "attention.qkv" | "attention.qkv_bias" => {
            let names = ["query", "key", "value"].map(|x| at(&format!("attention.self.{x}.{kind}")));
            return Some(split_qkv(config, names, path));
        }
        "attention.output" | "attention.output_bias" => format!("attention.output.dense.{kind}"),
        "feed_forward.up" | "feed_forward.up_bias" => format!("intermediate.dense.{kind}"),
        "feed_forward.down" | "feed_forward.down_bias" => format!("output.dense.{kind}"),
        "attention_norm.gamma" => "attention.output.LayerNorm.weight".into(),
        "attention_norm.beta" => "attention.output.LayerNorm.bias".into(),
        "feed_forward_norm.gamma" => "output.LayerNorm.weight".into(),
        "feed_forward_norm.beta" => "output.LayerNorm.bias".into(),
        _ => return None,
    };
    Some(vec![whole(at(&name), path)])
}
