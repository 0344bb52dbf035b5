//! Cached attention is for inference: in the graph it is the reference, of operations that have gradients.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;

use super::CachedAttentionOps;

impl<B: CachedAttentionOps, C: CheckpointStrategy> CachedAttentionOps for Autodiff<B, C> {}
