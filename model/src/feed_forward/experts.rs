//! A mixture of experts: a router chooses a few feed-forward layers for each token.

use burn::module::{Module, Param};
use burn::tensor::activation::{sigmoid, softmax};
use burn::tensor::{DType, Tensor};

use fireclay_kernels::{
    Activation, Backend, DecodeRouter, Dropout, ExpertChoice, ExpertsLayer, Norm, choose_experts, dropout, experts,
    linear,
};

use super::dense::Dense;
use super::routing::{Routed, RoutingRecord};
use crate::layer::LayerConfig;
use crate::linear::normed;
use crate::matrix::Matrix;
use crate::mixture::{ExpertsConfig, RouterScores};
use crate::parameters::Initializer;

/// The weights of a mixture of experts: those of all experts are stacked, as on the hub `[d_output,
/// d_input]` each.
#[derive(Module, Debug)]
pub struct Experts<B: Backend> {
    /// `[experts, d_model]`.
    pub router: Param<Tensor<B, 2>>,
    /// The bias of its logits.
    pub router_bias: Option<Param<Tensor<B, 1>>>,
    /// Added to scores where experts are chosen, `[experts]`.
    pub choice_bias: Option<Param<Tensor<B, 1>>>,
    /// First projections, `[experts * d_ff, d_model]`; of each expert gate, then up, `[experts * 2 *
    /// d_ff, d_model]`, where gated.
    pub up: Matrix<B>,
    /// Their biases.
    pub up_bias: Option<Param<Tensor<B, 1>>>,
    /// Second projections, `[experts * d_model, d_ff]`.
    pub down: Matrix<B>,
    /// Their biases.
    pub down_bias: Option<Param<Tensor<B, 1>>>,
    /// The expert that all tokens go through.
    pub shared: Option<Dense<B>>,
    #[module(skip)]
    config: ExpertsConfig,
    #[module(skip)]
    activation: Activation,
    residual_multiplier: f64,
}

impl<B: Backend> Experts<B> {
    pub(crate) fn new(config: &LayerConfig, own: ExpertsConfig, init: &mut Initializer<'_, B>) -> Self {
        let [deviation, residual_deviation] = config.init_deviations;
        let ExpertsConfig { experts, shared_d_ff, .. } = own;
        let (up_rows, down_rows) = (experts * config.up_width(), experts * config.d_model);
        Self {
            router: init.matrix([experts, config.d_model], deviation),
            router_bias: own.router_bias.then(|| init.zeros(experts)),
            choice_bias: own.choice_bias.then(|| init.zeros(experts)),
            up: Matrix::from(init.matrix([up_rows, config.d_model], deviation)),
            up_bias: config.feed_forward_bias.then(|| init.zeros(up_rows)),
            down: Matrix::from(init.matrix([down_rows, config.d_ff], residual_deviation)),
            down_bias: config.feed_forward_bias.then(|| init.zeros(down_rows)),
            shared: (shared_d_ff > 0).then(|| Dense::new(config, shared_d_ff, init)),
            config: own,
            activation: config.activation,
            residual_multiplier: config.residual_multiplier,
        }
    }

    /// The residual stream `x` `[tokens, d_model]` plus the layer's output; `pre_norm` is applied to
    /// its input, if given.
    pub(super) fn add_to(
        &self,
        x: Tensor<B, 2>,
        pre_norm: Option<&Norm<B>>,
        dropped: Option<Dropout>,
        record: Option<&RoutingRecord<B>>,
    ) -> Tensor<B, 2> {
        let output = self.output(x.clone(), pre_norm, record);
        let output = match dropped {
            Some(dropped) => dropout(output, dropped),
            None => output,
        };
        match self.residual_multiplier {
            1.0 => x + output,
            factor => x + output.mul_scalar(factor),
        }
    }

    /// The layer's output `[tokens, d_model]`, which the caller adds.
    pub(super) fn output(
        &self,
        x: Tensor<B, 2>,
        pre_norm: Option<&Norm<B>>,
        record: Option<&RoutingRecord<B>>,
    ) -> Tensor<B, 2> {
        let x = normed(x, pre_norm);
        let routed = self.routed(x.clone());
        let x = match record {
            Some(record) => record.note(x, &routed, self.config),
            None => x,
        };
        let bias = |bias: &Option<Param<Tensor<B, 1>>>| bias.as_ref().map(Param::val);
        let layer = ExpertsLayer {
            up: self.up.weight(),
            up_bias: bias(&self.up_bias),
            activation: self.activation,
            limit: self.config.expert_limit,
            down: self.down.weight(),
            down_bias: bias(&self.down_bias),
        };
        let output = experts(x.clone(), routed.chosen, routed.weights, layer);
        match &self.shared {
            Some(shared) => output + shared.output(x, None),
            None => output,
        }
    }

    /// The router for fused decode steps.
    pub(crate) fn decode_router(&self) -> DecodeRouter<B> {
        let ExpertsConfig { experts_per_token, router, router_normalized, expert_scale, .. } = self.config;
        let bias = |bias: &Option<Param<Tensor<B, 1>>>| bias.as_ref().map(Param::val);
        DecodeRouter {
            weight: self.router.val(),
            bias: bias(&self.router_bias),
            choice_bias: bias(&self.choice_bias),
            choice: ExpertChoice {
                experts_per_token,
                sigmoid: router == RouterScores::Sigmoid,
                normalized: router_normalized,
                scale: expert_scale,
            },
        }
    }

    /// The experts of each token of `x` `[tokens, d_model]`. Computed in f32, whatever the dtype of
    /// `x`: small differences of scores decide.
    fn routed(&self, x: Tensor<B, 2>) -> Routed<B> {
        let ExpertsConfig { experts_per_token: k, router, router_normalized: normalized, expert_scale, .. } =
            self.config;
        let weight = self.router.val().cast(DType::F32);
        let logits = linear(x.cast(DType::F32), weight, self.router_bias.as_ref().map(Param::val));
        let choice_bias = self.choice_bias.as_ref().map(|bias| bias.val().detach().unsqueeze::<2>());
        let choose = |scores: Tensor<B, 2>| match &choice_bias {
            Some(bias) => choose_experts(scores + bias.clone(), k),
            None => choose_experts(scores, k),
        };
        let (chosen, weights) = match (router, normalized) {
            (RouterScores::Softmax, true) => {
                // The largest logits have the largest scores, and the quotients of scores are those
                // of a softmax over the chosen logits alone.
                let scores = if choice_bias.is_some() { softmax(logits.clone(), 1) } else { logits.clone() };
                let chosen = choose(scores);
                (chosen.clone(), softmax(logits.clone().gather(1, chosen), 1))
            }
            (RouterScores::Softmax, false) => {
                let scores = softmax(logits.clone(), 1);
                let chosen = choose(scores.clone());
                (chosen.clone(), scores.gather(1, chosen))
            }
            (RouterScores::Sigmoid, _) => {
                let scores = sigmoid(logits.clone());
                let chosen = choose(scores.clone());
                let own = scores.gather(1, chosen.clone());
                let own = if normalized { own.clone() / (own.sum_dim(1) + 1e-20) } else { own };
                (chosen, own)
            }
        };
        let weights = if expert_scale == 1.0 { weights } else { weights.mul_scalar(expert_scale) };
        Routed { logits, chosen, weights }
    }
}
