//! Python's operators, attributes and subscripts, as functions called by translated templates.

use std::cmp::Ordering;

use minijinja::value::Rest;
use minijinja::{Environment, Error, State, Value};

use super::attributes::{attribute, item, unsupported_method};
use super::methods::Found;
use super::print::text;
use super::values::{
    Kind, Number, apart, as_dict, as_series, checked, compare, defined, dict, equal, from_int, int, items_of, list,
    number, of_kind, storable, tuple, type_name, wrong,
};

/// Maximum length of a repeated string or list.
const LONGEST: usize = 1 << 24;

/// Registers the operators.
pub(super) fn add_to(environment: &mut Environment<'_>) {
    environment.add_function("__value", |value: Value| value);
    environment.add_function("__last", |mut values: Rest<Value>| {
        let value = values.pop().unwrap_or_default();
        storable(&value).map(|()| value)
    });
    environment.add_function("__float", |digits: &str| digits.parse::<f64>().map_err(|_| wrong("no float")));
    environment.add_function("__list", |items: Rest<Value>| checked(list(items.0)));
    environment.add_function("__tuple", |items: Rest<Value>| checked(tuple(items.0)));
    environment.add_function("__dict", |items: Rest<Value>| {
        dict(items.chunks_exact(2).map(|entry| (entry[0].clone(), entry[1].clone())))
    });
    environment.add_function("__iter", |value: Value| items_of(&value).map(list));
    environment.add_function("__add", |first: Value, parts: Rest<Value>| {
        parts.iter().try_fold(first, |sum, part| checked(add(&sum, part)?))
    });
    environment.add_function("__sub", |a: Value, b: Value| arithmetic("-", &a, &b, i128::checked_sub, |a, b| a - b));
    environment.add_function("__mul", |a: Value, b: Value| multiply(&a, &b));
    environment.add_function("__div", |a: Value, b: Value| divide(&a, &b));
    environment.add_function("__floordiv", |a: Value, b: Value| floor_divide(&a, &b));
    environment.add_function("__mod", |a: Value, b: Value| remainder(&a, &b));
    environment.add_function("__pow", |a: Value, b: Value| power(&a, &b));
    environment.add_function("__neg", |a: Value| arithmetic("-", &Value::from(0), &a, i128::checked_sub, |_, b| -b));
    environment.add_function("__pos", |a: Value| arithmetic("+", &Value::from(0), &a, i128::checked_add, |_, b| b));
    environment
        .add_function("__concat", |parts: Rest<Value>| parts.iter().map(text).collect::<Result<String, Error>>());
    environment.add_function("__eq", |a: Value, b: Value| equal(&a, &b));
    environment.add_function("__ne", |a: Value, b: Value| !equal(&a, &b));
    environment.add_function("__lt", |a: Value, b: Value| ordered("<", &a, &b));
    environment.add_function("__le", |a: Value, b: Value| ordered("<=", &a, &b));
    environment.add_function("__gt", |a: Value, b: Value| ordered(">", &a, &b));
    environment.add_function("__ge", |a: Value, b: Value| ordered(">=", &a, &b));
    environment.add_function("__in", |a: Value, b: Value| contains(&b, &a));
    environment.add_function("__not_in", |a: Value, b: Value| contains(&b, &a).map(|is_in| !is_in));
    environment.add_function("__attr", |value: Value, name: &str| attribute(&value, name));
    environment.add_function("__item", |value: Value, key: Value| item(&value, &key));
    environment.add_function("__slice", |value: Value, start: Value, stop: Value, step: Value| {
        slice(&value, &start, &stop, &step)
    });
    environment.add_function("__method", |state: &State<'_, '_>, value: Value, name: &str, arguments: Rest<Value>| {
        checked(method(state, &value, name, &arguments)?)
    });
    environment.add_function("__call", |state: &State<'_, '_>, value: Value, arguments: Rest<Value>| {
        defined(&value)?;
        checked(value.call(state, &arguments)?)
    });
}

fn unsupported(operator: &str, a: &Value, b: &Value) -> Error {
    match defined(a).and(defined(b)) {
        Ok(()) => {
            wrong(format!("unsupported operand type(s) for {operator}: '{}' and '{}'", type_name(a), type_name(b)))
        }
        Err(error) => error,
    }
}

pub(super) fn too_large() -> Error {
    wrong("an integer has more digits than are supported")
}

