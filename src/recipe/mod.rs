//! Recipes: everything about a training run, as TOML.

mod effect;
mod model;
mod parse;
mod request;
pub mod schedule;
pub mod schema;
mod settings;
pub mod task;
pub mod tuning;

pub use parse::shipped_names;
pub use request::RecipeRequest;
pub use schedule::{Schedule, ScheduleKind};
pub use schema::{DataRecipe, EMBEDDED, HoldoutBy, Recipe, Reduce, Shard, TrainingRecipe};
pub use task::{ModelSizes, TaskName};
pub use tuning::{AdapterKind, BaseKind, LoraRecipe, PreferenceLoss, PreferenceRecipe};
