//! Which tokens a convolution over the embeddings sees.

use burn::tensor::{Bool, Int, Tensor};
use fireclay_kernels::Backend;

/// The tokens, or types of tokens, `ids` `[batch_size, seq_length]` around each token, itself in
/// the middle, from left to right: `[batch_size, seq_length * width]`. What `padding` hides, and
/// what is outside of a row, counts as 0, so that a row does not depend on how it is padded.
///
/// The convolution looks up these tokens' embeddings once more, instead of moving embeddings: ids
/// are smaller, and the gradient of a lookup is an operation that exists.
pub(crate) fn around<B: Backend>(
    ids: &Tensor<B, 2, Int>,
    width: usize,
    padding: Option<&Tensor<B, 2, Bool>>,
) -> Tensor<B, 2, Int> {
    let [batch_size, seq_length] = ids.dims();
    let within = match padding {
        Some(padding) => ids.clone().mask_fill(padding.clone(), 0),
        None => ids.clone(),
    };
    let outside = Tensor::<B, 2, Int>::zeros([batch_size, width / 2], &ids.device());
    let row = Tensor::cat(vec![outside.clone(), within, outside], 1);
    let shifted = (0..width).map(|first| row.clone().narrow(1, first, seq_length));
    Tensor::stack::<3>(shifted.collect(), 2).reshape([batch_size, seq_length * width])
}
