//! The non-mutating methods of Python's strings, lists and dicts.

use minijinja::{Error, Value};

use super::print::{Align, padded, text};
use super::values::{
    Arguments, Kind, as_dict, as_series, dict, equal, from_int, int, items_of, list, of_kind, tuple, type_name, wrong,
};

/// What a name refers to, for a value in Python.
pub(super) enum Found {
    /// A method that can be called.
    Method,
    /// A mutating method, which the sandbox of `transformers` forbids.
    Unsafe,
    /// A method that is not supported.
    Unsupported,
}

const STRING: [&str; 40] = [
    "capitalize",
    "center",
    "count",
    "endswith",
    "find",
    "format",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "islower",
    "isnumeric",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "upper",
    "zfill",
    "expandtabs",
];
const STRING_UNSUPPORTED: [&str; 7] =
    ["casefold", "encode", "format_map", "isidentifier", "isprintable", "maketrans", "translate"];
const UNSAFE_LIST: [&str; 8] = ["append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"];
const UNSAFE_DICT: [&str; 5] = ["clear", "pop", "popitem", "setdefault", "update"];
const NUMBER_UNSUPPORTED: [&str; 12] = [
    "as_integer_ratio",
    "bit_count",
    "bit_length",
    "conjugate",
    "denominator",
    "from_bytes",
    "hex",
    "imag",
    "is_integer",
    "numerator",
    "real",
    "to_bytes",
];

/// What a name refers to, for a value.
pub(super) fn find(value: &Value, name: &str) -> Option<Found> {
    let one_of = |methods: &[&str], hidden: &[&str], missing: &[&str]| match name {
        _ if methods.contains(&name) => Some(Found::Method),
        _ if hidden.contains(&name) => Some(Found::Unsafe),
        _ if missing.contains(&name) => Some(Found::Unsupported),
        _ => None,
    };
    if value.as_str().is_some() {
        return one_of(&STRING, &[], &STRING_UNSUPPORTED);
    }
    if as_dict(value).is_some() {
        return one_of(&["copy", "get", "items", "keys", "values"], &UNSAFE_DICT, &["fromkeys"]);
    }
    match as_series(value).map(|series| series.kind) {
        Some(Kind::List) => one_of(&["copy", "count", "index"], &UNSAFE_LIST, &[]),
        Some(Kind::Tuple | Kind::Group) => one_of(&["count", "index"], &[], &[]),
        Some(Kind::Range) => one_of(&[], &[], &["count", "index", "start", "step", "stop"]),
        Some(Kind::Keys | Kind::Items) => one_of(&[], &[], &["isdisjoint", "mapping"]),
        Some(Kind::Values) => one_of(&[], &[], &["mapping"]),
        Some(Kind::Generator) => one_of(&[], &[], &["close", "send", "throw"]),
        None if super::values::number(value).is_some() => one_of(&[], &[], &NUMBER_UNSUPPORTED),
        None => None,
    }
}

/// Calls a method found by [`find`].
pub(super) fn call(value: &Value, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        return of_string(text, name, arguments);
    }
    let bind =
        |names: &[&str], required: usize| Arguments::bind(&format!("the method {name}"), arguments, names, required);
    if let Some(entries) = as_dict(value).map(super::values::Dict::entries) {
        let (keys, values) =
            (|| entries.iter().map(|entry| entry.0.clone()), || entries.iter().map(|entry| entry.1.clone()));
        if name == "get" {
            let arguments = bind(&["", ""], 1)?;
            let found = as_dict(value).map(|dict| dict.get(arguments.needed(0)?)).transpose()?.flatten().cloned();
            return Ok(found.or_else(|| arguments.value(1).cloned()).unwrap_or_else(|| Value::from(())));
        }
        bind(&[], 0)?;
        return match name {
            "keys" => Ok(of_kind(Kind::Keys, keys().collect())),
            "values" => Ok(of_kind(Kind::Values, values().collect())),
            "items" => {
                Ok(of_kind(Kind::Items, keys().zip(values()).map(|(key, value)| tuple(vec![key, value])).collect()))
            }
            _ => dict(entries.iter().cloned()),
        };
    }
    let items = items_of(value)?;
    match name {
        "copy" => {
            bind(&[], 0)?;
            Ok(list(items))
        }
        "count" => {
            let arguments = bind(&[""], 1)?;
            let wanted = arguments.needed(0)?;
            Ok(from_int(items.iter().filter(|item| equal(item, wanted)).count() as i128))
        }
        "index" => {
            let arguments = bind(&["", "", ""], 1)?;
            let wanted = arguments.needed(0)?;
            let (start, end) = part(&arguments, items.len())?;
            let place = (start..end).find(|place| equal(&items[*place], wanted));
            place.map(|place| from_int(place as i128)).ok_or_else(|| wrong("the list has no such value"))
        }
        _ => Err(wrong(format!("'{}' object has no attribute '{name}'", type_name(value)))),
    }
}

