//! Parses and emits the expressions of a tag.

use super::lexer::Token;

/// Maximum nesting of expressions.
const DEPTH: usize = 100;
/// A string literal for `minijinja`.
fn quoted(text: &str) -> String {
    let text = text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n").replace('\r', "\\r");
    format!("\"{text}\"")
}

/// Parses expressions as Jinja does, and emits them for `minijinja`.
pub(super) struct Parser {
    tokens: Vec<Token>,
    at: usize,
    in_macro: bool,
    depth: usize,
    /// Variables read so far.
    names: Vec<String>,
}

pub(super) type Translated = Result<String, String>;

impl Parser {
    /// A parser for these tokens, inside a macro or not.
    pub(super) fn new(tokens: Vec<Token>, in_macro: bool) -> Self {
        Self { tokens, at: 0, in_macro, depth: 0, names: Vec::new() }
    }

    fn peek(&self) -> Option<&Token> {
        self.tokens.get(self.at)
    }

    fn is(&self, operator: &str) -> bool {
        matches!(self.peek(), Some(Token::Op(other)) if *other == operator)
    }

    fn is_word(&self, word: &str) -> bool {
        matches!(self.peek(), Some(Token::Name(other)) if other == word)
    }

    fn skip(&mut self, operator: &str) -> bool {
        let is = self.is(operator);
        self.at += usize::from(is);
        is
    }

    fn skip_word(&mut self, word: &str) -> bool {
        let is = self.is_word(word);
        self.at += usize::from(is);
        is
    }

    fn unexpected(&self, wanted: &str) -> String {
        match self.peek() {
            Some(Token::Name(name)) => format!("unexpected {name}, where {wanted} is wanted"),
            Some(Token::Text(text)) => format!("unexpected {text:?}, where {wanted} is wanted"),
            Some(Token::Int(number)) => format!("unexpected {number}, where {wanted} is wanted"),
            Some(Token::Float(number)) => format!("unexpected {number}, where {wanted} is wanted"),
            Some(Token::Op(operator)) => format!("unexpected {operator}, where {wanted} is wanted"),
            None => format!("the tag ends where {wanted} is wanted"),
        }
    }

    fn expect(&mut self, operator: &str) -> Result<(), String> {
        if self.skip(operator) { Ok(()) } else { Err(self.unexpected(operator)) }
    }

    pub(super) fn name(&mut self, wanted: &str) -> Translated {
        let Some(Token::Name(name)) = self.peek() else { return Err(self.unexpected(wanted)) };
        let name = name.clone();
        self.at += 1;
        Ok(name)
    }

    /// A variable's name, kept apart from the operations' names.
    fn variable(&mut self, wanted: &str) -> Translated {
        let name = self.name(wanted)?;
        match name.starts_with("__") {
            true => Err(format!("the name {name}: names with two underscores in front are not supported")),
            false => Ok(name),
        }
    }

    pub(super) fn finished(&self) -> Result<(), String> {
        if self.at == self.tokens.len() { Ok(()) } else { Err(self.unexpected("the end of the tag")) }
    }

    /// One expression, or several with commas, which are a tuple.
    pub(super) fn tuple(&mut self, with_conditions: bool) -> Translated {
        let mut items = Vec::new();
        let mut is_tuple = false;
        loop {
            if !items.is_empty() {
                if !self.skip(",") {
                    break;
                }
                is_tuple = true;
            }
            if self.peek().is_none() || self.is(")") || self.is_word("recursive") {
                break;
            }
            items.push(if with_conditions { self.expression()? } else { self.or()? });
        }
        match items.pop() {
            Some(only) if !is_tuple => Ok(only),
            Some(last) => {
                items.push(last);
                Ok(format!("__tuple({})", items.join(", ")))
            }
            None => Err(self.unexpected("an expression")),
        }
    }

