//! Files of every kind: their documents, or their errors.

use std::io::Write;

use super::*;

fn pieces(path: &Path, field: &str, may_cut: bool) -> Result<Vec<Piece>, DataError> {
    let mut found = Vec::new();
    TextSource::open(path, field)?.read(may_cut, &mut |piece| {
        found.push(piece);
        Ok(ControlFlow::Continue(()))
    })?;
    Ok(found)
}

/// The documents of standard input.
fn piped(bytes: &[u8], field: &str) -> Result<Vec<String>, DataError> {
    let source = TextSource::open(Path::new(STDIN), field)?;
    let mut found = Vec::new();
    let _ = source.decompressed(bytes, Path::new(STDIN), Format::JsonOrText, true, &mut |piece| {
        found.push(piece.text);
        Ok(ControlFlow::Continue(()))
    })?;
    Ok(found)
}

fn documents(path: &Path, field: &str) -> Result<Vec<String>, DataError> {
    Ok(pieces(path, field, true)?.into_iter().map(|piece| piece.text).collect())
}

fn whole(text: &str) -> Piece {
    Piece { text: text.into(), ends_document: true }
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    gzip.write_all(bytes).expect("in memory");
    gzip.finish().expect("in memory")
}

fn zstd_of(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 1).expect("in memory")
}

/// A text in little-endian UTF-16, with its mark.
fn utf16(text: &str) -> Vec<u8> {
    [0xFEFF].into_iter().chain(text.encode_utf16()).flat_map(u16::to_le_bytes).collect()
}

const LINES: &str = "{\"id\": 1, \"text\": \"one\"}\n{\"text\": \"två\\n\"}\n";
const ARRAY: &str = "[{\"id\": 1, \"text\": \"one\"}, {\"text\": \"två\\n\"}]";
const PRETTY: &str = "[\n  {\n    \"id\": [1, {\"a\": \"]}\\\"\"}],\n    \"text\": \"one\"\n  },\n  \
                      {\n    \"text\": \"två\\n\"\n  }\n]\n";
const OBJECTS: &str = "{\n  \"text\": \"one\"\n}\n{\n  \"text\": \"två\\n\"\n}\n";
const TABLE: &str = "id,text\n1,one\n2,\"två\n\"\n";
const BOTH: &[&str] = &["one", "två\n"];

#[test]
fn every_format_gives_its_documents() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let lines = "{\"id\": 1, \"text\": \"one\\n\"}\n\n{\"text\": \"två\", \"id\": 2}";
    fs::write(at("a.jsonl"), lines).expect("writable");
    fs::write(at("b.txt"), "three\nfour").expect("writable");
    fs::write(at("c.jsonl.gz"), gzip(lines.as_bytes())).expect("writable");
    fs::write(at("d.zst"), zstd_of(b"five")).expect("writable");
    parquet::tests::write(&at("e.parquet"), &[Some("six"), None, Some("seven")]);
    let expected = ["one\n", "två", "three\nfour", "one\n", "två", "five", "six", "seven"].map(whole).to_vec();
    assert_eq!(pieces(folder.path(), "text", true).expect("good files"), expected);
    assert_eq!(read_text(&at("b.txt")).expect("a text"), "three\nfour");
    assert_eq!(read_text(folder.path()).expect("text").lines().count(), 9);
}

