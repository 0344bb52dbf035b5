//! `config.json` from the metadata of a GGUF file.
//!
//! Each known key of an architecture is used, refused if it asks for something unsupported, or
//! ignored because it does not change what a model computes. [`unknown_keys`] names the others.

use serde_json::{Value, json};

use super::metadata::Metadata;
use super::names::{EMBEDDING, FACTORS, HEAD};
use super::{ARCHITECTURES, Architecture};
use crate::config::ConfigError;
use crate::error::WeightsError;

/// The shape of the tensor of a name, if there is one.
type Shape<'a> = dyn Fn(&str) -> Option<&'a [usize]> + 'a;
/// The values of the tensor of a name, if there is one.
type Values<'a> = dyn Fn(&str) -> Result<Option<Vec<f64>>, WeightsError> + 'a;

/// Unsupported keys that change what a model computes, each with the value at which it has no
/// effect.
const REFUSED: [(&str, f64); 34] = [
    ("activation_sparsity_scale", 0.0),
    ("altup.num_inputs", 0.0),
    ("attention.clamp_kqv", 0.0),
    ("attention.indexer.head_count", 0.0),
    ("attention.kv_lora_rank", 0.0),
    ("attention.max_alibi_bias", 0.0),
    ("attention.output_scale", 1.0),
    ("attention.q_lora_rank", 0.0),
    ("attention.relative_buckets_count", 0.0),
    ("attention.shared_kv_layers", 0.0),
    ("attention.temperature_length", 0.0),
    ("attention.temperature_scale", 0.0),
    ("attn_logit_softcapping", 0.0),
    ("embedding_length_per_layer_input", 0.0),
    ("embedding_scale", 1.0),
    ("expert_count", 0.0),
    ("expert_shared_count", 0.0),
    ("expert_used_count", 0.0),
    ("final_logit_softcapping", 0.0),
    ("full_attention_interval", 0.0),
    ("interleave_moe_layer_step", 0.0),
    ("logit_scale", 1.0),
    ("n_deepstack_layers", 0.0),
    ("nextn_predict_layers", 0.0),
    ("no_rope_layer_step", 0.0),
    ("residual_scale", 1.0),
    ("rope.scaling.alpha", 0.0),
    ("rope.scaling.yarn_log_multiplier", 0.0),
    ("router_logit_softcapping", 0.0),
    ("ssm.state_size", 0.0),
    ("swiglu_clamp_exp", 0.0),
    ("swin_norm", 0.0),
    ("use_parallel_residual", 0.0),
    ("wkv.head_size", 0.0),
];

/// Those of [`REFUSED`] that an architecture uses.
fn used(architecture: Architecture) -> &'static [&'static str] {
    match architecture {
        Architecture::Gemma2 => &["attn_logit_softcapping", "final_logit_softcapping"],
        Architecture::Gemma3 => &["final_logit_softcapping"],
        Architecture::Granite => &["embedding_scale", "logit_scale", "residual_scale"],
        _ => &[],
    }
}

/// Keys that are used, and keys that change nothing.
const KNOWN: &[&str] = &[
    "attention.causal",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon",
    "attention.scale",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.dimension_sections",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scale_linear",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_ext_factor",
    "tensor_data_layout",
    "vocab_size",
];

/// Keys of the file's architecture that are not known here.
pub(crate) fn unknown_keys(metadata: &Metadata) -> Vec<String> {
    let known = |name: &str| KNOWN.contains(&name) || REFUSED.iter().any(|(refused, _)| *refused == name);
    let own = |key: &&String| {
        let name =
            key.split_once('.').filter(|(architecture, _)| ARCHITECTURES.iter().any(|(_, own)| own == architecture));
        name.is_some_and(|(_, name)| !known(name))
    };
    metadata.keys().filter(own).cloned().collect()
}