    fn expression(&mut self) -> Translated {
        self.depth += 1;
        if self.depth > DEPTH {
            return Err("an expression nests too deep".into());
        }
        let mut read = self.or()?;
        while self.skip_word("if") {
            let (value, condition) = (lasting(read), lasting(self.or()?));
            read = match self.skip_word("else") {
                true => format!("({value} if {condition} else {})", lasting(self.expression()?)),
                false => format!("({value} if {condition})"),
            };
        }
        self.depth -= 1;
        Ok(read)
    }

    fn or(&mut self) -> Translated {
        self.joined("or", Self::and)
    }

    fn and(&mut self) -> Translated {
        self.joined("and", Self::not)
    }

    fn joined(&mut self, word: &str, part: fn(&mut Self) -> Translated) -> Translated {
        let first = part(self)?;
        if !self.is_word(word) {
            return Ok(first);
        }
        let mut parts = vec![lasting(first)];
        while self.skip_word(word) {
            parts.push(lasting(part(self)?));
        }
        Ok(format!("({})", parts.join(&format!(" {word} "))))
    }

    fn not(&mut self) -> Translated {
        let mut nots = 0;
        while self.skip_word("not") {
            nots += 1;
        }
        let mut read = self.compare()?;
        for _ in 0..nots {
            read = format!("(not {})", lasting(read));
        }
        Ok(read)
    }

    fn compare(&mut self) -> Translated {
        let mut left = self.sum()?;
        let mut parts = Vec::new();
        loop {
            let function = match self.peek() {
                Some(Token::Op("==")) => "__eq",
                Some(Token::Op("!=")) => "__ne",
                Some(Token::Op("<")) => "__lt",
                Some(Token::Op("<=")) => "__le",
                Some(Token::Op(">")) => "__gt",
                Some(Token::Op(">=")) => "__ge",
                Some(Token::Name(word)) if word == "in" => "__in",
                Some(Token::Name(word))
                    if word == "not" && self.tokens.get(self.at + 1) == Some(&Token::Name("in".into())) =>
                {
                    self.at += 1;
                    "__not_in"
                }
                _ => break,
            };
            self.at += 1;
            let right = self.sum()?;
            parts.push(format!("{function}({left}, {right})"));
            left = right;
        }
        Ok(match parts.len() {
            0 => left,
            1 => parts.remove(0),
            _ => format!("({})", parts.join(" and ")),
        })
    }

    fn sum(&mut self) -> Translated {
        let mut left = self.concatenation()?;
        loop {
            if self.is("+") {
                // Long sums must not nest.
                let mut parts = vec![left];
                while self.skip("+") {
                    parts.push(self.concatenation()?);
                }
                left = format!("__add({})", parts.join(", "));
            } else if self.skip("-") {
                left = format!("__sub({left}, {})", self.concatenation()?);
            } else {
                return Ok(left);
            }
        }
    }

    fn concatenation(&mut self) -> Translated {
        let mut parts = vec![self.product()?];
        while self.skip("~") {
            parts.push(self.product()?);
        }
        if parts.len() == 1 { Ok(parts.remove(0)) } else { Ok(format!("__concat({})", parts.join(", "))) }
    }

    fn product(&mut self) -> Translated {
        let mut left = self.power()?;
        loop {
            let function = match self.peek() {
                Some(Token::Op("*")) => "__mul",
                Some(Token::Op("/")) => "__div",
                Some(Token::Op("//")) => "__floordiv",
                Some(Token::Op("%")) => "__mod",
                _ => return Ok(left),
            };
            self.at += 1;
            left = format!("{function}({left}, {})", self.power()?);
        }
    }

    fn power(&mut self) -> Translated {
        let mut left = self.unary(true)?;
        while self.skip("**") {
            left = format!("__pow({left}, {})", self.unary(true)?);
        }
        Ok(left)
    }

