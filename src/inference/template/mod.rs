//! Renders chat templates as `transformers` does with Jinja in Python.
//!
//! A template is translated (`translate/`) for `minijinja`, which handles text, white space,
//! scopes, loops and macros. Values, operators, methods and filters have Python's semantics, in the
//! other files here. Unsupported features are refused by name.

use std::fmt::Write;
use std::sync::Arc;

use chrono::{DateTime, Local, NaiveDateTime};
use minijinja::value::Rest;
use minijinja::{Environment, Error, ErrorKind, State, Value};
use serde_json::{Map, Value as Json};

use crate::failure::Failure;

mod attributes;
mod filters;
pub(crate) mod folder;
mod format;
mod methods;
mod operators;
mod print;
mod translate;
mod values;

use values::{Arguments, as_dict, dict, items_of, wrong};

/// Limits of instructions, and of the nesting of macros and loops. Memory is not limited.
const FUEL: u64 = 10_000_000;
const DEPTH: usize = 100;
/// The longest range, as in Jinja's sandbox.
const LONGEST_RANGE: i128 = 100_000;
const NAME: &str = "chat";
/// The filter of what stands between `{% generation %}` and `{% endgeneration %}`.
const GENERATION: &str = "generation_block";
/// A variable of two characters, which that filter puts before and behind.
const GENERATION_MARKS: &str = "generation_block_marks";

/// A compiled template.
#[derive(Debug)]
pub struct Template {
    environment: Environment<'static>,
    source: String,
    marks_generations: bool,
}

impl Template {
    /// Compiles a template.
    ///
    /// # Errors
    /// If it is invalid or uses an unsupported feature.
    pub fn new(source: &str) -> Result<Self, Failure> {
        let translated =
            translate::translate(source).map_err(|wrong| Failure::new(format!("the chat template, {wrong}")))?;
        let mut environment = Environment::empty();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(DEPTH);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_formatter(|out, _, value| Ok(out.write_str(&print::text(value)?)?));
        operators::add_to(&mut environment);
        filters::add_to(&mut environment);
        environment.add_function("namespace", |from: Option<Value>| {
            for name in from.iter().flat_map(Value::try_iter).flatten() {
                values::storable(&from.as_ref().map_or(Ok(Value::UNDEFINED), |from| from.get_item(&name))?)?;
            }
            minijinja::functions::namespace(from)
        });
        environment.add_function("range", |arguments: Rest<Value>| range(&arguments));
        environment.add_function("dict", |arguments: Rest<Value>| to_dict(&arguments));
        environment.add_filter(GENERATION, |state: &State, block: Value| {
            let marks = state.lookup(GENERATION_MARKS).and_then(|marks| marks.as_str().map(str::to_string));
            let Some([begin, end]) = marks
                .map(|marks| marks.chars().collect::<Vec<_>>())
                .as_deref()
                .map(<[char; 2]>::try_from)
                .and_then(Result::ok)
            else {
                return block;
            };
            Value::from_safe_string(format!("{begin}{block}{end}"))
        });
        environment.add_function("raise_exception", |message: Value| -> Result<Value, Error> {
            Err(wrong(print::text(&message)?))
        });
        let marks_generations = translated.contains(&format!("filter {GENERATION} "));
        let template = Self { environment, source: source.to_string(), marks_generations }
            .with_clock(Arc::new(|| Local::now().naive_local()));
        template.compiled(translated)
    }

    fn compiled(mut self, translated: String) -> Result<Self, Failure> {
        self.environment.add_template_owned(NAME, translated).map_err(|error| told(&error))?;
        Ok(self)
    }

    fn with_clock(mut self, now: Arc<dyn Fn() -> NaiveDateTime + Send + Sync>) -> Self {
        self.environment.add_function("strftime_now", move |format: &str| date(now(), format));
        self
    }

    /// Fixes the template's clock, in seconds of local time since 1970.
    pub fn at(self, seconds: i64) -> Self {
        let now = DateTime::from_timestamp(seconds, 0).unwrap_or_default().naive_utc();
        self.with_clock(Arc::new(move || now))
    }

    /// Its source.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether it uses a variable of this name, such as `tools`.
    pub fn knows(&self, variable: &str) -> bool {
        let template = self.environment.get_template(NAME);
        template.is_ok_and(|template| template.undeclared_variables(false).contains(variable))
    }

    /// Whether it says which parts the assistant writes, by `{% generation %}`.
    pub fn marks_generations(&self) -> bool {
        self.marks_generations
    }

