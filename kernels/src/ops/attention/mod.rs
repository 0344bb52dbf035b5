//! Scaled dot-product attention: causal, windowed or padded, grouped-query, with dropout.

pub(crate) mod autodiff;
#[cfg(feature = "ndarray")]
pub(crate) mod cpu;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) mod cubecl;
pub(crate) mod reference;

use burn::tensor::{Int, Tensor};

use crate::{Backend, Dropout, PackedHeads, recorder};

/// Which keys a query sees.
#[derive(Clone, Debug)]
pub enum AttentionMask<B: Backend> {
    /// All of them.
    None,
    /// Those up to its own, the last query standing at the last key; with a window, only that many, its own included.
    Causal {
        /// Number of keys that a query sees at the most.
        window: Option<usize>,
    },
    /// Those up to its position in a cache that may hold more keys than are filled.
    Positions {
        /// Index of each query's own key, `[batch_size, seq_length]`.
        positions: Tensor<B, 2, Int>,
        /// Number of keys that a query sees at the most.
        window: Option<usize>,
    },
    /// The first `lengths` `[batch_size]` of a row padded on the right.
    Lengths(Tensor<B, 1, Int>),
}

/// The numbers of an attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionOptions {
    /// Factor on the scores, `1 / sqrt(head_dim)` as a rule.
    pub scale: f64,
    /// Dropout on the probabilities.
    pub dropout: Option<Dropout>,
}

impl AttentionOptions {
    /// No dropout and the usual scale.
    pub fn new(head_dim: usize) -> Self {
        Self { scale: 1.0 / (head_dim as f64).sqrt(), dropout: None }
    }

    /// With dropout on the probabilities; row `(batch * n_heads + head) * seq_length + query` of the mask.
    pub fn with_dropout(mut self, dropout: Option<Dropout>) -> Self {
        self.dropout = dropout.filter(|dropout| dropout.probability > 0.0);
        self
    }
}

/// What the forward pass of attention gives.
#[derive(Clone, Debug)]
pub struct AttentionOutput<B: Backend> {
    /// `[batch_size, seq_length, n_heads, head_dim]`, of the query's dtype.
    pub output: Tensor<B, 4>,
    /// Log-sum-exp of each row of scores, `[batch_size, n_heads, seq_length, 1]` f32.
    pub log_sum_exp: Tensor<B, 4>,
}

/// What the backward pass of attention gives, each shaped like what it belongs to.
#[derive(Clone, Debug)]
pub struct AttentionGradients<B: Backend> {
    /// `[batch_size, n_heads, seq_length, head_dim]`.
    pub query: Tensor<B, 4>,
    /// `[batch_size, n_kv_heads, keys, head_dim]`.
    pub key: Tensor<B, 4>,
    /// `[batch_size, n_kv_heads, keys, head_dim]`.
    pub value: Tensor<B, 4>,
}

/// `softmax(scale * query * key^T) * value` (Vaswani et al., 2017), heads side by side, ready for the output
/// projection.
///
/// - `query`: `[batch_size, n_heads, seq_length, head_dim]`;
/// - `key`, `value`: `[batch_size, n_kv_heads, keys, head_dim]`, where `n_kv_heads` divides `n_heads`, and key head
///   `j` serves the query heads `j * n_heads / n_kv_heads ..` (Ainslie et al., 2023);
/// - the result: `[batch_size, seq_length, n_heads * head_dim]` in the dtype of the query.
///
/// Scores, softmax and log-sum-exp are f32. Strided inputs are welcome.
///
/// # Panics
/// If `n_kv_heads` does not divide `n_heads`.
pub fn attention<B: Backend>(
    query: Tensor<B, 4>,
    key: Tensor<B, 4>,
    value: Tensor<B, 4>,
    mask: &AttentionMask<B>,
    options: AttentionOptions,
) -> Tensor<B, 3> {
    let _op = recorder::op("attention", || {
        vec![recorder::operand(&query), recorder::operand(&key), recorder::operand(&value)]
    });
    let [batch_size, n_heads, seq_length, head_dim] = query.dims();
    let n_kv_heads = key.dims()[1];
    assert!(
        n_heads.is_multiple_of(n_kv_heads),
        "attention: {n_kv_heads} key heads do not divide {n_heads} query heads"
    );
    B::reshape(
        <B as Backend>::attention(query, key, value, mask, options),
        [batch_size, seq_length, n_heads * head_dim],
    )
}

/// [`attention`] of queries, keys and values that lie in one tensor, as their joint projection leaves them.
///
/// `qkv` is `[batch_size, seq_length, (n_heads + 2 * n_kv_heads) * head_dim]`; the result is
/// `[batch_size, seq_length, n_heads * head_dim]` in its dtype. The gradient comes back packed, too.
///
/// # Panics
/// If `qkv` is of another width than `heads`, or `n_kv_heads` does not divide `n_heads`.
pub fn qkv_attention<B: Backend>(
    qkv: Tensor<B, 3>,
    heads: PackedHeads,
    mask: &AttentionMask<B>,
    options: AttentionOptions,
) -> Tensor<B, 3> {
    let _op = recorder::op("qkv_attention", || vec![recorder::operand(&qkv)]);
    let [batch_size, seq_length, width] = qkv.dims();
    assert_eq!(width, heads.width(), "qkv_attention: the input's width and that of {heads:?} differ");
    let PackedHeads { n_heads, n_kv_heads, head_dim } = heads;
    assert!(
        n_heads.is_multiple_of(n_kv_heads),
        "qkv_attention: {n_kv_heads} key heads do not divide {n_heads} query heads"
    );
    B::reshape(B::qkv_attention(qkv, heads, mask, options), [batch_size, seq_length, n_heads * head_dim])
}
