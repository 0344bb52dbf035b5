//! Families' shapes in any size.

use fireclay_kernels::{ActivationKind, NormKind};

use crate::config::{AttentionDirection, NormPlacement, Positions, TransformerConfig};
use crate::mixture::RouterScores;
use crate::rotary::RotaryScaling;

impl TransformerConfig {
    /// GPT-2's shape (Radford et al., 2019) in the given sizes.
    pub fn gpt2(vocab_size: usize, context_length: usize, d_model: usize, n_layers: usize, n_heads: usize) -> Self {
        Self {
            vocab_size,
            context_length,
            d_model,
            n_layers,
            n_heads,
            n_kv_heads: n_heads,
            head_dim: d_model / n_heads.max(1),
            d_ff: 4 * d_model,
            norm: NormKind::LayerNorm,
            norm_epsilon: 1e-5,
            norm_bias: true,
            embedding_norm: false,
            first_norm: true,
            norm_placement: NormPlacement::Pre,
            positions: Positions::Learned,
            window_positions: None,
            layers_without_positions: Vec::new(),
            rotary_dim: None,
            token_types: 0,
            convolution: 0,
            attention: AttentionDirection::Causal,
            sliding_window: None,
            layer_windows: Vec::new(),
            qk_norm: false,
            joint_qk_norm: false,
            attention_scale: None,
            attention_softcap: None,
            logit_softcap: None,
            embedding_multiplier: 1.0,
            residual_multiplier: 1.0,
            logit_divisor: 1.0,
            qkv_bias: true,
            output_bias: true,
            feed_forward_bias: true,
            activation: ActivationKind::GeluTanh,
            gated: false,
            experts: 0,
            experts_per_token: 0,
            dense_layers: Vec::new(),
            dense_d_ff: None,
            shared_d_ff: 0,
            router: RouterScores::Softmax,
            router_normalized: true,
            router_bias: false,
            choice_bias: false,
            expert_scale: 1.0,
            expert_limit: None,
            attention_sinks: false,
            qkv_clip: None,
            tied_embeddings: true,
            dropout: 0.0,
            init_deviation: 0.02,
            residual_scaling: true,
            intents: 0,
            tags: 0,
            classifier: None,
        }
    }

    /// The same as [`gpt2`](Self::gpt2): a starting point for custom shapes.
    pub fn new(vocab_size: usize, context_length: usize, d_model: usize, n_layers: usize, n_heads: usize) -> Self {
        Self::gpt2(vocab_size, context_length, d_model, n_layers, n_heads)
    }

    /// Llama's shape (Touvron et al., 2023) in the given sizes, `d_ff` at `8 / 3 * d_model` rounded
    /// up to 32.
    pub fn llama(vocab_size: usize, context_length: usize, d_model: usize, n_layers: usize, n_heads: usize) -> Self {
        Self {
            d_ff: (8 * d_model / 3).next_multiple_of(32),
            norm: NormKind::RmsNorm,
            positions: Positions::Rotary { base: 10_000.0, scaling: RotaryScaling::None },
            qkv_bias: false,
            output_bias: false,
            feed_forward_bias: false,
            activation: ActivationKind::Silu,
            gated: true,
            tied_embeddings: false,
            ..Self::gpt2(vocab_size, context_length, d_model, n_layers, n_heads)
        }
    }

    /// Mistral's shape (Jiang et al., 2023): Llama with a sliding window.
    pub fn mistral(
        vocab_size: usize,
        context_length: usize,
        d_model: usize,
        n_layers: usize,
        n_heads: usize,
        sliding_window: usize,
    ) -> Self {
        Self {
            sliding_window: Some(sliding_window),
            ..Self::llama(vocab_size, context_length, d_model, n_layers, n_heads)
        }
    }

    /// Qwen2's shape: Llama with biases on queries, keys and values.
    pub fn qwen2(vocab_size: usize, context_length: usize, d_model: usize, n_layers: usize, n_heads: usize) -> Self {
        Self {
            qkv_bias: true,
            norm_epsilon: 1e-6,
            positions: Positions::Rotary { base: 1e6, scaling: RotaryScaling::None },
            ..Self::llama(vocab_size, context_length, d_model, n_layers, n_heads)
        }
    }

