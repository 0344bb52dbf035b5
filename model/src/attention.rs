//! Self-attention: one projection for queries, keys and values.

use burn::module::{Module, Param};
use burn::tensor::Tensor;

use fireclay_kernels::{
    AttentionOptions, Backend, HeadNorms, LayerCache, Norm, NormKind, PackedHeads, Placement, RotaryTable, attention,
    attention_weights, cached_attention, norm, qkv_attention, qkv_norm, qkv_rotary, reshape, rotary, sink_attention,
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
    /// RMS norm of each query head, or of all together.
    pub query_norm: Option<LayerNorm<B>>,
    /// RMS norm of each key head, or of all together.
    pub key_norm: Option<LayerNorm<B>>,
    /// Output projection, `[d_model, n_heads * head_dim]`.
    pub output: Linear<B>,
    /// Its bias.
    pub output_bias: Option<Param<Tensor<B, 1>>>,
    /// A score per query head that takes part in the softmax, `[n_heads]`.
    pub sinks: Option<Param<Tensor<B, 1>>>,
    n_heads: usize,
    n_kv_heads: usize,
    /// Whether the norms are over all heads together.
    joint_norms: bool,
    /// The largest magnitude of queries, keys and values.
    #[module(skip)]
    clip: Option<f64>,
    #[module(skip)]
    window: Option<usize>,
    /// Index of the rotary table.
    #[module(skip)]
    rotary: Option<usize>,
    #[module(skip)]
    options: AttentionOptions,
}

