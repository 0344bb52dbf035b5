//! Configuration of one block.

use fireclay_kernels::{Activation, NormKind};

use crate::config::{NormPlacement, Positions, TransformerConfig};
use crate::mixture::ExpertsConfig;

/// The settings of one block, derived from the model's. A [`Block`](crate::Block) depends only on
/// these, so a family with different layers sets them in [`TransformerConfig::layer`].
#[derive(Clone, Debug, PartialEq)]
pub struct LayerConfig {
    /// Width of the residual stream.
    pub d_model: usize,
    /// Number of query heads.
    pub n_heads: usize,
    /// Number of key and value heads.
    pub n_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Inner width of the feed-forward layer, or of each expert.
    pub d_ff: usize,
    /// The mixture of experts, if it is one.
    pub experts: Option<ExpertsConfig>,
    /// Layer or RMS norm.
    pub norm: NormKind,
    /// Added to variances and mean squares.
    pub norm_epsilon: f64,
    /// Whether layer norms have a shift.
    pub norm_bias: bool,
    /// Whether attention has a norm.
    pub attention_norm: bool,
    /// Before or after the sub-layers.
    pub norm_placement: NormPlacement,
    /// Maximum keys that a query sees, its own included; if attention is bidirectional, on either
    /// side.
    pub window: Option<usize>,
    /// Index of its rotary positions among those of the model; `None` for no rotation.
    pub rotary: Option<usize>,
    /// RMS norm over each head of queries and keys.
    pub qk_norm: bool,
    /// Whether these norms are over all heads together.
    pub joint_qk_norm: bool,
    /// Scale of attention scores.
    pub attention_scale: f64,
    /// Soft-capping of attention scores.
    pub attention_softcap: Option<f64>,
    /// Whether attention has a sink per query head.
    pub attention_sinks: bool,
    /// The largest magnitude of queries, keys and values.
    pub qkv_clip: Option<f64>,
    /// Factor on what a sub-layer adds to the residual stream.
    pub residual_multiplier: f64,
    /// Bias on the query, key and value projection.
    pub qkv_bias: bool,
    /// Bias on attention's output projection.
    pub output_bias: bool,
    /// Biases in the feed-forward layer.
    pub feed_forward_bias: bool,
    /// Activation of the feed-forward layer.
    pub activation: Activation,
    /// Standard deviation of initial matrices, and of those that project into the residual stream.
    pub init_deviations: [f64; 2],
}

impl LayerConfig {
    /// Rows of the joint query, key and value projection.
    pub(crate) fn qkv_width(&self) -> usize {
        (self.n_heads + 2 * self.n_kv_heads) * self.head_dim
    }

    /// Rows of the first feed-forward projection, gate and up together if it is gated.
    pub(crate) fn up_width(&self) -> usize {
        if self.activation.gated { 2 * self.d_ff } else { self.d_ff }
    }

    /// Parameters of the feed-forward layer, with its router: all, or those of as many experts as a
    /// token goes through.
    pub(crate) fn feed_forward_parameters(&self, active: bool) -> usize {
        let dense = |d_ff: usize| {
            let up = if self.activation.gated { 2 * d_ff } else { d_ff };
            self.d_model * (up + d_ff) + usize::from(self.feed_forward_bias) * (up + self.d_model)
        };
        let Some(own) = self.experts else { return dense(self.d_ff) };
        let counted = if active { own.experts_per_token } else { own.experts };
        let biases = usize::from(own.router_bias) + usize::from(own.choice_bias);
        let shared = if own.shared_d_ff > 0 { dense(own.shared_d_ff) } else { 0 };
        own.experts * (self.d_model + biases) + counted * dense(self.d_ff) + shared
    }
}

