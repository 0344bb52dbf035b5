//! Softmax from small operations.

use burn::tensor::{DType, Tensor};

use crate::Backend;

/// Reference forward of [`softmax`](crate::softmax) over `[rows, columns]`.
pub fn softmax<B: Backend>(x: Tensor<B, 2>) -> Tensor<B, 2> {
    let dtype = x.dtype();
    let x = x.cast(DType::F32);
    let exponentials = (x.clone() - x.max_dim(1)).exp();
    (exponentials.clone() / exponentials.sum_dim(1)).cast(dtype)
}

/// Reference backward of [`softmax`](crate::softmax), from its output.
pub fn softmax_backward<B: Backend>(grad: Tensor<B, 2>, output: Tensor<B, 2>) -> Tensor<B, 2> {
    let dtype = output.dtype();
    let (grad, output) = (grad.cast(DType::F32), output.cast(DType::F32));
    let along = (grad.clone() * output.clone()).sum_dim(1);
    ((grad - along) * output).cast(dtype)
}
