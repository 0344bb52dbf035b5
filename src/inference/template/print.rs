//! Prints values as Python does: `str`, `repr`, and `json.dumps`.

use minijinja::value::ValueKind;
use minijinja::{Error, Value};

use super::values::{Kind, Number, as_dict, as_series, int, number, type_name, wrong};

/// Maximum nesting of printed lists.
const DEPTH: usize = 200;

/// Python's `str`.
pub(super) fn text(value: &Value) -> Result<String, Error> {
    match value.as_str() {
        Some(text) => Ok(text.to_string()),
        None if value.is_undefined() => Ok(String::new()),
        None => shown(value),
    }
}

/// Python's `repr`.
pub(super) fn shown(value: &Value) -> Result<String, Error> {
    let mut written = String::new();
    show(value, &mut written, 0)?;
    Ok(written)
}

fn show(value: &Value, written: &mut String, depth: usize) -> Result<(), Error> {
    if depth > DEPTH {
        return Err(wrong("lists nest too deep to be printed"));
    }
    if let Some(series) = as_series(value) {
        let (begin, end) = match series.kind {
            Kind::List => ("[", "]"),
            Kind::Tuple | Kind::Group if series.items().len() == 1 => ("(", ",)"),
            Kind::Tuple | Kind::Group => ("(", ")"),
            Kind::Keys => ("dict_keys([", "])"),
            Kind::Values => ("dict_values([", "])"),
            Kind::Items => ("dict_items([", "])"),
            Kind::Range => {
                written.push_str(&series.shown);
                return Ok(());
            }
            Kind::Generator => {
                return Err(wrong("a generator is printed as its address in memory; |list makes a list of it"));
            }
        };
        written.push_str(begin);
        for (at, item) in series.items().iter().enumerate() {
            written.push_str(if at > 0 { ", " } else { "" });
            show(item, written, depth + 1)?;
        }
        written.push_str(end);
        return Ok(());
    }
    if let Some(dict) = as_dict(value) {
        written.push('{');
        for (at, (key, value)) in dict.entries().iter().enumerate() {
            written.push_str(if at > 0 { ", " } else { "" });
            show(key, written, depth + 1)?;
            written.push_str(": ");
            show(value, written, depth + 1)?;
        }
        written.push('}');
        return Ok(());
    }
    match value.kind() {
        ValueKind::None => written.push_str("None"),
        ValueKind::Undefined => written.push_str("Undefined"),
        ValueKind::Bool => written.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::String => quote(value.as_str().unwrap_or_default(), written),
        ValueKind::Number => match number(value) {
            Some(Number::Int(int)) => written.push_str(&int.to_string()),
            Some(Number::Float(float)) => written.push_str(&float_text(float)),
            None => written.push_str(&value.to_string()),
        },
        _ => return Err(wrong("an object is printed as its address in memory, which is not supported")),
    }
    Ok(())
}

/// A quoted string.
fn quote(text: &str, written: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    written.push(quote);
    for c in text.chars() {
        match c {
            '\\' => written.push_str("\\\\"),
            '\n' => written.push_str("\\n"),
            '\r' => written.push_str("\\r"),
            '\t' => written.push_str("\\t"),
            c if c == quote => written.extend(['\\', c]),
            c if is_printable(c) => written.push(c),
            c => match u32::from(c) {
                code @ ..=0xff => written.push_str(&format!("\\x{code:02x}")),
                code @ ..=0xffff => written.push_str(&format!("\\u{code:04x}")),
                code => written.push_str(&format!("\\U{code:08x}")),
            },
        }
    }
    written.push(quote);
}

/// Python's `isprintable` of a character: Rust's unescaped ones, except for combining marks at the
/// start.
fn is_printable(c: char) -> bool {
    if c.is_ascii() {
        return (' '..='~').contains(&c);
    }
    let text: String = ['a', c].into_iter().collect();
    text.escape_debug().count() == 2
}