    /// Qwen3's shape: Llama with norms on queries and keys, and a head width of its own.
    pub fn qwen3(
        vocab_size: usize,
        context_length: usize,
        d_model: usize,
        n_layers: usize,
        n_heads: usize,
        head_dim: usize,
    ) -> Self {
        Self {
            qk_norm: true,
            qkv_bias: false,
            head_dim,
            ..Self::qwen2(vocab_size, context_length, d_model, n_layers, n_heads)
        }
    }

    /// Mixtral's shape (Jiang et al., 2024): Llama with eight experts in each layer, of which every
    /// token goes through two.
    pub fn mixtral(vocab_size: usize, context_length: usize, d_model: usize, n_layers: usize, n_heads: usize) -> Self {
        Self {
            experts: 8,
            experts_per_token: 2,
            positions: Positions::Rotary { base: 1e6, scaling: RotaryScaling::None },
            ..Self::llama(vocab_size, context_length, d_model, n_layers, n_heads)
        }
    }

    /// Qwen3-MoE's shape (Qwen Team, 2025): Qwen3 with 128 experts, of which every token goes
    /// through eight, each with an inner width of `3 / 8 * d_model`.
    pub fn qwen3_moe(
        vocab_size: usize,
        context_length: usize,
        d_model: usize,
        n_layers: usize,
        n_heads: usize,
        head_dim: usize,
    ) -> Self {
        Self {
            d_ff: (3 * d_model / 8).next_multiple_of(8),
            experts: 128,
            experts_per_token: 8,
            ..Self::qwen3(vocab_size, context_length, d_model, n_layers, n_heads, head_dim)
        }
    }

    /// OLMoE's shape (Muennighoff et al., 2024): Llama with joint norms of queries and keys, and 64
    /// experts, of which every token goes through eight, whose scores do not sum to one.
    pub fn olmoe(vocab_size: usize, context_length: usize, d_model: usize, n_layers: usize, n_heads: usize) -> Self {
        Self {
            d_ff: (d_model / 2).next_multiple_of(8),
            experts: 64,
            experts_per_token: 8,
            router_normalized: false,
            qk_norm: true,
            joint_qk_norm: true,
            ..Self::llama(vocab_size, context_length, d_model, n_layers, n_heads)
        }
    }

    /// gpt-oss's shape (OpenAI, 2025): attention sinks, a window in every other layer, beginning with
    /// the first, and 32 experts with clamped activations, of which every token goes through four.
    pub fn gpt_oss(
        vocab_size: usize,
        context_length: usize,
        d_model: usize,
        n_layers: usize,
        n_heads: usize,
        sliding_window: usize,
    ) -> Self {
        Self {
            d_ff: d_model,
            experts: 32,
            experts_per_token: 4,
            router_bias: true,
            expert_limit: Some(7.0),
            activation: ActivationKind::QuickGelu,
            attention_sinks: true,
            qkv_bias: true,
            output_bias: true,
            feed_forward_bias: true,
            positions: Positions::Rotary { base: 150_000.0, scaling: RotaryScaling::None },
            ..Self::llama(vocab_size, context_length, d_model, n_layers, n_heads)
        }
        .with_windows(|layer| if layer % 2 == 0 { sliding_window } else { 0 })
    }

    /// Gemma 2's shape (Gemma Team, 2024): norms around each sub-layer, scores and logits that are
    /// soft-capped, and a window in every other layer, beginning with the first.
    pub fn gemma2(
        vocab_size: usize,
        context_length: usize,
        d_model: usize,
        n_layers: usize,
        n_heads: usize,
        sliding_window: usize,
    ) -> Self {
        Self {
            norm_epsilon: 1e-6,
            norm_placement: NormPlacement::Both,
            attention_softcap: Some(50.0),
            logit_softcap: Some(30.0),
            embedding_multiplier: (d_model as f64).sqrt(),
            activation: ActivationKind::GeluTanh,
            tied_embeddings: true,
            ..Self::llama(vocab_size, context_length, d_model, n_layers, n_heads)
        }
        .with_windows(|layer| if layer % 2 == 0 { sliding_window } else { 0 })
    }

