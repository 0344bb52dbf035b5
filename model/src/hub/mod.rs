//! The hub's formats: `config.json` ([`config`]) and tensor names, by model family.

mod bert;
mod classifier;
mod config;
mod descendants;
mod experts;
mod family;
mod fields;
mod gpt2;
mod keys;
mod llama;
mod modernbert;
mod quantization;
mod tensor;

use serde_json::{Map, Value};

use self::fields::Fields;
use crate::classifier_config::{ClassifierConfig, ClassifierPooling};
use crate::config::{ConfigError, TransformerConfig};

pub(crate) use self::config::read;
use self::family::FAMILIES;
pub use self::family::Family;
pub(crate) use self::keys::unknown as unknown_keys;
pub(crate) use self::quantization::Quantization;
pub(crate) use self::tensor::{HubTensor, OPTIONAL_PREFIXES, split_qkv, whole};

impl Family {
    /// The family of a config: the first that can represent it without loss.
    pub fn of(config: &TransformerConfig) -> Self {
        let writes = |family: &Family| {
            let written = Value::Object(config::write(*family, config));
            *family == Family::Fireclay || config::read(&written).is_ok_and(|(_, read)| read == *config)
        };
        FAMILIES.into_iter().map(|(family, ..)| family).find(writes).unwrap_or(Family::Fireclay)
    }

    /// The `config.json` of a model of this family.
    pub(crate) fn write(self, config: &TransformerConfig) -> Map<String, Value> {
        config::write(self, config)
    }

    /// The tensors of a checkpoint of this family, in the order of the model.
    ///
    /// # Errors
    /// If the family has no name for a parameter.
    pub(crate) fn tensors(self, config: &TransformerConfig, paths: &[String]) -> Result<Vec<HubTensor>, String> {
        let mut tensors = Vec::with_capacity(paths.len());
        for path in paths {
            let named = self.tensors_of(config, path);
            tensors.extend(named.ok_or_else(|| format!("{path} has no name in the family {}", self.model_type()))?);
        }
        if self == Self::Bert && config.classifier.is_some() {
            tensors.iter_mut().for_each(bert::prefix);
        }
        Ok(tensors)
    }

    /// The head for sequences that a pretrained model of `config` gets, without labels, from its
    /// `config.json`; with `pooling` if that has none.
    ///
    /// # Errors
    /// If a setting is of a wrong type or not supported.
    pub(crate) fn classifier(
        self,
        json: &Value,
        config: &TransformerConfig,
        pooling: ClassifierPooling,
    ) -> Result<ClassifierConfig, ConfigError> {
        match self {
            Self::Bert | Self::ModernBert => classifier::settings(&Fields(json), self, config, pooling),
            _ => {
                let head = config.clone().with_labels(Vec::new()).classifier.unwrap_or_default();
                let pooling = if config.classifier.is_some() { head.pooling } else { pooling };
                Ok(ClassifierConfig { pooling, ..head })
            }
        }
    }

    /// Whether a checkpoint may have this tensor although the model does not use it: constants of
    /// older versions, heads for other tasks, an output projection tied to the embedding.
    pub(crate) fn ignores(self, name: &str) -> bool {
        let constant = [".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq", "embeddings.position_ids"];
        let head = match self {
            Self::Bert => ["pooler.", "bert.pooler.", "cls.", "classifier."].iter().any(|head| name.starts_with(head)),
            Self::ModernBert => ["head.", "decoder.", "classifier."].iter().any(|head| name.starts_with(head)),
            Self::Fireclay => ["heads.", "classifier."].iter().any(|head| name.starts_with(head)),
            _ => {
                OPTIONAL_PREFIXES.iter().any(|prefix| name.strip_prefix(prefix) == Some("lm_head.weight"))
                    || name == "lm_head.weight"
            }
        };
        head || constant.iter().any(|constant| name.ends_with(constant))
            || ["intent_head.weight", "tag_head.weight"].contains(&name)
    }

    /// The name of the embedding table, in families that may tie the output projection to it.
    pub fn embedding_name(self) -> Option<&'static str> {
        match self {
            Self::Gpt2 => Some("transformer.wte.weight"),
            Self::Bert | Self::ModernBert | Self::Fireclay => None,
            _ => Some("model.embed_tokens.weight"),
        }
    }

    /// The name of the output projection in these families.
    pub fn head_name(self) -> Option<&'static str> {
        self.embedding_name().map(|_| "lm_head.weight")
    }

    /// The tensors that fill the parameter at `path`; `None` if the family has no such parameter.
    fn tensors_of(self, config: &TransformerConfig, path: &str) -> Option<Vec<HubTensor>> {
        let (layer, field) = match path.strip_prefix("blocks.").and_then(|rest| rest.split_once('.')) {
            Some((layer, field)) => (Some(layer), field),
            None => (None, path),
        };
        match (self, layer) {
            (Self::Fireclay, _) => Some(vec![whole(path.to_string(), path)]),
            (_, None) if field == "heads.intent" => Some(vec![whole("intent_head.weight".into(), path)]),
            (_, None) if field == "heads.tag" => Some(vec![whole("tag_head.weight".into(), path)]),
            (Self::Gpt2, None) => gpt2::outer(field, path),
            (Self::Gpt2, Some(layer)) => gpt2::block(layer, field, path),
            (Self::Bert, None) => bert::outer(field, path),
            (Self::Bert, Some(layer)) => bert::block(config, layer, field, path),
            (Self::ModernBert, None) => modernbert::outer(field, path),
            (Self::ModernBert, Some(layer)) => modernbert::block(layer, field, path),
            (_, None) => llama::outer(self, field, path),
            (_, Some(layer)) => llama::block(self, config, layer, field, path),
        }
    }
}
