//! `config.json`, written and read a family at a time.

use fireclay_kernels::{ActivationKind, NormKind};
use serde_json::{Map, Value, json};

use super::family::{FAMILIES, Family};
use crate::config::{AttentionDirection, ConfigError, NormPlacement, Positions, TransformerConfig};
use crate::rotary::RotaryScaling;

/// The key under which `config.json` holds what the hub's format has no word for.
const OWN: &str = "fireclay";

/// What `config.json` says of a model of `family`.
pub(crate) fn write(family: Family, config: &TransformerConfig) -> Map<String, Value> {
    let c = config;
    let shared = json!({
        "architectures": [family.architecture()],
        "model_type": family.model_type(),
        "dtype": "float32",
        "vocab_size": c.vocab_size,
        "initializer_range": c.init_deviation,
        "tie_word_embeddings": c.tied_embeddings,
    });
    let own = match family {
        Family::Gpt2 => json!({
            "n_positions": c.context_length, "n_embd": c.d_model, "n_layer": c.n_layers, "n_head": c.n_heads,
            "n_inner": c.d_ff, "activation_function": activation_name(c.activation),
            "layer_norm_epsilon": c.norm_epsilon,
            "resid_pdrop": c.dropout, "embd_pdrop": c.dropout, "attn_pdrop": c.dropout,
        }),
        Family::Bert => json!({
            "max_position_embeddings": c.context_length, "hidden_size": c.d_model,
            "num_hidden_layers": c.n_layers, "num_attention_heads": c.n_heads, "intermediate_size": c.d_ff,
            "hidden_act": activation_name(c.activation), "layer_norm_eps": c.norm_epsilon,
            "type_vocab_size": c.token_types,
            "hidden_dropout_prob": c.dropout, "attention_probs_dropout_prob": c.dropout,
        }),
        Family::Llama | Family::Mistral | Family::Qwen2 | Family::Qwen3 => {
            let mut own = json!({
                "max_position_embeddings": c.context_length, "hidden_size": c.d_model,
                "num_hidden_layers": c.n_layers, "num_attention_heads": c.n_heads,
                "num_key_value_heads": c.n_kv_heads, "head_dim": c.head_dim, "intermediate_size": c.d_ff,
                "hidden_act": activation_name(c.activation), "rms_norm_eps": c.norm_epsilon,
                "attention_dropout": c.dropout,
            });
            if let Positions::Rotary { base, scaling } = c.positions {
                own["rope_theta"] = json!(base);
                own["rope_scaling"] = write_scaling(scaling);
            }
            match family {
                Family::Llama => {
                    own["attention_bias"] = json!(c.qkv_bias);
                    own["mlp_bias"] = json!(c.feed_forward_bias);
                }
                Family::Mistral => own["sliding_window"] = json!(c.sliding_window),
                _ => {
                    own["sliding_window"] = json!(c.sliding_window);
                    own["use_sliding_window"] = json!(c.sliding_window.is_some());
                    own["max_window_layers"] = json!(0);
                    if family == Family::Qwen3 {
                        own["attention_bias"] = json!(c.qkv_bias);
                    }
                }
            }
            own
        }
        Family::Fireclay => json!({}),
    };
    let mut written = Map::new();
    for part in [shared, own] {
        if let Value::Object(part) = part {
            written.extend(part);
        }
    }
    let extra = match family {
        Family::Fireclay => serde_json::to_value(config).unwrap_or_default(),
        _ => json!({
            "dropout": c.dropout, "residual_scaling": c.residual_scaling, "intents": c.intents, "tags": c.tags,
        }),
    };
    written.insert(OWN.into(), extra);
    written
}

const ACTIVATIONS: [(ActivationKind, &str); 6] = [
    (ActivationKind::GeluTanh, "gelu_new"),
    (ActivationKind::GeluTanh, "gelu_pytorch_tanh"),
    (ActivationKind::GeluErf, "gelu"),
    (ActivationKind::Relu, "relu"),
    (ActivationKind::Silu, "silu"),
    (ActivationKind::Silu, "swish"),
];

fn activation_name(activation: ActivationKind) -> &'static str {
    ACTIVATIONS.iter().find(|(known, _)| *known == activation).map_or("", |(_, name)| name)
}

fn write_scaling(scaling: RotaryScaling) -> Value {
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
        RotaryScaling::Yarn { factor, attention_factor, beta_fast, beta_slow, original_context_length } => json!({
            "rope_type": "yarn", "factor": factor, "attention_factor": attention_factor, "beta_fast": beta_fast,
            "beta_slow": beta_slow, "original_max_position_embeddings": original_context_length,
        }),
    }
}

