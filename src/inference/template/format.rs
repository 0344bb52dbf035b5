//! Python's two string formats: `'%s' % value` and `'{}'.format(value)`.

use minijinja::{Error, Value};

use super::attributes::{attribute, item};
use super::print::{Align, float_text, padded, shown, text};
use super::values::{Kind, Number, apart, as_dict, as_series, defined, int, number, type_name, wrong};

/// A format specification.
struct Spec {
    fill: char,
    align: Option<Align>,
    /// Sign of a number that is not negative.
    plus: &'static str,
    alternate: bool,
    width: i64,
    group: Option<char>,
    precision: Option<usize>,
    kind: Option<char>,
}

fn digits(text: &mut &str) -> Result<Option<usize>, Error> {
    let length = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let number = text[..length].parse().ok();
    if length > 4 {
        return Err(wrong("a width of a format is too much"));
    }
    *text = &text[length..];
    Ok(number)
}

fn take(text: &mut &str, c: char) -> bool {
    let found = text.strip_prefix(c);
    *text = found.unwrap_or(text);
    found.is_some()
}

/// `format % value`.
pub(super) fn percent(format: &str, value: &Value) -> Result<String, Error> {
    let several = as_series(value).filter(|series| matches!(series.kind, Kind::Tuple | Kind::Group));
    let values = several.map_or_else(|| vec![value.clone()], |series| series.items().to_vec());
    let mut values = values.into_iter();
    let mut named = false;
    let mut written = String::new();
    let mut rest = format;
    while let Some(at) = rest.find('%') {
        written.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        let mut key = None;
        if let Some(inner) = rest.strip_prefix('(') {
            let (name, behind) = inner.split_once(')').ok_or_else(|| wrong("incomplete format key"))?;
            (key, rest) = (Some(name), behind);
        }
        let mut spec = Spec {
            fill: ' ',
            align: None,
            plus: "",
            alternate: false,
            width: 0,
            group: None,
            precision: None,
            kind: None,
        };
        let mut left = false;
        loop {
            match rest.chars().next() {
                Some('-') => left = true,
                Some('+') => spec.plus = "+",
                Some(' ') if spec.plus.is_empty() => spec.plus = " ",
                Some(' ') => {}
                Some('0') => spec.fill = '0',
                Some('#') => spec.alternate = true,
                _ => break,
            }
            rest = &rest[1..];
        }
        let mut next = |named_by: Option<&str>| match named_by {
            None => values.next().ok_or_else(|| wrong("not enough arguments for format string")),
            Some(name) => {
                named = true;
                let dict = as_dict(value).ok_or_else(|| wrong("format requires a mapping"))?;
                let found = dict.get(&Value::from(name))?.cloned();
                found.ok_or_else(|| wrong(format!("the format asks for {name}, which is not there")))
            }
        };
        if take(&mut rest, '*') {
            return Err(wrong("a format whose width is an argument is not supported"));
        }
        spec.width = digits(&mut rest)?.unwrap_or(0) as i64;
        if take(&mut rest, '.') {
            spec.precision = Some(digits(&mut rest)?.unwrap_or(0));
        }
        rest = rest.trim_start_matches(['h', 'l', 'L']);
        let kind = rest.chars().next().ok_or_else(|| wrong("incomplete format"))?;
        rest = &rest[kind.len_utf8()..];
        if kind == '%' {
            written.push('%');
            continue;
        }
        let is_text = matches!(kind, 's' | 'r' | 'a' | 'c');
        spec.align = Some(match (left, spec.fill == '0' && !is_text) {
            (true, _) => Align::Left,
            (false, true) => Align::Sign,
            (false, false) => Align::Right,
        });
        if left || is_text {
            spec.fill = ' ';
        }
        let value = next(key)?;
        let whole = |value: &Value| match number(value) {
            Some(Number::Float(float)) if float.is_finite() && float.abs() < 1e30 => Ok(float.trunc() as i128),
            Some(Number::Int(int)) => Ok(int),
            _ => Err(wrong(format!("%{kind} format: a number is required, not {}", type_name(value)))),
        };
        spec.kind = Some(kind);
        written.push_str(&match kind {
            's' | 'r' => {
                let text = if kind == 's' { text(&value)? } else { shown(&value)? };
                spec.pad(&spec.cut(text), Align::Left)?
            }
            'd' | 'i' | 'u' => {
                spec.kind = Some('d');
                spec.of_int(whole(&value)?)?
            }
            'x' | 'X' | 'o' => {
                let value = int(&value).ok_or_else(|| wrong(format!("%{kind} format: an integer is required")))?;
                spec.of_int(value)?
            }
            'e' | 'E' | 'f' | 'F' | 'g' | 'G' => {
                defined(&value)?;
                let number = number(&value);
                let number = number.ok_or_else(|| wrong(format!("must be real number, not {}", type_name(&value))))?;
                spec.of_float(number.as_f64())?
            }
            'c' => {
                let character = match (value.as_str(), int(&value)) {
                    (Some(text), _) if text.chars().count() == 1 => text.to_string(),
                    (None, Some(code)) => {
                        let code = u32::try_from(code).ok().and_then(char::from_u32);
                        code.ok_or_else(|| wrong("%c arg not in range(0x110000)"))?.to_string()
                    }
                    _ => return Err(wrong("%c requires int or char")),
                };
                spec.pad(&character, Align::Left)?
            }
            other => return Err(wrong(format!("the format %{other} is not supported"))),
        });
    }
    written.push_str(rest);
    // Only a dict may have unused values.
    if values.next().is_some() && !named && (several.is_some() || as_dict(value).is_none()) {
        let unread = as_series(value).is_some_and(|series| series.kind == Kind::List);
        if !unread || format.contains('%') {
            return Err(wrong("not all arguments converted during string formatting"));
        }
    }
    Ok(written)
}

