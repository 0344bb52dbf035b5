//! Output constraints of a request, in OpenAI's and vLLM's fields.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::{Instant, timeout};

use super::error::ApiError;
use super::fields::Fields;
use crate::server::grammar::{Grammar, GrammarFilter};
use crate::server::served::ServedGenerator;

/// How often a waiting request checks for grammars that take too long.
const LOOK: Duration = Duration::from_secs(1);

/// A constraint and the field that sets it.
#[derive(Debug, PartialEq)]
pub(super) struct Constraint {
    pub(super) field: String,
    pub(super) grammar: Grammar,
}

impl Constraint {
    /// The constraint of a request, if any.
    ///
    /// # Errors
    /// If it is invalid, or there are two.
    pub(super) fn read(fields: &Fields) -> Result<Option<Self>, ApiError> {
        let mut found = Vec::new();
        if let Some(format) = fields.object("response_format")?
            && let Some(schema) = response_schema(&format)?
        {
            found.push((fields.name("response_format"), Grammar::Json(schema)));
        }
        let own = ["guided_json", "guided_regex", "guided_choice", "guided_grammar"];
        found.extend(one_of(fields, own)?);
        if let Some(outputs) = fields.object("structured_outputs")? {
            outputs.refuse(&["structural_tag", "whitespace_pattern"])?;
            found.extend(one_of(&outputs, ["json", "regex", "choice", "grammar"])?);
            if outputs.flag("json_object", false)? {
                found.push((outputs.name("json_object"), Grammar::Json(json!({ "type": "object" }))));
            }
        }
        let mut found = found.into_iter().map(|(field, grammar)| Self { field, grammar });
        let first = found.next();
        match (&first, found.next()) {
            (Some(Self { field: one, .. }), Some(Self { field: two, .. })) => {
                let message = format!("{one} and {two} cannot be combined: use one of them");
                Err(ApiError::param(two, message))
            }
            _ => Ok(first),
        }
    }

    /// Compiles its grammar, once for all sequences of the request.
    ///
    /// # Errors
    /// If it is not supported, or takes too long.
    pub(super) async fn compile(self, served: &ServedGenerator, deadline: Instant) -> Result<GrammarFilter, ApiError> {
        let Self { field, grammar } = self;
        let mut compiled = served.grammars.ask(grammar).map_err(|_| ApiError::busy(1))?;
        let compiled = loop {
            match timeout(LOOK, &mut compiled).await {
                Ok(compiled) => break compiled,
                Err(_) if Instant::now() > deadline => return Err(ApiError::too_slow()),
                Err(_) => served.grammars.mend(),
            }
        };
        compiled.map_err(|_| ApiError::stopping())?.map_err(|failure| match failure.exit_code() {
            2 => ApiError::param(&field, format!("{field} is not supported: {failure}")),
            _ => ApiError::server(failure.to_string()),
        })
    }
}

/// Constraints by kind: JSON, a regular expression, choices, a grammar.
fn one_of(given: &Fields, [schema, pattern, choice, grammar]: [&str; 4]) -> Result<Vec<(String, Grammar)>, ApiError> {
    let mut found = Vec::new();
    let filled = |field: &str| match given.string(field)? {
        Some("") => Err(given.wrong(field, "a string that is not empty")),
        text => Ok(text.map(str::to_string)),
    };
    match given.get(schema) {
        None => {}
        // Some clients send it as a string.
        Some(Value::String(text)) => {
            let schema_value: Value = serde_json::from_str(text).map_err(|error| {
                let name = given.name(schema);
                ApiError::param(&name, format!("{name} is not valid JSON: {error}"))
            })?;
            found.push((given.name(schema), Grammar::Json(schema_value)));
        }
        Some(value @ Value::Object(_)) => found.push((given.name(schema), Grammar::Json(value.clone()))),
        Some(_) => return Err(given.wrong(schema, "a JSON schema, as an object or as text")),
    }
    if let Some(pattern_text) = filled(pattern)? {
        found.push((given.name(pattern), Grammar::Regex(pattern_text)));
    }
    if let Some(choices) = given.array(choice)? {
        let text = |value: &Value| value.as_str().filter(|text| !text.is_empty()).map(str::to_string);
        let choices: Option<Vec<String>> = choices.iter().map(text).collect();
        let choices = choices.filter(|choices| !choices.is_empty());
        let choices = choices.ok_or_else(|| given.wrong(choice, "an array of strings that are not empty"))?;
        found.push((given.name(choice), Grammar::Choice(choices)));
    }
    if let Some(text) = filled(grammar)? {
        if is_gbnf(&text) {
            let name = given.name(grammar);
            let message = format!("{name} looks like GBNF (`root ::= ..`); it must be a Lark grammar (`start: ..`)");
            return Err(ApiError::param(&name, message));
        }
        found.push((given.name(grammar), Grammar::Lark(text)));
    }
    Ok(found)
}

