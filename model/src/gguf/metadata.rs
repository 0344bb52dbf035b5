//! The metadata of a GGUF file.

use std::collections::BTreeMap;

use crate::config::ConfigError;

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Entry {
    Integer(i128),
    Float(f64),
    Flag(bool),
    Text(String),
    /// Numbers of any type; booleans as 0 and 1.
    Numbers(Vec<f64>),
    Strings(Vec<String>),
}

impl Entry {
    fn number(&self) -> Option<f64> {
        match self {
            Self::Integer(value) => Some(*value as f64),
            Self::Float(value) => Some(*value),
            _ => None,
        }
    }
}

/// Metadata by key. Key names are those of the `gguf` package (`gguf.constants.Keys`).
///
/// Getters return `None` if the key is missing, and an error that names the key if its value has
/// another type.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metadata(pub(crate) BTreeMap<String, Entry>);

impl Metadata {
    /// A string.
    ///
    /// # Errors
    /// If the value has another type.
    pub fn string(&self, key: &str) -> Result<Option<&str>, ConfigError> {
        self.typed(key, "a text", |entry| match entry {
            Entry::Text(text) => Some(&text[..]),
            _ => None,
        })
    }

    /// A list of strings.
    ///
    /// # Errors
    /// If the value has another type.
    pub fn strings(&self, key: &str) -> Result<Option<&[String]>, ConfigError> {
        self.typed(key, "a list of strings", |entry| match entry {
            Entry::Strings(strings) => Some(&strings[..]),
            // An empty list may have any type.
            Entry::Numbers(numbers) if numbers.is_empty() => Some(&[][..]),
            _ => None,
        })
    }

    /// A list of numbers; booleans are 0 and 1.
    ///
    /// # Errors
    /// If the value has another type.
    pub fn numbers(&self, key: &str) -> Result<Option<&[f64]>, ConfigError> {
        self.typed(key, "a list of numbers", |entry| match entry {
            Entry::Numbers(numbers) => Some(&numbers[..]),
            Entry::Strings(strings) if strings.is_empty() => Some(&[][..]),
            _ => None,
        })
    }

    /// A boolean.
    ///
    /// # Errors
    /// If the value has another type.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, ConfigError> {
        self.typed(key, "true or false", |entry| match entry {
            Entry::Flag(flag) => Some(*flag),
            _ => None,
        })
    }

    /// A number.
    ///
    /// # Errors
    /// If the value has another type, or is not finite.
    pub fn number(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        self.typed(key, "a number", |entry| entry.number().filter(|number| number.is_finite()))
    }

    /// An integer from 0 to `u32::MAX`. A list with one value per layer is accepted if all are
    /// equal.
    ///
    /// # Errors
    /// If the value has another type, or layers differ.
    pub fn size(&self, key: &str) -> Result<Option<u32>, ConfigError> {
        let whole = |number: f64| {
            (number.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&number)).then_some(number as u32)
        };
        if let Some(Entry::Numbers(numbers)) = self.0.get(key)
            && let Some(first) = numbers.first()
        {
            if numbers.iter().any(|number| number != first) {
                return Err(ConfigError(format!("{key} differs between layers, which is not supported")));
            }
            return whole(*first).map(Some).ok_or_else(|| ConfigError(format!("{key} is not a size")));
        }
        self.typed(key, "a size", |entry| match entry {
            Entry::Integer(value) => u32::try_from(*value).ok(),
            _ => None,
        })
    }

    /// Whether the key exists.
    pub fn has(&self, key: &str) -> bool {
        self.0.contains_key(key)
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = &String> {
        self.0.keys()
    }

    /// A value, formatted for messages.
    pub(crate) fn shown(&self, key: &str) -> String {
        match self.0.get(key) {
            Some(Entry::Integer(value)) => value.to_string(),
            Some(Entry::Float(value)) => value.to_string(),
            Some(Entry::Flag(value)) => value.to_string(),
            Some(Entry::Text(value)) => format!("'{value}'"),
            Some(Entry::Numbers(values)) => format!("a list of {} numbers", values.len()),
            Some(Entry::Strings(values)) => format!("a list of {} strings", values.len()),
            None => "missing".into(),
        }
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        wanted: &str,
        read: impl FnOnce(&'a Entry) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        let Some(entry) = self.0.get(key) else { return Ok(None) };
        read(entry).map(Some).ok_or_else(|| ConfigError(format!("{key} is not {wanted}")))
    }
}
