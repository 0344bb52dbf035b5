//! Dropout from basic operations.

use burn::tensor::backend::Backend;
use burn::tensor::{Bool, Int, Tensor};

use super::{Dropout, DropoutForward};
use crate::random::reference::halves_of_rows;

/// Reference forward of [`dropout`](crate::dropout()). It is linear, so it is its own gradient.
pub fn dropout_forward<B: Backend>(DropoutForward { x, dropout }: DropoutForward<B>) -> Tensor<B, 2> {
    let [rows, columns] = x.dims();
    let dropped = dropped::<B>(rows, columns, dropout, &x.device());
    x.mask_fill(dropped, 0.0).mul_scalar(dropout.scale())
}

/// The dropped elements of `[rows, columns]`.
pub(crate) fn dropped<B: Backend>(
    rows: usize,
    columns: usize,
    dropout: Dropout,
    device: &B::Device,
) -> Tensor<B, 2, Bool> {
    // Two columns per position of the key.
    let pairs = columns.div_ceil(2);
    let numbers = Tensor::<B, 1, Int>::arange(0..rows as i64, device);
    let (even, odd) = halves_of_rows(numbers, pairs, dropout.key);
    let halves: Tensor<B, 3, Int> = Tensor::stack(vec![even, odd], 2);
    halves.reshape([rows, 2 * pairs]).narrow(1, 0, columns).lower_elem(dropout.threshold() as i32)
}
