//! Downloads in CubeCL. On CUDA, [`download_int`](super::download_int) enqueues the copy on the
//! stream before it returns, ahead of later launches.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use burn::tensor::TensorData;
use burn::tensor::backend::ExecutionError;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn_cubecl::element::BoolElement;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement};
use cubecl::client::ComputeClient;
use cubecl::device::{Device, DeviceId};
use cubecl::server::CopyDescriptor;

use super::{Download, DownloadOps};
use crate::cubecl::contiguous;

impl<R, F, I, BT> DownloadOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn downloads_at_once() -> bool {
        at_once::<R>()
    }

    fn download_int(tensor: IntTensor<Self>) -> Download {
        begin(tensor)
    }

    fn download_float(tensor: FloatTensor<Self>) -> Download {
        begin(tensor)
    }
}

/// CUDA records an event after the copy. For WGPU each read is a submission, and several waited for
/// together are cheaper.
fn at_once<R: CubeRuntime>() -> bool {
    cuda() == Some(TypeId::of::<R>())
}

#[cfg(feature = "cuda")]
fn cuda() -> Option<TypeId> {
    Some(TypeId::of::<burn::cubecl::cuda::CudaRuntime>())
}

#[cfg(not(feature = "cuda"))]
fn cuda() -> Option<TypeId> {
    None
}

fn begin<R: CubeRuntime>(tensor: CubeTensor<R>) -> Download {
    let begin = move || {
        let tensor = contiguous(tensor);
        let (shape, strides, dtype) = (tensor.meta.shape().clone(), tensor.meta.strides().clone(), tensor.dtype);
        let descriptor = CopyDescriptor::new(tensor.handle.clone().binding(), shape.clone(), strides, dtype.size());
        let bytes = lasting_client(&tensor).read_one_tensor_async(descriptor);
        Download::begun(move || {
            let bytes = cubecl::future::block_on(bytes);
            // Until here its memory must not be reused.
            drop(tensor);
            let failed = |error: cubecl::server::ServerError| ExecutionError::WithContext { reason: error.to_string() };
            Ok(TensorData::from_bytes(bytes.map_err(failed)?, shape, dtype))
        })
    };
    if at_once::<R>() { begin() } else { Download::later(begin) }
}

/// The client of a tensor's device, alive for the whole process: pending reads borrow it.
fn lasting_client<R: CubeRuntime>(tensor: &CubeTensor<R>) -> &'static ComputeClient<R> {
    type Kept = HashMap<(TypeId, DeviceId), &'static (dyn Any + Send + Sync)>;
    static KEPT: Mutex<Option<Kept>> = Mutex::new(None);
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    let kept = kept.get_or_insert_default();
    let client = *kept
        .entry((TypeId::of::<R>(), tensor.device.to_id()))
        .or_insert_with(|| Box::leak(Box::new(tensor.client.clone())));
    let Some(client) = client.downcast_ref() else { unreachable!("a runtime's clients are of one type") };
    client
}
