//! How many parameters a model has, and what a token costs in training.

use fireclay_kernels::NormKind;

use crate::config::{AttentionDirection, NormPlacement, Positions, TransformerConfig};
use crate::layer::LayerConfig;

impl TransformerConfig {
    /// FLOP per token in training, forward and backward, in rows of `seq_length`: six per parameter
    /// of a product that the token takes part in, and those of attention, half of which a causal
    /// mask skips (Chowdhery et al., 2022).
    pub fn training_flops(&self, seq_length: usize) -> f64 {
        let looked_up = if self.tied_embeddings { 0 } else { self.vocab_size * self.d_model };
        let looked_up = looked_up + self.token_types * self.d_model;
        let positions = if self.positions == Positions::Learned { self.context_length * self.d_model } else { 0 };
        let products = self.active_parameters() - looked_up - positions;
        let of_pair = if self.attention == AttentionDirection::Causal { 6 } else { 12 };
        (6 * products + of_pair * self.n_layers * self.n_heads * self.head_dim * seq_length) as f64
    }

    /// Number of parameters, each counted once.
    pub fn parameter_count(&self) -> usize {
        self.parameters_of(|layer| layer.feed_forward_parameters(false))
    }

    /// Number of parameters that a token takes part in: of experts only those that it goes through.
    pub fn active_parameters(&self) -> usize {
        self.parameters_of(|layer| layer.feed_forward_parameters(true))
    }

    fn parameters_of(&self, feed_forward: impl Fn(&LayerConfig) -> usize) -> usize {
        let norm = self.d_model * if self.norm == NormKind::LayerNorm && self.norm_bias { 2 } else { 1 };
        let qkv = self.qkv_width();
        let attention = self.d_model * qkv
            + usize::from(self.qkv_bias) * qkv
            + self.n_heads * self.head_dim * self.d_model
            + usize::from(self.output_bias) * self.d_model
            + usize::from(self.attention_sinks) * self.n_heads
            + usize::from(self.qk_norm)
                * self.head_dim
                * if self.joint_qk_norm { self.n_heads + self.n_kv_heads } else { 2 };
        let feed_forward: usize = self.layers().map(|layer| feed_forward(&layer)).sum();
        let positions = if self.positions == Positions::Learned { self.context_length * self.d_model } else { 0 };
        let norms = if self.norm_placement == NormPlacement::Both { 4 } else { 2 };
        self.n_layers * (attention + norms * norm) + feed_forward + norm + usize::from(self.embedding_norm) * norm
            - usize::from(!self.first_norm) * norm
            + self.d_model * (self.vocab_size * if self.tied_embeddings { 1 } else { 2 } + self.token_types)
            + self.d_model * (self.convolution * self.d_model + self.intents + self.tags)
            + self.classifier.as_ref().map_or(0, |classifier| classifier.parameter_count(self.d_model, self.norm_bias))
            + positions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpt2_has_124_million_parameters() {
        assert_eq!(TransformerConfig::gpt2(50_257, 1024, 768, 12, 12).parameter_count(), 124_439_808);
    }

    #[test]
    fn a_token_takes_part_in_the_parameters_of_its_experts_only() {
        // As the model cards say: 46.7B of which 12.9B are active, and 30.5B of which 3.3B.
        let mixtral = TransformerConfig::mixtral(32_000, 32_768, 4096, 32, 32).with_n_kv_heads(8).with_d_ff(14_336);
        let mixtral = mixtral.with_experts(8).with_experts_per_token(2);
        assert_eq!((mixtral.parameter_count(), mixtral.active_parameters()), (46_702_792_704, 12_879_925_248));
        let qwen = TransformerConfig::qwen3_moe(151_936, 40_960, 2048, 48, 32, 128).with_n_kv_heads(4).with_d_ff(768);
        let qwen = qwen.with_experts(128).with_experts_per_token(8);
        assert_eq!(qwen.parameter_count(), 30_532_122_624);
        assert!((3.2e9..3.4e9).contains(&(qwen.active_parameters() as f64)), "{}", qwen.active_parameters());
    }
}
