//! What a language model trains on: a text, or stories that the program writes itself.

use crate::batch::TokenBatch;
use crate::embedded::stories::StoryGrammar;
use crate::error::DataError;
use crate::random::Generator;
use crate::tokenizer::Tokenizer;

/// The part of a corpus to take from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// What is learnt from.
    Train,
    /// What is held out.
    Valid,
}

/// A source of training and validation batches.
#[derive(Debug)]
pub enum Corpus {
    /// The user's text.
    Text(TextCorpus),
    /// The embedded stories.
    Stories(StoryCorpus),
}

impl Corpus {
    /// The training batch of a step: a pure function of `seed` and `step`.
    pub fn batch(&self, seed: u64, step: u64, batch_size: usize) -> TokenBatch {
        match self {
            Self::Text(text) => text.batch(seed, step, batch_size),
            Self::Stories(stories) => stories.batch(Split::Train, seed, step, batch_size),
        }
    }

    /// Validation batches: the same ones every time, about `tokens` targets of them, or all there are.
    pub fn valid_batches(&self, batch_size: usize, tokens: usize) -> Vec<TokenBatch> {
        match self {
            Self::Text(text) => text.valid_batches(batch_size, tokens),
            Self::Stories(stories) => {
                let per_batch = batch_size * stories.seq_length;
                let batches = tokens.div_ceil(per_batch).max(1) as u64;
                (0..batches).map(|step| stories.batch(Split::Valid, 0, step, batch_size)).collect()
            }
        }
    }

    /// The token that ends a text of this corpus, where there is one.
    pub fn end_token(&self) -> Option<u32> {
        match self {
            Self::Text(_) => None,
            Self::Stories(stories) => Some(stories.line_break),
        }
    }

    /// Entropy of the source in nats a token, where it is known exactly.
    pub fn source_entropy(&self) -> Option<f64> {
        match self {
            Self::Text(_) => None,
            Self::Stories(stories) => Some(stories.grammar.entropy_per_token()),
        }
    }
}

/// A text as tokens, the tail of it held out.
#[derive(Debug)]
pub struct TextCorpus {
    train: Vec<u32>,
    valid: Vec<u32>,
    seq_length: usize,
}

impl TextCorpus {
    /// Holds out the share `holdout` (in (0, 1)) at the end of `tokens`; rows are of `seq_length` tokens.
    ///
    /// # Errors
    /// If what is left to train on is shorter than one row and its targets, or nothing could be held out.
    pub fn new(mut tokens: Vec<u32>, seq_length: usize, holdout: f64) -> Result<Self, DataError> {
        let total = tokens.len();
        let train = (total as f64 * (1.0 - holdout)) as usize;
        if train <= seq_length || total - train < 2 {
            let needed = ((seq_length + 1) as f64 / (1.0 - holdout)).ceil().max(2.0 / holdout) as usize;
            return Err(DataError::Short { tokens: total, seq_length, needed });
        }
        let valid = tokens.split_off(train);
        Ok(Self { train: tokens, valid, seq_length })
    }

    fn batch(&self, seed: u64, step: u64, batch_size: usize) -> TokenBatch {
        let mut batch = TokenBatch::empty(self.seq_length);
        for row in 0..batch_size {
            let start = Generator::new(seed, step, row as u64).below(self.train.len() - self.seq_length);
            batch.push(&self.train[start..=start + self.seq_length]);
        }
        batch
    }

    /// The held-out tail from its start, row after row, each predicting from nothing but its own beginning.
    fn valid_batches(&self, batch_size: usize, tokens: usize) -> Vec<TokenBatch> {
        let rows: Vec<&[u32]> = (0..self.valid.len() - 1)
            .step_by(self.seq_length)
            .map(|start| &self.valid[start..self.valid.len().min(start + self.seq_length + 1)])
            .take(tokens.div_ceil(self.seq_length).max(1))
            .collect();
        let batch = |rows: &[&[u32]]| {
            let mut batch = TokenBatch::empty(self.seq_length);
            rows.iter().for_each(|row| batch.push(row));
            batch
        };
        rows.chunks(batch_size).map(batch).collect()
    }
}

/// Stories without end, whole stories in each row.
#[derive(Debug)]
pub struct StoryCorpus {
    grammar: StoryGrammar,
    seq_length: usize,
    line_break: u32,
}

/// Added to the index of held-out stories, far beyond any that training reaches.
const HELD_OUT: u64 = 1 << 60;

impl StoryCorpus {
    /// Stories in rows of `seq_length` tokens; at least [`StoryGrammar::longest_story`], or the ends of long ones are
    /// cut off.
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

    /// A batch of rows, each a line break and then as many whole stories as fit.
    pub fn batch(&self, split: Split, seed: u64, step: u64, batch_size: usize) -> TokenBatch {
        let mut batch = TokenBatch::empty(self.seq_length);
        for row in 0..batch_size as u64 {
            let first = (step * batch_size as u64 + row) * self.seq_length as u64;
            let first = if split == Split::Valid { first + HELD_OUT } else { first };
            let mut tokens = vec![self.line_break];
            for index in first.. {
                let story = self.grammar.story(seed, index);
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
