//! The fields of a request, validated where they are read. Null counts as absent. Fields that
//! nothing reads are unknown: the response header and the log name them, and a strict server
//! refuses them.

use std::cell::RefCell;
use std::collections::HashSet;
use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::error::ApiError;

/// Fields of other servers for accounting or performance, which do not change an answer.
const WITHOUT_EFFECT: [&str; 12] = [
    "cache_salt",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "service_tier",
    "spaces_between_special_tokens",
    "store",
    "stream_options",
    "user",
];

/// The fields of a JSON object.
pub(super) struct Fields {
    values: Map<String, Value>,
    asked: RefCell<HashSet<String>>,
    /// Path of the object in the request, with a trailing dot.
    path: String,
}

impl Fields {
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, ApiError> {
        let value = serde_json::from_slice(bytes)
            .map_err(|error| ApiError::request(format!("the body is not valid JSON: {error}")))?;
        match value {
            Value::Object(values) => Ok(Self { values, asked: RefCell::default(), path: String::new() }),
            other => Err(ApiError::request(format!("the body must be a JSON object, not {}", kind(&other)))),
        }
    }

    /// The fields of a request derived from another one.
    pub(super) fn made(values: Map<String, Value>) -> Self {
        Self { values, asked: RefCell::default(), path: String::new() }
    }

    /// The fields of a nested object.
    pub(super) fn of(path: &str, value: &Value) -> Result<Self, ApiError> {
        match value {
            Value::Object(values) => {
                Ok(Self { values: values.clone(), asked: RefCell::default(), path: format!("{path}.") })
            }
            other => Err(ApiError::param(path, format!("{path} must be an object, not {}", kind(other)))),
        }
    }

    /// A field's full path in the request.
    pub(super) fn name(&self, field: &str) -> String {
        format!("{}{field}", self.path)
    }

    /// Fields that nothing has read, except those of other servers that change no answer.
    pub(super) fn unknown(&self) -> Vec<String> {
        let asked = self.asked.borrow();
        let known = |field: &str| asked.contains(field) || WITHOUT_EFFECT.contains(&field);
        self.values
            .iter()
            .filter(|(field, value)| !value.is_null() && !known(field))
            .map(|(field, _)| field.clone())
            .collect()
    }

    pub(super) fn get(&self, field: &str) -> Option<&Value> {
        self.asked.borrow_mut().insert(field.to_string());
        self.values.get(field).filter(|value| !value.is_null())
    }

    /// Refuses unsupported fields that would change the answer, unless their value has no effect.
    ///
    /// # Errors
    /// The first of `names` whose value has an effect.
    pub(super) fn refuse(&self, names: &[&str]) -> Result<(), ApiError> {
        let nothing = |value: &Value| match value {
            Value::Null | Value::Bool(false) => true,
            Value::Number(number) => number.as_f64() == Some(0.0),
            Value::String(text) => text.is_empty(),
            Value::Array(values) => values.is_empty(),
            Value::Object(values) => values.is_empty(),
            Value::Bool(true) => false,
        };
        match names.iter().find(|name| self.get(name).is_some_and(|value| !nothing(value))) {
            None => Ok(()),
            Some(field) => Err(ApiError::param(self.name(field), format!("{field} is not supported: leave it out"))),
        }
    }

    /// The error of a field with a wrong value.
    pub(super) fn wrong(&self, field: &str, wanted: &str) -> ApiError {
        let name = self.name(field);
        let found = match self.get(field) {
            None => "is missing".to_string(),
            Some(value) => format!("is {}", kind(value)),
        };
        ApiError::param(name.clone(), format!("{name} must be {wanted}, but {found}"))
    }

    /// A number.
    pub(super) fn number(&self, field: &str, range: RangeInclusive<f64>) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let number = value.as_f64().filter(|number| range.contains(number));
        let wanted = || format!("a number from {} to {}", range.start(), range.end());
        number.map(Some).ok_or_else(|| self.wrong(field, &wanted()))
    }

    /// A whole number.
    pub(super) fn count(&self, field: &str, range: RangeInclusive<usize>) -> Result<Option<usize>, ApiError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        // 4.0 is 4.
        let whole = value.as_f64().filter(|count| count.fract() == 0.0 && (0.0..9e15).contains(count));
        let count = value.as_u64().or(whole.map(|count| count as u64)).and_then(|count| usize::try_from(count).ok());
        let count = count.filter(|count| range.contains(count));
        let wanted = || match *range.end() {
            usize::MAX => format!("a whole number of {} or more", range.start()),
            most => format!("a whole number from {} to {most}", range.start()),
        };
        count.map(Some).ok_or_else(|| self.wrong(field, &wanted()))
    }

    /// A signed integer.
    pub(super) fn integer(&self, field: &str) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let whole = value.as_f64().filter(|whole| whole.fract() == 0.0 && whole.abs() < 9e15);
        let integer = value.as_i64().or(value.as_u64().map(u64::cast_signed)).or(whole.map(|whole| whole as i64));
        integer.map(Some).ok_or_else(|| self.wrong(field, "a whole number"))
    }

    pub(super) fn flag(&self, field: &str, otherwise: bool) -> Result<bool, ApiError> {
        let Some(value) = self.get(field) else { return Ok(otherwise) };
        value.as_bool().ok_or_else(|| self.wrong(field, "true or false"))
    }

    pub(super) fn string(&self, field: &str) -> Result<Option<&str>, ApiError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.wrong(field, "a string"))
    }

    /// A string or an array of strings.
    pub(super) fn strings(&self, field: &str, most: usize) -> Result<Vec<String>, ApiError> {
        let wrong = || self.wrong(field, &format!("a string or up to {most} of them"));
        match self.get(field) {
            None => Ok(Vec::new()),
            Some(Value::String(text)) => Ok(vec![text.clone()]),
            Some(Value::Array(strings)) if strings.len() <= most => {
                strings.iter().map(|text| text.as_str().map(str::to_string).ok_or_else(wrong)).collect()
            }
            Some(_) => Err(wrong()),
        }
    }

    pub(super) fn array(&self, field: &str) -> Result<Option<&[Value]>, ApiError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        value.as_array().map(|values| Some(&values[..])).ok_or_else(|| self.wrong(field, "an array"))
    }

    pub(super) fn object(&self, field: &str) -> Result<Option<Self>, ApiError> {
        self.get(field).map(|value| Self::of(&self.name(field), value)).transpose()
    }

    pub(super) fn into_values(self) -> Map<String, Value> {
        self.values
    }
}

/// A value in words, abbreviated.
fn kind(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Bool(value) => value.to_string(),
        Value::Number(number) => number.to_string(),
        Value::String(text) if text.chars().count() <= 40 => format!("{text:?}"),
        Value::String(_) => "a long string".into(),
        Value::Array(values) => format!("an array of {}", values.len()),
        Value::Object(_) => "an object".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_that_nobody_asks_for_is_unknown() {
        let body = br#"{"temprature": 1, "temperature": 1, "user": "mara", "nothing": null}"#;
        let fields = Fields::parse(body).expect("an object");
        assert_eq!(fields.number("temperature", 0.0..=2.0).expect("a number"), Some(1.0));
        assert_eq!(fields.unknown(), ["temprature"]);
    }
}
