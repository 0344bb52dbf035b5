//! Frequencies of the rotary embedding, with the hub's scaling methods.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

/// Scaling of rotary frequencies for contexts longer than trained on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind", deny_unknown_fields)]
pub enum RotaryScaling {
    /// None.
    #[default]
    None,
    /// All divided by `factor` (Chen et al., 2023).
    Linear {
        /// Extension factor.
        factor: f64,
    },
    /// Llama 3.1: long wavelengths divided by `factor`, short ones kept, those in between
    /// interpolated.
    Llama3 {
        /// Extension factor.
        factor: f64,
        /// Wavelengths above the original context over this are divided.
        low_frequency_factor: f64,
        /// Wavelengths below the original context over this are kept.
        high_frequency_factor: f64,
        /// Context of the original training.
        original_context_length: usize,
    },
    /// YaRN (Peng et al., 2023): interpolates by the number of turns within the original context.
    Yarn {
        /// Extension factor.
        factor: f64,
        /// Factor on cosines and sines; `None` for the paper's `0.1 ln(factor) + 1`.
        attention_factor: Option<f64>,
        /// Turns above which a frequency is kept.
        beta_fast: f64,
        /// Turns below which a frequency is divided.
        beta_slow: f64,
        /// Context of the original training.
        original_context_length: usize,
        /// Whether the ramp starts and ends at whole pairs.
        #[serde(default = "yes")]
        truncate: bool,
    },
    /// LongRoPE (Ding et al., 2024), for sequences up to the original context: each frequency is
    /// divided by its own factor. Longer sequences have other factors.
    LongRope {
        /// A factor for each pair of elements that rotates.
        short_factors: Vec<f64>,
        /// The factors for longer sequences, which are only written; empty for the same.
        #[serde(default)]
        long_factors: Vec<f64>,
        /// The context with the long factors, which is only written; zero for the model's.
        #[serde(default)]
        longest: usize,
        /// Factor on cosines and sines.
        magnitude: f64,
    },
}

fn yes() -> bool {
    true
}

impl RotaryScaling {
    /// `head_dim / 2` frequencies, in radians per position; `head_dim` counts the elements that rotate.
    pub(crate) fn frequencies(&self, head_dim: usize, base: f64) -> Vec<f64> {
        let plain = (0..head_dim / 2).map(|pair| base.powf(-2.0 * pair as f64 / head_dim as f64));
        match self {
            Self::None => plain.collect(),
            Self::Linear { factor } => plain.map(|w| w / factor).collect(),
            Self::LongRope { short_factors, .. } => plain.zip(short_factors).map(|(w, factor)| w / factor).collect(),
            &Self::Llama3 { factor, low_frequency_factor, high_frequency_factor, original_context_length } => plain
                .map(|w| {
                    let turns = original_context_length as f64 * w / (2.0 * PI);
                    let kept = (turns - low_frequency_factor) / (high_frequency_factor - low_frequency_factor);
                    blend(w, factor, kept)
                })
                .collect(),
            &Self::Yarn { factor, beta_fast, beta_slow, original_context_length, truncate, .. } => {
                // The pair with this number of turns within the original context.
                let pair_of = |turns: f64| {
                    head_dim as f64 * (original_context_length as f64 / (turns * 2.0 * PI)).ln() / (2.0 * base.ln())
                };
                let (low, high) = (pair_of(beta_fast), pair_of(beta_slow));
                let (low, high) = if truncate { (low.floor(), high.ceil()) } else { (low, high) };
                let (low, high) = (low.max(0.0), high.min(head_dim as f64 - 1.0));
                let width = if high == low { 0.001 } else { high - low };
                plain.enumerate().map(|(pair, w)| blend(w, factor, 1.0 - (pair as f64 - low) / width)).collect()
            }
        }
    }

    /// Factor on cosines and sines.
    pub(crate) fn magnitude(&self) -> f64 {
        match *self {
            Self::Yarn { attention_factor: Some(magnitude), .. } | Self::LongRope { magnitude, .. } => magnitude,
            Self::Yarn { factor, .. } if factor > 1.0 => 0.1 * factor.ln() + 1.0,
            _ => 1.0,
        }
    }
}

/// Interpolates a frequency: `kept`, clamped to [0, 1], of it unchanged, the rest divided by
/// `factor`.
fn blend(frequency: f64, factor: f64, kept: f64) -> f64 {
    let kept = kept.clamp(0.0, 1.0);
    kept * frequency + (1.0 - kept) * frequency / factor
}
