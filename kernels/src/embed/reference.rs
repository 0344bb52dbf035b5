//! Lookup by Burn's embedding operation, whose gradient adds rows up in the table's dtype.

use burn::tensor::backend::Backend;
use burn::tensor::{FloatDType, Int, Tensor};

/// Reference body of [`embed`](crate::embed).
pub(crate) fn embed<B: Backend>(table: Tensor<B, 2>, tokens: Tensor<B, 2, Int>, dtype: FloatDType) -> Tensor<B, 3> {
    burn::tensor::module::embedding(table, tokens).cast(dtype)
}