impl TransformerConfig {
    /// The settings of block `layer`, counted from zero.
    pub fn layer(&self, layer: usize) -> LayerConfig {
        let window = match self.layer_windows.get(layer) {
            Some(window) => Some(*window).filter(|window| *window > 0),
            None => self.sliding_window,
        };
        let rotates = matches!(self.positions, Positions::Rotary { .. });
        let rotary = (rotates && !self.layers_without_positions.contains(&layer))
            .then(|| usize::from(window.is_some() && self.window_positions.is_some()));
        let experts = self.mixture(layer);
        LayerConfig {
            d_model: self.d_model,
            n_heads: self.n_heads,
            n_kv_heads: self.n_kv_heads,
            head_dim: self.head_dim,
            d_ff: if experts.is_some() { self.d_ff } else { self.dense_d_ff.unwrap_or(self.d_ff) },
            experts,
            norm: self.norm,
            norm_epsilon: self.norm_epsilon,
            norm_bias: self.norm_bias,
            attention_norm: self.first_norm || layer > 0,
            norm_placement: self.norm_placement,
            window,
            rotary,
            qk_norm: self.qk_norm,
            joint_qk_norm: self.joint_qk_norm,
            attention_scale: self.attention_scale.unwrap_or(1.0 / (self.head_dim as f64).sqrt()),
            attention_softcap: self.attention_softcap,
            attention_sinks: self.attention_sinks,
            qkv_clip: self.qkv_clip,
            residual_multiplier: self.residual_multiplier,
            qkv_bias: self.qkv_bias,
            output_bias: self.output_bias,
            feed_forward_bias: self.feed_forward_bias,
            activation: Activation { kind: self.activation, gated: self.gated },
            init_deviations: [self.init_deviation, self.residual_deviation()],
        }
    }

    /// The mixture of block `layer`; `None` for a dense layer.
    pub(crate) fn mixture(&self, layer: usize) -> Option<ExpertsConfig> {
        (self.experts > 0 && !self.dense_layers.contains(&layer)).then_some(ExpertsConfig {
            experts: self.experts,
            experts_per_token: self.experts_per_token,
            router: self.router,
            router_normalized: self.router_normalized,
            router_bias: self.router_bias,
            choice_bias: self.choice_bias,
            expert_scale: self.expert_scale,
            expert_limit: self.expert_limit,
            shared_d_ff: self.shared_d_ff,
        })
    }

    /// The settings of all blocks, in order.
    pub fn layers(&self) -> impl Iterator<Item = LayerConfig> {
        (0..self.n_layers).map(|layer| self.layer(layer))
    }

    /// A setting for which a whole decode step has no kernel, if any.
    pub(crate) fn beyond_whole_steps(&self) -> Option<&'static str> {
        let settings = [
            ("experts that all tokens go through", self.experts > 0 && self.shared_d_ff > 0),
            ("experts of clamped activations", self.experts > 0 && self.expert_limit.is_some()),
            ("attention sinks", self.attention_sinks),
            ("clamped queries, keys and values", self.qkv_clip.is_some()),
            ("a first block without a norm", !self.first_norm),
            (
                "rotary positions by layer",
                self.rotary_positions().count() > 1 || !self.layers_without_positions.is_empty(),
            ),
            ("heads of which a part rotates", self.rotated() != self.head_dim),
            ("norms over all heads together", self.joint_qk_norm),
            ("another scale of scores", self.attention_scale.is_some()),
            ("soft-capping", self.attention_softcap.is_some() || self.logit_softcap.is_some()),
            ("multipliers", [self.embedding_multiplier, self.residual_multiplier, self.logit_divisor] != [1.0; 3]),
        ];
        settings.into_iter().find(|(_, is_set)| *is_set).map(|(setting, _)| setting)
    }

    /// The distinct windows of the layers.
    pub(crate) fn windows(&self) -> Vec<Option<usize>> {
        let mut windows: Vec<Option<usize>> = self.layers().map(|layer| layer.window).collect();
        windows.sort_unstable();
        windows.dedup();
        windows
    }
}
