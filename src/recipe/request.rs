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
        self.change(self.base()?)
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

    /// Applies the changes to `recipe`, such as that of a resumed run.
    ///
    /// # Errors
    /// If a setting is invalid.
    pub fn change(&self, mut recipe: Recipe) -> Result<Recipe, Failure> {
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
        if self.settings.is_empty() { recipe.check() } else { recipe.with_settings(&self.settings) }
    }
}
