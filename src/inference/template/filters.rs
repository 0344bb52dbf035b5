//! Jinja's filters and tests.

use minijinja::value::Rest;
use minijinja::{Environment, Error, Value};

use super::attributes::{attribute, item};
use super::operators::{contains, too_large};
use super::print::{Align, JsonStyle, json, padded, text};
use super::values::{
    Arguments, Kind, Number, apart, as_dict, as_series, checked, compare, defined, dict, equal, from_int, int,
    items_of, length, list, number, of_kind, same_object, sort, tuple, type_name, wrong,
};
use super::{methods, values};

/// The supported filters. `safe` is handled by the translator.
pub(super) const FILTERS: [&str; 42] = [
    "abs",
    "attr",
    "batch",
    "capitalize",
    "center",
    "count",
    "d",
    "default",
    "dictsort",
    "first",
    "float",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "select",
    "selectattr",
    "slice",
    "sort",
    "string",
    "sum",
    "title",
    "tojson",
    "trim",
    "truncate",
    "unique",
    "upper",
    "wordcount",
];

/// The supported tests, by their names after `is`.
pub(super) const TESTS: [&str; 37] = [
    "boolean",
    "callable",
    "defined",
    "divisibleby",
    "eq",
    "equalto",
    "escaped",
    "even",
    "false",
    "filter",
    "float",
    "ge",
    "greaterthan",
    "gt",
    "in",
    "integer",
    "iterable",
    "le",
    "lessthan",
    "lower",
    "lt",
    "mapping",
    "ne",
    "none",
    "number",
    "odd",
    "sameas",
    "sequence",
    "string",
    "test",
    "true",
    "undefined",
    "upper",
    "==",
    "!=",
    "<",
    ">",
];

/// Registers the filters and tests.
pub(super) fn add_to(environment: &mut Environment<'_>) {
    environment.add_function("__is", |value: Value, name: &str, arguments: Rest<Value>| test(name, &value, &arguments));
    for name in FILTERS {
        environment
            .add_filter(name, move |value: Value, arguments: Rest<Value>| checked(filter(name, &value, &arguments)?));
    }
}

