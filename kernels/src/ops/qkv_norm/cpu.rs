//! Norms of packed heads on the CPU, with its norms.

use burn_ndarray::NdArray;

use super::reference::{backward_with, forward_with};
use super::{QkvNormBackward, QkvNormForward, QkvNormGradients, QkvNormOps, QkvNormOutput};
use crate::checked::Checked;
use crate::ops::norm::{norm_backward, norm_forward};

impl QkvNormOps for NdArray {
    fn qkv_norm_forward(operands: Checked<QkvNormForward<Self>>) -> QkvNormOutput<Self> {
        forward_with(operands.into_inner(), |norm| norm_forward(Checked::new(norm)))
    }

    fn qkv_norm_backward(operands: Checked<QkvNormBackward<Self>>) -> QkvNormGradients<Self> {
        backward_with(operands.into_inner(), |norm| norm_backward(Checked::new(norm)))
    }
}
