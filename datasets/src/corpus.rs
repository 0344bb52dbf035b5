//! Training data of a language model: text, or the embedded stories.

use std::ops::Range;
use std::sync::Arc;

use crate::batch::TokenBatch;
use crate::embedded::stories::StoryGrammar;
use crate::error::DataError;
use crate::random::Generator;
use crate::token_files::TokenFiles;
use crate::tokenizer::Tokenizer;

/// A split of a corpus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// Training data.
    Train,
    /// Held-out data.
    Valid,
}

/// The key of a training batch: all it depends on besides the corpus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchKey {
    /// Random seed.
    pub seed: u64,
    /// Counted from zero.
    pub step: u64,
}

impl BatchKey {
    /// Of a step.
    pub fn new(seed: u64, step: u64) -> Self {
        Self { seed, step }
    }
}

/// A source of training and validation batches.
#[derive(Debug)]
pub enum Corpus {
    /// The user's data.
    Text(TextCorpus),
    /// The embedded stories.
    Stories(StoryCorpus),
}

impl Corpus {
    /// A training batch of `batch_size` rows: a pure function of `key`.
    ///
    /// # Errors
    /// If the tokens' files cannot be read any more.
    pub fn batch(&self, key: BatchKey, batch_size: usize) -> Result<TokenBatch, DataError> {
        match self {
            Self::Text(text) => text.batch(key, batch_size),
            Self::Stories(stories) => Ok(stories.rows(Split::Train, key, batch_size)),
        }
    }

    /// Validation batches: always the same ones, about `tokens` targets, or all there are.
    ///
    /// # Errors
    /// As [`batch`](Self::batch).
    pub fn valid_batches(&self, batch_size: usize, tokens: usize) -> Result<Vec<TokenBatch>, DataError> {
        match self {
            Self::Text(text) => text.valid_batches(batch_size, tokens),
            Self::Stories(stories) => {
                let per_batch = batch_size * stories.seq_length;
                let batches = tokens.div_ceil(per_batch).max(1) as u64;
                let batch = |step| stories.rows(Split::Valid, BatchKey::new(0, step), batch_size);
                Ok((0..batches).map(batch).collect())
            }
        }
    }

    /// The end-of-document token of this corpus, if any.
    pub fn end_token(&self) -> Option<u32> {
        match self {
            Self::Text(text) => text.end_token,
            Self::Stories(stories) => Some(stories.line_break),
        }
    }

    /// Entropy of the source in nats per token, if known exactly.
    pub fn source_entropy(&self) -> Option<f64> {
        match self {
            Self::Text(_) => None,
            Self::Stories(stories) => Some(stories.grammar.entropy_per_token()),
        }
    }
}

/// One or several token sequences, each with a held-out part.
#[derive(Debug)]
pub struct TextCorpus {
    parts: Vec<Part>,
    seq_length: usize,
    end_token: Option<u32>,
    /// Whether attention is limited to a token's own document.
    documents_apart: bool,
}

/// A token source and its sampling weight.
#[derive(Debug)]
struct Part {
    train: Tokens,
    valid: Tokens,
    weight: f64,
}

/// A range of tokens.
#[derive(Debug)]
struct Tokens {
    place: Place,
    range: Range<u64>,
}

#[derive(Debug)]
enum Place {
    Memory(Vec<u32>),
    Train(Arc<TokenFiles>),
    Valid(Arc<TokenFiles>),
}

impl Tokens {
    fn len(&self) -> u64 {
        self.range.end - self.range.start
    }

    fn read(&self, begin: u64, count: usize) -> Result<Vec<u32>, DataError> {
        let begin = self.range.start + begin;
        match &self.place {
            Place::Memory(tokens) => Ok(tokens[begin as usize..begin as usize + count].to_vec()),
            Place::Train(files) => files.train.read(begin, count),
            Place::Valid(files) => files.valid.read(begin, count),
        }
    }
}

