//! The CPU has what it computes.

use burn_ndarray::NdArray;

use super::DownloadOps;

impl DownloadOps for NdArray {}
