//! The tokens of a tag.

/// A token of an expression.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token {
    Name(String),
    Text(String),
    Int(i128),
    Float(f64),
    Op(&'static str),
}

/// Longer ones first.
const OPERATORS: [&str; 26] = [
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}", ">", "<", "=", ".",
    ":", "|", ",", ";",
];
/// Tokenizes a tag.
pub(super) struct Lexer<'a> {
    source: &'a str,
    pub(super) at: usize,
    /// Open brackets.
    nested: Vec<&'static str>,
}

/// The next token.
pub(super) enum Lexed {
    Token(Token),
    /// The end of the tag, with its white-space sign.
    End(&'static str),
}

impl<'a> Lexer<'a> {
    /// Starts at an offset.
    pub(super) fn new(source: &'a str, at: usize) -> Self {
        Self { source, at, nested: Vec::new() }
    }

    /// The next token, or the end of the tag, `end`.
    pub(super) fn next(&mut self, end: &'static str) -> Result<Lexed, String> {
        let source = self.source;
        let rest = source[self.at..].trim_start();
        self.at = source.len() - rest.len();
        if self.nested.is_empty() {
            let signs: &[&str] = if end == "%}" { &["", "-", "+"] } else { &["", "-"] };
            for sign in signs {
                if rest.strip_prefix(sign).is_some_and(|rest| rest.starts_with(end)) {
                    self.at += sign.len() + end.len();
                    return Ok(Lexed::End(sign));
                }
            }
        }
        let Some(first) = rest.chars().next() else { return Err(format!("a tag has no end: {end} is missing")) };
        if first.is_ascii_digit() {
            return self.number(rest);
        }
        if first == '"' || first == '\'' {
            let end = closing_quote(rest, first).ok_or("a string has no end")?;
            self.at += end + 1;
            return Ok(Lexed::Token(Token::Text(unescape(&rest[1..end])?)));
        }
        if first.is_alphabetic() || first == '_' {
            let length = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
            let name = &rest[..length];
            if !name.is_ascii() {
                return Err(format!("the name {name} has letters beyond ASCII, which is not supported"));
            }
            self.at += length;
            return Ok(Lexed::Token(Token::Name(name.into())));
        }
        let operator = OPERATORS.into_iter().find(|operator| rest.starts_with(operator));
        let operator = operator.ok_or_else(|| format!("unexpected {first:?}"))?;
        match operator {
            "(" => self.nested.push(")"),
            "[" => self.nested.push("]"),
            "{" => self.nested.push("}"),
            ")" | "]" | "}" if self.nested.pop() != Some(operator) => return Err(format!("unexpected {operator}")),
            _ => {}
        }
        self.at += operator.len();
        Ok(Lexed::Token(Token::Op(operator)))
    }

    fn number(&mut self, rest: &str) -> Result<Lexed, String> {
        let digits = |text: &str| text.find(|c: char| !c.is_ascii_digit() && c != '_').unwrap_or(text.len());
        let radix = [("0x", 16), ("0o", 8), ("0b", 2)];
        let lower = rest.get(..2).unwrap_or_default().to_ascii_lowercase();
        if let Some((_, radix)) = radix.into_iter().find(|(mark, _)| *mark == lower) {
            let length = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
            let value = i128::from_str_radix(&rest[2..length].replace('_', ""), radix);
            self.at += length;
            return value.map(|value| Lexed::Token(Token::Int(value))).map_err(|_| format!("{} is no number", rest));
        }
        let mut length = digits(rest);
        let mut float = false;
        let fraction = rest[length..].strip_prefix('.').map_or(0, digits);
        if fraction > 0 {
            (length, float) = (length + 1 + fraction, true);
        }
        if let Some(exponent) = rest[length..].strip_prefix(['e', 'E']) {
            let sign = usize::from(exponent.starts_with(['+', '-']));
            let exponent = digits(&exponent[sign..]);
            if exponent > 0 {
                (length, float) = (length + 1 + sign + exponent, true);
            }
        }
        self.at += length;
        let number = rest[..length].replace('_', "");
        let wrong = || format!("{number} has more digits than are supported");
        Ok(Lexed::Token(match float {
            true => Token::Float(number.parse().map_err(|_| wrong())?),
            false => Token::Int(number.parse().map_err(|_| wrong())?),
        }))
    }
}

fn closing_quote(text: &str, quote: char) -> Option<usize> {
    let mut escaped = false;
    text.char_indices().skip(1).find_map(|(at, c)| {
        let ends = c == quote && !escaped;
        escaped = c == '\\' && !escaped;
        ends.then_some(at)
    })
}

/// A string literal, parsed as in Python.
fn unescape(text: &str) -> Result<String, String> {
    let mut read = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        if c != '\\' {
            read.push(c);
            continue;
        }
        let wrong = || format!("an escape in the string {text:?} is no character");
        match chars.next() {
            Some('\n') => {}
            Some(c @ ('\\' | '\'' | '"')) => read.push(c),
            Some('n') => read.push('\n'),
            Some('t') => read.push('\t'),
            Some('r') => read.push('\r'),
            Some('a') => read.push('\x07'),
            Some('b') => read.push('\x08'),
            Some('f') => read.push('\x0c'),
            Some('v') => read.push('\x0b'),
            Some('x') => read.push(escape(&mut chars, 2).ok_or_else(wrong)?),
            Some('u') => read.push(escape(&mut chars, 4).ok_or_else(wrong)?),
            Some('U') => read.push(escape(&mut chars, 8).ok_or_else(wrong)?),
            Some('N') => return Err("escapes of characters by name are not supported".into()),
            Some(c) if c.is_digit(8) => {
                let mut number = c.to_digit(8).unwrap_or_default();
                for _ in 0..2 {
                    let Some(digit) = chars.as_str().chars().next().and_then(|c| c.to_digit(8)) else { break };
                    number = number * 8 + digit;
                    chars.next();
                }
                read.push(char::from_u32(number).ok_or_else(wrong)?);
            }
            Some(c) => read.extend(['\\', c]),
            None => return Err(wrong()),
        }
    }
    Ok(read)
}

fn escape(chars: &mut std::str::Chars<'_>, digits: usize) -> Option<char> {
    let code = chars.as_str().get(..digits).filter(|code| code.bytes().all(|c| c.is_ascii_hexdigit()))?;
    *chars = chars.as_str().get(digits..)?.chars();
    u32::from_str_radix(code, 16).ok().and_then(char::from_u32)
}
