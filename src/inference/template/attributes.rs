//! Attributes and items of values, with Jinja's lookup rules.

use minijinja::{Error, Value};

use super::methods::Found;
use super::values::{Kind, Method, as_dict, as_series, int, length, type_name, wrong};

/// `value.name` in Jinja: an attribute of Python's object, else an item.
pub(super) fn attribute(value: &Value, name: &str) -> Result<Value, Error> {
    if value.is_undefined() {
        return Err(wrong(format!("what has no value is asked for its attribute {name}: it is undefined")));
    }
    match super::methods::find(value, name) {
        Some(Found::Method) => {
            return Ok(Value::from_object(Method { of: value.clone(), name: name.into(), call: super::methods::call }));
        }
        Some(Found::Unsafe) => return Ok(Value::UNDEFINED),
        Some(Found::Unsupported) => return Err(unsupported_method(value, name)),
        None => {}
    }
    if let Some(dict) = as_dict(value) {
        return Ok(dict.get(&Value::from(name))?.cloned().unwrap_or_default());
    }
    if let Some(series) = as_series(value) {
        let place = match (series.kind, name) {
            (Kind::Group, "grouper") => 0,
            (Kind::Group, "list") => 1,
            _ => return Ok(Value::UNDEFINED),
        };
        return Ok(series.items().get(place).cloned().unwrap_or_default());
    }
    value.get_attr(name)
}

/// `value[key]` in Jinja: an item, else an attribute.
pub(super) fn item(value: &Value, key: &Value) -> Result<Value, Error> {
    if value.is_undefined() {
        return Err(wrong("what has no value is asked for an item: it is undefined"));
    }
    let found = match (as_dict(value), int(key)) {
        (Some(dict), _) => dict.get(key).ok().flatten().cloned(),
        (None, Some(place)) => match (as_series(value), value.as_str()) {
            (Some(series), _) if !matches!(series.kind, Kind::Keys | Kind::Values | Kind::Items | Kind::Generator) => {
                at(place, series.items().len()).map(|place| series.items()[place].clone())
            }
            (_, Some(text)) => at(place, length(value)?).and_then(|place| text.chars().nth(place)).map(Value::from),
            _ => None,
        },
        _ => None,
    };
    match (found, key.as_str()) {
        (Some(found), _) => Ok(found),
        (None, Some(name)) => attribute(value, name),
        (None, None) => Ok(Value::UNDEFINED),
    }
}

fn at(place: i128, length: usize) -> Option<usize> {
    let place = if place < 0 { place + length as i128 } else { place };
    usize::try_from(place).ok().filter(|place| *place < length)
}

/// The error for an unsupported method.
pub(super) fn unsupported_method(value: &Value, name: &str) -> Error {
    wrong(format!("the method {name} of '{}' is not supported", type_name(value)))
}
