//! The model of a recipe.

use fireclay_model::{AttentionDirection, TransformerConfig};
use serde_json::Value as Json;
use toml::Value;

use super::schema::Recipe;
use crate::failure::Failure;

impl Recipe {
    /// The model of the recipe. Depends on the data: call [`sized_for`](Self::sized_for) first.
    ///
    /// # Errors
    /// If a field is unknown, has a wrong type, or contradicts another.
    pub fn model_config(&self) -> Result<TransformerConfig, Failure> {
        let usage = |reason: String| Failure::usage(reason);
        let size = |name: &str, default: usize| match self.model.get(name) {
            None => Ok(default),
            Some(Value::Integer(size)) if *size > 0 => Ok(*size as usize),
            Some(other) => Err(usage(format!("model.{name} is {other}: it must be a whole number above 0"))),
        };
        let shape = (size("context_length", self.training.seq_length)?, size("d_model", 128)?);
        let (n_layers, n_heads) = (size("n_layers", 4)?, size("n_heads", 4)?);
        let family = match self.model.get("family") {
            None => "gpt2",
            Some(Value::String(family)) => family,
            Some(other) => return Err(usage(format!("model.family is {other}: it must be a string"))),
        };
        let vocab_size = self.sizes.vocab_size;
        // Where only some layers have one.
        let window = shape.0.div_ceil(4);
        let base = match family {
            "gpt2" => TransformerConfig::gpt2(vocab_size, shape.0, shape.1, n_layers, n_heads),
            "llama" => TransformerConfig::llama(vocab_size, shape.0, shape.1, n_layers, n_heads),
            "mistral" => TransformerConfig::mistral(vocab_size, shape.0, shape.1, n_layers, n_heads, shape.0),
            "qwen2" => TransformerConfig::qwen2(vocab_size, shape.0, shape.1, n_layers, n_heads),
            "qwen3" => {
                let head_dim = shape.1 / n_heads;
                TransformerConfig::qwen3(vocab_size, shape.0, shape.1, n_layers, n_heads, head_dim)
            }
            "mixtral" => TransformerConfig::mixtral(vocab_size, shape.0, shape.1, n_layers, n_heads),
            "qwen3_moe" => {
                let head_dim = shape.1 / n_heads;
                TransformerConfig::qwen3_moe(vocab_size, shape.0, shape.1, n_layers, n_heads, head_dim)
            }
            "olmoe" => TransformerConfig::olmoe(vocab_size, shape.0, shape.1, n_layers, n_heads),
            "gpt_oss" => TransformerConfig::gpt_oss(vocab_size, shape.0, shape.1, n_layers, n_heads, window),
            "gemma2" => TransformerConfig::gemma2(vocab_size, shape.0, shape.1, n_layers, n_heads, window),
            "gemma3" => TransformerConfig::gemma3(vocab_size, shape.0, shape.1, n_layers, n_heads, window),
            "olmo2" => TransformerConfig::olmo2(vocab_size, shape.0, shape.1, n_layers, n_heads),
            "smollm3" => TransformerConfig::smollm3(vocab_size, shape.0, shape.1, n_layers, n_heads),
            "bert" => TransformerConfig::bert(vocab_size, shape.0, shape.1, n_layers, n_heads),
            "modernbert" => TransformerConfig::modernbert(vocab_size, shape.0, shape.1, n_layers, n_heads, window),
            other => {
                let known = "gpt2, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, gemma2, gemma3, olmo2, olmoe, \
                             gpt_oss, smollm3, bert, modernbert";
                return Err(usage(format!("model.family '{other}' is unknown; known: {known}")));
            }
        };
        let base = base.with_intents(self.sizes.intents).with_tags(self.sizes.tags);
        let dropout = self.dropout().unwrap_or(base.dropout);
        let classifies = !self.sizes.labels.is_empty();
        let base = match classifies {
            true => TransformerConfig { dropout, ..base }.with_labels(self.sizes.labels.clone()),
            false => base,
        };
        let base = match self.sizes.word_types {
            0 => base,
            types => base.with_token_types(types),
        };
        // The preset's fields, overridden by the recipe's.
        let mut fields = serde_json::to_value(&base).map_err(|error| Failure::new(error.to_string()))?;
        if let Json::Object(fields) = &mut fields {
            for (key, value) in self.model.iter().filter(|(key, _)| *key != "family") {
                let value = serde_json::to_value(value).map_err(|error| usage(format!("model.{key}: {error}")))?;
                let value = if key == "classifier" { head(&fields[key], value)? } else { value };
                let alone = Json::Object([(key.clone(), value.clone())].into_iter().collect());
                let mut tried = fields.clone();
                tried.insert(key.clone(), value.clone());
                serde_json::from_value::<TransformerConfig>(Json::Object(tried))
                    .map_err(|error| usage(format!("model.{key} = {}: {error}", alone[key])))?;
                fields.insert(key.clone(), value);
            }
        }
        let mut config: TransformerConfig =
            serde_json::from_value(fields).map_err(|error| usage(format!("[model]: {error}")))?;
        if !classifies {
            // The labels are not known yet.
            config.classifier = None;
        }
        self.suits_rows(&config)?;
        config.validate().map_err(|error| usage(error.to_string()))?;
        Ok(config)
    }

    /// Whether the recipe's own model is a mixture of experts.
    pub(super) fn has_experts(&self) -> bool {
        let is_mixture = |family: &str| ["mixtral", "qwen3_moe", "olmoe", "gpt_oss"].contains(&family);
        match self.model.get("experts") {
            Some(experts) => experts.as_integer() != Some(0),
            None => self.model.get("family").and_then(Value::as_str).is_some_and(is_mixture),
        }
    }

    /// The dropout that `[model]` sets.
    pub(crate) fn dropout(&self) -> Option<f64> {
        match self.model.get("dropout")? {
            Value::Integer(whole) => Some(*whole as f64),
            other => other.as_float(),
        }
    }

    /// Refuses a shape that does not suit the task or its sequence length.
    pub(crate) fn suits_rows(&self, config: &TransformerConfig) -> Result<(), Failure> {
        let (wanted, why) = self.task.attention();
        if config.attention != wanted {
            let wanted = if wanted == AttentionDirection::Causal { "causal" } else { "bidirectional" };
            return Err(Failure::usage(format!("the model's attention must be {wanted}: {why}")));
        }
        if config.context_length < self.training.seq_length {
            let (context, seq_length) = (config.context_length, self.training.seq_length);
            return Err(Failure::usage(format!(
                "the model's context_length ({context}) is below training.seq_length ({seq_length})"
            )));
        }
        Ok(())
    }
}

/// The head of a classifier: the family's, with the settings of the recipe.
fn head(of_family: &Json, settings: Json) -> Result<Json, Failure> {
    let Json::Object(settings) = settings else {
        return Err(Failure::usage("model.classifier is a table, such as { pooling = \"mean\" }"));
    };
    if settings.contains_key("labels") {
        return Err(Failure::usage("model.classifier.labels: the labels are those of the data"));
    }
    let mut head = of_family.as_object().cloned().unwrap_or_default();
    head.extend(settings);
    Ok(Json::Object(head))
}
