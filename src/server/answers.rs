//! The sequences of a request as they arrive: tokens to text, stop strings, tool calls.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::{Instant, timeout_at};

use super::engine::{NewTokens, SequenceEvent};
use super::http::error::ApiError;
use super::log::Record;
use super::served::ServedGenerator;
use super::tools::{Calls, ToolCall, ToolCalls};
use crate::inference::generation::Writer;
use crate::inference::generation::scheduler::{Finish, OutputToken};

/// A finish reason, in OpenAI's terms.
pub(super) type FinishReason = &'static str;

/// New output of a sequence.
#[derive(Debug)]
pub(super) struct Piece {
    /// Index of the sequence in its request.
    pub(super) choice: usize,
    pub(super) text: String,
    pub(super) calls: Vec<ToolCall>,
    /// Prompt tokens, if their log-probabilities were requested; they precede all others.
    pub(super) prompt: Vec<OutputToken>,
    /// The new tokens: those of `text`, except for text held back now or before.
    pub(super) tokens: Vec<OutputToken>,
    pub(super) finish: Option<FinishReason>,
}

/// How output is parsed.
#[derive(Clone, Debug)]
pub(super) struct Taken {
    pub(super) stop: Vec<String>,
    /// The format of tool calls, if they are extracted.
    pub(super) calls: Option<Calls>,
    /// Whether one answer may have several calls.
    pub(super) parallel_calls: bool,
    /// The last prompt tokens of each choice, as context for decoding the text.
    pub(super) prompts: Vec<Vec<u32>>,
    /// Whether only the prompt's log-probabilities are wanted; the sampled token is dropped.
    pub(super) nothing: bool,
}

/// The sequences of a request. Dropping it also ends them on the device.
pub(super) struct Answers<'a> {
    choices: Vec<Option<Choice<'a>>>,
    deadline: Instant,
    record: Arc<Record>,
    /// Tokens generated so far, stop tokens included.
    pub(super) tokens: usize,
    /// Prompt tokens found in the KV cache.
    pub(super) cached: usize,
    nothing: bool,
}

struct Choice<'a> {
    events: UnboundedReceiver<SequenceEvent>,
    writer: Writer<'a>,
    calls: Option<ToolCalls>,
    called: usize,
    most_calls: usize,
}

impl<'a> Answers<'a> {
    pub(super) fn new(
        served: &'a ServedGenerator,
        taken: &'a Taken,
        events: Vec<UnboundedReceiver<SequenceEvent>>,
        deadline: Instant,
        record: Arc<Record>,
    ) -> Self {
        let choice = |(at, events): (usize, _)| {
            let prompt = taken.prompts.get(at).map_or(&[][..], Vec::as_slice);
            Some(Choice {
                events,
                writer: Writer::new(&served.tokenizer, prompt, &taken.stop),
                calls: taken.calls.clone().map(ToolCalls::new),
                called: 0,
                most_calls: if taken.parallel_calls { usize::MAX } else { 1 },
            })
        };
        Self {
            choices: events.into_iter().enumerate().map(choice).collect(),
            deadline,
            record,
            tokens: 0,
            cached: 0,
            nothing: taken.nothing,
        }
    }

    /// The next output of any sequence; `None` when all are complete.
    ///
    /// # Errors
    /// If generation fails or exceeds the time limit; nothing follows then.
    pub(super) async fn next(&mut self) -> Option<Result<Piece, ApiError>> {
        loop {
            if self.choices.iter().all(Option::is_none) {
                return None;
            }
            let (choices, deadline) = (&mut self.choices, self.deadline);
            let next = poll_fn(|context| {
                for (at, choice) in choices.iter_mut().enumerate() {
                    let Some(waiting) = choice else { continue };
                    if let Poll::Ready(event) = waiting.events.poll_recv(context) {
                        return Poll::Ready((at, event));
                    }
                }
                Poll::Pending
            });
            let piece = match timeout_at(deadline, next).await {
                Ok((at, Some(event))) => self.take(at, event),
                Ok((_, None)) => Err(ApiError::stopping()),
                Err(_) => Err(ApiError::too_slow()),
            };
            match piece {
                Ok(piece) if piece.text.is_empty() && piece.calls.is_empty() && piece.finish.is_none() => {
                    // Tokens of an incomplete character; their log-probabilities come with the next
                    // ones.
                    if !piece.tokens.is_empty() || !piece.prompt.is_empty() {
                        return Some(Ok(piece));
                    }
                }
                Ok(piece) => return Some(Ok(piece)),
                Err(error) => {
                    self.record.error(&error.message);
                    self.choices.clear();
                    return Some(Err(error));
                }
            }
        }
    }

    fn take(&mut self, at: usize, event: SequenceEvent) -> Result<Piece, ApiError> {
        let Some(mut choice) = self.choices[at].take() else { return Err(ApiError::stopping()) };
        let mut piece = Piece {
            choice: at,
            text: String::new(),
            calls: Vec::new(),
            prompt: Vec::new(),
            tokens: Vec::new(),
            finish: None,
        };
        let mut stopped = None;
        match event {
            SequenceEvent::Tokens(NewTokens { prompt, tokens, cached }) => {
                self.cached += cached;
                piece.prompt = prompt;
                let mut count = 0;
                for token in tokens {
                    if self.nothing {
                        stopped = Some("length");
                        break;
                    }
                    // Tokens after a stop string are neither delivered nor counted.
                    count += 1;
                    let text = &mut piece.text;
                    let reached = choice.writer.push(token.token, &mut |more| text.push_str(more));
                    piece.tokens.push(token);
                    if reached.map_err(|failure| ApiError::server(failure.to_string()))? {
                        stopped = Some("stop");
                        break;
                    }
                }
                self.tokens += count;
                self.record.written(count, &piece.text);
            }
            SequenceEvent::Finished(finish) => {
                stopped = Some(match finish {
                    Finish::End | Finish::Complete => "stop",
                    Finish::Length => "length",
                    Finish::NotANumber => {
                        return Err(ApiError::server(
                            "the model's logits are NaN: its weights are damaged, or its values overflow in bf16 or \
                             f16",
                        ));
                    }
                    Finish::Filter => return Err(ApiError::grammar()),
                });
            }
            SequenceEvent::Failed(failure) => return Err(failure.into()),
            SequenceEvent::Stopping => return Err(ApiError::stopping()),
        }
        let Choice { events, writer, mut calls, mut called, most_calls } = choice;
        if let Some(taken) = &mut calls {
            (piece.text, piece.calls) = taken.push(&piece.text);
        }
        match stopped {
            None => {
                called += piece.calls.len();
                self.choices[at] = Some(Choice { events, writer, calls, called, most_calls });
            }
            Some(reason) => {
                // The text that was held back.
                let mut rest = String::new();
                writer.finish(&mut |more| rest.push_str(more));
                self.record.written(0, &rest);
                match calls {
                    Some(mut taken) => {
                        let (words, more) = taken.push(&rest);
                        piece.text.push_str(&words);
                        piece.calls.extend(more);
                        let (words, more) = taken.finish();
                        piece.text.push_str(&words);
                        piece.calls.extend(more);
                    }
                    None => piece.text.push_str(&rest),
                }
                called += piece.calls.len();
                let reason = if called > 0 && reason == "stop" { "tool_calls" } else { reason };
                self.record.finished(reason);
                piece.finish = Some(reason);
            }
        }
        let before = called - piece.calls.len();
        piece.calls.truncate(most_calls.saturating_sub(before));
        Ok(piece)
    }
}
