//! Contradictions between the settings of mixtures of experts.

use fireclay_kernels::MOST_EXPERTS;

use crate::config::TransformerConfig;
use crate::mixture::RouterScores;

impl TransformerConfig {
    /// What contradicts what among the settings of mixtures: the first is what a message says.
    pub(crate) fn wrong_mixture(&self) -> Option<String> {
        let (experts, k) = (self.experts, self.experts_per_token);
        if experts == 0 {
            let set = [
                ("experts_per_token", k > 0),
                ("dense_layers", !self.dense_layers.is_empty()),
                ("dense_d_ff", self.dense_d_ff.is_some()),
                ("shared_d_ff", self.shared_d_ff > 0),
                ("router", self.router != RouterScores::default()),
                ("router_normalized", !self.router_normalized),
                ("router_bias", self.router_bias),
                ("choice_bias", self.choice_bias),
                ("expert_scale", self.expert_scale != 1.0),
                ("expert_limit", self.expert_limit.is_some()),
            ];
            let (name, _) = set.into_iter().find(|(_, is_set)| *is_set)?;
            return Some(format!("{name} is set, but experts is not: it is about mixtures of experts"));
        }
        let number = |value: f64| value.is_finite() && value > 0.0;
        let contradictions = [
            (experts > MOST_EXPERTS, format!("experts ({experts}) must be {MOST_EXPERTS} at the most")),
            (
                k == 0 || k > experts,
                format!("experts_per_token ({k}) must be at least 1, and at most experts ({experts})"),
            ),
            (
                self.dense_layers.iter().any(|layer| *layer >= self.n_layers),
                format!("dense_layers has a layer that is not below n_layers ({})", self.n_layers),
            ),
            (
                (0..self.n_layers).all(|layer| self.dense_layers.contains(&layer)),
                format!("dense_layers are all of n_layers ({}), but experts is set", self.n_layers),
            ),
            (
                self.dense_d_ff.is_some() && self.dense_layers.is_empty(),
                "dense_d_ff is set, but dense_layers is empty".into(),
            ),
            (
                [self.dense_d_ff.unwrap_or(1), self.shared_d_ff.max(1)]
                    .iter()
                    .any(|size| *size == 0 || *size > 1 << 24),
                format!("dense_d_ff ({:?}) or shared_d_ff ({}) is no width", self.dense_d_ff, self.shared_d_ff),
            ),
            (
                experts.saturating_mul(self.up_width()).saturating_mul(self.d_model) > 1 << 40,
                format!("experts ({experts}) times d_ff ({}) and d_model ({}) is too large", self.d_ff, self.d_model),
            ),
            (
                self.expert_limit.is_some_and(|limit| !number(limit)),
                format!("expert_limit ({:?}) must be a number above 0", self.expert_limit),
            ),
            (!number(self.expert_scale), format!("expert_scale ({}) must be a number above 0", self.expert_scale)),
            (self.expert_limit.is_some() && !self.gated, "expert_limit is set, but gated is not".into()),
        ];
        contradictions.into_iter().find(|(wrong, _)| *wrong).map(|(_, message)| message)
    }
}
