//! Cached attention is for inference: in the graph it runs its reference, whose operations have
//! gradients.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;

use super::CachedAttentionOps;

impl<B: CachedAttentionOps, C: CheckpointStrategy> CachedAttentionOps for Autodiff<B, C> {}
