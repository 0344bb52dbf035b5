//! Labelled text for classification: records with a text field and a label field.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::error::DataError;
use crate::sources::{self, TextSource, kind_of_value as kind};

/// Usual names of the text field, the preferred ones first.
const TEXT_FIELDS: [&str; 8] = ["text", "sentence", "content", "review", "comment", "document", "body", "utterance"];
/// Usual names of the label field.
const LABEL_FIELDS: [&str; 7] = ["label", "labels", "class", "category", "sentiment", "target", "intent"];

/// The parts of a folder, by the names of their files or folders.
const PARTS: [(Part, &[&str]); 3] = [
    (Part::Train, &["train", "training"]),
    (Part::Valid, &["valid", "validation", "val", "dev"]),
    (Part::Test, &["test", "testing"]),
];

/// Most field names that an error lists.
const SHOWN: usize = 12;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    Train,
    Valid,
    Test,
}

/// A text with its label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabelledText {
    /// The text.
    pub text: String,
    /// The label; integers in decimal.
    pub label: String,
}

/// Labelled examples, in the parts that a folder has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LabelledTexts {
    /// Examples to learn from: all of a file, or of a folder without parts.
    pub train: Vec<LabelledText>,
    /// Examples for validation; empty if the data has no such part.
    pub valid: Vec<LabelledText>,
    /// Examples for the test; empty if the data has no such part.
    pub test: Vec<LabelledText>,
    /// The field of the text.
    pub text_field: String,
    /// The field of the label.
    pub label_field: String,
    /// Names of the labels from 0 on, where Parquet of Hugging Face's datasets stores integers with
    /// names for them; else empty.
    pub label_names: Vec<String>,
    /// Records that were left out, as they have no text or no label.
    pub left_out: usize,
    /// Files of a folder that belong to none of its parts, and were not read.
    pub other_files: Vec<PathBuf>,
}

impl LabelledTexts {
    /// Reads JSON, CSV, TSV or Parquet, as [`TextSource`] does: a file, or a folder. A folder has
    /// parts if a file or a folder in it is called `train`, or begins with that and a mark:
    /// `train.csv`, `data/train-00000-of-00002.parquet`; `valid` (or `validation`, `val`, `dev`)
    /// and `test` are optional.
    ///
    /// `text` and `label` name the fields, `a.b` for a nested one; if they are empty, the first
    /// record's field with a usual name is taken.
    ///
    /// Examples are strings, labels strings, integers or booleans. A record whose text is null or
    /// blank, or whose label is null, empty or a negative number, which stands for none, is left
    /// out and counted.
    ///
    /// # Errors
    /// If a file cannot be read, there are no records, a record lacks a field (the error names
    /// those that it has), or a text or a label is of another type.
    pub fn read(path: &Path, text: &str, label: &str) -> Result<Self, DataError> {
        let mut files = Vec::new();
        sources::collect(path, &mut files)?;
        let mut read = Self { text_field: text.into(), label_field: label.into(), ..Self::default() };
        let mut parts: BTreeMap<Part, Vec<PathBuf>> = BTreeMap::new();
        if path.is_dir() {
            let (records, others): (Vec<_>, Vec<_>) = files.into_iter().partition(|file| sources::has_records(file));
            if records.is_empty() {
                let reason = "has no file of JSON, CSV, TSV or Parquet: .json, .jsonl, .csv, .tsv or .parquet".into();
                return Err(DataError::Refused { path: path.into(), reason });
            }
            let part = |file: &PathBuf| part_of(file.strip_prefix(path).unwrap_or(file));
            if records.iter().any(|file| part(file).is_some()) {
                for file in records {
                    match part(&file) {
                        Some(part) => parts.entry(part).or_default().push(file),
                        None => read.other_files.push(file),
                    }
                }
                if !parts.contains_key(&Part::Train) {
                    let reason = "has a part valid or test, but none for training: call it train".into();
                    return Err(DataError::Refused { path: path.into(), reason });
                }
            } else {
                parts.insert(Part::Train, records);
            }
            read.other_files.extend(others);
        } else {
            parts.insert(Part::Train, files);
        }
        for (part, files) in parts {
            for file in files {
                let examples = read.file(&file)?;
                match part {
                    Part::Train => &mut read.train,
                    Part::Valid => &mut read.valid,
                    Part::Test => &mut read.test,
                }
                .extend(examples);
            }
        }
        match read.train.is_empty() {
            true => Err(DataError::Empty { path: path.into() }),
            false => Ok(read),
        }
    }