impl<B: Backend> Attention<B> {
    pub(crate) fn new(config: &LayerConfig, init: &mut Initializer<'_, B>) -> Self {
        let heads = config.n_heads * config.head_dim;
        let qk_norm = |heads: usize| {
            let width = config.head_dim * if config.joint_qk_norm { heads } else { 1 };
            config.qk_norm.then(|| init.norm(width, NormKind::RmsNorm, false, config.norm_epsilon))
        };
        let (query_norm, key_norm) = (qk_norm(config.n_heads), qk_norm(config.n_kv_heads));
        let options = AttentionOptions::new(config.head_dim).with_scale(config.attention_scale);
        let [deviation, residual_deviation] = config.init_deviations;
        Self {
            qkv: Matrix::from(init.matrix([config.qkv_width(), config.d_model], deviation)).into(),
            qkv_bias: config.qkv_bias.then(|| init.zeros(config.qkv_width())),
            query_norm,
            key_norm,
            output: Matrix::from(init.matrix([config.d_model, heads], residual_deviation)).into(),
            output_bias: config.output_bias.then(|| init.zeros(config.d_model)),
            sinks: config.attention_sinks.then(|| init.zeros(config.n_heads)),
            n_heads: config.n_heads,
            n_kv_heads: config.n_kv_heads,
            joint_norms: config.joint_qk_norm,
            clip: config.qkv_clip,
            window: config.window,
            rotary: config.rotary,
            options: options.with_softcap(config.attention_softcap),
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
            (Some(cache), Some(at)) => cached_attention(qkv, heads, self.placement(pass), self.options, at, cache),
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
        let query = self.place(query, self.head_norms()[0], pass);
        let key = self.place(key, self.head_norms()[1], pass);
        attention_weights(query, key, self.sinks(), pass.mask(self.window), self.options)
    }

    /// The packed queries, keys and values of tokens, one row each, with their layout.
    fn qkv(&self, x: Tensor<B, 2>, pre_norm: Option<&Norm<B>>) -> (Tensor<B, 2>, PackedHeads) {
        let bias = self.qkv_bias.as_ref().map(Param::val);
        let qkv = self.qkv.forward(x, pre_norm, bias);
        let [_, width] = qkv.dims();
        let head_dim = width / (self.n_heads + 2 * self.n_kv_heads);
        let heads = PackedHeads { n_heads: self.n_heads, n_kv_heads: self.n_kv_heads, head_dim };
        let qkv = self.jointly_normed(qkv, heads);
        let qkv = match self.clip {
            Some(most) => qkv.clamp(-most, most),
            None => qkv,
        };
        (qkv, heads)
    }

    fn sinks(&self) -> Option<Tensor<B, 1>> {
        self.sinks.as_ref().map(Param::val)
    }

    /// Normalizes all query heads of tokens together, and all key heads, if these are the norms.
    fn jointly_normed(&self, qkv: Tensor<B, 2>, heads: PackedHeads) -> Tensor<B, 2> {
        let (Some(query_norm), Some(key_norm), true) = (&self.query_norm, &self.key_norm, self.joint_norms) else {
            return qkv;
        };
        let PackedHeads { n_heads, n_kv_heads, head_dim } = heads;
        let columns = |first: usize, heads: usize| qkv.clone().narrow(1, first * head_dim, heads * head_dim);
        let query = norm(columns(0, n_heads), &query_norm.weights());
        let key = norm(columns(n_heads, n_kv_heads), &key_norm.weights());
        Tensor::cat(vec![query, key, columns(n_heads + n_kv_heads, n_kv_heads)], 1)
    }

    /// The norms of single heads: of queries and of keys.
    fn head_norms(&self) -> [Option<&LayerNorm<B>>; 2] {
        [&self.query_norm, &self.key_norm].map(|norm| norm.as_ref().filter(|_| !self.joint_norms))
    }

    /// The norms of query and key heads, if packed heads are normalized at once.
    fn packed_norms(&self) -> Option<HeadNorms<B>> {
        let [Some(query), Some(key)] = self.head_norms() else { return None };
        let norms = HeadNorms { query: query.weights(), key: key.weights() };
        norms.are_supported().then_some(norms)
    }

    /// Attention within each row, `[batch_size, seq_length, n_heads * head_dim]`.
    fn attend(&self, qkv: Tensor<B, 3>, heads: PackedHeads, pass: &Pass<B>, layer: usize) -> Tensor<B, 3> {
        let dropout = pass.dropout(layer, Site::Attention);
        let options = self.options.with_dropout(dropout);
        let norms = self.packed_norms();
        let in_place = norms.is_some() || self.head_norms().iter().all(Option::is_none);
        if in_place && self.sinks.is_none() {
            let qkv = match norms {
                Some(norms) => qkv_norm(qkv, heads, norms),
                None => qkv,
            };
            let qkv = match self.table(&pass.rotary) {
                Some(table) => qkv_rotary(qkv, heads, table, pass.positions.clone()),
                None => qkv,
            };
            return qkv_attention(qkv, heads, pass.mask(self.window), options);
        }
        let [query, key, value] = heads.split(qkv);
        let query = self.place(query, self.head_norms()[0], pass);
        let key = self.place(key, self.head_norms()[1], pass);
        match self.sinks() {
            Some(sinks) => sink_attention(query, key, value, sinks, pass.mask(self.window), options),
            None => attention(query, key, value, pass.mask(self.window), options),
        }
    }

    /// The parameters of [`place`](Self::place), for the operation that fuses it.
    fn placement(&self, pass: &Pass<B>) -> Placement<B> {
        self.placed_by(&pass.rotary)
    }

    /// The rotary table of this layer, of those of the model.
    fn table<'a>(&self, tables: &'a [RotaryTable<B>]) -> Option<&'a RotaryTable<B>> {
        self.rotary.map(|own| &tables[own])
    }

    /// Norms and rotation of queries and keys, and sinks.
    pub(crate) fn placed_by(&self, tables: &[RotaryTable<B>]) -> Placement<B> {
        let [query_norm, key_norm] = self.head_norms().map(|norm| norm.map(LayerNorm::weights));
        Placement { query_norm, key_norm, rotary: self.table(tables).cloned(), sinks: self.sinks() }
    }

    /// Normalizes and rotates heads `[batch_size, heads, seq_length, head_dim]`, as the config
    /// says.
    fn place(&self, heads: Tensor<B, 4>, head_norm: Option<&LayerNorm<B>>, pass: &Pass<B>) -> Tensor<B, 4> {
        let heads = match head_norm {
            Some(weights) => norm(heads, &weights.weights()),
            None => heads,
        };
        match self.table(&pass.rotary) {
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
