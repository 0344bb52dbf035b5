//! Recipes as TOML: shipped ones, files, and overrides from the command line.

use std::path::Path;

use fireclay_model::TransformerConfig;
use serde_json::Value as Json;
use toml::{Table, Value};

use super::schema::{DataRecipe, Recipe, TrainingRecipe, is_unknown};
use super::tuning::{LoraRecipe, PreferenceRecipe};
use crate::failure::Failure;
use crate::recipe::task::ModelSizes;

/// The shipped recipes.
const SHIPPED: [(&str, &str); 14] = [
    ("stories", include_str!("shipped/stories.toml")),
    ("masked", include_str!("shipped/masked.toml")),
    ("shakespeare-char-cpu", include_str!("shipped/shakespeare-char-cpu.toml")),
    ("shakespeare-char-gpu", include_str!("shipped/shakespeare-char-gpu.toml")),
    ("gpt2-124m", include_str!("shipped/gpt2-124m.toml")),
    ("llama-15m", include_str!("shipped/llama-15m.toml")),
    ("chat-lora", include_str!("shipped/chat-lora.toml")),
    ("chat-full", include_str!("shipped/chat-full.toml")),
    ("stories-chat", include_str!("shipped/stories-chat.toml")),
    ("dpo", include_str!("shipped/dpo.toml")),
    ("home", include_str!("shipped/home.toml")),
    ("intent-slot", include_str!("shipped/intent-slot.toml")),
    ("classify", include_str!("shipped/classify.toml")),
    ("classify-tune", include_str!("shipped/classify-tune.toml")),
];

/// The names of the shipped recipes.
pub fn shipped_names() -> impl Iterator<Item = &'static str> {
    SHIPPED.iter().map(|(name, _)| *name)
}

impl Recipe {
    /// A shipped recipe by name.
    ///
    /// # Errors
    /// If there is none of that name.
    pub fn shipped(name: &str) -> Result<Self, Failure> {
        match SHIPPED.iter().find(|(known, _)| *known == name) {
            Some((_, text)) => Self::parse(text, name),
            None => {
                let known = shipped_names().collect::<Vec<_>>().join(", ");
                Err(Failure::usage(format!("no recipe '{name}': neither a file nor a shipped recipe ({known})")))
            }
        }
    }

    /// The recipe in a file, or a shipped one.
    ///
    /// # Errors
    /// If there is neither, or the file is invalid.
    pub fn open(path: &Path) -> Result<Self, Failure> {
        let name = path.to_string_lossy();
        if !path.exists() && !name.ends_with(".toml") {
            return Self::shipped(&name);
        }
        let text = std::fs::read_to_string(path).map_err(Failure::io(path))?;
        Self::parse(&text, &name)
    }

    /// Parses TOML; `origin` is named in errors.
    ///
    /// # Errors
    /// If it is not TOML, a key is unknown, or a value has a wrong type.
    pub fn parse(text: &str, origin: &str) -> Result<Self, Failure> {
        let wrong = |reason: String| Failure::usage(format!("{origin}: {reason}"));
        let table: Table = text.parse().map_err(|error: toml::de::Error| {
            let line = error.span().map_or(0, |span| text[..span.start].lines().count().max(1));
            wrong(format!("line {line}: {}", error.message()))
        })?;
        let keys: Vec<(String, String)> = table
            .iter()
            .filter_map(|(section, value)| Some((section, value.as_table()?)))
            .flat_map(|(section, entries)| entries.keys().map(move |key| (section.clone(), key.clone())))
            .collect();
        let keys = keys.iter().map(|(section, key)| (section.as_str(), key.as_str()));
        let recipe = Self::from_table(table).and_then(|recipe| recipe.check_effects(keys).map(|()| recipe));
        recipe.map_err(|failure| wrong(failure.to_string()))
    }

    fn from_table(table: Table) -> Result<Self, Failure> {
        let known = known_keys();
        for (section, value) in &table {
            let keys: Vec<&str> = match value {
                Value::Table(entries) if section != "sizes" => entries.keys().map(String::as_str).collect(),
                _ => Vec::new(),
            };
            if !known.iter().any(|(known, key)| known == section || (known.is_empty() && key == section)) {
                return Err(unknown(section, &known));
            }
            for key in keys {
                if !known.iter().any(|(known, known_key)| known == section && known_key == key) {
                    return Err(unknown(&format!("{section}.{key}"), &known));
                }
            }
        }
        let mut recipe: Self = Value::Table(table).try_into().map_err(|error: toml::de::Error| {
            let text = error.to_string();
            Failure::usage(text.trim().to_string())
        })?;
        if is_unknown(&recipe.sizes) && recipe.init.is_none() {
            // Finds wrong types in [model] now, before the data is read.
            recipe.sizes.vocab_size = 1;
            recipe.model_config()?;
            recipe.sizes = ModelSizes::default();
        }
        recipe.check()
    }

