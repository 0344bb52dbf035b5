//! Collectives are not differentiable: gradients are exchanged after the backward pass.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;

use super::CollectiveOps;

impl<B: CollectiveOps, C: CheckpointStrategy> CollectiveOps for Autodiff<B, C> {}