/// `config.json` of the model, or the error in its metadata.
///
/// # Errors
/// If a tensor that the config depends on cannot be read.
pub(super) fn of(
    architecture: Architecture,
    metadata: &Metadata,
    shape: &Shape<'_>,
    values: &Values<'_>,
) -> Result<Result<Value, ConfigError>, WeightsError> {
    let mut factors = Vec::new();
    for name in FACTORS {
        factors.push(values(name)?);
    }
    Ok(Keys { metadata, architecture }.config(shape, &factors))
}

/// The keys of an architecture, without its prefix.
struct Keys<'a> {
    metadata: &'a Metadata,
    architecture: Architecture,
}

impl Keys<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture.name())
    }

    fn size(&self, name: &str) -> Result<Option<u32>, ConfigError> {
        self.metadata.size(&self.key(name))
    }

    fn needed(&self, name: &str) -> Result<u32, ConfigError> {
        self.size(name)?.ok_or_else(|| ConfigError(format!("{} is missing", self.key(name))))
    }

    fn number(&self, name: &str) -> Result<Option<f64>, ConfigError> {
        self.metadata.number(&self.key(name))
    }

    fn refused<T>(&self, name: &str, why: &str) -> Result<T, ConfigError> {
        let key = self.key(name);
        Err(ConfigError(format!("{key} is {}, {why}", self.metadata.shown(&key))))
    }

    /// Refuses what is not supported.
    fn check(&self) -> Result<(), ConfigError> {
        if let Some(kind) = self.metadata.string("general.type")?.filter(|kind| *kind != "model") {
            return Err(ConfigError(format!("general.type is '{kind}': the file is not a model")));
        }
        for (name, harmless) in REFUSED {
            if used(self.architecture).contains(&name) {
                continue;
            }
            let key = self.key(name);
            let value = match self.metadata.flag(&key) {
                Ok(flag) => flag.map(|flag| f64::from(u8::from(flag))),
                Err(_) => self.number(name).ok().flatten().or(Some(f64::NAN)),
            };
            if value.is_some_and(|value| value != harmless) {
                return self.refused(name, "which is not supported");
            }
        }
        if self.metadata.flag(&self.key("attention.causal"))? == Some(false) {
            return self.refused("attention.causal", "but only causal attention is supported");
        }
        if self.metadata.has(&self.key("rope.dimension_sections")) {
            return self.refused("rope.dimension_sections", "which is not supported");
        }
        Ok(())
    }

    fn config(&self, shape: &Shape<'_>, factors: &[Option<Vec<f64>>]) -> Result<Value, ConfigError> {
        self.check()?;
        let has = |name: &str| shape(name).is_some();
        let table = shape(EMBEDDING).ok_or_else(|| ConfigError(format!("{EMBEDDING} is missing")))?;
        let vocab_size = table.first().copied().unwrap_or(0);
        let (d_model, n_heads) = (self.needed("embedding_length")?, self.needed("attention.head_count")?);
        let context_length = self.needed("context_length")?;
        let (layers, d_ff) = (self.needed("block_count")?, self.needed("feed_forward_length")?);
        // A damaged count would otherwise allocate blocks that the file does not have.
        let norm = if self.architecture == Architecture::Olmo2 { "post_attention_norm" } else { "attn_norm" };
        let last = format!("blk.{}.{norm}.weight", layers.saturating_sub(1));
        if layers > 0 && !has(&last) {
            return self.refused("block_count", &format!("but there is no {last}"));
        }
        let head_dim = self.head_dim(d_model, n_heads)?;
        let tied = !has(HEAD);
        if self.architecture == Architecture::Gpt2 {
            let epsilon = self.epsilon("attention.layer_norm_epsilon")?;
            if self.size("attention.head_count_kv")?.is_some_and(|heads| heads != n_heads) {
                return self.refused("attention.head_count_kv", "and such models have as many as attention.head_count");
            }
            return Ok(json!({
                "model_type": "gpt2", "vocab_size": vocab_size, "n_positions": context_length, "n_embd": d_model,
                "n_layer": layers, "n_head": n_heads, "n_inner": d_ff, "layer_norm_epsilon": epsilon,
                "tie_word_embeddings": tied,
            }));
        }
        if let Some(own) = self.descendant(context_length, d_model, n_heads, head_dim)? {
            let rotary = self.rotary(context_length, self.rotated(head_dim)?, factors)?;
            let bias = |name: &str| has(&format!("blk.0.{name}.bias"));
            let mut config = json!({
                "vocab_size": vocab_size, "max_position_embeddings": context_length, "hidden_size": d_model,
                "num_hidden_layers": layers, "num_attention_heads": n_heads,
                "num_key_value_heads": self.size("attention.head_count_kv")?.unwrap_or(n_heads), "head_dim": head_dim,
                "intermediate_size": d_ff, "rms_norm_eps": self.epsilon("attention.layer_norm_rms_epsilon")?,
                "rope_theta": self.number("rope.freq_base")?.unwrap_or(10_000.0), "rope_scaling": rotary,
                "tie_word_embeddings": tied, "attention_bias": bias("attn_q"), "mlp_bias": bias("ffn_down"),
            });
            for (key, value) in own.as_object().into_iter().flatten() {
                config[key] = value.clone();
            }
            return Ok(config);
        }
        let window = self.size("attention.sliding_window")?.filter(|window| *window > 0);
        if window.is_some() && self.metadata.has(&self.key("attention.sliding_window_pattern")) {
            return self
                .refused("attention.sliding_window_pattern", "but windows in only some layers are not supported");
        }
        // A window as long as the context has no effect.
        let window = window.filter(|window| *window < context_length);
        let bias = |name: &str| has(&format!("blk.0.{name}.bias"));
        // `llama` covers several families.
        let family = match self.architecture {
            Architecture::Llama if window.is_some() => "mistral",
            Architecture::Llama if bias("attn_q") && !bias("attn_output") => "qwen2",
            other => other.name(),
        };
        if window.is_some() && family != "mistral" {
            return self.refused("attention.sliding_window", "but a window shorter than the context is not supported");
        }
        let rotary = self.rotary(context_length, head_dim, factors)?;
        Ok(json!({
            "model_type": family, "vocab_size": vocab_size, "max_position_embeddings": context_length,
            "hidden_size": d_model, "num_hidden_layers": layers, "num_attention_heads": n_heads,
            "num_key_value_heads": self.size("attention.head_count_kv")?.unwrap_or(n_heads), "head_dim": head_dim,
            "intermediate_size": d_ff, "rms_norm_eps": self.epsilon("attention.layer_norm_rms_epsilon")?,
            "rope_theta": self.number("rope.freq_base")?.unwrap_or(10_000.0), "rope_scaling": rotary,
            "sliding_window": window, "tie_word_embeddings": tied,
            "attention_bias": family != "qwen2" && bias("attn_q"), "mlp_bias": bias("ffn_down"),
        }))
    }

    /// What `config.json` says of a descendant of Llama besides Llama's keys; `None` for others.
    fn descendant(
        &self,
        context_length: u32,
        d_model: u32,
        n_heads: u32,
        head_dim: u32,
    ) -> Result<Option<Value>, ConfigError> {
        let window = self.size("attention.sliding_window")?.filter(|window| *window > 0);
        // The scale of scores, if it is given. Gemma's largest models have another by their depth.
        let scale = self.number("attention.scale")?.filter(|scale| *scale != 0.0);
        let scalar = |deep: u32| match (scale, self.needed("block_count")? == deep) {
            (Some(scale), _) => Ok(scale.powi(-2).round()),
            (None, true) => Ok(f64::from(d_model / n_heads.max(1))),
            (None, false) => Ok::<f64, ConfigError>(f64::from(head_dim)),
        };
        let cap = |name: &str| Ok::<_, ConfigError>(self.number(name)?.filter(|cap| *cap != 0.0));
        // Layers from one without a window to the next.
        let pattern = |usual: u32| {
            let key = self.key("attention.sliding_window_pattern");
            match self.metadata.has(&key) {
                true => self.size("attention.sliding_window_pattern").map(|pattern| pattern.unwrap_or(usual)),
                false => Ok(usual),
            }
        };
        let layers = self.needed("block_count")?.min(1 << 14);
        let types = |pattern: u32| -> Vec<&str> {
            let slides = |layer: u32| window.is_some() && (pattern == 0 || layer % pattern < pattern - 1);
            (0..layers).map(|layer| if slides(layer) { "sliding_attention" } else { "full_attention" }).collect()
        };
        Ok(Some(match self.architecture {
            Architecture::Gemma2 => json!({
                "model_type": "gemma2", "sliding_window": window.unwrap_or(4096),
                // Every other layer has a window, beginning with the first.
                "layer_types": types(pattern(2)?), "query_pre_attn_scalar": scalar(46)?,
                "attn_logit_softcapping": cap("attn_logit_softcapping")?,
                "final_logit_softcapping": cap("final_logit_softcapping")?,
            }),
            Architecture::Gemma3 => json!({
                "model_type": "gemma3_text", "sliding_window": window.unwrap_or(4096),
                "layer_types": types(pattern(6)?), "query_pre_attn_scalar": scalar(62)?,
                "final_logit_softcapping": cap("final_logit_softcapping")?,
                "rope_local_base_freq": self.number("rope.freq_base_swa")?.unwrap_or(10_000.0),
            }),
            Architecture::Olmo2 => match window {
                None => json!({ "model_type": "olmo2" }),
                Some(window) => {
                    json!({ "model_type": "olmo3", "sliding_window": window, "layer_types": types(pattern(4)?) })
                }
            },
            Architecture::Phi3 => json!({
                // A window that no sequence outgrows is none.
                "model_type": "phi3", "sliding_window": window.filter(|window| *window < context_length),
                "partial_rotary_factor": f64::from(self.rotated(head_dim)?) / f64::from(head_dim.max(1)),
            }),
            Architecture::Granite => json!({
                "model_type": "granite",
                "attention_multiplier": scale.unwrap_or(1.0 / f64::from(head_dim.max(1)).sqrt()),
                "embedding_multiplier": self.number("embedding_scale")?.filter(|scale| *scale != 0.0).unwrap_or(1.0),
                "residual_multiplier": self.number("residual_scale")?.filter(|scale| *scale != 0.0).unwrap_or(1.0),
                "logits_scaling": self.number("logit_scale")?.filter(|scale| *scale != 0.0).unwrap_or(1.0),
            }),
            Architecture::SmolLm3 => match window {
                None => json!({ "model_type": "smollm3" }),
                Some(_) => {
                    return self.refused("attention.sliding_window", "which is not supported in models of smollm3");
                }
            },
            _ => return Ok(None),
        }))
    }

    /// Number of elements of a head that rotate.
    fn rotated(&self, head_dim: u32) -> Result<u32, ConfigError> {
        match self.architecture {
            Architecture::Phi3 => Ok(self.size("rope.dimension_count")?.unwrap_or(head_dim)),
            _ => Ok(head_dim),
        }
    }

    fn epsilon(&self, name: &str) -> Result<f64, ConfigError> {
        self.number(name)?.ok_or_else(|| ConfigError(format!("{} is missing", self.key(name))))
    }

    /// Width of a head. Rotary positions must apply to all of it, except in Phi-3.
    fn head_dim(&self, d_model: u32, n_heads: u32) -> Result<u32, ConfigError> {
        let head_dim = self.size("attention.key_length")?.unwrap_or(d_model / n_heads.max(1));
        if self.size("attention.value_length")?.unwrap_or(head_dim) != head_dim {
            return self
                .refused("attention.value_length", &format!("and keys have {head_dim}, which is not supported"));
        }
        let rotates = !matches!(self.architecture, Architecture::Gpt2 | Architecture::Phi3);
        if rotates && self.size("rope.dimension_count")?.unwrap_or(head_dim) != head_dim {
            let why = format!("but partial rotation of heads of {head_dim} is not supported");
            return self.refused("rope.dimension_count", &why);
        }
        let usual = 1.0 / f64::from(head_dim.max(1)).sqrt();
        let scales = matches!(self.architecture, Architecture::Gemma2 | Architecture::Gemma3 | Architecture::Granite);
        if !scales
            && self.number("attention.scale")?.is_some_and(|scale| scale != 0.0 && (scale / usual - 1.0).abs() > 1e-5)
        {
            return self.refused("attention.scale", &format!("and only {usual} is supported"));
        }
        Ok(head_dim)
    }

    /// `rope_scaling`, from the keys and from the tensors of frequency factors: common, short and
    /// long ones.
    fn rotary(&self, context: u32, head_dim: u32, factors: &[Option<Vec<f64>>]) -> Result<Value, ConfigError> {
        let kind = self.metadata.string(&self.key("rope.scaling.type"))?;
        let linear = self.number("rope.scale_linear")?;
        let factor = self.number("rope.scaling.factor")?.or(linear).filter(|factor| *factor != 0.0).unwrap_or(1.0);
        let original = self.size("rope.scaling.original_context_length")?.unwrap_or(context);
        let attention = self.number("rope.scaling.attn_factor")?.unwrap_or(1.0);
        let attention = attention * self.number("rope.scaling.yarn_attn_factor")?.unwrap_or(1.0);
        let each_factor = factors[1].is_some() && self.architecture == Architecture::Phi3;
        let kind = kind.filter(|kind| !(each_factor && *kind == "none"));
        let kind = kind.unwrap_or(if linear.is_some() {
            "linear"
        } else if each_factor {
            "longrope"
        } else {
            "none"
        });
        if attention != 1.0 && !matches!(kind, "yarn" | "longrope") {
            return self.refused("rope.scaling.attn_factor", "but is supported with yarn and longrope only");
        }
        let listed = |name: usize| match &factors[name] {
            Some(found) if 2 * found.len() != head_dim as usize || !found.iter().all(|factor| *factor > 0.0) => {
                let (name, pairs) = (FACTORS[name], head_dim / 2);
                Err(ConfigError(format!("{name} is not {pairs} numbers above 0, one for each pair of a head")))
            }
            found => Ok(found.clone()),
        };
        let each = |short: Vec<f64>, long: Option<Vec<f64>>, magnitude: f64, original: u32| {
            let long = long.unwrap_or_else(|| short.clone());
            json!({
                "rope_type": "longrope", "short_factor": short, "long_factor": long, "attention_factor": magnitude,
                "original_max_position_embeddings": original,
            })
        };
        match (kind, listed(0)?) {
            ("none" | "linear", Some(factors)) => {
                let scale = if kind == "linear" { factor } else { 1.0 };
                Ok(each(factors.into_iter().map(|own| own * scale).collect(), None, 1.0, context))
            }
            ("none", None) => Ok(Value::Null),
            ("linear", None) if factor == 1.0 => Ok(Value::Null),
            ("linear", None) => Ok(json!({ "rope_type": "linear", "factor": factor })),
            ("yarn", None) => {
                if self.number("rope.scaling.yarn_ext_factor")?.is_some_and(|factor| factor >= 0.0 && factor != 1.0) {
                    return self.refused("rope.scaling.yarn_ext_factor", "and only 1 is supported");
                }
                let magnitude = attention * (0.1 * factor.max(1.0).ln() + 1.0);
                Ok(json!({
                    "rope_type": "yarn", "factor": factor, "attention_factor": (attention != 1.0).then_some(magnitude),
                    "beta_fast": self.number("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
                    "beta_slow": self.number("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
                    "original_max_position_embeddings": original,
                }))
            }
            ("longrope", None) => match listed(1)? {
                Some(short) => Ok(each(short, listed(2)?, attention, original)),
                None => Err(ConfigError(format!("{} is missing, whose factors longrope needs", FACTORS[1]))),
            },
            ("yarn" | "longrope", Some(_)) => {
                self.refused("rope.scaling.type", &format!("which is not supported together with {}", FACTORS[0]))
            }
            _ => self.refused("rope.scaling.type", "which is not supported"),
        }
    }
}