fn arithmetic(
    operator: &str,
    a: &Value,
    b: &Value,
    ints: fn(i128, i128) -> Option<i128>,
    floats: fn(f64, f64) -> f64,
) -> Result<Value, Error> {
    match (number(a), number(b)) {
        (Some(Number::Int(a)), Some(Number::Int(b))) => ints(a, b).map(from_int).ok_or_else(too_large),
        (Some(a), Some(b)) => Ok(Value::from(floats(a.as_f64(), b.as_f64()))),
        _ => Err(unsupported(operator, a, b)),
    }
}

pub(super) fn add(a: &Value, b: &Value) -> Result<Value, Error> {
    if let (Some(a), Some(b)) = (a.as_str(), b.as_str()) {
        return Ok(Value::from([a, b].concat()));
    }
    if let (Some(left), Some(right)) = (as_series(a), as_series(b)) {
        let joined = || [left.items(), right.items()].concat();
        let is_tuple = |kind| matches!(kind, Kind::Tuple | Kind::Group);
        return match (left.kind, right.kind) {
            (Kind::List, Kind::List) => Ok(list(joined())),
            (left, right) if is_tuple(left) && is_tuple(right) => Ok(tuple(joined())),
            _ => Err(unsupported("+", a, b)),
        };
    }
    arithmetic("+", a, b, i128::checked_add, |a, b| a + b)
}

fn multiply(a: &Value, b: &Value) -> Result<Value, Error> {
    for (many, times) in [(a, b), (b, a)] {
        let Some(times) = int(times) else { continue };
        let times = usize::try_from(times.max(0)).unwrap_or(usize::MAX);
        let fits = |length: usize| match length.checked_mul(times) {
            Some(length) if length <= LONGEST => Ok(times),
            _ => Err(wrong("a product is too long")),
        };
        if let Some(text) = many.as_str() {
            return Ok(Value::from(text.repeat(fits(text.len())?)));
        }
        if let Some(series) = as_series(many).filter(|series| matches!(series.kind, Kind::List | Kind::Tuple)) {
            let items = series.items();
            let repeated = std::iter::repeat_n(items, fits(items.len())?).flatten().cloned();
            return Ok(of_kind(series.kind, repeated.collect()));
        }
    }
    arithmetic("*", a, b, i128::checked_mul, |a, b| a * b)
}

fn by_zero(b: &Value) -> Result<(), Error> {
    match number(b) {
        Some(b) if b.as_f64() == 0.0 => Err(wrong("division by zero")),
        _ => Ok(()),
    }
}

fn divide(a: &Value, b: &Value) -> Result<Value, Error> {
    match (number(a), number(b)) {
        (Some(left), Some(right)) => {
            by_zero(b)?;
            Ok(Value::from(left.as_f64() / right.as_f64()))
        }
        _ => Err(unsupported("/", a, b)),
    }
}

fn floor_divide(a: &Value, b: &Value) -> Result<Value, Error> {
    by_zero(b)?;
    let ints = |a: i128, b: i128| {
        let quotient = a.checked_div(b)?;
        Some(if a % b != 0 && (a < 0) != (b < 0) { quotient - 1 } else { quotient })
    };
    arithmetic("//", a, b, ints, |a, b| (a - modulo(a, b)) / b)
}

/// The remainder of a division, with the divisor's sign.
fn modulo(a: f64, b: f64) -> f64 {
    let left = a % b;
    match left == 0.0 {
        true => 0.0f64.copysign(b),
        false if (left < 0.0) != (b < 0.0) => left + b,
        false => left,
    }
}

fn remainder(a: &Value, b: &Value) -> Result<Value, Error> {
    if let Some(format) = a.as_str() {
        return super::format::percent(format, b).map(Value::from);
    }
    if number(a).is_some() {
        by_zero(b)?;
    }
    let ints = |a: i128, b: i128| {
        let left = a.checked_rem(b)?;
        Some(if left != 0 && (left < 0) != (b < 0) { left + b } else { left })
    };
    arithmetic("%", a, b, ints, modulo)
}

fn power(a: &Value, b: &Value) -> Result<Value, Error> {
    if let (Some(base), Some(exponent)) = (int(a), int(b))
        && exponent >= 0
    {
        let power = match u32::try_from(exponent) {
            Ok(exponent) => base.checked_pow(exponent),
            Err(_) => None,
        };
        return power.map(from_int).ok_or_else(too_large);
    }
    match (number(a), number(b)) {
        (Some(a), Some(b)) if a.as_f64() == 0.0 && b.as_f64() < 0.0 => {
            Err(wrong("0.0 cannot be raised to a negative power"))
        }
        (Some(a), Some(b)) if a.as_f64() < 0.0 && b.as_f64().fract() != 0.0 => {
            Err(wrong("complex numbers are not supported"))
        }
        (Some(a), Some(b)) => {
            let (a, b) = (a.as_f64(), b.as_f64());
            let power = a.powf(b);
            match power.is_infinite() && a.is_finite() && b.is_finite() {
                true => Err(wrong("the result of a power is too large")),
                false => Ok(Value::from(power)),
            }
        }
        _ => Err(unsupported("** or pow()", a, b)),
    }
}

