//! Python's values for templates: lists, tuples, dicts and other types, as objects of `minijinja`.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic;

use minijinja::value::{Enumerator, Object, ObjectRepr, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};
use serde_json::Value as Json;

/// Maximum nesting of values.
const DEPTH: u32 = 200;

/// Python type of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    List,
    Tuple,
    /// A tuple with the names `grouper` and `list`.
    Group,
    Range,
    Keys,
    Values,
    Items,
    /// An iterator: read once, always true.
    Generator,
}

/// A sequence.
#[derive(Debug)]
pub(super) struct Series {
    pub(super) kind: Kind,
    items: Vec<Value>,
    /// How Python prints a range.
    pub(super) shown: String,
    depth: u32,
    spent: atomic::AtomicBool,
}

impl Object for Series {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.items.get(key.as_usize()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.items.len())
    }

    fn is_true(self: &Arc<Self>) -> bool {
        self.kind == Kind::Generator || !self.items.is_empty()
    }
}

impl Series {
    /// Its items; for a generator, those not yet read.
    pub(super) fn items(&self) -> &[Value] {
        match self.kind == Kind::Generator && self.spent.swap(true, atomic::Ordering::Relaxed) {
            true => &[],
            false => &self.items,
        }
    }
}

fn series(kind: Kind, items: Vec<Value>) -> Value {
    made(kind, items, String::new())
}

fn made(kind: Kind, items: Vec<Value>, shown: String) -> Value {
    let depth = items.iter().map(depth).max().unwrap_or(0).saturating_add(1);
    match bounded(depth) {
        Ok(()) => Value::from_object(Series { kind, items, shown, depth, spent: atomic::AtomicBool::new(false) }),
        Err(error) => Value::from(error),
    }
}

/// Nesting depth of a value.
fn depth(value: &Value) -> u32 {
    if let Some(series) = as_series(value) {
        return series.depth;
    }
    if let Some(dict) = as_dict(value) {
        return dict.depth;
    }
    match value.downcast_object_ref::<Method>() {
        Some(method) => depth(&method.of),
        // Its content is unknown and may include itself.
        None if is_namespace(value) || value.kind() == ValueKind::Invalid => u32::MAX,
        None => 0,
    }
}

/// Refuses values nested too deeply to recurse into.
fn bounded(depth: u32) -> Result<(), Error> {
    match depth <= DEPTH {
        true => Ok(()),
        false => Err(wrong("values that nest so deep, or a namespace within another value, are not supported")),
    }
}

/// Checks the nesting of a new value.
pub(super) fn checked(value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Invalid => bounded(u32::MAX).map(|()| value),
        _ => Ok(value),
    }
}

/// Refuses values that a namespace cannot hold.
pub(super) fn storable(value: &Value) -> Result<(), Error> {
    bounded(depth(value))
}

pub(super) fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().contains("Namespace"))
}

pub(super) fn list(items: Vec<Value>) -> Value {
    series(Kind::List, items)
}

pub(super) fn tuple(items: Vec<Value>) -> Value {
    series(Kind::Tuple, items)
}

pub(super) fn of_kind(kind: Kind, items: Vec<Value>) -> Value {
    series(kind, items)
}

pub(super) fn range(items: Vec<Value>, shown: String) -> Value {
    made(Kind::Range, items, shown)
}

/// A dict, in insertion order.
#[derive(Debug, Default)]
pub(super) struct Dict {
    entries: Vec<(Value, Value)>,
    places: HashMap<Key, usize>,
    depth: u32,
}

#[derive(Debug, PartialEq, Eq, Hash)]
enum Key {
    None,
    Undefined,
    Int(i128),
    Float(u64),
    Text(String),
    Tuple(Vec<Key>),
}

impl Key {
    /// Python's key equality: whole floats and booleans equal integers.
    fn of(value: &Value) -> Result<Self, Error> {
        if let Some(text) = value.as_str() {
            return Ok(Self::Text(text.to_string()));
        }
        match number(value) {
            Some(Number::Int(int)) => return Ok(Self::Int(int)),
            Some(Number::Float(float)) if float.fract() == 0.0 && float.abs() < 1e18 => {
                return Ok(Self::Int(float as i128));
            }
            Some(Number::Float(float)) => return Ok(Self::Float(float.to_bits())),
            None => {}
        }
        match value.downcast_object_ref::<Series>() {
            Some(series) if matches!(series.kind, Kind::Tuple | Kind::Group) => {
                Ok(Self::Tuple(series.items.iter().map(Self::of).collect::<Result<_, _>>()?))
            }
            _ if value.is_none() => Ok(Self::None),
            _ if value.is_undefined() => Ok(Self::Undefined),
            _ => Err(wrong(format!("unhashable type: '{}'", type_name(value)))),
        }
    }
}

