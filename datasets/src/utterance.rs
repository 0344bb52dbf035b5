//! Utterances with an intent and tagged words, and their file formats.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::error::DataError;
use crate::sources::read_file;
use crate::spans::{Span, slot_of, spans};

/// Words, an IOB2 tag for each, and an intent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Utterance {
    /// The words.
    pub words: Vec<String>,
    /// `O`, `B-slot` or `I-slot` per word.
    pub tags: Vec<String>,
    /// The intent.
    pub intent: String,
}

/// Training, validation and test utterances.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Utterances {
    /// Training split.
    pub train: Vec<Utterance>,
    /// Validation split.
    pub valid: Vec<Utterance>,
    /// Test split; empty if the data has none.
    pub test: Vec<Utterance>,
}

/// The layouts that [`Utterances::read`] supports.
const LAYOUTS: &str = "folders train, valid (or validation, or dev) and test, each with seq.in, seq.out and label, \
                       and for files train.jsonl, valid.jsonl (or validation.jsonl, or dev.jsonl) and test.jsonl";

/// The splits of a folder, with their possible names.
const PARTS: [&[&str]; 3] = [&["train"], &["valid", "validation", "dev"], &["test"]];

impl Utterances {
    /// Reads a folder in one of two layouts, which it detects.
    ///
    /// Either there are folders `train`, `valid` (or `validation`, or `dev`) and `test`, each with
    /// the files `seq.in` (words separated by white space), `seq.out` (their tags) and `label` (the
    /// intents), with corresponding lines. BIOES and BILOU tags are converted to IOB2. Or there are
    /// files `train.jsonl`, `valid.jsonl` (or `validation.jsonl`, or `dev.jsonl`) and `test.jsonl`
    /// with lines like `{"text": "to rome", "intent": "go", "spans": [{"start": 3, "end": 7,
    /// "slot": "city"}]}`. Offsets count characters, [`words`] finds the words, each span covers
    /// whole words, and other keys are ignored. The test split is optional.
    ///
    /// # Errors
    /// If something is missing, unreadable, empty or not UTF-8 text, or a line is malformed; names
    /// the first such line.
    pub fn read(folder: &Path) -> Result<Self, DataError> {
        fs::metadata(folder).map_err(|error| DataError::Io { path: folder.to_path_buf(), error })?;
        let names = || PARTS.iter().copied().flatten();
        let in_folders = names().any(|name| folder.join(name).is_dir());
        let in_files = names().any(|name| folder.join(format!("{name}.jsonl")).is_file());
        if !in_folders && !in_files {
            return Err(DataError::Layout { path: folder.to_path_buf(), looked_for: LAYOUTS });
        }
        let mut faults = Faults::default();
        let mut part = |names: &[&str]| {
            let paths: Vec<PathBuf> = names
                .iter()
                .map(|name| if in_folders { folder.join(name) } else { folder.join(format!("{name}.jsonl")) })
                .collect();
            let found = paths.iter().find(|path| path.exists());
            if found.is_none() && names == ["test"] {
                return Ok(Vec::new());
            }
            // If there is none, reading the first reports what is missing.
            let path = found.unwrap_or(&paths[0]);
            if in_folders { read_lines(path, &mut faults) } else { read_json_lines(path, &mut faults) }
        };
        let [train, valid, test] = PARTS.map(&mut part);
        let read = Self { train: train?, valid: valid?, test: test? };
        faults.none()?;
        Ok(read)
    }
}

/// Malformed lines: the first, and the number of others.
#[derive(Default)]
struct Faults {
    first: Option<(PathBuf, usize, String)>,
    more: usize,
}

impl Faults {
    /// Records a line, counted from 0.
    fn note(&mut self, path: &Path, line: usize, reason: String) {
        match self.first {
            None => self.first = Some((path.to_path_buf(), line + 1, reason)),
            Some(_) => self.more += 1,
        }
    }

    fn none(self) -> Result<(), DataError> {
        let more = self.more;
        self.first.map_or(Ok(()), |(path, line, reason)| Err(DataError::Malformed { path, line, reason, more }))
    }
}