    /// Whether all names of its labels are among `labels`.
    pub fn has_names_of(&self, labels: &[String]) -> bool {
        self.label_names.iter().all(|name| labels.contains(name))
    }

    /// Replaces numbers of labels by their names, if all have one and no name is an integer itself;
    /// whether that is so.
    pub fn take_names(&mut self) -> bool {
        let names = &self.label_names;
        let number = |text: &LabelledText| text.label.parse::<usize>().ok().filter(|at| *at < names.len());
        let mut all = self.train.iter().chain(&self.valid).chain(&self.test);
        if names.iter().any(|name| name.parse::<i64>().is_ok()) || !all.all(|text| number(text).is_some()) {
            return false;
        }
        for text in self.train.iter_mut().chain(&mut self.valid).chain(&mut self.test) {
            if let Some(name) = text.label.parse::<usize>().ok().and_then(|at| names.get(at)) {
                text.label.clone_from(name);
            }
        }
        true
    }

    /// The examples of a file.
    fn file(&mut self, path: &Path) -> Result<Vec<LabelledText>, DataError> {
        let mut examples = Vec::new();
        let mut number = 0;
        TextSource::records(path)?.read(false, &mut |piece| {
            number += 1;
            let refused = |reason: String| DataError::Refused { path: path.into(), reason };
            let Ok(Value::Object(record)) = serde_json::from_str(&piece.text) else {
                let reason = "holds text, and not records: write JSON lines (.jsonl), JSON, a table or Parquet";
                return Err(refused(reason.into()));
            };
            match self.record(&record).map_err(|reason| refused(format!("record {number} {reason}")))? {
                Some(text) => examples.push(text),
                None => self.left_out += 1,
            }
            Ok(ControlFlow::Continue(()))
        })?;
        if self.label_names.is_empty() && path.extension().is_some_and(|kind| kind.eq_ignore_ascii_case("parquet")) {
            self.label_names = sources::class_names(path, &self.label_field);
        }
        Ok(examples)
    }

    /// The text of a record; `None` if it has none, or no label.
    fn record(&mut self, record: &Map<String, Value>) -> Result<Option<LabelledText>, String> {
        if self.text_field.is_empty() {
            self.text_field = recognised(record, "text", &TEXT_FIELDS, "--field NAME")?;
        }
        let text = match find(record, &self.text_field) {
            Some(Value::String(text)) => Some(text).filter(|text| !text.trim().is_empty()),
            Some(Value::Null) => None,
            Some(other) => return Err(format!("has a field '{}' that is {}, not text", self.text_field, kind(other))),
            None => return Err(lacks(record, &self.text_field, "--field NAME")),
        };
        if self.label_field.is_empty() {
            self.label_field = recognised(record, "label", &LABEL_FIELDS, "label_field=NAME")?;
        }
        let wrong = |what: &str| format!("has a label '{}' that is {what}, not a string or integer", self.label_field);
        let label = match find(record, &self.label_field) {
            // Cells of CSV and TSV are strings.
            Some(Value::String(label)) => {
                let label = label.trim();
                let missing = label.is_empty() || label.parse::<i64>().is_ok_and(|number| number < 0);
                (!missing).then(|| label.to_string())
            }
            Some(Value::Bool(label)) => Some(label.to_string()),
            Some(Value::Number(label)) => match label.as_i64() {
                Some(label) => (label >= 0).then(|| label.to_string()),
                // Tables in JSON may write integers as 1.0.
                None => match label.as_f64().filter(|label| label.fract() == 0.0 && label.abs() < 1e15) {
                    Some(label) => (label >= 0.0).then(|| (label as i64).to_string()),
                    None => return Err(wrong(&label.to_string())),
                },
            },
            Some(Value::Null) => None,
            Some(other) => return Err(wrong(kind(other))),
            None => return Err(lacks(record, &self.label_field, "label_field=NAME")),
        };
        Ok(text.zip(label).map(|(text, label)| LabelledText { text: text.clone(), label }))
    }
}

