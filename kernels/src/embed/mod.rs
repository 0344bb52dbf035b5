//! Rows of a table, looked up by token.

pub(crate) mod reference;

use burn::tensor::{FloatDType, Int, Tensor};

use crate::Backend;

/// The rows of `table` `[vocabulary, d_model]` that `tokens` `[batch_size, seq_length]` name, as
/// `[batch_size, seq_length, d_model]` of `dtype`.
///
/// Tokens must lie in `0..vocabulary`: they are not checked on the device.
pub fn embed<B: Backend>(table: Tensor<B, 2>, tokens: Tensor<B, 2, Int>, dtype: FloatDType) -> Tensor<B, 3> {
    B::embed(table, tokens, dtype)
}
