//! Conversations and preference pairs for fine-tuning, in the layouts that people publish.
//!
//! | layout | fields of a record |
//! |---|---|
//! | messages | `messages`: objects with `role` and `content`; `tools`, `chat_template_kwargs` |
//! | prompt and completion | `prompt`, `completion`: strings, or lists of messages |
//! | Alpaca | `instruction`, `input`, `output`; `system` |
//! | ShareGPT | `conversations`: objects with `from` and `value`; `system`, `tools` |
//! | preference | `chosen`, `rejected`, and maybe `prompt`: strings, or lists of messages |
//!
//! Lists in `chosen` and `rejected` may repeat the prompt, as UltraFeedback's do. A record with these
//! and `messages` is a pair to [`Preference::read`], and a conversation to [`Conversations::read`].
//!
//! Records are JSON lines, JSON arrays, tables or Parquet, as [`TextSource`] reads them.

mod layout;

use std::ops::ControlFlow;
use std::path::Path;

use serde_json::{Map, Value, json};

use crate::embedded::chats::chats;
use crate::error::DataError;
use crate::sources::TextSource;

pub use layout::Layout;

/// A conversation to learn from.
#[derive(Clone, Debug, PartialEq)]
pub struct Conversation {
    /// Objects with `role`, `content`, and what else a chat template knows, such as `tool_calls`.
    /// Fields that are null are left out.
    pub messages: Vec<Value>,
    /// Tools that the model may call; null for none.
    pub tools: Value,
    /// Other variables of the chat template, such as `enable_thinking`.
    pub variables: Map<String, Value>,
    /// For each message whether the model learns to write it: by default those of the assistant,
    /// of a prompt with a completion those of the completion alone. A message whose `weight` is 0
    /// is not learned.
    pub supervised: Vec<bool>,
}

/// Two continuations of one conversation, of which the first is preferred.
#[derive(Clone, Debug, PartialEq)]
pub struct Preference {
    /// The prompt and the preferred continuation, of which the continuation is supervised.
    pub chosen: Conversation,
    /// The same prompt and the other continuation.
    pub rejected: Conversation,
}

/// The conversations of a file or folder.
#[derive(Clone, Debug, PartialEq)]
pub struct Conversations {
    /// How their records are laid out.
    pub layout: Layout,
    /// In the order of the files.
    pub all: Vec<Conversation>,
}

impl Conversation {
    /// A prompt with its answer, which is supervised.
    fn of_prompt(prompt: String, answer: String) -> Self {
        let turn = |role: &str, content: String| json!({ "role": role, "content": content });
        Self {
            messages: vec![turn("user", prompt), turn("assistant", answer)],
            tools: Value::Null,
            variables: Map::new(),
            supervised: vec![false, true],
        }
    }
}

/// The name of the embedded conversations.
pub const EMBEDDED_CHATS: &str = "embedded:chats";

impl Conversations {
    /// The conversations in `path`, or the embedded ones for [`EMBEDDED_CHATS`].
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn open(path: &Path) -> Result<Self, DataError> {
        match path.to_str() {
            Some(EMBEDDED_CHATS) => {
                let all = chats().into_iter().map(|[prompt, answer]| Conversation::of_prompt(prompt, answer)).collect();
                Ok(Self { layout: Layout::Messages, all })
            }
            _ => Self::read(path),
        }
    }

    /// Reads all records of `path`; the first record shows the layout.
    ///
    /// # Errors
    /// If a file cannot be read, there is no record, or a record is not of the first one's layout.
    /// Preference pairs are refused.
    pub fn read(path: &Path) -> Result<Self, DataError> {
        let mut all = Vec::new();
        let layout = records(path, Layout::of, |layout, record| {
            if layout == Layout::Preference {
                return Err("has preference pairs (chosen, rejected): train on them with --task preference".into());
            }
            all.push(layout.conversation(record)?);
            Ok(())
        })?;
        Ok(Self { layout, all })
    }
}

