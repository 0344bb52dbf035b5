//! Translates a Jinja chat template to one for `minijinja`, whose expressions are calls of Python's
//! operations.
//!
//! `minijinja` has its own operators, literals and attributes: `%` formats no strings, tuples are
//! lists, `x.items` is a key, `none` has a length. So each expression is parsed as in Jinja and
//! emitted as calls of the functions in `operators.rs`. Text, white space, loops, macros and scopes
//! stay `minijinja`'s, except that `{% with %}` is inserted where Jinja has an extra scope. Tags
//! that no chat template of `transformers` can have are refused.

use super::GENERATION;
use lexer::{Lexed, Lexer, Token};
use parser::Parser;

mod lexer;
mod parser;

/// Jinja tags without use in chat templates.
const REFUSED_TAGS: [&str; 8] = ["autoescape", "block", "do", "extends", "from", "import", "include", "print"];

/// The template for `minijinja`, line by line.
///
/// # Errors
/// If it is invalid or uses an unsupported feature; names the line.
pub(in crate::inference::template) fn translate(source: &str) -> Result<String, String> {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut translation = Translation { source: &source, at: 0, written: String::new(), open: Vec::new() };
    translation.all().map_err(|wrong| {
        let line = source[..translation.at.min(source.len())].matches('\n').count() + 1;
        format!("line {line}: {wrong}")
    })?;
    Ok(translation.written)
}

/// An open tag.
struct Open {
    tag: &'static str,
    /// What closes it in `minijinja`.
    end: &'static str,
}

struct Translation<'a> {
    source: &'a str,
    at: usize,
    written: String,
    open: Vec<Open>,
}

