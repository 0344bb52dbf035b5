//! `adapter_config.json`, as PEFT writes it.

use std::collections::BTreeMap;
use std::fmt::Display;

use regex::Regex;
use serde_json::{Map, Value, json};

/// A low-rank adapter (LoRA; Hu et al., 2021): which modules it is on, and what it adds there.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraConfig {
    /// Rank of the two matrices, unless `rank_pattern` says otherwise.
    pub rank: usize,
    /// Numerator of the scale, unless `alpha_pattern` says otherwise.
    pub alpha: f64,
    /// Whether the scale is `alpha / sqrt(rank)` (rsLoRA; Kalajdzievski, 2023) rather than `alpha / rank`.
    pub rslora: bool,
    /// Whether each output is scaled to a magnitude that is trained, too (DoRA; Liu et al., 2024).
    pub dora: bool,
    /// Probability that an input of the adapter is zero, in training.
    pub dropout: f64,
    /// The modules that it is on.
    pub targets: Targets,
    /// Modules that are trained whole, and saved with it.
    pub modules_to_save: Vec<String>,
    /// Ranks of modules whose names end as a pattern says.
    pub rank_pattern: BTreeMap<String, usize>,
    /// Numerators of their scales.
    pub alpha_pattern: BTreeMap<String, f64>,
    /// The model that it is for, as PEFT names it.
    pub base: Option<String>,
}

/// Modules by their names.
#[derive(Clone, Debug, PartialEq)]
pub enum Targets {
    /// Every linear layer of the blocks.
    AllLinear,
    /// Those of these names, or whose names end in one of them behind a dot.
    Names(Vec<String>),
    /// Those whose whole name a regular expression matches.
    Pattern(String),
}

impl Default for LoraConfig {
    fn default() -> Self {
        Self {
            rank: 16,
            alpha: 32.0,
            rslora: false,
            dora: false,
            dropout: 0.0,
            targets: Targets::AllLinear,
            modules_to_save: Vec::new(),
            rank_pattern: BTreeMap::new(),
            alpha_pattern: BTreeMap::new(),
            base: None,
        }
    }
}

/// Keys that change nothing of what an adapter computes once it is trained.
const WITHOUT_EFFECT: [&str; 21] = [
    "task_type",
    "peft_type",
    "auto_mapping",
    "peft_version",
    "revision",
    "inference_mode",
    "exclude_modules",
    "fan_in_fan_out",
    "layers_to_transform",
    "layers_pattern",
    "megatron_config",
    "megatron_core",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "qalora_group_size",
    "runtime_config",
    "ensure_weight_tying",
    "bias",
    "init_lora_weights",
];

impl LoraConfig {
    /// Reads the JSON of `adapter_config.json`.
    ///
    /// # Errors
    /// If a value is of the wrong type, or a key is set that would change the result and is not known.
    pub fn parse(json: &Value) -> Result<Self, String> {
        let Value::Object(fields) = json else { return Err("it is no JSON object".into()) };
        match fields.get("peft_type").and_then(Value::as_str) {
            Some("LORA") => {}
            other => return Err(format!("peft_type is {}, and only LORA is supported", other.unwrap_or("missing"))),
        }
        let set = |key: &str| fields.get(key).filter(|value| is_set(value));
        // These begin from weights that they change in the base model, too.
        match set("init_lora_weights").and_then(Value::as_str) {
            None | Some("gaussian" | "eva" | "orthogonal") => {}
            Some(other) => return Err(format!("init_lora_weights is {other}, which changes the base model's weights")),
        }
        if let Some(bias) = set("bias").filter(|bias| **bias != "none") {
            return Err(format!("bias is {bias}, and only none is supported"));
        }
        let known = [
            "r",
            "lora_alpha",
            "use_rslora",
            "use_dora",
            "lora_dropout",
            "target_modules",
            "modules_to_save",
            "rank_pattern",
            "alpha_pattern",
            "base_model_name_or_path",
        ];
        let unknown = fields.keys().find(|key| {
            set(key).is_some() && !known.contains(&key.as_str()) && !WITHOUT_EFFECT.contains(&key.as_str())
        });
        if let Some(key) = unknown {
            return Err(format!("{key} is {}, which is not supported", fields[key]));
        }
        let flag = |key: &str| set(key).and_then(Value::as_bool).unwrap_or(false);
        let default = Self::default();
        Ok(Self {
            rank: number(fields, "r")?.map_or(8, |rank| rank as usize),
            alpha: number(fields, "lora_alpha")?.unwrap_or(8.0),
            rslora: flag("use_rslora"),
            dora: flag("use_dora"),
            dropout: number(fields, "lora_dropout")?.unwrap_or(0.0),
            targets: match set("target_modules") {
                None => default.targets,
                Some(Value::String(all)) if all == "all-linear" => Targets::AllLinear,
                Some(Value::String(pattern)) => Targets::Pattern(pattern.clone()),
                Some(names) => Targets::Names(strings(names, "target_modules")?),
            },
            modules_to_save: set("modules_to_save")
                .map_or(Ok(Vec::new()), |names| strings(names, "modules_to_save"))?,
            rank_pattern: numbers(set("rank_pattern"), "rank_pattern")?
                .into_iter()
                .map(|(key, rank)| (key, rank as usize))
                .collect(),
            alpha_pattern: numbers(set("alpha_pattern"), "alpha_pattern")?,
            base: set("base_model_name_or_path").and_then(Value::as_str).map(str::to_string),
        })
    }

