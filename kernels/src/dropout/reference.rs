//! Dropout from small operations.

use burn::tensor::{Bool, Tensor};

use super::Dropout;
use crate::Backend;

/// Reference body of [`dropout`](crate::dropout) over `[rows, columns]`. It is linear, so it is its own gradient.
pub fn dropout<B: Backend>(x: Tensor<B, 2>, dropout: Dropout) -> Tensor<B, 2> {
    let [rows, columns] = x.dims();
    let dropped = dropped::<B>(rows, columns, dropout, &x.device());
    x.mask_fill(dropped, 0.0).mul_scalar(dropout.scale())
}

/// Where `[rows, columns]` is dropped.
pub(crate) fn dropped<B: Backend>(
    rows: usize,
    columns: usize,
    dropout: Dropout,
    device: &B::Device,
) -> Tensor<B, 2, Bool> {
    B::random_bits(rows, columns, dropout.key, device).lower_elem(dropout.threshold() as i32)
}
