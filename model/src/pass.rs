//! What all blocks of one forward pass share.

use burn::tensor::{Int, Tensor};

use fireclay_kernels::{AttentionMask, Backend, CachedTokens, Dropout, RandomKey, RotaryTable};

use crate::config::NormPlacement;

/// What all blocks of one forward pass share.
pub(crate) struct Pass<B: Backend> {
    /// Position of each token, `[batch_size, seq_length]`.
    pub(crate) positions: Tensor<B, 2, Int>,
    pub(crate) rotary: Option<RotaryTable<B>>,
    pub(crate) mask: AttentionMask<B>,
    /// Where the tokens stand in the cache, where there is one.
    pub(crate) cached: Option<CachedTokens<B>>,
    pub(crate) norm_placement: NormPlacement,
    pub(crate) activation: fireclay_kernels::Activation,
    /// Probability and key of every dropout, in training.
    pub(crate) dropout: Option<(f64, RandomKey)>,
}

/// The places where a block drops elements.
#[derive(Clone, Copy)]
pub(crate) enum Site {
    Attention = 1,
    AttentionOutput = 2,
    FeedForwardOutput = 3,
}

impl<B: Backend> Pass<B> {
    /// The dropout of a place in layer `layer`, in training.
    pub(crate) fn dropout(&self, layer: usize, site: Site) -> Option<Dropout> {
        let (probability, key) = self.dropout?;
        Some(Dropout { probability, key: key.fold(layer as u64 + 1).fold(site as u64) })
    }
}
