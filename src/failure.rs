//! Errors for users.

use fireclay_datasets::DataError;
use fireclay_model::{ConfigError, WeightsError};

/// An error in one line that says what failed, where, and how to fix it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    message: String,
    usage: bool,
}

impl Failure {
    /// An error with exit code 1.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: one_line(&message.into()), usage: false }
    }

    /// A usage error, with exit code 2.
    pub fn usage(message: impl Into<String>) -> Self {
        Self { message: one_line(&message.into()), usage: true }
    }

    /// The same error, prefixed with a name.
    pub(crate) fn about(self, what: &str) -> Self {
        Self { message: format!("{what}: {}", self.message), ..self }
    }

    /// Its exit code.
    pub fn exit_code(&self) -> u8 {
        if self.usage { 2 } else { 1 }
    }

    /// For `map_err` on file operations: names the path.
    pub(crate) fn io(path: &std::path::Path) -> impl Fn(std::io::Error) -> Self + '_ {
        move |error| Self::new(format!("{}: {error}", path.display()))
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

macro_rules! from_error {
    ($($error:ty),*) => {
        $(impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                Self::new(error.to_string())
            }
        })*
    };
}

from_error!(DataError, ConfigError, WeightsError);
