//! One block: attention and feed-forward, each added to the residual stream.

use burn::module::{Module, Param};
use burn::tensor::Tensor;

use fireclay_kernels::recorder::part;
use fireclay_kernels::{Backend, LayerCache, norm};

use crate::attention::Attention;
use crate::config::NormPlacement;
use crate::feed_forward::FeedForward;
use crate::layer::LayerConfig;
use crate::linear::Linear;
use crate::parameters::{Initializer, LayerNorm};
use crate::pass::{Pass, Site};

/// A transformer block.
#[derive(Module, Debug)]
pub struct Block<B: Backend> {
    /// The norm of attention, before or after it.
    pub attention_norm: LayerNorm<B>,
    /// Self-attention.
    pub attention: Attention<B>,
    /// The norm of the feed-forward layer, before or after it.
    pub feed_forward_norm: LayerNorm<B>,
    /// The feed-forward layer.
    pub feed_forward: FeedForward<B>,
    #[module(skip)]
    norm_placement: NormPlacement,
}

impl<B: Backend> Block<B> {
    pub(crate) fn new(config: &LayerConfig, init: &mut Initializer<'_, B>) -> Self {
        let norm = |init: &Initializer<'_, B>| init.norm(config.d_model, config.norm, config.norm_epsilon);
        Self {
            attention_norm: norm(init),
            attention: Attention::new(config, init),
            feed_forward_norm: norm(init),
            feed_forward: FeedForward::new(config, init),
            norm_placement: config.norm_placement,
        }
    }

    /// Its linear layers.
    pub(crate) fn linears(&self) -> [&Linear<B>; 4] {
        let Self { attention, feed_forward, .. } = self;
        [&attention.qkv, &attention.output, &feed_forward.up, &feed_forward.down]
    }

    /// The same, by their paths.
    pub(crate) fn named_linears(&self) -> [(&'static str, &Linear<B>); 4] {
        let [qkv, output, up, down] = self.linears();
        [("attention.qkv", qkv), ("attention.output", output), ("feed_forward.up", up), ("feed_forward.down", down)]
    }

    /// Its linear layers, by their paths.
    pub(crate) fn linears_mut(&mut self) -> [(&'static str, &mut Linear<B>); 4] {
        let Self { attention, feed_forward, .. } = self;
        [
            ("attention.qkv", &mut attention.qkv),
            ("attention.output", &mut attention.output),
            ("feed_forward.up", &mut feed_forward.up),
            ("feed_forward.down", &mut feed_forward.down),
        ]
    }

    /// The residual stream `x` `[batch_size * seq_length, d_model]` after this block.
    pub(crate) fn forward(
        &self,
        x: Tensor<B, 2>,
        pass: &Pass<B>,
        layer: usize,
        cache: Option<&mut LayerCache<B>>,
    ) -> Tensor<B, 2> {
        let norms = (self.attention_norm.weights(), self.feed_forward_norm.weights());
        let in_attention = part("attention");
        match self.norm_placement {
            NormPlacement::Pre => {
                let heads = self.attention.heads(x.clone(), Some(&norms.0), pass, layer, cache);
                let x = self.add_attention(heads, x, pass, layer);
                drop(in_attention);
                let _in_feed_forward = part("feed_forward");
                self.feed_forward.add_to(x, Some(&norms.1), pass, layer)
            }
            NormPlacement::Post => {
                let heads = self.attention.heads(x.clone(), None, pass, layer, cache);
                let x = norm(self.add_attention(heads, x, pass, layer), &norms.0);
                drop(in_attention);
                let _in_feed_forward = part("feed_forward");
                norm(self.feed_forward.add_to(x, None, pass, layer), &norms.1)
            }
        }
    }

    /// This block's attention weights over `x`, f32 `[batch_size, n_heads, seq_length,
    /// seq_length]`.
    pub(crate) fn attention_weights(&self, x: Tensor<B, 2>, pass: &Pass<B>) -> Tensor<B, 4> {
        let norm = (self.norm_placement == NormPlacement::Pre).then(|| self.attention_norm.weights());
        self.attention.weights(x, norm.as_ref(), pass)
    }

    fn add_attention(&self, heads: Tensor<B, 2>, x: Tensor<B, 2>, pass: &Pass<B>, layer: usize) -> Tensor<B, 2> {
        let Attention { output, output_bias, .. } = &self.attention;
        let dropout = pass.dropout(layer, Site::AttentionOutput);
        output.add_to(x, heads, output_bias.as_ref().map(Param::val), dropout)
    }
}
