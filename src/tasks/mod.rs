//! What a model is trained for.

pub mod language;