/// `format.format(..)`.
pub(super) fn braces(format: &str, arguments: &[Value]) -> Result<String, Error> {
    let (places, named) = apart(arguments)?;
    let mut written = String::new();
    let mut rest = format;
    let mut next = 0;
    while let Some(at) = rest.find(['{', '}']) {
        written.push_str(&rest[..at]);
        let brace = &rest[at..=at];
        rest = &rest[at + 1..];
        if let Some(behind) = rest.strip_prefix(brace) {
            written.push_str(brace);
            rest = behind;
            continue;
        }
        if brace == "}" {
            return Err(wrong("Single '}' encountered in format string"));
        }
        let (field, behind) = rest.split_once('}').ok_or_else(|| wrong("expected '}' before end of string"))?;
        rest = behind;
        if field.contains('{') {
            return Err(wrong("a format within a format is not supported"));
        }
        let (field, spec) = field.split_once(':').unwrap_or((field, ""));
        let (field, conversion) = field.split_once('!').unwrap_or((field, ""));
        let end = field.find(['.', '[']).unwrap_or(field.len());
        let first = &field[..end];
        let place = |place: usize| {
            places.get(place).cloned().ok_or_else(|| wrong("Replacement index out of range for positional args tuple"))
        };
        let mut value = match first.parse::<usize>() {
            Ok(number) => place(number)?,
            Err(_) if first.is_empty() => {
                next += 1;
                place(next - 1)?
            }
            Err(_) => {
                let found = named.iter().find(|(name, _)| name == first);
                found.map(|(_, value)| value.clone()).ok_or_else(|| wrong(format!("the format asks for {first:?}")))?
            }
        };
        let mut path = &field[end..];
        while !path.is_empty() {
            let (key, behind) = if let Some(inner) = path.strip_prefix('[') {
                inner.split_once(']').ok_or_else(|| wrong("Missing ']' in format string"))?
            } else {
                let inner = path.strip_prefix('.').ok_or_else(|| wrong("a format names no part"))?;
                inner.split_at(inner.find(['.', '[']).unwrap_or(inner.len()))
            };
            let by_item = path.starts_with('[');
            value = match (by_item, key.parse::<i64>()) {
                (true, Ok(number)) => item(&value, &Value::from(number))?,
                (true, Err(_)) => item(&value, &Value::from(key))?,
                (false, _) => attribute(&value, key)?,
            };
            path = behind;
        }
        let value = match conversion {
            "" => value,
            "s" => Value::from(text(&value)?),
            "r" => Value::from(shown(&value)?),
            other => return Err(wrong(format!("the conversion {other:?} of a format is not supported"))),
        };
        written.push_str(&Spec::read(spec)?.of(&value)?);
    }
    written.push_str(rest);
    Ok(written)
}

impl Spec {
    fn read(text: &str) -> Result<Self, Error> {
        let mut spec = Self {
            fill: ' ',
            align: None,
            plus: "",
            alternate: false,
            width: 0,
            group: None,
            precision: None,
            kind: None,
        };
        let align = |c: char| match c {
            '<' => Some(Align::Left),
            '>' => Some(Align::Right),
            '^' => Some(Align::Center),
            '=' => Some(Align::Sign),
            _ => None,
        };
        let mut rest = text;
        let mut chars = text.chars();
        let (first, second) = (chars.next(), chars.next());
        if let (Some(fill), Some(side)) = (first, second.and_then(align)) {
            (spec.fill, spec.align) = (fill, Some(side));
            rest = chars.as_str();
        } else if let Some(side) = first.and_then(align) {
            spec.align = Some(side);
            rest = &rest[1..];
        }
        for (sign, plus) in [('+', "+"), (' ', " "), ('-', "")] {
            if take(&mut rest, sign) {
                spec.plus = plus;
                break;
            }
        }
        spec.alternate = take(&mut rest, '#');
        if take(&mut rest, '0') && spec.align.is_none() {
            (spec.fill, spec.align) = ('0', Some(Align::Sign));
        }
        spec.width = digits(&mut rest)?.unwrap_or(0) as i64;
        for group in [',', '_'] {
            if take(&mut rest, group) {
                spec.group = Some(group);
            }
        }
        if take(&mut rest, '.') {
            spec.precision = Some(digits(&mut rest)?.ok_or_else(|| wrong("Format specifier missing precision"))?);
        }
        spec.kind = rest.chars().next();
        if rest.chars().count() > 1 {
            return Err(wrong(format!("Invalid format specifier '{text}'")));
        }
        Ok(spec)
    }

