//! Batches of token rows and their next tokens.

use std::ops::Range;

use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};

use crate::error::DataError;

/// The target of an ignored position.
pub const IGNORED_TARGET: i32 = -100;

/// Rows of tokens with their targets, on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenBatch {
    inputs: Vec<i32>,
    targets: Vec<i32>,
    /// The token that ends a document, where documents are found by it.
    end: Option<u32>,
    /// Where documents are to be told apart, for each token the place in its row where its document
    /// begins.
    starts: Option<Vec<i32>>,
    seq_length: usize,
}

impl TokenBatch {
    /// Concatenated rows of `seq_length` tokens, and a target for each token, or
    /// [`IGNORED_TARGET`].
    ///
    /// # Errors
    /// If the rows are incomplete, or the number of targets differs.
    pub fn new(inputs: Vec<i32>, targets: Vec<i32>, seq_length: usize) -> Result<Self, DataError> {
        let (tokens, wanted) = (inputs.len(), targets.len());
        if tokens == 0 || seq_length == 0 || !tokens.is_multiple_of(seq_length) {
            return Err(DataError::Batch(format!("{tokens} tokens do not divide into rows of {seq_length}")));
        }
        if tokens != wanted {
            return Err(DataError::Batch(format!("{tokens} tokens have {wanted} targets: each needs one")));
        }
        Ok(Self { inputs, targets, ..Self::empty(seq_length) })
    }

    /// An empty batch of rows of `seq_length`.
    pub(crate) fn empty(seq_length: usize) -> Self {
        Self { inputs: Vec::new(), targets: Vec::new(), end: None, starts: None, seq_length }
    }

    /// An empty batch with separate documents, each ended by `end`.
    pub(crate) fn of_documents(seq_length: usize, end: u32) -> Self {
        Self { end: Some(end), starts: Some(Vec::new()), ..Self::empty(seq_length) }
    }

    /// Adds a row that predicts each of `tokens` after the first, padded with ignored positions.
    pub(crate) fn push(&mut self, tokens: &[u32]) {
        let pairs = tokens.len().saturating_sub(1).min(self.seq_length);
        let filling = self.seq_length - pairs;
        let padding = tokens.first().map_or(0, |token| *token as i32);
        if let (Some(end), Some(starts)) = (self.end, &mut self.starts) {
            let mut start = 0;
            starts.extend((0..self.seq_length).map(|at| {
                let here = start;
                if tokens.get(at) == Some(&end) {
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

    /// A batch without rows, for [`push_packed`](Self::push_packed).
    pub fn packed(seq_length: usize) -> Self {
        Self { starts: Some(Vec::new()), ..Self::empty(seq_length) }
    }

    /// Adds a row of several sequences, each with a flag a token that says whether it is predicted.
    /// No sequence sees another, and the last token of each is only a target. What does not fit is
    /// cut off; what is left of the row does not count.
    ///
    /// # Panics
    /// If the batch is not [`packed`](Self::packed), or a sequence has not as many flags as tokens.
    pub fn push_packed<'a>(&mut self, sequences: impl IntoIterator<Item = (&'a [u32], &'a [bool])>) {
        let starts = self.starts.as_mut().expect("a packed batch");
        let (begin, end) = (self.inputs.len(), self.inputs.len() + self.seq_length);
        for (tokens, predicted) in sequences {
            assert_eq!(tokens.len(), predicted.len(), "a flag for each token");
            let start = (self.inputs.len() - begin) as i32;
            let count = tokens.len().saturating_sub(1).min(end - self.inputs.len());
            self.inputs.extend(tokens[..count].iter().map(|token| *token as i32));
            let target = |(token, predicted): (&u32, &bool)| if *predicted { *token as i32 } else { IGNORED_TARGET };
            self.targets.extend(tokens.iter().zip(predicted).skip(1).take(count).map(target));
            starts.extend(std::iter::repeat_n(start, count));
        }
        let left = end - self.inputs.len();
        let start = (self.seq_length - left) as i32;
        self.inputs.extend(std::iter::repeat_n(0, left));
        self.targets.extend(std::iter::repeat_n(IGNORED_TARGET, left));
        starts.extend(std::iter::repeat_n(start, left));
    }

    /// Tokens, in row-major order.
    pub fn inputs(&self) -> &[i32] {
        &self.inputs
    }

    /// Next tokens, or [`IGNORED_TARGET`].
    pub fn targets(&self) -> &[i32] {
        &self.targets
    }

    /// For each token the column where its document starts, with separate documents.
    pub fn document_starts(&self) -> Option<&[i32]> {
        self.starts.as_deref()
    }

    /// Number of rows.
    pub fn batch_size(&self) -> usize {
        self.inputs.len() / self.seq_length
    }

    /// Tokens in a row.
    pub fn seq_length(&self) -> usize {
        self.seq_length
    }

    /// Number of targets that are not ignored.
    pub fn target_count(&self) -> usize {
        self.targets.iter().filter(|target| **target != IGNORED_TARGET).count()
    }

    /// The same rows in `parts` batches of equal size, or fewer if there are fewer rows.
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
            end: self.end,
            starts: self.starts.as_ref().map(|starts| starts[range].to_vec()),
            seq_length: self.seq_length,
        }
    }

    /// Uploads the batch in one transfer.
    pub fn to_device<B: Backend>(&self, device: &B::Device) -> DeviceTokens<B> {
        let starts = self.document_starts();
        let parts = [Some(self.inputs()), Some(self.targets()), starts];
        let all: Vec<i32> = parts.into_iter().flatten().flatten().copied().collect();
        // As one row, then reshaped: devices may pad the rows of a matrix.
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
    /// Next tokens, or [`IGNORED_TARGET`].
    pub targets: Tensor<B, 2, Int>,
    /// The column where each token's document starts, with separate documents.
    pub document_starts: Option<Tensor<B, 2, Int>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packed_row_keeps_its_sequences_apart_and_predicts_what_is_flagged() {
        let mut batch = TokenBatch::packed(6);
        let row: [(&[u32], &[bool]); 2] = [(&[5, 6, 7], &[false, false, true]), (&[8, 9, 4], &[false, true, true])];
        batch.push_packed(row);
        batch.push_packed([(&[1, 2, 3, 4, 5, 6, 7, 8, 9][..], &[true; 9][..])]);
        let ignored = IGNORED_TARGET;
        assert_eq!(batch.inputs(), [5, 6, 8, 9, 0, 0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(batch.targets(), [ignored, 7, 9, 4, ignored, ignored, 2, 3, 4, 5, 6, 7]);
        assert_eq!(batch.document_starts(), Some(&[0, 0, 2, 2, 4, 4, 0, 0, 0, 0, 0, 0][..]));
        assert_eq!((batch.batch_size(), batch.target_count()), (2, 9));
    }
}
