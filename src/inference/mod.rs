//! Uses of a trained model: generation, chat, evaluation, predictions for utterances and examples,
//! embeddings, scores.

pub mod chat;
pub mod class_report;
pub mod classification;
pub mod divergence;
pub mod embedding;
pub mod evaluation;
pub mod generation;
pub mod language_model;
pub mod loaded;
pub mod prediction;
pub mod scoring;
pub(crate) mod tagging;
pub mod template;
pub mod text_encoder;