/// Applies a filter.
pub(super) fn filter(name: &str, value: &Value, arguments: &[Value]) -> Result<Value, Error> {
    let what = format!("the filter {name}");
    let bind = |names: &[&str], required: usize| Arguments::bind(&what, arguments, names, required);
    let none = || bind(&[], 0).map(|_| ());
    Ok(match name {
        "abs" => {
            none()?;
            match number(value) {
                Some(Number::Int(int)) => from_int(int.checked_abs().ok_or_else(too_large)?),
                Some(Number::Float(float)) => Value::from(float.abs()),
                None => return Err(wrong(format!("bad operand type for abs(): '{}'", type_name(value)))),
            }
        }
        "attr" => {
            let arguments = bind(&["name"], 1)?;
            let name = arguments.text(0)?;
            defined(value)?;
            let plain = as_dict(value).is_some() || as_series(value).is_some() || value.as_object().is_none();
            match methods::find(value, name) {
                Some(_) => attribute(value, name)?,
                None if plain => Value::UNDEFINED,
                None => return Err(wrong("the filter attr of an object is not supported")),
            }
        }
        "batch" => {
            let arguments = bind(&["linecount", "fill_with"], 1)?;
            let size = usize::try_from(arguments.int(0, 0)?).ok().filter(|size| *size > 0);
            let size = size.ok_or_else(|| wrong("the filter batch takes a size of 1 or more"))?;
            let mut rows: Vec<Vec<Value>> = items_of(value)?.chunks(size).map(<[Value]>::to_vec).collect();
            let fill = arguments.value(1).filter(|fill| !fill.is_none());
            if let (Some(last), Some(fill), true) = (rows.last_mut(), fill, size <= 1 << 20) {
                last.resize(size, fill.clone());
            }
            generator(rows.into_iter().map(list).collect())
        }
        "capitalize" => none().and_then(|()| Ok(Value::from(methods::capitalize(&text(value)?))))?,
        "center" => {
            let width = bind(&["width"], 0)?.int(0, 80)?;
            Value::from(padded(&text(value)?, width, ' ', Align::Center)?)
        }
        "count" | "length" => none().and_then(|()| Ok(from_int(length(value)? as i128)))?,
        "d" | "default" => {
            let arguments = bind(&["default_value", "boolean"], 0)?;
            match value.is_undefined() || (arguments.flag(1, false) && !value.is_true()) {
                true => arguments.value(0).cloned().unwrap_or_else(|| Value::from("")),
                false => value.clone(),
            }
        }
        "dictsort" => {
            let arguments = bind(&["case_sensitive", "by", "reverse"], 0)?;
            let at = match arguments.maybe_text(1)? {
                None | Some("key") => 0,
                Some("value") => 1,
                Some(_) => return Err(wrong("You can only sort by either \"key\" or \"value\"")),
            };
            let dict = as_dict(value).ok_or_else(|| no_attribute(value, "items"))?;
            let case = arguments.flag(0, false);
            let entry = |(key, value): &(Value, Value)| {
                let by = if at == 0 { key } else { value };
                (if case { by.clone() } else { without_case(by) }, tuple(vec![key.clone(), value.clone()]))
            };
            list(in_order(dict.entries().iter().map(entry).collect(), arguments.flag(2, false))?)
        }
        "first" => none().and_then(|()| Ok(items_of(value)?.first().cloned().unwrap_or_default()))?,
        "last" => {
            none()?;
            if as_series(value).is_some_and(|series| series.kind == Kind::Generator) {
                return Err(wrong("'generator' object is not reversible"));
            }
            items_of(value)?.last().cloned().unwrap_or_default()
        }
        "float" => {
            let arguments = bind(&["default"], 0)?;
            defined(value)?;
            let read = match value.as_str() {
                Some(text) => read_float(text)?,
                None => number(value).map(Number::as_f64),
            };
            read.map(Value::from).or_else(|| arguments.value(0).cloned()).unwrap_or_else(|| Value::from(0.0))
        }
        "int" => {
            let arguments = bind(&["default", "base"], 0)?;
            defined(value)?;
            let base = arguments.int(1, 10)?;
            let whole = |float: f64| (float.is_finite() && float.abs() < 1e38).then(|| float.trunc() as i128);
            let read = match (value.as_str(), number(value)) {
                (Some(text), _) => {
                    let base = u32::try_from(base).ok().filter(|base| matches!(base, 2 | 8 | 10 | 16));
                    let base = base.ok_or_else(|| wrong("the filter int takes the bases 2, 8, 10 and 16"))?;
                    match read_int(text, base)? {
                        None => read_float(text)?.and_then(whole),
                        read => read,
                    }
                }
                (None, Some(Number::Int(int))) => Some(int),
                (None, Some(Number::Float(float))) => whole(float),
                _ => None,
            };
            read.map(from_int).or_else(|| arguments.value(0).cloned()).unwrap_or_else(|| Value::from(0))
        }
        "format" => {
            let (places, named) = apart(arguments)?;
            let with = match (places.is_empty(), named.is_empty()) {
                (_, true) => tuple(places.to_vec()),
                (true, false) => dict(named.into_iter().map(|(name, value)| (Value::from(name), value)))?,
                (false, false) => {
                    return Err(wrong("can't handle positional and keyword arguments at the same time"));
                }
            };
            Value::from(super::format::percent(&text(value)?, &with)?)
        }
        "groupby" => {
            let arguments = bind(&["attribute", "default", "case_sensitive"], 1)?;
            let path = Path::of(arguments.needed(0)?)?;
            let (default, case) = (arguments.value(1), arguments.flag(2, false));
            let mut keyed = Vec::new();
            for item in items_of(value)? {
                let found = path.follow(&item, default)?;
                keyed.push((if case { found.clone() } else { without_case(&found) }, tuple(vec![found, item])));
            }
            let mut groups: Vec<(Value, Value, Vec<Value>)> = Vec::new();
            sort(&mut keyed, |(key, _)| key)?;
            for (key, pair) in keyed {
                let pair = items_of(&pair)?;
                match groups.last_mut().filter(|(last, ..)| equal(last, &key)) {
                    Some((.., items)) => items.push(pair[1].clone()),
                    None => groups.push((key, pair[0].clone(), vec![pair[1].clone()])),
                }
            }
            let group = |(_, shown, items)| of_kind(Kind::Group, vec![shown, list(items)]);
            list(groups.into_iter().map(group).collect())
        }
        "indent" => {
            let arguments = bind(&["width", "first", "blank"], 0)?;
            let indent = match arguments.value(0).and_then(Value::as_str) {
                Some(indent) => indent.to_string(),
                None => " ".repeat(usize::try_from(arguments.int(0, 4)?).unwrap_or(0).min(1 << 16)),
            };
            let (first, blank) = (arguments.flag(1, false), arguments.flag(2, false));
            let text = string(&what, value)?.to_string() + "\n";
            let line = |(at, line): (usize, &str)| match at == 0 || (line.is_empty() && !blank) {
                true => line.to_string(),
                false => indent.clone() + line,
            };
            let lines: Vec<String> = methods::lines(&text, false).into_iter().enumerate().map(line).collect();
            Value::from(if first { indent } else { String::new() } + &lines.join("\n"))
        }
        "items" => {
            none()?;
            match as_dict(value) {
                Some(_) => generator(items_of(&methods::call(value, "items", &[])?)?),
                None if value.is_undefined() => generator(Vec::new()),
                None => return Err(wrong("Can only get item pairs from a mapping.")),
            }
        }
        "join" => {
            let arguments = bind(&["d", "attribute"], 0)?;
            let between = arguments.value(0).map(text).transpose()?.unwrap_or_default();
            let items = items_of(value)?;
            match arguments.value(1).filter(|attribute| !attribute.is_none()) {
                None => methods::joined(&items, &between)?,
                Some(attribute) => {
                    let path = Path::of(attribute)?;
                    let items = items.iter().map(|item| path.follow(item, None)).collect::<Result<Vec<_>, _>>()?;
                    methods::joined(&items, &between)?
                }
            }
        }
        "list" => none().and_then(|()| items_of(value)).map(list)?,
        "lower" => none().and_then(|()| Ok(Value::from(text(value)?.to_lowercase())))?,
        "upper" => none().and_then(|()| Ok(Value::from(text(value)?.to_uppercase())))?,
        "string" => none().and_then(|()| text(value).map(Value::from))?,
        "map" => generator(map(value, arguments)?),
        "select" | "reject" | "selectattr" | "rejectattr" => generator(selected(name, value, arguments)?),
        "max" | "min" => {
            let arguments = bind(&["case_sensitive", "attribute"], 0)?;
            let case = arguments.flag(0, false);
            let path = Path::maybe(arguments.value(1))?;
            let mut best: Option<(Value, Value)> = None;
            for item in items_of(value)? {
                let found = path.follow(&item, None)?;
                let key = if case { found } else { without_case(&found) };
                let better = match &best {
                    None => true,
                    Some((other, _)) if name == "max" => compare(">", &key, other)?.is_some_and(|order| order.is_gt()),
                    Some((other, _)) => compare("<", &key, other)?.is_some_and(|order| order.is_lt()),
                };
                if better {
                    best = Some((key, item));
                }
            }
            best.map(|(_, item)| item).unwrap_or_default()
        }
        "replace" => {
            let arguments = bind(&["old", "new", "count"], 2)?;
            let (old, new) = (text(arguments.needed(0)?)?, text(arguments.needed(1)?)?);
            let most = match arguments.value(2) {
                Some(count) if !count.is_none() => arguments.int(2, -1)?,
                _ => -1,
            };
            let value = text(value)?;
            Value::from(match usize::try_from(most) {
                Ok(most) => value.replacen(&old, &new, most),
                Err(_) => value.replace(&old, &new),
            })
        }
        "reverse" => {
            none()?;
            if let Some(text) = value.as_str() {
                return Ok(Value::from(text.chars().rev().collect::<String>()));
            }
            let mut items = items_of(value)?;
            items.reverse();
            match as_series(value).is_some_and(|series| series.kind == Kind::Generator) {
                true => list(items),
                false => generator(items),
            }
        }
        "round" => round(value, &bind(&["precision", "method"], 0)?)?,
        "slice" => {
            let arguments = bind(&["slices", "fill_with"], 1)?;
            let slices = usize::try_from(arguments.int(0, 0)?).ok().filter(|slices| (1..=1 << 20).contains(slices));
            let slices = slices.ok_or_else(|| wrong("the filter slice takes 1 slice or more"))?;
            let fill = arguments.value(1).filter(|fill| !fill.is_none());
            let items = items_of(value)?;
            let (each, longer) = (items.len() / slices, items.len() % slices);
            let mut rest = &items[..];
            let mut cut = Vec::new();
            for at in 0..slices {
                let (row, behind) = rest.split_at(each + usize::from(at < longer));
                rest = behind;
                let fill = fill.filter(|_| at >= longer).cloned();
                cut.push(list(row.iter().cloned().chain(fill).collect()));
            }
            generator(cut)
        }
        "sort" => {
            let arguments = bind(&["reverse", "case_sensitive", "attribute"], 0)?;
            let case = arguments.flag(1, false);
            let paths = match arguments.value(2).and_then(Value::as_str) {
                Some(names) => names.split(',').map(|name| Path::of(&Value::from(name))).collect::<Result<_, _>>()?,
                None => vec![Path::maybe(arguments.value(2))?],
            };
            let mut keyed = Vec::new();
            for item in items_of(value)? {
                let key = |path: &Path| {
                    let found = path.follow(&item, None)?;
                    Ok(if case { found } else { without_case(&found) })
                };
                keyed.push((list(paths.iter().map(key).collect::<Result<_, Error>>()?), item.clone()));
            }
            list(in_order(keyed, arguments.flag(0, false))?)
        }
        "sum" => {
            let arguments = bind(&["attribute", "start"], 0)?;
            let path = Path::maybe(arguments.value(0))?;
            let mut sum = arguments.value(1).cloned().unwrap_or_else(|| Value::from(0));
            if sum.as_str().is_some() {
                return Err(wrong("sum() can't sum strings [use ''.join(seq) instead]"));
            }
            for item in items_of(value)? {
                sum = super::operators::add(&sum, &path.follow(&item, None)?)?;
            }
            sum
        }
        "title" => none().and_then(|()| Ok(Value::from(title(&text(value)?))))?,
        "tojson" => {
            let arguments = bind(&["ensure_ascii", "indent", "separators", "sort_keys"], 0)?;
            let indent = match arguments.value(1) {
                Some(indent) if !indent.is_none() => Some(match indent.as_str() {
                    Some(indent) => indent.to_string(),
                    None => " ".repeat(usize::try_from(arguments.int(1, 0)?).unwrap_or(0).min(64)),
                }),
                _ => None,
            };
            let separators = match arguments.value(2) {
                Some(separators) if !separators.is_none() => items_of(separators)?,
                _ => vec![Value::from(if indent.is_some() { "," } else { ", " }), Value::from(": ")],
            };
            let (Some(comma), Some(colon), 2) = (
                separators.first().and_then(Value::as_str),
                separators.get(1).and_then(Value::as_str),
                separators.len(),
            ) else {
                return Err(wrong("the filter tojson takes two separators"));
            };
            let style = JsonStyle {
                ascii: arguments.flag(0, false),
                sorted: arguments.flag(3, false),
                indent,
                comma: comma.into(),
                colon: colon.into(),
            };
            Value::from(json(value, &style)?)
        }
        "trim" => {
            let arguments = bind(&["chars"], 0)?;
            Value::from(methods::strip(&text(value)?, arguments.maybe_text(0)?, true, true))
        }
        "truncate" => {
            let arguments = bind(&["length", "killwords", "end", "leeway"], 0)?;
            let most = arguments.int(0, 255)?;
            let end = arguments.maybe_text(2)?.unwrap_or("...");
            let leeway = if arguments.value(3).is_some_and(Value::is_none) { 5 } else { arguments.int(3, 5)? };
            let value = string(&what, value)?;
            let room = most - end.chars().count() as i64;
            if room < 0 || leeway < 0 {
                return Err(wrong("the filter truncate takes a length of at least that of its end"));
            }
            if value.chars().count() as i64 <= most.saturating_add(leeway) {
                return Ok(Value::from(value));
            }
            let cut: String = value.chars().take(usize::try_from(room).unwrap_or(0)).collect();
            let cut = match arguments.flag(1, false) {
                true => &cut[..],
                false => cut.rsplit_once(' ').map_or(&cut[..], |(words, _)| words),
            };
            Value::from(cut.to_string() + end)
        }
        "unique" => {
            let arguments = bind(&["case_sensitive", "attribute"], 0)?;
            let path = Path::maybe(arguments.value(1))?;
            let mut seen = values::Dict::default();
            let mut kept = Vec::new();
            for item in items_of(value)? {
                let found = path.follow(&item, None)?;
                let key = if arguments.flag(0, false) { found } else { without_case(&found) };
                if seen.get(&key)?.is_none() {
                    seen.insert(key, Value::from(()))?;
                    kept.push(item);
                }
            }
            generator(kept)
        }
        "wordcount" => {
            none()?;
            let text = text(value)?;
            let words = text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty());
            from_int(words.count() as i128)
        }
        other => return Err(wrong(format!("the filter {other} is not supported"))),
    })
}

