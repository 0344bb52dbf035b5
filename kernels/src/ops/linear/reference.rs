//! Projections from small operations.

use burn::tensor::{DType, Tensor};

use super::{
    LinearBackward, LinearForward, LinearGradients, LinearOps, LinearOutput, Saved, float_weight, kept_input, normed,
};
use crate::checked::Checked;
use crate::ops::activation::{ActivateBackward, Activation, activate_backward, activate_rows};
use crate::ops::dropout::dropout_rows;

/// Reference forward of [`linear`](crate::linear()) and what stands around it.
pub fn linear_forward<B: LinearOps>(operands: LinearForward<B>) -> LinearOutput<B> {
    let LinearForward { x, weight, bias, activation, dropout, residual, .. } = normed(operands);
    let dtype = x.dtype();
    let weight = float_weight(weight, &x);
    let product = x.matmul(weight.cast(dtype).transpose());
    let projected = add_bias(product.clone(), bias);
    if let Some(activation) = activation {
        return LinearOutput { output: activate_rows(projected, activation), saved: Some(Saved::Product(product)) };
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
    let LinearBackward { grad, x, weight, bias, wanted, activation, dropout, sum } = operands;
    let grad = dropout_rows(grad, dropout);
    let grad = match activation {
        Some((activation, saved)) => activation_gradient(grad, saved, bias.clone(), activation),
        None => grad,
    };
    let bias = bias.filter(|_| wanted.bias);
    let bias = bias.map(|_| grad.clone().cast(DType::F32).sum_dim(0).squeeze_dim::<1>(0));
    let weight_gradient = wanted.weight.then(|| {
        let gradient = grad.clone().transpose().matmul(kept_input(x)).cast(DType::F32);
        match sum {
            Some(sum) => sum + gradient,
            None => gradient,
        }
    });
    let weight = float_weight(weight, &grad).cast(grad.dtype());
    LinearGradients { x: grad.matmul(weight), weight: weight_gradient, bias }
}

/// The gradient of a projection before its activation, from that behind it.
pub(crate) fn activation_gradient<B: LinearOps>(
    grad: Tensor<B, 2>,
    saved: Saved<B>,
    bias: Option<Tensor<B, 1>>,
    activation: Activation,
) -> Tensor<B, 2> {
    match saved {
        Saved::Product(product) => {
            let x = add_bias(product, bias);
            activate_backward(Checked::new(ActivateBackward { grad, x, activation }))
        }
        Saved::Slopes(slopes) if activation.gated => Tensor::cat(vec![grad.clone(), grad], 1) * slopes,
        Saved::Slopes(slopes) => grad * slopes,
    }
}

/// `product + bias`, if there is a bias.
pub(crate) fn add_bias<B: LinearOps>(product: Tensor<B, 2>, bias: Option<Tensor<B, 1>>) -> Tensor<B, 2> {
    match bias {
        Some(bias) => {
            let bias = bias.cast(product.dtype()).unsqueeze();
            product + bias
        }
        None => product,
    }
}
