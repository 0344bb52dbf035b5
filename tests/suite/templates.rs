//! Chat templates: each renders as with Jinja in `transformers`, or is refused with the name of the
//! unsupported feature.

use std::fs;

use fireclay::inference::template::Template;
use serde_json::{Map, Value};

use crate::golden::folder;

fn golden() -> Value {
    let text = fs::read_to_string(folder("templates.json")).expect("a golden file");
    serde_json::from_str(&text).expect("JSON")
}

/// The source of a template, or why there is none.
fn rendered(golden: &Value, template: &str, context: &Value) -> Result<String, String> {
    let none = Map::new();
    let template = Template::new(template).map_err(|failure| failure.to_string())?;
    let template = template.at(golden["now"].as_i64().expect("seconds"));
    template.render(context.as_object().unwrap_or(&none)).map_err(|failure| failure.to_string())
}

/// The difference to Jinja's result for a template: a text, nothing if it refuses, or the exception
/// that the template raises.
fn difference(wanted: &Value, found: &Result<String, String>) -> Option<String> {
    let same = match (wanted, found) {
        (Value::String(wanted), Ok(found)) => wanted == found,
        (Value::Null, Err(_)) => true,
        (Value::Object(wanted), Err(found)) => found.contains(wanted["raised"].as_str().expect("a message")),
        _ => false,
    };
    (!same).then(|| format!("wanted {wanted}, found {found:?}"))
}

fn text(value: &Value) -> &str {
    value.as_str().expect("a text")
}

#[test]
fn every_construct_renders_as_in_jinja() {
    let golden = golden();
    let snippets = golden["snippets"].as_array().expect("snippets");
    assert!(snippets.len() >= 80, "{}", snippets.len());
    let wrong: Vec<String> = snippets
        .iter()
        .filter_map(|snippet| {
            let found = rendered(&golden, text(&snippet[0]), &golden["context"]);
            Some(format!("{}\n{}", text(&snippet[0]), difference(&snippet[1], &found)?))
        })
        .collect();
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), snippets.len(), wrong.join("\n\n"));
}

#[test]
fn conversations_in_the_style_of_ten_families_render_as_in_jinja() {
    let golden = golden();
    let families = golden["families"].as_object().expect("families");
    let conversations = golden["conversations"].as_object().expect("conversations");
    assert!(families.len() >= 10 && conversations.len() >= 4);
    for (family, template) in families {
        for (name, context) in conversations {
            let found = rendered(&golden, text(template), context);
            assert_eq!(difference(&golden["samples"][family][name], &found), None, "{family}, {name}");
        }
    }
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    let golden = golden();
    let refused = golden["refused"].as_array().expect("templates");
    for case in refused {
        let (template, name) = (text(&case[0]), text(&case[1]));
        let message = rendered(&golden, template, &golden["context"]).expect_err(template);
        assert!(message.starts_with("the chat template, line 1: ") && message.contains(name), "{template}: {message}");
    }
}

#[test]
fn a_refusal_says_the_line() {
    let template = "{{ 'one\ntwo' }}\n{% for x in\n  [1] %}\n{{ x.y.z }}{% endfor %}";
    let message = rendered(&golden(), template, &Value::Null).expect_err("an attribute of nothing");
    assert!(message.starts_with("the chat template, line 5: "), "{message}");
}
