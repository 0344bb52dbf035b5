use std::fs;
use std::ops::ControlFlow;

use super::*;
use crate::sources::TextSource;
use crate::tokenizer::TokenizerKind;

/// Documents of varying length, one per line, and a tokenizer trained on some of them.
fn documents(count: usize) -> (Vec<String>, Tokenizer) {
    let document = |at: usize| format!("document {at}: {}", "the kiln's fire glows, ".repeat(1 + at * 7 % 40));
    let documents: Vec<String> = (0..count).map(document).collect();
    let tokenizer =
        Tokenizer::train(TokenizerKind::Bpe(300), &documents[..count.min(50)].concat()).expect("a tokenizer");
    (documents, tokenizer)
}

fn write_jsonl(path: &Path, documents: &[String]) {
    let lines: Vec<String> = documents.iter().map(|text| serde_json::json!({ "text": text }).to_string()).collect();
    fs::write(path, lines.join("\n")).expect("writable");
}

fn go_on(_: Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn all(stream: &Stream) -> Vec<u32> {
    stream.read(0, stream.len() as usize).expect("readable")
}

const SMALL: PrepareOptions = PrepareOptions { held_out_documents: None, shard: 1000 };

#[test]
fn shards_hold_the_tokens_of_every_document_and_its_end() {
    let folder = tempfile::tempdir().expect("a folder");
    let (docs, tokenizer) = documents(300);
    let source = folder.path().join("docs.jsonl");
    write_jsonl(&source, &docs);
    let source = TextSource::open(&source, "text").expect("a file");
    let files = prepare(&source, &tokenizer, &folder.path().join("tokens"), SMALL, &mut go_on).expect("prepared");
    assert!(files.train.shards.len() > 10, "{}", files.train.shards.len());
    let end = tokenizer.end_token().expect("one");
    let expected: Vec<u32> =
        docs.iter().flat_map(|text| [tokenizer.encode(text).expect("any text"), vec![end]].concat()).collect();
    assert_eq!(all(&files.train), expected);
    // Any range, across shards.
    for (begin, count) in [(0, 1), (990, 1500), (expected.len() - 3, 3), (5, 0)] {
        assert_eq!(files.train.read(begin as u64, count).expect("readable"), expected[begin..begin + count]);
    }
    let manifest = files.manifest();
    assert_eq!((manifest.documents, manifest.tokens()), (300, expected.len() as u64));
    assert_eq!(manifest.bytes, docs.iter().map(|text| text.len() as u64).sum::<u64>());
    assert_eq!(files.tokenizer().expect("its own").sha256().ok(), tokenizer.sha256().ok());
}

#[test]
fn held_out_documents_are_in_files_of_their_own() {
    let folder = tempfile::tempdir().expect("a folder");
    let (docs, tokenizer) = documents(400);
    let source = folder.path().join("docs.jsonl");
    write_jsonl(&source, &docs);
    let source = TextSource::open(&source, "text").expect("a file");
    let options = PrepareOptions { held_out_documents: Some(0.25), ..SMALL };
    let files = prepare(&source, &tokenizer, &folder.path().join("tokens"), options, &mut go_on).expect("prepared");
    let end = tokenizer.end_token().expect("one");
    let texts_of = |stream: &Stream| -> Vec<String> {
        let tokens = all(stream);
        let documents = tokens.split(|token| *token == end);
        documents.map(|tokens| tokenizer.decode(tokens).expect("known")).filter(|text| !text.is_empty()).collect()
    };
    let (train, valid) = (texts_of(&files.train), texts_of(&files.valid));
    assert!((60..140).contains(&valid.len()), "{}", valid.len());
    let mut both = [train, valid].concat();
    let mut expected = docs;
    both.sort();
    expected.sort();
    assert_eq!(both, expected);
}

#[test]
fn what_was_stopped_goes_on_and_what_is_whole_is_taken_as_it_is() {
    let folder = tempfile::tempdir().expect("a folder");
    let (docs, tokenizer) = documents(3000);
    // A long text, in several pieces and batches.
    let source = folder.path().join("text.txt");
    fs::write(&source, docs.join("\n").repeat(8)).expect("writable");
    let open = || TextSource::open(&source, "text").expect("a file");
    let (whole, stopped) = (folder.path().join("whole"), folder.path().join("stopped"));
    let options = PrepareOptions { shard: 100_000, ..SMALL };
    let expected = prepare(&open(), &tokenizer, &whole, options, &mut go_on).expect("prepared");
    let mut calls = 0;
    let mut stop = |_| {
        calls += 1;
        if calls == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let error = prepare(&open(), &tokenizer, &stopped, options, &mut stop).expect_err("stopped");
    assert!(matches!(error, DataError::Stopped));
    assert!(TokenFiles::open(&stopped).expect_err("not whole").to_string().contains("are incomplete"));
    let partial = fs::read_dir(&stopped).expect("a folder").flatten();
    assert!(partial.into_iter().all(|entry| entry.path().extension().is_none_or(|extension| extension != "partial")));
    let mut encoded = Vec::new();
    let mut watch = |progress: Progress| {
        encoded.push(progress.encoded);
        ControlFlow::Continue(())
    };
    let files = prepare(&open(), &tokenizer, &stopped, options, &mut watch).expect("goes on");
    assert!(encoded.last().is_some_and(|last| *last < files.manifest().bytes), "all was made again: {encoded:?}");
    assert_eq!(all(&files.train), all(&expected.train));
    let shards = |files: &TokenFiles| files.manifest.train.iter().map(|shard| shard.crc32).collect::<Vec<_>>();
    assert_eq!(shards(&files), shards(&expected));
    let mut never = |_| -> ControlFlow<()> { panic!("there is nothing to do") };
    prepare(&open(), &tokenizer, &stopped, options, &mut never).expect("it exists");
}

#[test]
fn other_text_or_another_tokenizer_is_tokenized_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let (docs, tokenizer) = documents(20);
    let (source, tokens) = (folder.path().join("text.txt"), folder.path().join("tokens"));
    fs::write(&source, docs.join("\n")).expect("writable");
    let make = |tokenizer: &Tokenizer| {
        let source = TextSource::open(&source, "text").expect("a file");
        prepare(&source, tokenizer, &tokens, SMALL, &mut go_on).expect("prepared")
    };
    let first = all(&make(&tokenizer).train);
    fs::write(&source, "another text").expect("writable");
    let second = all(&make(&tokenizer).train);
    assert!(second.len() < first.len());
    let bytes = Tokenizer::train(TokenizerKind::Byte, "").expect("a tokenizer");
    assert_eq!(make(&bytes).tokenizer().expect("its own").vocab_size(), 256);
}

#[test]
fn tokens_of_files_that_were_read_otherwise_are_made_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let (_, tokenizer) = documents(20);
    let (source, tokens) = (folder.path().join("text.json"), folder.path().join("tokens"));
    fs::write(&source, "{\"text\": \"a text\"}").expect("writable");
    let source = TextSource::open(&source, "text").expect("a file");
    let made = prepare(&source, &tokenizer, &tokens, SMALL, &mut go_on).expect("prepared");
    // As written by an earlier version.
    let manifest = Manifest { reading: 0, documents: 7, ..made.manifest().clone() };
    manifest.write(&tokens).expect("writable");
    let made = prepare(&source, &tokenizer, &tokens, SMALL, &mut go_on).expect("prepared");
    assert_eq!(made.manifest().documents, 1);
}