impl Dict {
    pub(super) fn insert(&mut self, key: Value, value: Value) -> Result<(), Error> {
        self.depth = self.depth.max(depth(&key).max(depth(&value)).saturating_add(1));
        bounded(self.depth)?;
        match self.places.entry(Key::of(&key)?) {
            std::collections::hash_map::Entry::Occupied(place) => self.entries[*place.get()].1 = value,
            std::collections::hash_map::Entry::Vacant(place) => {
                place.insert(self.entries.len());
                self.entries.push((key, value));
            }
        }
        Ok(())
    }

    pub(super) fn get(&self, key: &Value) -> Result<Option<&Value>, Error> {
        Ok(self.places.get(&Key::of(key)?).map(|place| &self.entries[*place].1))
    }

    pub(super) fn entries(&self) -> &[(Value, Value)] {
        &self.entries
    }

    pub(super) fn keys(&self) -> Vec<Value> {
        self.entries.iter().map(|(key, _)| key.clone()).collect()
    }
}

impl Object for Dict {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get(key).ok().flatten().cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.keys())
    }
}

pub(super) fn dict(entries: impl IntoIterator<Item = (Value, Value)>) -> Result<Value, Error> {
    let mut dict = Dict::default();
    for (key, value) in entries {
        dict.insert(key, value)?;
    }
    Ok(Value::from_object(dict))
}

pub(super) fn as_dict(value: &Value) -> Option<&Dict> {
    value.downcast_object_ref()
}

pub(super) fn as_series(value: &Value) -> Option<&Series> {
    value.downcast_object_ref()
}

/// A bound method, not yet called.
#[derive(Debug)]
pub(super) struct Method {
    pub(super) of: Value,
    pub(super) name: String,
    pub(super) call: Call,
}

/// Calls a named method of a value.
type Call = fn(&Value, &str, &[Value]) -> Result<Value, Error>;

impl Object for Method {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, _state: &State<'_, '_>, arguments: &[Value]) -> Result<Value, Error> {
        (self.call)(&self.of, &self.name, arguments)
    }
}

/// Converts JSON as Python does.
pub(super) fn from_json(json: &Json) -> Result<Value, Error> {
    Ok(match json {
        Json::Null => Value::from(()),
        Json::Bool(value) => Value::from(*value),
        Json::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
            (Some(int), ..) => Value::from(int),
            (_, Some(int), _) => Value::from(int),
            (.., Some(float)) => Value::from(float),
            _ => return Err(wrong(format!("{number} has more digits than are supported"))),
        },
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(items) => list(items.iter().map(from_json).collect::<Result<_, _>>()?),
        Json::Object(fields) => {
            let field = |(name, value): (&String, &Json)| Ok((Value::from(name.as_str()), from_json(value)?));
            dict(fields.iter().map(field).collect::<Result<Vec<_>, Error>>()?)?
        }
    })
}

pub(super) fn wrong(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// A number, booleans included.
#[derive(Clone, Copy, Debug)]
pub(super) enum Number {
    Int(i128),
    Float(f64),
}

impl Number {
    pub(super) fn as_f64(self) -> f64 {
        match self {
            Self::Int(int) => int as f64,
            Self::Float(float) => float,
        }
    }
}

pub(super) fn number(value: &Value) -> Option<Number> {
    match value.kind() {
        ValueKind::Bool => Some(Number::Int(i128::from(value.is_true()))),
        ValueKind::Number if value.is_integer() => i128::try_from(value.clone()).ok().map(Number::Int),
        ValueKind::Number => f64::try_from(value.clone()).ok().map(Number::Float),
        _ => None,
    }
}

pub(super) fn int(value: &Value) -> Option<i128> {
    match number(value)? {
        Number::Int(int) => Some(int),
        Number::Float(_) => None,
    }
}

pub(super) fn from_int(int: i128) -> Value {
    i64::try_from(int).map_or_else(|_| Value::from(int), Value::from)
}

/// Python's name of a value's type.
pub(super) fn type_name(value: &Value) -> &'static str {
    if let Some(series) = as_series(value) {
        return match series.kind {
            Kind::List => "list",
            Kind::Tuple => "tuple",
            Kind::Group => "_GroupTuple",
            Kind::Range => "range",
            Kind::Keys => "dict_keys",
            Kind::Values => "dict_values",
            Kind::Items => "dict_items",
            Kind::Generator => "generator",
        };
    }
    if as_dict(value).is_some() {
        return "dict";
    }
    match value.kind() {
        ValueKind::Undefined => "Undefined",
        ValueKind::None => "NoneType",
        ValueKind::Bool => "bool",
        ValueKind::Number if value.is_integer() => "int",
        ValueKind::Number => "float",
        ValueKind::String => "str",
        _ => "object",
    }
}