/// Evaluates a test.
pub(super) fn test(name: &str, value: &Value, arguments: &[Value]) -> Result<bool, Error> {
    let what = format!("the test {name}");
    let count = match name {
        "==" | "eq" | "equalto" | "!=" | "ne" | "<" | "lt" | "lessthan" | "<=" | "le" | ">" | "gt" | "greaterthan"
        | ">=" | "ge" | "in" | "sameas" | "divisibleby" => 1,
        _ => 0,
    };
    let arguments = Arguments::bind(&what, arguments, &["", ""][..count], count)?;
    let other = arguments.value(0).cloned().unwrap_or_default();
    let ordered = |operator: &str| compare(operator, value, &other);
    let kind = type_name(value);
    let remainder = |by: i128| match number(value) {
        Some(Number::Int(_)) if by == 0 => Err(wrong("integer modulo by zero")),
        Some(Number::Int(int)) => Ok(int.rem_euclid(by.saturating_abs()) as f64),
        Some(Number::Float(float)) => Ok(float.rem_euclid(by as f64)),
        None => defined(value).and(Err(wrong(format!("{what} takes a number, not '{kind}'")))),
    };
    Ok(match name {
        "defined" => !value.is_undefined(),
        "undefined" => value.is_undefined(),
        "none" => value.is_none(),
        "boolean" => kind == "bool",
        "true" => kind == "bool" && value.is_true(),
        "false" => kind == "bool" && !value.is_true(),
        "integer" => kind == "int",
        "float" => kind == "float",
        "number" => number(value).is_some(),
        "string" => kind == "str",
        "mapping" => kind == "dict",
        "sequence" => matches!(kind, "str" | "list" | "tuple" | "_GroupTuple" | "dict" | "range" | "Undefined"),
        "iterable" => as_series(value).is_some() || matches!(kind, "str" | "dict" | "Undefined"),
        "callable" => (kind == "object" && !values::is_namespace(value)) || kind == "Undefined",
        "escaped" => false,
        "even" => remainder(2)? == 0.0,
        "odd" => remainder(2)? == 1.0,
        "divisibleby" => {
            let by = int(&other).ok_or_else(|| wrong("the test divisibleby takes an integer"))?;
            remainder(by)? == 0.0
        }
        "lower" | "upper" => {
            let text = Value::from(text(value)?);
            methods::call(&text, if name == "lower" { "islower" } else { "isupper" }, &[])?.is_true()
        }
        "==" | "eq" | "equalto" => equal(value, &other),
        "!=" | "ne" => !equal(value, &other),
        "<" | "lt" | "lessthan" => ordered("<")?.is_some_and(|order| order.is_lt()),
        "<=" | "le" => ordered("<=")?.is_some_and(|order| order.is_le()),
        ">" | "gt" | "greaterthan" => ordered(">")?.is_some_and(|order| order.is_gt()),
        ">=" | "ge" => ordered(">=")?.is_some_and(|order| order.is_ge()),
        "in" => contains(&other, value)?,
        "filter" => FILTERS.contains(&value.as_str().unwrap_or_default()),
        "test" => TESTS.contains(&value.as_str().unwrap_or_default()),
        "sameas" => match kind {
            _ if kind != type_name(&other) => false,
            "NoneType" | "bool" => equal(value, &other),
            "int" | "float" | "str" | "Undefined" | "object" => {
                return Err(wrong(format!("the test sameas of a '{kind}' is not supported")));
            }
            _ => same_object(value, &other),
        },
        unknown => return Err(wrong(format!("the test {unknown} is not supported"))),
    })
}

