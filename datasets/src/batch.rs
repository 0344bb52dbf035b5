//! A batch of token rows and what should follow each token.

use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};

/// The target of a position that does not count.
pub const IGNORED_TARGET: i32 = -100;

/// Rows of tokens with their targets, on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenBatch {
    inputs: Vec<i32>,
    targets: Vec<i32>,
    seq_length: usize,
}

impl TokenBatch {
    /// A batch without rows, of rows of `seq_length`.
    pub(crate) fn empty(seq_length: usize) -> Self {
        Self { inputs: Vec::new(), targets: Vec::new(), seq_length }
    }

    /// Adds a row that predicts each of `tokens` after the first, filled up with positions that do not count.
    pub(crate) fn push(&mut self, tokens: &[u32]) {
        let pairs = tokens.len().saturating_sub(1).min(self.seq_length);
        let filling = self.seq_length - pairs;
        let padding = tokens.first().map_or(0, |token| *token as i32);
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
        let rows = self.batch_size().div_ceil(parts.max(1)).max(1) * self.seq_length;
        let chunks = self.inputs.chunks(rows).zip(self.targets.chunks(rows));
        let part = |(inputs, targets): (&[i32], &[i32])| Self {
            inputs: inputs.to_vec(),
            targets: targets.to_vec(),
            seq_length: self.seq_length,
        };
        chunks.map(part).collect()
    }

    /// Tokens and targets on the device, each `[batch_size, seq_length]`, in one upload each.
    pub fn to_device<B: Backend>(&self, device: &B::Device) -> (Tensor<B, 2, Int>, Tensor<B, 2, Int>) {
        let shape = [self.batch_size(), self.seq_length];
        // As one row, and then as many: devices may lay the rows of a matrix apart.
        let upload = |values: &[i32]| Tensor::<B, 1, Int>::from_data(values, device).reshape(shape);
        (upload(&self.inputs), upload(&self.targets))
    }
}
