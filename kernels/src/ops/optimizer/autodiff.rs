//! The optimizer is outside of the graph.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;

use super::OptimizerOps;

impl<B: OptimizerOps, C: CheckpointStrategy> OptimizerOps for Autodiff<B, C> {}