    fn unary(&mut self, with_filters: bool) -> Translated {
        self.depth += 1;
        if self.depth > DEPTH {
            return Err("an expression nests too deep".into());
        }
        let read = if self.skip("-") {
            format!("__neg({})", self.unary(false)?)
        } else if self.skip("+") {
            format!("__pos({})", self.unary(false)?)
        } else {
            self.primary()?
        };
        let mut read = self.postfix(read)?;
        loop {
            read = match self.peek() {
                _ if !with_filters => break,
                Some(Token::Op("|")) => format!("({read}{})", self.filters()?),
                Some(Token::Op("(")) => self.call(read)?,
                Some(Token::Name(word)) if word == "is" => {
                    self.at += 1;
                    self.test(read)?
                }
                _ => break,
            };
        }
        self.depth -= 1;
        Ok(read)
    }

    fn primary(&mut self) -> Translated {
        let token = self.peek().cloned().ok_or_else(|| self.unexpected("an expression"))?;
        self.at += 1;
        Ok(match token {
            Token::Name(name) => match name.as_str() {
                "true" | "True" => "true".into(),
                "false" | "False" => "false".into(),
                "none" | "None" => "none".into(),
                "self" | "super" => return Err(format!("{name} is not supported in chat templates")),
                "varargs" | "kwargs" if self.in_macro => {
                    return Err(format!("{name} of a macro is not supported"));
                }
                "if" | "else" | "and" | "or" | "not" | "in" | "is" | "elif" => {
                    self.at -= 1;
                    return Err(self.unexpected("an expression"));
                }
                _ => {
                    self.at -= 1;
                    let name = self.variable("an expression")?;
                    self.names.push(name.clone());
                    name
                }
            },
            Token::Text(mut text) => {
                while let Some(Token::Text(more)) = self.peek() {
                    text.push_str(more);
                    self.at += 1;
                }
                quoted(&text)
            }
            Token::Int(number) => number.to_string(),
            Token::Float(number) => format!("__float(\"{number:e}\")"),
            Token::Op("(") => {
                let read = if self.is(")") { "__tuple()".into() } else { self.tuple(true)? };
                self.expect(")")?;
                read
            }
            Token::Op("[") => {
                let items = self.items("]")?;
                format!("__list({items})")
            }
            Token::Op("{") => {
                let mut entries = Vec::new();
                while !self.skip("}") {
                    if !entries.is_empty() {
                        self.expect(",")?;
                        if self.skip("}") {
                            break;
                        }
                    }
                    entries.push(self.expression()?);
                    self.expect(":")?;
                    entries.push(self.expression()?);
                }
                format!("__dict({})", entries.join(", "))
            }
            Token::Op(_) => {
                self.at -= 1;
                return Err(self.unexpected("an expression"));
            }
        })
    }

    fn items(&mut self, end: &str) -> Translated {
        let mut items = Vec::new();
        while !self.skip(end) {
            if !items.is_empty() {
                self.expect(",")?;
                if self.skip(end) {
                    break;
                }
            }
            items.push(self.expression()?);
        }
        Ok(items.join(", "))
    }

    fn postfix(&mut self, mut read: String) -> Translated {
        loop {
            if self.skip(".") {
                read = match self.peek().cloned() {
                    Some(Token::Int(number)) => {
                        self.at += 1;
                        format!("__item({read}, {number})")
                    }
                    _ => {
                        let name = quoted(&self.name("the name of an attribute")?);
                        match self.is("(") {
                            true => format!("__method({read}, {name}{})", self.further_arguments()?),
                            false => format!("__attr({read}, {name})"),
                        }
                    }
                };
            } else if self.skip("[") {
                read = self.subscript(&read)?;
            } else if self.is("(") {
                read = self.call(read)?;
            } else {
                return Ok(read);
            }
        }
    }

    fn subscript(&mut self, read: &str) -> Translated {
        let mut parts: Vec<Option<String>> = vec![None];
        while !self.skip("]") {
            if self.skip(":") {
                parts.push(None);
            } else if parts.last().is_some_and(Option::is_none) {
                *parts.last_mut().ok_or("no subscript")? = Some(self.expression()?);
            } else {
                return Err(self.unexpected("]"));
            }
        }
        let shown = |part: &Option<String>| part.clone().unwrap_or_else(|| "none".into());
        match &parts[..] {
            [Some(key)] => Ok(format!("__item({read}, {key})")),
            [None] => Err("an empty subscript".into()),
            [_, _] | [_, _, _] => {
                let step = parts.get(2).map_or_else(|| "none".into(), shown);
                Ok(format!("__slice({read}, {}, {}, {step})", shown(&parts[0]), shown(&parts[1])))
            }
            _ => Err("a slice has too many parts".into()),
        }
    }

