//! How a pretrained model is fine-tuned: the `[lora]` and `[preference]` of a recipe.

use serde::{Deserialize, Serialize};

/// What of a model is trained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdapterKind {
    /// All weights.
    #[default]
    None,
    /// A low-rank adapter (LoRA; Hu et al., 2021) on frozen weights.
    Lora,
}

/// The `[lora]` of a recipe, in PEFT's words.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LoraRecipe {
    /// Rank of the two matrices.
    pub rank: usize,
    /// What an adapter adds is scaled by `alpha / rank`.
    pub alpha: f64,
    /// Scale by `alpha / sqrt(rank)` instead (rsLoRA).
    pub rslora: bool,
    /// Probability that an input of an adapter is zero, in training.
    pub lora_dropout: f64,
    /// `all-linear`, or names of modules with commas between, such as `q_proj,v_proj`.
    pub targets: String,
    /// Modules that are trained whole, with commas between, such as `embed_tokens`.
    pub modules_to_save: String,
    /// Whether each output is scaled to a magnitude that is trained, too (DoRA; Liu et al., 2024).
    pub dora: bool,
    /// What the frozen weights are stored as: `auto`, `float`, `int8`, `nf4` or `stored`.
    pub base: BaseKind,
}

/// What frozen weights are stored as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BaseKind {
    /// As the files store them where these are quantized, else the dtype of the activations.
    #[default]
    Auto,
    /// The dtype of the activations.
    Float,
    /// Bytes with a scale per row.
    Int8,
    /// NF4, 4 bits with a scale per 64 weights (QLoRA; Dettmers et al., 2023).
    Nf4,
    /// As the files store them: quantized, or floats of 16 bits.
    Stored,
}

/// The `[preference]` of a recipe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PreferenceRecipe {
    /// `sigmoid`, `ipo` or `sigmoid_norm`.
    pub loss: PreferenceLoss,
    /// How strongly the model is held to the reference: the scale of rewards.
    pub beta: f64,
}

/// The loss of a preference pair, of the log-ratios of policy and reference: see
/// [`pair_losses`](crate::tasks::preference::pair_losses).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PreferenceLoss {
    /// Negative log-sigmoid of the reward margin (DPO; Rafailov et al., 2023).
    #[default]
    Sigmoid,
    /// Squared distance of the margin per token from `1 / (2 beta)` (IPO; Azar et al., 2023).
    Ipo,
    /// The sigmoid loss of rewards per token.
    SigmoidNorm,
}

impl Default for PreferenceRecipe {
    fn default() -> Self {
        Self { loss: PreferenceLoss::Sigmoid, beta: 0.1 }
    }
}

impl Default for LoraRecipe {
    fn default() -> Self {
        Self {
            rank: 16,
            alpha: 32.0,
            rslora: false,
            lora_dropout: 0.0,
            targets: "all-linear".into(),
            modules_to_save: String::new(),
            dora: false,
            base: BaseKind::Auto,
        }
    }
}