/// The trimmed lines of a text, without trailing blank ones.
fn lines<'a>(path: &Path, text: &'a str) -> Result<Vec<&'a str>, DataError> {
    let text = text.trim_end();
    if text.is_empty() {
        return Err(DataError::Empty { path: path.to_path_buf() });
    }
    Ok(text.split('\n').map(str::trim).collect())
}

/// Reads `seq.in`, `seq.out` and `label` of a folder.
fn read_lines(folder: &Path, faults: &mut Faults) -> Result<Vec<Utterance>, DataError> {
    let paths = ["seq.in", "seq.out", "label"].map(|name| folder.join(name));
    let [words_path, tags_path, label_path] = &paths;
    let contents = [read_file(words_path)?, read_file(tags_path)?, read_file(label_path)?];
    let [words, tags, labels] =
        [lines(words_path, &contents[0])?, lines(tags_path, &contents[1])?, lines(label_path, &contents[2])?];
    for (path, count) in [(tags_path, tags.len()), (label_path, labels.len())] {
        if count != words.len() {
            let reason = format!("is the last line, but seq.in has {} lines", words.len());
            faults.note(path, count - 1, reason);
            return Ok(Vec::new());
        }
    }
    let mut utterances = Vec::with_capacity(words.len());
    for (line, ((words, tags), label)) in words.into_iter().zip(tags).zip(labels).enumerate() {
        let words: Vec<String> = words.split_whitespace().map(str::to_owned).collect();
        let mut tags: Vec<String> = tags.split_whitespace().map(str::to_owned).collect();
        rewrite(&mut tags);
        let odd = tags.iter().find(|tag| *tag != "O" && slot_of(tag).is_none());
        if words.is_empty() {
            faults.note(words_path, line, "an empty utterance".to_owned());
        } else if tags.len() != words.len() {
            faults.note(
                tags_path,
                line,
                format!("{} for {}", counted(tags.len(), "tag"), counted(words.len(), "word")),
            );
        } else if let Some(tag) = odd {
            faults.note(tags_path, line, format!("'{tag}' is not a tag (O, or a slot after B-, I-, E-, S-, L- or U-)"));
        } else if label.is_empty() {
            faults.note(label_path, line, "an empty label".to_owned());
        } else {
            utterances.push(Utterance { words, tags, intent: label.to_owned() });
        }
    }
    Ok(utterances)
}

/// Converts tags to IOB2: the first of each span becomes `B`, the others `I`. A span of several
/// words ends with `E` in BIOES and `L` in BILOU; a span of one word is `S` or `U`.
fn rewrite(tags: &mut [String]) {
    let mut ended = false;
    for tag in tags.iter_mut() {
        let Some((prefix, slot)) = tag.split_once('-').filter(|(_, slot)| !slot.is_empty()) else {
            ended = false;
            continue;
        };
        let (begins, ends) = match prefix {
            "B" => (true, false),
            "I" => (ended, false),
            "E" | "L" => (ended, true),
            "S" | "U" => (true, true),
            // Refused later.
            _ => continue,
        };
        ended = ends;
        *tag = format!("{}-{slot}", if begins { 'B' } else { 'I' });
    }
    for Span { slot, words } in spans(tags) {
        tags[words.start] = format!("B-{slot}");
    }
}

fn counted(count: usize, thing: &str) -> String {
    format!("{count} {thing}{}", if count == 1 { "" } else { "s" })
}

/// A line of a JSON lines file; other keys are ignored.
#[derive(Deserialize)]
struct JsonLine {
    text: String,
    intent: String,
    spans: Vec<JsonSpan>,
}

/// A range of characters that belongs to a slot.
#[derive(Deserialize)]
struct JsonSpan {
    start: usize,
    end: usize,
    slot: String,
}

fn read_json_lines(path: &Path, faults: &mut Faults) -> Result<Vec<Utterance>, DataError> {
    let text = read_file(path)?;
    let mut utterances = Vec::new();
    for (line, json) in lines(path, &text)?.into_iter().enumerate() {
        match read_json(json) {
            Ok(utterance) => utterances.push(utterance),
            Err(reason) => faults.note(path, line, reason),
        }
    }
    Ok(utterances)
}