#[test]
fn a_file_is_taken_as_what_it_contains() {
    let mark = |text: &str| format!("\u{feff}{text}").into_bytes();
    let plain = |text: &str| text.as_bytes().to_vec();
    let nested = "{\"meta\": {\"text\": \"one\", \"by\": {\"name\": \"x\"}}}\n{\"meta\": null}\n";
    let files: Vec<(&str, Vec<u8>, &str, &[&str])> = vec![
        // Formats and compression.
        ("lines.jsonl", plain(LINES), "text", BOTH),
        ("lines.ndjson", plain(LINES), "text", BOTH),
        ("lines.json", plain(LINES), "text", BOTH),
        ("lines.json.gz", gzip(LINES.as_bytes()), "text", BOTH),
        ("lines.json.zst", zstd_of(LINES.as_bytes()), "text", BOTH),
        ("LINES.JSON", plain(LINES), "text", BOTH),
        ("array.json", plain(ARRAY), "text", BOTH),
        ("array.json.gz", gzip(ARRAY.as_bytes()), "text", BOTH),
        ("array.jsonl", plain(ARRAY), "text", BOTH),
        ("array.jsonl.zst", zstd_of(ARRAY.as_bytes()), "text", BOTH),
        ("pretty.json", plain(PRETTY), "text", BOTH),
        ("pretty.json.gz", gzip(PRETTY.as_bytes()), "text", BOTH),
        ("objects.json", plain(OBJECTS), "text", BOTH),
        ("one.json", plain("{\"text\": \"one\"}"), "text", &["one"]),
        ("close.json", plain("{\"text\": \"one\"}{\"text\": \"två\\n\"}"), "text", BOTH),
        ("none.json", plain(" [ ] \n"), "text", &[]),
        ("blank.json", plain(" \n\n"), "text", &[]),
        ("table.csv", plain(TABLE), "text", BOTH),
        ("table.csv.gz", gzip(TABLE.as_bytes()), "text", BOTH),
        ("table.csv.zst", zstd_of(TABLE.as_bytes()), "text", BOTH),
        ("table.tsv", plain("text\tid\none, \"1\"\t1\n\"två\n\"\t2"), "text", &["one, \"1\"", "två\n"]),
        ("table.tsv.gz", gzip(b"text\tid\none\t1\n"), "text", &["one"]),
        ("text.txt", plain(LINES), "text", &[LINES]),
        ("text.txt.gz", gzip(LINES.as_bytes()), "text", &[LINES]),
        ("text.md", plain("[one](two)"), "text", &["[one](two)"]),
        // Line ends.
        ("crlf.json", plain(&LINES.replace('\n', "\r\n")), "text", BOTH),
        ("crlf.csv", plain("id,text\r\n\r\n1,one\r\n2,\"a\r\nb\"\r\n"), "text", &["one", "a\r\nb"]),
        ("quotes.csv", plain("text\n\"say \"\"one\"\", two\"\n5\" wide\n"), "text", &["say \"one\", two", "5\" wide"]),
        ("empty.csv", plain("id,text\n1,\n2,two\n"), "text", &["two"]),
        // Encodings.
        ("mark.txt", mark("one"), "text", &["one"]),
        ("mark.txt.zst", zstd_of(&mark("one")), "text", &["one"]),
        ("mark.jsonl", mark(LINES), "text", BOTH),
        ("mark.json", mark(PRETTY), "text", BOTH),
        ("mark.json.gz", gzip(&mark(ARRAY)), "text", BOTH),
        ("mark.csv", mark("text,id\none,1\n"), "text", &["one"]),
        ("only-mark.txt", mark(""), "text", &[]),
        // Nesting.
        ("nested.jsonl", plain(nested), "meta.text", &["one"]),
        ("deeper.json", plain(nested), "meta.by.name", &["x"]),
        ("literal.jsonl", plain("{\"meta\": {\"text\": \"no\"}, \"meta.text\": \"one\"}"), "meta.text", &["one"]),
        ("half.jsonl", plain("{\"a\": {\"b.c\": \"one\"}, \"a.b\": {\"c\": \"two\"}}"), "a.b.c", &["one"]),
        ("half-2.jsonl", plain("{\"a\": 1, \"a.b\": {\"c\": \"two\"}}"), "a.b.c", &["two"]),
        ("dots.csv", plain("meta.text\none\n"), "meta.text", &["one"]),
        ("null.json", plain("[{\"text\": null}, {\"text\": \"one\"}]"), "text", &["one"]),
    ];
    let folder = tempfile::tempdir().expect("a folder");
    assert!(files.len() >= 30);
    for (name, bytes, field, expected) in files {
        let path = folder.path().join(name);
        fs::write(&path, bytes).expect("writable");
        assert_eq!(documents(&path, field).expect(name), expected, "{name}");
    }
    let path = folder.path().join("nested.parquet");
    let fields = "OPTIONAL group meta { OPTIONAL BINARY text (UTF8); }";
    parquet::tests::write_as(&path, fields, 2, &[Some("one"), None, Some("two")]);
    assert_eq!(documents(&path, "meta.text").expect("nested"), ["one", "two"]);
}