/// The part that a file belongs to, by its path within the folder: that of its own name, or of the
/// nearest folder.
fn part_of(path: &Path) -> Option<Part> {
    path.iter().rev().find_map(|component| {
        let name = component.to_string_lossy().to_ascii_lowercase();
        let names = |wanted: &str| {
            name.strip_prefix(wanted).is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric()))
        };
        PARTS.iter().find(|(_, wanted)| wanted.iter().any(|wanted| names(wanted))).map(|(part, _)| *part)
    })
}

/// The value of a field, or at the path of its dot-separated names. A null on the path stands for
/// the field.
fn find<'a>(record: &'a Map<String, Value>, field: &str) -> Option<&'a Value> {
    record.get(field).or_else(|| {
        field.match_indices('.').find_map(|(at, _)| match record.get(&field[..at])? {
            Value::Object(inner) => find(inner, &field[at + 1..]),
            null @ Value::Null => Some(null),
            _ => None,
        })
    })
}

/// The first of the usual names that a record has, in any case.
fn recognised(record: &Map<String, Value>, what: &str, usual: &[&str], mend: &str) -> Result<String, String> {
    let field = |name: &&str| record.keys().find(|key| key.eq_ignore_ascii_case(name));
    usual.iter().find_map(field).cloned().ok_or_else(|| {
        let (fields, usual) = (fields(record), usual.join(", "));
        format!("has the fields {fields}, none of which is known as a {what} ({usual}): name it with {mend}")
    })
}

fn lacks(record: &Map<String, Value>, field: &str, mend: &str) -> String {
    format!("has no field '{field}'; it has {}: name one with {mend}", fields(record))
}

