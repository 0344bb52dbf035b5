//! Sharing in CubeCL: on CUDA through the device's primary context; WGPU's buffers are private.

use burn::tensor::backend::ExecutionError;
use burn::tensor::ops::FloatTensor;
use burn_cubecl::element::BoolElement;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement};

use super::{ShareOps, SharedMemory};

impl<R, F, I, BT> ShareOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn share(tensor: FloatTensor<Self>) -> Result<Option<SharedMemory>, ExecutionError> {
        #[cfg(feature = "cuda")]
        return super::cuda::share(Box::new(tensor));
        #[cfg(not(feature = "cuda"))]
        {
            let _ = tensor;
            Ok(None)
        }
    }
}
