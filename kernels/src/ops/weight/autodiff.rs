//! A parameter's copy in the graph.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::tensor::Tensor;
use burn::tensor::backend::ExecutionError;

use super::{HostWeight, Rounded, WeightOps};
use crate::checked::Checked;
use crate::quant::QuantizedWeight;
use crate::tensor::{float, primitive};

impl<B: WeightOps, C: CheckpointStrategy> WeightOps for Autodiff<B, C> {
    /// Nothing is tracked.
    fn store(weight: Checked<HostWeight<Self>>) -> Result<QuantizedWeight<Self>, ExecutionError> {
        let HostWeight { format, shape, words, scales, device } = weight.into_inner();
        let weight = B::store(Checked::new(HostWeight { format, shape, words, scales, device }))?;
        Ok(weight.tracked())
    }

    /// The copy takes the parameter's place in the graph, so that gradients go to the parameter without a node between.
    fn rounded(operands: Checked<Rounded<Self>>) -> Tensor<Self, 2> {
        let Rounded { value, copy } = operands.into_inner();
        let mut tracked = primitive(value);
        tracked.primitive = primitive(copy).primitive;
        float(tracked)
    }
}
