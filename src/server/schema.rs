//! Traversal of the schemas within a JSON schema.

use serde_json::{Map, Value};

/// Keywords whose values are not schemas, whatever they look like.
pub(super) const DATA: [&str; 5] = ["const", "enum", "default", "example", "examples"];
/// Keywords whose values map names to schemas.
const NAMED: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];

/// Calls `change` with the fields of each nested schema, but not with data that looks like one.
pub(super) fn each_schema(schema: &mut Value, change: &mut dyn FnMut(&mut Map<String, Value>)) {
    match schema {
        Value::Object(fields) => {
            change(fields);
            for (key, value) in fields {
                match value {
                    Value::Object(named) if NAMED.contains(&key.as_str()) => {
                        named.values_mut().for_each(|schema| each_schema(schema, change));
                    }
                    _ if DATA.contains(&key.as_str()) => {}
                    value => each_schema(value, change),
                }
            }
        }
        Value::Array(schemas) => schemas.iter_mut().for_each(|schema| each_schema(schema, change)),
        _ => {}
    }
}
