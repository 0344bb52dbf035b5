//! Rows of a table, looked up by token.

pub(crate) mod autodiff;
#[cfg(feature = "ndarray")]
pub(crate) mod cpu;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) mod cubecl;
pub(crate) mod reference;

use burn::tensor::{FloatDType, Int, Tensor};

use crate::{Backend, Weight, recorder};

/// The rows of `table` `[vocabulary, d_model]` that `tokens` `[batch_size, seq_length]` name, as
/// `[batch_size, seq_length, d_model]` of `dtype`.
///
/// Tokens must lie in `0..vocabulary`: they are not checked on the device. The gradient of the table is f32, as
/// all parameters' are, and adds up in the order of the tokens on the CPU and in one fixed order wherever there is a
/// kernel.
pub fn embed<B: Backend>(table: impl Into<Weight<B>>, tokens: Tensor<B, 2, Int>, dtype: FloatDType) -> Tensor<B, 3> {
    let table = table.into();
    let _op = recorder::op("embed", || vec![table.operand(), recorder::operand(&tokens)]);
    match table {
        Weight::Float(table) => B::embed(table, tokens, dtype),
        Weight::Int8(table) => B::int8_embed(&table, tokens, dtype),
    }
}

/// `x` `[batch_size, seq_length, d_model]` plus the rows of `table` that `tokens` name, as [`embed`] gives them.
pub fn embed_add<B: Backend>(table: Tensor<B, 2>, tokens: Tensor<B, 2, Int>, x: Tensor<B, 3>) -> Tensor<B, 3> {
    let _op = recorder::op("embed_add", || vec![recorder::operand(&table), recorder::operand(&tokens)]);
    B::embed_add(table, tokens, x)
}
