//! Log-probabilities of tokens on the CPU, from basic operations.

use burn_ndarray::NdArray;

use super::HeadLogProbsOps;

impl HeadLogProbsOps for NdArray {}
