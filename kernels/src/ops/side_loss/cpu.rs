//! Side losses on the CPU.

use burn_ndarray::NdArray;

use super::SideLossOps;

impl SideLossOps for NdArray {}