/// The items of a loop over a value.
pub(super) fn items_of(value: &Value) -> Result<Vec<Value>, Error> {
    if let Some(series) = as_series(value) {
        return Ok(series.items().to_vec());
    }
    if let Some(dict) = as_dict(value) {
        return Ok(dict.keys());
    }
    if let Some(text) = value.as_str() {
        return Ok(text.chars().map(Value::from).collect());
    }
    if value.is_undefined() {
        return Ok(Vec::new());
    }
    Err(wrong(format!("'{}' object is not iterable", type_name(value))))
}

/// Python's `len`.
pub(super) fn length(value: &Value) -> Result<usize, Error> {
    match (as_series(value), as_dict(value), value.as_str()) {
        (Some(series), ..) if series.kind != Kind::Generator => Ok(series.items.len()),
        (_, Some(dict), _) => Ok(dict.entries.len()),
        (.., Some(text)) => Ok(text.chars().count()),
        _ if value.is_undefined() => Ok(0),
        _ => Err(wrong(format!("object of type '{}' has no len()", type_name(value)))),
    }
}

/// Python's `==`.
pub(super) fn equal(a: &Value, b: &Value) -> bool {
    match (number(a), number(b)) {
        (Some(Number::Int(a)), Some(Number::Int(b))) => return a == b,
        (Some(a), Some(b)) => return a.as_f64() == b.as_f64(),
        (None, None) => {}
        _ => return false,
    }
    if let (Some(a), Some(b)) = (as_series(a), as_series(b)) {
        let kind = |series: &Series| if series.kind == Kind::Group { Kind::Tuple } else { series.kind };
        let (a_kind, b_kind) = (kind(a), kind(b));
        let comparable = a_kind == b_kind && !matches!(a_kind, Kind::Values | Kind::Generator);
        return std::ptr::eq(a, b)
            || comparable
                && a.items.len() == b.items.len()
                && match a_kind {
                    Kind::Keys | Kind::Items => a.items.iter().all(|a| b.items.iter().any(|b| equal(a, b))),
                    _ => a.items.iter().zip(&b.items).all(|(a, b)| equal(a, b)),
                };
    }
    if let (Some(a), Some(b)) = (as_dict(a), as_dict(b)) {
        let same = |(key, value): &(Value, Value)| matches!(b.get(key), Ok(Some(other)) if equal(value, other));
        return a.entries.len() == b.entries.len() && a.entries.iter().all(same);
    }
    match (a.as_str(), b.as_str()) {
        (Some(a), Some(b)) => a == b,
        (None, None) => {
            let plain = |value: &Value| as_series(value).is_some() || as_dict(value).is_some();
            (a.is_none() && b.is_none()) || (a.is_undefined() && b.is_undefined()) || (!plain(a) && !plain(b) && a == b)
        }
        _ => false,
    }
}

/// Python's `is`.
pub(super) fn same_object(a: &Value, b: &Value) -> bool {
    match (a.as_object(), b.as_object()) {
        (Some(a), Some(b)) => {
            let place = |value: &Value| match (as_series(value), as_dict(value)) {
                (Some(series), _) => Some(std::ptr::from_ref(series).cast::<()>()),
                (_, Some(dict)) => Some(std::ptr::from_ref(dict).cast::<()>()),
                _ => None,
            };
            let (a, b) = (Value::from_dyn_object(a.clone()), Value::from_dyn_object(b.clone()));
            place(&a).is_some() && place(&a) == place(&b)
        }
        _ => false,
    }
}

/// Python's order of two values, for `operator`; none if a number is NaN.
pub(super) fn compare(operator: &str, a: &Value, b: &Value) -> Result<Option<Ordering>, Error> {
    for value in [a, b] {
        defined(value)?;
    }
    if let (Some(a), Some(b)) = (number(a), number(b)) {
        return Ok(match (a, b) {
            (Number::Int(a), Number::Int(b)) => Some(a.cmp(&b)),
            _ => a.as_f64().partial_cmp(&b.as_f64()),
        });
    }
    if let (Some(a), Some(b)) = (a.as_str(), b.as_str()) {
        return Ok(Some(a.cmp(b)));
    }
    let ordered = |kind| match kind {
        Kind::Group => Some(Kind::Tuple),
        Kind::List | Kind::Tuple => Some(kind),
        _ => None,
    };
    if let (Some(a), Some(b)) = (as_series(a), as_series(b))
        && ordered(a.kind).is_some()
        && ordered(a.kind) == ordered(b.kind)
    {
        for (a, b) in a.items.iter().zip(&b.items) {
            if !equal(a, b) {
                return compare(operator, a, b);
            }
        }
        return Ok(Some(a.items.len().cmp(&b.items.len())));
    }
    Err(wrong(format!("'{operator}' not supported between instances of '{}' and '{}'", type_name(a), type_name(b))))
}

