//! Recipes: everything about a training run, as TOML.

mod effect;
mod model;
mod parse;
mod request;
pub mod schedule;
pub mod schema;
pub mod task;

pub use request::RecipeRequest;
pub use schedule::{Schedule, ScheduleKind};
pub use schema::{
    AdapterKind, BaseKind, DataRecipe, EMBEDDED, HoldoutBy, LoraRecipe, PreferenceLoss, PreferenceRecipe, Recipe,
    Reduce, Shard, TrainingRecipe,
};
pub use task::{ModelSizes, TaskName};