    /// A call of the expression.
    fn call(&mut self, read: String) -> Translated {
        let is_name = read.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        match read.as_str() {
            // A recursive loop's next level.
            "loop" => {
                let arguments = self.arguments()?;
                Ok(format!("loop(__iter({}))", arguments.join(", ")))
            }
            _ if is_name => Ok(format!("{read}({})", self.arguments()?.join(", "))),
            _ => Ok(format!("__call({read}{})", self.further_arguments()?)),
        }
    }

    fn further_arguments(&mut self) -> Translated {
        Ok(self.arguments()?.iter().map(|argument| format!(", {argument}")).collect())
    }

    fn arguments(&mut self) -> Result<Vec<String>, String> {
        self.expect("(")?;
        let mut arguments = Vec::new();
        let mut named = false;
        while !self.skip(")") {
            if !arguments.is_empty() {
                self.expect(",")?;
                if self.skip(")") {
                    break;
                }
            }
            if self.skip("**") {
                named = true;
                arguments.push(format!("**{}", self.expression()?));
            } else if self.skip("*") {
                arguments.push(format!("*__iter({})", self.expression()?));
            } else if let (Some(Token::Name(name)), Some(Token::Op("="))) = (self.peek(), self.tokens.get(self.at + 1))
            {
                let name = name.clone();
                named = true;
                self.at += 2;
                arguments.push(format!("{name}={}", self.expression()?));
            } else if named {
                return Err("an argument without a name stands behind one with a name".into());
            } else {
                arguments.push(self.expression()?);
            }
        }
        Ok(arguments)
    }

    /// Filters after an expression.
    pub(super) fn filters(&mut self) -> Translated {
        let mut read = String::new();
        while self.skip("|") {
            read = format!("{read}|{}", self.filter()?);
        }
        Ok(read)
    }

    pub(super) fn filter(&mut self) -> Translated {
        let name = self.dotted("the name of a filter")?;
        if name == "safe" {
            return Err("the filter safe is supported at the end of what is printed alone".into());
        }
        if !crate::inference::template::filters::FILTERS.contains(&name.as_str()) {
            return Err(format!("the filter {name} is not supported"));
        }
        let arguments = if self.is("(") { self.arguments()? } else { Vec::new() };
        Ok(format!("{name}({})", arguments.join(", ")))
    }

    fn dotted(&mut self, wanted: &str) -> Translated {
        let mut name = self.name(wanted)?;
        while self.skip(".") {
            name = format!("{name}.{}", self.name(wanted)?);
        }
        Ok(name)
    }

    fn test(&mut self, read: String) -> Translated {
        let negated = self.skip_word("not");
        let name = self.dotted("the name of a test")?;
        if !crate::inference::template::filters::TESTS.contains(&name.as_str()) {
            return Err(format!("the test {name} is not supported"));
        }
        let joins = ["else", "or", "and", "is"].iter().any(|word| self.is_word(word));
        let arguments = match self.peek() {
            Some(Token::Op("(")) => self.arguments()?,
            Some(Token::Name(_) | Token::Text(_) | Token::Int(_) | Token::Float(_) | Token::Op("[" | "{"))
                if !joins =>
            {
                let argument = self.primary()?;
                vec![self.postfix(argument)?]
            }
            _ => Vec::new(),
        };
        let read = format!("__is({})", [vec![read, quoted(&name)], arguments].concat().join(", "));
        Ok(if negated { format!("(not {read})") } else { read })
    }

