//! Projections with adapters on the CPU, as separate projections.

use burn_ndarray::NdArray;

use super::{LoraBackward, LoraForward, LoraGradients, LoraOps, LoraOutput, projections};
use crate::checked::Checked;

impl LoraOps for NdArray {
    fn lora_forward(operands: Checked<LoraForward<Self>>) -> LoraOutput<Self> {
        let inner = projections::inner(operands.x.clone(), operands.layer.a.clone(), operands.layer.scale);
        projections::forward(operands.into_inner(), inner)
    }

    fn lora_backward(operands: Checked<LoraBackward<Self>>) -> LoraGradients<Self> {
        projections::backward(operands.into_inner())
    }
}
