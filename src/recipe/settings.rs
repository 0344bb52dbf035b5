//! Settings by name, compared between recipes: which differ, and which a resumed run keeps.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value};

use super::schema::{EMBEDDED, Recipe};
use super::task::TaskName::Preference;
use super::tuning::AdapterKind;
use crate::failure::Failure;

impl Recipe {
    /// Its settings by full name.
    pub fn settings(&self) -> Map<String, Value> {
        fn add(prefix: &str, value: &Value, settings: &mut Map<String, Value>) {
            match value {
                Value::Object(fields) if !fields.is_empty() => {
                    for (name, value) in fields {
                        let name = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
                        add(&name, value, settings);
                    }
                }
                value => {
                    settings.insert(prefix.to_string(), value.clone());
                }
            }
        }
        let mut settings = Map::new();
        add("", &serde_json::to_value(self).unwrap_or_default(), &mut settings);
        settings
    }

    /// With full paths of the files that it names, which are relative to `folder`.
    pub(crate) fn with_full_paths(&self, folder: &Path) -> Self {
        let full = |path: &Path| {
            let path = folder.join(path);
            fs::canonicalize(&path).unwrap_or(path)
        };
        let text = |path: &Path| full(path).display().to_string();
        let mut recipe = self.clone();
        recipe.init = self.init.as_deref().map(full);
        recipe.init_adapter = self.init_adapter.as_deref().map(full);
        let source = self.data.source.as_str();
        if !source.is_empty() && !EMBEDDED.contains(&source) {
            recipe.data.source = text(Path::new(source));
        }
        recipe.data.corpora =
            self.data.corpora.iter().map(|(source, weight)| (text(Path::new(source)), *weight)).collect();
        if let Some(file) = self.tokenizer_file() {
            recipe.data.tokenizer = text(file);
        }
        if let Some(file) = self.chat_template() {
            recipe.data.chat_template = text(file);
        }
        recipe
    }

    /// The settings that `other` has otherwise, each with its value here, if set. The name and the
    /// sizes that data sets do not count.
    pub(crate) fn differences(&self, other: &Self) -> Vec<(String, Option<Value>)> {
        let (own, others) = (self.settings(), other.settings());
        let mut names: Vec<&String> = own.keys().chain(others.keys().filter(|name| !own.contains_key(*name))).collect();
        names.retain(|name| name.as_str() != "name" && !name.starts_with("sizes."));
        names.retain(|name| match (own.get(name.as_str()), others.get(name.as_str())) {
            (Some(own), Some(other)) => !are_same(own, other),
            _ => true,
        });
        names.into_iter().map(|name| (name.clone(), own.get(name.as_str()).cloned())).collect()
    }

    /// Refuses the first setting of `changed` that a run of this recipe has from its checkpoint, if
    /// it has another value.
    pub(super) fn check_kept(&self, changed: &Self) -> Result<(), Failure> {
        let [own, asked] = [self, changed].map(|recipe| serde_json::to_value(recipe).unwrap_or_default());
        // Values that the recipe of a new model leaves to its family.
        let preset = match self.init {
            None => self.model_config().ok().and_then(|config| serde_json::to_value(config).ok()).unwrap_or_default(),
            Some(_) => Value::Null,
        };
        for section in ["", "training", "lora", "data", "model"] {
            let (own, asked) = match section {
                "" => (&own, &asked),
                section => (&own[section], &asked[section]),
            };
            for (key, asked) in asked.as_object().into_iter().flatten() {
                let key = key.as_str();
                let own = if section == "model" && own.get(key).is_none() { &preset[key] } else { &own[key] };
                if self.keeps(section, key, changed) && !are_same(own, asked) {
                    let own = shown(own);
                    return Err(Failure::usage(format!(
                        "--resume keeps the run's {key} ({own}): leave out --set {key}"
                    )));
                }
            }
        }
        Ok(())
    }

    /// Whether a run of this recipe has a setting from its checkpoint.
    fn keeps(&self, section: &str, key: &str, changed: &Self) -> bool {
        let is_adapted = self.training.adapter == AdapterKind::Lora;
        match (section, key) {
            // Read again when the run resumes, and may have moved.
            ("", "init") => self.init.is_none() || !(is_adapted || self.task == Preference),
            ("", "init_adapter") => self.init_adapter.is_none(),
            // A changed file is noticed by its contents.
            ("data", "tokenizer") => self.tokenizer_file().is_none() && changed.tokenizer_file().is_none(),
            ("lora", "lora_dropout") => false,
            ("model", "dropout") => !is_adapted,
            ("", "task") | ("training", "adapter") | ("lora" | "model", _) => true,
            ("data", "chat_template" | "bpe_size" | "pieces" | "word_types" | "resize_embedding") => true,
            _ => false,
        }
    }
}

/// Whether two values are the same, apart from the rounding of numbers in JSON.
fn are_same(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(x), Some(y)) if a.is_f64() || b.is_f64() => (x - y).abs() <= 1e-12 * x.abs(),
        _ => a == b,
    }
}

fn shown(value: &Value) -> String {
    match value {
        Value::Null => "not set".to_string(),
        Value::String(text) if text.is_empty() => "not set".to_string(),
        Value::String(text) => text.clone(),
        value => value.as_f64().map_or_else(|| value.to_string(), |number| number.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recipes_differ_in_settings_and_not_in_how_paths_are_written() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("a.txt");
        fs::write(&file, "one").expect("writable");
        let recipe = Recipe::shipped("shakespeare-char-cpu").expect("a good recipe");
        let relative = recipe.with("source", "a.txt").expect("a path").with_full_paths(folder.path());
        let full = recipe.with("source", &file.display().to_string()).expect("a path");
        assert!(relative.differences(&full.with_full_paths(Path::new("/"))).is_empty());
        let named = Recipe { name: "other".into(), ..relative.clone() };
        assert!(relative.differences(&named).is_empty());
        let other = relative.with_all([("steps", "7"), ("n_kv_heads", "2")]).expect("known keys");
        let differences = relative.differences(&other);
        let named: Vec<&str> = differences.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(named, ["training.steps", "model.n_kv_heads"]);
        assert_eq!(differences[0].1, Some(relative.training.steps.into()));
        assert_eq!(differences[1].1, None, "the family's");
    }
}
