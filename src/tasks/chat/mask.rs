//! Which tokens of a rendered conversation are supervised: those that the assistant writes.
//!
//! A template may render an earlier turn differently once another turn follows: Qwen3's leaves out
//! what the model thought before. So each supervised turn is rendered as the last one, and is what
//! that adds to the prompt that generation would begin from:
//!
//! ```text
//! prompt       <|user|> q1 <|end|> <|assistant|>
//! complete     <|user|> q1 <|end|> <|assistant|> a1 <|end|>
//! supervised                                     ^^^^^^^^^^
//! ```
//!
//! Where the render of one turn begins the render of the next, both share it.

use std::collections::HashSet;
use std::ops::Range;

use fireclay_datasets::conversations::Conversation;
use fireclay_datasets::{RangeEncoder, Tokenizer};

use crate::failure::Failure;
use crate::inference::chat::{ChatTemplate, Dialogue};

/// A mark for each of: where no token may cross, and before and behind what the assistant writes.
/// Unicode's last private characters, which text does not use.
const MARKS: [char; 3] = ['\u{10FFFD}', '\u{10FFFC}', '\u{10FFFB}'];

/// Characters by which the end of a prompt is found again.
const LIKE_PROMPT: usize = 6;

/// A sequence of tokens, and which of them are supervised.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Example {
    /// The whole sequence.
    pub tokens: Vec<u32>,
    /// For each token whether the model learns to write it.
    pub supervised: Vec<bool>,
}

impl Example {
    /// How many tokens are supervised.
    pub fn supervised_count(&self) -> usize {
        self.supervised.iter().filter(|supervised| **supervised).count()
    }

    /// Positions that it takes in a row: its last token is only predicted.
    pub(in crate::tasks) fn positions(&self) -> usize {
        self.tokens.len().saturating_sub(1)
    }

    /// As text, with what is supervised within marks: in colour, or in double brackets.
    pub(in crate::tasks) fn shown(&self, tokenizer: &Tokenizer, colour: bool) -> Result<String, Failure> {
        let Self { tokens, supervised } = self;
        let (begin, end) = if colour { ("\x1b[32m", "\x1b[0m") } else { ("[[", "]]") };
        let (mut shown, mut at) = (String::new(), 0);
        while at < tokens.len() {
            let run = supervised[at..].iter().take_while(|flag| **flag == supervised[at]).count();
            let text = tokenizer.decode_with_control(&tokens[at..at + run])?;
            shown += &if supervised[at] { format!("{begin}{text}{end}") } else { text };
            at += run;
        }
        Ok(shown)
    }
}

/// A text, and the ranges of its bytes that the assistant writes.
struct Rendered {
    text: String,
    supervised: Vec<Range<usize>>,
}

/// Makes examples of conversations.
pub struct Masker<'a> {
    template: &'a ChatTemplate,
    tokenizer: &'a Tokenizer,
    encoder: RangeEncoder,
    /// Tokens that may end a turn.
    control: Vec<bool>,
}

impl<'a> Masker<'a> {
    /// By a template, and the tokens of a model.
    ///
    /// # Errors
    /// If the tokenizer takes no marks.
    pub fn new(template: &'a ChatTemplate, tokenizer: &'a Tokenizer) -> Result<Self, Failure> {
        let control = tokenizer.token_bytes().iter().map(Vec::is_empty).collect();
        Ok(Self { template, tokenizer, encoder: RangeEncoder::new(tokenizer, MARKS[0])?, control })
    }

    /// Whether a token is a control token.
    fn is_control(&self, token: u32) -> bool {
        self.control.get(token as usize).copied().unwrap_or(false)
    }