    /// Gemma 3's shape (Gemma Team, 2025), text only: norms of queries and keys instead of
    /// soft-capping, and a window with its own rotary base in five of six layers.
    pub fn gemma3(
        vocab_size: usize,
        context_length: usize,
        d_model: usize,
        n_layers: usize,
        n_heads: usize,
        sliding_window: usize,
    ) -> Self {
        let rotary = |base: f64| Positions::Rotary { base, scaling: RotaryScaling::None };
        Self {
            qk_norm: true,
            positions: rotary(1e6),
            window_positions: Some(rotary(1e4)),
            attention_softcap: None,
            logit_softcap: None,
            ..Self::gemma2(vocab_size, context_length, d_model, n_layers, n_heads, sliding_window)
        }
        .with_windows(|layer| if layer % 6 == 5 { 0 } else { sliding_window })
    }

    /// OLMo 2's shape (OLMo Team, 2024): norms on sub-layers' outputs, and over all query and all
    /// key heads.
    pub fn olmo2(vocab_size: usize, context_length: usize, d_model: usize, n_layers: usize, n_heads: usize) -> Self {
        Self {
            norm_placement: NormPlacement::Output,
            qk_norm: true,
            joint_qk_norm: true,
            positions: Positions::Rotary { base: 5e5, scaling: RotaryScaling::None },
            ..Self::llama(vocab_size, context_length, d_model, n_layers, n_heads)
        }
    }

    /// SmolLM3's shape (Hugging Face, 2025): no positions in every fourth layer.
    pub fn smollm3(vocab_size: usize, context_length: usize, d_model: usize, n_layers: usize, n_heads: usize) -> Self {
        Self {
            norm_epsilon: 1e-6,
            positions: Positions::Rotary { base: 2e6, scaling: RotaryScaling::None },
            layers_without_positions: (0..n_layers).filter(|layer| layer % 4 == 3).collect(),
            tied_embeddings: true,
            ..Self::llama(vocab_size, context_length, d_model, n_layers, n_heads)
        }
    }

    /// BERT's encoder (Devlin et al., 2018) in the given sizes.
    pub fn bert(vocab_size: usize, context_length: usize, d_model: usize, n_layers: usize, n_heads: usize) -> Self {
        Self {
            norm_epsilon: 1e-12,
            norm_placement: NormPlacement::Post,
            token_types: 2,
            attention: AttentionDirection::Bidirectional,
            activation: ActivationKind::GeluErf,
            residual_scaling: false,
            ..Self::gpt2(vocab_size, context_length, d_model, n_layers, n_heads)
        }
    }

    /// ModernBERT's encoder (Warner et al., 2024): rotary positions, a gated feed-forward layer,
    /// norms without shift, and two of three layers that see `local_attention / 2` tokens on either
    /// side.
    pub fn modernbert(
        vocab_size: usize,
        context_length: usize,
        d_model: usize,
        n_layers: usize,
        n_heads: usize,
        local_attention: usize,
    ) -> Self {
        let rotary = |base: f64| Positions::Rotary { base, scaling: RotaryScaling::None };
        Self {
            d_ff: 3 * d_model / 2,
            norm_epsilon: 1e-5,
            norm_bias: false,
            embedding_norm: true,
            first_norm: false,
            norm_placement: NormPlacement::Pre,
            positions: rotary(160_000.0),
            window_positions: Some(rotary(10_000.0)),
            token_types: 0,
            qkv_bias: false,
            output_bias: false,
            feed_forward_bias: false,
            gated: true,
            residual_scaling: true,
            ..Self::bert(vocab_size, context_length, d_model, n_layers, n_heads)
        }
        .with_windows(|layer| if layer % 3 == 0 { 0 } else { local_attention / 2 + 1 })
    }

    /// With a window for each layer, 0 for none: one setting for all if they are alike.
    fn with_windows(self, window: impl Fn(usize) -> usize) -> Self {
        let windows: Vec<usize> = (0..self.n_layers).map(window).collect();
        match windows.windows(2).all(|pair| pair[0] == pair[1]) {
            true => Self {
                sliding_window: windows.first().copied().filter(|window| *window > 0),
                layer_windows: Vec::new(),
                ..self
            },
            false => Self { sliding_window: None, layer_windows: windows, ..self },
        }
    }
}