impl Preference {
    /// Reads all pairs of `path`.
    ///
    /// # Errors
    /// If a file cannot be read, there is no record, or a record is no pair.
    pub fn read(path: &Path) -> Result<Vec<Self>, DataError> {
        let mut all = Vec::new();
        records(path, Layout::of_pair, |layout, record| {
            if layout != Layout::Preference {
                return Err(format!("has {layout}, but a preference pair has the fields chosen and rejected"));
            }
            all.push(layout::preference(record)?);
            Ok(())
        })?;
        Ok(all)
    }
}

/// Hands each record of `path` to `each`, with the layout `of` the first.
fn records(
    path: &Path,
    of: impl Fn(&Map<String, Value>) -> Result<Layout, String>,
    mut each: impl FnMut(Layout, Map<String, Value>) -> Result<(), String>,
) -> Result<Layout, DataError> {
    let source = TextSource::records(path)?;
    let mut found = None;
    let mut number = 0;
    source.read(false, &mut |piece| {
        number += 1;
        let refused = |reason: String| DataError::Refused {
            path: path.to_path_buf(),
            reason: format!(
                "record {number}{}{reason}",
                if reason.starts_with("message") || reason.starts_with("turn") { ", " } else { " " }
            ),
        };
        let Ok(Value::Object(record)) = serde_json::from_str(&piece.text) else {
            return Err(DataError::Refused {
                path: path.to_path_buf(),
                reason: "holds text, and not records: write JSON lines (.jsonl), JSON, a table or Parquet".into(),
            });
        };
        let layout = match found {
            Some(layout) => layout,
            None => *found.insert(of(&record).map_err(refused)?),
        };
        each(layout, record).map_err(refused)?;
        Ok(ControlFlow::Continue(()))
    })?;
    found.ok_or_else(|| DataError::Empty { path: path.to_path_buf() })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn read(text: &str) -> Result<Conversations, String> {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("chats.jsonl");
        fs::write(&file, text).expect("writable");
        Conversations::read(&file).map_err(|error| error.to_string().replace(&file.display().to_string(), "FILE"))
    }

    /// Role and content of each message, with `*` where it is supervised.
    fn shown(conversation: &Conversation) -> Vec<String> {
        let Conversation { messages, supervised, .. } = conversation;
        let show = |(message, supervised): (&Value, &bool)| {
            let mark = if *supervised { "*" } else { "" };
            format!("{mark}{}: {}", message["role"].as_str().unwrap_or("?"), message["content"].as_str().unwrap_or("-"))
        };
        messages.iter().zip(supervised).map(show).collect()
    }

    #[test]
    fn each_layout_becomes_messages_of_which_the_assistants_are_supervised() {
        let cases = [
            (
                r#"{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"},
                    {"role": "assistant", "content": "a"}], "id": 3}"#,
                Layout::Messages,
                vec!["system: s", "user: q", "*assistant: a"],
            ),
            (r#"{"prompt": "q", "completion": "a"}"#, Layout::PromptCompletion, vec!["user: q", "*assistant: a"]),
            (
                r#"{"prompt": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"},
                    {"role": "user", "content": "r"}], "completion": [{"role": "assistant", "content": "b"}]}"#,
                Layout::PromptCompletion,
                vec!["user: q", "assistant: a", "user: r", "*assistant: b"],
            ),
            (
                r#"{"instruction": "do", "input": "this", "output": "done"}"#,
                Layout::Alpaca,
                vec!["user: do\n\nthis", "*assistant: done"],
            ),
            (
                r#"{"instruction": "do", "input": "", "output": "done", "system": "s"}"#,
                Layout::Alpaca,
                vec!["system: s", "user: do", "*assistant: done"],
            ),
            (
                r#"{"system": "s", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"},
                    {"from": "observation", "value": "o"}, {"from": "gpt", "value": "b"}]}"#,
                Layout::ShareGpt,
                vec!["system: s", "user: q", "*assistant: a", "tool: o", "*assistant: b"],
            ),
        ];
        for (text, layout, wanted) in cases {
            let read = read(&text.replace('\n', " ")).expect(text);
            assert_eq!((read.layout, shown(&read.all[0])), (layout, wanted.iter().map(ToString::to_string).collect()));
        }
    }

    #[test]
    fn tools_template_variables_weights_and_calls_are_kept() {
        let call = json!([{ "type": "function", "function": { "name": "add", "arguments": { "a": 1 } } }]);
        let record = json!({
            "messages": [
                { "role": "user", "content": "q", "name": null },
                { "role": "assistant", "content": null, "tool_calls": call },
                { "role": "tool", "content": "2" },
                { "role": "assistant", "content": "a", "weight": 0 },
                { "role": "assistant", "content": "b", "weight": 1 },
            ],
            "tools": [{ "type": "function", "function": { "name": "add" } }],
            "chat_template_kwargs": { "enable_thinking": false },
        });
        let one = &read(&record.to_string()).expect("readable").all[0];
        assert_eq!(one.messages[0], json!({ "role": "user", "content": "q" }));
        assert_eq!(one.messages[1], json!({ "role": "assistant", "tool_calls": call }));
        assert_eq!(one.messages[3], json!({ "role": "assistant", "content": "a" }));
        assert_eq!(one.supervised, [false, true, false, false, true]);
        assert_eq!(one.tools, record["tools"]);
        assert_eq!(one.variables["enable_thinking"], false);

        let share = json!({
            "conversations": [
                { "from": "human", "value": "q" },
                { "from": "function_call", "value": "{\"name\": \"add\", \"arguments\": {\"a\": 1}}" },
            ],
            "tools": record["tools"].to_string(),
        });
        let one = &read(&share.to_string()).expect("readable").all[0];
        assert_eq!(one.messages[1], json!({ "role": "assistant", "tool_calls": call }));
        assert_eq!(one.tools, record["tools"]);
    }

    #[test]
    fn what_is_no_conversation_is_refused_by_its_record_and_field() {
        let good = r#"{"messages": [{"role": "user", "content": "q"}]}"#;
        let cases = [
            (r#"{"text": "t"}"#.to_string(), "record 1 has the fields text, which are no conversation"),
            (format!("{good}\n{{\"prompt\": \"q\", \"completion\": \"a\"}}"), "record 2 lacks the field messages"),
            (r#"{"messages": []}"#.into(), "record 1 has no messages"),
            (r#"{"messages": [{"content": "q"}]}"#.into(), "record 1, message 1 has no role"),
            (r#"{"messages": ["q"]}"#.into(), "record 1, message 1 is no object"),
            (r#"{"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}"#.into(), "weight is 0.5"),
            (r#"{"messages": [{"role": "user", "content": 7}]}"#.into(), "content is a number"),
            (r#"{"conversations": [{"from": "nobody", "value": "q"}]}"#.into(), "'nobody'"),
            (r#"{"instruction": "q"}"#.into(), "record 1 has the fields instruction"),
            (r#"{"chosen": "a", "rejected": "b"}"#.into(), "--task preference"),
            (String::new(), "holds no text"),
        ];
        for (text, wanted) in cases {
            let refused = read(&text).expect_err(&text);
            assert!(refused.contains(wanted), "{text}: {refused}");
        }
    }

    #[test]
    fn pairs_share_a_prompt_that_may_be_implicit() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("pairs.jsonl");
        let turn = |role: &str, content: &str| json!({ "role": role, "content": content });
        let (question, answers) = (turn("user", "q"), ["a", "b"].map(|answer| turn("assistant", answer)));
        let pairs = [
            json!({ "prompt": "q", "chosen": "a", "rejected": "b" }),
            json!({ "prompt": [question], "chosen": [answers[0]], "rejected": [answers[1]] }),
            json!({ "chosen": [question, answers[0]], "rejected": [question, answers[1]] }),
        ];
        let text: Vec<String> = pairs.iter().map(Value::to_string).collect();
        fs::write(&file, text.join("\n")).expect("writable");
        let read = Preference::read(&file).expect("readable");
        assert_eq!(read.len(), 3);
        for pair in read {
            assert_eq!(shown(&pair.chosen), ["user: q", "*assistant: a"]);
            assert_eq!(shown(&pair.rejected), ["user: q", "*assistant: b"]);
        }
        for same in
            [json!({ "chosen": "a", "rejected": "b" }), json!({ "prompt": "q", "chosen": "a", "rejected": "a" })]
        {
            fs::write(&file, same.to_string()).expect("writable");
            assert!(Preference::read(&file).is_err(), "{same}");
        }
    }

    /// The pairs of some records.
    fn pairs(records: &[Value]) -> Result<Vec<Preference>, String> {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("pairs.jsonl");
        let text: Vec<String> = records.iter().map(Value::to_string).collect();
        fs::write(&file, text.join("\n")).expect("writable");
        Preference::read(&file).map_err(|error| error.to_string())
    }

    #[test]
    fn a_prompt_that_the_continuations_repeat_is_there_once() {
        let turn = |role: &str, content: &str| json!({ "role": role, "content": content });
        let (system, question, more) = (turn("system", "s"), turn("user", "q"), turn("user", "r"));
        let answers = ["a", "b", "c"].map(|answer| turn("assistant", answer));
        let records = [
            json!({ "prompt": "q", "chosen": [question, answers[0]], "rejected": [question, answers[1]] }),
            json!({ "prompt": "q\n", "chosen": [question, answers[0]], "rejected": [question, answers[1]] }),
            json!({ "prompt": [question], "chosen": [question, answers[0]], "rejected": [question, answers[1]] }),
            json!({ "prompt": "q", "chosen": [system, question, answers[0]],
                "rejected": [system, question, answers[1]] }),
            json!({ "prompt": "q", "chosen": [question, answers[2], more, answers[0]],
                "rejected": [question, answers[2], more, answers[1]] }),
            // A list that begins otherwise is a continuation.
            json!({ "prompt": "q", "chosen": [answers[2], more, answers[0]],
                "rejected": [answers[2], more, answers[1]] }),
        ];
        let wanted = [
            &["user: q"][..],
            &["user: q"],
            &["user: q"],
            &["system: s", "user: q"],
            &["user: q", "assistant: c", "user: r"],
            &["user: q", "*assistant: c", "user: r"],
        ];
        for (pair, wanted) in pairs(&records).expect("readable").iter().zip(wanted) {
            assert_eq!(shown(&pair.chosen), [wanted, &["*assistant: a"]].concat());
            assert_eq!(shown(&pair.rejected), [wanted, &["*assistant: b"]].concat());
        }
        let one = json!({ "prompt": "q", "chosen": [question, answers[0]], "rejected": [answers[1]] });
        let refused = pairs(&[one]).expect_err("one repeats the prompt");
        assert!(refused.contains("record 1 repeats its prompt in one of"), "{refused}");
    }

    #[test]
    fn a_record_with_messages_and_both_continuations_is_a_pair_or_a_conversation_as_asked() {
        let turn = |role: &str, content: &str| json!({ "role": role, "content": content });
        let [chosen, rejected] = ["a", "b"].map(|answer| json!([turn("user", "q"), turn("assistant", answer)]));
        let record =
            json!({ "prompt": "q", "messages": chosen, "chosen": chosen, "rejected": rejected, "score_chosen": 8 });
        let pair = &pairs(std::slice::from_ref(&record)).expect("a pair")[0];
        assert_eq!(shown(&pair.chosen), ["user: q", "*assistant: a"]);
        assert_eq!(shown(&pair.rejected), ["user: q", "*assistant: b"]);
        let read = read(&record.to_string()).expect("a conversation");
        assert_eq!((read.layout, shown(&read.all[0])), (Layout::Messages, shown(&pair.chosen)));
    }

    #[test]
    fn rows_of_parquet_and_of_tables_are_records() {
        let folder = tempfile::tempdir().expect("a folder");
        let table = folder.path().join("chats.csv");
        fs::write(&table, "prompt,completion\n\"q, r\",a\n").expect("writable");
        let read = Conversations::read(&table).expect("readable");
        assert_eq!(shown(&read.all[0]), ["user: q, r", "*assistant: a"]);
        let nested = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/chats/messages.parquet");
        let read = Conversations::read(&nested).expect("readable");
        assert_eq!(read.layout, Layout::Messages);
        assert_eq!(shown(&read.all[0]), ["user: q", "*assistant: a"]);
        assert_eq!(shown(&read.all[1]), ["system: s", "user: r", "*assistant: b"]);
        assert_eq!(read.all[1].messages[2], json!({ "role": "assistant", "content": "b" }));
    }
}
