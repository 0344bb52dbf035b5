//! One rank on the CPU.

use burn_ndarray::NdArray;

use super::CollectiveOps;

impl CollectiveOps for NdArray {}
