//! Configuration of a transformer.

use serde::{Deserialize, Serialize};

use fireclay_kernels::{ActivationKind, NormKind};

use crate::classifier_config::ClassifierConfig;
use crate::mixture::RouterScores;
use crate::rotary::RotaryScaling;

/// Where the norms of a block are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NormPlacement {
    /// Before each sub-layer, and once more after the last block (GPT-2, Llama).
    Pre,
    /// On each sub-layer's output before it is added, and once more after the last block (OLMo 2).
    Output,
    /// Before each sub-layer, on its output, and once more after the last block (Gemma).
    Both,
    /// After each residual sum, and once after the embeddings (BERT).
    Post,
}

/// Position encoding.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Positions {
    /// A learned vector for each of `context_length` positions.
    Learned,
    /// Rotary embedding of queries and keys.
    Rotary {
        /// Wavelengths run from `2 pi` to `2 pi * base`.
        base: f64,
        /// Scaling of the frequencies for longer contexts.
        #[serde(default)]
        scaling: RotaryScaling,
    },
    /// None.
    None,
}

/// Which tokens a token attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttentionDirection {
    /// Itself and those before it.
    Causal,
    /// All tokens of the row.
    Bidirectional,
}

/// A transformer's shape. Start with a family's preset or [`new`](Self::new), adjust it with
/// `with_*`, and [`init`](Self::init) it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TransformerConfig {
    /// Vocabulary size.
    pub vocab_size: usize,
    /// Maximum tokens of a row.
    pub context_length: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Number of blocks.
    pub n_layers: usize,
    /// Number of query heads.
    pub n_heads: usize,
    /// Number of key and value heads, a divisor of `n_heads`.
    pub n_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Inner width of the feed-forward layer, of each expert if it is a mixture.
    pub d_ff: usize,
    /// Layer or RMS norm.
    pub norm: NormKind,
    /// Added to variances and mean squares.
    pub norm_epsilon: f64,
    /// Whether layer norms have a shift.
    #[serde(default = "yes")]
    pub norm_bias: bool,
    /// Whether embeddings are normalized although blocks begin with norms (ModernBERT).
    #[serde(default)]
    pub embedding_norm: bool,
    /// Whether the first block normalizes what its attention reads (not ModernBERT's, after a norm
    /// of embeddings).
    #[serde(default = "yes")]
    pub first_norm: bool,
    /// Before or after the sub-layers.
    pub norm_placement: NormPlacement,
    /// Learned, rotary or none.
    pub positions: Positions,
    /// Rotary positions of layers with a window, if they differ from those of others (Gemma 3, OLMo
    /// 3).
    #[serde(default)]
    pub window_positions: Option<Positions>,
    /// Layers without rotary positions, counted from zero, in order (SmolLM3).
    #[serde(default)]
    pub layers_without_positions: Vec<usize>,
    /// Number of elements of a head that rotate, the first ones; all by default (Phi-4-mini).
    #[serde(default)]
    pub rotary_dim: Option<usize>,
    /// Number of token types with an embedding; 0 for none.
    pub token_types: usize,
    /// How many tokens a convolution over the embeddings sees, an odd number; 0 for none. Its
    /// result is added to the embeddings.
    #[serde(default)]
    pub convolution: usize,
    /// Causal or bidirectional.
    pub attention: AttentionDirection,
    /// Maximum keys that a query sees, its own included; if attention is bidirectional, on either
    /// side.
    pub sliding_window: Option<usize>,
    /// A window per layer instead of `sliding_window`, 0 for none; empty if all layers are alike.
    #[serde(default)]
    pub layer_windows: Vec<usize>,
    /// RMS norm over each head of queries and keys (Qwen3).
    pub qk_norm: bool,
    /// Whether `qk_norm` is over all heads together (OLMo 2).
    #[serde(default)]
    pub joint_qk_norm: bool,
    /// Scale of attention scores; `1 / sqrt(head_dim)` by default.
    #[serde(default)]
    pub attention_scale: Option<f64>,
    /// Soft-capping of attention scores `s`: `cap * tanh(s / cap)` (Gemma 2).
    #[serde(default)]
    pub attention_softcap: Option<f64>,
    /// Soft-capping of logits (Gemma 2).
    #[serde(default)]
    pub logit_softcap: Option<f64>,
    /// Factor on token embeddings (Gemma, Granite).
    #[serde(default = "one")]
    pub embedding_multiplier: f64,
    /// Factor on what each sub-layer adds to the residual stream (Granite).
    #[serde(default = "one")]
    pub residual_multiplier: f64,
    /// Divides logits (Granite).
    #[serde(default = "one")]
    pub logit_divisor: f64,
    /// Bias on the query, key and value projection.
    pub qkv_bias: bool,
    /// Bias on attention's output projection.
    pub output_bias: bool,
    /// Biases in the feed-forward layer.
    pub feed_forward_bias: bool,
    /// The feed-forward layer's nonlinearity.
    pub activation: ActivationKind,
    /// Whether the nonlinearity gates a second projection.
    pub gated: bool,
    /// Number of experts of a feed-forward layer, of which each token goes through
    /// `experts_per_token`; 0 for dense layers.
    #[serde(default)]
    pub experts: usize,
    /// Experts that each token goes through.
    #[serde(default)]
    pub experts_per_token: usize,
    /// Layers without experts, counted from zero, in order.
    #[serde(default)]
    pub dense_layers: Vec<usize>,
    /// Inner width of the layers without experts; `d_ff` by default.
    #[serde(default)]
    pub dense_d_ff: Option<usize>,
    /// Inner width of one more expert that all tokens go through; 0 for none.
    #[serde(default)]
    pub shared_d_ff: usize,
    /// How routers score experts.
    #[serde(default)]
    pub router: RouterScores,
    /// Whether the scores of a token's experts are divided by their sum.
    #[serde(default = "yes")]
    pub router_normalized: bool,
    /// Bias on routers' logits (gpt-oss).
    #[serde(default)]
    pub router_bias: bool,
    /// A bias on scores where experts are chosen, and only there (DeepSeek-V3). It has no gradient.
    #[serde(default)]
    pub choice_bias: bool,
    /// Factor on the scores that experts' outputs are multiplied by.
    #[serde(default = "one")]
    pub expert_scale: f64,
    /// Limits what an expert's gated activation gets, and adds one to what it gates: `kind(min(gate,
    /// limit)) * (clamp(up, -limit, limit) + 1)` (gpt-oss).
    #[serde(default)]
    pub expert_limit: Option<f64>,
    /// A learned score per head that takes part in attention's softmax and contributes no value
    /// (gpt-oss).
    #[serde(default)]
    pub attention_sinks: bool,
    /// Queries, keys and values are clamped to this magnitude after their norms (OLMoE).
    #[serde(default)]
    pub qkv_clip: Option<f64>,
    /// Whether the output projection is the embedding table.
    pub tied_embeddings: bool,
    /// Probability of dropout after embeddings, on attention and after each sub-layer, in training.
    pub dropout: f64,
    /// Standard deviation of initial matrices.
    pub init_deviation: f64,
    /// Whether projections into the residual stream are initialized smaller by `sqrt(2 *
    /// n_layers)`, as in GPT-2.
    pub residual_scaling: bool,
    /// Number of intents of an encoder's head; 0 for no head.
    #[serde(default)]
    pub intents: usize,
    /// Number of tags of an encoder's head; 0 for no head.
    #[serde(default)]
    pub tags: usize,
    /// The head of a sequence classifier.
    #[serde(default)]
    pub classifier: Option<ClassifierConfig>,
}

