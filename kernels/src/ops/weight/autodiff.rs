//! A parameter's copy in the graph.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::tensor::Tensor;

use super::{Rounded, WeightOps};
use crate::checked::Checked;
use crate::tensor::{float, primitive};

impl<B: WeightOps, C: CheckpointStrategy> WeightOps for Autodiff<B, C> {
    /// The copy replaces the parameter in the graph, so that gradients go to the parameter without
    /// a node in between.
    fn rounded(operands: Checked<Rounded<Self>>) -> Tensor<Self, 2> {
        let Rounded { value, copy } = operands.into_inner();
        let mut tracked = primitive(value);
        tracked.primitive = primitive(copy).primitive;
        float(tracked)
    }
}
