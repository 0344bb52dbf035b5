//! Limits of schemas and grammars, checked before compilation.

use std::collections::HashSet;

use serde_json::Value;

use crate::failure::Failure;
use crate::server::schema::{DATA, each_schema};

/// Maximum nesting of schemas, `$ref` targets included: each level takes some of a compiler's
/// stack.
pub(super) const DEPTH: usize = 400;
/// Maximum number of schemas, counting each `$ref` target once.
const SCHEMAS: usize = 10_000;
/// Maximum number of property names.
const PROPERTIES: usize = 2_000;
/// Maximum number of distinct property patterns, which are compared pairwise.
const NAME_PATTERNS: usize = 16;
/// Maximum number of values of all `enum` and `const`, and choices.
const VALUES: usize = 10_000;
/// Maximum bytes of names, values and choices.
const TEXT_BYTES: usize = 256 << 10;
/// Maximum bytes of regular expressions.
const PATTERN_BYTES: usize = 32 << 10;
/// Maximum bytes of a Lark grammar.
const GRAMMAR_BYTES: usize = 64 << 10;
/// Maximum definitions and brackets of a grammar: a chain of all of them fits a compiler's stack.
const GRAMMAR_PARTS: usize = 4_000;

/// Maximum repeats within a complement, nested ones multiplied: the compiler enumerates them.
const REPEATS: usize = 10_000;
/// Minimum of a bound or value: below it the compiler recurses until its stack is full.
const LEAST: f64 = -9.2e18;

/// The supported formats. Others are ignored, as JSON Schema allows.
const FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

/// Counts what will be compiled.
#[derive(Default)]
pub(super) struct Counts {
    schemas: usize,
    properties: usize,
    name_patterns: HashSet<String>,
    values: usize,
    text: usize,
    patterns: usize,
}

impl Counts {
    /// Counts a schema and all its references.
    ///
    /// # Errors
    /// If a limit is exceeded.
    pub(super) fn schema(&mut self, schema: &Value) -> Result<(), Failure> {
        SchemaWalk { root: schema, seen: HashSet::new(), counts: self }.schema(schema, 1)
    }

    /// Counts choices.
    ///
    /// # Errors
    /// If a limit is exceeded.
    pub(super) fn choices(&mut self, choices: &[String]) -> Result<(), Failure> {
        choices.iter().try_for_each(|choice| self.value(choice.len()))
    }

    /// Counts a regular expression.
    ///
    /// # Errors
    /// If a limit is exceeded.
    pub(super) fn pattern(&mut self, pattern: &str) -> Result<(), Failure> {
        self.patterns += pattern.len();
        within(self.patterns, PATTERN_BYTES, "bytes of regular expressions")
    }

    /// Counts a Lark grammar, with its schemas.
    ///
    /// # Errors
    /// If a limit is exceeded.
    pub(super) fn lark(&mut self, grammar: &str) -> Result<(), Failure> {
        within(grammar.len(), GRAMMAR_BYTES, "bytes")?;
        // Those within strings are counted, too: only a parser could tell.
        let parts = grammar.bytes().filter(|byte| matches!(byte, b':' | b'(' | b'[' | b'{' | b'~')).count();
        within(parts, GRAMMAR_PARTS, "definitions and brackets")?;
        let complement = |rest: &str| rest.trim_start().starts_with(|next: char| !next.is_ascii_digit());
        if grammar.split('~').skip(1).any(complement) {
            within(repeats(grammar), REPEATS, "repeats next to a complement")?;
        }
        for (at, mark) in grammar.match_indices("%json") {
            let mut values = serde_json::Deserializer::from_str(&grammar[at + mark.len()..]).into_iter::<Value>();
            // Invalid JSON is refused where it is read.
            if let Some(Ok(schema)) = values.next() {
                self.schema(&schema)?;
            }
        }
        Ok(())
    }

    fn property(&mut self, name: &str) -> Result<(), Failure> {
        self.properties += 1;
        within(self.properties, PROPERTIES, "properties")?;
        self.text(name.len())
    }

    fn value(&mut self, bytes: usize) -> Result<(), Failure> {
        self.values += 1;
        within(self.values, VALUES, "values to choose from")?;
        self.text(bytes)
    }

    fn text(&mut self, bytes: usize) -> Result<(), Failure> {
        self.text += bytes;
        within(self.text, TEXT_BYTES, "bytes of names and values")
    }
}

fn within(count: usize, most: usize, what: &str) -> Result<(), Failure> {
    match count <= most {
        true => Ok(()),
        false => Err(Failure::usage(format!("it is too large: at most {most} {what} are allowed"))),
    }
}

/// Visits a schema in the order of compilation.
struct SchemaWalk<'a, 'b> {
    root: &'a Value,
    seen: HashSet<&'a str>,
    counts: &'b mut Counts,
}

