//! Labelled examples as tokens, and batches of them.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor, TensorData};

use crate::batch::IGNORED_TARGET;
use crate::by_length;
use crate::corpus::BatchKey;

/// Rows of tokens with a label each, on the host, padded to the longest row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabelledBatch {
    ids: Vec<i32>,
    lengths: Vec<i32>,
    labels: Vec<i32>,
    seq_length: usize,
}

impl LabelledBatch {
    /// Rows of tokens, each with the number of its label or [`IGNORED_TARGET`], padded with
    /// `padding`.
    pub fn new<'a>(rows: impl IntoIterator<Item = (&'a [u32], i32)> + Clone, padding: u32) -> Self {
        let seq_length = rows.clone().into_iter().map(|(tokens, _)| tokens.len()).max().unwrap_or(1).max(1);
        let mut batch = Self { ids: Vec::new(), lengths: Vec::new(), labels: Vec::new(), seq_length };
        for (tokens, label) in rows {
            batch.labels.push(label);
            batch.lengths.push(tokens.len() as i32);
            batch.ids.extend(tokens.iter().map(|token| *token as i32));
            batch.ids.resize(batch.labels.len() * seq_length, padding as i32);
        }
        batch
    }

    /// Tokens, in row-major order.
    pub fn ids(&self) -> &[i32] {
        &self.ids
    }

    /// Tokens of each row, without padding.
    pub fn lengths(&self) -> &[i32] {
        &self.lengths
    }

    /// The label of each row, or [`IGNORED_TARGET`].
    pub fn labels(&self) -> &[i32] {
        &self.labels
    }

    /// Number of rows.
    pub fn batch_size(&self) -> usize {
        self.labels.len()
    }

    /// Columns, padding included.
    pub fn seq_length(&self) -> usize {
        self.seq_length
    }

    /// Number of rows with a label.
    pub fn label_count(&self) -> usize {
        self.labels.iter().filter(|label| **label != IGNORED_TARGET).count()
    }

    /// The same rows in `parts` batches of equal size, or fewer if there are fewer rows.
    pub fn split(self, parts: usize) -> Vec<Self> {
        let (all, rows) = (self.batch_size(), self.batch_size().div_ceil(parts.max(1)).max(1));
        (0..all).step_by(rows).map(|begin| self.rows(begin..all.min(begin + rows))).collect()
    }

    /// Some of its rows, with the padding that they have here.
    ///
    /// # Panics
    /// If there are not so many.
    pub fn rows(&self, rows: Range<usize>) -> Self {
        Self {
            ids: self.ids[rows.start * self.seq_length..rows.end * self.seq_length].to_vec(),
            lengths: self.lengths[rows.clone()].to_vec(),
            labels: self.labels[rows].to_vec(),
            seq_length: self.seq_length,
        }
    }

    /// Uploads tokens and lengths in one transfer.
    pub fn to_device<B: Backend>(&self, device: &B::Device) -> DeviceTexts<B> {
        let (rows, count) = (self.batch_size(), self.ids.len());
        let all = [&self.ids[..], &self.lengths].concat();
        // As one row, then reshaped: devices may pad the rows of a matrix.
        let all = Tensor::<B, 1, Int>::from_data(all.as_slice(), device);
        DeviceTexts {
            ids: all.clone().narrow(0, 0, count).reshape([rows, self.seq_length]),
            lengths: all.narrow(0, count, rows),
        }
    }

    /// The probabilities that rows are to have, f32 `[batch_size, count]`, for the loss of
    /// `count` labels: a row sums to `weight` over the number of rows with a label, and to zero
    /// without one. Label smoothing spreads that share evenly over all labels.
    pub fn wanted<B: Backend>(&self, count: usize, smoothing: f64, weight: f64, device: &B::Device) -> Tensor<B, 2> {
        let share = weight / self.label_count().max(1) as f64;
        let mut wanted = vec![0f32; self.batch_size() * count];
        for (row, label) in wanted.chunks_exact_mut(count).zip(&self.labels) {
            if let Some(own) = usize::try_from(*label).ok().filter(|label| *label < count) {
                row.fill((share * smoothing / count as f64) as f32);
                row[own] = (share * (1.0 - smoothing + smoothing / count as f64)) as f32;
            }
        }
        Tensor::from_data(TensorData::new(wanted, [self.batch_size(), count]), (device, DType::F32))
    }
}

/// A [`LabelledBatch`] on a device, without its labels.
#[derive(Clone, Debug)]
pub struct DeviceTexts<B: Backend> {
    /// Tokens, `[batch_size, seq_length]`.
    pub ids: Tensor<B, 2, Int>,
    /// Tokens of each row without padding, `[batch_size]`.
    pub lengths: Tensor<B, 1, Int>,
}

/// The batches of an epoch, and what they depend on.
type Epoch = ((u64, u64, usize), Vec<Vec<usize>>);

