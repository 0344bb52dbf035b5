//! A dense feed-forward layer, plain or gated.

use burn::module::{Module, Param};
use burn::tensor::Tensor;

use fireclay_kernels::{Activation, Backend, Dropout, FeedForwardLayer, Norm, feed_forward};

use crate::layer::LayerConfig;
use crate::linear::{Linear, scaled};
use crate::matrix::Matrix;
use crate::parameters::Initializer;

/// The weights of a feed-forward layer, as on the hub `[d_output, d_input]`.
#[derive(Module, Debug)]
pub struct Dense<B: Backend> {
    /// First projection, `[d_ff, d_model]`; gate, then up, `[2 * d_ff, d_model]` where gated.
    pub up: Linear<B>,
    /// Its bias.
    pub up_bias: Option<Param<Tensor<B, 1>>>,
    /// Second projection, `[d_model, d_ff]`.
    pub down: Linear<B>,
    /// Its bias.
    pub down_bias: Option<Param<Tensor<B, 1>>>,
    #[module(skip)]
    pub(crate) activation: Activation,
    residual_multiplier: f64,
}

impl<B: Backend> Dense<B> {
    pub(crate) fn new(config: &LayerConfig, d_ff: usize, init: &mut Initializer<'_, B>) -> Self {
        let [deviation, residual_deviation] = config.init_deviations;
        let width = if config.activation.gated { 2 * d_ff } else { d_ff };
        Self {
            up: Matrix::from(init.matrix([width, config.d_model], deviation)).into(),
            up_bias: config.feed_forward_bias.then(|| init.zeros(width)),
            down: Matrix::from(init.matrix([config.d_model, d_ff], residual_deviation)).into(),
            down_bias: config.feed_forward_bias.then(|| init.zeros(config.d_model)),
            activation: config.activation,
            residual_multiplier: config.residual_multiplier,
        }
    }

    /// The residual stream `x` `[rows, d_model]` plus the layer's output; `pre_norm` is applied to
    /// its input, if given.
    pub(crate) fn add_to(&self, x: Tensor<B, 2>, pre_norm: Option<&Norm<B>>, dropout: Option<Dropout>) -> Tensor<B, 2> {
        let [up_bias, down_bias] = [&self.up_bias, &self.down_bias].map(|bias| bias.as_ref().map(Param::val));
        if self.up.adapter.is_some() || self.down.adapter.is_some() || self.residual_multiplier != 1.0 {
            let hidden = self.up.activated(x.clone(), pre_norm, up_bias, self.activation);
            let (hidden, down_bias) = scaled(hidden, down_bias, self.residual_multiplier);
            return self.down.add_to(x, hidden, down_bias, dropout);
        }
        let (up, down) = (self.up.base.weight(), self.down.base.weight());
        let weights = FeedForwardLayer { up, up_bias, activation: self.activation, down, down_bias };
        feed_forward(x, pre_norm, weights, dropout)
    }

    /// The layer's output `[rows, d_model]`, which the caller adds.
    pub(crate) fn output(&self, x: Tensor<B, 2>, pre_norm: Option<&Norm<B>>) -> Tensor<B, 2> {
        let [up_bias, down_bias] = [&self.up_bias, &self.down_bias].map(|bias| bias.as_ref().map(Param::val));
        let hidden = self.up.activated(x, pre_norm, up_bias, self.activation);
        self.down.forward(hidden, None, down_bias)
    }
}