fn string<'a>(what: &str, value: &'a Value) -> Result<&'a str, Error> {
    value.as_str().ok_or_else(|| wrong(format!("{what} takes a string, not '{}'", type_name(value))))
}

fn generator(items: Vec<Value>) -> Value {
    of_kind(Kind::Generator, items)
}

fn no_attribute(value: &Value, name: &str) -> Error {
    wrong(format!("'{} object' has no attribute '{name}'", type_name(value)))
}

fn without_case(value: &Value) -> Value {
    value.as_str().map_or_else(|| value.clone(), |text| Value::from(text.to_lowercase()))
}

/// The values of the keys, in order.
fn in_order(mut keyed: Vec<(Value, Value)>, reversed: bool) -> Result<Vec<Value>, Error> {
    // Equal items keep their order in both directions.
    if reversed {
        keyed.reverse();
    }
    sort(&mut keyed, |(key, _)| key)?;
    if reversed {
        keyed.reverse();
    }
    Ok(keyed.into_iter().map(|(_, item)| item).collect())
}

/// A dotted path into a value.
struct Path(Vec<Value>);

impl Path {
    fn of(value: &Value) -> Result<Self, Error> {
        match (value.as_str(), int(value)) {
            (Some(names), _) => {
                let part = |name: &str| match name.parse::<u32>() {
                    Ok(place) => Value::from(place),
                    Err(_) => Value::from(name),
                };
                Ok(Self(names.split('.').map(part).collect()))
            }
            (None, Some(_)) => Ok(Self(vec![value.clone()])),
            _ => Err(wrong(format!("an attribute is named by a string, not '{}'", type_name(value)))),
        }
    }