#[test]
fn what_is_malformed_is_named_with_its_place() {
    let plain = |text: &str| text.as_bytes().to_vec();
    const MEND: &str = "write JSON lines or one array of objects, or name it .txt";
    let row = "1,one\n".repeat(300_000);
    let files: Vec<(&str, Vec<u8>, &str, &[&str])> = vec![
        // Bytes that are not text.
        ("a.txt", b"good \xFF bad".to_vec(), "text", &["a.txt: is not UTF-8 text (byte 5)"]),
        ("b.txt", b"cut off \xE2\x82".to_vec(), "text", &["b.txt: is not UTF-8 text (byte 8)"]),
        ("c.txt", b"\xEF\xBB\xBFa \xFF".to_vec(), "text", &["c.txt: is not UTF-8 text (byte 5)"]),
        ("d.txt", b"nul \0".to_vec(), "text", &["d.txt: holds a NUL byte (byte 4)"]),
        ("e.txt", b"\xEF\xBB\xBFnul \0".to_vec(), "text", &["e.txt: holds a NUL byte (byte 7)"]),
        (
            "f.jsonl",
            b"{\"text\": \"a\"}\n{\"text\": \"\0\"}".to_vec(),
            "text",
            &["f.jsonl, line 2: holds a NUL byte (byte 24)"],
        ),
        ("g.csv", b"text\na\nb\0\n".to_vec(), "text", &["g.csv, line 3: holds a NUL byte (byte 8)"]),
        (
            "h.json",
            b"[{\"text\": \"a\"},\n{\"text\": \"\xFF\"}]".to_vec(),
            "text",
            &["h.json, line 2: element 2", "(byte 10 of"],
        ),
        ("i.csv", b"text\na\n\xFF\n".to_vec(), "text", &["i.csv, line 3: is not UTF-8 text in the column 'text'"]),
        ("j.txt", utf16("one"), "text", &["j.txt: is UTF-16", "iconv -f UTF-16 -t UTF-8"]),
        ("k.jsonl", utf16(LINES), "text", &["k.jsonl: is UTF-16"]),
        ("l.csv.gz", gzip(&utf16(TABLE)), "text", &["l.csv.gz: is UTF-16"]),
        ("m.txt", b"\xFF\xFE\0\0a\0\0\0".to_vec(), "text", &["m.txt: is UTF-32"]),
        ("n.jsonl", gzip(LINES.as_bytes()), "text", &["n.jsonl: is compressed with gzip", ".gz"]),
        ("o.txt", zstd_of(b"one"), "text", &["o.txt: is compressed with zstd", ".zst"]),
        ("p.gz", b"not gzip".to_vec(), "text", &["p.gz"]),
        // JSON.
        (
            "a.jsonl",
            plain("{\"text\": \"a\"}\n{\"text\": "),
            "text",
            &["a.jsonl, line 2: is no JSON object", "(column 9)"],
        ),
        ("b.jsonl", plain("[1]"), "text", &["b.jsonl, line 1: '[1]' is an array, but not of objects", MEND]),
        ("c.jsonl", plain("\n[\"a\"]\n[\"b\"]"), "text", &["c.jsonl, line 2: '[\"a\"]' is an array", MEND]),
        ("d.json", plain("\n\nonce upon"), "text", &["d.json, line 3: 'once upon' is neither an object nor", MEND]),
        ("e.json.gz", gzip(b"\"once upon\""), "text", &["e.json.gz, line 1: '\"once upon\"' is neither", MEND]),
        ("f.json", plain("{\"text\": \"a\nb\"}"), "text", &["f.json, line 1: is no JSON object"]),
        (
            "g.json",
            plain("{\n\"text\":\n oops}"),
            "text",
            &["g.json, line 3: is no JSON object: expected value (column 2)"],
        ),
        ("h.jsonl", plain("{text: 1}"), "text", &["h.jsonl, line 1: is no JSON object"]),
        (
            "i.json",
            plain("[{\"text\": \"a\"},\n {\"text\" \"b\"}]"),
            "text",
            &["i.json, line 2: element 2 of the array: is no JSON"],
        ),
        ("j.json", plain("[{\"text\": \"a\"},\n 7]"), "text", &["j.json, line 2: '7' is where element 2", "an object"]),
        ("k.json", plain("[{\"text\": \"a\"}\n{}]"), "text", &["k.json, line 2: '{' is where ',' or ']' should be"]),
        ("l.json", plain("[{\"text\": \"a\"},\n"), "text", &["l.json, line 2: the end of the file is where element 2"]),
        ("m.json", plain("[{\"text\": \"a\"}]\n[]"), "text", &["m.json, line 2: '[' follows the end of the array"]),
        ("n.json", plain("{\"text\":\n\"a\"}\nand so on"), "text", &["n.json, line 3: 'a' is no JSON object"]),
        (
            "o.json",
            plain("{\n\"text\": \"a\"}\n{\"text\":\n\"b\""),
            "text",
            &["o.json, line 4: is no JSON object: EOF"],
        ),
        // Fields.
        (
            "q.jsonl",
            plain("{\"text\": \"a\"}\n\n{\"body\": \"a\", \"id\": 3}"),
            "text",
            &["q.jsonl, line 3: has no field 'text'; it has body, id: name one with --field NAME"],
        ),
        (
            "r.jsonl",
            plain("{\"text\": 3, \"meta\": {\"a\": \"x\", \"b\": {\"c\": 1}}}"),
            "text",
            &["r.jsonl, line 1: the field 'text' is a number, not text; other fields: meta.a, meta.b.c; name"],
        ),
        (
            "s.json",
            plain("[\n{\"meta\": {\"text\": \"x\"}},\n{\"meta\": {\"body\": [\"y\"]}}]"),
            "meta.text",
            &["s.json, line 3: element 2 of the array: has no field 'meta.text'; it has meta.body"],
        ),
        (
            "t.json",
            plain("{\n\"version\": 1, \"data\": [{\"text\": \"x\"}]}"),
            "text",
            &["t.json, line 1: has no field 'text'; it has version, data", "jq -c '.data[]'"],
        ),
        ("u-2.jsonl", plain("{\"a\\nb\": 1}"), "text", &["u-2.jsonl, line 1: has no field 'text'; it has a b:"]),
        ("u.jsonl", plain("{}"), "text", &["u.jsonl, line 1: has no field 'text'; it has nothing"]),
        ("v.jsonl", plain("{\"text\": [\"a\"]}"), "text", &["v.jsonl, line 1: the field 'text' is an array, not text"]),
        // Tables.
        ("a.csv", plain("id,body\n1,one\n"), "text", &["a.csv, line 1: has no field 'text'; it has id, body: name"]),
        (
            "b.csv",
            plain("id,text\n1,one\n\n2,two,more\n"),
            "text",
            &["b.csv, line 4: has 3 fields, but the header names 2"],
        ),
        (
            "c.tsv",
            plain("id\ttext\r\n1\t\"a\r\nb\"\r\n2\r\n"),
            "text",
            &["c.tsv, line 4: has 1 fields, but the header names 2"],
        ),
        (
            "d.csv",
            plain("id,text\n1,one\n2,\"two\n3,three\n"),
            "text",
            &["d.csv, line 3: a quoted field of this row is not closed"],
        ),
        ("e.csv", plain("text,text\na,b\n"), "text", &["e.csv, line 1: names two columns 'text'"]),
        ("f.csv", format!("id,text\n{row}\n1\n").into_bytes(), "text", &["f.csv, line 300003: has 1 fields"]),
        // Parquet.
        ("g.parquet", plain("PAR1 no more"), "text", &["g.parquet: is not Parquet"]),
    ];
    let folder = tempfile::tempdir().expect("a folder");
    let refused = |name: &str, field: &str, said: &[&str]| {
        let message = documents(&folder.path().join(name), field).expect_err(name).to_string();
        for said in said {
            assert!(message.contains(said), "{name}: '{said}' is not in: {message}");
        }
        assert!(message.contains(name) && !message.contains('\n'), "{name}: {message}");
    };
    for (name, bytes, field, said) in files {
        fs::write(folder.path().join(name), bytes).expect("writable");
        refused(name, field, said);
    }
    let fields = "OPTIONAL group meta { OPTIONAL BINARY text (UTF8); }";
    parquet::tests::write_as(&folder.path().join("i.parquet"), fields, 2, &[Some("x")]);
    refused("i.parquet", "text", &["has no field 'text'; it has meta.text: name one with --field NAME"]);
    parquet::tests::write_number(&folder.path().join("j.parquet"));
    refused("j.parquet", "id", &["the column 'id' is INT64, not text; other fields: nothing"]);
}

