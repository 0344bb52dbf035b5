//! On the CPU, through the memory of the hosts.

use burn_ndarray::NdArray;

use super::CollectiveOps;

impl CollectiveOps for NdArray {}
