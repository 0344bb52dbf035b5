//! Recipes: what to train, on what, and how, as TOML.

mod model;
mod parse;
pub mod schedule;
pub mod schema;
pub mod task;

pub use schedule::{Schedule, ScheduleKind};
pub use schema::{DataRecipe, EMBEDDED, HoldoutBy, Recipe, Reduce, Shard, TrainingRecipe};
pub use task::{ModelSizes, TaskName};
