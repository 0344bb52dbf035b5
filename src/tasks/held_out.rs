//! Records that are held out of training, for validation.

use fireclay_kernels::RandomKey;

use crate::recipe::schema::Recipe;

/// Records to learn from, and those that the recipe holds out.
pub(super) fn parted<T>(all: Vec<T>, recipe: &Recipe) -> (Vec<T>, Vec<T>) {
    let held_out = held_out(all.len(), recipe.data.holdout, recipe.training.seed);
    let (mut train, mut valid) = (Vec::new(), Vec::new());
    for (record, held_out) in all.into_iter().zip(held_out) {
        if held_out { &mut valid } else { &mut train }.push(record);
    }
    (train, valid)
}

/// Which of `count` records are held out: about the share `holdout`, and of two or more at
/// least one.
fn held_out(count: usize, holdout: f64, seed: u64) -> Vec<bool> {
    let wanted = ((count as f64 * holdout).round() as usize).clamp(1, count.saturating_sub(1).max(1));
    let key = RandomKey::new(seed).fold(0x686f_6c64);
    let mut order: Vec<usize> = (0..count).collect();
    order.sort_by_key(|number| key.bits(*number as u32, 0));
    let mut held_out = vec![false; count];
    for number in order.into_iter().take(wanted) {
        held_out[number] = true;
    }
    held_out
}
