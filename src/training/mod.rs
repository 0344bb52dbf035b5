//! Training: recipes, the optimizer, the loop through burn-train, checkpoints.

pub mod optimizer;
pub mod recipe;
pub mod schedule;
pub mod trainer;

pub use recipe::{DataRecipe, Precision, Recipe, TrainingRecipe};
pub use schedule::{Schedule, ScheduleKind};
pub use trainer::{StepOutput, Trainer, read_steps};