/// The range given by the second and third argument, for a length.
fn part(arguments: &Arguments, length: usize) -> Result<(usize, usize), Error> {
    let bound = |place: usize, default: usize| -> Result<usize, Error> {
        let Some(value) = arguments.value(place).filter(|value| !value.is_none()) else { return Ok(default) };
        let bound = int(value).ok_or_else(|| wrong("a bound is no integer"))?;
        let bound = if bound < 0 { (bound + length as i128).max(0) } else { bound };
        Ok(usize::try_from(bound).unwrap_or(usize::MAX))
    };
    Ok((bound(1, 0)?, bound(2, length)?.min(length)))
}

/// White space of Python's strings.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

pub(super) fn strip<'a>(text: &'a str, characters: Option<&str>, left: bool, right: bool) -> &'a str {
    let away = |c: char| characters.map_or_else(|| is_space(c), |characters| characters.contains(c));
    let text = if left { text.trim_start_matches(away) } else { text };
    if right { text.trim_end_matches(away) } else { text }
}

pub(super) fn capitalize(text: &str) -> String {
    let mut chars = text.chars();
    let first = chars.next().map(title_case).unwrap_or_default();
    first + &chars.as_str().to_lowercase()
}

/// Except for the few letters whose title case differs from their upper case.
fn title_case(c: char) -> String {
    match c {
        'ß' => "Ss".into(),
        c => c.to_uppercase().collect(),
    }
}

fn title(text: &str) -> String {
    let mut inside = false;
    let mut titled = String::new();
    for c in text.chars() {
        match inside {
            true => titled.extend(c.to_lowercase()),
            false => titled.push_str(&title_case(c)),
        }
        inside = c.is_uppercase() || c.is_lowercase();
    }
    titled
}

fn is_cased(c: char) -> bool {
    c.is_uppercase() || c.is_lowercase()
}