/// Examples as tokens, with the number of a label each.
#[derive(Debug)]
pub struct EncodedTexts {
    rows: Vec<(Vec<u32>, i32)>,
    padding: u32,
    /// The last epoch that was asked for.
    epoch: Mutex<Option<Epoch>>,
}

impl EncodedTexts {
    /// Examples as tokens, each with the number of its label or [`IGNORED_TARGET`].
    pub fn new(rows: Vec<(Vec<u32>, i32)>, padding: u32) -> Self {
        Self { rows, padding, epoch: Mutex::new(None) }
    }

    /// Number of examples.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The training batch of a step, of `batch_size` rows: a pure function of `key`. In an epoch
    /// every text occurs once, batched by length; the last batch may be smaller.
    pub fn batch(&self, key: BatchKey, batch_size: usize) -> LabelledBatch {
        let batch_size = batch_size.max(1);
        let steps = self.rows.len().div_ceil(batch_size).max(1) as u64;
        let drawn_for = (key.seed, key.step / steps, batch_size);
        let mut kept = self.epoch.lock().unwrap_or_else(PoisonError::into_inner);
        let epoch = match kept.take() {
            Some(epoch) if epoch.0 == drawn_for => epoch,
            _ => {
                let lengths: Vec<usize> = self.rows.iter().map(|(tokens, _)| tokens.len()).collect();
                (drawn_for, by_length::epoch(&lengths, key.seed, key.step / steps, batch_size))
            }
        };
        let (_, batches) = kept.insert(epoch);
        self.of(batches.get((key.step % steps) as usize).map_or(&[][..], Vec::as_slice))
    }

    /// All examples sorted by length: their indices and the batch.
    pub fn batches(&self, batch_size: usize) -> Vec<(Vec<usize>, LabelledBatch)> {
        let mut order: Vec<usize> = (0..self.rows.len()).collect();
        order.sort_by_key(|index| self.rows[*index].0.len());
        order.chunks(batch_size.max(1)).map(|indices| (indices.to_vec(), self.of(indices))).collect()
    }

    fn of(&self, indices: &[usize]) -> LabelledBatch {
        let row = |index: &usize| {
            let (tokens, label) = &self.rows[*index];
            (&tokens[..], *label)
        };
        LabelledBatch::new(indices.iter().map(row), self.padding)
    }
}

#[cfg(test)]
mod tests {
    use burn_ndarray::NdArray;

    use super::*;

    fn examples() -> EncodedTexts {
        let row = |at: u32| (vec![at; 1 + at as usize % 5], if at == 3 { IGNORED_TARGET } else { at as i32 % 3 });
        EncodedTexts::new((0..23).map(row).collect(), 99)
    }

    #[test]
    fn an_epoch_has_each_text_once_padded_to_the_longest_of_its_batch() {
        let examples = examples();
        for epoch in 0..3 {
            let mut seen = Vec::new();
            for step in 0..6 {
                let batch = examples.batch(BatchKey::new(7, 6 * epoch + step), 4);
                let longest = *batch.lengths().iter().max().expect("rows") as usize;
                assert_eq!(batch.seq_length(), longest);
                for (row, length) in batch.ids().chunks(longest).zip(batch.lengths()) {
                    let (own, padding) = row.split_at(*length as usize);
                    assert!(own.iter().all(|id| *id == own[0]) && padding.iter().all(|id| *id == 99));
                    seen.push(own[0]);
                }
            }
            seen.sort_unstable();
            assert_eq!(seen, (0..23).collect::<Vec<i32>>());
        }
        assert_eq!(examples.batch(BatchKey::new(7, 8), 4), examples.batch(BatchKey::new(7, 8), 4));
        assert_ne!(examples.batch(BatchKey::new(7, 8), 4), examples.batch(BatchKey::new(8, 8), 4));
    }

    #[test]
    fn wanted_probabilities_sum_to_the_weight_and_leave_out_rows_without_label() {
        let rows: [(&[u32], i32); 3] = [(&[1, 2], 2), (&[3], IGNORED_TARGET), (&[4], 0)];
        let batch = LabelledBatch::new(rows, 0);
        assert_eq!((batch.ids(), batch.label_count()), (&[1, 2, 3, 0, 4, 0][..], 2));
        let wanted = batch.wanted::<NdArray>(4, 0.2, 3.0, &Default::default()).into_data();
        let wanted: Vec<f32> = wanted.iter::<f32>().collect();
        let (low, high) = (1.5 * 0.05, 1.5 * 0.85);
        let expected = [low, low, high, low, 0.0, 0.0, 0.0, 0.0, high, low, low, low];
        assert!(wanted.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6), "{wanted:?}");
        let whole = batch.to_device::<NdArray>(&Default::default());
        assert_eq!(whole.lengths.into_data().iter::<i64>().collect::<Vec<_>>(), [2, 1, 1]);
        assert_eq!(whole.ids.into_data().iter::<i64>().collect::<Vec<_>>(), [1, 2, 3, 0, 4, 0]);
        assert_eq!(batch.rows(2..3).ids(), [4, 0], "padding stays");
    }
}
