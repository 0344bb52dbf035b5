//! Feed-forward layers from projections.

use burn::tensor::Tensor;

use super::{
    FeedForwardBackward, FeedForwardForward, FeedForwardGradients, FeedForwardLayer, FeedForwardOps, FeedForwardOutput,
};
use crate::checked::Checked;
use crate::ops::linear::{
    LinearBackward, LinearForward, LinearGradients, linear_backward, linear_forward, linear_rows,
};

/// [`feed_forward`](crate::feed_forward()) without gradients.
pub fn feed_forward<B: FeedForwardOps>(operands: FeedForwardForward<B>) -> Tensor<B, 2> {
    let FeedForwardForward { x, norm, residual, layer, dropout } = operands;
    let FeedForwardLayer { up, up_bias, activation, down, down_bias } = layer;
    let hidden =
        linear_rows(LinearForward { norm, activation: Some(activation), ..LinearForward::new(x, up, up_bias) });
    linear_rows(LinearForward { dropout, residual: Some(residual), ..LinearForward::new(hidden, down, down_bias) })
}

/// Reference forward of [`feed_forward`](crate::feed_forward()), which saves tensors for the
/// backward pass.
pub fn feed_forward_forward<B: FeedForwardOps>(operands: FeedForwardForward<B>) -> FeedForwardOutput<B> {
    let FeedForwardForward { x, norm, residual, layer, dropout } = operands;
    let FeedForwardLayer { up, up_bias, activation, down, down_bias } = layer;
    let inner = linear_forward(Checked::new(LinearForward {
        norm,
        activation: Some(activation),
        keeps: true,
        ..LinearForward::new(x, up, up_bias)
    }));
    let outer = linear_forward(Checked::new(LinearForward {
        dropout,
        residual: Some(residual),
        keeps: true,
        ..LinearForward::new(inner.output.clone(), down, down_bias)
    }));
    let saved = inner.saved.expect("a projection that keeps saves what the gradient of its activation needs");
    FeedForwardOutput { output: outer.output, saved, hidden: inner.output }
}

/// Reference backward of [`feed_forward`](crate::feed_forward()).
pub fn feed_forward_backward<B: FeedForwardOps>(operands: FeedForwardBackward<B>) -> FeedForwardGradients<B> {
    let FeedForwardBackward { grad, x, saved, hidden, layer, wanted, dropout, sums: [up_sum, down_sum] } = operands;
    let [up_wanted, down_wanted] = wanted;
    let FeedForwardLayer { up, up_bias, activation, down, down_bias } = layer;
    let LinearGradients { x: grad, weight: down, bias: down_bias } = linear_backward(Checked::new(LinearBackward {
        grad,
        x: hidden,
        weight: down,
        bias: down_bias,
        wanted: down_wanted,
        activation: None,
        dropout,
        sum: down_sum,
    }));
    let LinearGradients { x, weight: up, bias: up_bias } = linear_backward(Checked::new(LinearBackward {
        grad,
        x,
        weight: up,
        bias: up_bias,
        wanted: up_wanted,
        activation: Some((activation, saved)),
        dropout: None,
        sum: up_sum,
    }));
    FeedForwardGradients { x, up, up_bias, down, down_bias }
}
