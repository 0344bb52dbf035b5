//! Typed access to `config.json`, and what several families share of it.

use fireclay_kernels::ActivationKind;
use serde_json::{Value, json};

use super::family::Family;
use crate::config::{ConfigError, Positions};
use crate::rotary::RotaryScaling;

const ACTIVATIONS: [(ActivationKind, &str); 12] = [
    (ActivationKind::GeluTanh, "gelu_new"),
    (ActivationKind::GeluTanh, "gelu_pytorch_tanh"),
    (ActivationKind::GeluTanh, "gelu_fast"),
    (ActivationKind::GeluTanh, "gelu_accurate"),
    (ActivationKind::GeluTanh, "gelu_python_tanh"),
    (ActivationKind::GeluErf, "gelu"),
    (ActivationKind::GeluErf, "gelu_python"),
    (ActivationKind::QuickGelu, "quick_gelu"),
    (ActivationKind::ReluSquared, "relu2"),
    (ActivationKind::Relu, "relu"),
    (ActivationKind::Silu, "silu"),
    (ActivationKind::Silu, "swish"),
];

pub(super) fn activation_name(activation: ActivationKind) -> &'static str {
    ACTIVATIONS.iter().find(|(known, _)| *known == activation).map_or("", |(_, name)| name)
}

pub(super) fn write_scaling(scaling: &RotaryScaling, context_length: usize) -> Value {
    match scaling {
        RotaryScaling::None => Value::Null,
        RotaryScaling::Linear { factor } => json!({ "rope_type": "linear", "factor": factor }),
        RotaryScaling::Llama3 { factor, low_frequency_factor, high_frequency_factor, original_context_length } => {
            json!({
                "rope_type": "llama3", "factor": factor, "low_freq_factor": low_frequency_factor,
                "high_freq_factor": high_frequency_factor,
                "original_max_position_embeddings": original_context_length,
            })
        }
        RotaryScaling::Yarn { factor, attention_factor, beta_fast, beta_slow, original_context_length, truncate } => {
            json!({
                "rope_type": "yarn", "factor": factor, "attention_factor": attention_factor, "beta_fast": beta_fast,
                "beta_slow": beta_slow, "original_max_position_embeddings": original_context_length,
                "truncate": truncate,
            })
        }
        // The short factors are valid up to this length.
        RotaryScaling::LongRope { short_factors, long_factors, magnitude, .. } => json!({
            "rope_type": "longrope", "short_factor": short_factors,
            "long_factor": if long_factors.is_empty() { short_factors } else { long_factors },
            "attention_factor": magnitude, "original_max_position_embeddings": context_length,
        }),
    }
}

/// The window of each layer by `layer_types`, if it is given.
pub(super) fn layer_types(
    fields: &Fields<'_>,
    window: Option<usize>,
    n_layers: usize,
) -> Result<Option<Vec<Option<usize>>>, ConfigError> {
    let Some(types) = fields.get("layer_types") else { return Ok(None) };
    let types = types.as_array().filter(|types| types.len() == n_layers);
    let types = types.ok_or_else(|| Fields::wrong("layer_types", "a list with a type for each layer"))?;
    let of = |kind: &Value| match (kind.as_str(), window) {
        (Some("full_attention"), _) => Ok(None),
        (Some("sliding_attention"), Some(_)) => Ok(window),
        (Some("sliding_attention"), None) => {
            Err(ConfigError("config.json: layer_types has sliding_attention, but there is no sliding_window".into()))
        }
        _ => Err(ConfigError(format!("config.json: layer_types has {kind}, which is not supported"))),
    };
    types.iter().map(of).collect::<Result<_, _>>().map(Some)
}

/// The window of all layers, or else of each.
pub(super) fn by_layer(windows: Vec<Option<usize>>) -> (Option<usize>, Vec<usize>) {
    match windows.windows(2).all(|pair| pair[0] == pair[1]) {
        true => (windows.first().copied().flatten(), Vec::new()),
        false => (None, windows.into_iter().map(|window| window.unwrap_or(0)).collect()),
    }
}

/// Typed access to a JSON object; errors name the field.
pub(super) struct Fields<'a>(pub(super) &'a Value);