/// A stable sort by Python's `<`.
pub(super) fn sort<T>(items: &mut [T], key: impl Fn(&T) -> &Value) -> Result<(), Error> {
    let mut refused = None;
    items.sort_by(|a, b| match compare("<", key(a), key(b)) {
        Ok(order) => order.unwrap_or(Ordering::Equal),
        Err(error) => {
            refused.get_or_insert(error);
            Ordering::Equal
        }
    });
    refused.map_or(Ok(()), Err)
}

/// Refuses undefined values.
pub(super) fn defined(value: &Value) -> Result<(), Error> {
    if value.is_undefined() { Err(wrong("a value that is used is undefined")) } else { Ok(()) }
}

/// Arguments by position and name. An empty name is positional only.
pub(super) struct Arguments {
    what: String,
    values: Vec<Option<Value>>,
}

impl Arguments {
    /// The arguments of a call of `what`, the first `required` of which are required.
    pub(super) fn bind(what: &str, arguments: &[Value], names: &[&str], required: usize) -> Result<Self, Error> {
        let (places, named) = apart(arguments)?;
        if places.len() > names.len() {
            return Err(wrong(format!("{what} takes {} arguments at the most, and has {}", names.len(), places.len())));
        }
        let mut values: Vec<Option<Value>> = places.iter().cloned().map(Some).collect();
        values.resize(names.len(), None);
        for (name, value) in named {
            match names.iter().position(|known| *known == name) {
                Some(place) if values[place].is_none() => values[place] = Some(value),
                Some(_) => return Err(wrong(format!("{what} has the argument {name} twice"))),
                None => return Err(wrong(format!("{what} takes no argument {name}"))),
            }
        }
        if values[..required].iter().any(Option::is_none) {
            return Err(wrong(format!("{what} lacks an argument")));
        }
        Ok(Self { what: what.into(), values })
    }

    pub(super) fn value(&self, place: usize) -> Option<&Value> {
        self.values.get(place)?.as_ref()
    }

    /// A required argument.
    pub(super) fn needed(&self, place: usize) -> Result<&Value, Error> {
        self.value(place).ok_or_else(|| wrong(format!("{} lacks an argument", self.what)))
    }

    fn other(&self, value: &Value, wanted: &str) -> Error {
        wrong(format!("{} takes {wanted}, not '{}'", self.what, type_name(value)))
    }

    pub(super) fn text(&self, place: usize) -> Result<&str, Error> {
        let value = self.needed(place)?;
        value.as_str().ok_or_else(|| self.other(value, "a string"))
    }

    /// A string, or nothing for `None` or a missing argument.
    pub(super) fn maybe_text(&self, place: usize) -> Result<Option<&str>, Error> {
        match self.value(place) {
            None => Ok(None),
            Some(value) if value.is_none() => Ok(None),
            Some(_) => self.text(place).map(Some),
        }
    }

    pub(super) fn int(&self, place: usize, default: i64) -> Result<i64, Error> {
        match self.value(place) {
            None => Ok(default),
            Some(value) => {
                int(value).and_then(|int| i64::try_from(int).ok()).ok_or_else(|| self.other(value, "an integer"))
            }
        }
    }

    pub(super) fn flag(&self, place: usize, default: bool) -> bool {
        self.value(place).map_or(default, Value::is_true)
    }
}

/// Positional and keyword arguments.
type Apart<'a> = (&'a [Value], Vec<(String, Value)>);

/// Separates positional from keyword arguments.
pub(super) fn apart(arguments: &[Value]) -> Result<Apart<'_>, Error> {
    let Some((last, places)) = arguments.split_last().filter(|(last, _)| last.is_kwargs()) else {
        return Ok((arguments, Vec::new()));
    };
    let named = last.try_iter()?.map(|name| {
        let value = last.get_item(&name)?;
        Ok((name.as_str().unwrap_or_default().to_string(), value))
    });
    Ok((places, named.collect::<Result<_, Error>>()?))
}
