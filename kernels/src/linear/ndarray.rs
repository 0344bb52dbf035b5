//! Projections on the CPU.

use burn::tensor::Tensor;
use burn_ndarray::NdArray;

use super::LinearGradients;
use crate::host::{Matrix, Values, new_product, product, sum_over_rows, tensor};

pub(crate) fn linear_forward(
    x: Tensor<NdArray, 2>,
    weight: Tensor<NdArray, 2>,
    bias: Option<Tensor<NdArray, 1>>,
) -> Tensor<NdArray, 2> {
    let [rows, d_input] = x.dims();
    let [d_output, _] = weight.dims();
    let (x, weight) = (Values::rows(x), Values::rows(weight));
    let (a, b) = (Matrix::of(&x, d_input), Matrix::of(&weight, d_input).transposed());
    let sizes = [rows, d_input, d_output];
    let out = match bias {
        Some(bias) => {
            let mut out = Values::rows(bias).repeat(rows);
            // SAFETY: the slices hold [rows, d_input], [d_output, d_input] and [rows, d_output].
            unsafe { product(sizes, Matrix::of_mut(&mut out, d_output), a, b, true, true) };
            out
        }
        // SAFETY: the slices hold [rows, d_input] and [d_output, d_input].
        None => unsafe { new_product(sizes, a, b) },
    };
    tensor(out, [rows, d_output])
}

/// `residual + x * weight^T + bias`, the product added to the residual in place of a zeroed output.
pub(crate) fn linear_add_forward(
    x: Tensor<NdArray, 2>,
    weight: Tensor<NdArray, 2>,
    bias: Option<Tensor<NdArray, 1>>,
    residual: Tensor<NdArray, 2>,
) -> Tensor<NdArray, 2> {
    let [rows, d_input] = x.dims();
    let [d_output, _] = weight.dims();
    let (x, weight, residual) = (Values::rows(x), Values::rows(weight), Values::rows(residual));
    let mut out = residual.into_vec();
    if let Some(bias) = bias {
        let bias = Values::rows(bias);
        for row in out.chunks_exact_mut(d_output) {
            row.iter_mut().zip(bias.iter()).for_each(|(out, bias)| *out += bias);
        }
    }
    // SAFETY: the slices hold [rows, d_input], [d_output, d_input] and [rows, d_output].
    unsafe {
        let (a, b) = (Matrix::of(&x, d_input), Matrix::of(&weight, d_input).transposed());
        product([rows, d_input, d_output], Matrix::of_mut(&mut out, d_output), a, b, true, true);
    }
    tensor(out, [rows, d_output])
}

pub(crate) fn linear_backward(
    grad: Tensor<NdArray, 2>,
    x: Tensor<NdArray, 2>,
    weight: Tensor<NdArray, 2>,
    has_bias: bool,
) -> LinearGradients<NdArray> {
    let [rows, d_input] = x.dims();
    let [d_output, _] = weight.dims();
    let (grad, x, weight) = (Values::rows(grad), Values::rows(x), Values::rows(weight));
    // SAFETY: the slices hold [rows, d_output], [d_output, d_input] and [rows, d_input].
    let (d_x, d_weight) = unsafe {
        let grad = Matrix::of(&grad, d_output);
        let d_x = new_product([rows, d_output, d_input], grad, Matrix::of(&weight, d_input));
        let d_weight = new_product([d_output, rows, d_input], grad.transposed(), Matrix::of(&x, d_input));
        (d_x, d_weight)
    };
    let bias = has_bias.then(|| {
        sum_over_rows(rows, d_output, |range, sums| {
            for row in grad[range.start * d_output..range.end * d_output].chunks_exact(d_output) {
                sums.iter_mut().zip(row).for_each(|(sum, grad)| *sum += grad);
            }
        })
    });
    LinearGradients {
        x: tensor(d_x, [rows, d_input]),
        weight: tensor(d_weight, [d_output, d_input]),
        bias: bias.map(|bias| tensor(bias, [d_output])),
    }
}
