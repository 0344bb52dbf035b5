//! The chat templates of a model folder, and the special tokens that they may use.

use std::io::ErrorKind;
use std::path::Path;

use serde_json::{Map, Value};

use crate::failure::Failure;
use crate::model_folder::gguf_templates;

const SETTINGS: &str = "tokenizer_config.json";
const SPECIAL_TOKENS: &str = "special_tokens_map.json";
const TEMPLATE: &str = "chat_template.jinja";
const FURTHER: &str = "additional_chat_templates";
/// Template variables of special tokens.
const TOKENS: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
const FURTHER_TOKENS: &str = "additional_special_tokens";

/// The names of the default template, and of the one for conversations with tools.
pub(crate) const DEFAULT: &str = "default";
pub(crate) const TOOL_USE: &str = "tool_use";

/// The templates and tokens of a folder.
#[derive(Debug, Default)]
pub(crate) struct FolderTemplates {
    /// Templates by name. A single one is called `default`.
    pub(crate) templates: Vec<(String, String)>,
    /// Special tokens by name, if set.
    pub(crate) tokens: Map<String, Value>,
}

/// Where templates are looked for, for error messages.
pub(crate) fn places(folder: &Path) -> String {
    if folder.is_file() {
        return "there is no tokenizer.chat_template".into();
    }
    format!("neither {TEMPLATE} nor chat_template in {SETTINGS}")
}

/// Reads the templates of a model folder. Files take precedence over the tokenizer's settings, as
/// in `transformers`. A GGUF file has its own.
///
/// # Errors
/// If a file cannot be read.
pub(crate) fn read(folder: &Path) -> Result<FolderTemplates, Failure> {
    if let Some((templates, tokens)) = gguf_templates(folder)? {
        return Ok(FolderTemplates { templates, tokens });
    }
    let settings = json(&folder.join(SETTINGS))?;
    let mut templates = files(folder)?;
    if templates.is_empty() {
        templates = in_settings(&settings["chat_template"]);
    }
    let tokens =
        if templates.is_empty() { Map::new() } else { tokens(&settings, &json(&folder.join(SPECIAL_TOKENS))?) };
    Ok(FolderTemplates { templates, tokens })
}

fn text(path: &Path) -> Result<Option<String>, Failure> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Failure::io(path)(error)),
    }
}

fn json(path: &Path) -> Result<Value, Failure> {
    let wrong = |error| Failure::new(format!("{}: not valid JSON: {error}", path.display()));
    text(path)?.map_or(Ok(Value::Null), |text| serde_json::from_str(&text).map_err(wrong))
}

fn files(folder: &Path) -> Result<Vec<(String, String)>, Failure> {
    let alone = text(&folder.join(TEMPLATE))?;
    let mut templates: Vec<(String, String)> = alone.into_iter().map(|text| (DEFAULT.into(), text)).collect();
    let further = folder.join(FURTHER);
    let entries = match std::fs::read_dir(&further) {
        Ok(entries) => entries,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(templates),
        Err(error) => return Err(Failure::io(&further)(error)),
    };
    for entry in entries {
        let path = entry.map_err(Failure::io(&further))?.path();
        let (name, ending) = (path.file_stem().and_then(|name| name.to_str()), path.extension());
        if let (Some(name), true) = (name, ending.is_some_and(|ending| ending == "jinja"))
            && let Some(text) = text(&path)?
        {
            templates.push((name.to_string(), text));
        }
    }
    Ok(templates)
}

/// The template in a tokenizer's settings, or several.
fn in_settings(template: &Value) -> Vec<(String, String)> {
    match template {
        Value::String(text) => vec![(DEFAULT.into(), text.clone())],
        Value::Array(several) => several
            .iter()
            .filter_map(|entry| Some((entry["name"].as_str()?.to_string(), entry["template"].as_str()?.to_string())))
            .collect(),
        _ => Vec::new(),
    }
}

/// A token: its text, or an object with its text.
fn token(value: &Value) -> Option<String> {
    let text = value.as_str().or(value["content"].as_str())?;
    (!text.is_empty()).then(|| text.to_string())
}

/// The special tokens of the tokenizer's settings and of the separate map. Settings that list all
/// added tokens are newer and take precedence over the map; otherwise the map does.
fn tokens(settings: &Value, map: &Value) -> Map<String, Value> {
    let newer = settings.get("added_tokens_decoder").is_some();
    let chosen = |name: &str| match newer {
        true => settings.get(name).or(map.get(name)),
        false => map.get(name).filter(|value| !value.is_null()).or(settings.get(name)),
    };
    let mut tokens = Map::new();
    for name in TOKENS {
        tokens.extend(chosen(name).and_then(token).map(|text| (name.to_string(), text.into())));
    }
    let further: Vec<Value> = match chosen(FURTHER_TOKENS).and_then(Value::as_array) {
        Some(further) => further.iter().filter_map(token).map(Value::from).collect(),
        None => Vec::new(),
    };
    if !further.is_empty() {
        tokens.insert(FURTHER_TOKENS.into(), further.into());
    }
    if let Some(named) = settings["extra_special_tokens"].as_object() {
        tokens.extend(named.iter().filter_map(|(name, value)| Some((name.clone(), token(value)?.into()))));
    }
    tokens
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        for (name, text) in files {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().expect("a parent")).expect("writable");
            std::fs::write(path, text).expect("writable");
        }
        folder
    }

    #[test]
    fn files_come_before_settings_and_each_template_has_its_name() {
        let named =
            r#"{"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]}"#;
        let templates = |files: &[(&str, &str)]| {
            let folder = folder(files);
            let mut templates = read(folder.path()).expect("readable").templates;
            templates.sort();
            templates.into_iter().map(|(name, text)| format!("{name}={text}")).collect::<Vec<_>>().join(",")
        };
        assert_eq!(templates(&[]), "");
        assert_eq!(templates(&[(SETTINGS, r#"{"chat_template": "s"}"#)]), "default=s");
        assert_eq!(templates(&[(SETTINGS, named)]), "default=d,tool_use=t");
        assert_eq!(templates(&[(SETTINGS, named), (TEMPLATE, "f")]), "default=f");
        let further = ("additional_chat_templates/tool_use.jinja", "ft");
        let other = ("additional_chat_templates/README.md", "no template");
        assert_eq!(templates(&[(SETTINGS, named), (TEMPLATE, "f"), further, other]), "default=f,tool_use=ft");
        assert_eq!(templates(&[(SETTINGS, named), further]), "tool_use=ft");
    }

    #[test]
    fn special_tokens_come_from_the_settings_and_from_their_map() {
        let map = json!({ "bos_token": { "content": "<m>" }, "pad_token": "<pad>", "unk_token": "<unk>" });
        let settings = json!({ "bos_token": "<s>", "eos_token": { "content": "</s>" }, "unk_token": null });
        let wanted = json!({ "bos_token": "<m>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>" });
        assert_eq!(Value::Object(tokens(&settings, &map)), wanted);
        let mut newer = settings;
        newer["added_tokens_decoder"] = json!({});
        newer["additional_special_tokens"] = json!(["<a>", { "content": "<b>" }]);
        newer["extra_special_tokens"] = json!({ "image_token": "<img>" });
        let wanted = json!({
            "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "additional_special_tokens": ["<a>", "<b>"],
            "image_token": "<img>",
        });
        assert_eq!(Value::Object(tokens(&newer, &map)), wanted);
    }
}