/// Parses a line of JSON, or returns the reason why not.
fn read_json(json: &str) -> Result<Utterance, String> {
    if json.is_empty() {
        return Err("an empty line".to_owned());
    }
    let line: JsonLine = serde_json::from_str(json).map_err(|error| {
        // The line number is known to the caller, not to the parser.
        let told = error.to_string();
        format!("{} (column {})", told.split(" at line ").next().unwrap_or(&told), error.column())
    })?;
    let words = words(&line.text);
    if words.is_empty() {
        return Err("an empty utterance".to_owned());
    }
    let intent = line.intent.trim();
    if intent.is_empty() {
        return Err("an empty intent".to_owned());
    }
    let tags = tags_of_spans(&line.text, &words, line.spans)?;
    Ok(Utterance { words: words.into_iter().map(|word| word.text).collect(), tags, intent: intent.to_owned() })
}

fn tags_of_spans(text: &str, words: &[Word], mut spans: Vec<JsonSpan>) -> Result<Vec<String>, String> {
    let length = text.chars().count();
    let mut tags = vec!["O".to_owned(); words.len()];
    spans.sort_by_key(|span| (span.start, span.end));
    let mut free_from = 0;
    for JsonSpan { start, end, slot } in spans {
        let named = format!("span {start}..{end} ({slot})");
        if slot.is_empty() || slot.contains(char::is_whitespace) {
            return Err(format!("span {start}..{end}: '{slot}' is not a slot name"));
        } else if start >= end {
            return Err(format!("{named} is empty"));
        } else if end > length {
            return Err(format!("{named} exceeds the text's {length} characters"));
        } else if start < free_from {
            return Err(format!("{named} overlaps the one before it"));
        }
        free_from = end;
        let cuts = |at: usize, word: &Word| word.start < at && at < word.end;
        if let Some(word) = words.iter().find(|word| cuts(start, word) || cuts(end, word)) {
            return Err(format!("{named} splits the word '{}'", word.text));
        }
        let mut prefix = 'B';
        for (tag, _) in tags.iter_mut().zip(words).filter(|(_, word)| start <= word.start && word.end <= end) {
            *tag = format!("{prefix}-{slot}");
            prefix = 'I';
        }
        if prefix == 'B' {
            return Err(format!("{named} contains no word"));
        }
    }
    Ok(tags)
}

/// A word of running text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Word {
    /// The word, as in the text.
    pub text: String,
    /// Its first character, counted in characters.
    pub start: usize,
    /// The character after its last.
    pub end: usize,
}

/// Punctuation that becomes a word of its own at the edge of a word.
const MARKS: &str = ".,!?;:\"()[]{}«»„“”…'‘’¿¡。、？！，；：";