    /// The value itself, if no path is given.
    fn maybe(value: Option<&Value>) -> Result<Self, Error> {
        match value {
            Some(value) if !value.is_none() => Self::of(value),
            _ => Ok(Self(Vec::new())),
        }
    }

    fn follow(&self, value: &Value, default: Option<&Value>) -> Result<Value, Error> {
        let mut found = value.clone();
        for part in &self.0 {
            found = item(&found, part)?;
            if let (true, Some(default)) = (found.is_undefined(), default.filter(|default| !default.is_none())) {
                found = default.clone();
            }
        }
        Ok(found)
    }
}

fn map(value: &Value, arguments: &[Value]) -> Result<Vec<Value>, Error> {
    let (places, named) = apart(arguments)?;
    let items = items_of(value)?;
    match places.first() {
        Some(name) => {
            let name = name.as_str().ok_or_else(|| wrong("the filter map takes the name of a filter"))?;
            if !FILTERS.contains(&name) {
                return Err(wrong(format!("the filter {name} is not supported")));
            }
            items.iter().map(|item| filter(name, item, &arguments[1..])).collect()
        }
        None => {
            let of = |wanted: &str| named.iter().find(|(name, _)| name == wanted).map(|(_, value)| value);
            if let Some((name, _)) = named.iter().find(|(name, _)| name != "attribute" && name != "default") {
                return Err(wrong(format!("Unexpected keyword argument '{name}'")));
            }
            let path = Path::of(of("attribute").ok_or_else(|| wrong("map requires a filter argument"))?)?;
            items.iter().map(|item| path.follow(item, of("default"))).collect()
        }
    }
}