#[test]
fn standard_input_is_json_where_it_begins_as_json() {
    let cases: [(&str, &[&str]); 12] = [
        (LINES, BOTH),
        (ARRAY, BOTH),
        (PRETTY, BOTH),
        (OBJECTS, BOTH),
        ("\u{feff}{\"text\": \"one\"}", &["one"]),
        ("[]\n", &[]),
        ("\u{feff}once upon", &["once upon"]),
        ("\n [ ] buy milk\n", &["\n [ ] buy milk\n"]),
        ("[1] a footnote", &["[1] a footnote"]),
        ("{curly\n \"a\"}", &["{curly\n \"a\"}"]),
        ("\n\n", &["\n\n"]),
        ("", &[]),
    ];
    for (bytes, expected) in cases {
        assert_eq!(piped(bytes.as_bytes(), "text").expect(bytes), expected, "{bytes}");
    }
    let refused = |bytes: &[u8]| piped(bytes, "text").expect_err("no text").to_string();
    let message = refused(b"{\"text\": \"a\"}\n{\"body\": \"b\"}");
    assert!(message.starts_with("-, line 2: has no field 'text'; it has body"), "{message}");
    assert_eq!(refused(b"\xEF\xBB\xBFa \xFF"), "-: is not UTF-8 text (byte 5)");
    assert!(refused(&gzip(b"one")).starts_with("-: is compressed with gzip"));
}