#[test]
fn a_shard_that_is_damaged_cut_or_gone_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let (docs, tokenizer) = documents(100);
    let (source, tokens) = (folder.path().join("text.txt"), folder.path().join("tokens"));
    fs::write(&source, docs.join("\n")).expect("writable");
    let source = TextSource::open(&source, "text").expect("a file");
    let files = prepare(&source, &tokenizer, &tokens, PrepareOptions::default(), &mut go_on).expect("prepared");
    let shard = tokens.join("train-00000.tokens");
    let good = fs::read(&shard).expect("a shard");
    let refused = || TokenFiles::open(&tokens).expect_err("damaged").to_string();
    for (at, said) in [(200, "checksum"), (3, "header"), (30, "header")] {
        let mut bad = good.clone();
        bad[at] ^= 1;
        fs::write(&shard, bad).expect("writable");
        let message = refused();
        assert!(message.contains("train-00000.tokens: is damaged") && message.contains(said), "{message}");
    }
    // A copy is valid, although its times differ.
    fs::write(&shard, &good).expect("writable");
    TokenFiles::open(&tokens).expect("whole");
    // Truncated after opening: reads fail, too.
    fs::File::options().write(true).open(&shard).expect("a shard").set_len(100).expect("shorter");
    let message = files.train.read(0, 1000).expect_err("cut").to_string();
    assert!(message.contains("truncated while it was read"), "{message}");
    assert!(refused().contains("bytes instead of"), "{}", refused());
    fs::remove_file(&shard).expect("there");
    assert!(refused().contains("train-00000.tokens: No such file"), "{}", refused());
}

#[test]
fn a_folder_of_something_else_is_left_alone() {
    let folder = tempfile::tempdir().expect("a folder");
    let (docs, tokenizer) = documents(2);
    fs::write(folder.path().join("text.txt"), docs.join("\n")).expect("writable");
    let source = TextSource::open(folder.path(), "text").expect("a folder");
    let message = prepare(&source, &tokenizer, folder.path(), SMALL, &mut go_on).expect_err("no").to_string();
    assert!(message.contains("holds something other than tokens"), "{message}");
    fs::write(folder.path().join("text.txt"), "").expect("writable");
    let message = prepare(&source, &tokenizer, &folder.path().join("new"), SMALL, &mut go_on).expect_err("no");
    assert!(message.to_string().contains("holds no text"), "{message}");
}
