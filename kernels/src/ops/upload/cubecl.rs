//! Uploads in CubeCL.

use burn::tensor::backend::{Backend, ExecutionError};
use burn_cubecl::element::BoolElement;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement};

use super::UploadOps;

impl<R, F, I, BT> UploadOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn finish_uploads(device: &Self::Device) -> Result<(), ExecutionError> {
        let client = R::client(device);
        // The runtime holds uploaded data until the second flush after it, and only launches flush
        // by themselves.
        for _ in 0..2 {
            client.flush().map_err(|error| ExecutionError::WithContext { reason: error.to_string() })?;
        }
        <Self as Backend>::sync(device)
    }
}
