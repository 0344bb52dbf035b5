//! Attention of new tokens over all tokens so far, whose keys and values lie in a cache on the device.

mod autodiff;
#[cfg(feature = "ndarray")]
pub(crate) mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod cubecl;
pub(crate) mod reference;

use burn::tensor::backend::Backend;
use burn::tensor::{DType, FloatDType, Int, Tensor};

use super::attention::{AttentionMask, AttentionOps};
use super::norm::{Norm, NormKind, NormOps};
use super::rotary::{RotaryOps, RotaryTable};
use super::weight::assert_float;
use crate::checked::{Checked, Operands, part};
use crate::packed_heads::PackedHeads;
use crate::recorder::{self, Call};
use crate::selection::dispatch;

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
    ///
    /// # Panics
    /// If any of the sizes is zero, or all of them together are beyond `usize`.
    pub fn new(batch_size: usize, capacity: usize, heads: PackedHeads, dtype: FloatDType, device: &B::Device) -> Self {
        assert_float("cached_attention", dtype);
        let shape = [batch_size, heads.n_kv_heads, capacity, heads.head_dim];
        // Zeros, since what was never written is read by the tensor cores, and multiplied by nothing; in one row, since
        // some devices leave gaps between the rows of a matrix.
        let size = shape.iter().try_fold(1usize, |size, count| size.checked_mul(*count)).unwrap_or(0);
        assert!(size > 0, "cached_attention: no room for a cache of {shape:?}");
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
    /// Index in its row of each new token, `[batch_size, seq_length]`, one after another in a row. One outside `0..keys`
    /// counts as the last.
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

/// What [`cached_attention`] computes with.
#[derive(Debug)]
pub struct CachedAttention<'a, B: Backend> {
    /// `[batch_size, seq_length, width]`.
    pub qkv: Tensor<B, 3>,
    /// How its heads lie.
    pub heads: PackedHeads,
    /// What happens to queries and keys.
    pub placement: Placement<B>,
    /// Where the new tokens stand.
    pub at: &'a CachedTokens<B>,
    /// Where keys and values go.
    pub cache: &'a mut LayerCache<B>,
}

impl<B: Backend> Operands for CachedAttention<'_, B> {
    fn check(&self) {
        let op = "cached_attention";
        let qkv = part(op, "qkv", &self.qkv).float();
        let [batch_size, seq_length, _] = self.qkv.dims();
        let PackedHeads { n_kv_heads, head_dim, .. } = self.heads;
        self.heads.check(op, "qkv", self.qkv.dims());
        let [rows, kv_heads, capacity, width] = self.cache.keys.dims();
        let fits = [rows, kv_heads, width] == [batch_size, n_kv_heads, head_dim];
        let keys = part(op, "cache", &self.cache.keys).fits(fits, &qkv).alike(&qkv);
        part(op, "cached values", &self.cache.values).shaped(&self.cache.keys.dims(), &keys).alike(&keys);

        let norms = [&self.placement.query_norm, &self.placement.key_norm].map(Option::as_ref);
        assert!(norms[0].is_some() == norms[1].is_some(), "{op}: norms of queries and keys, or none");
        for norm in norms.into_iter().flatten() {
            norm.check(op, &qkv, head_dim);
            assert!(norm.kind == NormKind::RmsNorm && norm.beta.is_none(), "{op}: norms of heads are RMS norms");
        }
        if let [Some(query), Some(key)] = norms {
            let alike = (query.epsilon, query.gamma.dtype()) == (key.epsilon, key.gamma.dtype());
            assert!(alike, "{op}: norms of queries and keys differ in epsilon or dtype");
        }
        if let Some(table) = &self.placement.rotary {
            table.check(op, &qkv, head_dim);
        }

        let CachedTokens { positions, keys, window, .. } = self.at;
        part(op, "positions", positions).integer().shaped(&[batch_size, seq_length], &qkv);
        assert!(seq_length <= *keys && *keys <= capacity, "{op}: {seq_length} of {keys} keys in a cache of {capacity}");
        assert!(*window != Some(0), "{op}: a window of no keys");
        assert!(
            i32::try_from(capacity).is_ok_and(|capacity| capacity <= 1 << 30),
            "{op}: {capacity} tokens are too many"
        );
    }
}

/// Cached attention on a backend. It has no gradient.
pub trait CachedAttentionOps: AttentionOps + NormOps + RotaryOps {
    /// Body of [`cached_attention`]: `[batch_size, seq_length, n_heads, head_dim]`.
    fn cached_attention(operands: Checked<CachedAttention<'_, Self>>) -> Tensor<Self, 4> {
        reference::cached_attention(operands.into_inner())
    }
}

/// Causal [`attention`](crate::attention()) of the tokens in `qkv` `[batch_size, seq_length, width]`, as their joint
/// projection leaves them, over themselves and those in `cache`: `[batch_size, seq_length, n_heads * head_dim]`.
///
/// Queries and keys are placed, keys and values written into the cache at the tokens' positions, on the device. What
/// stands in the cache behind a token's own position is never read, so that rows may be of different lengths, and
/// padding behind a short prompt's end is written over later.
///
/// # Panics
/// If the sizes do not fit each other, or `at.keys` exceeds the cache.
pub fn cached_attention<B: CachedAttentionOps>(
    qkv: Tensor<B, 3>,
    heads: PackedHeads,
    placement: Placement<B>,
    at: &CachedTokens<B>,
    cache: &mut LayerCache<B>,
) -> Tensor<B, 3> {
    let [batch_size, seq_length, _] = qkv.dims();
    let _op = recorder::op("cached_attention", || {
        let (qkv, keys) = (recorder::operand(&qkv), recorder::operand(&cache.keys));
        let PackedHeads { n_heads, n_kv_heads, head_dim } = heads;
        let seen = at.window.map_or(at.keys, |window| window.min(at.keys));
        // Keys and values that are seen, and the output beside the heads.
        let cached = 2 * batch_size * n_kv_heads * seen * head_dim * keys.dtype.size();
        let output = qkv.bytes() * n_heads as u64 / (n_heads + 2 * n_kv_heads) as u64;
        let flops = 4 * batch_size * n_heads * seq_length * seen * head_dim;
        Call { bytes: qkv.bytes() + output + cached as u64, flops: flops as u64, inputs: vec![qkv, keys] }
    });
    let operands = Checked::new(CachedAttention { qkv, heads, placement, at, cache });
    let output = dispatch!(B: CachedAttentionOps::cached_attention(operands));
    B::reshape(output, [batch_size, seq_length, heads.n_heads * heads.head_dim])
}