/// Repeats the same bytes.
struct Repeated<'a> {
    bytes: &'a [u8],
    at: usize,
    times: usize,
}

impl Read for Repeated<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.at == self.bytes.len() {
            (self.at, self.times) = (0, self.times.saturating_sub(1));
        }
        if self.times == 0 {
            return Ok(0);
        }
        let count = into.len().min(self.bytes.len() - self.at);
        into[..count].copy_from_slice(&self.bytes[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}

#[test]
fn a_long_file_is_read_a_record_at_a_time() {
    // Far longer than a record may be, in one line.
    let text = "a".repeat(1 << 20);
    let (record, row) = (format!("{{\"text\": {text:?}}}, "), format!("1,{text}\n"));
    let times = 2 * LONGEST_DOCUMENT / record.len();
    let mut count = 0;
    let mut each = |piece: Piece| {
        assert_eq!(piece.text.len(), text.len());
        count += 1;
        Ok(ControlFlow::Continue(()))
    };
    let source = TextSource::open(Path::new(STDIN), "text").expect("a source");
    let repeated = |bytes| Repeated { bytes, at: 0, times };
    let array = (&b"["[..]).chain(repeated(record.as_bytes())).chain(&b"{\"text\": null}]"[..]);
    let _ = source.decompressed(array, Path::new("a.json"), Format::Json, true, &mut each).expect("good");
    let table = (&b"id,text\n"[..]).chain(repeated(row.as_bytes()));
    let _ = source.decompressed(table, Path::new("a.csv"), Format::Table(b','), true, &mut each).expect("good");
    assert_eq!(count, 2 * times);
}

#[test]
fn a_record_that_does_not_end_is_refused_before_it_fills_the_memory() {
    let source = TextSource::open(Path::new(STDIN), "text").expect("a source");
    let endless = || Repeated { bytes: b"abcdefg ", at: 0, times: usize::MAX };
    let refused = |begin: &'static str, format| {
        let mut each = |_| Ok(ControlFlow::Continue(()));
        let read = source.decompressed(begin.as_bytes().chain(endless()), Path::new("x"), format, true, &mut each);
        read.expect_err("endless").to_string()
    };
    assert_eq!(refused("{\"text\": \"", Format::Json), "x, line 1: is longer than 64 MB");
    assert_eq!(refused("{\"text\": \"a\"}\n{\"text\": \"", Format::Json), "x, line 2: is longer than 64 MB");
    let message = refused("[{\"text\": \"a\"},\n{\"text\": \"", Format::Json);
    assert_eq!(message, "x, line 2: element 2 of the array: is longer than 64 MB");
    let message = refused("text\na\n\"", Format::Table(b','));
    assert_eq!(message, "x, line 3: is longer than 64 MB: is a quoted field not closed?");
}