impl TextCorpus {
    /// Holds out the share `holdout` (in (0, 1)) at the end of `tokens`; rows are of `seq_length`
    /// tokens.
    ///
    /// # Errors
    /// If the rest is shorter than one row and its targets, or nothing could be held out.
    pub fn new(mut tokens: Vec<u32>, seq_length: usize, holdout: f64) -> Result<Self, DataError> {
        let train = held_in(tokens.len() as u64, seq_length, holdout)?;
        let valid = tokens.split_off(train as usize);
        let whole = |tokens: Vec<u32>| Tokens { range: 0..tokens.len() as u64, place: Place::Memory(tokens) };
        let parts = vec![Part { train: whole(tokens), valid: whole(valid), weight: 1.0 }];
        Ok(Self { parts, seq_length, end_token: None, documents_apart: false })
    }

    /// Token files, each sampled with its relative weight, above 0. Files without held-out
    /// documents hold out the share `holdout` at their end. Rows are of `seq_length` tokens.
    ///
    /// # Errors
    /// If one has too few tokens for a row, or nothing could be held out.
    pub fn of_files(files: Vec<(TokenFiles, f64)>, seq_length: usize, holdout: f64) -> Result<Self, DataError> {
        let end_token = files.first().and_then(|(files, _)| files.manifest().end_token);
        let part = |(files, weight): (TokenFiles, f64)| {
            let files = Arc::new(files);
            let (train, total) = (files.train.len(), files.len());
            let (train, valid) = if files.manifest().held_out_documents.is_some() {
                let valid = files.valid.len();
                if train <= seq_length as u64 || valid < 2 {
                    return Err(short(total, seq_length, holdout));
                }
                (0..train, Tokens { place: Place::Valid(Arc::clone(&files)), range: 0..valid })
            } else {
                let train = held_in(total, seq_length, holdout)?;
                (0..train, Tokens { place: Place::Train(Arc::clone(&files)), range: train..total })
            };
            Ok(Part { train: Tokens { place: Place::Train(files), range: train }, valid, weight })
        };
        let parts = files.into_iter().map(part).collect::<Result<_, _>>()?;
        Ok(Self { parts, seq_length, end_token, documents_apart: false })
    }

    /// Limits attention to a token's own document.
    ///
    /// # Errors
    /// If its tokenizer has no end-of-document token.
    pub fn with_documents_apart(mut self) -> Result<Self, DataError> {
        if self.end_token.is_none() {
            let reason = "its tokenizer has no token that ends a document, so documents cannot be separated";
            return Err(DataError::Tokenizer(reason.into()));
        }
        self.documents_apart = true;
        Ok(self)
    }

    fn batch(&self, key: BatchKey, batch_size: usize) -> Result<TokenBatch, DataError> {
        let mut batch = self.empty();
        for row in 0..batch_size as u64 {
            let mut generator = Generator::new(key.seed, key.step, row);
            let part = match self.parts.as_slice() {
                [only] => only,
                parts => {
                    let whole: f64 = parts.iter().map(|part| part.weight).sum();
                    let odds = parts.iter().map(|part| part.weight / whole).enumerate();
                    &parts[generator.pick(odds).0]
                }
            };
            let start = generator.below((part.train.len() - self.seq_length as u64) as usize);
            batch.push(&part.train.read(start as u64, self.seq_length + 1)?);
        }
        Ok(batch)
    }

    /// The held-out parts from their starts, each with its share of `tokens`. Every row predicts
    /// from its own tokens only.
    fn valid_batches(&self, batch_size: usize, tokens: usize) -> Result<Vec<TokenBatch>, DataError> {
        let whole: f64 = self.parts.iter().map(|part| part.weight).sum();
        let mut rows = Vec::new();
        for Part { valid, weight, .. } in &self.parts {
            let wanted = (tokens as f64 * weight / whole) as usize;
            let starts = (0..valid.len() - 1).step_by(self.seq_length);
            for start in starts.take(wanted.div_ceil(self.seq_length).max(1)) {
                let count = (valid.len() - start).min(self.seq_length as u64 + 1);
                rows.push(valid.read(start, count as usize)?);
            }
        }
        let batch = |rows: &[Vec<u32>]| {
            let mut batch = self.empty();
            rows.iter().for_each(|row| batch.push(row));
            batch
        };
        Ok(rows.chunks(batch_size).map(batch).collect())
    }

