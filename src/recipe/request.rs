//! A recipe with the changes of a command line.

use std::path::PathBuf;

use clap::ValueEnum;
use fireclay_model::LoraFiles;

use super::schema::{EMBEDDED, EMBEDDED_PREFIX, Recipe};
use super::task::TaskName;
use crate::failure::Failure;
use crate::precision::Precision;

/// If the initial model is an adapter's folder, begins from that adapter on the model that it is
/// for.
fn begin_from_adapter(recipe: &mut Recipe) -> Result<(), Failure> {
    let Some(adapter) = recipe.init.as_ref().filter(|init| LoraFiles::are_alone_in(init)) else { return Ok(()) };
    let Some(base) = LoraFiles::read_config(adapter)?.base else {
        let shown = adapter.display();
        return Err(Failure::usage(format!(
            "{shown} is an adapter that does not say which model it is for: --init MODEL --set init_adapter={shown}"
        )));
    };
    recipe.init_adapter = recipe.init.replace(base.into());
    Ok(())
}

/// A recipe by name or file, or the default of a task, with changed settings.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RecipeRequest {
    /// A recipe file, or the name of a shipped recipe.
    pub recipe: Option<PathBuf>,
    /// The task. Default: the recipe's, or language.
    pub task: Option<TaskName>,
    /// The training data.
    pub data: Option<PathBuf>,
    /// The field of the documents, in JSON, tables and Parquet.
    pub field: Option<String>,
    /// A model to start from.
    pub init: Option<PathBuf>,
    /// Data type of activations.
    pub precision: Option<Precision>,
    /// Other settings, `KEY=VALUE`.
    pub settings: Vec<String>,
}

impl RecipeRequest {
    /// The recipe with all changes.
    ///
    /// # Errors
    /// If the recipe does not exist or has another task, or a setting is invalid.
    pub fn recipe(&self) -> Result<Recipe, Failure> {
        self.applied(self.base()?)
    }

    /// The recipe without changes.
    fn base(&self) -> Result<Recipe, Failure> {
        let (has_data, has_init) = (self.data.is_some(), self.init.is_some());
        let Some(path) = &self.recipe else {
            return Recipe::shipped(self.task.unwrap_or_default().default_recipe(has_data, has_init));
        };
        let recipe = Recipe::open(path)?;
        match self.task {
            Some(task) if task != recipe.task => {
                let (name, wanted) = (&recipe.name, task.to_possible_value());
                let wanted = wanted.as_ref().map_or("", |value| value.get_name());
                Err(Failure::usage(format!("recipe {name} is not for task {wanted}: leave out --task or the recipe")))
            }
            _ => Ok(recipe),
        }
    }

    /// Applies the changes to `recipe`, that of a run that resumes.
    ///
    /// # Errors
    /// If a setting is invalid, or changes what the run has from its checkpoint.
    pub fn change(&self, recipe: Recipe) -> Result<Recipe, Failure> {
        let changed = self.applied(recipe.clone())?;
        recipe.check_kept(&changed)?;
        Ok(changed)
    }