fn selected(name: &str, value: &Value, arguments: &[Value]) -> Result<Vec<Value>, Error> {
    let (mut path, mut rest) = (Path(Vec::new()), arguments);
    if name.ends_with("attr") {
        let (attribute, behind) = rest.split_first().ok_or_else(|| wrong("Missing parameter for attribute name"))?;
        (path, rest) = (Path::of(attribute)?, behind);
    }
    let wanted = name.starts_with("select");
    let mut kept = Vec::new();
    for item in items_of(value)? {
        let found = path.follow(&item, None)?;
        let passes = match rest.split_first() {
            None => found.is_true(),
            Some((name, arguments)) => {
                let name = name.as_str().ok_or_else(|| wrong("the name of a test is a string"))?;
                test(name, &found, arguments)?
            }
        };
        if passes == wanted {
            kept.push(item);
        }
    }
    Ok(kept)
}

fn round(value: &Value, arguments: &Arguments) -> Result<Value, Error> {
    let precision = arguments.int(0, 0)?;
    let places = usize::try_from(precision).ok().filter(|places| *places <= 300);
    let places = places.ok_or_else(|| wrong("the filter round takes a precision of 0 to 300"))?;
    let value = number(value).ok_or_else(|| wrong(format!("a '{}' cannot be rounded", type_name(value))))?;
    let scale = 10f64.powi(i32::try_from(places).unwrap_or(0));
    match (arguments.maybe_text(1)?.unwrap_or("common"), value) {
        ("common", Number::Int(int)) => Ok(from_int(int)),
        ("common", Number::Float(float)) if float.is_finite() => {
            Ok(Value::from(format!("{float:.places$}").parse::<f64>().unwrap_or(float)))
        }
        ("common", Number::Float(float)) => Ok(Value::from(float)),
        ("ceil", value) => Ok(Value::from((value.as_f64() * scale).ceil() / scale)),
        ("floor", value) => Ok(Value::from((value.as_f64() * scale).floor() / scale)),
        _ => Err(wrong("method must be common, ceil or floor")),
    }
}

