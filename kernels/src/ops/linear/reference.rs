//! Projections from small operations.

use burn::tensor::{DType, Tensor};

use super::{LinearBackward, LinearForward, LinearGradients, LinearOps, LinearOutput, float_weight, normed};
use crate::checked::Checked;
use crate::ops::activation::{ActivateBackward, activate_backward, activate_rows};
use crate::ops::dropout::dropout_rows;

/// Reference forward of [`linear`](crate::linear()) and what stands around it.
pub fn linear_forward<B: LinearOps>(operands: LinearForward<B>) -> LinearOutput<B> {
    let LinearForward { x, weight, bias, activation, dropout, residual, .. } = normed(operands);
    let dtype = x.dtype();
    let weight = float_weight(weight, &x);
    let product = x.matmul(weight.cast(dtype).transpose());
    let projected = match bias {
        Some(bias) => product + bias.cast(dtype).unsqueeze(),
        None => product,
    };
    if let Some(activation) = activation {
        let output = activate_rows(projected.clone(), activation);
        return LinearOutput { output, saved: Some(projected) };
    }
    let projected = dropout_rows(projected, dropout);
    let output = match residual {
        Some(residual) => residual.cast(dtype) + projected,
        None => projected,
    };
    LinearOutput { output, saved: None }
}

/// Reference backward of [`linear`](crate::linear()).
pub fn linear_backward<B: LinearOps>(operands: LinearBackward<B>) -> LinearGradients<B> {
    let LinearBackward { grad, x, weight, bias, activation, dropout, sum } = operands;
    let grad = dropout_rows(grad, dropout);
    let grad: Tensor<B, 2> = match activation {
        Some((activation, saved)) => activate_backward(Checked::new(ActivateBackward { grad, x: saved, activation })),
        None => grad,
    };
    let bias = bias.map(|_| grad.clone().cast(DType::F32).sum_dim(0).squeeze_dim::<1>(0));
    let d_weight = grad.clone().transpose().matmul(x.clone()).cast(DType::F32);
    LinearGradients {
        weight: match sum {
            Some(sum) => sum + d_weight,
            None => d_weight,
        },
        x: grad.matmul(weight.cast(x.dtype())),
        bias,
    }
}
