//! Lookup by gathering, with a gradient by Burn's indexed addition.

use burn::tensor::{DType, IndexingUpdateOp, Tensor};

use super::{EmbedBackward, EmbedForward, EmbedOps};
use crate::checked::clamp_index;
use crate::quant::{QuantizedWeight, RowOrder, Weight};
use crate::tensor::rows_of;

/// Reference forward of [`embed`](crate::embed()) and [`embed_add`](crate::embed_add); Burn's own
/// gradient sums rows in the table's dtype.
pub fn embed_forward<B: EmbedOps>(EmbedForward { table, tokens, dtype, added }: EmbedForward<B>) -> Tensor<B, 3> {
    let [vocabulary, d_model] = table.dims();
    let [batch_size, seq_length] = tokens.dims();
    let tokens = clamp_index(tokens, vocabulary - 1).reshape([batch_size * seq_length]);
    let rows = match table {
        Weight::Float(table) => rows_of(table, tokens).cast(dtype),
        Weight::Quantized(QuantizedWeight { packed, scales, format, order: order @ RowOrder::Rows }) => {
            let scales = scales.map(|scales| {
                let scales = scales.reshape([vocabulary as isize, -1]);
                scales.select(0, tokens.clone()).flatten(0, 1)
            });
            let packed = rows_of(packed, tokens);
            Weight::Quantized(QuantizedWeight { packed, scales, format, order }).into_float(dtype)
        }
        // Its rows are no rows of words.
        weight => rows_of(weight.into_float(dtype), tokens),
    };
    let rows = rows.reshape([batch_size, seq_length, d_model]);
    match added {
        Some(x) => x + rows,
        None => rows,
    }
}

/// Reference gradient of [`embed`](crate::embed())'s table: the rows of each token summed in f32,
/// plus the earlier gradient.
pub fn embed_backward<B: EmbedOps>(EmbedBackward { grad, tokens, vocabulary, sum }: EmbedBackward<B>) -> Tensor<B, 2> {
    let tokens = tokens.reshape([grad.dims()[0]]);
    let zeros = Tensor::zeros([vocabulary, grad.dims()[1]], (&grad.device(), DType::F32));
    let rows =
        zeros.select_assign(0, clamp_index(tokens, vocabulary - 1), grad.cast(DType::F32), IndexingUpdateOp::Add);
    match sum {
        Some(sum) => sum + rows,
        None => rows,
    }
}