    /// Sets `key` to `value`, parsed as TOML if possible, else as a string. A key is `section.key`,
    /// or just the key.
    ///
    /// # Errors
    /// If the key is unknown (the error suggests the nearest one) or the value has a wrong type.
    pub fn with(&self, key: &str, value: &str) -> Result<Self, Failure> {
        self.with_all([(key, value)])
    }

    /// [`with_all`](Self::with_all) for settings of a command line, `KEY=VALUE`.
    ///
    /// # Errors
    /// As there, or if a setting has another form.
    pub fn with_settings(&self, settings: &[String]) -> Result<Self, Failure> {
        let pair = |setting: &'_ String| match setting.split_once('=') {
            Some((key, value)) => Ok((key.trim().to_string(), value.trim().to_string())),
            None => Err(Failure::usage(format!("--set {setting}: write it as key=value"))),
        };
        let pairs = settings.iter().map(pair).collect::<Result<Vec<_>, _>>()?;
        self.with_all(pairs.iter().map(|(key, value)| (key.as_str(), value.as_str())))
    }

    /// [`with`](Self::with) for several keys at once; the recipe is checked after all are set.
    ///
    /// # Errors
    /// If a key is unknown, or the resulting recipe is invalid.
    pub fn with_all<'a>(&self, settings: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Self, Failure> {
        let known = known_keys();
        let mut table = Table::try_from(self).map_err(|error| Failure::new(error.to_string()))?;
        let (mut keys, mut places) = (Vec::new(), Vec::new());
        for (key, value) in settings {
            let found = known.iter().find(|(section, name)| key == name || key == dotted(section, name));
            let (section, name) = found.ok_or_else(|| unknown(key, &known))?;
            let parsed = format!("x = {value}").parse::<Table>().ok().and_then(|mut table| table.remove("x"));
            let value = parsed.unwrap_or_else(|| Value::String(value.to_string()));
            if section.is_empty() {
                table.insert(name.clone(), value);
            } else if let Some(Value::Table(entries)) =
                Some(table.entry(section.clone()).or_insert_with(|| Value::Table(Table::new())))
            {
                entries.insert(name.clone(), value);
            }
            keys.push(key);
            places.push((section.as_str(), name.as_str()));
        }
        let recipe = Self::from_table(table).and_then(|recipe| recipe.check_effects(places).map(|()| recipe));
        recipe.map_err(|failure| Failure::usage(format!("--set {}: {failure}", keys.join(", "))))
    }
}

/// Every key of a recipe as `(section, key)`.
fn known_keys() -> Vec<(String, String)> {
    let keys = |value: Json| match value {
        Json::Object(fields) => fields.into_iter().map(|(key, _)| key).collect(),
        _ => Vec::new(),
    };
    let training = keys(serde_json::to_value(TrainingRecipe::default()).unwrap_or_default());
    let lora = keys(serde_json::to_value(LoraRecipe::default()).unwrap_or_default());
    let preference = keys(serde_json::to_value(PreferenceRecipe::default()).unwrap_or_default());
    let mut data = keys(serde_json::to_value(DataRecipe::default()).unwrap_or_default());
    data.push("corpora".into());
    let model = keys(serde_json::to_value(TransformerConfig::gpt2(1, 1, 1, 1, 1)).unwrap_or_default());
    let from_data = ["vocab_size", "intents", "tags"];
    let model: Vec<String> = std::iter::once("family".to_string())
        .chain(model.into_iter().filter(|key| !from_data.contains(&key.as_str())))
        .collect();
    let top = ["name", "task", "init", "init_adapter", "sizes"].map(String::from).to_vec();
    let sections = [
        ("training", training),
        ("lora", lora),
        ("preference", preference),
        ("data", data),
        ("model", model),
        ("", top),
    ];
    sections
        .into_iter()
        .flat_map(|(section, keys)| keys.into_iter().map(move |key| (section.to_string(), key)))
        .collect()
}

fn dotted(section: &str, key: &str) -> String {
    if section.is_empty() { key.to_string() } else { format!("{section}.{key}") }
}

