//! Sequences in rows of one length.

use fireclay_datasets::{BatchKey, TokenBatch};
use rayon::prelude::*;

use super::mask::Example;

/// The seed of the order that rows are sampled in.
const SAMPLE: u64 = 0x7361_6d70;

/// For each row the examples in it, by their numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::tasks) struct Rows(Vec<Vec<usize>>);

impl Rows {
    /// Examples of these lengths in rows of `length`: packed, or one a row.
    pub(in crate::tasks) fn new(lengths: &[usize], length: usize, packing: bool) -> Self {
        if packing { Self::packed(lengths, length) } else { Self::apart(lengths.len()) }
    }

    /// Packs examples of these lengths into rows of `length`, as few as best-fit decreasing finds:
    /// the longest first, each into the fullest row that has room.
    fn packed(lengths: &[usize], length: usize) -> Self {
        let mut order: Vec<usize> = (0..lengths.len()).collect();
        order.sort_by_key(|example| (std::cmp::Reverse(lengths[*example]), *example));
        let mut rows: Vec<Vec<usize>> = Vec::new();
        // Rows by the room that they have left.
        let mut by_room: Vec<Vec<usize>> = vec![Vec::new(); length + 1];
        for example in order {
            let needed = lengths[example];
            let (row, room) = match (needed..=length).find(|room| !by_room[*room].is_empty()) {
                Some(room) => (by_room[room].pop().expect("a row with this room"), room),
                None => {
                    rows.push(Vec::new());
                    (rows.len() - 1, length)
                }
            };
            rows[row].push(example);
            by_room[room - needed].push(row);
        }
        Self(rows)
    }

    /// One example a row.
    fn apart(count: usize) -> Self {
        Self((0..count).map(|example| vec![example]).collect())
    }

    pub(in crate::tasks) fn len(&self) -> usize {
        self.0.len()
    }

    /// Rows of `length` tokens each, the same in every run: as many as have about so many tokens,
    /// and at least one. The first ones would have the longest examples.
    pub(in crate::tasks) fn sample(&self, tokens: usize, length: usize) -> Vec<usize> {
        let mut rows = shuffled(self.len(), SAMPLE, 0);
        rows.truncate(tokens.div_ceil(length).max(1));
        rows
    }

    /// The examples of a row.
    pub(in crate::tasks) fn of_row(&self, row: usize) -> &[usize] {
        &self.0[row]
    }

    /// The rows of a step of `count` rows: each once an epoch, in an order that the seed and the
    /// epoch decide.
    pub(in crate::tasks) fn of_step(&self, key: BatchKey, count: usize) -> Vec<usize> {
        let all = self.len() as u64;
        let mut order: (u64, Vec<usize>) = (u64::MAX, Vec::new());
        let row = |row: u64| {
            let row = key.step * count as u64 + row;
            let epoch = row / all;
            if order.0 != epoch {
                order = (epoch, shuffled(all as usize, key.seed, epoch));
            }
            order.1[(row % all) as usize]
        };
        (0..count as u64).map(row).collect()
    }

    /// A batch of some rows, by their numbers.
    pub(in crate::tasks) fn batch(&self, rows: &[usize], examples: &[Example], length: usize) -> TokenBatch {
        let mut batch = TokenBatch::packed(length);
        for row in rows {
            let sequences = self.0[*row].iter().map(|example| {
                let Example { tokens, supervised } = &examples[*example];
                (tokens.as_slice(), supervised.as_slice())
            });
            batch.push_packed(sequences);
        }
        batch
    }
}

/// Numbers below `count` in an order that `seed` and `epoch` decide.
fn shuffled(count: usize, seed: u64, epoch: u64) -> Vec<usize> {
    let key = fireclay_kernels::RandomKey::new(seed).fold(epoch);
    let mut order: Vec<(u32, usize)> =
        (0..count).into_par_iter().map(|number| (key.bits(number as u32, 0), number)).collect();
    order.par_sort_unstable();
    order.into_iter().map(|(_, number)| number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_rows_hold_each_example_once_and_are_few() {
        let lengths: Vec<usize> = (0..500).map(|at| 1 + at * 37 % 90).collect();
        let Rows(rows) = Rows::packed(&lengths, 100);
        let mut seen: Vec<usize> = rows.concat();
        seen.sort_unstable();
        assert_eq!(seen, (0..500).collect::<Vec<_>>());
        assert!(rows.iter().all(|row| row.iter().map(|example| lengths[*example]).sum::<usize>() <= 100));
        let least = lengths.iter().sum::<usize>().div_ceil(100);
        assert!(rows.len() <= least + least / 20, "{} rows, and at least {least} are needed", rows.len());
    }

    #[test]
    fn a_sample_of_packed_rows_has_examples_of_all_lengths() {
        let lengths: Vec<usize> = (0..400).map(|at| 60 + at * 7 % 41).collect();
        let rows = Rows::new(&lengths, 100, true);
        let mean = |sample: &[usize]| {
            let all: Vec<usize> = sample.iter().flat_map(|row| rows.of_row(*row)).map(|at| lengths[*at]).collect();
            all.iter().sum::<usize>() as f64 / all.len() as f64
        };
        let sample = rows.sample(10_000, 100);
        assert_eq!((sample.len(), &sample), (100, &rows.sample(10_000, 100)));
        let mut all = rows.sample(usize::MAX, 100);
        assert!((mean(&sample) - mean(&all)).abs() < 5.0, "{} of {}", mean(&sample), mean(&all));
        all.sort_unstable();
        assert_eq!(all, (0..rows.len()).collect::<Vec<_>>());
        assert_eq!(rows.sample(0, 100).len(), 1);
    }

    #[test]
    fn orders_are_permutations_that_differ_by_epoch() {
        let [first, again, next] = [(7, 0), (7, 0), (7, 1)].map(|(seed, epoch)| shuffled(100, seed, epoch));
        assert_eq!(first, again);
        assert_ne!(first, next);
        let mut sorted = first;
        sorted.sort_unstable();
        assert_eq!(sorted, (0..100).collect::<Vec<_>>());
    }
}
