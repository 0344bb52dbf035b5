//! Feed-forward layers on the CPU: from its projections.

use burn_ndarray::NdArray;

use super::FeedForwardOps;

impl FeedForwardOps for NdArray {}