    /// Targets of an assignment.
    fn target(&mut self, dotted: bool) -> Translated {
        let mut items = Vec::new();
        let mut is_tuple = false;
        loop {
            if !items.is_empty() {
                if !self.skip(",") {
                    break;
                }
                is_tuple = true;
                if self.is("=") || self.is_word("in") || self.is(")") {
                    break;
                }
            }
            items.push(match self.skip("(") {
                true => {
                    let inner = self.target(dotted)?;
                    self.expect(")")?;
                    format!("({inner})")
                }
                false => {
                    let name = self.variable("a name")?;
                    match dotted && self.skip(".") {
                        true => format!("{name}.{}", self.name("the name of an attribute")?),
                        false => name,
                    }
                }
            });
        }
        let comma = if is_tuple && items.len() == 1 { "," } else { "" };
        Ok(items.join(", ") + comma)
    }

    pub(super) fn for_tag(&mut self) -> Translated {
        let target = self.target(false)?;
        if !self.skip_word("in") {
            return Err(self.unexpected("in"));
        }
        let mut read = format!("for {target} in __iter({})", self.tuple(false)?);
        if self.skip_word("if") {
            read += &format!(" if {}", self.expression()?);
        }
        if self.skip_word("recursive") {
            read += " recursive";
        }
        Ok(read)
    }

    /// The parts of `set`, and whether a block follows.
    pub(super) fn set_tag(&mut self) -> Result<(String, bool), String> {
        let target = self.target(true)?;
        if self.skip("=") {
            let value = self.tuple(true)?;
            // A macro captures what it reads of outer scopes, including what it assigns.
            let spaces: String = target
                .split(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '_' | '.')))
                .filter_map(|name| Some(format!("{}, ", name.split_once('.')?.0)))
                .collect();
            let value = if spaces.is_empty() { value } else { format!("__last({spaces}{value})") };
            return Ok((format!("set {target} = {value}"), false));
        }
        let filters = self.filters()?;
        Ok((format!("set {target}{filters}"), true))
    }

    fn parameters(&mut self) -> Translated {
        self.expect("(")?;
        let mut parameters = Vec::new();
        while !self.skip(")") {
            if !parameters.is_empty() {
                self.expect(",")?;
                if self.skip(")") {
                    break;
                }
            }
            let name = self.variable("the name of a parameter")?;
            parameters.push(match self.skip("=") {
                true => format!("{name}={}", self.expression()?),
                false => name,
            });
        }
        Ok(parameters.join(", "))
    }

    pub(super) fn macro_tag(&mut self) -> Translated {
        let name = self.variable("the name of a macro")?;
        Ok(format!("macro {name}({})", self.parameters()?))
    }

    pub(super) fn call_tag(&mut self) -> Translated {
        let parameters = if self.is("(") { format!("({})", self.parameters()?) } else { String::new() };
        let called = self.expression()?;
        match called.split_once('(') {
            Some((name, _)) if !name.is_empty() && !name.starts_with("__") && called.ends_with(')') => {
                Ok(format!("call{parameters} {called}"))
            }
            _ => Err("call blocks of anything but a macro are not supported".into()),
        }
    }

    pub(super) fn with_tag(&mut self) -> Translated {
        let mut assigned: Vec<String> = Vec::new();
        let mut names: Vec<String> = Vec::new();
        while self.peek().is_some() {
            if !assigned.is_empty() {
                self.expect(",")?;
            }
            let name = self.variable("a name")?;
            self.expect("=")?;
            let value = self.expression()?;
            // Jinja computes all values before it assigns one.
            if let Some(earlier) = names.iter().find(|earlier| self.names.contains(earlier)) {
                return Err(format!("a with tag that reads {earlier}, which it assigns, is not supported"));
            }
            assigned.push(format!("{name} = {value}"));
            names.push(name);
        }
        Ok(format!("with {}", assigned.join(", ")))
    }
}

/// Prevents constant folding by `minijinja`, whose semantics differ.
fn lasting(written: String) -> String {
    let constant = written.starts_with(|c: char| c == '"' || c.is_ascii_digit());
    match written.as_str() {
        "true" | "false" | "none" => format!("__value({written})"),
        _ if constant => format!("__value({written})"),
        _ => written,
    }
}
