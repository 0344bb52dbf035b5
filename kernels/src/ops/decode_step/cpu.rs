//! On the CPU, fusing a whole step saves nothing.

use burn::backend::NdArray;

use super::DecodeStepOps;

impl DecodeStepOps for NdArray {}
