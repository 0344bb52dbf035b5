//! Self-attention: one projection for queries, keys and values.

use burn::module::{Module, Param};
use burn::tensor::Tensor;

use fireclay_kernels::{
    AttentionOptions, Backend, LayerCache, Norm, NormKind, PackedHeads, Placement, RotaryTable, attention,
    attention_weights, cached_attention, norm, qkv_attention, qkv_rotary, reshape, rotary,
};

use crate::layer::LayerConfig;
use crate::linear::Linear;
use crate::matrix::Matrix;
use crate::parameters::{Initializer, LayerNorm};
use crate::pass::{Pass, Site};

/// The weights of self-attention, as on the hub `[d_output, d_input]`.
#[derive(Module, Debug)]
pub struct Attention<B: Backend> {
    /// Queries, keys and values, `[(n_heads + 2 * n_kv_heads) * head_dim, d_model]`.
    pub qkv: Linear<B>,
    /// Their bias.
    pub qkv_bias: Option<Param<Tensor<B, 1>>>,
    /// RMS norm of each query head.
    pub query_norm: Option<LayerNorm<B>>,
    /// RMS norm of each key head.
    pub key_norm: Option<LayerNorm<B>>,
    /// Output projection, `[d_model, n_heads * head_dim]`.
    pub output: Linear<B>,
    /// Its bias.
    pub output_bias: Option<Param<Tensor<B, 1>>>,
    n_heads: usize,
    n_kv_heads: usize,
    #[module(skip)]
    window: Option<usize>,
}

impl<B: Backend> Attention<B> {
    pub(crate) fn new(config: &LayerConfig, init: &mut Initializer<'_, B>) -> Self {
        let heads = config.n_heads * config.head_dim;
        let head_norm = || init.norm(config.head_dim, NormKind::RmsNorm, config.norm_epsilon);
        let (query_norm, key_norm) = (config.qk_norm.then(head_norm), config.qk_norm.then(head_norm));
        let [deviation, residual_deviation] = config.init_deviations;
        Self {
            qkv: Matrix::from(init.matrix([config.qkv_width(), config.d_model], deviation)).into(),
            qkv_bias: config.qkv_bias.then(|| init.zeros(config.qkv_width())),
            query_norm,
            key_norm,
            output: Matrix::from(init.matrix([config.d_model, heads], residual_deviation)).into(),
            output_bias: config.output_bias.then(|| init.zeros(config.d_model)),
            n_heads: config.n_heads,
            n_kv_heads: config.n_kv_heads,
            window: config.window,
        }
    }

    /// The heads' outputs concatenated, `[batch_size * seq_length, n_heads * head_dim]`, before the
    /// output projection.
    ///
    /// `x` is `[batch_size * seq_length, d_model]`; `pre_norm` is applied to it first, if given.
    pub(crate) fn heads(
        &self,
        x: Tensor<B, 2>,
        pre_norm: Option<&Norm<B>>,
        pass: &Pass<B>,
        layer: usize,
        cache: Option<&mut LayerCache<B>>,
    ) -> Tensor<B, 2> {
        let [rows, _] = x.dims();
        let (qkv, heads) = self.qkv(x, pre_norm);
        match (cache, pass.cached(self.window)) {
            (Some(cache), Some(at)) => cached_attention(qkv, heads, self.placement(pass), at, cache),
            _ => {
                let output = self.attend(by_rows(qkv, pass), heads, pass, layer);
                reshape(output, [rows, self.n_heads * heads.head_dim])
            }
        }
    }

    /// Attention weights without a cache, f32 `[batch_size, n_heads, seq_length, seq_length]`;
    /// operands as in [`heads`](Self::heads).
    pub(crate) fn weights(&self, x: Tensor<B, 2>, pre_norm: Option<&Norm<B>>, pass: &Pass<B>) -> Tensor<B, 4> {
        let (qkv, heads) = self.qkv(x, pre_norm);
        let [query, key, _] = heads.split(by_rows(qkv, pass));
        let query = self.place(query, self.query_norm.as_ref(), pass);
        let key = self.place(key, self.key_norm.as_ref(), pass);
        attention_weights(query, key, pass.mask(self.window), AttentionOptions::new(heads.head_dim))
    }

    /// The packed queries, keys and values of tokens, one row each, with their layout.
    fn qkv(&self, x: Tensor<B, 2>, pre_norm: Option<&Norm<B>>) -> (Tensor<B, 2>, PackedHeads) {
        let bias = self.qkv_bias.as_ref().map(Param::val);
        let qkv = self.qkv.forward(x, pre_norm, bias);
        let [_, width] = qkv.dims();
        let head_dim = width / (self.n_heads + 2 * self.n_kv_heads);
        let heads = PackedHeads { n_heads: self.n_heads, n_kv_heads: self.n_kv_heads, head_dim };
        (qkv, heads)
    }

    /// Attention within each row, `[batch_size, seq_length, n_heads * head_dim]`.
    fn attend(&self, qkv: Tensor<B, 3>, heads: PackedHeads, pass: &Pass<B>, layer: usize) -> Tensor<B, 3> {
        let dropout = pass.dropout(layer, Site::Attention);
        let options = AttentionOptions::new(heads.head_dim).with_dropout(dropout);
        if self.query_norm.is_none() && self.key_norm.is_none() {
            let qkv = match &pass.rotary {
                Some(table) => qkv_rotary(qkv, heads, table, pass.positions.clone()),
                None => qkv,
            };
            return qkv_attention(qkv, heads, pass.mask(self.window), options);
        }
        let [query, key, value] = heads.split(qkv);
        let query = self.place(query, self.query_norm.as_ref(), pass);
        let key = self.place(key, self.key_norm.as_ref(), pass);
        attention(query, key, value, pass.mask(self.window), options)
    }

    /// The parameters of [`place`](Self::place), for the operation that fuses it.
    fn placement(&self, pass: &Pass<B>) -> Placement<B> {
        self.placed_by(pass.rotary.clone())
    }

    /// Norms and rotation of queries and keys.
    pub(crate) fn placed_by(&self, rotary: Option<RotaryTable<B>>) -> Placement<B> {
        let weights = |norm: &Option<LayerNorm<B>>| norm.as_ref().map(LayerNorm::weights);
        Placement { query_norm: weights(&self.query_norm), key_norm: weights(&self.key_norm), rotary }
    }

    /// Normalizes and rotates heads `[batch_size, heads, seq_length, head_dim]`, as the config
    /// says.
    fn place(&self, heads: Tensor<B, 4>, head_norm: Option<&LayerNorm<B>>, pass: &Pass<B>) -> Tensor<B, 4> {
        let heads = match head_norm {
            Some(weights) => norm(heads, &weights.weights()),
            None => heads,
        };
        match &pass.rotary {
            Some(table) => rotary(heads, table, pass.positions.clone()),
            None => heads,
        }
    }
}

/// Reshapes `[batch_size * seq_length, width]` to `[batch_size, seq_length, width]`.
fn by_rows<B: Backend>(x: Tensor<B, 2>, pass: &Pass<B>) -> Tensor<B, 3> {
    let ([batch_size, seq_length], [_, width]) = (pass.positions.dims(), x.dims());
    reshape(x, [batch_size, seq_length, width])
}
