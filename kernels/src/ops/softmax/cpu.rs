//! Softmax on the CPU: a row at a time.

use burn::tensor::Tensor;
use burn_ndarray::NdArray;

use crate::cpu::{Values, exp, max_of, new_rows, sum_of, tensor};

pub(crate) fn softmax(x: Tensor<NdArray, 2>) -> Tensor<NdArray, 2> {
    let [rows, columns] = x.dims();
    let x = Values::rows(x);
    let [out] = new_rows(rows, [columns], |first, [out]| {
        for (row, out) in (first..).zip(out.chunks_exact_mut(columns)) {
            let x = &x[row * columns..][..columns];
            let max = max_of(x);
            out.iter_mut().zip(x).for_each(|(out, x)| *out = exp(*x - max));
            let scale = 1.0 / sum_of(out, out, |out, _| out);
            out.iter_mut().for_each(|out| *out *= scale);
        }
    });
    tensor(out, [rows, columns])
}

pub(crate) fn softmax_backward(grad: Tensor<NdArray, 2>, output: Tensor<NdArray, 2>) -> Tensor<NdArray, 2> {
    let [rows, columns] = output.dims();
    let (grad, output) = (Values::rows(grad), Values::rows(output));
    let [d_x] = new_rows(rows, [columns], |first, [d_x]| {
        for (row, d_x) in (first..).zip(d_x.chunks_exact_mut(columns)) {
            let grad = &grad[row * columns..][..columns];
            let output = &output[row * columns..][..columns];
            let along = sum_of(grad, output, |grad, output| grad * output);
            d_x.iter_mut().zip(grad.iter().zip(output)).for_each(|(d_x, (grad, output))| {
                *d_x = (grad - along) * output;
            });
        }
    });
    tensor(d_x, [rows, columns])
}
