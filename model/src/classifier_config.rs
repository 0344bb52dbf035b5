//! Settings of the head of a sequence classifier.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use fireclay_kernels::ActivationKind;

/// Which hidden state stands for a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClassifierPooling {
    /// That of the first token, `[CLS]`.
    #[default]
    Cls,
    /// The mean over the tokens.
    Mean,
}

/// The head of a sequence classifier.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ClassifierConfig {
    /// Names of the labels, in the order of the logits.
    pub labels: Vec<String>,
    /// The hidden state that stands for a sequence.
    pub pooling: ClassifierPooling,
    /// The nonlinearity after the dense layer; `None` for tanh (BERT's).
    pub activation: Option<ActivationKind>,
    /// Whether the dense layer has a bias.
    pub bias: bool,
    /// Whether a layer norm follows the nonlinearity (ModernBERT's), with the model's epsilon, and
    /// a shift if the model's norms have one.
    pub norm: bool,
    /// Probability of dropout before the output layer, in training.
    pub dropout: f64,
}

impl Default for ClassifierConfig {
    /// ModernBERT's head, without labels.
    fn default() -> Self {
        Self {
            labels: Vec::new(),
            pooling: ClassifierPooling::Cls,
            activation: Some(ActivationKind::GeluErf),
            bias: false,
            norm: true,
            dropout: 0.0,
        }
    }
}

impl ClassifierConfig {
    /// BERT's head, without labels.
    pub fn bert() -> Self {
        Self { activation: None, bias: true, norm: false, ..Self::default() }
    }

    /// What contradicts itself, if anything.
    pub(crate) fn contradiction(&self) -> Option<String> {
        if self.labels.is_empty() {
            return Some("classifier has no labels".into());
        }
        let mut seen = BTreeSet::new();
        if let Some(twice) = self.labels.iter().find(|label| !seen.insert(*label)) {
            return Some(format!("classifier has the label '{twice}' twice"));
        }
        let fits = (0.0..1.0).contains(&self.dropout);
        (!fits).then(|| format!("classifier.dropout ({}) must be at least 0 and below 1", self.dropout))
    }

    /// Parameters of the head of a model of this width.
    pub(crate) fn parameter_count(&self, width: usize, norm_bias: bool) -> usize {
        let norms = usize::from(self.norm) * if norm_bias { 2 } else { 1 };
        width * (width + usize::from(self.bias) + norms) + self.labels.len() * (width + 1)
    }
}
