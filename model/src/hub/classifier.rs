//! Heads of sequence classifiers in `config.json`.

use fireclay_kernels::ActivationKind;
use serde_json::{Map, Value, json};

use super::family::Family;
use super::fields::{Fields, activation_name};
use crate::classifier_config::{ClassifierConfig, ClassifierPooling};
use crate::config::{ConfigError, TransformerConfig};

/// The class of a family's classifiers in transformers.
fn architecture(family: Family) -> Option<&'static str> {
    match family {
        Family::Bert => Some("BertForSequenceClassification"),
        Family::ModernBert => Some("ModernBertForSequenceClassification"),
        _ => None,
    }
}

/// The head of a model of `config`, if `config.json` says that it is a sequence classifier.
pub(super) fn read(
    fields: &Fields<'_>,
    family: Family,
    config: &TransformerConfig,
) -> Result<Option<ClassifierConfig>, ConfigError> {
    let Some(architecture) = architecture(family) else { return Ok(None) };
    let classes = fields.get("architectures").and_then(Value::as_array);
    if !classes.is_some_and(|classes| classes.iter().any(|class| class == architecture)) {
        return Ok(None);
    }
    let labels = labels(fields)?;
    Ok(Some(ClassifierConfig { labels, ..settings(fields, family, config, ClassifierPooling::Cls)? }))
}

/// The settings of a head that a pretrained model would get, without labels; `pooling` if
/// `config.json` has none.
pub(super) fn settings(
    fields: &Fields<'_>,
    family: Family,
    config: &TransformerConfig,
    pooling: ClassifierPooling,
) -> Result<ClassifierConfig, ConfigError> {
    if family == Family::Bert {
        let dropout = fields.number_or("classifier_dropout", config.dropout)?;
        return Ok(ClassifierConfig { dropout, ..ClassifierConfig::bert() });
    }
    let pooling = match fields.get("classifier_pooling").map(|pooling| (pooling, pooling.as_str())) {
        None => pooling,
        Some((_, Some("cls"))) => ClassifierPooling::Cls,
        Some((_, Some("mean"))) => ClassifierPooling::Mean,
        Some((other, _)) => {
            return Err(ConfigError(format!(
                "config.json: classifier_pooling is {other}; only cls and mean are supported"
            )));
        }
    };
    Ok(ClassifierConfig {
        pooling,
        activation: Some(fields.activation("classifier_activation", ActivationKind::GeluErf)?),
        bias: fields.flag_or("classifier_bias", false)?,
        dropout: fields.number_or("classifier_dropout", 0.0)?,
        ..ClassifierConfig::default()
    })
}

/// The names in `id2label`, in the order of their numbers; two unnamed ones if it is missing, as in
/// transformers.
fn labels(fields: &Fields<'_>) -> Result<Vec<String>, ConfigError> {
    let unnamed = |count: usize| (0..count).map(|at| format!("LABEL_{at}")).collect();
    let Some(names) = fields.get("id2label") else {
        return Ok(unnamed(fields.size_or("num_labels", 2)?.min(1 << 20)));
    };
    let wrong = || Fields::wrong("id2label", "a name for each label from 0 on");
    let names = names.as_object().ok_or_else(wrong)?;
    (0..names.len())
        .map(|at| names.get(&at.to_string()).and_then(Value::as_str).map(str::to_string).ok_or_else(wrong))
        .collect()
}

/// The keys of a classifier's head, where the family has it.
pub(super) fn write(family: Family, config: &TransformerConfig) -> Map<String, Value> {
    let (Some(architecture), Some(head)) = (architecture(family), &config.classifier) else { return Map::new() };
    let (numbers, names): (Map<_, _>, Map<_, _>) = (head.labels.iter().enumerate())
        .map(|(at, label)| ((label.clone(), json!(at)), (at.to_string(), json!(label))))
        .unzip();
    let mut written = json!({
        "architectures": [architecture], "id2label": names, "label2id": numbers,
        "problem_type": (head.labels.len() > 1).then_some("single_label_classification"),
        "classifier_dropout": head.dropout,
    });
    if family == Family::ModernBert {
        written["classifier_pooling"] = json!(head.pooling);
        written["classifier_bias"] = json!(head.bias);
        written["classifier_activation"] = json!(head.activation.map_or("tanh", activation_name));
    }
    match written {
        Value::Object(written) => written,
        _ => Map::new(),
    }
}