/// Whether some line defines a rule in llama.cpp's form.
fn is_gbnf(grammar: &str) -> bool {
    let defines = |line: &str| {
        let name = line.split_once("::=").map(|(name, _)| name.trim());
        name.is_some_and(|name| !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c)))
    };
    grammar.lines().any(defines)
}

fn response_schema(format: &Fields) -> Result<Option<Value>, ApiError> {
    match format.string("type")? {
        Some("text") => Ok(None),
        // Some servers allow a schema with it.
        Some("json_object") => match format.object("schema")? {
            Some(schema) => Ok(Some(Value::Object(schema.into_values()))),
            None => Ok(Some(json!({ "type": "object" }))),
        },
        Some("json_schema") => {
            let schema = format.object("json_schema")?.ok_or_else(|| format.wrong("json_schema", "an object"))?;
            let schema = schema.object("schema")?.ok_or_else(|| schema.wrong("schema", "an object"))?;
            Ok(Some(Value::Object(schema.into_values())))
        }
        _ => Err(format.wrong("type", "\"text\", \"json_object\" or \"json_schema\"")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(request: Value) -> Result<Option<Constraint>, String> {
        let fields = Fields::parse(request.to_string().as_bytes()).expect("an object");
        Constraint::read(&fields).map_err(|error| error.message)
    }

    #[test]
    fn each_kind_is_read_by_each_of_its_names() {
        let schema = json!({ "type": "integer" });
        let object = json!({ "type": "object" });
        for (field, value, grammar) in [
            ("guided_json", schema.clone(), Grammar::Json(schema.clone())),
            ("guided_json", schema.to_string().into(), Grammar::Json(schema.clone())),
            ("guided_regex", json!("a+"), Grammar::Regex("a+".into())),
            ("guided_choice", json!(["a", "b"]), Grammar::Choice(vec!["a".into(), "b".into()])),
            ("guided_grammar", json!("start: \"a\""), Grammar::Lark("start: \"a\"".into())),
            ("response_format", json!({ "type": "json_object" }), Grammar::Json(object.clone())),
            (
                "response_format",
                json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": schema } }),
                Grammar::Json(schema.clone()),
            ),
        ] {
            let constraint = read(json!({ field: value })).expect("it is read");
            assert_eq!(constraint, Some(Constraint { field: field.into(), grammar: grammar.clone() }));
            if let Some(kind) = field.strip_prefix("guided_") {
                let constraint = read(json!({ "structured_outputs": { kind: value } })).expect("it is read");
                assert_eq!(constraint, Some(Constraint { field: format!("structured_outputs.{kind}"), grammar }));
            }
        }
        let constraint = read(json!({ "structured_outputs": { "json_object": true } })).expect("it is read");
        assert_eq!(constraint.map(|constraint| constraint.grammar), Some(Grammar::Json(object)));
        for nothing in [
            json!({}),
            json!({ "guided_json": null, "response_format": { "type": "text" } }),
            json!({ "structured_outputs": { "json_object": false } }),
        ] {
            assert_eq!(read(nothing), Ok(None));
        }
    }

    #[test]
    fn two_constraints_are_refused_by_both_names() {
        for (request, names) in [
            (json!({ "guided_json": {}, "guided_regex": "a" }), ["guided_json", "guided_regex"]),
            (
                json!({ "guided_choice": ["a"], "response_format": { "type": "json_object" } }),
                ["guided_choice", "response"],
            ),
            (
                json!({ "structured_outputs": { "json": {}, "grammar": "start: x" } }),
                ["outputs.json", "outputs.grammar"],
            ),
            (
                json!({ "structured_outputs": { "json_object": true }, "guided_regex": "a" }),
                ["json_object", "guided_regex"],
            ),
        ] {
            let reason = read(request).expect_err("it is refused");
            assert!(names.iter().all(|name| reason.contains(name)), "{reason}");
        }
    }

    #[test]
    fn what_is_no_constraint_is_refused_by_its_name() {
        for (field, value, told) in [
            ("json", json!(3), "a JSON schema"),
            ("json", json!("{"), "not valid JSON"),
            ("regex", json!(""), "not empty"),
            ("regex", json!(["a"]), "a string"),
            ("choice", json!([]), "an array of strings"),
            ("choice", json!(["a", 1]), "an array of strings"),
            ("choice", json!(["a", ""]), "not empty"),
            ("choice", json!("a"), "an array"),
            ("grammar", json!("root ::= \"a\" | \"b\""), "GBNF"),
            ("grammar", json!("# x\nroot::= item+\nitem ::= [a-z]"), "GBNF"),
        ] {
            for (request, name) in [
                (json!({ format!("guided_{field}"): value }), format!("guided_{field}")),
                (json!({ "structured_outputs": { field: value } }), format!("structured_outputs.{field}")),
            ] {
                let reason = read(request).expect_err("it is refused");
                assert!(reason.contains(told) && reason.contains(&name), "{reason}");
            }
        }
        assert!(read(json!({ "structured_outputs": { "structural_tag": "x" } })).is_err());
        assert!(read(json!({ "guided_grammar": "start: \"root ::= x\"" })).is_ok());
    }
}
