//! Batches of token rows and their next tokens.

use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};

/// The target of an ignored position.
pub const IGNORED_TARGET: i32 = -100;

/// Rows of tokens with their targets, on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenBatch {
    inputs: Vec<i32>,
    targets: Vec<i32>,
    /// With separate documents: the token that ends one, and for each token the column where its
    /// document starts.
    documents: Option<(u32, Vec<i32>)>,
    seq_length: usize,
}

impl TokenBatch {
    /// An empty batch of rows of `seq_length`.
    pub(crate) fn empty(seq_length: usize) -> Self {
        Self { inputs: Vec::new(), targets: Vec::new(), documents: None, seq_length }
    }

    /// An empty batch with separate documents, each ended by `end`.
    pub(crate) fn of_documents(seq_length: usize, end: u32) -> Self {
        Self { documents: Some((end, Vec::new())), ..Self::empty(seq_length) }
    }

    /// Adds a row that predicts each of `tokens` after the first, padded with ignored positions.
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

    /// Number of targets that are not ignored.
    pub fn target_count(&self) -> usize {
        self.targets.iter().filter(|target| **target != IGNORED_TARGET).count()
    }

    /// The same rows in `parts` batches of equal size, or fewer if there are fewer rows.
    pub fn split(self, parts: usize) -> Vec<Self> {
        let rows = self.batch_size().div_ceil(parts.max(1)).max(1) * self.seq_length;
        let part = |begin: usize| {
            let range = begin..self.inputs.len().min(begin + rows);
            Self {
                inputs: self.inputs[range.clone()].to_vec(),
                targets: self.targets[range.clone()].to_vec(),
                documents: self.documents.as_ref().map(|(end, starts)| (*end, starts[range].to_vec())),
                seq_length: self.seq_length,
            }
        };
        (0..self.inputs.len()).step_by(rows).map(part).collect()
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
