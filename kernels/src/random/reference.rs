//! The Feistel rounds of [`RandomKey::bits`](super::RandomKey::bits), on integer tensors.

use burn::tensor::backend::Backend;
use burn::tensor::{ElementConversion, Int, Tensor};

use super::{MULTIPLIERS, ROUNDS, RandomKey};

/// The bits of the given rows, `[rows]`: `[rows, columns]`.
pub(crate) fn bits_of_rows<B: Backend>(rows: Tensor<B, 1, Int>, columns: usize, key: RandomKey) -> Tensor<B, 2, Int> {
    let (left, right) = halves_of_rows(rows, columns, key);
    left.bitwise_left_shift_scalar(8.elem()).bitwise_or(right.bitwise_right_shift_scalar(8.elem()))
}

/// Both output halves of the second cipher for the given rows, `[rows, columns]` each, below 2^16.
pub(crate) fn halves_of_rows<B: Backend>(
    rows: Tensor<B, 1, Int>,
    columns: usize,
    key: RandomKey,
) -> (Tensor<B, 2, Int>, Tensor<B, 2, Int>) {
    let (row_keys, column_keys) = key.round_keys();
    let (device, [count]) = (&rows.device(), rows.dims());
    let row = rows.add_scalar(key.first_row as i32).reshape([count, 1]);
    let rows = count;
    let column = Tensor::<B, 1, Int>::arange(0..columns as i64, device).reshape([1, columns]);
    // Shifting a negative number fills with ones.
    let low = |x: Tensor<B, 2, Int>| x.bitwise_and_scalar(0xffff.elem());
    let halves = |x: Tensor<B, 2, Int>| (low(x.clone()), low(x.bitwise_right_shift_scalar(16.elem())));
    let (left, right) = halves(row);
    let (row_left, row_right) = feistel(left, right, row_keys);
    let (left, right) = halves(column);
    // Burn's bitwise operations do not broadcast on every backend: expand both sides first.
    let spread = |x: Tensor<B, 2, Int>| x.expand([rows, columns]);
    let left = spread(left).bitwise_xor(spread(row_left));
    let right = spread(right).bitwise_xor(spread(row_right));
    feistel(left, right, column_keys)
}

fn feistel<B: Backend>(
    mut left: Tensor<B, 2, Int>,
    mut right: Tensor<B, 2, Int>,
    keys: [u32; ROUNDS],
) -> (Tensor<B, 2, Int>, Tensor<B, 2, Int>) {
    for (key, multiplier) in keys.into_iter().zip(MULTIPLIERS) {
        let product = right.clone().bitwise_xor_scalar((key as i32).elem()).mul_scalar(multiplier as i32);
        let folded = product.clone().bitwise_right_shift_scalar(15.elem());
        let mixed = product.bitwise_xor(folded).bitwise_and_scalar(0xffff.elem());
        (left, right) = (right, left.bitwise_xor(mixed));
    }
    (left, right)
}
