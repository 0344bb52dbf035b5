//! Sampling is for inference: in the graph it runs its reference.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;

use super::HeadSampleOps;

impl<B: HeadSampleOps, C: CheckpointStrategy> HeadSampleOps for Autodiff<B, C> {}
