//! Lookup by Burn's embedding operation, and its gradient by Burn's indexed addition.

use burn::tensor::backend::Backend;
use burn::tensor::{DType, FloatDType, IndexingUpdateOp, Int, Tensor};

/// Reference body of [`embed`](crate::embed); Burn's own gradient adds rows up in the table's dtype.
pub fn embed<B: Backend>(table: Tensor<B, 2>, tokens: Tensor<B, 2, Int>, dtype: FloatDType) -> Tensor<B, 3> {
    burn::tensor::module::embedding(table, tokens).cast(dtype)
}

pub(crate) fn embed_add<B: crate::Backend>(
    table: Tensor<B, 2>,
    tokens: Tensor<B, 2, Int>,
    x: Tensor<B, 3>,
) -> Tensor<B, 3> {
    let dtype = FloatDType::from(x.dtype());
    x + <B as crate::Backend>::embed(table, tokens, dtype)
}

/// Reference gradient of [`embed`](crate::embed)'s table: the rows of each token added up in f32.
pub fn embed_backward<B: Backend>(grad: Tensor<B, 2>, tokens: Tensor<B, 1, Int>, vocabulary: usize) -> Tensor<B, 2> {
    let zeros = Tensor::zeros([vocabulary, grad.dims()[1]], (&grad.device(), DType::F32));
    zeros.select_assign(0, tokens, grad.cast(DType::F32), IndexingUpdateOp::Add)
}
