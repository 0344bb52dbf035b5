//! The CPU has what it is given.

use burn_ndarray::NdArray;

use super::UploadOps;

impl UploadOps for NdArray {}