    /// As [`render`](Self::render), with `marks` before and behind what the assistant writes, where
    /// the template says what that is.
    ///
    /// # Errors
    /// As [`render`](Self::render).
    pub fn render_marked(&self, variables: &Map<String, Json>, marks: [char; 2]) -> Result<String, Failure> {
        let mut variables = variables.clone();
        variables.insert(GENERATION_MARKS.into(), String::from_iter(marks).into());
        self.render(&variables)
    }

    /// Renders it with these variables.
    ///
    /// # Errors
    /// If the template refuses them or fails.
    pub fn render(&self, variables: &Map<String, Json>) -> Result<String, Failure> {
        let values = variables.iter().map(|(name, value)| Ok((name.as_str(), values::from_json(value)?)));
        let values = values.collect::<Result<Vec<_>, Error>>().map_err(|error| told(&error))?;
        let template = self.environment.get_template(NAME).map_err(|error| told(&error))?;
        template.render(values.into_iter().collect::<Value>()).map_err(|error| told(&error))
    }
}

fn told(error: &Error) -> Failure {
    let what = match (error.kind(), error.detail()) {
        (ErrorKind::OutOfFuel, _) => "it takes too many steps".to_string(),
        (ErrorKind::UnknownFunction, Some(detail)) => format!("the function {detail}"),
        (_, Some(detail)) => detail.to_string(),
        (kind, None) => kind.to_string(),
    };
    Failure::new(match error.line() {
        Some(line) => format!("the chat template, line {line}: {what}"),
        None => format!("the chat template: {what}"),
    })
}

fn range(arguments: &[Value]) -> Result<Value, Error> {
    let arguments = Arguments::bind("the function range", arguments, &["", "", ""], 1)?;
    let (start, stop) = match arguments.value(1) {
        None => (0, arguments.int(0, 0)?),
        Some(_) => (arguments.int(0, 0)?, arguments.int(1, 0)?),
    };
    let step = arguments.int(2, 1)?;
    if step == 0 {
        return Err(wrong("range() arg 3 must not be zero"));
    }
    let (first, last, by) = (i128::from(start), i128::from(stop), i128::from(step));
    let length = if by > 0 { (last - first + by - 1) / by } else { (first - last - by - 1) / -by };
    if length > LONGEST_RANGE {
        return Err(wrong(format!("Range too big. The sandbox blocks ranges larger than {LONGEST_RANGE}.")));
    }
    let mut shown = format!("range({start}, {stop}");
    if step != 1 {
        let _ = write!(shown, ", {step}");
    }
    let items = (0..length.max(0)).map(|at| values::from_int(first + at * by));
    Ok(values::range(items.collect(), shown + ")"))
}

fn to_dict(arguments: &[Value]) -> Result<Value, Error> {
    let (places, named) = values::apart(arguments)?;
    let mut entries = Vec::new();
    match places {
        [] => {}
        [from] => match as_dict(from) {
            Some(dict) => entries.extend(dict.entries().iter().cloned()),
            None => {
                for pair in items_of(from)? {
                    let [key, value] = &items_of(&pair)?[..] else {
                        return Err(wrong("the function dict takes pairs"));
                    };
                    entries.push((key.clone(), value.clone()));
                }
            }
        },
        _ => return Err(wrong("the function dict takes one argument without a name")),
    }
    dict(entries.into_iter().chain(named.into_iter().map(|(name, value)| (Value::from(name), value))))
}

/// A date in Python's `strftime` format, for a time without zone.
fn date(now: NaiveDateTime, format: &str) -> Result<String, Error> {
    let mut written = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            written.push(c);
            continue;
        }
        let mut directive = String::from("%");
        let mut kind = chars.next();
        if let Some(flag @ ('-' | '_' | '0')) = kind {
            directive.push(flag);
            kind = chars.next();
        }
        match (kind, directive.len()) {
            (Some('f'), 1) => directive = format!("{:06}", now.and_utc().timestamp_subsec_micros()),
            (Some('z' | 'Z'), 1) => directive.clear(),
            (Some(kind), _) if "aAbBcCdDeFgGhHIjklmMnpPrRStTuUVwWxXyY%".contains(kind) => {
                directive.push(kind);
                directive = now.format(&directive).to_string();
            }
            _ => return Err(wrong(format!("the format {format:?} of a date is not supported"))),
        }
        written.push_str(&directive);
    }
    Ok(written)
}