impl<'a> SchemaWalk<'a, '_> {
    fn schema(&mut self, schema: &'a Value, depth: usize) -> Result<(), Failure> {
        self.deeper(depth)?;
        self.counts.schemas += 1;
        within(self.counts.schemas, SCHEMAS, "schemas")?;
        let Value::Object(fields) = schema else { return Ok(()) };
        if let Some(Value::Array(required)) = fields.get("required") {
            let named = |name: &&str| fields.get("properties").is_some_and(|named| named.get(name).is_some());
            let mut more = required.iter().filter_map(Value::as_str).filter(|name| !named(name));
            more.try_for_each(|name| self.counts.property(name))?;
        }
        fields.iter().try_for_each(|(key, value)| self.keyword(key, value, depth + 1))
    }

    fn keyword(&mut self, key: &str, value: &'a Value, depth: usize) -> Result<(), Failure> {
        match (key, value) {
            ("$ref", Value::String(target)) => match find(self.root, target) {
                Some(schema) if self.seen.insert(target) => self.schema(schema, depth),
                _ => Ok(()),
            },
            // Compiled where they are referenced.
            ("$defs" | "definitions", _) => Ok(()),
            ("properties", Value::Object(named)) => named.iter().try_for_each(|(name, schema)| {
                self.counts.property(name)?;
                self.schema(schema, depth)
            }),
            ("patternProperties", Value::Object(named)) => named.iter().try_for_each(|(pattern, schema)| {
                self.counts.name_patterns.insert(pattern.clone());
                within(self.counts.name_patterns.len(), NAME_PATTERNS, "patterns of properties")?;
                self.counts.pattern(pattern)?;
                self.schema(schema, depth)
            }),
            ("minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum", number) => not_too_low(number),
            ("pattern", Value::String(pattern)) => self.counts.pattern(pattern),
            ("enum", Value::Array(values)) => values.iter().try_for_each(|value| self.value(value, depth)),
            ("const", value) => self.value(value, depth),
            (key, _) if DATA.contains(&key) => Ok(()),
            (_, schema @ Value::Object(_)) => self.schema(schema, depth),
            (_, Value::Array(schemas)) => {
                schemas.iter().filter(|schema| schema.is_object()).try_for_each(|schema| self.schema(schema, depth))
            }
            _ => Ok(()),
        }
    }

    /// A required value.
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Failure> {
        self.deeper(depth)?;
        self.counts.value(value.as_str().map_or(0, str::len))?;
        not_too_low(value)?;
        match value {
            Value::Array(values) => values.iter().try_for_each(|value| self.value(value, depth + 1)),
            Value::Object(fields) => fields.iter().try_for_each(|(name, value)| {
                self.counts.text(name.len())?;
                self.value(value, depth + 1)
            }),
            _ => Ok(()),
        }
    }

    fn deeper(&self, depth: usize) -> Result<(), Failure> {
        match depth <= DEPTH {
            true => Ok(()),
            false => Err(Failure::usage(format!(
                "it is nested too deeply: at most {DEPTH} levels of schemas are allowed, references included"
            ))),
        }
    }
}

/// The product of all counts, as if they were nested.
fn repeats(text: &str) -> usize {
    let text = text.replace(' ', "");
    let bytes = text.as_bytes();
    let counts = (1..bytes.len()).filter(|at| b"{,~.".contains(&bytes[at - 1]) && bytes[*at].is_ascii_digit());
    counts.fold(1, |product: usize, at| {
        let digits = text[at..].bytes().take_while(u8::is_ascii_digit).count();
        product.saturating_mul(text[at..at + digits].parse().unwrap_or(usize::MAX).max(1))
    })
}

fn not_too_low(number: &Value) -> Result<(), Failure> {
    match number.as_f64().is_some_and(|number| number < LEAST) {
        true => Err(Failure::usage(format!("{number} is too low: the minimum is {LEAST}"))),
        false => Ok(()),
    }
}

/// The target of a reference, as the compiler resolves it.
fn find<'a>(root: &'a Value, target: &str) -> Option<&'a Value> {
    let path = target.strip_prefix('#')?;
    if path.is_empty() || path == "/" {
        return Some(root);
    }
    path.strip_prefix('/')?.split('/').try_fold(root, |value, part| match value {
        Value::Array(values) => values.get(part.parse::<usize>().ok()?),
        value => value.get(part),
    })
}

