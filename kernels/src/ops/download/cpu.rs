//! On the CPU, data is already on the host.

use burn_ndarray::NdArray;

use super::DownloadOps;

impl DownloadOps for NdArray {}
