//! Fused decode steps are for inference: the graph has none.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;

use super::DecodeStepOps;

impl<B: DecodeStepOps, C: CheckpointStrategy> DecodeStepOps for Autodiff<B, C> {}
