//! Why a model folder cannot be used.

use std::path::PathBuf;

use burn::tensor::backend::ExecutionError;

use crate::config::ConfigError;

/// Why a model folder could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// The file system refused.
    #[error("{path}: {error}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What it said.
        error: std::io::Error,
    },
    /// `config.json` is not JSON.
    #[error("{path}: not valid JSON: {error}")]
    Json {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        error: serde_json::Error,
    },
    /// `config.json` describes no transformer that can be built.
    #[error("{path}: {error}")]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        error: ConfigError,
    },
    /// The weights are truncated, damaged, or do not fit the config.
    #[error("{path}: {reason}")]
    Weights {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A tensor has a value that the format to be written has none for.
    #[error("{name}: {reason}")]
    Unwritable {
        /// The tensor.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The device does not take the weights.
    #[error("the device failed: {reason}")]
    Device {
        /// What it said.
        reason: String,
    },
}

impl From<ExecutionError> for WeightsError {
    fn from(error: ExecutionError) -> Self {
        Self::Device { reason: error.to_string() }
    }
}
