//! Feed-forward layers on the CPU, from projections.

use burn_ndarray::NdArray;

use super::FeedForwardOps;

impl FeedForwardOps for NdArray {}
