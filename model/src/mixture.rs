//! The settings of mixtures of experts.

use serde::{Deserialize, Serialize};

/// How a router turns its logits into scores, of which the largest choose a token's experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RouterScores {
    /// A softmax over all experts. Normalized, the weights are a softmax over the chosen ones
    /// (Mixtral, gpt-oss).
    #[default]
    Softmax,
    /// A sigmoid for each expert (DeepSeek-V3).
    Sigmoid,
}

/// The mixture of a block, derived from the model's settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// Number of experts.
    pub experts: usize,
    /// Experts that each token goes through.
    pub experts_per_token: usize,
    /// The router's scores.
    pub router: RouterScores,
    /// Whether the scores of a token's experts are divided by their sum.
    pub router_normalized: bool,
    /// Whether the router's logits have a bias.
    pub router_bias: bool,
    /// Whether a bias is added to scores where experts are chosen, and only there.
    pub choice_bias: bool,
    /// Factor on the scores that experts' outputs are multiplied by.
    pub expert_scale: f64,
    /// Limit of what a gated activation gets.
    pub expert_limit: Option<f64>,
    /// Inner width of an expert that all tokens go through; 0 for none.
    pub shared_d_ff: usize,
}