impl Fields<'_> {
    pub(super) fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    pub(super) fn wrong(name: &str, wanted: &str) -> ConfigError {
        ConfigError(format!("config.json: {name} is not {wanted}"))
    }

    pub(super) fn text(&self, name: &str) -> Result<&str, ConfigError> {
        let value = self.get(name).ok_or_else(|| ConfigError(format!("config.json: {name} is missing")))?;
        value.as_str().ok_or_else(|| Self::wrong(name, "a text"))
    }

    pub(super) fn optional_size(&self, name: &str) -> Result<Option<usize>, ConfigError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let size = value.as_u64().and_then(|value| usize::try_from(value).ok()).filter(|size| *size <= 1 << 32);
        size.map(Some).ok_or_else(|| Self::wrong(name, "a size"))
    }

    pub(super) fn size(&self, name: &str) -> Result<usize, ConfigError> {
        self.optional_size(name)?.ok_or_else(|| ConfigError(format!("config.json: {name} is missing")))
    }

    /// A size with two names, in order of precedence.
    pub(super) fn size_by(&self, [name, other]: [&str; 2]) -> Result<usize, ConfigError> {
        match self.optional_size(name)? {
            Some(size) => Ok(size),
            None if self.get(other).is_some() => self.size(other),
            None => self.size(name),
        }
    }

    pub(super) fn size_or(&self, name: &str, default: usize) -> Result<usize, ConfigError> {
        Ok(self.optional_size(name)?.unwrap_or(default))
    }

    pub(super) fn number_or(&self, name: &str, default: f64) -> Result<f64, ConfigError> {
        match self.get(name) {
            Some(value) => value.as_f64().ok_or_else(|| Self::wrong(name, "a number")),
            None => Ok(default),
        }
    }

    /// A list of this many positive numbers.
    pub(super) fn numbers(&self, name: &str, count: usize) -> Result<Vec<f64>, ConfigError> {
        let list = self.get(name).and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let numbers: Vec<f64> = list.iter().filter_map(Value::as_f64).filter(|number| *number > 0.0).collect();
        match numbers.len() == count && list.len() == count {
            true => Ok(numbers),
            false => Err(Self::wrong(name, &format!("a list of {count} numbers above 0"))),
        }
    }

    pub(super) fn flag_or(&self, name: &str, default: bool) -> Result<bool, ConfigError> {
        match self.get(name) {
            Some(value) => value.as_bool().ok_or_else(|| Self::wrong(name, "true or false")),
            None => Ok(default),
        }
    }

    pub(super) fn activation(&self, name: &str, default: ActivationKind) -> Result<ActivationKind, ConfigError> {
        let Some(_) = self.get(name) else { return Ok(default) };
        let text = self.text(name)?;
        let known = ACTIVATIONS.iter().find(|(_, known)| *known == text).map(|(activation, _)| *activation);
        known.ok_or_else(|| ConfigError(format!("config.json: {name} '{text}' is not supported")))
    }

    /// The window of all layers, or else of each.
    pub(super) fn windows(&self, family: Family, n_layers: usize) -> Result<(Option<usize>, Vec<usize>), ConfigError> {
        // The default of transformers; null is no window.
        let window = match self.0.get("sliding_window") {
            None => Some(4096),
            Some(_) => self.optional_size("sliding_window")?,
        };
        let window = match family {
            Family::Mistral => window,
            Family::Qwen2 | Family::Qwen3 => {
                window.filter(|_| self.0.get("use_sliding_window") == Some(&Value::Bool(true)))
            }
            // Llama has none, whatever the file says.
            _ => return Ok((None, Vec::new())),
        };
        if family != Family::Mistral {
            self.flag_or("use_sliding_window", false)?;
        }
        // In a list of windows it would mean none.
        if window == Some(0) {
            return Err(ConfigError("config.json: sliding_window is 0; it must be at least 1".into()));
        }
        // The allowed maximum, which is checked later.
        let n_layers = n_layers.min(1 << 14);
        let layers = match layer_types(self, window, n_layers)? {
            Some(layers) => layers,
            None if family == Family::Mistral => vec![window; n_layers],
            None => {
                let full = self.size_or("max_window_layers", 28)?;
                (0..n_layers).map(|layer| window.filter(|_| layer >= full)).collect()
            }
        };
        Ok(by_layer(layers))
    }

    /// Refuses unsupported settings that change the model, unless they have the given neutral
    /// value.
    pub(super) fn refuse(&self, settings: &[(&str, Value)]) -> Result<(), ConfigError> {
        for (name, allowed) in settings {
            // 1 is 1.0.
            let same =
                |value: &Value| value == allowed || value.as_f64().is_some_and(|value| allowed.as_f64() == Some(value));
            if let Some(value) = self.get(name).filter(|value| !same(value)) {
                return Err(ConfigError(format!("config.json: {name} is {value}; only {allowed} is supported")));
            }
        }
        Ok(())
    }

    /// YaRN's factor on cosines and sines, if it is not the paper's: `attention_factor`, or
    /// DeepSeek's quotient of two.
    pub(super) fn attention_factor(&self, factor: f64) -> Result<Option<f64>, ConfigError> {
        if self.get("attention_factor").is_some() {
            return self.number_or("attention_factor", 1.0).map(Some);
        }
        let [one, all] = [self.number_or("mscale", 0.0)?, self.number_or("mscale_all_dim", 0.0)?];
        let magnitude = |scale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 };
        Ok((one != 0.0 && all != 0.0).then(|| magnitude(one) / magnitude(all)))
    }

    /// Rotary positions and their scaling, from `rope_scaling` or else `rope_parameters`, whose
    /// base precedes `rope_theta`, as in transformers.
    pub(super) fn rotary(&self, context_length: usize, head_dim: usize) -> Result<(Positions, usize), ConfigError> {
        self.refuse_parts()?;
        self.rotary_part(context_length, head_dim, 10_000.0, context_length)
    }

    /// Refuses a rotation of only a part of each head.
    pub(super) fn refuse_parts(&self) -> Result<(), ConfigError> {
        let scalings = || ["rope_scaling", "rope_parameters"].into_iter().filter_map(|name| self.get(name));
        let kinds = ["full_attention", "sliding_attention"];
        let nested = scalings().flat_map(|scaling| kinds.into_iter().filter_map(|kind| scaling.get(kind)));
        for fields in std::iter::once(self.0).chain(scalings()).chain(nested) {
            Fields(fields).refuse(&[("partial_rotary_factor", json!(1.0))])?;
        }
        Ok(())
    }

    /// The same for the `rotated` first elements of a head, with the default base, and the default
    /// of the context of the original training.
    pub(super) fn rotary_part(
        &self,
        context_length: usize,
        rotated: usize,
        base: f64,
        original: usize,
    ) -> Result<(Positions, usize), ConfigError> {
        let said =
            |name: &str| self.get(name).filter(|value| value.as_object().is_none_or(|fields| !fields.is_empty()));
        let base = self.number_or("rope_theta", base)?;
        let Some(scaling) = said("rope_scaling").or_else(|| said("rope_parameters")) else {
            return Ok((Positions::Rotary { base, scaling: RotaryScaling::None }, context_length));
        };
        let scaling = Fields(scaling);
        if ["full_attention", "sliding_attention"].iter().any(|layers| scaling.get(layers).is_some()) {
            return Err(ConfigError(
                "config.json: rope_parameters of their own for some layers are not supported".into(),
            ));
        }
        self.scaled(&scaling, base, context_length, rotated, original)
    }

    /// Rotary positions of one set of parameters.
    pub(super) fn scaled(
        &self,
        scaling: &Fields<'_>,
        base: f64,
        context_length: usize,
        rotated: usize,
        original: usize,
    ) -> Result<(Positions, usize), ConfigError> {
        let base = scaling.number_or("rope_theta", base)?;
        let kind = if scaling.get("rope_type").is_some() { "rope_type" } else { "type" };
        let kind = if scaling.get(kind).is_some() { scaling.text(kind)? } else { "default" };
        let factor = scaling.number_or("factor", 1.0)?;
        let original_context_length = match self.optional_size("original_max_position_embeddings")? {
            Some(original) => original,
            None => scaling.size_or("original_max_position_embeddings", original)?,
        };
        let scaling = match kind {
            "default" => RotaryScaling::None,
            // It only scales beyond the context, which no sequence exceeds here.
            "dynamic" => RotaryScaling::None,
            "linear" => RotaryScaling::Linear { factor },
            "llama3" => RotaryScaling::Llama3 {
                factor,
                low_frequency_factor: scaling.number_or("low_freq_factor", 1.0)?,
                high_frequency_factor: scaling.number_or("high_freq_factor", 4.0)?,
                original_context_length,
            },
            "yarn" => RotaryScaling::Yarn {
                factor,
                attention_factor: scaling.attention_factor(factor)?,
                beta_fast: scaling.number_or("beta_fast", 32.0)?,
                beta_slow: scaling.number_or("beta_slow", 1.0)?,
                original_context_length,
                truncate: scaling.flag_or("truncate", true)?,
            },
            // The older name.
            "longrope" | "su" => {
                let length = original_context_length as f64;
                let factor = match scaling.get("factor") {
                    Some(_) => factor,
                    None => context_length as f64 / length,
                };
                let magnitude = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / length.ln()).sqrt() };
                RotaryScaling::LongRope {
                    short_factors: scaling.numbers("short_factor", rotated / 2)?,
                    long_factors: scaling.numbers("long_factor", rotated / 2)?,
                    longest: context_length,
                    magnitude: scaling.number_or("attention_factor", magnitude)?,
                }
            }
            other => return Err(ConfigError(format!("config.json: rotary scaling '{other}' is not supported"))),
        };
        let reach = match scaling {
            RotaryScaling::LongRope { .. } => context_length.min(original_context_length),
            _ => context_length,
        };
        Ok((Positions::Rotary { base, scaling }, reach))
    }
}