/// Removes unknown formats from a schema.
pub(super) fn pass_over_formats(schema: &mut Value) {
    each_schema(schema, &mut |fields| {
        if fields.get("format").and_then(Value::as_str).is_some_and(|format| !FORMATS.contains(&format)) {
            fields.remove("format");
        }
    });
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, json};

    use super::*;

    fn refused(schema: &Value) -> Option<String> {
        Counts::default().schema(schema).err().map(|failure| failure.to_string())
    }

    /// A chain of definitions, each of which refers to the next.
    fn chain(length: usize, link: impl Fn(Value) -> Value) -> Value {
        let next = |at: usize| match at + 1 == length {
            true => json!({ "type": "integer" }),
            false => json!({ "$ref": format!("#/$defs/a{}", at + 1) }),
        };
        let definitions = (0..length).map(|at| (format!("a{at}"), link(next(at)))).collect::<Map<_, _>>();
        json!({ "$ref": "#/$defs/a0", "$defs": definitions })
    }

    #[test]
    fn references_count_as_depth() {
        let object = |inner: Value| json!({ "type": "object", "properties": { "a": inner } });
        assert_eq!(refused(&chain(120, object)), None);
        for link in [object, |inner| json!({ "items": inner }), |inner| json!({ "anyOf": [inner, true] })] {
            let reason = refused(&chain(300, link)).expect("it is refused");
            assert!(reason.contains("too deeply: at most 400"), "{reason}");
        }
        let nested = (0..640).fold(json!({}), |inner, _| object(inner));
        assert!(refused(&nested).is_some_and(|reason| reason.contains("too deeply")));
        let constant = (0..640).fold(json!(1), |inner, _| json!([inner]));
        assert!(refused(&json!({ "const": constant })).is_some_and(|reason| reason.contains("too deeply")));
        // A cycle ends, too.
        assert_eq!(refused(&json!({ "properties": { "next": { "$ref": "#" } } })), None);
        assert_eq!(refused(&chain(300, |_| json!({ "$ref": "#/$defs/a0" }))), None);
    }

    #[test]
    fn what_is_too_large_is_refused_with_the_bound() {
        let many = |count: usize| (0..count).map(|at| (format!("p{at}"), json!({}))).collect::<Map<_, _>>();
        let values = |count: usize| (0..count).collect::<Vec<usize>>();
        for (schema, told) in [
            (json!({ "properties": many(2001) }), "2000 properties"),
            (json!({ "required": (0..2001).map(|at| format!("p{at}")).collect::<Vec<_>>() }), "2000 properties"),
            (json!({ "patternProperties": many(17) }), "16 patterns"),
            (json!({ "enum": values(10_001) }), "10000 values"),
            (json!({ "anyOf": [{ "enum": values(5100) }, { "const": values(5100) }] }), "10000 values"),
            (json!({ "const": "a".repeat(257 << 10) }), "262144 bytes of names and values"),
            (json!({ "pattern": "a".repeat(33 << 10) }), "32768 bytes of regular expressions"),
            (json!({ "anyOf": vec![json!({}); 10_000] }), "10000 schemas"),
        ] {
            let reason = refused(&schema).expect("it is refused");
            assert!(reason.contains(told), "{reason}");
        }
        assert_eq!(refused(&json!({ "properties": many(2000), "$defs": many(20_000) })), None);
        assert_eq!(refused(&json!({ "description": "a".repeat(1 << 20), "default": values(20_000) })), None);
        let refused = |grammar: &str| Counts::default().lark(grammar).err().map(|failure| failure.to_string());
        assert!(refused(&"(".repeat(4001)).is_some_and(|reason| reason.contains("4000 definitions and brackets")));
        assert!(refused(&" ".repeat(70_000)).is_some_and(|reason| reason.contains("65536 bytes")));
        let within = format!("start: %json {}", json!({ "enum": values(10_001) }));
        assert!(refused(&within).is_some_and(|reason| reason.contains("10000 values")));
        assert_eq!(refused("start: \"%json\""), None);
        let complement = |count: &str| refused(&format!("start: A\nA: /[a-z]{{1,{count}}}/ & ~ /b/"));
        assert!(complement("1000000").is_some_and(|reason| reason.contains("10000 repeats")));
        assert!(complement("99999999999999999999999").is_some());
        assert!(complement("100}){1, 1000").is_some());
        assert_eq!((complement("1000"), refused("start: A~99999")), (None, None));
    }

    #[test]
    fn unknown_formats_are_passed_over_where_they_are_formats() {
        let mut schema = json!({
            "properties": {
                "format": { "type": "string", "format": "glaze" }, "day": { "format": "date" },
                "fixed": { "const": { "format": "glaze" } },
            },
            "$defs": { "format": { "items": [{ "format": "clay" }] } }, "default": { "format": "glaze" },
        });
        pass_over_formats(&mut schema);
        let wanted = json!({
            "properties": {
                "format": { "type": "string" }, "day": { "format": "date" },
                "fixed": { "const": { "format": "glaze" } },
            },
            "$defs": { "format": { "items": [{}] } }, "default": { "format": "glaze" },
        });
        assert_eq!(schema, wanted);
    }
}