    fn plain(&self) -> bool {
        self.width == 0
            && self.align.is_none()
            && self.plus.is_empty()
            && self.group.is_none()
            && self.precision.is_none()
            && self.kind.is_none()
    }

    fn of(&self, value: &Value) -> Result<String, Error> {
        if self.plain() {
            return text(value);
        }
        let unknown =
            |kind: char| wrong(format!("Unknown format code '{kind}' for object of type '{}'", type_name(value)));
        match (number(value), self.kind) {
            (None, None | Some('s')) if value.as_str().is_some() => self.pad(&self.cut(text(value)?), Align::Left),
            (Some(Number::Int(_)), None) if type_name(value) == "bool" => {
                Err(wrong("a format of True or False is not supported"))
            }
            (Some(Number::Int(int)), None | Some('d' | 'x' | 'X' | 'o' | 'b')) => self.of_int(int),
            (Some(number), Some('e' | 'E' | 'f' | 'F' | 'g' | 'G' | '%')) => self.of_float(number.as_f64()),
            (Some(Number::Float(float)), None) if self.precision.is_none() => {
                self.pad(&self.signed(float.is_sign_negative(), &float_text(float.abs())), Align::Right)
            }
            (_, Some(kind)) => Err(unknown(kind)),
            _ => Err(wrong(format!("the format of a '{}' is not supported", type_name(value)))),
        }
    }

    fn cut(&self, text: String) -> String {
        match self.precision {
            Some(precision) => text.chars().take(precision).collect(),
            None => text,
        }
    }

    fn pad(&self, text: &str, default: Align) -> Result<String, Error> {
        padded(text, self.width, self.fill, self.align.unwrap_or(default))
    }

    fn signed(&self, negative: bool, digits: &str) -> String {
        format!("{}{digits}", if negative { "-" } else { self.plus })
    }

    fn of_int(&self, value: i128) -> Result<String, Error> {
        let size = value.unsigned_abs();
        let (prefix, mut digits) = match self.kind {
            Some('x') => ("0x", format!("{size:x}")),
            Some('X') => ("0X", format!("{size:X}")),
            Some('o') => ("0o", format!("{size:o}")),
            Some('b') => ("0b", format!("{size:b}")),
            _ => ("", size.to_string()),
        };
        if let Some(precision) = self.precision {
            digits = padded(&digits, precision as i64, '0', Align::Right)?;
        }
        if let Some(group) = self.group {
            digits = grouped(&digits, group, self)?;
        }
        let digits = if self.alternate { prefix.to_string() + &digits } else { digits };
        self.pad(&self.signed(value < 0, &digits), Align::Right)
    }

    fn of_float(&self, value: f64) -> Result<String, Error> {
        let precision = self.precision.unwrap_or(6);
        let size = value.abs();
        let kind = self.kind.unwrap_or('g');
        if self.alternate {
            return Err(wrong("the format # of a float is not supported"));
        }
        let mut digits = match kind {
            _ if !size.is_finite() => float_text(size),
            'f' | 'F' => format!("{size:.precision$}"),
            '%' => format!("{:.precision$}%", size * 100.0),
            'e' | 'E' => scientific(size, precision),
            _ => general(size, precision.max(1)),
        };
        if kind.is_ascii_uppercase() {
            digits = digits.to_uppercase();
        }
        if let Some(group) = self.group {
            let (whole, fraction) = digits.split_at(digits.find('.').unwrap_or(digits.len()));
            digits = grouped(whole, group, self)? + fraction;
        }
        self.pad(&self.signed(value.is_sign_negative() && !value.is_nan(), &digits), Align::Right)
    }
}

/// Groups digits by three.
fn grouped(digits: &str, group: char, spec: &Spec) -> Result<String, Error> {
    if spec.fill == '0' && spec.width > 0 {
        return Err(wrong("a format with zeros and groups is not supported"));
    }
    if !digits.bytes().all(|c| c.is_ascii_digit()) {
        return Err(wrong("a format with groups of anything but decimal digits is not supported"));
    }
    let mut written = String::new();
    for (at, c) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            written.push(group);
        }
        written.push(c);
    }
    Ok(written)
}

fn scientific(size: f64, precision: usize) -> String {
    let written = format!("{size:.precision$e}");
    let (digits, exponent) = written.split_once('e').unwrap_or((&written, "0"));
    let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |exponent| ('-', exponent));
    format!("{digits}e{sign}{exponent:0>2}")
}

fn general(size: f64, precision: usize) -> String {
    let written = scientific(size, precision - 1);
    let (digits, exponent) = written.split_once('e').unwrap_or((&written, "0"));
    let number: i64 = exponent.parse().unwrap_or(0);
    let without_zeros = |text: &str| match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_string(),
        false => text.to_string(),
    };
    if number < -4 || number >= precision as i64 {
        return format!("{}e{exponent}", without_zeros(digits));
    }
    let places = usize::try_from(precision as i64 - 1 - number).unwrap_or(0);
    without_zeros(&format!("{size:.places$}"))
}