fn unknown(key: &str, known: &[(String, String)]) -> Failure {
    let bare = key.rsplit('.').next().unwrap_or(key);
    let nearest = known.iter().max_by(|a, b| {
        let closeness = |entry: &(String, String)| strsim::jaro_winkler(bare, &entry.1);
        closeness(a).total_cmp(&closeness(b))
    });
    let nearest = nearest.map_or(String::new(), |(section, key)| dotted(section, key));
    Failure::usage(format!("unknown key {key}; did you mean {nearest}?"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(vocab_size: usize) -> ModelSizes {
        ModelSizes { vocab_size, ..ModelSizes::default() }
    }

    #[test]
    fn every_shipped_recipe_reads_and_describes_a_model() {
        for (name, _) in SHIPPED {
            let recipe = Recipe::shipped(name).expect("a good recipe");
            assert_eq!(recipe.name, name);
            recipe.model_config().expect_err("no vocabulary yet");
            Recipe { sizes: sizes(50_257), ..recipe }.model_config().expect("a good model");
        }
    }

    #[test]
    fn settings_are_checked_together_and_not_in_between() {
        let recipe = Recipe::shipped("llama-15m").expect("a good recipe");
        let wide = [("d_model", "2048"), ("n_heads", "32")];
        assert!(recipe.with("d_model", "2048").is_err(), "six heads do not share 2,048");
        let both = recipe.with_all(wide).expect("32 heads do");
        assert!(both.with_all([("n_layers", "2"), ("n_heads", "6")]).is_err());
    }

    #[test]
    fn unknown_keys_are_refused_with_the_nearest_known_one() {
        let recipe = Recipe::shipped("stories").expect("a good recipe");
        let message = recipe.with("batchsize", "3").expect_err("unknown").to_string();
        assert!(message.contains("training.batch_size"), "{message}");
        let message = Recipe::parse("name = 'x'\n[training]\nlearning_rat = 1", "r.toml").expect_err("unknown");
        assert!(message.to_string().contains("training.learning_rate"), "{message}");
        assert_eq!(message.exit_code(), 2);
    }

    #[test]
    fn wrong_types_are_refused_with_their_key() {
        for (text, key) in [
            ("name = 'x'\n[training]\nsteps = 'many'", "steps"),
            ("name = 'x'\n[model]\nd_model = 'wide'", "d_model"),
            ("name = 'x'\n[model]\ntied_embeddings = 3", "tied_embeddings"),
            ("name = 'x'\n[data]\nholdout = 2.0", "holdout"),
        ] {
            let message = Recipe::parse(text, "r.toml").expect_err("wrong type").to_string();
            assert!(message.contains(key) && !message.contains('\n'), "{message}");
        }
    }

    #[test]
    fn an_alpha_that_is_not_above_zero_is_refused() {
        let recipe = Recipe::shipped("chat-lora").expect("a good recipe");
        for alpha in ["0", "-16", "nan", "inf", "-inf"] {
            let failure = recipe.with("alpha", alpha).expect_err("no scale");
            assert!(failure.to_string().contains("lora.alpha is"), "{alpha}: {failure}");
            assert_eq!(failure.exit_code(), 2);
        }
        recipe.with("alpha", "0.5").expect("a scale");
    }

    #[test]
    fn every_field_of_the_models_config_can_be_set() {
        let config = serde_json::to_value(TransformerConfig::gpt2(1, 1, 1, 1, 1)).expect("a config is JSON");
        let known = known_keys();
        let taken_from_data = ["vocab_size", "intents", "tags"];
        for field in
            config.as_object().expect("fields").keys().filter(|field| !taken_from_data.contains(&field.as_str()))
        {
            assert!(known.contains(&("model".into(), field.clone())), "{field}");
        }
        let recipe = Recipe::shipped("llama-15m")
            .and_then(|recipe| recipe.with_all([("n_layers", "2"), ("layer_windows", "[4, 0]")]));
        let recipe = Recipe { sizes: sizes(10), ..recipe.expect("known keys") };
        assert_eq!(recipe.model_config().expect("a good model").layer_windows, [4, 0]);
    }

    #[test]
    fn a_setting_replaces_the_recipes_value() {
        let recipe = Recipe::shipped("stories").expect("a good recipe");
        let changed = recipe.with("steps", "7").and_then(|r| r.with("model.dropout", "0.25")).expect("known keys");
        assert_eq!(changed.training.steps, 7);
        assert_eq!(Recipe { sizes: sizes(10), ..changed }.model_config().expect("a good model").dropout, 0.25);
    }
}