fn title(text: &str) -> String {
    let separates = |c: char| methods::is_space(c) || matches!(c, '-' | '(' | '{' | '[' | '<');
    let mut inside = false;
    let mut titled = String::new();
    for c in text.chars() {
        match inside {
            true => titled.extend(c.to_lowercase()),
            false => titled.extend(c.to_uppercase()),
        }
        inside = !separates(c);
    }
    titled
}

/// Removes single underscores between digits.
fn without_underscores(text: &str) -> Option<String> {
    let fits = !text.starts_with('_') && !text.ends_with('_') && !text.contains("__");
    fits.then(|| text.replace('_', ""))
}

/// Python accepts digits of other scripts, too.
fn ascii_digits(text: &str) -> Result<(), Error> {
    match text.chars().any(|c| !c.is_ascii() && c.is_numeric()) {
        true => Err(wrong("a number in digits beyond ASCII is not supported")),
        false => Ok(()),
    }
}

fn read_float(text: &str) -> Result<Option<f64>, Error> {
    ascii_digits(text)?;
    Ok(without_underscores(methods::strip(text, None, true, true)).and_then(|text| text.parse().ok()))
}

fn read_int(text: &str, base: u32) -> Result<Option<i128>, Error> {
    ascii_digits(text)?;
    let text = methods::strip(text, None, true, true);
    let (sign, digits) = match text.strip_prefix('-') {
        Some(digits) => ("-", digits),
        None => ("", text.strip_prefix('+').unwrap_or(text)),
    };
    let prefix = match base {
        16 => ["0x", "0X"],
        8 => ["0o", "0O"],
        2 => ["0b", "0B"],
        _ => ["", ""],
    };
    let digits = prefix.into_iter().find_map(|prefix| digits.strip_prefix(prefix)).unwrap_or(digits);
    let Some(digits) = without_underscores(digits) else { return Ok(None) };
    if digits.is_empty() || !digits.chars().all(|c| c.is_digit(base)) {
        return Ok(None);
    }
    let read = i128::from_str_radix(&format!("{sign}{digits}"), base);
    read.map(Some).map_err(|_| too_large())
}
