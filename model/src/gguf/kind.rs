//! The type of each tensor in an exported file.

use fireclay_kernels::BlockFormat;
use safetensors::tensor::Dtype;

use super::names::{EMBEDDING, HEAD};
use crate::tensor_files::Encoding;

/// The format of the matrices in an exported GGUF file. Vectors are always F32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GgufKind {
    /// F32.
    F32,
    /// F16.
    F16,
    /// BF16.
    Bf16,
    /// Q8_0.
    Q8_0,
    /// Q4_0, with Q6_K for the output projection.
    Q4_0,
    /// Q4_K, with Q6_K for the output projection and for the value and down projections of about
    /// half of the layers.
    Q4KM,
}

impl GgufKind {
    /// Its number in `general.file_type` (`gguf.LlamaFileType`).
    pub(crate) fn file_type(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q8_0 => 7,
            Self::Q4KM => 15,
            Self::Bf16 => 32,
        }
    }

    /// The encoding of a tensor in a model of `layers` layers. If embeddings are tied, the
    /// embedding table counts as the output projection.
    pub(crate) fn encoding(self, name: &str, shape: &[usize], layers: usize, tied: bool) -> Encoding {
        let &[_, columns] = shape else { return Encoding::Float(Dtype::F32) };
        if name == "position_embd.weight" {
            return Encoding::Float(Dtype::F32);
        }
        let is_head = name == HEAD || (tied && name == EMBEDDING);
        let wanted = match self {
            Self::F32 => return Encoding::Float(Dtype::F32),
            Self::F16 => return Encoding::Float(Dtype::F16),
            Self::Bf16 => return Encoding::Float(Dtype::BF16),
            Self::Q8_0 => BlockFormat::Q8_0,
            Self::Q4_0 | Self::Q4KM if is_head => BlockFormat::Q6K,
            Self::Q4_0 => BlockFormat::Q4_0,
            Self::Q4KM if is_sensitive(name, layers) => BlockFormat::Q6K,
            Self::Q4KM => BlockFormat::Q4K,
        };
        // If blocks do not fill the rows: the next larger format that does.
        let instead = match wanted {
            BlockFormat::Q6K => BlockFormat::Q8_0,
            BlockFormat::Q4K => BlockFormat::Q5_0,
            other => other,
        };
        let fits = |format: &BlockFormat| columns.is_multiple_of(format.weights());
        [wanted, instead].into_iter().find(fits).map_or(Encoding::Float(Dtype::F16), Encoding::Blocks)
    }
}

/// Whether Q4_K_M stores a tensor in Q6_K: value and down projections in the first and last eighth
/// of the layers, and in every third layer between.
fn is_sensitive(name: &str, layers: usize) -> bool {
    let block = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
    let Some((Ok(layer), part)) = block.map(|(layer, part)| (layer.parse::<usize>(), part)) else { return false };
    let eighth = layers / 8;
    let more = layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2;
    more && matches!(part, "attn_v.weight" | "ffn_down.weight")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mixtures_are_those_of_llama_cpp() {
        let of = |kind: GgufKind, name: &str, columns: usize| kind.encoding(name, &[64, columns], 16, false).name();
        for (name, wanted) in [
            ("token_embd.weight", "Q4_K"),
            ("output.weight", "Q6_K"),
            ("blk.0.attn_v.weight", "Q6_K"),
            ("blk.2.attn_v.weight", "Q4_K"),
            ("blk.4.ffn_down.weight", "Q6_K"),
            ("blk.5.ffn_down.weight", "Q4_K"),
            ("blk.14.ffn_down.weight", "Q6_K"),
            ("blk.0.attn_q.weight", "Q4_K"),
        ] {
            assert_eq!(of(GgufKind::Q4KM, name, 512), wanted, "{name}");
        }
        let rows = |kind, columns| (of(kind, "output.weight", columns), of(kind, "blk.3.ffn_up.weight", columns));
        let pair = |one: &str, other: &str| (one.to_string(), other.to_string());
        assert_eq!(rows(GgufKind::Q4KM, 96), pair("Q8_0", "Q5_0"));
        assert_eq!(rows(GgufKind::Q4_0, 96), pair("Q8_0", "Q4_0"));
        assert_eq!(rows(GgufKind::Q8_0, 80), pair("F16", "F16"));
        assert_eq!(GgufKind::Q4_0.encoding("token_embd.weight", &[64, 256], 16, true).name(), "Q6_K");
        assert_eq!(GgufKind::Q4_0.encoding("position_embd.weight", &[64, 256], 16, true).name(), "F32");
        assert_eq!(GgufKind::Q4_0.encoding("output_norm.weight", &[256], 16, true).name(), "F32");
    }
}