/// The words of running text, separated by white space; punctuation at the edge of a word is a word
/// of its own.
pub fn words(text: &str) -> Vec<Word> {
    let characters: Vec<char> = text.chars().collect();
    let is_mark = |at: &usize| MARKS.contains(characters[*at]);
    let mut words = Vec::new();
    let mut push = |start: usize, end: usize| {
        if start < end {
            words.push(Word { text: characters[start..end].iter().collect(), start, end });
        }
    };
    let mut start = 0;
    for run in characters.split(|c| c.is_whitespace()) {
        let end = start + run.len();
        let first = (start..end).find(|at| !is_mark(at)).unwrap_or(end);
        let last = (first..end).rfind(|at| !is_mark(at)).map_or(first, |at| at + 1);
        (start..first).for_each(|at| push(at, at + 1));
        push(first, last);
        (last..end).for_each(|at| push(at, at + 1));
        start = end + 1;
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::TempDir;

    /// A folder of three splits, `train` of these contents and the others valid.
    fn folders(words: &str, tags: &str, labels: &str) -> TempDir {
        let folder = TempDir::new().expect("a folder");
        for part in ["train", "valid", "test"] {
            let contents = if part == "train" { [words, tags, labels] } else { ["go on", "O B-way", "go"] };
            fs::create_dir(folder.path().join(part)).expect("a folder");
            for (name, text) in ["seq.in", "seq.out", "label"].iter().zip(contents) {
                fs::write(folder.path().join(part).join(name), text).expect("a file");
            }
        }
        folder
    }

    const LINE: &str = r#"{"text": "go on", "intent": "go", "spans": [{"start": 3, "end": 5, "slot": "way"}]}"#;

    /// A folder of three files, `train.jsonl` of this text and the others valid.
    fn files(train: &str) -> TempDir {
        let folder = TempDir::new().expect("a folder");
        for (name, text) in [("train", train), ("dev", LINE), ("test", LINE)] {
            fs::write(folder.path().join(format!("{name}.jsonl")), text).expect("a file");
        }
        folder
    }

    fn refusal(folder: &TempDir) -> String {
        Utterances::read(folder.path()).expect_err("malformed").to_string()
    }

    fn utterance(words: &[&str], tags: &[&str], intent: &str) -> Utterance {
        let owned = |contents: &[&str]| contents.iter().map(|text| (*text).to_owned()).collect();
        Utterance { words: owned(words), tags: owned(tags), intent: intent.to_owned() }
    }

    #[test]
    fn three_files_in_each_folder_are_read() {
        let folder = folders("fly to new york\nhi\n", "O O B-city I-city\nO\n", "flight\nhello\n");
        let read = Utterances::read(folder.path()).expect("sound");
        let flight = utterance(&["fly", "to", "new", "york"], &["O", "O", "B-city", "I-city"], "flight");
        assert_eq!(read.train, [flight, utterance(&["hi"], &["O"], "hello")]);
        assert_eq!(read.valid, [utterance(&["go", "on"], &["O", "B-way"], "go")]);
        assert_eq!(read.test, read.valid);
    }

    #[test]
    fn a_folder_named_dev_is_the_validation_part() {
        let folder = folders("hi", "O", "hello");
        fs::rename(folder.path().join("valid"), folder.path().join("dev")).expect("renamed");
        assert_eq!(Utterances::read(folder.path()).expect("sound").valid.len(), 1);
    }

    #[test]
    fn validation_is_another_name_of_the_validation_part() {
        let folder = folders("hi", "O", "hello");
        fs::rename(folder.path().join("valid"), folder.path().join("validation")).expect("renamed");
        assert_eq!(Utterances::read(folder.path()).expect("sound").valid.len(), 1);
        let folder = files(LINE);
        fs::rename(folder.path().join("dev.jsonl"), folder.path().join("validation.jsonl")).expect("renamed");
        assert_eq!(Utterances::read(folder.path()).expect("sound").valid.len(), 1);
    }

    #[test]
    fn there_need_be_no_test_part() {
        let folder = folders("hi", "O", "hello");
        fs::remove_dir_all(folder.path().join("test")).expect("removed");
        let read = Utterances::read(folder.path()).expect("sound");
        assert_eq!((read.train.len(), read.valid.len(), read.test.len()), (1, 1, 0));
        let folder = files(LINE);
        fs::remove_file(folder.path().join("test.jsonl")).expect("removed");
        assert_eq!(Utterances::read(folder.path()).expect("sound").test, []);
    }

    #[test]
    fn tags_of_bioes_and_bilou_become_those_of_iob2() {
        for (tags, expected) in [
            ("B-x I-x E-x O S-x", "B-x I-x I-x O B-x"),
            ("B-x I-x L-x O U-x", "B-x I-x I-x O B-x"),
            ("S-x S-x B-x E-x S-y", "B-x B-x B-x I-x B-y"),
            // Adjacent spans, and an end without a beginning.
            ("B-x E-x I-x E-x O", "B-x I-x B-x I-x O"),
            ("E-x E-x O L-y O", "B-x B-x O B-y O"),
            ("S-x I-x O U-a-b O", "B-x B-x O B-a-b O"),
        ] {
            let folder = folders("a b c d e", tags, "one");
            assert_eq!(Utterances::read(folder.path()).expect("sound").train[0].tags.join(" "), expected, "{tags}");
        }
    }

    #[test]
    fn other_keys_of_a_json_line_mean_nothing() {
        let more = LINE.replace("\"intent\"", "\"id\": 7, \"intent\"").replace("\"end\"", "\"value\": \"on\", \"end\"");
        let read = |text: &str| Utterances::read(files(text).path()).expect("sound");
        assert_eq!(read(&more), read(LINE));
    }

    #[test]
    fn line_ends_and_white_space_of_any_kind_part_words() {
        let plain = Utterances::read(folders("a b\nc\n", "O B-x\nO\n", "one\ntwo\n").path()).expect("sound");
        for (words, tags, labels) in [
            ("a b\r\nc\r\n", "O B-x\r\nO\r\n", "one\r\ntwo\r\n"),
            ("a b \t\nc  ", "O B-x\t \nO", "one \t\ntwo"),
            ("a\u{a0}b\nc\n\n \n", "O\u{2003}B-x\nO", "one\ntwo\r\n\r\n"),
            ("\u{feff}a\u{3000}b\nc", "O\tB-x\nO", "one\ntwo"),
        ] {
            assert_eq!(Utterances::read(folders(words, tags, labels).path()).expect("sound"), plain, "{words:?}");
        }
    }

    #[test]
    fn a_span_that_begins_inside_begins_all_the_same() {
        let folder = folders("a b c d e", "I-x I-x I-y O I-x", "one");
        let tags = &Utterances::read(folder.path()).expect("sound").train[0].tags;
        assert_eq!(tags, &["B-x", "I-x", "B-y", "O", "B-x"]);
    }

    #[test]
    fn a_malformed_line_is_named_with_its_file() {
        for (words, tags, labels, told) in [
            ("a\nb c\n", "O\nO\n", "one\ntwo\n", "train/seq.out, line 2: 1 tag for 2 words"),
            ("a\n \t\nb\n", "O\n\nO\n", "one\ntwo\none\n", "train/seq.in, line 2: an empty utterance"),
            (
                "a\nb\n",
                "O\nX-y\n",
                "one\ntwo\n",
                "train/seq.out, line 2: 'X-y' is not a tag (O, or a slot after B-, I-, E-, S-, L- or U-)",
            ),
            (
                "a\nb\n",
                "B-\nO\n",
                "one\ntwo\n",
                "train/seq.out, line 1: 'B-' is not a tag (O, or a slot after B-, I-, E-, S-, L- or U-)",
            ),
            ("a\nb\nc\n", "O\nO\nO\n", "one\n  \ntwo\n", "train/label, line 2: an empty label"),
            (
                "a\nb\nc\n",
                "O\nO\n",
                "one\ntwo\none\n",
                "train/seq.out, line 2: is the last line, but seq.in has 3 lines",
            ),
            ("a\nb\n", "O\nO\n", "a\nb\nc\n", "train/label, line 3: is the last line, but seq.in has 2 lines"),
        ] {
            let message = refusal(&folders(words, tags, labels));
            assert!(message.ends_with(told), "{message}");
        }
    }

    #[test]
    fn further_malformed_lines_are_counted() {
        let message = refusal(&folders("a\nb\nc\nd\n", "O O\nO\nz\nO O\n", "one\none\none\none\n"));
        assert!(message.ends_with("seq.out, line 1: 2 tags for 1 word (and 2 more malformed lines)"), "{message}");
        let message = refusal(&files(&format!("{LINE}\n{{\nnothing\n{LINE}\n")));
        assert!(message.contains("train.jsonl, line 2: "), "{message}");
        assert!(message.ends_with(" (and 1 more malformed line)") && !message.contains('\n'), "{message}");
    }

    #[test]
    fn json_lines_are_read_with_offsets_in_characters() {
        let text = r#"{"text": "🔥🔥 flý to  New York!", "intent": "flight", "spans":
            [{"start": 11, "end": 19, "slot": "city"}, {"start": 0, "end": 2, "slot": "mood"}]}"#;
        let folder = files(&format!("{}\r\n\r\n", text.replace('\n', " ")));
        let read = Utterances::read(folder.path()).expect("sound");
        let words = ["🔥🔥", "flý", "to", "New", "York", "!"];
        let tags = ["B-mood", "O", "O", "B-city", "I-city", "O"];
        assert_eq!(read.train, [utterance(&words, &tags, "flight")]);
        assert_eq!(read.valid, [utterance(&["go", "on"], &["O", "B-way"], "go")]);
    }

    #[test]
    fn a_malformed_json_line_is_named_with_its_file() {
        let span = |start: usize, end: usize| format!(r#"{{"start": {start}, "end": {end}, "slot": "x"}}"#);
        let line = |spans: &str| format!(r#"{{"text": "go on 火", "intent": "go", "spans": [{spans}]}}"#);
        let both = |first: String, second: String| line(&format!("{first}, {second}"));
        for (json, told) in [
            ("".to_owned(), "an empty line"),
            ("{".to_owned(), "EOF while parsing an object (column 1)"),
            (r#"{"text": "a", "intent": "b"}"#.to_owned(), "missing field `spans` (column 28)"),
            (LINE.replace("\"text\"", "\"words\""), "missing field `text`"),
            (LINE.replace("\"end\"", "\"stop\""), "missing field `end`"),
            (LINE.replace("\"go\"", "\" \""), "an empty intent"),
            (LINE.replace("\"go on\"", "\" \""), "an empty utterance"),
            (LINE.replace("\"way\"", "\"\""), "span 3..5: '' is not a slot name"),
            (LINE.replace("\"way\"", "\"a b\""), "span 3..5: 'a b' is not a slot name"),
            (LINE.replace("3", "-3"), "invalid value"),
            (line(&span(3, 3)), "span 3..3 (x) is empty"),
            (line(&span(3, 2)), "span 3..2 (x) is empty"),
            (line(&span(6, 8)), "span 6..8 (x) exceeds the text's 7 characters"),
            (line(&span(2, 3)), "span 2..3 (x) contains no word"),
            (line(&span(0, 4)), "span 0..4 (x) splits the word 'on'"),
            (line(&span(1, 5)), "span 1..5 (x) splits the word 'go'"),
            (both(span(3, 5), span(0, 5)), "span 3..5 (x) overlaps the one before it"),
            (both(span(3, 5), span(3, 5)), "span 3..5 (x) overlaps the one before it"),
        ] {
            let message = refusal(&files(&format!("{LINE}\n{json}\n{LINE}\n")));
            assert!(message.contains(&format!("train.jsonl, line 2: {told}")), "{message}");
        }
    }

    #[test]
    fn what_is_missing_empty_or_no_text_is_named() {
        let folder = folders("a", "O", "one");
        fs::remove_file(folder.path().join("test/label")).expect("removed");
        assert!(refusal(&folder).contains("test/label: "));
        fs::remove_dir_all(folder.path().join("valid")).expect("removed");
        assert!(refusal(&folder).contains("valid/seq.in: "));
        assert!(refusal(&folders("", "", "")).ends_with("train/seq.in: holds no text"));
        assert!(refusal(&folders("a", "\n \n", "one")).ends_with("train/seq.out: holds no text"));
        assert!(refusal(&files("\r\n")).ends_with("train.jsonl: holds no text"));

        let folder = files(LINE);
        fs::write(folder.path().join("test.jsonl"), b"{\xff").expect("a file");
        assert!(refusal(&folder).ends_with("test.jsonl: is not UTF-8 text (byte 1)"));
        fs::remove_file(folder.path().join("dev.jsonl")).expect("removed");
        assert!(refusal(&folder).contains("valid.jsonl: "));

        let message = refusal(&TempDir::new().expect("a folder"));
        assert!(message.contains("seq.in, seq.out and label") && message.contains("train.jsonl"), "{message}");
        let message = Utterances::read(Path::new("/no/such folder")).expect_err("missing").to_string();
        assert!(message.starts_with("/no/such folder: "), "{message}");
    }

    #[test]
    fn words_are_parted_by_white_space_and_marks_at_their_edges() {
        let contents = |text| words(text).into_iter().map(|word| word.text).collect::<Vec<_>>();
        assert_eq!(
            contents("(Don't stop... at 3.5, st. John's!)"),
            ["(", "Don't", "stop", ".", ".", ".", "at", "3.5", ",", "st", ".", "John's", "!", ")"]
        );
        assert_eq!(contents("'tis «o'clock»\u{a0}„x“"), ["'", "tis", "«", "o'clock", "»", "„", "x", "“"]);
        assert_eq!(contents("?!"), ["?", "!"]);
        for blank in ["", " ", "\t\r\n\u{2003}"] {
            assert_eq!(words(blank), []);
        }
    }

    #[test]
    fn offsets_of_words_count_characters() {
        let text = " 🔥 is «größer»,\u{3000}ok?";
        let characters: Vec<char> = text.chars().collect();
        let found = words(text);
        assert_eq!(found[0], Word { text: "🔥".to_owned(), start: 1, end: 2 });
        assert_eq!(found.len(), 8);
        for word in found {
            assert_eq!(characters[word.start..word.end].iter().collect::<String>(), word.text);
        }
    }
}
