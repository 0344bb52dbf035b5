//! Keys and values of the tokens a model has read.

use burn::tensor::{FloatDType, Tensor};

use fireclay_kernels::Backend;

use crate::config::TransformerConfig;

/// The keys and values of every layer, allocated once on the device for `capacity` tokens a row.
#[derive(Clone, Debug)]
pub struct Cache<B: Backend> {
    pub(crate) layers: Vec<LayerCache<B>>,
    pub(crate) length: usize,
    capacity: usize,
}

/// The keys and values of one layer, each `[batch_size, n_kv_heads, capacity, head_dim]`.
#[derive(Clone, Debug)]
pub struct LayerCache<B: Backend> {
    keys: Tensor<B, 4>,
    values: Tensor<B, 4>,
    start: usize,
}

impl<B: Backend> Cache<B> {
    pub(crate) fn new(
        config: &TransformerConfig,
        batch_size: usize,
        capacity: usize,
        dtype: FloatDType,
        device: &B::Device,
    ) -> Self {
        let shape = [batch_size, config.n_kv_heads, capacity, config.head_dim];
        let empty = || Tensor::<B, 4>::zeros(shape, device).cast(dtype);
        let layer = |_| LayerCache { keys: empty(), values: empty(), start: 0 };
        Self { layers: (0..config.n_layers).map(layer).collect(), length: 0, capacity }
    }

    /// Tokens read so far.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether nothing has been read.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Tokens that can be held.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Forgets all tokens but the first `length`; those that are there, if they are fewer.
    pub fn truncate(&mut self, length: usize) {
        self.length = self.length.min(length);
        for layer in &mut self.layers {
            layer.start = self.length;
        }
    }

    /// Moves on by the tokens that a forward pass has written.
    pub(crate) fn advance(&mut self, tokens: usize) {
        self.length += tokens;
        for layer in &mut self.layers {
            layer.start = self.length;
        }
    }
}

impl<B: Backend> LayerCache<B> {
    /// Writes `keys` and `values` `[batch_size, n_kv_heads, seq_length, head_dim]` behind what is there, and returns
    /// all of them.
    pub(crate) fn append(&mut self, keys: Tensor<B, 4>, values: Tensor<B, 4>) -> (Tensor<B, 4>, Tensor<B, 4>) {
        let [batch_size, n_kv_heads, seq_length, head_dim] = keys.dims();
        let end = self.start + seq_length;
        let place = [0..batch_size, 0..n_kv_heads, self.start..end, 0..head_dim];
        self.keys.inplace(|all| all.slice_assign(place.clone(), keys));
        self.values.inplace(|all| all.slice_assign(place, values));
        (self.keys.clone().narrow(2, 0, end), self.values.clone().narrow(2, 0, end))
    }
}