impl<'a> Translation<'a> {
    fn rest(&self) -> &'a str {
        &self.source[self.at..]
    }

    fn all(&mut self) -> Result<(), String> {
        loop {
            let rest = self.rest();
            let next = ["{{", "{%", "{#"].iter().filter_map(|mark| rest.find(mark)).min();
            let Some(next) = next else {
                self.written.push_str(rest);
                break;
            };
            self.written.push_str(&rest[..next]);
            self.at += next;
            let (from, line) = (self.at, self.written.len());
            match &self.rest()[..2] {
                "{#" => {
                    let length = self.rest().find("#}").ok_or("a comment has no end")? + 2;
                    self.copy(length);
                }
                "{%" => match raw(self.rest()) {
                    Some(Ok((begin, length))) => {
                        self.copy(begin);
                        // Only after this tag does Jinja keep the line's end.
                        if !self.written.ends_with("-%}") {
                            self.written.insert(self.written.len() - 2, '+');
                        }
                        self.copy(length - begin);
                    }
                    Some(Err(wrong)) => return Err(wrong),
                    None => self.tag()?,
                },
                _ => self.output()?,
            }
            // Lines keep their numbers, for errors.
            let lines = self.source[from..self.at].matches('\n').count();
            let missing = lines.saturating_sub(self.written[line..].matches('\n').count());
            let sign = self.written[..self.written.len() - 2].ends_with(['-', '+']);
            let end = self.written.len() - if sign { 3 } else { 2 };
            self.written.insert_str(end, &"\n".repeat(missing));
        }
        match self.open.last() {
            Some(open) => Err(format!("the tag {} has no end", open.tag)),
            None => Ok(()),
        }
    }

    fn copy(&mut self, length: usize) {
        self.written.push_str(&self.rest()[..length]);
        self.at += length;
    }

    /// The tokens of a tag, with the white-space signs around it.
    fn tokens(&mut self, end: &'static str) -> Result<(&'a str, Vec<Token>, &'a str), String> {
        let from = self.at + 2;
        let sign = |at: usize| match self.source.as_bytes().get(at) {
            Some(b'-') => "-",
            Some(b'+') => "+",
            _ => "",
        };
        let before = sign(from);
        let mut lexer = Lexer::new(self.source, from + before.len());
        let mut tokens = Vec::new();
        let read = loop {
            match lexer.next(end) {
                Ok(Lexed::Token(token)) => tokens.push(token),
                Ok(Lexed::End(behind)) => break Ok((before, tokens, behind)),
                Err(wrong) => break Err(wrong),
            }
        };
        self.at = lexer.at;
        read
    }

    fn parser(&self, tokens: Vec<Token>) -> Parser {
        let in_macro = self.open.iter().any(|open| matches!(open.tag, "macro" | "call"));
        Parser::new(tokens, in_macro)
    }

    fn output(&mut self) -> Result<(), String> {
        let (before, mut tokens, behind) = self.tokens("}}")?;
        // With unescaped output, `safe` would escape what is added to it.
        if tokens.ends_with(&[Token::Op("|"), Token::Name("safe".into())]) {
            tokens.truncate(tokens.len() - 2);
        }
        let mut parser = self.parser(tokens);
        let expression = parser.tuple(true)?;
        parser.finished()?;
        self.written.push_str(&format!("{{{{{before} {expression} {behind}}}}}"));
        Ok(())
    }

    fn tag(&mut self) -> Result<(), String> {
        let start = self.at;
        let (before, tokens, behind) = self.tokens("%}")?;
        let end = std::mem::replace(&mut self.at, start);
        let mut parser = self.parser(tokens);
        let tag = parser.name("a tag")?;
        let written = match tag.as_str() {
            "for" => {
                self.open.push(Open { tag: "for", end: "endfor" });
                parser.for_tag()?
            }
            "if" => {
                self.open.push(Open { tag: "if", end: "endif" });
                format!("if {}", parser.tuple(false)?)
            }
            "elif" => {
                self.within(&["if"], "elif")?;
                format!("elif {}", parser.tuple(false)?)
            }
            "else" => {
                self.within(&["if", "for"], "else")?;
                match self.open.last_mut() {
                    // Assignments in the body of an empty loop's `else` stay there.
                    Some(open) if open.tag == "for" => {
                        open.end = "endwith %}{% endfor";
                        "else %}{% with".into()
                    }
                    _ => "else".into(),
                }
            }
            "set" => {
                let (written, block) = parser.set_tag()?;
                match block {
                    true => {
                        self.open.push(Open { tag: "set", end: "endwith %}{% endset" });
                        written + " %}{% with"
                    }
                    false => written,
                }
            }
            "macro" => {
                self.open.push(Open { tag: "macro", end: "endmacro" });
                parser.macro_tag()?
            }
            "call" => {
                self.open.push(Open { tag: "call", end: "endcall" });
                parser.call_tag()?
            }
            "filter" => {
                self.open.push(Open { tag: "filter", end: "endwith %}{% endfilter" });
                let first = parser.filter()?;
                format!("filter {first}{} %}}{{% with", parser.filters()?)
            }
            "with" => {
                self.open.push(Open { tag: "with", end: "endwith" });
                parser.with_tag()?
            }
            // What the assistant writes, for training: variables set within it stay local to it.
            "generation" => {
                self.open.push(Open { tag: "generation", end: "endwith %}{% endfilter" });
                format!("filter {GENERATION} %}}{{% with")
            }
            "break" | "continue" => {
                let around = self.open.iter().rev().find(|open| !matches!(open.tag, "if" | "with" | "set" | "filter"));
                if around.is_none_or(|open| open.tag != "for") {
                    return Err(format!("{tag} stands in no loop"));
                }
                tag.clone()
            }
            other if REFUSED_TAGS.contains(&other) => {
                return Err(format!("the tag {other} is not supported in chat templates"));
            }
            other => match other.strip_prefix("end").and_then(|tag| Some((tag, self.open.pop()?))) {
                Some((tag, open)) if open.tag == tag => open.end.into(),
                Some((_, open)) => return Err(format!("{other}, where the tag {} waits for its end", open.tag)),
                None => return Err(format!("unknown tag {other}")),
            },
        };
        parser.finished()?;
        self.at = end;
        self.written.push_str(&format!("{{%{before} {written} {behind}%}}"));
        Ok(())
    }

    fn within(&self, tags: &[&str], tag: &str) -> Result<(), String> {
        match self.open.last() {
            Some(open) if tags.contains(&open.tag) => Ok(()),
            _ => Err(format!("{tag} belongs to no tag")),
        }
    }
}

/// The length of a raw block's first tag at the start of a text, and of the whole block.
fn raw(text: &str) -> Option<Result<(usize, usize), String>> {
    /// The length of `{% name %}` at the start of the text.
    fn lone(text: &str, name: &str, signs: &[char]) -> Option<usize> {
        let inner = text.strip_prefix("{%")?;
        let inner = inner.strip_prefix(['-', '+']).unwrap_or(inner).trim_start().strip_prefix(name)?.trim_start();
        let behind = inner.strip_prefix(signs).unwrap_or(inner).strip_prefix("%}")?;
        Some(text.len() - behind.len())
    }
    let begin = lone(text, "raw", &['-'])?;
    let ends = text[begin..].match_indices("{%").map(|(at, _)| begin + at);
    let mut lengths = ends.filter_map(|at| Some((begin, at + lone(&text[at..], "endraw", &['-', '+'])?)));
    Some(lengths.next().ok_or_else(|| "the tag raw has no end".to_string()))
}