    /// The control tokens in some examples.
    pub(in crate::tasks) fn controls_of<'b>(&self, examples: impl IntoIterator<Item = &'b Example>) -> HashSet<u32> {
        let tokens = examples.into_iter().flat_map(|example| example.tokens.iter().copied());
        tokens.filter(|token| self.is_control(*token)).collect()
    }

    /// The examples of a conversation: one, or one a supervised turn where the template renders
    /// them differently. Each ends with its last supervised token.
    ///
    /// # Errors
    /// If the template refuses the conversation, or ends a turn without a token that ends generation.
    pub fn examples(&self, conversation: &Conversation) -> Result<Vec<Example>, Failure> {
        let Conversation { messages, tools, variables, supervised } = conversation;
        let mut dialogue = Dialogue { messages: messages.clone(), tools: tools.clone(), variables: variables.clone() };
        if !tools.is_null() && !self.template.knows("tools") {
            return Err(Failure::new("there are tools, but the chat template has no use for them"));
        }
        if serde_json::to_string(messages).is_ok_and(|text| text.contains(MARKS)) {
            return Err(Failure::new("a message has one of Unicode's last private characters: leave it out"));
        }
        if dialogue.spells_control_token(self.tokenizer)? {
            dialogue = dialogue.escaped(self.tokenizer, MARKS[0])?;
        }
        let rendered = match self.marked(&dialogue, supervised)? {
            Some(rendered) => vec![rendered],
            None => self.compared(&dialogue, supervised)?,
        };
        rendered.into_iter().map(|rendered| self.encoded(rendered)).collect()
    }

    /// By the template's own `{% generation %}`.
    fn marked(&self, dialogue: &Dialogue, supervised: &[bool]) -> Result<Option<Rendered>, Failure> {
        let [_, begin, end] = MARKS;
        let Some(marked) = self.template.render_marked(dialogue, [begin, end])? else { return Ok(None) };
        let (mut text, mut ranges, mut from) = (String::new(), Vec::new(), 0);
        for part in marked.split_inclusive([begin, end]) {
            let body = part.trim_end_matches([begin, end]);
            text.push_str(body);
            match part.chars().next_back() {
                Some(mark) if mark == begin => from = text.len(),
                Some(mark) if mark == end => ranges.push(from..text.len()),
                _ => {}
            }
        }
        let by_assistant: Vec<bool> = (dialogue.messages.iter().zip(supervised))
            .filter(|(message, _)| message["role"] == "assistant")
            .map(|(_, supervised)| *supervised)
            .collect();
        if by_assistant.contains(&false) {
            if by_assistant.len() != ranges.len() {
                return Err(Failure::new(format!(
                    "the chat template marks {} parts with generation, but {} messages are the assistant's: which of \
                     them are not supervised cannot be told",
                    ranges.len(),
                    by_assistant.len()
                )));
            }
            let mut of_message = by_assistant.iter();
            ranges.retain(|_| of_message.next() == Some(&true));
        }
        Ok(Some(Rendered { text, supervised: ranges }))
    }

    /// By comparing each supervised turn with the prompt for it.
    fn compared(&self, dialogue: &Dialogue, supervised: &[bool]) -> Result<Vec<Rendered>, Failure> {
        let mut all: Vec<Rendered> = Vec::new();
        for (turn, _) in supervised.iter().enumerate().filter(|(_, supervised)| **supervised) {
            let upto = |count: usize| Dialogue { messages: dialogue.messages[..count].to_vec(), ..dialogue.clone() };
            let (prompt, complete) =
                (self.template.render(&upto(turn))?, self.template.render_complete(&upto(turn + 1))?);
            let (complete, from) = self.answered(&prompt, complete, &upto(turn), turn)?;
            let range = from..complete.len();
            match all.last_mut() {
                Some(last) if complete.starts_with(&last.text) && last.text.len() <= from => {
                    last.text = complete;
                    last.supervised.push(range);
                }
                _ => all.push(Rendered { text: complete, supervised: vec![range] }),
            }
        }
        Ok(all)
    }

    /// The text of a prompt with its answer, and where the answer begins.
    fn answered(
        &self,
        prompt: &str,
        complete: String,
        before: &Dialogue,
        turn: usize,
    ) -> Result<(String, usize), Failure> {
        if complete.starts_with(prompt) {
            return Ok((complete, prompt.len()));
        }
        // Mistral's templates leave the system message out once there has been an answer.
        // Generation has it, so training does, too.
        if let Some(answer) = behind_last(&complete, prompt) {
            return Ok((format!("{prompt}{answer}"), prompt.len()));
        }
        // DeepSeek's open a thought in the prompt, and leave it out of the answer.
        let shared = shared_prefix(prompt, &complete);
        if shared < self.template.render_complete(before)?.len() {
            return Err(Failure::new(format!(
                "the chat template renders the messages before turn {} differently once the turn exists, so that \
                 what the assistant writes cannot be told: mark it with {{% generation %}} in the template",
                turn + 1
            )));
        }
        Ok((complete, shared))
    }

    fn encoded(&self, rendered: Rendered) -> Result<Example, Failure> {
        let Rendered { mut text, mut supervised } = rendered;
        let mut tokens = self.encoder.encode(&text)?;
        let crosses = |(_, token): &(u32, Range<usize>)| {
            supervised.iter().any(|range| token.start < range.start && range.start < token.end)
        };
        if tokens.iter().any(crosses) {
            // Generation begins with a token of its own.
            let mark = self.encoder.mark();
            for at in (0..supervised.len()).rev() {
                text.insert(supervised[at].start, mark);
                supervised[at] = supervised[at].start + mark.len_utf8()..supervised[at].end + mark.len_utf8();
                for later in &mut supervised[at + 1..] {
                    *later = later.start + mark.len_utf8()..later.end + mark.len_utf8();
                }
            }
            tokens = self.encoder.encode(&text)?;
        }
        let within = |token: &Range<usize>, range: &Range<usize>| range.start <= token.start && token.end <= range.end;
        let mut flags = vec![false; tokens.len()];
        let mut last = 0;
        for range in &supervised {
            let inside: Vec<usize> = (0..tokens.len()).filter(|at| within(&tokens[*at].1, range)).collect();
            let is_control = |at: &usize| self.is_control(tokens[*at].0);
            let blank_behind = |at: &usize| text[tokens[*at].1.end..range.end].trim().is_empty();
            // A template's own mark may leave out the end of the turn.
            let next = inside.last().map(|last| last + 1).filter(|next| *next < tokens.len());
            let stop = match inside.iter().copied().rfind(is_control).filter(blank_behind) {
                Some(_) => next.unwrap_or(tokens.len()),
                None => next.filter(is_control).ok_or_else(|| self.unended(&tokens, &inside))? + 1,
            };
            for flag in &mut flags[inside.first().copied().unwrap_or(stop)..stop] {
                *flag = true;
            }
            last = stop;
        }
        tokens.truncate(last);
        flags.truncate(last);
        Ok(Example { tokens: tokens.into_iter().map(|(token, _)| token).collect(), supervised: flags })
    }

    fn unended(&self, tokens: &[(u32, Range<usize>)], inside: &[usize]) -> Failure {
        let all: Vec<u32> = inside.iter().map(|at| tokens[*at].0).collect();
        let tail = self.tokenizer.decode(&all[all.len().saturating_sub(6)..]).unwrap_or_default();
        Failure::new(format!(
            "the chat template ends a turn of the assistant with {tail:?}, in which there is no control token: \
             generation would not stop there; let the template write the model's end token behind the content"
        ))
    }
}

/// What follows the end of `prompt` in `complete`, if that is the same for a few characters.
fn behind_last<'a>(complete: &'a str, prompt: &str) -> Option<&'a str> {
    let from = prompt.char_indices().rev().nth(LIKE_PROMPT - 1)?.0;
    let end = &prompt[from..];
    complete.rfind(end).map(|at| &complete[at + end.len()..])
}

/// Bytes that both strings begin with.
fn shared_prefix(one: &str, other: &str) -> usize {
    one.char_indices()
        .zip(other.chars())
        .find(|((_, a), b)| a != b)
        .map_or(one.len().min(other.len()), |((at, _), _)| at)
}
