//! Layout of the heads of a joint projection, shared by `qkv_rotary` and `qkv_attention`.

use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

/// Layout of queries, keys and values in `[batch_size, seq_length, (n_heads + 2 * n_kv_heads) *
/// head_dim]`: first all query heads, then the key heads, then the value heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedHeads {
    /// Number of query heads.
    pub n_heads: usize,
    /// Number of key heads, and of value heads.
    pub n_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

impl PackedHeads {
    /// Elements per token: `(n_heads + 2 * n_kv_heads) * head_dim`.
    pub fn width(&self) -> usize {
        (self.n_heads + 2 * self.n_kv_heads) * self.head_dim
    }

    /// Panics unless the width of `dims` `[.., width]` matches these heads.
    #[track_caller]
    pub(crate) fn check(&self, op: &str, name: &str, dims: [usize; 3]) {
        let sizes = [self.n_heads, self.n_kv_heads, self.head_dim];
        let there = sizes.iter().all(|size| *size > 0) && self.n_heads.is_multiple_of(self.n_kv_heads);
        assert!(there, "{op}: {self:?}: the key heads divide the query heads, and there are some");
        let width = self.n_kv_heads.checked_mul(2).and_then(|kv| kv.checked_add(self.n_heads));
        let width = width.and_then(|heads| heads.checked_mul(self.head_dim));
        assert!(width == Some(dims[2]), "{op}: {name} {dims:?} does not fit {self:?}");
    }

    /// Queries, keys and values as views, `[batch_size, heads, seq_length, head_dim]` each.
    pub fn split<B: Backend>(&self, qkv: Tensor<B, 3>) -> [Tensor<B, 4>; 3] {
        let [batch_size, seq_length, _] = qkv.dims();
        let heads = |first: usize, count: usize| {
            let columns = qkv.clone().narrow(2, first * self.head_dim, count * self.head_dim);
            columns.reshape([batch_size, seq_length, count, self.head_dim]).swap_dims(1, 2)
        };
        [
            heads(0, self.n_heads),
            heads(self.n_heads, self.n_kv_heads),
            heads(self.n_heads + self.n_kv_heads, self.n_kv_heads),
        ]
    }

    /// The inverse of [`split`](Self::split), as a copy.
    pub fn join<B: Backend>(&self, parts: [Tensor<B, 4>; 3]) -> Tensor<B, 3> {
        let columns = parts.map(|part| {
            let [batch_size, heads, seq_length, head_dim] = part.dims();
            part.swap_dims(1, 2).reshape([batch_size, seq_length, heads * head_dim])
        });
        Tensor::cat(columns.into(), 2)
    }
}