    fn empty(&self) -> TokenBatch {
        match self.end_token.filter(|_| self.documents_apart) {
            Some(end) => TokenBatch::of_documents(self.seq_length, end),
            None => TokenBatch::empty(self.seq_length),
        }
    }
}

/// The number of training tokens out of `total`.
fn held_in(total: u64, seq_length: usize, holdout: f64) -> Result<u64, DataError> {
    let train = (total as f64 * (1.0 - holdout)) as u64;
    if train <= seq_length as u64 || total - train < 2 {
        return Err(short(total, seq_length, holdout));
    }
    Ok(train)
}

fn short(total: u64, seq_length: usize, holdout: f64) -> DataError {
    let needed = ((seq_length + 1) as f64 / (1.0 - holdout)).ceil().max(2.0 / holdout) as usize;
    DataError::Short { tokens: total as usize, seq_length, needed }
}

/// Endless stories, whole ones in each row.
#[derive(Debug)]
pub struct StoryCorpus {
    grammar: StoryGrammar,
    seq_length: usize,
    line_break: u32,
}

/// Offset of the indices of held-out stories, far beyond those of training.
const HELD_OUT: u64 = 1 << 60;

impl StoryCorpus {
    /// Stories in rows of `seq_length` tokens; at least [`StoryGrammar::longest_story`], or long
    /// ones are truncated.
    pub fn new(seq_length: usize) -> Self {
        let grammar = StoryGrammar::new();
        let line_break = grammar.vocabulary().iter().position(|token| token == "\n").unwrap_or(0) as u32;
        Self { grammar, seq_length, line_break }
    }

    /// The tokenizer of the stories' words.
    ///
    /// # Errors
    /// If the tokenizer refuses its own vocabulary.
    pub fn tokenizer(&self) -> Result<Tokenizer, DataError> {
        Tokenizer::words(&self.grammar.vocabulary())
    }

    /// A batch of rows, each a line break and as many whole stories as fit.
    pub fn batch(&self, split: Split, seed: u64, step: u64, batch_size: usize) -> TokenBatch {
        self.rows(split, BatchKey::new(seed, step), batch_size)
    }