fn yes() -> bool {
    true
}

fn one() -> f64 {
    1.0
}

/// A contradiction between settings.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the model's {0}")]
pub struct ConfigError(pub(crate) String);

macro_rules! with {
    ($($(#[$doc:meta])* $with:ident: $field:ident, $type:ty;)*) => {
        $($(#[$doc])*
        pub fn $with(mut self, $field: $type) -> Self {
            self.$field = $field;
            self
        })*
    };
}

impl TransformerConfig {
    with! {
        /// With this many key and value heads.
        with_n_kv_heads: n_kv_heads, usize;
        /// With heads of this width.
        with_head_dim: head_dim, usize;
        /// With a feed-forward layer of this width.
        with_d_ff: d_ff, usize;
        /// With layer or RMS norms.
        with_norm: norm, NormKind;
        /// With this epsilon in the norms.
        with_norm_epsilon: norm_epsilon, f64;
        /// With norms before or after the sub-layers.
        with_norm_placement: norm_placement, NormPlacement;
        /// With learned, rotary or no positions.
        with_positions: positions, Positions;
        /// With other rotary positions in layers with a window.
        with_window_positions: window_positions, Option<Positions>;
        /// Without positions in these layers.
        with_layers_without_positions: layers_without_positions, Vec<usize>;
        /// With this many rotating elements of a head.
        with_rotary_dim: rotary_dim, Option<usize>;
        /// With vectors for this many token types.
        with_token_types: token_types, usize;
        /// With a convolution over the embeddings of this many tokens.
        with_convolution: convolution, usize;
        /// Causal or bidirectional.
        with_attention: attention, AttentionDirection;
        /// With a window of keys.
        with_sliding_window: sliding_window, Option<usize>;
        /// With a window of keys for each layer, 0 for none.
        with_layer_windows: layer_windows, Vec<usize>;
        /// With norms on queries and keys.
        with_qk_norm: qk_norm, bool;
        /// With norms of queries and keys over all heads together.
        with_joint_qk_norm: joint_qk_norm, bool;
        /// With this scale of attention scores.
        with_attention_scale: attention_scale, Option<f64>;
        /// With soft-capped attention scores.
        with_attention_softcap: attention_softcap, Option<f64>;
        /// With soft-capped logits.
        with_logit_softcap: logit_softcap, Option<f64>;
        /// With this factor on token embeddings.
        with_embedding_multiplier: embedding_multiplier, f64;
        /// With this factor on what sub-layers add.
        with_residual_multiplier: residual_multiplier, f64;
        /// With logits divided by this.
        with_logit_divisor: logit_divisor, f64;
        /// With a bias on queries, keys and values.
        with_qkv_bias: qkv_bias, bool;
        /// With a bias on attention's output.
        with_output_bias: output_bias, bool;
        /// With biases in the feed-forward layer.
        with_feed_forward_bias: feed_forward_bias, bool;
        /// With this nonlinearity.
        with_activation: activation, ActivationKind;
        /// With a gated feed-forward layer.
        with_gated: gated, bool;
        /// With this many experts in each feed-forward layer.
        with_experts: experts, usize;
        /// With this many experts for each token.
        with_experts_per_token: experts_per_token, usize;
        /// Without experts in these layers.
        with_dense_layers: dense_layers, Vec<usize>;
        /// With layers without experts of this inner width.
        with_dense_d_ff: dense_d_ff, Option<usize>;
        /// With an expert of this inner width for all tokens.
        with_shared_d_ff: shared_d_ff, usize;
        /// With routers that score experts so.
        with_router: router, RouterScores;
        /// With scores of chosen experts that sum to one.
        with_router_normalized: router_normalized, bool;
        /// With a bias on routers' logits.
        with_router_bias: router_bias, bool;
        /// With a bias on the scores by which experts are chosen.
        with_choice_bias: choice_bias, bool;
        /// With this factor on experts' scores.
        with_expert_scale: expert_scale, f64;
        /// With this limit of what experts' activations get.
        with_expert_limit: expert_limit, Option<f64>;
        /// With attention sinks.
        with_attention_sinks: attention_sinks, bool;
        /// With queries, keys and values of at most this magnitude.
        with_qkv_clip: qkv_clip, Option<f64>;
        /// With the embedding table as output projection.
        with_tied_embeddings: tied_embeddings, bool;
        /// With dropout in training.
        with_dropout: dropout, f64;
        /// With matrices of this initial standard deviation.
        with_init_deviation: init_deviation, f64;
        /// With smaller initial projections into the residual stream.
        with_residual_scaling: residual_scaling, bool;
        /// With a head for this many intents.
        with_intents: intents, usize;
        /// With a head for this many tags.
        with_tags: tags, usize;
        /// With this head for sequences; see [`with_labels`](Self::with_labels).
        with_classifier: classifier, Option<ClassifierConfig>;
    }

    /// Checks that the config can be built. Errors name the contradicting fields.
    ///
    /// # Errors
    /// [`ConfigError`], one line.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("context_length", self.context_length),
            ("d_model", self.d_model),
            ("n_layers", self.n_layers),
            ("n_heads", self.n_heads),
            ("n_kv_heads", self.n_kv_heads),
            ("head_dim", self.head_dim),
            ("d_ff", self.d_ff),
        ];
        if let Some((name, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return Err(ConfigError(format!("{name} must be at least 1")));
        }
        // Far beyond any existing model: a damaged or hostile file must not allocate unbounded
        // memory.
        let positions = self.context_length.saturating_mul(self.head_dim);
        for (name, size, most) in [
            ("vocab_size", self.vocab_size, 1 << 26),
            ("context_length", self.context_length, 1 << 24),
            ("d_model", self.d_model, 1 << 20),
            ("n_layers", self.n_layers, 10_000),
            ("n_heads", self.n_heads, 1 << 16),
            ("n_kv_heads", self.n_kv_heads, 1 << 16),
            ("head_dim", self.head_dim, 1 << 14),
            ("d_ff", self.d_ff, 1 << 24),
            ("context_length * head_dim", positions, 1 << 31),
            ("convolution", self.convolution, 1 << 10),
        ] {
            if size > most {
                return Err(ConfigError(format!("{name} ({size}) must be {most} at the most")));
            }
        }
        let contradictions = [
            (
                !self.n_heads.is_multiple_of(self.n_kv_heads),
                format!("n_heads ({}) is not a multiple of n_kv_heads ({})", self.n_heads, self.n_kv_heads),
            ),
            (
                matches!(self.positions, Positions::Rotary { .. }) && !self.head_dim.is_multiple_of(2),
                format!("head_dim ({}) is odd, but positions are rotary and turn pairs", self.head_dim),
            ),
            (
                self.rotary_dim.is_some_and(|dim| dim == 0 || dim % 2 == 1 || dim > self.head_dim),
                format!("rotary_dim ({:?}) is not an even number up to head_dim ({})", self.rotary_dim, self.head_dim),
            ),
            (
                !matches!(self.positions, Positions::Rotary { .. })
                    && (self.rotary_dim.is_some()
                        || self.window_positions.is_some()
                        || !self.layers_without_positions.is_empty()),
                "rotary_dim, window_positions and layers_without_positions are set, but positions are not rotary"
                    .into(),
            ),
            (
                self.window_positions.as_ref().is_some_and(|own| !matches!(own, Positions::Rotary { .. })),
                "window_positions are not rotary, but positions are".into(),
            ),
            (
                self.layers_without_positions.iter().any(|layer| *layer >= self.n_layers),
                format!("layers_without_positions has a layer that is not below n_layers ({})", self.n_layers),
            ),
            (self.joint_qk_norm && !self.qk_norm, "joint_qk_norm is set, but qk_norm is not".into()),
            (
                self.qkv_clip.is_some() && self.qk_norm && !self.joint_qk_norm,
                "qkv_clip is set, but qk_norm is of single heads, and not joint_qk_norm".into(),
            ),
            (
                self.embedding_norm && self.norm_placement == NormPlacement::Post,
                "embedding_norm is set, but norm_placement is post, which has one anyway".into(),
            ),
            (
                !self.first_norm && self.norm_placement != NormPlacement::Pre,
                "first_norm is false, but norm_placement is not pre".into(),
            ),
            (
                !self.layer_windows.is_empty() && self.sliding_window.is_some(),
                "layer_windows and sliding_window are both set: give one of them".into(),
            ),
            (
                ![0, self.n_layers].contains(&self.layer_windows.len()),
                format!("layer_windows ({}) are not as many as n_layers ({})", self.layer_windows.len(), self.n_layers),
            ),
            (
                self.token_types > 0 && self.attention == AttentionDirection::Causal,
                "token_types is set, but attention is causal: token types belong to encoders".into(),
            ),
            (
                self.convolution > 0 && self.convolution.is_multiple_of(2),
                format!("convolution ({}) is even, but has a token in its middle", self.convolution),
            ),
            (
                self.convolution > 0 && self.attention == AttentionDirection::Causal,
                "convolution is set, but attention is causal: a convolution sees what follows".into(),
            ),
            (
                self.residual_scaling && self.norm_placement == NormPlacement::Post,
                "residual_scaling is set, but norm_placement is post: the norms would undo it".into(),
            ),
            (
                (self.intents > 0) != (self.tags > 0),
                format!("intents ({}) and tags ({}) go together: give both, or neither", self.intents, self.tags),
            ),
            (
                self.tags > 0 && self.attention == AttentionDirection::Causal,
                "tags are set, but attention is causal: a tag depends on what follows its word".into(),
            ),
            (
                self.classifier.is_some() && self.attention == AttentionDirection::Causal,
                "classifier is set, but attention is causal: it belongs to encoders".into(),
            ),
            (
                self.classifier.is_some() && self.tags > 0,
                "classifier and tags are both set: an encoder has one of these heads".into(),
            ),
        ];
        if let Some((_, message)) = contradictions.into_iter().find(|(wrong, _)| *wrong) {
            return Err(ConfigError(message));
        }
        if let Some(message) = self.wrong_mixture() {
            return Err(ConfigError(message));
        }
        if let Some(contradiction) = self.classifier.as_ref().and_then(ClassifierConfig::contradiction) {
            return Err(ConfigError(contradiction));
        }
        if self.sliding_window == Some(0) {
            return Err(ConfigError("sliding_window must be at least 1, or left out".into()));
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(ConfigError(format!("dropout ({}) must be at least 0 and below 1", self.dropout)));
        }
        for (name, value) in [("norm_epsilon", self.norm_epsilon), ("init_deviation", self.init_deviation)] {
            if !value.is_finite() || value < 0.0 {
                return Err(ConfigError(format!("{name} ({value}) must be a number, and not below 0")));
            }
        }
        for (name, value) in [
            ("attention_scale", self.attention_scale),
            ("attention_softcap", self.attention_softcap),
            ("qkv_clip", self.qkv_clip),
            ("logit_softcap", self.logit_softcap),
            ("embedding_multiplier", Some(self.embedding_multiplier)),
            ("residual_multiplier", Some(self.residual_multiplier)),
            ("logit_divisor", Some(self.logit_divisor)),
        ] {
            if let Some(value) = value.filter(|value| !(value.is_finite() && *value > 0.0)) {
                return Err(ConfigError(format!("{name} ({value}) must be a number above 0")));
            }
        }
        Ok(())
    }

    /// Initial standard deviation of a projection into the residual stream.
    pub(crate) fn residual_deviation(&self) -> f64 {
        match self.residual_scaling {
            true => self.init_deviation / (2.0 * self.n_layers as f64).sqrt(),
            false => self.init_deviation,
        }
    }

    /// Number of elements of a head that rotate.
    pub(crate) fn rotated(&self) -> usize {
        self.rotary_dim.unwrap_or(self.head_dim)
    }

    /// The context as `config.json` has it: longer if longrope's long factors reach further.
    pub(crate) fn longest_context(&self) -> usize {
        match &self.positions {
            Positions::Rotary { scaling: RotaryScaling::LongRope { longest, .. }, .. } => {
                self.context_length.max(*longest)
            }
            _ => self.context_length,
        }
    }

    /// The distinct rotary positions of the layers, of which [`LayerConfig`](crate::LayerConfig)
    /// has the index.
    pub(crate) fn rotary_positions(&self) -> impl Iterator<Item = &Positions> {
        let rotary = std::iter::once(&self.positions).chain(&self.window_positions);
        rotary.filter(|positions| matches!(positions, Positions::Rotary { .. }))
    }

    /// Rows of the joint query, key and value projection.
    pub fn qkv_width(&self) -> usize {
        (self.n_heads + 2 * self.n_kv_heads) * self.head_dim
    }

    /// Rows of the first feed-forward projection, gate and up together if it is gated.
    pub fn up_width(&self) -> usize {
        if self.gated { 2 * self.d_ff } else { self.d_ff }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contradictions_are_refused_with_both_fields_named() {
        let base = TransformerConfig::gpt2(10, 8, 12, 1, 3);
        assert_eq!(base.validate(), Ok(()));
        let cases = [
            (base.clone().with_convolution(3), ["convolution", "causal"]),
            (
                base.clone().with_attention(AttentionDirection::Bidirectional).with_convolution(2),
                ["convolution", "even"],
            ),
            (base.clone().with_n_kv_heads(2), ["n_heads", "n_kv_heads"]),
            (
                base.clone()
                    .with_head_dim(5)
                    .with_positions(Positions::Rotary { base: 1e4, scaling: RotaryScaling::None }),
                ["head_dim", "positions"],
            ),
            (
                TransformerConfig { embedding_norm: true, ..TransformerConfig::bert(10, 8, 12, 1, 3) },
                ["embedding_norm", "post"],
            ),
            (
                TransformerConfig { first_norm: false, ..TransformerConfig::bert(10, 8, 12, 1, 3) },
                ["first_norm", "pre"],
            ),
            (base.clone().with_layer_windows(vec![4, 0]), ["layer_windows", "n_layers"]),
            (
                base.clone().with_layer_windows(vec![4]).with_sliding_window(Some(4)),
                ["layer_windows", "sliding_window"],
            ),
            (base.clone().with_token_types(2), ["token_types", "attention"]),
            (base.clone().with_norm_placement(NormPlacement::Post), ["residual_scaling", "norm_placement"]),
            (base.clone().with_intents(2), ["intents", "tags"]),
            (base.clone().with_joint_qk_norm(true), ["joint_qk_norm", "qk_norm"]),
            (base.clone().with_rotary_dim(Some(2)), ["rotary_dim", "positions"]),
            (TransformerConfig::llama(10, 8, 12, 1, 3).with_rotary_dim(Some(6)), ["rotary_dim", "head_dim"]),
            (
                TransformerConfig::llama(10, 8, 12, 1, 3).with_layers_without_positions(vec![1]),
                ["layers_without_positions", "n_layers"],
            ),
            (
                TransformerConfig::llama(10, 8, 12, 1, 3).with_window_positions(Some(Positions::None)),
                ["window_positions", "rotary"],
            ),
            (base.clone().with_attention_scale(Some(-1.0)), ["attention_scale", "above 0"]),
            (base.clone().with_logit_softcap(Some(0.0)), ["logit_softcap", "above 0"]),
            (base.clone().with_residual_multiplier(f64::NAN), ["residual_multiplier", "above 0"]),
            (base.clone().with_intents(2).with_tags(3), ["tags", "attention"]),
            (base.clone().with_experts(4), ["experts_per_token (0)", "experts (4)"]),
            (base.clone().with_experts(4).with_experts_per_token(5), ["experts_per_token (5)", "experts (4)"]),
            (base.clone().with_experts(1025).with_experts_per_token(2), ["experts (1025)", "1024"]),
            (base.clone().with_experts_per_token(2), ["experts_per_token", "experts is not"]),
            (base.clone().with_shared_d_ff(8), ["shared_d_ff", "experts is not"]),
            (base.clone().with_router_normalized(false), ["router_normalized", "experts is not"]),
            (
                base.clone().with_experts(4).with_experts_per_token(2).with_dense_layers(vec![1]),
                ["dense_layers", "n_layers"],
            ),
            (
                base.clone().with_experts(4).with_experts_per_token(2).with_dense_layers(vec![0]),
                ["dense_layers are all", "n_layers"],
            ),
            (
                base.clone().with_experts(4).with_experts_per_token(2).with_dense_d_ff(Some(8)),
                ["dense_d_ff", "dense_layers"],
            ),
            (
                base.clone().with_experts(4).with_experts_per_token(2).with_expert_limit(Some(7.0)),
                ["expert_limit", "gated"],
            ),
            (base.clone().with_qkv_clip(Some(0.0)), ["qkv_clip", "above 0"]),
            (TransformerConfig::qwen3(10, 8, 12, 1, 3, 4).with_qkv_clip(Some(8.0)), ["qkv_clip", "joint_qk_norm"]),
        ];
        for (config, fields) in cases {
            let message = config.validate().expect_err("a contradiction").to_string();
            assert!(fields.iter().all(|field| message.contains(field)), "{message}");
        }
    }
}