fn of_string(s: &str, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    let what = format!("the method {name}");
    let bind = |names: &[&str], required: usize| Arguments::bind(&what, arguments, names, required);
    let none = || bind(&[], 0).map(|_| ());
    let every = |fits: &dyn Fn(char) -> bool| {
        none()?;
        Ok(Value::from(!s.is_empty() && s.chars().all(fits)))
    };
    // Python and Rust disagree on digits of other scripts.
    let digits = || match s.chars().any(|c| !c.is_ascii() && c.is_numeric()) {
        true => Err(wrong(format!("{what} of digits beyond ASCII is not supported"))),
        false => every(&|c| c.is_ascii_digit()),
    };
    Ok(match name {
        "capitalize" | "lower" | "swapcase" | "title" | "upper" => {
            none()?;
            Value::from(match name {
                "capitalize" => capitalize(s),
                "lower" => s.to_lowercase(),
                "title" => title(s),
                "upper" => s.to_uppercase(),
                _ => s.chars().map(|c| if c.is_uppercase() { lower(c) } else { c.to_uppercase().collect() }).collect(),
            })
        }
        "strip" | "lstrip" | "rstrip" => {
            let arguments = bind(&[""], 0)?;
            Value::from(strip(s, arguments.maybe_text(0)?, name != "rstrip", name != "lstrip"))
        }
        "removeprefix" => Value::from(bind(&[""], 1)?.text(0).map(|prefix| s.strip_prefix(prefix).unwrap_or(s))?),
        "removesuffix" => Value::from(bind(&[""], 1)?.text(0).map(|suffix| s.strip_suffix(suffix).unwrap_or(s))?),
        "split" | "rsplit" => {
            let arguments = bind(&["sep", "maxsplit"], 0)?;
            let most = usize::try_from(arguments.int(1, -1)?).unwrap_or(usize::MAX);
            let parts = match arguments.maybe_text(0)? {
                Some("") => return Err(wrong("empty separator")),
                Some(separator) if name == "split" => s.splitn(most.saturating_add(1), separator).collect(),
                Some(separator) => {
                    let mut parts: Vec<&str> = s.rsplitn(most.saturating_add(1), separator).collect();
                    parts.reverse();
                    parts
                }
                None if name == "split" => words(s, most),
                None => words_from_the_end(s, most),
            };
            list(parts.into_iter().map(Value::from).collect())
        }
        "splitlines" => {
            let keep = bind(&["keepends"], 0)?.flag(0, false);
            list(lines(s, keep).into_iter().map(Value::from).collect())
        }
        "partition" | "rpartition" => {
            let arguments = bind(&[""], 1)?;
            let separator = arguments.text(0)?;
            let parts = match (separator, name) {
                ("", _) => return Err(wrong("empty separator")),
                (_, "partition") => s.split_once(separator).map_or([s, "", ""], |(a, b)| [a, separator, b]),
                _ => s.rsplit_once(separator).map_or(["", "", s], |(a, b)| [a, separator, b]),
            };
            tuple(parts.into_iter().map(Value::from).collect())
        }
        "startswith" | "endswith" => {
            let arguments = bind(&["", "", ""], 1)?;
            let length = s.chars().count();
            let (start, end) = part(&arguments, length)?;
            let within = (start <= end).then(|| s.chars().skip(start).take(end - start).collect::<String>());
            let fits = |value: &Value| match (value.as_str(), &within) {
                (Some(_), None) => Ok(false),
                (Some(part), Some(within)) if name == "startswith" => Ok(within.starts_with(part)),
                (Some(part), Some(within)) => Ok(within.ends_with(part)),
                (None, _) => Err(wrong(format!("{what} takes a str or a tuple of str, not {}", type_name(value)))),
            };
            let wanted = arguments.needed(0)?;
            match as_series(wanted).filter(|series| series.kind == Kind::Tuple) {
                Some(several) => {
                    let found = several.items().iter().map(fits).collect::<Result<Vec<_>, _>>()?;
                    Value::from(found.contains(&true))
                }
                None => Value::from(fits(wanted)?),
            }
        }
        "find" | "rfind" | "index" | "rindex" | "count" => {
            let arguments = bind(&["", "", ""], 1)?;
            let wanted = arguments.text(0)?;
            let (start, end) = part(&arguments, s.chars().count())?;
            let within: String = s.chars().skip(start).take(end.saturating_sub(start)).collect();
            if name == "count" {
                return Ok(match start <= end {
                    true => from_int(within.matches(wanted).count() as i128),
                    false => from_int(0),
                });
            }
            let found = if name.starts_with('r') { within.rfind(wanted) } else { within.find(wanted) };
            match found.filter(|_| start <= end) {
                Some(at) => from_int((start + within[..at].chars().count()) as i128),
                None if name.ends_with("find") => from_int(-1),
                None => return Err(wrong("substring not found")),
            }
        }
        "replace" => {
            let arguments = bind(&["", "", "count"], 2)?;
            let (old, new) = (arguments.text(0)?, arguments.text(1)?);
            Value::from(match usize::try_from(arguments.int(2, -1)?) {
                Ok(most) => s.replacen(old, new, most),
                Err(_) => s.replace(old, new),
            })
        }
        "join" => {
            let arguments = bind(&[""], 1)?;
            let parts = items_of(arguments.needed(0)?)?;
            let part = |part: &Value| match part.as_str() {
                Some(text) => Ok(text.to_string()),
                None => Err(wrong(format!("join takes strings, not {}", type_name(part)))),
            };
            Value::from(parts.iter().map(part).collect::<Result<Vec<_>, _>>()?.join(s))
        }
        "center" | "ljust" | "rjust" => {
            let arguments = bind(&["", ""], 1)?;
            let mut fill = arguments.maybe_text(1)?.unwrap_or(" ").chars();
            let (Some(fill), None) = (fill.next(), fill.next()) else {
                return Err(wrong(format!("{what} fills with exactly one character")));
            };
            let align = match name {
                "center" => Align::Center,
                "ljust" => Align::Left,
                _ => Align::Right,
            };
            Value::from(padded(s, arguments.int(0, 0)?, fill, align)?)
        }
        "zfill" => {
            let width = bind(&[""], 1)?.int(0, 0)?;
            let (sign, digits) = s.split_at(usize::from(s.starts_with(['+', '-'])));
            let width = width.saturating_sub(sign.len() as i64);
            Value::from(sign.to_string() + &padded(digits, width, '0', Align::Right)?)
        }
        "expandtabs" => {
            let size = usize::try_from(bind(&["tabsize"], 0)?.int(0, 8)?.clamp(0, 64)).unwrap_or(8);
            let mut column = 0;
            let mut expanded = String::new();
            for c in s.chars() {
                match c {
                    '\t' => {
                        let spaces = if size == 0 { 0 } else { size - column % size };
                        expanded.push_str(&" ".repeat(spaces));
                        column += spaces;
                    }
                    c => {
                        expanded.push(c);
                        column = if matches!(c, '\n' | '\r') { 0 } else { column + 1 };
                    }
                }
            }
            Value::from(expanded)
        }
        "format" => return Err(wrong(format!("{what} is supported where it is called by its name alone"))),
        "isascii" => {
            none()?;
            Value::from(s.is_ascii())
        }
        "isalpha" => every(&char::is_alphabetic)?,
        "isalnum" => every(&char::is_alphanumeric)?,
        "isspace" => every(&is_space)?,
        "isdecimal" | "isdigit" | "isnumeric" => digits()?,
        "islower" | "isupper" => {
            none()?;
            let other = if name == "islower" { char::is_uppercase } else { char::is_lowercase };
            Value::from(s.chars().any(is_cased) && !s.chars().any(other))
        }
        "istitle" => {
            none()?;
            Value::from(s.chars().any(is_cased) && title(s) == s)
        }
        _ => return Err(wrong(format!("'str' object has no attribute '{name}'"))),
    })
}

