//! On the CPU, data stays where it is.

use burn_ndarray::NdArray;

use super::UploadOps;

impl UploadOps for NdArray {}