/// The names of a record's fields, for a message.
fn fields(record: &Map<String, Value>) -> String {
    let names: Vec<&str> = record.keys().take(SHOWN).map(String::as_str).collect();
    match record.len().saturating_sub(SHOWN) {
        _ if names.is_empty() => "none".into(),
        0 => names.join(", "),
        more => format!("{} and {more} more", names.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn file(name: &str, text: &str) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(name);
        fs::write(&path, text).expect("writable");
        (folder, path)
    }

    fn shown(examples: &[LabelledText]) -> Vec<String> {
        examples.iter().map(|LabelledText { text, label }| format!("{label}: {text}")).collect()
    }

    #[test]
    fn records_of_every_format_are_read_by_usual_names() {
        for (name, text, fields) in [
            ("a.csv", "id,Sentence,class\n1,\"so, so\",0\n2,good,1\n", ["Sentence", "class"]),
            ("a.tsv", "text\tlabel\nso, so\t0\ngood\t1\n", ["text", "label"]),
            (
                "a.jsonl",
                "{\"content\": \"so, so\", \"labels\": 0}\n{\"content\": \"good\", \"labels\": 1.0}\n",
                ["content", "labels"],
            ),
            (
                "a.json",
                "[{\"label\": \"0\", \"text\": \"so, so\"}, {\"text\": \"good\", \"label\": \"1\"}]",
                ["text", "label"],
            ),
        ] {
            let (_folder, path) = file(name, text);
            let read = LabelledTexts::read(&path, "", "").expect(name);
            assert_eq!(shown(&read.train), ["0: so, so", "1: good"], "{name}");
            assert_eq!([&read.text_field, &read.label_field], fields, "{name}");
        }
    }

    #[test]
    fn fields_are_taken_by_name_also_nested_ones() {
        let (_folder, path) = file("a.jsonl", r#"{"text": "no", "label": 3, "x": {"say": "yes", "is": true}}"#);
        let read = LabelledTexts::read(&path, "x.say", "x.is").expect("both fields");
        assert_eq!(shown(&read.train), ["true: yes"]);
    }

    #[test]
    fn what_is_missing_is_refused_with_the_fields_that_exist() {
        for (text, field, label, wanted) in [
            (r#"{"line": "a", "label": 1}"#, "", "", "the fields line, label, none of which is known as a text"),
            (r#"{"text": "a", "stars": 1}"#, "", "", "the fields text, stars, none of which is known as a label"),
            (r#"{"text": "a", "label": 1}"#, "line", "", "no field 'line'; it has text, label: name one with --field"),
            (r#"{"text": "a", "label": 1}"#, "", "stars", "no field 'stars'; it has text, label: name one with label"),
            (r#"{"text": 7, "label": 1}"#, "", "", "a field 'text' that is a number"),
            (r#"{"text": "a", "label": 0.5}"#, "", "", "a label 'label' that is 0.5"),
            (r#"{"text": "a", "label": [1]}"#, "", "", "a label 'label' that is an array"),
            (r#"{"text": "", "label": 1}"#, "", "", "holds no text"),
        ] {
            let (_folder, path) = file("a.jsonl", text);
            let message = LabelledTexts::read(&path, field, label).expect_err(text).to_string();
            assert!(message.contains(wanted), "{text}: {message}");
        }
        let (_folder, path) = file("a.txt", "just text");
        let message = LabelledTexts::read(&path, "", "").expect_err("no records").to_string();
        assert!(message.contains("and not records"), "{message}");
    }

    #[test]
    fn parquet_of_hugging_face_has_names_for_numbers() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/classifiers/labelled.parquet");
        let mut read = LabelledTexts::read(&path, "", "").expect("a golden file");
        assert_eq!(shown(&read.train), ["1: well made", "0: broken", "1: it arrived in time"]);
        assert_eq!(read.left_out, 1);
        assert_eq!(read.label_names, ["negative", "positive"]);
        let known = |labels: [&str; 2]| read.has_names_of(&labels.map(String::from));
        assert!(known(["positive", "negative"]) && !known(["no", "yes"]));
        assert!(read.take_names());
        assert_eq!(shown(&read.train), ["positive: well made", "negative: broken", "positive: it arrived in time"]);
        assert!(!read.take_names(), "they are no numbers any more");
        // Numbers would mean two things, or nothing.
        for names in [&["1", "2"][..], &["only one"], &[]] {
            let mut read = LabelledTexts::read(&path, "", "").expect("a golden file");
            read.label_names = names.iter().map(|name| (*name).to_string()).collect();
            assert!(!read.take_names());
            assert_eq!(shown(&read.train)[0], "1: well made");
        }
    }

    #[test]
    fn a_negative_label_counts_as_none_in_every_format() {
        let csv = "text,label\nfirst,-1\nsecond,0\n";
        let lines = "{\"text\": \"first\", \"label\": -1}\n{\"text\": \"second\", \"label\": 0}\n";
        for (name, text) in [("a.csv", csv), ("a.jsonl", lines)] {
            let (_folder, path) = file(name, text);
            let read = LabelledTexts::read(&path, "", "").expect("records");
            assert_eq!((shown(&read.train), read.left_out), (vec!["0: second".to_string()], 1), "{name}");
        }
    }

    #[test]
    fn records_without_text_or_label_are_counted() {
        let lines = [r#"{"text": "a", "label": 1}"#, r#"{"text": " ", "label": 1}"#, r#"{"text": "b", "label": -1}"#];
        let (_folder, path) = file("a.jsonl", &[&lines[..], &[r#"{"text": "b", "label": null}"#]].concat().join("\n"));
        let read = LabelledTexts::read(&path, "", "").expect("one is left");
        assert_eq!((shown(&read.train), read.left_out), (vec!["1: a".to_string()], 3));
    }

    #[test]
    fn a_folder_has_parts_by_the_names_of_its_files_or_folders() {
        let folder = tempfile::tempdir().expect("a folder");
        let put = |name: &str, text: &str| {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().expect("its folder")).expect("writable");
            fs::write(path, format!("text,label\n{text},x\n")).expect("writable");
        };
        put("b.csv", "b");
        put("a/a.csv", "a");
        let read = || LabelledTexts::read(folder.path(), "", "").expect("sound");
        assert_eq!(shown(&read().train), ["x: a", "x: b"], "no parts");
        put("data/train-00000-of-00001.csv", "1");
        put("train_more/x.csv", "2");
        put("data/validation-00000-of-00001.csv", "3");
        put("dev.csv", "4");
        put("TEST.csv", "5");
        put("notes.md", "6");
        put("trainer.csv", "7");
        let read = read();
        assert_eq!(shown(&read.train), ["x: 1", "x: 2"]);
        assert_eq!((shown(&read.valid), shown(&read.test)), (vec!["x: 3".into(), "x: 4".into()], vec!["x: 5".into()]));
        assert_eq!(read.other_files.len(), 4, "{:?}", read.other_files);
        let without = tempfile::tempdir().expect("a folder");
        fs::write(without.path().join("test.csv"), "text,label\na,b\n").expect("writable");
        let message = LabelledTexts::read(without.path(), "", "").expect_err("no train").to_string();
        assert!(message.contains("call it train"), "{message}");
    }
}