fn lower(c: char) -> String {
    c.to_lowercase().collect()
}

fn words(text: &str, most: usize) -> Vec<&str> {
    let mut words = Vec::new();
    let mut rest = text.trim_start_matches(is_space);
    while !rest.is_empty() {
        let end = if words.len() < most { rest.find(is_space) } else { None };
        let Some(end) = end else {
            words.push(rest);
            break;
        };
        words.push(&rest[..end]);
        rest = rest[end..].trim_start_matches(is_space);
    }
    words
}

fn words_from_the_end(text: &str, most: usize) -> Vec<&str> {
    let mut words = Vec::new();
    let mut rest = text.trim_end_matches(is_space);
    while !rest.is_empty() {
        let from = if words.len() < most { rest.char_indices().rev().find(|(_, c)| is_space(*c)) } else { None };
        let Some((at, space)) = from else {
            words.push(rest);
            break;
        };
        words.push(&rest[at + space.len_utf8()..]);
        rest = rest[..at].trim_end_matches(is_space);
    }
    words.reverse();
    words
}

/// Splits lines like Python's `splitlines`.
pub(super) fn lines(text: &str, keep_ends: bool) -> Vec<&str> {
    let ends =
        |c: char| matches!(c, '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(ends).unwrap_or(rest.len());
        let mark = match &rest[end..] {
            behind if behind.starts_with("\r\n") => 2,
            behind => behind.chars().next().map_or(0, char::len_utf8),
        };
        lines.push(&rest[..if keep_ends { end + mark } else { end }]);
        rest = &rest[end + mark..];
    }
    lines
}

/// Concatenates Python's `str` of each.
pub(super) fn joined(items: &[Value], between: &str) -> Result<Value, Error> {
    Ok(Value::from(items.iter().map(text).collect::<Result<Vec<_>, _>>()?.join(between)))
}
