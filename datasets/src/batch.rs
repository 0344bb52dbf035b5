//! A batch of token rows and what should follow each token.

use std::ops::Range;

use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};

/// The target of a position that does not count.
pub const IGNORED_TARGET: i32 = -100;

/// Rows of tokens with their targets, on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenBatch {
    inputs: Vec<i32>,
    targets: Vec<i32>,
    /// Where documents are to be told apart, the token that ends one, and for each token the place in its row where its document
    /// begins.
    documents: Option<(u32, Vec<i32>)>,
    seq_length: usize,
}

impl TokenBatch {
    /// A batch without rows, of rows of `seq_length`.
    pub(crate) fn empty(seq_length: usize) -> Self {
        Self { inputs: Vec::new(), targets: Vec::new(), documents: None, seq_length }
    }

    /// A batch without rows, in whose rows `end` ends a document.
    pub(crate) fn of_documents(seq_length: usize, end: u32) -> Self {
        Self { documents: Some((end, Vec::new())), ..Self::empty(seq_length) }
    }

    /// Adds a row that predicts each of `tokens` after the first, filled up with positions that do not count.
    pub(crate) fn push(&mut self, tokens: &[u32]) {
        let pairs = tokens.len().saturating_sub(1).min(self.seq_length);
        let filling = self.seq_length - pairs;
        let padding = tokens.first().map_or(0, |token| *token as i32);
        if let Some((end, starts)) = &mut self.documents {
            let mut start = 0;
            starts.extend((0..self.seq_length).map(|at| {
                let here = start;
                if tokens.get(at) == Some(end) {
                    start = at as i32 + 1;
                }
                here
            }));
        }
        self.inputs.extend(tokens[..pairs].iter().map(|token| *token as i32));
        self.inputs.extend(std::iter::repeat_n(padding, filling));
        self.targets.extend(tokens[1..=pairs].iter().map(|token| *token as i32));
        self.targets.extend(std::iter::repeat_n(IGNORED_TARGET, filling));
    }

    /// Tokens, row after row.
    pub fn inputs(&self) -> &[i32] {
        &self.inputs
    }

    /// What follows each token, or [`IGNORED_TARGET`].
    pub fn targets(&self) -> &[i32] {
        &self.targets
    }

    /// For each token the place in its row where its document begins, where documents are to be told apart.
    pub fn document_starts(&self) -> Option<&[i32]> {
        self.documents.as_ref().map(|(_, starts)| starts.as_slice())
    }

    /// Number of rows.
    pub fn batch_size(&self) -> usize {
        self.inputs.len() / self.seq_length
    }

    /// Tokens in a row.
    pub fn seq_length(&self) -> usize {
        self.seq_length
    }

    /// How many targets count.
    pub fn target_count(&self) -> usize {
        self.targets.iter().filter(|target| **target != IGNORED_TARGET).count()
    }

    /// The same rows in `parts` batches of equal size, or in fewer where there are fewer rows.
    pub fn split(self, parts: usize) -> Vec<Self> {
        let (all, rows) = (self.batch_size(), self.batch_size().div_ceil(parts.max(1)).max(1));
        (0..all).step_by(rows).map(|begin| self.rows(begin..all.min(begin + rows))).collect()
    }

    /// Some of its rows.
    ///
    /// # Panics
    /// If there are not so many.
    pub fn rows(&self, rows: Range<usize>) -> Self {
        let range = rows.start * self.seq_length..rows.end * self.seq_length;
        Self {
            inputs: self.inputs[range.clone()].to_vec(),
            targets: self.targets[range.clone()].to_vec(),
            documents: self.documents.as_ref().map(|(end, starts)| (*end, starts[range].to_vec())),
            seq_length: self.seq_length,
        }
    }

    /// What of it is on the device, in one upload.
    pub fn to_device<B: Backend>(&self, device: &B::Device) -> DeviceTokens<B> {
        let starts = self.document_starts();
        let parts = [Some(self.inputs()), Some(self.targets()), starts];
        let all: Vec<i32> = parts.into_iter().flatten().flatten().copied().collect();
        // As one row, and then as many: devices may lay the rows of a matrix apart.
        let (all, count) = (Tensor::<B, 1, Int>::from_data(all.as_slice(), device), self.inputs.len());
        let shape = [self.batch_size(), self.seq_length];
        let part = |at: usize| all.clone().narrow(0, at * count, count).reshape(shape);
        DeviceTokens { inputs: part(0), targets: part(1), document_starts: starts.map(|_| part(2)) }
    }
}

/// A batch on the device.
#[derive(Clone, Debug)]
pub struct DeviceTokens<B: Backend> {
    /// Tokens, `[batch_size, seq_length]`.
    pub inputs: Tensor<B, 2, Int>,
    /// What follows each, or [`IGNORED_TARGET`].
    pub targets: Tensor<B, 2, Int>,
    /// Where in its row each token's document begins, where documents are to be told apart.
    pub document_starts: Option<Tensor<B, 2, Int>>,
}
