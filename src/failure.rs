//! Why something could not be done.

use fireclay_datasets::DataError;
use fireclay_model::{ConfigError, WeightsError};

/// Why something could not be done, in one line that says what, where and how to mend it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    message: String,
    usage: bool,
}

impl Failure {
    /// It failed: exit code 1.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: one_line(&message.into()), usage: false }
    }

    /// It was asked for wrongly: exit code 2.
    pub fn usage(message: impl Into<String>) -> Self {
        Self { message: one_line(&message.into()), usage: true }
    }

    /// The same, of something named.
    pub(crate) fn about(self, what: &str) -> Self {
        Self { message: format!("{what}: {}", self.message), ..self }
    }

    /// The exit code that goes with it.
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
