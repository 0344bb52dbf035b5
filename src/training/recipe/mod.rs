//! Recipes: what to train, on what, and how, as TOML.

mod model;
mod parse;
mod resolve;
pub mod schema;

pub use schema::{DataRecipe, EMBEDDED, HoldoutBy, Recipe, TrainingRecipe};
