//! One block: attention and feed-forward, each added to the residual stream.

use burn::module::{Module, Param};
use burn::tensor::Tensor;

use fireclay_kernels::recorder::part;
use fireclay_kernels::{Backend, Dropout, LayerCache, Norm, dropout, norm};

use crate::attention::Attention;
use crate::config::NormPlacement;
use crate::feed_forward::{FeedForward, Projection};
use crate::layer::LayerConfig;
use crate::linear::{Linear, normed, scaled};
use crate::parameters::{Initializer, LayerNorm};
use crate::pass::{Pass, Site};

/// A transformer block.
#[derive(Module, Debug)]
pub struct Block<B: Backend> {
    /// The norm of attention, if it has one: of its input, of its output, or of the residual sum.
    pub attention_norm: Option<LayerNorm<B>>,
    /// The norm of attention's output, if that of its input is another.
    pub attention_output_norm: Option<LayerNorm<B>>,
    /// Self-attention.
    pub attention: Attention<B>,
    /// The norm of the feed-forward layer: of its input, of its output, or of the residual sum.
    pub feed_forward_norm: LayerNorm<B>,
    /// The norm of the feed-forward layer's output, if that of its input is another.
    pub feed_forward_output_norm: Option<LayerNorm<B>>,
    /// The feed-forward layer.
    pub feed_forward: FeedForward<B>,
    #[module(skip)]
    norm_placement: NormPlacement,
    residual_multiplier: f64,
}

impl<B: Backend> Block<B> {
    pub(crate) fn new(config: &LayerConfig, init: &mut Initializer<'_, B>) -> Self {
        let norm =
            |init: &Initializer<'_, B>| init.norm(config.d_model, config.norm, config.norm_bias, config.norm_epsilon);
        let output_norm =
            |init: &Initializer<'_, B>| (config.norm_placement == NormPlacement::Both).then(|| norm(init));
        Self {
            attention_norm: config.attention_norm.then(|| norm(init)),
            attention_output_norm: output_norm(init),
            attention: Attention::new(config, init),
            feed_forward_norm: norm(init),
            feed_forward_output_norm: output_norm(init),
            feed_forward: FeedForward::new(config, init),
            norm_placement: config.norm_placement,
            residual_multiplier: config.residual_multiplier,
        }
    }

    /// Its linear layers, by their paths.
    pub(crate) fn linears(&self) -> Vec<(&'static str, &Linear<B>)> {
        let Self { attention, feed_forward, .. } = self;
        let own = [("attention.qkv", &attention.qkv), ("attention.output", &attention.output)];
        own.into_iter().chain(feed_forward.linears()).collect()
    }

    /// Its weights that may be stored in other formats, by their paths: linear layers, and the
    /// stacked matrices of experts.
    pub(crate) fn projections_mut(&mut self) -> Vec<(&'static str, Projection<'_, B>)> {
        let Self { attention, feed_forward, .. } = self;
        let own = [
            ("attention.qkv", Projection::Linear(&mut attention.qkv)),
            ("attention.output", Projection::Linear(&mut attention.output)),
        ];
        own.into_iter().chain(feed_forward.projections_mut()).collect()
    }

    /// Whether operations read any of its weights quantized.
    pub(crate) fn is_quantized(&self) -> bool {
        let stacked = self.feed_forward.experts().is_some_and(|own| own.up.is_quantized() || own.down.is_quantized());
        stacked || self.linears().into_iter().any(|(_, linear)| linear.base.is_quantized())
    }

    /// The residual stream `x` `[batch_size * seq_length, d_model]` after this block.
    pub(crate) fn forward(
        &self,
        x: Tensor<B, 2>,
        pass: &Pass<B>,
        layer: usize,
        cache: Option<&mut LayerCache<B>>,
    ) -> Tensor<B, 2> {
        let norms = (self.attention_norm.as_ref().map(LayerNorm::weights), self.feed_forward_norm.weights());
        let in_attention = part("attention");
        match self.norm_placement {
            NormPlacement::Pre => {
                let heads = self.attention.heads(x.clone(), norms.0.as_ref(), pass, layer, cache);
                let x = self.add_attention(heads, x, pass, layer);
                drop(in_attention);
                let _in_feed_forward = part("feed_forward");
                self.add_feed_forward(x, Some(&norms.1), pass, layer)
            }
            NormPlacement::Post => {
                let heads = self.attention.heads(x.clone(), None, pass, layer, cache);
                let x = normed(self.add_attention(heads, x, pass, layer), norms.0.as_ref());
                drop(in_attention);
                let _in_feed_forward = part("feed_forward");
                norm(self.add_feed_forward(x, None, pass, layer), &norms.1)
            }
            NormPlacement::Output | NormPlacement::Both => {
                // The norms of inputs, if any, and of outputs.
                let split = |first: Option<Norm<B>>, second: &Option<LayerNorm<B>>| match second {
                    Some(second) => (first, Some(second.weights())),
                    None => (None, first),
                };
                let (pre, post) = split(norms.0, &self.attention_output_norm);
                let heads = self.attention.heads(x.clone(), pre.as_ref(), pass, layer, cache);
                let Attention { output, output_bias, .. } = &self.attention;
                let added = output.forward(heads, None, output_bias.as_ref().map(Param::val));
                let x = self.add(x, normed(added, post.as_ref()), pass.dropout(layer, Site::AttentionOutput));
                drop(in_attention);
                let _in_feed_forward = part("feed_forward");
                let (pre, post) = split(Some(norms.1), &self.feed_forward_output_norm);
                let added = self.feed_forward.output(x.clone(), pre.as_ref(), pass.routing.as_ref());
                self.add(x, normed(added, post.as_ref()), pass.dropout(layer, Site::FeedForwardOutput))
            }
        }
    }

    /// This block's attention weights over `x`, f32 `[batch_size, n_heads, seq_length,
    /// seq_length]`.
    pub(crate) fn attention_weights(&self, x: Tensor<B, 2>, pass: &Pass<B>) -> Tensor<B, 4> {
        let is_before = matches!(self.norm_placement, NormPlacement::Pre | NormPlacement::Both);
        let norm = self.attention_norm.as_ref().filter(|_| is_before).map(LayerNorm::weights);
        self.attention.weights(x, norm.as_ref(), pass)
    }

    fn add_attention(&self, heads: Tensor<B, 2>, x: Tensor<B, 2>, pass: &Pass<B>, layer: usize) -> Tensor<B, 2> {
        let Attention { output, output_bias, .. } = &self.attention;
        let dropout = pass.dropout(layer, Site::AttentionOutput);
        let (heads, bias) = scaled(heads, output_bias.as_ref().map(Param::val), self.residual_multiplier);
        output.add_to(x, heads, bias, dropout)
    }

    fn add_feed_forward(
        &self,
        x: Tensor<B, 2>,
        pre_norm: Option<&Norm<B>>,
        pass: &Pass<B>,
        layer: usize,
    ) -> Tensor<B, 2> {
        let dropout = pass.dropout(layer, Site::FeedForwardOutput);
        self.feed_forward.add_to(x, pre_norm, dropout, pass.routing.as_ref())
    }

    /// The residual stream `x` plus a sub-layer's output.
    fn add(&self, x: Tensor<B, 2>, output: Tensor<B, 2>, dropped: Option<Dropout>) -> Tensor<B, 2> {
        let output = match dropped {
            Some(dropped) => dropout(output, dropped),
            None => output,
        };
        match self.residual_multiplier {
            1.0 => x + output,
            factor => x + output.mul_scalar(factor),
        }
    }
}
