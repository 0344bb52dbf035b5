//! Projections on the CPU.

use burn::tensor::Tensor;
use burn_ndarray::NdArray;

use super::{LinearActivateOutput, LinearGradients};
use crate::Activation;
use crate::activation::ndarray::{activate_beside, activate_by_slopes};
use crate::host::{Matrix, Values, new_product, sum_over_rows, tensor, wide_product};

pub(crate) fn linear_forward(
    x: Tensor<NdArray, 2>,
    weight: Tensor<NdArray, 2>,
    bias: Option<Tensor<NdArray, 1>>,
) -> Tensor<NdArray, 2> {
    let shape = [x.dims()[0], weight.dims()[0]];
    tensor(project(x, weight, bias, |_, _, _| {}), shape)
}

/// `residual + x * weight^T + bias`.
pub(crate) fn linear_add_forward(
    x: Tensor<NdArray, 2>,
    weight: Tensor<NdArray, 2>,
    bias: Option<Tensor<NdArray, 1>>,
    residual: Tensor<NdArray, 2>,
) -> Tensor<NdArray, 2> {
    let shape = residual.dims();
    let residual = Values::rows(residual);
    let out = project(x, weight, bias, |row, column, out| {
        out.iter_mut().zip(&residual[row * shape[1] + column..]).for_each(|(out, residual)| *out += residual);
    });
    tensor(out, shape)
}

/// What is saved is what the gradient is multiplied by, so that the activation is computed once.
pub(crate) fn linear_activate_forward(
    x: Tensor<NdArray, 2>,
    weight: Tensor<NdArray, 2>,
    bias: Option<Tensor<NdArray, 1>>,
    activation: Activation,
) -> LinearActivateOutput<NdArray> {
    let shape = [x.dims()[0], weight.dims()[0]];
    let mut projected = project(x, weight, bias, |_, _, _| {});
    let output = activate_beside(&mut projected, shape, activation);
    LinearActivateOutput { output, saved: tensor(projected, shape) }
}

pub(crate) fn linear_activate_backward(
    grad: Tensor<NdArray, 2>,
    x: Tensor<NdArray, 2>,
    weight: Tensor<NdArray, 2>,
    has_bias: bool,
    slopes: Tensor<NdArray, 2>,
    activation: Activation,
) -> LinearGradients<NdArray> {
    linear_backward(activate_by_slopes(grad, slopes, activation), x, weight, has_bias)
}

/// `x * weight^T + bias`, and then `then` as in [`new_product`].
fn project(
    x: Tensor<NdArray, 2>,
    weight: Tensor<NdArray, 2>,
    bias: Option<Tensor<NdArray, 1>>,
    then: impl Fn(usize, usize, &mut [f32]) + Sync,
) -> Vec<f32> {
    let [rows, d_input] = x.dims();
    let [d_output, columns] = weight.dims();
    assert_eq!(d_input, columns, "the weight's columns are the input's");
    let (x, weight, bias) = (Values::rows(x), Values::rows(weight), bias.map(Values::rows));
    // SAFETY: the slices hold [rows, d_input] and [d_output, d_input].
    unsafe {
        let weight = Matrix::of(&weight, d_input).transposed();
        new_product([rows, d_input, d_output], Matrix::of(&x, d_input), weight, |row, column, out| {
            if let Some(bias) = &bias {
                out.iter_mut().zip(&bias[column..]).for_each(|(out, bias)| *out += bias);
            }
            then(row, column, out);
        })
    }
}

pub(crate) fn linear_backward(
    grad: Tensor<NdArray, 2>,
    x: Tensor<NdArray, 2>,
    weight: Tensor<NdArray, 2>,
    has_bias: bool,
) -> LinearGradients<NdArray> {
    let [rows, d_input] = x.dims();
    let d_output = weight.dims()[0];
    assert_eq!((grad.dims(), weight.dims()), ([rows, d_output], [d_output, d_input]), "sizes of a projection");
    let (grad, x, weight) = (Values::rows(grad), Values::rows(x), Values::rows(weight));
    let d_x = || {
        let (grad, weight) = (Matrix::of(&grad, d_output), Matrix::of(&weight, d_input));
        // SAFETY: the slices hold [rows, d_output] and [d_output, d_input].
        unsafe { new_product([rows, d_output, d_input], grad, weight, |_, _, _| {}) }
    };
    let d_weight = || {
        let mut d_weight = Vec::with_capacity(d_output * d_input);
        // SAFETY: the slices hold [rows, d_output] and [rows, d_input], the vector has room for [d_output, d_input], all
        // of which is written. Its rows are the product's columns, so that each slab reads its own part of `grad`.
        unsafe {
            let out = Matrix::at(d_weight.as_mut_ptr(), d_input as isize, 1).transposed();
            let x = Matrix::of(&x, d_input).transposed();
            wide_product([d_input, rows, d_output], out, x, Matrix::of(&grad, d_output), false);
            d_weight.set_len(d_output * d_input);
        }
        d_weight
    };
    let bias = || {
        has_bias.then(|| {
            sum_over_rows(rows, d_output, |range, sums| {
                for row in grad[range.start * d_output..range.end * d_output].chunks_exact(d_output) {
                    sums.iter_mut().zip(row).for_each(|(sum, grad)| *sum += grad);
                }
            })
        })
    };
    // Where one runs out of slabs, the others still have some.
    let (d_x, (d_weight, bias)) = rayon::join(d_x, || rayon::join(d_weight, bias));
    LinearGradients {
        x: tensor(d_x, [rows, d_input]),
        weight: tensor(d_weight, [d_output, d_input]),
        bias: bias.map(|bias| tensor(bias, [d_output])),
    }
}