/// A float in Python's `repr`: the shortest digits that round-trip.
pub(super) fn float_text(float: f64) -> String {
    if float.is_nan() {
        return "nan".into();
    }
    if float.is_infinite() {
        return if float > 0.0 { "inf".into() } else { "-inf".into() };
    }
    let scientific = format!("{float:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = format!("{float}");
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

/// JSON style.
pub(super) struct JsonStyle {
    pub(super) ascii: bool,
    pub(super) sorted: bool,
    /// Indentation per level.
    pub(super) indent: Option<String>,
    pub(super) comma: String,
    pub(super) colon: String,
}

/// Python's `json.dumps`.
pub(super) fn json(value: &Value, style: &JsonStyle) -> Result<String, Error> {
    let mut written = String::new();
    write_json(value, style, &mut written, 0)?;
    Ok(written)
}

fn write_json(value: &Value, style: &JsonStyle, written: &mut String, depth: usize) -> Result<(), Error> {
    if depth > DEPTH {
        return Err(wrong("lists nest too deep for JSON"));
    }
    let line = |written: &mut String, depth: usize| {
        if let Some(indent) = &style.indent {
            written.push('\n');
            written.push_str(&indent.repeat(depth));
        }
    };
    let refused = || wrong(format!("Object of type {} is not JSON serializable", type_name(value)));
    if let Some(series) = as_series(value) {
        if !matches!(series.kind, Kind::List | Kind::Tuple | Kind::Group) {
            return Err(refused());
        }
        let items = series.items();
        if items.is_empty() {
            written.push_str("[]");
            return Ok(());
        }
        written.push('[');
        for (at, item) in items.iter().enumerate() {
            written.push_str(if at > 0 { &style.comma } else { "" });
            line(written, depth + 1);
            write_json(item, style, written, depth + 1)?;
        }
        line(written, depth);
        written.push(']');
        return Ok(());
    }
    if let Some(dict) = as_dict(value) {
        let mut entries: Vec<&(Value, Value)> = dict.entries().iter().collect();
        if entries.is_empty() {
            written.push_str("{}");
            return Ok(());
        }
        if style.sorted {
            super::values::sort(&mut entries, |entry| &entry.0)?;
        }
        written.push('{');
        for (at, (key, value)) in entries.into_iter().enumerate() {
            written.push_str(if at > 0 { &style.comma } else { "" });
            line(written, depth + 1);
            match (key.as_str(), number(key)) {
                (Some(text), _) => json_text(text, style.ascii, written),
                (_, Some(_)) => json_text(&scalar(key).unwrap_or_default(), style.ascii, written),
                _ if key.is_none() => written.push_str("\"null\""),
                _ => {
                    return Err(wrong(format!("keys must be str, int, float, bool or None, not {}", type_name(key))));
                }
            }
            written.push_str(&style.colon);
            write_json(value, style, written, depth + 1)?;
        }
        line(written, depth);
        written.push('}');
        return Ok(());
    }
    match value.as_str() {
        Some(text) => json_text(text, style.ascii, written),
        None => written.push_str(&scalar(value).ok_or_else(refused)?),
    }
    Ok(())
}

fn scalar(value: &Value) -> Option<String> {
    match value.kind() {
        ValueKind::None => Some("null".into()),
        ValueKind::Bool => Some(value.is_true().to_string()),
        _ => match (int(value), number(value)?.as_f64()) {
            (Some(int), _) => Some(int.to_string()),
            (None, float) if float.is_nan() => Some("NaN".into()),
            (None, f64::INFINITY) => Some("Infinity".into()),
            (None, f64::NEG_INFINITY) => Some("-Infinity".into()),
            (None, float) => Some(float_text(float)),
        },
    }
}

fn json_text(text: &str, ascii: bool, written: &mut String) {
    written.push('"');
    for c in text.chars() {
        match c {
            '"' => written.push_str("\\\""),
            '\\' => written.push_str("\\\\"),
            '\n' => written.push_str("\\n"),
            '\r' => written.push_str("\\r"),
            '\t' => written.push_str("\\t"),
            '\x08' => written.push_str("\\b"),
            '\x0c' => written.push_str("\\f"),
            c if c < ' ' || (ascii && !(' '..='~').contains(&c)) => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    written.push_str(&format!("\\u{unit:04x}"));
                }
            }
            c => written.push(c),
        }
    }
    written.push('"');
}

/// Alignment of text.
#[derive(Clone, Copy)]
pub(super) enum Align {
    Left,
    Right,
    Center,
    /// Padding between the sign and the digits.
    Sign,
}

/// Pads text to a width.
pub(super) fn padded(text: &str, width: i64, fill: char, align: Align) -> Result<String, Error> {
    let missing = usize::try_from(width).unwrap_or(0).saturating_sub(text.chars().count());
    if missing > 1 << 20 {
        return Err(wrong(format!("a width of {width} is too much")));
    }
    let spaces = |count: usize| std::iter::repeat_n(fill, count).collect::<String>();
    Ok(match align {
        Align::Left => text.to_string() + &spaces(missing),
        Align::Right => spaces(missing) + text,
        Align::Center => {
            // Rounds like Python.
            let left = missing / 2 + (missing & usize::try_from(width).unwrap_or(0) & 1);
            spaces(left) + text + &spaces(missing - left)
        }
        Align::Sign => {
            let (sign, digits) = text.split_at(usize::from(text.starts_with(['+', '-', ' '])));
            sign.to_string() + &spaces(missing) + digits
        }
    })
}