    /// The JSON of `adapter_config.json`; `conv1d` says that the base stores its matrices
    /// `[d_input, d_output]`, as GPT-2 does.
    pub fn to_json(&self, conv1d: bool) -> Value {
        let Self { rank, alpha, rslora, dora, dropout, targets, modules_to_save, .. } = self;
        json!({
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "r": rank,
            "lora_alpha": alpha,
            "lora_dropout": dropout,
            "use_rslora": rslora,
            "use_dora": dora,
            "fan_in_fan_out": conv1d,
            "bias": "none",
            "target_modules": match targets {
                Targets::AllLinear => json!("all-linear"),
                Targets::Names(names) => json!(names),
                Targets::Pattern(pattern) => json!(pattern),
            },
            "modules_to_save": if modules_to_save.is_empty() { Value::Null } else { json!(modules_to_save) },
            "rank_pattern": self.rank_pattern,
            "alpha_pattern": self.alpha_pattern,
            "init_lora_weights": true,
            "inference_mode": true,
        })
    }

    /// The rank of a module's adapter.
    pub(crate) fn rank_of(&self, module: &str) -> Result<usize, String> {
        Ok(by_pattern(&self.rank_pattern, module)?.copied().unwrap_or(self.rank))
    }

    /// The factor on what an adapter of this rank adds to a module.
    pub(crate) fn scale_of(&self, module: &str, rank: usize) -> Result<f64, String> {
        let alpha = by_pattern(&self.alpha_pattern, module)?.copied().unwrap_or(self.alpha);
        Ok(if self.rslora { alpha / (rank as f64).sqrt() } else { alpha / rank as f64 })
    }

    /// Whether it is on a module.
    pub(crate) fn is_on(&self, module: &str) -> Result<bool, String> {
        match &self.targets {
            Targets::AllLinear => Ok(true),
            Targets::Names(names) => Ok(names.iter().any(|name| ends_in(module, name))),
            Targets::Pattern(pattern) => Ok(regex(&format!("^(?:{pattern})$"))?.is_match(module)),
        }
    }
}

/// Whether a module is called `name`, or that is the end of its name, behind a dot.
pub(crate) fn ends_in(module: &str, name: &str) -> bool {
    module.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// The value of the first pattern that a module's name ends in.
fn by_pattern<'a, T>(patterns: &'a BTreeMap<String, T>, module: &str) -> Result<Option<&'a T>, String> {
    for (pattern, value) in patterns {
        if regex(&format!(r"^(?:.*\.)?(?:{pattern})$"))?.is_match(module) {
            return Ok(Some(value));
        }
    }
    Ok(None)
}

fn regex(pattern: &str) -> Result<Regex, String> {
    Regex::new(pattern).map_err(|error| format!("the pattern {pattern} is not supported: {error}"))
}

/// Whether a value says anything: it is neither null nor false nor empty.
fn is_set(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::Array(values) => !values.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
        _ => true,
    }
}

fn wrong(key: &str, value: impl Display) -> String {
    format!("{key} is {value}")
}

fn number(fields: &Map<String, Value>, key: &str) -> Result<Option<f64>, String> {
    let Some(value) = fields.get(key).filter(|value| !value.is_null()) else { return Ok(None) };
    value.as_f64().filter(|number| *number >= 0.0).map(Some).ok_or_else(|| wrong(key, value))
}

fn numbers(value: Option<&Value>, key: &str) -> Result<BTreeMap<String, f64>, String> {
    let Some(value) = value else { return Ok(BTreeMap::new()) };
    let fields = value.as_object().ok_or_else(|| wrong(key, value))?;
    fields.iter().map(|(name, value)| Ok((name.clone(), value.as_f64().ok_or_else(|| wrong(key, value))?))).collect()
}

fn strings(value: &Value, key: &str) -> Result<Vec<String>, String> {
    let all = value.as_array().ok_or_else(|| wrong(key, value))?;
    all.iter().map(|name| Ok(name.as_str().ok_or_else(|| wrong(key, name))?.to_string())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_change_the_result_are_used_or_refused_by_name() {
        let parse = |changes: Value| {
            let mut config =
                json!({ "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"] });
            for (key, value) in changes.as_object().expect("an object") {
                config[key] = value.clone();
            }
            LoraConfig::parse(&config)
        };
        let config = parse(json!({
            "use_rslora": true,
            "rank_pattern": { "layers\\.1\\.self_attn\\.q_proj": 9 },
            "alpha_pattern": { "v_proj": 3 },
        }));
        let config = config.expect("a good config");
        let [q0, q1, v] =
            ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.v_proj"];
        assert_eq!((config.rank_of(q0), config.rank_of(q1)), (Ok(4), Ok(9)));
        assert_eq!(
            (config.scale_of(q0, 4), config.scale_of(q1, 9), config.scale_of(v, 4)),
            (Ok(4.0), Ok(8.0 / 3.0), Ok(1.5))
        );
        assert!(config.is_on(v) == Ok(true) && config.is_on("model.layers.0.mlp.up_proj") == Ok(false));
        assert!(config.is_on("q_proj") == Ok(true) && config.is_on("model.xq_proj") == Ok(false));
        assert_eq!(LoraConfig::parse(&config.to_json(false)), Ok(config));
        let pattern = parse(json!({ "target_modules": r".*\.(q|k)_proj" })).expect("a good config");
        assert!(pattern.is_on(q0) == Ok(true) && pattern.is_on(v) == Ok(false));
        for (key, value) in [
            ("peft_type", json!("IA3")),
            ("bias", json!("all")),
            ("init_lora_weights", json!("pissa")),
            ("target_parameters", json!(["x"])),
            ("trainable_token_indices", json!([1])),
            ("layer_replication", json!([[0, 1]])),
            ("lora_bias", json!(true)),
            ("r", json!("many")),
        ] {
            let refused = parse(json!({ key: value })).expect_err(key);
            assert!(refused.contains(key), "{refused}");
        }
    }
}