fn ordered(operator: &str, a: &Value, b: &Value) -> Result<bool, Error> {
    let order = compare(operator, a, b)?;
    Ok(order.is_some_and(|order| match operator {
        "<" => order == Ordering::Less,
        "<=" => order != Ordering::Greater,
        ">" => order == Ordering::Greater,
        _ => order != Ordering::Less,
    }))
}

/// Python's `in`.
pub(super) fn contains(container: &Value, value: &Value) -> Result<bool, Error> {
    if let Some(text) = container.as_str() {
        let part = value
            .as_str()
            .ok_or_else(|| wrong(format!("'in <string>' requires string as left operand, not {}", type_name(value))));
        return Ok(text.contains(part?));
    }
    if let Some(dict) = as_dict(container) {
        return Ok(dict.get(value)?.is_some());
    }
    match as_series(container) {
        Some(series) => Ok(series.items().iter().any(|item| equal(item, value))),
        None if container.is_undefined() => Ok(false),
        None => Err(wrong(format!("argument of type '{}' is not iterable", type_name(container)))),
    }
}

fn slice(value: &Value, start: &Value, stop: &Value, step: &Value) -> Result<Value, Error> {
    if value.is_undefined() {
        return Err(wrong("what has no value is asked for a part: it is undefined"));
    }
    let bound = |bound: &Value| match int(bound) {
        Some(int) => Ok(Some(int)),
        None if bound.is_none() => Ok(None),
        None => Err(wrong("slice indices must be integers or None")),
    };
    let (from, to, step_by) = (bound(start)?, bound(stop)?, bound(step)?.unwrap_or(1));
    let series = as_series(value).filter(|series| matches!(series.kind, Kind::List | Kind::Tuple | Kind::Group));
    if as_series(value).is_some_and(|series| series.kind == Kind::Range) {
        return Err(wrong("a part of a range is not supported; |list makes a list of it"));
    }
    if series.is_none() && value.as_str().is_none() {
        return Err(wrong(format!("'{}' object is not subscriptable", type_name(value))));
    }
    if step_by == 0 {
        return Err(wrong("slice step cannot be zero"));
    }
    let items = items_of(value)?;
    let length = items.len() as i128;
    let (low, high) = if step_by > 0 { (0, length) } else { (-1, length - 1) };
    let within = |place: i128| if place < 0 { (place + length).max(low) } else { place.min(high) };
    let (first, last) = if step_by > 0 { (0, length) } else { (length - 1, -1) };
    let (mut place, end) = (from.map_or(first, within), to.map_or(last, within));
    let mut taken = Vec::new();
    while (step_by > 0 && place < end) || (step_by < 0 && place > end) {
        taken.extend(usize::try_from(place).ok().and_then(|place| items.get(place)).cloned());
        place = place.saturating_add(step_by);
    }
    match series {
        None => taken.iter().map(text).collect::<Result<String, Error>>().map(Value::from),
        Some(series) if series.kind == Kind::List => Ok(list(taken)),
        Some(_) => Ok(tuple(taken)),
    }
}

fn method(state: &State<'_, '_>, value: &Value, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    match super::methods::find(value, name) {
        Some(Found::Method) => {
            return match value.as_str().filter(|_| name == "format") {
                Some(text) => super::format::braces(text, arguments).map(Value::from),
                None => super::methods::call(value, name, arguments),
            };
        }
        Some(Found::Unsafe) => {
            let owner = type_name(value);
            return Err(wrong(format!("access to attribute '{name}' of '{owner}' object is unsafe")));
        }
        Some(Found::Unsupported) => return Err(unsupported_method(value, name)),
        None => {}
    }
    let is_python = as_dict(value).is_some() || as_series(value).is_some() || value.as_object().is_none();
    if !is_python {
        return value.call_method(state, name, arguments);
    }
    let found = attribute(value, name)?;
    if found.is_undefined() {
        return Err(wrong(format!("'{} object' has no attribute '{name}'", type_name(value))));
    }
    let (_, _) = apart(arguments)?;
    found.call(state, arguments)
}
