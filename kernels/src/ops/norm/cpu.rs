//! Norms on the CPU: one pass over each row.

use burn_ndarray::NdArray;

use super::{NormBackward, NormForward, NormGradients, NormKind, NormOps, NormOutput};
use crate::checked::Checked;
use crate::cpu::{Values, new_rows, sum_of, sum_over_rows, tensor};

impl NormOps for NdArray {
    fn norm_forward(operands: Checked<NormForward<Self>>) -> NormOutput<Self> {
        norm_forward(operands.into_inner())
    }

    fn norm_backward(operands: Checked<NormBackward<Self>>) -> NormGradients<Self> {
        norm_backward(operands.into_inner())
    }
}

fn norm_forward(NormForward { x, norm }: NormForward<NdArray>) -> NormOutput<NdArray> {
    let [rows, columns] = x.dims();
    let x = Values::rows(x);
    let gamma = Values::rows(norm.gamma.clone());
    let beta = norm.beta.clone().map(Values::rows);
    let size = columns as f32;
    let [output, mean, inverse_deviation] = new_rows(
        rows,
        [columns, 1, 1],
        #[inline(always)]
        |first, [output, means, inverses]| {
            let statistics = means.iter_mut().zip(inverses);
            for ((row, output), (mean, inverse)) in (first..).zip(output.chunks_exact_mut(columns)).zip(statistics) {
                let x = &x[row * columns..][..columns];
                if norm.kind == NormKind::LayerNorm {
                    *mean = sum_of(x, x, |x, _| x) / size;
                }
                let mean = *mean;
                let mean_square = sum_of(x, x, |x, _| (x - mean) * (x - mean)) / size;
                *inverse = 1.0 / (mean_square + norm.epsilon as f32).sqrt();
                let inverse = *inverse;
                for (output, (x, gamma)) in output.iter_mut().zip(x.iter().zip(&gamma[..])) {
                    *output = (x - mean) * inverse * gamma;
                }
                if let Some(beta) = &beta {
                    output.iter_mut().zip(&beta[..]).for_each(|(output, beta)| *output += beta);
                }
            }
        },
    );
    NormOutput {
        output: tensor(output, [rows, columns]),
        mean: (norm.kind == NormKind::LayerNorm).then(|| tensor(mean, [rows, 1])),
        inverse_deviation: tensor(inverse_deviation, [rows, 1]),
    }
}

fn norm_backward(operands: NormBackward<NdArray>) -> NormGradients<NdArray> {
    let NormBackward { grad, x, mean, inverse_deviation, norm, residual, trained } = operands;
    let [rows, columns] = x.dims();
    let residual = residual.map(Values::rows);
    let (grad, x, gamma) = (Values::rows(grad), Values::rows(x), Values::rows(norm.gamma.clone()));
    let mean = mean.map(Values::rows);
    let inverse = Values::rows(inverse_deviation);
    let mean_of = |row: usize| mean.as_ref().map_or(0.0, |mean| mean[row]);
    let size = columns as f32;

    let [d_x] = new_rows(
        rows,
        [columns],
        #[inline(always)]
        |first, [d_x]| {
            for (row, d_x) in (first..).zip(d_x.chunks_exact_mut(columns)) {
                let (mean, inverse) = (mean_of(row), inverse[row]);
                let x = &x[row * columns..][..columns];
                let grad = &grad[row * columns..][..columns];
                d_x.iter_mut().zip(grad.iter().zip(&gamma[..])).for_each(|(d_x, (grad, gamma))| *d_x = grad * gamma);
                let along = sum_of(d_x, x, |scaled, x| scaled * (x - mean)) * inverse / size;
                let across = match norm.kind {
                    NormKind::LayerNorm => sum_of(d_x, d_x, |scaled, _| scaled) / size,
                    NormKind::RmsNorm => 0.0,
                };
                for (d_x, x) in d_x.iter_mut().zip(x) {
                    *d_x = (*d_x - across - (x - mean) * inverse * along) * inverse;
                }
                if let Some(residual) = &residual {
                    d_x.iter_mut().zip(&residual[row * columns..]).for_each(|(d_x, residual)| *d_x += residual);
                }
            }
        },
    );
    if !trained {
        return NormGradients { x: tensor(d_x, [rows, columns]), gamma: None, beta: None };
    }
    let sums = sum_over_rows(
        rows,
        2 * columns,
        #[inline(always)]
        |range, sums| {
            let (d_gamma, d_beta) = sums.split_at_mut(columns);
            for row in range {
                let (mean, inverse) = (mean_of(row), inverse[row]);
                let x = &x[row * columns..][..columns];
                let grad = &grad[row * columns..][..columns];
                for ((d_gamma, d_beta), (x, grad)) in d_gamma.iter_mut().zip(d_beta.iter_mut()).zip(x.iter().zip(grad))
                {
                    *d_gamma += grad * (x - mean) * inverse;
                    *d_beta += grad;
                }
            }
        },
    );
    NormGradients {
        x: tensor(d_x, [rows, columns]),
        gamma: Some(tensor(sums[..columns].to_vec(), [columns])),
        beta: norm.beta.as_ref().map(|_| tensor(sums[columns..].to_vec(), [columns])),
    }
}
