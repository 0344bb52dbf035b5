//! Attention of new tokens over all tokens so far, whose keys and values lie in a cache on the device.

#[cfg(feature = "ndarray")]
pub(crate) mod cpu;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) mod cubecl;
pub(crate) mod reference;

use burn::tensor::{DType, FloatDType, Int, Tensor};

use crate::{AttentionMask, Backend, Norm, PackedHeads, RotaryTable, recorder};

/// The keys and values of one layer, each `[batch_size, n_kv_heads, capacity, head_dim]`.
///
/// They are written in place, and so never leave.
#[derive(Debug)]
pub struct LayerCache<B: Backend> {
    /// Placed: normalised and rotated where the model does that.
    pub(crate) keys: Tensor<B, 4>,
    pub(crate) values: Tensor<B, 4>,
}

impl<B: Backend> LayerCache<B> {
    /// Room for `capacity` tokens in each of `batch_size` rows.
    pub fn new(batch_size: usize, capacity: usize, heads: PackedHeads, dtype: FloatDType, device: &B::Device) -> Self {
        let shape = [batch_size, heads.n_kv_heads, capacity, heads.head_dim];
        // Zeros, since what was never written is read by the matrix units, and multiplied by nothing; in one row, since
        // some devices leave gaps between the rows of a matrix.
        let size: usize = shape.iter().product();
        let zeros = || Tensor::<B, 1>::zeros([size], (device, DType::from(dtype))).reshape(shape);
        Self { keys: zeros(), values: zeros() }
    }
}

/// What happens to queries and keys before they meet.
#[derive(Clone, Debug)]
pub struct Placement<B: Backend> {
    /// RMS norm of each query head, over `head_dim`.
    pub query_norm: Option<Norm<B>>,
    /// RMS norm of each key head.
    pub key_norm: Option<Norm<B>>,
    /// The rotation by a token's position.
    pub rotary: Option<RotaryTable<B>>,
}

/// Where the new tokens stand.
#[derive(Clone, Debug)]
pub struct CachedTokens<B: Backend> {
    /// Index in its row of each new token, `[batch_size, seq_length]`, one after another in a row.
    pub positions: Tensor<B, 2, Int>,
    /// Tokens that the longest row has, the new ones included.
    pub keys: usize,
    /// Whether all rows are of this length.
    pub aligned: bool,
    /// Number of keys that a query sees at the most, its own included.
    pub window: Option<usize>,
}

impl<B: Backend> CachedTokens<B> {
    /// Which of the first [`keys`](Self::keys) keys a query sees.
    pub(crate) fn mask(&self) -> AttentionMask<B> {
        match self.aligned {
            true => AttentionMask::Causal { window: self.window },
            false => AttentionMask::Positions { positions: self.positions.clone(), window: self.window },
        }
    }
}

/// Causal [`attention`](crate::attention) of the tokens in `qkv` `[batch_size, seq_length, width]`, as their joint
/// projection leaves them, over themselves and those in `cache`: `[batch_size, seq_length, n_heads * head_dim]`.
///
/// Queries and keys are placed, keys and values written into the cache at the tokens' positions, on the device. What
/// stands in the cache behind a token's own position is never read, so that rows may be of different lengths, and
/// padding behind a short prompt's end is written over later.
///
/// # Panics
/// If the sizes do not fit each other, or `at.keys` exceeds the cache.
pub fn cached_attention<B: Backend>(
    qkv: Tensor<B, 3>,
    heads: PackedHeads,
    placement: Placement<B>,
    at: &CachedTokens<B>,
    cache: &mut LayerCache<B>,
) -> Tensor<B, 3> {
    let _op = recorder::op("cached_attention", || vec![recorder::operand(&qkv), recorder::operand(&cache.keys)]);
    let [batch_size, seq_length, width] = qkv.dims();
    let [rows, n_kv_heads, capacity, head_dim] = cache.keys.dims();
    assert_eq!(width, heads.width(), "cached_attention: the input's width and that of {heads:?} differ");
    assert_eq!((rows, n_kv_heads, head_dim), (batch_size, heads.n_kv_heads, heads.head_dim), "cached_attention: cache");
    let normed = [&placement.query_norm, &placement.key_norm].map(Option::is_some);
    assert_eq!(normed[0], normed[1], "cached_attention: norms of queries and keys, or none");
    assert!(seq_length <= at.keys && at.keys <= capacity, "cached_attention: {} keys of {capacity}", at.keys);
    let output = B::cached_attention(qkv, heads, placement, at, cache);
    B::reshape(output, [batch_size, seq_length, heads.n_heads * head_dim])
}