    fn applied(&self, mut recipe: Recipe) -> Result<Recipe, Failure> {
        if let (Some(data), None) = (&self.data, &self.recipe) {
            recipe.name = data.file_stem().map_or(recipe.name, |stem| stem.to_string_lossy().into_owned());
        }
        if let Some(init) = &self.init {
            recipe.init = Some(init.clone());
            recipe.init_adapter = None;
        }
        begin_from_adapter(&mut recipe)?;
        // Corpora take the place of the data that the default recipe has.
        let is_corpora = |setting: &String| ["corpora=", "data.corpora="].iter().any(|key| setting.starts_with(key));
        if self.recipe.is_none() && self.data.is_none() && self.settings.iter().any(is_corpora) {
            recipe.data.source.clear();
        }
        if let Some(field) = &self.field {
            recipe.data.field.clone_from(field);
        }
        if let Some(data) = &self.data {
            // A folder may have the name of an embedded source.
            let shown = data.display().to_string();
            let is_folder = EMBEDDED.contains(&shown.as_str()) && !shown.starts_with(EMBEDDED_PREFIX);
            recipe.data.source = if is_folder { format!("./{shown}") } else { shown };
            recipe.data.corpora.clear();
        }
        if let Some(precision) = self.precision {
            if !precision.trains() {
                let name = precision.name();
                return Err(Failure::usage(format!("--precision {name}: training takes f32, tf32 or bf16")));
            }
            recipe.training.precision = precision;
        }
        let recipe = if self.settings.is_empty() { recipe.check() } else { recipe.with_settings(&self.settings) }?;
        if self.field.is_some() {
            recipe.check_effects([("data", "field")]).map_err(|failure| failure.about("--field"))?;
        }
        Ok(recipe)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::ModelSizes;

    fn assert_keeps(recipe: &Recipe, setting: &str, wanted: &str) {
        let request = RecipeRequest { settings: vec![setting.to_string()], ..RecipeRequest::default() };
        let failure = request.change(recipe.clone()).expect_err("the run has its own");
        assert!(failure.to_string().contains(wanted), "{setting}: {failure}");
        assert_eq!(failure.exit_code(), 2);
    }

    fn assert_changes(recipe: &Recipe, setting: &str) {
        let request = RecipeRequest { settings: vec![setting.to_string()], ..RecipeRequest::default() };
        if let Err(failure) = request.change(recipe.clone()) {
            panic!("{setting}: {failure}");
        }
    }

    #[test]
    fn a_resumed_run_keeps_its_adapter_and_chat_template() {
        let recipe = Recipe::shipped("chat-lora").expect("a good recipe");
        let recipe = recipe.with_all([("init", "base"), ("alpha", "16")]).expect("known keys");
        for (setting, wanted) in [
            ("alpha=8", "--resume keeps the run's alpha (16): leave out --set alpha"),
            ("lora.rank=4", "--resume keeps the run's rank (16): leave out --set rank"),
            ("rslora=true", "rslora (false)"),
            ("dora=true", "dora (false)"),
            ("targets=q_proj", "targets (all-linear)"),
            ("modules_to_save=embed_tokens", "modules_to_save (not set)"),
            ("base=nf4", "base (auto)"),
            ("adapter=none", "adapter (lora)"),
            ("init_adapter=other", "init_adapter (not set)"),
            ("task=preference", "task (chat)"),
            ("chat_template=x.jinja", "chat_template (not set)"),
        ] {
            assert_keeps(&recipe, setting, wanted);
        }
        for setting in
            ["alpha=16", "rank=16", "steps=500", "learning_rate=1e-3", "lora_dropout=0.1", "dropout=0.1", "init=moved"]
        {
            assert_changes(&recipe, setting);
        }
    }

    #[test]
    fn a_resumed_run_keeps_the_shape_of_its_model() {
        let recipe = Recipe::shipped("stories").expect("a good recipe");
        let recipe = Recipe { sizes: ModelSizes { vocab_size: 10, ..ModelSizes::default() }, ..recipe };
        for (setting, wanted) in [
            ("d_model=48", "--resume keeps the run's d_model (96): leave out --set d_model"),
            ("context_length=256", "context_length (128)"),
            ("dropout=0.2", "dropout ("),
            ("tokenizer=char", "tokenizer (byte)"),
            ("init=base", "init (not set)"),
        ] {
            assert_keeps(&recipe, setting, wanted);
        }
        for setting in ["d_model=96", "context_length=128", "steps=5000", "tokenizer=byte", "seed=3"] {
            assert_changes(&recipe, setting);
        }
    }

    #[test]
    fn a_field_without_effect_is_refused() {
        let request = |recipe: &str, init: Option<&str>| RecipeRequest {
            recipe: Some(recipe.into()),
            init: init.map(PathBuf::from),
            field: Some("story".into()),
            ..RecipeRequest::default()
        };
        let failure = request("stories-chat", Some("base")).recipe().expect_err("conversations have no such field");
        assert!(failure.to_string().starts_with("--field: data.field has no effect: it needs text"), "{failure}");
        assert_eq!(failure.exit_code(), 2);
        let recipe = request("shakespeare-char-cpu", None).recipe().expect("documents have a field");
        assert_eq!(recipe.data.field, "story");
    }
}
