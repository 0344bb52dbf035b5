//! Errors of model folders.

use std::path::PathBuf;

use burn::tensor::backend::ExecutionError;

use crate::config::ConfigError;

/// Why a model folder could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// A file system error.
    #[error("{path}: {error}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
    /// `config.json` is not JSON.
    #[error("{path}: not valid JSON: {error}")]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's error.
        error: serde_json::Error,
    },
    /// `config.json` does not describe a supported transformer.
    #[error("{path}: {error}")]
    Config {
        /// The file.
        path: PathBuf,
        /// The reason.
        error: ConfigError,
    },
    /// The weights are truncated, damaged, or do not fit the config.
    #[error("{path}: {reason}")]
    Weights {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// The device does not accept the weights.
    #[error("the device failed: {reason}")]
    Device {
        /// The device's error.
        reason: String,
    },
}

impl From<ExecutionError> for WeightsError {
    fn from(error: ExecutionError) -> Self {
        Self::Device { reason: error.to_string() }
    }
}
