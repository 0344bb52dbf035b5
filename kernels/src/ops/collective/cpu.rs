//! Collectives on the CPU, through host memory.

use burn_ndarray::NdArray;

use super::CollectiveOps;

impl CollectiveOps for NdArray {}