    fn rows(&self, split: Split, key: BatchKey, batch_size: usize) -> TokenBatch {
        let mut batch = TokenBatch::empty(self.seq_length);
        for row in 0..batch_size as u64 {
            let first = (key.step * batch_size as u64 + row) * self.seq_length as u64;
            let first = if split == Split::Valid { first + HELD_OUT } else { first };
            let mut tokens = vec![self.line_break];
            for index in first.. {
                let story = self.grammar.story(key.seed, index);
                if tokens.len() + story.tokens.len() > self.seq_length + 1 && tokens.len() > 1 {
                    break;
                }
                tokens.extend(story.tokens);
            }
            batch.push(&tokens);
        }
        batch
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::ops::ControlFlow;

    use super::*;
    use crate::sources::TextSource;
    use crate::token_files::{PrepareOptions, prepare};
    use crate::tokenizer::TokenizerKind;

    fn text(words: &str, count: usize) -> String {
        (0..count).map(|at| format!("{at} {words}\n")).collect()
    }

    fn files(folder: &std::path::Path, name: &str, text: &str, kind: TokenizerKind) -> TokenFiles {
        let path = folder.join(format!("{name}.txt"));
        fs::write(&path, text).expect("writable");
        let tokenizer = Tokenizer::train(kind, text).expect("a tokenizer");
        let source = TextSource::open(&path, "text").expect("a file");
        let options = PrepareOptions { shard: 500, ..PrepareOptions::default() };
        prepare(&source, &tokenizer, &folder.join(name), options, &mut |_| ControlFlow::Continue(())).expect("prepared")
    }

    #[test]
    fn files_and_memory_give_the_same_batches() {
        let folder = tempfile::tempdir().expect("a folder");
        let text = text("kiln", 400);
        let files = files(folder.path(), "a", &text, TokenizerKind::Byte);
        let encoded = files.tokenizer().expect("its own").encode(&text).expect("any text");
        let memory = Corpus::Text(TextCorpus::new(encoded, 16, 0.2).expect("long enough"));
        let files = Corpus::Text(TextCorpus::of_files(vec![(files, 1.0)], 16, 0.2).expect("long enough"));
        for step in 0..5 {
            let of = |corpus: &Corpus| corpus.batch(BatchKey::new(3, step), 4).expect("readable");
            assert_eq!(of(&memory), of(&files));
        }
        let of = |corpus: &Corpus| corpus.valid_batches(4, 500).expect("readable");
        assert_eq!(of(&memory), of(&files));
    }

    #[test]
    fn parts_of_a_batch_are_its_rows_in_their_order() {
        let tokens = Corpus::Text(TextCorpus::new((0..5000).collect(), 8, 0.1).expect("long enough"));
        for corpus in [tokens, Corpus::Stories(StoryCorpus::new(64))] {
            let whole = corpus.batch(BatchKey::new(1, 7), 6).expect("in memory");
            let parts = [0..1, 1..4, 4..6].map(|rows| whole.rows(rows));
            let together: Vec<i32> = parts.iter().flat_map(|part| part.inputs().to_vec()).collect();
            assert_eq!(together, whole.inputs());
            let counts = parts.iter().map(TokenBatch::target_count);
            assert_eq!(counts.sum::<usize>(), whole.target_count());
        }
    }

    #[test]
    fn several_texts_are_drawn_from_by_their_weights() {
        let folder = tempfile::tempdir().expect("a folder");
        let files = |name, words| files(folder.path(), name, &text(words, 900), TokenizerKind::Byte);
        let corpus = vec![(files("a", "aaaa"), 3.0), (files("b", "bbbb"), 1.0)];
        let a = corpus[0].0.tokenizer().expect("its own").encode("a").expect("any text")[0] as i32;
        let corpus = TextCorpus::of_files(corpus, 32, 0.1).expect("long enough");
        let batch = corpus.batch(BatchKey::new(1, 0), 400).expect("readable");
        let rows = batch.inputs().chunks(32).filter(|row| row.contains(&a)).count();
        assert!((260..340).contains(&rows), "{rows} of 400");
        let valid = corpus.valid_batches(1, 400).expect("readable");
        let rows = valid.iter().filter(|row| row.inputs().contains(&a)).count();
        assert_eq!((rows, valid.len()), (10, 14));
    }

    #[test]
    fn a_token_sees_none_before_its_own_document() {
        let folder = tempfile::tempdir().expect("a folder");
        let lines: String = (0..80).map(|at| format!("{{\"text\": \"kiln {at}\"}}\n")).collect();
        let path = folder.path().join("a.jsonl");
        fs::write(&path, lines).expect("writable");
        let tokenizer = Tokenizer::train(TokenizerKind::Bpe(260), "kiln 0123456789").expect("a tokenizer");
        let source = TextSource::open(&path, "text").expect("a file");
        let tokens = folder.path().join("tokens");
        let made = prepare(&source, &tokenizer, &tokens, PrepareOptions::default(), &mut |_| ControlFlow::Continue(()));
        let corpus = TextCorpus::of_files(vec![(made.expect("prepared"), 1.0)], 24, 0.1).expect("long enough");
        let corpus = corpus.with_documents_apart().expect("there is an end token");
        let batch = corpus.batch(BatchKey::new(1, 0), 10).expect("readable");
        let (end, starts) = (tokenizer.end_token().expect("one") as i32, batch.document_starts().expect("apart"));
        for (row, starts) in batch.inputs().chunks(24).zip(starts.chunks(24)) {
            let mut start = 0;
            for (at, token) in row.iter().enumerate() {
                assert_eq!(starts[at], start, "{row:?}");
                if *token == end {
                    start = at as i32 + 1;
                }
            }
            assert!(start > 0);
        }
        let bytes = files(folder.path(), "b", &text("b", 300), TokenizerKind::Byte);
        let refused = TextCorpus::of_files(vec![(bytes, 1.0)], 8, 0.1).expect("long enough").with_documents_apart();
        assert!(refused.expect_err("no end token").to_string().contains("has no token that ends a document"));
    }
}