/// Reads a `config.json`.
///
/// # Errors
/// Names the field that is missing, of a wrong type, or beyond what can be built.
pub(crate) fn read(config: &Value) -> Result<(Family, TransformerConfig), ConfigError> {
    let fields = Fields(config);
    let model_type = fields.text("model_type")?;
    let family = FAMILIES.iter().find(|(_, name, _)| *name == model_type).map(|(family, ..)| *family);
    let family = family.ok_or_else(|| {
        let known: Vec<&str> = FAMILIES.iter().map(|(_, name, _)| *name).collect();
        ConfigError(format!("model_type is '{model_type}'; known are {}", known.join(", ")))
    })?;
    let mut read = match family {
        Family::Fireclay => serde_json::from_value(config.get(OWN).cloned().unwrap_or_default())
            .map_err(|error| ConfigError(format!("config.json: {error}")))?,
        Family::Gpt2 => {
            let d_model = fields.size("n_embd")?;
            let shape = (fields.size("vocab_size")?, fields.size("n_positions")?);
            let base =
                TransformerConfig::gpt2(shape.0, shape.1, d_model, fields.size("n_layer")?, fields.size("n_head")?);
            TransformerConfig {
                d_ff: fields.size_or("n_inner", 4 * d_model)?,
                activation: fields.activation("activation_function", ActivationKind::GeluTanh)?,
                norm_epsilon: fields.number_or("layer_norm_epsilon", 1e-5)?,
                tied_embeddings: fields.flag_or("tie_word_embeddings", true)?,
                dropout: fields.number_or("resid_pdrop", 0.1)?,
                ..base
            }
        }
        Family::Bert => {
            let base = TransformerConfig::bert(
                fields.size("vocab_size")?,
                fields.size("max_position_embeddings")?,
                fields.size("hidden_size")?,
                fields.size("num_hidden_layers")?,
                fields.size("num_attention_heads")?,
            );
            TransformerConfig {
                d_ff: fields.size("intermediate_size")?,
                token_types: fields.size_or("type_vocab_size", 2)?,
                activation: fields.activation("hidden_act", ActivationKind::GeluErf)?,
                norm_epsilon: fields.number_or("layer_norm_eps", 1e-12)?,
                dropout: fields.number_or("hidden_dropout_prob", 0.1)?,
                ..base
            }
        }
        Family::Llama | Family::Mistral | Family::Qwen2 | Family::Qwen3 => read_llama(&fields, family)?,
    };
    read.init_deviation = fields.number_or("initializer_range", 0.02)?;
    if let (Some(own), true) = (config.get(OWN), family != Family::Fireclay) {
        let own = Fields(own);
        read.dropout = own.number_or("dropout", read.dropout)?;
        read.residual_scaling = own.flag_or("residual_scaling", read.residual_scaling)?;
        read.intents = own.size_or("intents", 0)?;
        read.tags = own.size_or("tags", 0)?;
    }
    read.validate()?;
    Ok((family, read))
}

fn read_llama(fields: &Fields<'_>, family: Family) -> Result<TransformerConfig, ConfigError> {
    let (d_model, n_heads) = (fields.size("hidden_size")?, fields.size("num_attention_heads")?);
    let context_length = fields.size("max_position_embeddings")?;
    let n_layers = fields.size("num_hidden_layers")?;
    let llama = TransformerConfig::llama(fields.size("vocab_size")?, context_length, d_model, n_layers, n_heads);
    let windowed = family == Family::Mistral || fields.flag_or("use_sliding_window", false)?;
    let sliding_window =
        if windowed && family != Family::Llama { fields.optional_size("sliding_window")? } else { None };
    if matches!(family, Family::Qwen2 | Family::Qwen3) && windowed && fields.size_or("max_window_layers", 0)? != 0 {
        return Err(ConfigError("max_window_layers is set: a window in some layers only is not supported".into()));
    }
    let attention_bias = fields.flag_or("attention_bias", false)?;
    Ok(TransformerConfig {
        n_kv_heads: fields.size_or("num_key_value_heads", n_heads)?,
        head_dim: fields.size_or("head_dim", d_model / n_heads.max(1))?,
        d_ff: fields.size("intermediate_size")?,
        activation: fields.activation("hidden_act", ActivationKind::Silu)?,
        norm_epsilon: fields.number_or("rms_norm_eps", 1e-6)?,
        positions: fields.rotary(context_length)?,
        tied_embeddings: fields.flag_or("tie_word_embeddings", false)?,
        dropout: fields.number_or("attention_dropout", 0.0)?,
        sliding_window,
        qkv_bias: family == Family::Qwen2 || attention_bias,
        output_bias: family != Family::Qwen2 && attention_bias,
        feed_forward_bias: family == Family::Llama && fields.flag_or("mlp_bias", false)?,
        qk_norm: family == Family::Qwen3,
        norm: NormKind::RmsNorm,
        norm_placement: NormPlacement::Pre,
        attention: AttentionDirection::Causal,
        ..llama
    })
}

/// Typed access to a JSON object, with errors that name the field.
struct Fields<'a>(&'a Value);

