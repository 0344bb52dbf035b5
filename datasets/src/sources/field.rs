//! The document field of a record.

use serde_json::{Map, Value};

use super::WHOLE_RECORD;

/// Maximum fields in a message.
const SHOWN: usize = 12;

/// The document of a record; `None` if the field is null. Errors give the reason.
pub(super) fn document(mut record: Map<String, Value>, field: &str) -> Result<Option<String>, String> {
    if field == WHOLE_RECORD {
        return Ok(Some(Value::Object(record).to_string()));
    }
    let kind = match find(&mut record, field) {
        Some(Value::String(text)) => return Ok(Some(std::mem::take(text))),
        Some(Value::Null) => return Ok(None),
        found => found.map(|value| kind(value)),
    };
    let mut names = Vec::new();
    add_names(&record, "", &mut names);
    if let Some(kind) = kind {
        names.retain(|name| name != field);
        return Err(format!("the field '{field}' is {kind}, not text; {}", others(names)));
    }
    let mut reason = lacks(field, names);
    let is_records = |value: &Value| value.as_array().is_some_and(|values| values.iter().any(Value::is_object));
    if let Some((name, _)) = record.iter().find(|(name, value)| is_plain(name) && is_records(value)) {
        reason += &format!("; '{name}' is an array of objects: make JSON lines with jq -c '.{name}[]'");
    }
    Err(reason)
}

/// The value of a field with this name, or with the path of its dot-separated names. A null on the
/// path stands for the field.
fn find<'a>(record: &'a mut Map<String, Value>, field: &str) -> Option<&'a mut Value> {
    let names = way(record, field)?;
    let (first, others) = names.split_first()?;
    others.iter().try_fold(record.get_mut(*first)?, |value, name| value.get_mut(*name))
}

/// The names on the path to a field's value.
fn way<'a>(record: &Map<String, Value>, field: &'a str) -> Option<Vec<&'a str>> {
    if record.contains_key(field) {
        return Some(vec![field]);
    }
    field.match_indices('.').find_map(|(at, _)| match record.get(&field[..at])? {
        Value::Object(inner) => Some([&[&field[..at]], &way(inner, &field[at + 1..])?[..]].concat()),
        Value::Null => Some(vec![&field[..at]]),
        _ => None,
    })
}

/// The message of a missing field, with the existing ones.
pub(super) fn lacks(field: &str, names: Vec<String>) -> String {
    format!("has no field '{field}'; it has {}: name one with --field NAME", list(names))
}

/// The other text fields of a record.
pub(super) fn others(names: Vec<String>) -> String {
    format!("other fields: {}; name the text field with --field NAME", list(names))
}

fn list(names: Vec<String>) -> String {
    let more = names.len().saturating_sub(SHOWN);
    let names: Vec<String> = names.iter().take(SHOWN).map(|name| beginning(name, 60)).collect();
    match (names.is_empty(), more) {
        (true, _) => "nothing".to_string(),
        (false, 0) => names.join(", "),
        (false, _) => format!("{} and {more} more", names.join(", ")),
    }
}

/// The first characters of a value, in one line.
pub(super) fn beginning(text: &str, length: usize) -> String {
    text.chars().take(length).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// The names of a record's fields, nested ones with dots.
fn add_names(record: &Map<String, Value>, before: &str, names: &mut Vec<String>) {
    for (name, value) in record {
        match value {
            Value::Object(inner) if !inner.is_empty() => add_names(inner, &format!("{before}{name}."), names),
            _ => names.push(format!("{before}{name}")),
        }
    }
}

/// The type of a value, in words.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// Whether a name needs no quoting in a shell and jq.
fn is_plain(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}
