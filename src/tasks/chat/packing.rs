//! Sequences in rows of one length.

use fireclay_datasets::TokenBatch;
use rayon::prelude::*;

use super::mask::Example;

/// For each row the examples in it, by their numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rows(Vec<Vec<usize>>);

impl Rows {
    /// Packs examples of these lengths into rows of `length`, as few as best-fit decreasing finds: the longest first, each into the
    /// fullest row that has room.
    pub(super) fn packed(lengths: &[usize], length: usize) -> Self {
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
    pub(super) fn apart(count: usize) -> Self {
        Self((0..count).map(|example| vec![example]).collect())
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// A batch of some rows, by their numbers.
    pub(super) fn batch(&self, rows: &[usize], examples: &[Example], length: usize) -> TokenBatch {
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

/// Positions that an example takes in a row: its last token is only predicted.
pub(super) fn positions(example: &Example) -> usize {
    example.tokens.len().saturating_sub(1)
}

/// Numbers below `count` in an order that `seed` and `epoch` decide.
pub(super) fn shuffled(count: usize, seed: u64, epoch: u64) -> Vec<usize> {
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
    fn orders_are_permutations_that_differ_by_epoch() {
        let [first, again, next] = [(7, 0), (7, 0), (7, 1)].map(|(seed, epoch)| shuffled(100, seed, epoch));
        assert_eq!(first, again);
        assert_ne!(first, next);
        let mut sorted = first;
        sorted.sort_unstable();
        assert_eq!(sorted, (0..100).collect::<Vec<_>>());
    }
}
