//! Rows of preference pairs.

use std::ops::Range;

use fireclay_datasets::{IGNORED_TARGET, TokenBatch};

use crate::tasks::chat::Example;

/// Rows of whole pairs: chosen, rejected, and the next pair. No sequence sees another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PairBatch {
    tokens: TokenBatch,
    /// For each row the positions that each pair's sequences take, one after the other from the
    /// first.
    rows: Vec<Vec<[usize; 2]>>,
}

impl PairBatch {
    /// Rows of `seq_length` positions, with the pairs of each: chosen and rejected.
    ///
    /// # Panics
    /// If the pairs of a row do not fit.
    pub fn new<'a, R: IntoIterator<Item = [&'a Example; 2]>>(
        seq_length: usize,
        rows: impl IntoIterator<Item = R>,
    ) -> Self {
        let mut batch = Self { tokens: TokenBatch::packed(seq_length), rows: Vec::new() };
        for pairs in rows {
            let pairs: Vec<[&Example; 2]> = pairs.into_iter().collect();
            let sequences = pairs.iter().flatten().map(|one| (one.tokens.as_slice(), one.supervised.as_slice()));
            batch.tokens.push_packed(sequences);
            let positions: Vec<[usize; 2]> = pairs.iter().map(|pair| pair.map(Example::positions)).collect();
            let taken: usize = positions.iter().flatten().sum();
            assert!(taken <= seq_length, "pairs of {taken} positions in a row of {seq_length}");
            batch.rows.push(positions);
        }
        batch
    }

    pub(crate) fn tokens(&self) -> &TokenBatch {
        &self.tokens
    }

    /// Number of pairs.
    pub fn pairs(&self) -> usize {
        self.rows.iter().map(Vec::len).sum()
    }

    /// For each position the number of its sequence, or -1, and for each sequence how many of its
    /// tokens are supervised.
    pub(super) fn answers(&self) -> (Vec<i32>, Vec<usize>) {
        let (mut of, mut lengths) = (Vec::with_capacity(self.tokens.inputs().len()), Vec::new());
        for (row, targets) in self.rows.iter().zip(self.tokens.targets().chunks_exact(self.tokens.seq_length())) {
            let mut targets = targets.iter();
            for positions in row.iter().flatten() {
                let own = targets.by_ref().take(*positions);
                let number = lengths.len() as i32;
                lengths.push(own.filter(|target| **target != IGNORED_TARGET).count());
                of.extend(std::iter::repeat_n(number, *positions));
            }
            of.extend(targets.map(|_| -1));
        }
        (of, lengths)
    }

    pub(crate) fn split(self, parts: usize) -> Vec<Self> {
        let mut rest = self.rows.into_iter();
        let with_rows = |tokens: TokenBatch| {
            let rows = rest.by_ref().take(tokens.batch_size()).collect();
            Self { tokens, rows }
        };
        self.tokens.split(parts).into_iter().map(with_rows).collect()
    }

    pub(crate) fn rows(&self, rows: Range<usize>) -> Self {
        Self { tokens: self.tokens.rows(rows.clone()), rows: self.rows[rows].to_vec() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example(tokens: &[u32], answer: usize) -> Example {
        let supervised = (0..tokens.len()).map(|at| at >= tokens.len() - answer).collect();
        Example { tokens: tokens.to_vec(), supervised }
    }

    #[test]
    fn each_position_knows_its_answer_in_every_part_of_a_batch() {
        let (a, b, c) = (example(&[1, 2, 3, 4], 2), example(&[1, 2, 5], 1), example(&[7, 8], 1));
        let rows = [vec![[&a, &b], [&c, &c]], vec![[&b, &a]], vec![[&c, &b]]];
        let batch = PairBatch::new(8, rows);
        assert_eq!(batch.pairs(), 4);
        let (of, lengths) = batch.answers();
        assert_eq!(of[..16], [0, 0, 0, 1, 1, 2, 3, -1, 4, 4, 5, 5, 5, -1, -1, -1]);
        assert_eq!(lengths, [2, 1, 1, 1, 1, 2, 1, 1]);
        let last = batch.rows(1..3);
        assert_eq!((last.pairs(), last.answers().1), (2, vec![1, 2, 1, 1]));
        let parts = batch.clone().split(2);
        assert_eq!(parts.iter().map(PairBatch::pairs).collect::<Vec<_>>(), [3, 1]);
        assert_eq!(parts[1], batch.rows(2..3));
    }
}
