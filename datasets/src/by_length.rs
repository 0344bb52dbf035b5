//! The order of training examples: batches of similar length, shuffled anew in each epoch.

use crate::random::Generator;

/// Batches per pool, within which examples are sorted by length.
const POOL: usize = 32;

/// The batches of an epoch, as indices into `lengths`: examples are shuffled, sorted by length
/// within pools, and batches shuffled. The last batch may be smaller. A pure function of its
/// arguments.
pub(crate) fn epoch(lengths: &[usize], seed: u64, epoch: u64, batch_size: usize) -> Vec<Vec<usize>> {
    let mut rng = Generator::new(seed, epoch, 0);
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    shuffle(&mut order, &mut rng);
    for pool in order.chunks_mut(batch_size.saturating_mul(POOL)) {
        pool.sort_by_key(|index| lengths[*index]);
    }
    let mut batches: Vec<Vec<usize>> = order.chunks(batch_size).map(<[usize]>::to_vec).collect();
    let full = lengths.len() / batch_size;
    shuffle(&mut batches[..full], &mut rng);
    batches
}

/// Shuffles items.
fn shuffle<T>(items: &mut [T], rng: &mut Generator) {
    for at in (1..items.len()).rev() {
        items.swap(at, rng.below(at + 1));
    }
}
