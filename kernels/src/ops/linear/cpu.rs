//! Projections on the CPU.

use burn::tensor::Tensor;
use burn_ndarray::NdArray;

use super::reference::activation_gradient;
use super::{
    LinearBackward, LinearForward, LinearGradients, LinearOps, LinearOutput, Saved, Wanted, kept_input, normed,
};
use crate::checked::Checked;
use crate::cpu::{
    DOT_PRODUCT_ROWS, DotProducts, Inputs, Matrix, QuantizedRows, Values, new_columns, new_product, stored_gradient,
    stored_product, sum_over_rows, tensor, wide_product,
};
use crate::ops::activation::cpu::{activate_by_slopes, activate_keeping_slopes};
use crate::ops::dropout::dropout_rows;
use crate::quant::Weight;

impl LinearOps for NdArray {
    /// Slopes are saved, so that the activation is computed once.
    fn linear_forward(operands: Checked<LinearForward<Self>>) -> LinearOutput<Self> {
        let LinearForward { x, weight, bias, activation, dropout, residual, keeps, .. } = normed(operands.into_inner());
        let shape = [x.dims()[0], weight.dims()[0]];
        // A gradient is that of the weights with the inputs as they are.
        let weight = Stored::of(weight, if keeps { Inputs::Exact } else { Inputs::Quantized });
        if let Some(activation) = activation {
            let mut projected = project(x, weight, bias, |_, _, _| {});
            let output = activate_keeping_slopes(&mut projected, shape, activation);
            return LinearOutput { output, saved: Some(Saved::Slopes(tensor(projected, shape))) };
        }
        let output = match (residual, dropout) {
            (Some(residual), None) => project_add(x, weight, bias, residual),
            (residual, dropout) => {
                let projected = dropout_rows(tensor(project(x, weight, bias, |_, _, _| {}), shape), dropout);
                match residual {
                    Some(residual) => residual + projected,
                    None => projected,
                }
            }
        };
        LinearOutput { output, saved: None }
    }

    fn linear_backward(operands: Checked<LinearBackward<Self>>) -> LinearGradients<Self> {
        let LinearBackward { grad, x, weight, bias, wanted, activation, dropout, sum } = operands.into_inner();
        let grad = dropout_rows(grad, dropout);
        let grad = match activation {
            Some((activation, Saved::Slopes(slopes))) => activate_by_slopes(grad, slopes, activation),
            Some((activation, saved)) => activation_gradient(grad, saved, bias.clone(), activation),
            None => grad,
        };
        let wanted = Wanted { bias: wanted.bias && bias.is_some(), ..wanted };
        linear_backward(grad, x, weight, wanted, sum)
    }
}

/// A weight as its products read it.
enum Stored {
    Float(Tensor<NdArray, 2>),
    Quantized(Vec<QuantizedRows>, Inputs),
}

impl Stored {
    fn of(weight: Weight<NdArray>, inputs: Inputs) -> Self {
        match QuantizedRows::parts(weight) {
            Ok(parts) => Self::Quantized(parts, inputs),
            Err(floats) => Self::Float(floats),
        }
    }
}

/// `residual + x * weight^T + bias`.
fn project_add(
    x: Tensor<NdArray, 2>,
    weight: Stored,
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

/// `x * weight^T + bias`, and then `then` as in [`new_product`].
fn project(
    x: Tensor<NdArray, 2>,
    weight: Stored,
    bias: Option<Tensor<NdArray, 1>>,
    then: impl Fn(usize, usize, &mut [f32]) + Sync,
) -> Vec<f32> {
    let [rows, d_input] = x.dims();
    let (x, bias) = (Values::rows(x), bias.map(Values::rows));
    let then = |row: usize, column: usize, out: &mut [f32]| {
        if let Some(bias) = &bias {
            out.iter_mut().zip(&bias[column..]).for_each(|(out, bias)| *out += bias);
        }
        then(row, column, out);
    };
    let weight = match weight {
        Stored::Quantized(parts, inputs) => return stored_product(&x, rows, &parts, inputs, then),
        Stored::Float(weight) => weight,
    };
    let [d_output, _] = weight.dims();
    let weight = Values::rows(weight);
    if rows <= DOT_PRODUCT_ROWS {
        // The weight is read once, in its stored layout: packing it for a product of many rows
        // takes longer than this one.
        return new_columns(
            rows,
            d_output,
            rows * d_input,
            #[inline(always)]
            |columns, out| {
                let weight = &weight[columns.start * d_input..columns.end * d_input];
                DotProducts { a: &x, b: weight, size: d_input, out }.compute();
                for (row, out) in out.chunks_exact_mut(columns.len()).enumerate() {
                    then(row, columns.start, out);
                }
            },
        );
    }
    // SAFETY: the slices hold [rows, d_input] and [d_output, d_input], as the operands were
    // checked.
    unsafe {
        let weight = Matrix::of(&weight, d_input).transposed();
        new_product([rows, d_input, d_output], Matrix::of(&x, d_input), weight, then)
    }
}

fn linear_backward(
    grad: Tensor<NdArray, 2>,
    x: Option<Tensor<NdArray, 2>>,
    weight: Weight<NdArray>,
    wanted: Wanted,
    sum: Option<Tensor<NdArray, 2>>,
) -> LinearGradients<NdArray> {
    let ([rows, _], [d_output, d_input]) = (grad.dims(), weight.dims());
    let grad = Values::rows(grad);
    let weight = QuantizedRows::parts(weight).map_err(Values::rows);
    let d_x = || {
        let weight = match &weight {
            Ok(parts) => return stored_gradient(&grad, rows, parts),
            Err(weight) => weight,
        };
        let (grad, weight) = (Matrix::of(&grad, d_output), Matrix::of(weight, d_input));
        // SAFETY: the slices hold [rows, d_output] and [d_output, d_input].
        unsafe { new_product([rows, d_output, d_input], grad, weight, |_, _, _| {}) }
    };
    let sum = sum.map(|sum| Values::rows(sum).into_vec());
    let d_weight = || {
        let x = Values::rows(kept_input(x));
        let adds = sum.is_some();
        let mut d_weight = sum.unwrap_or_else(|| Vec::with_capacity(d_output * d_input));
        // SAFETY: the slices hold [rows, d_output] and [rows, d_input], the vector has room for
        // [d_output, d_input], all of which is written, and holds as many where they are added to.
        // Its rows are the product's columns, so that each slab reads its own part of `grad`.
        unsafe {
            let out = Matrix::at(d_weight.as_mut_ptr(), d_input as isize, 1).transposed();
            let x = Matrix::of(&x, d_input).transposed();
            wide_product([d_input, rows, d_output], out, x, Matrix::of(&grad, d_output), adds);
            d_weight.set_len(d_output * d_input);
        }
        d_weight
    };
    let bias = || {
        wanted.bias.then(|| {
            sum_over_rows(
                rows,
                d_output,
                #[inline(always)]
                |range, sums| {
                    for row in grad[range.start * d_output..range.end * d_output].chunks_exact(d_output) {
                        sums.iter_mut().zip(row).for_each(|(sum, grad)| *sum += grad);
                    }
                },
            )
        })
    };
    // Where one runs out of slabs, the others still have some.
    let (d_x, (d_weight, bias)) = rayon::join(d_x, || rayon::join(|| wanted.weight.then(d_weight), bias));
    LinearGradients {
        x: tensor(d_x, [rows, d_input]),
        weight: d_weight.map(|d_weight| tensor(d_weight, [d_output, d_input])),
        bias: bias.map(|bias| tensor(bias, [d_output])),
    }
}