impl Fields<'_> {
    fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    fn wrong(name: &str, wanted: &str) -> ConfigError {
        ConfigError(format!("config.json: {name} is not {wanted}"))
    }

    fn text(&self, name: &str) -> Result<&str, ConfigError> {
        let value = self.get(name).ok_or_else(|| ConfigError(format!("config.json: {name} is missing")))?;
        value.as_str().ok_or_else(|| Self::wrong(name, "a text"))
    }

    fn optional_size(&self, name: &str) -> Result<Option<usize>, ConfigError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let size = value.as_u64().and_then(|value| usize::try_from(value).ok()).filter(|size| *size <= 1 << 32);
        size.map(Some).ok_or_else(|| Self::wrong(name, "a size"))
    }

    fn size(&self, name: &str) -> Result<usize, ConfigError> {
        self.optional_size(name)?.ok_or_else(|| ConfigError(format!("config.json: {name} is missing")))
    }

    fn size_or(&self, name: &str, default: usize) -> Result<usize, ConfigError> {
        Ok(self.optional_size(name)?.unwrap_or(default))
    }

    fn number_or(&self, name: &str, default: f64) -> Result<f64, ConfigError> {
        match self.get(name) {
            Some(value) => value.as_f64().ok_or_else(|| Self::wrong(name, "a number")),
            None => Ok(default),
        }
    }

    fn flag_or(&self, name: &str, default: bool) -> Result<bool, ConfigError> {
        match self.get(name) {
            Some(value) => value.as_bool().ok_or_else(|| Self::wrong(name, "true or false")),
            None => Ok(default),
        }
    }

    fn activation(&self, name: &str, default: ActivationKind) -> Result<ActivationKind, ConfigError> {
        let Some(_) = self.get(name) else { return Ok(default) };
        let text = self.text(name)?;
        let known = ACTIVATIONS.iter().find(|(_, known)| *known == text).map(|(activation, _)| *activation);
        known.ok_or_else(|| ConfigError(format!("config.json: {name} '{text}' is not supported")))
    }

    /// Rotary positions, as `rope_parameters` says or, in older files, `rope_theta` and `rope_scaling`.
    fn rotary(&self, context_length: usize) -> Result<Positions, ConfigError> {
        let newer = self.get("rope_parameters");
        let base = match newer {
            Some(parameters) => Fields(parameters).number_or("rope_theta", 10_000.0)?,
            None => self.number_or("rope_theta", 10_000.0)?,
        };
        let Some(scaling) = newer.or_else(|| self.get("rope_scaling")) else {
            return Ok(Positions::Rotary { base, scaling: RotaryScaling::None });
        };
        let scaling = Fields(scaling);
        let kind = if scaling.get("rope_type").is_some() { "rope_type" } else { "type" };
        let kind = if scaling.get(kind).is_some() { scaling.text(kind)? } else { "default" };
        let factor = scaling.number_or("factor", 1.0)?;
        let original_context_length = scaling.size_or("original_max_position_embeddings", context_length)?;
        let scaling = match kind {
            "default" => RotaryScaling::None,
            "linear" => RotaryScaling::Linear { factor },
            "llama3" => RotaryScaling::Llama3 {
                factor,
                low_frequency_factor: scaling.number_or("low_freq_factor", 1.0)?,
                high_frequency_factor: scaling.number_or("high_freq_factor", 4.0)?,
                original_context_length,
            },
            "yarn" => RotaryScaling::Yarn {
                factor,
                attention_factor: match scaling.get("attention_factor") {
                    Some(_) => Some(scaling.number_or("attention_factor", 1.0)?),
                    None => None,
                },
                beta_fast: scaling.number_or("beta_fast", 32.0)?,
                beta_slow: scaling.number_or("beta_slow", 1.0)?,
                original_context_length,
            },
            other => return Err(ConfigError(format!("config.json: rotary scaling '{other}' is not supported"))),
        };
        Ok(Positions::Rotary { base, scaling })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_survives_its_own_config_json() {
        let llama = TransformerConfig::llama(61, 32, 24, 2, 4).with_n_kv_heads(2);
        let yarn = RotaryScaling::Yarn {
            factor: 4.0,
            attention_factor: None,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_context_length: 16,
        };
        let cases = [
            (TransformerConfig::gpt2(61, 32, 24, 2, 3).with_dropout(0.1), Family::Gpt2),
            (
                llama.clone().with_dropout(0.2).with_positions(Positions::Rotary { base: 5e5, scaling: yarn }),
                Family::Llama,
            ),
            (TransformerConfig::mistral(61, 32, 24, 2, 4, 5), Family::Mistral),
            (TransformerConfig::qwen2(61, 32, 24, 2, 4), Family::Qwen2),
            (TransformerConfig::qwen3(61, 32, 24, 2, 4, 8), Family::Qwen3),
            (TransformerConfig::bert(61, 32, 24, 2, 3), Family::Bert),
            (llama.with_norm(NormKind::LayerNorm), Family::Fireclay),
        ];
        for (config, family) in cases {
            assert_eq!(Family::of(&config), family);
            assert_eq!(read(&Value::Object(family.write(&config))), Ok((family, config)));
        }
    }

    #[test]
    fn unknown_models_are_refused_by_name() {
        let message = read(&json!({ "model_type": "mamba" })).expect_err("unknown").to_string();
        assert!(message.contains("mamba") && message.contains("llama"), "{message}");
        let message = read(&json!({ "model_type": "gpt2", "n_embd": "x" })).expect_err("wrong type").to_string();
        assert!(message.contains("n_embd"), "{message}");
    }
}
