//! State shared by all blocks of a forward pass.

use burn::tensor::{Int, Tensor};

use fireclay_kernels::{AttentionMask, Backend, CachedTokens, Dropout, RandomKey, RotaryTable};

use crate::feed_forward::RoutingRecord;

/// State shared by all blocks of a forward pass.
pub(crate) struct Pass<B: Backend> {
    /// Position of each token, `[batch_size, seq_length]`.
    pub(crate) positions: Tensor<B, 2, Int>,
    /// The rotary tables of the layers.
    pub(crate) rotary: Vec<RotaryTable<B>>,
    /// Masks and cache positions by window.
    pub(crate) seen: Vec<Seen<B>>,
    /// Probability and key of every dropout, in training.
    pub(crate) dropout: Option<(f64, RandomKey)>,
    /// Tokens of the batch before the first of these, where others have them.
    pub(crate) tokens_before: usize,
    /// Heads of the attention, each of which has a row of weights for a token.
    pub(crate) n_heads: usize,
    /// What routers record, in training.
    pub(crate) routing: Option<RoutingRecord<B>>,
}

/// The masks of the layers with one window.
pub(crate) struct Seen<B: Backend> {
    pub(crate) window: Option<usize>,
    pub(crate) mask: AttentionMask<B>,
    /// The tokens' positions in the cache, if there is one.
    pub(crate) cached: Option<CachedTokens<B>>,
}

/// The places of dropout in a block.
#[derive(Clone, Copy)]
pub(crate) enum Site {
    Attention = 1,
    AttentionOutput = 2,
    FeedForwardOutput = 3,
}

impl<B: Backend> Pass<B> {
    /// The dropout of a site in layer `layer`, in training.
    pub(crate) fn dropout(&self, layer: usize, site: Site) -> Option<Dropout> {
        let (probability, key) = self.dropout?;
        let before = match site {
            Site::Attention => self.tokens_before * self.n_heads,
            _ => self.tokens_before,
        };
        Some(Dropout { probability, key: key.fold(layer as u64 + 1).fold(site as u64).from_row(before) })
    }

    /// The mask of a layer with this window, without a cache.
    pub(crate) fn mask(&self, window: Option<usize>) -> &AttentionMask<B> {
        &self.of(window).mask
    }

    /// The tokens' positions in the cache, for a layer with this window.
    pub(crate) fn cached(&self, window: Option<usize>) -> Option<&CachedTokens<B>> {
        self.of(window).cached.as_ref()
    }

    fn of(&self, window: Option<usize>) -> &Seen<B> {
        self.seen.iter().find(|seen| seen.window == window).expect("a window of the model's layers")
    }
}
