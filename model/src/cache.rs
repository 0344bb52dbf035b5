//! Keys and values of the tokens a model has read.

use burn::tensor::{FloatDType, Int, Tensor, TensorData};

use fireclay_kernels::recorder::part;
use fireclay_kernels::{Backend, CachedTokens, LayerCache, PackedHeads, next_positions};

use crate::config::TransformerConfig;

/// The keys and values of every layer, allocated once on the device for `capacity` tokens a row. Rows may be of
/// different lengths.
#[derive(Debug)]
pub struct Cache<B: Backend> {
    pub(crate) layers: Vec<LayerCache<B>>,
    /// Tokens of each row.
    lengths: Vec<usize>,
    /// The same on the device, `[batch_size, 1]`: where each row's next token stands.
    positions: Tensor<B, 2, Int>,
    capacity: usize,
    window: Option<usize>,
}

impl<B: Backend> Cache<B> {
    pub(crate) fn new(
        config: &TransformerConfig,
        batch_size: usize,
        capacity: usize,
        dtype: FloatDType,
        device: &B::Device,
    ) -> Self {
        let heads = PackedHeads { n_heads: config.n_heads, n_kv_heads: config.n_kv_heads, head_dim: config.head_dim };
        let layer = |_| LayerCache::new(batch_size, capacity, heads, dtype, device);
        Self {
            layers: (0..config.n_layers).map(layer).collect(),
            lengths: vec![0; batch_size],
            positions: Tensor::zeros([batch_size, 1], device),
            capacity,
            window: config.sliding_window,
        }
    }

    /// Tokens that the longest row has.
    pub fn len(&self) -> usize {
        self.lengths.iter().copied().max().unwrap_or(0)
    }

    /// Tokens of each row.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// # Panics
    /// If the longest row has no room for `tokens` more.
    pub(crate) fn assert_room(&self, tokens: usize) {
        let end = self.len() + tokens;
        assert!(end <= self.capacity, "{end} tokens exceed the cache's capacity {}", self.capacity);
    }

    /// Whether every row has as many tokens as it can hold.
    pub(crate) fn is_full(&self) -> bool {
        self.lengths.iter().all(|length| *length == self.capacity)
    }

    /// Whether nothing has been read.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tokens that a row can hold.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Forgets all tokens of every row but the first `length`; those that are there, if they are fewer.
    pub fn truncate(&mut self, length: usize) {
        if self.lengths.iter().any(|held| *held > length) {
            self.lengths.iter_mut().for_each(|held| *held = length.min(*held));
            self.send_positions();
        }
    }

    /// Where `seq_length` new tokens of each row stand.
    pub(crate) fn next(&self, seq_length: usize) -> CachedTokens<B> {
        let mut positions = self.positions.clone();
        if seq_length > 1 {
            let shape = [self.lengths.len(), seq_length];
            let ahead = Tensor::<B, 1, Int>::arange(0..seq_length as i64, &positions.device());
            positions = positions.expand(shape) + ahead.unsqueeze::<2>().expand(shape);
        }
        CachedTokens {
            positions,
            keys: self.capacity.min(self.len() + seq_length),
            aligned: self.lengths.iter().all(|length| *length == self.lengths[0]),
            window: self.window,
        }
    }

    /// Moves on by the tokens of each row that a forward pass has written.
    pub(crate) fn advance(&mut self, new: &[usize]) {
        let capacity = self.capacity;
        self.lengths.iter_mut().zip(new).for_each(|(length, new)| *length = capacity.min(*length + new));
        let _in_cache = part("cache");
        if new.iter().all(|new| *new == 1) {
            // A row that is full stays so, while others go on.
            self.positions = next_positions(self.positions.clone(), capacity - 1);
        } else {
            self.send_positions();
        }
    }

    fn send_positions(&mut self) {
        let next = |length: &usize| (*length).min(self.capacity - 1) as i32;
        let lengths: Vec<i32> = self.lengths.iter().map(next).collect();
        let shape = [lengths.len(), 1];
        self.positions = Tensor::from_data(TensorData::new(lengths, shape), &self.positions.device());
    }
}
