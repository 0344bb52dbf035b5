//! Data on its way to a device.

mod autodiff;
#[cfg(feature = "ndarray")]
mod cpu;
#[cfg(feature = "cubecl")]
mod cubecl;

use burn::tensor::backend::{Backend, ExecutionError};
use burn::tensor::{BasicOps, Tensor, TensorData};

use crate::recorder;

/// Uploading on a backend.
pub trait UploadOps: Backend {
    /// Waits until the device has what was uploaded to it, and lets go of what the host still holds of that.
    ///
    /// # Errors
    /// If the device fails.
    fn finish_uploads(device: &Self::Device) -> Result<(), ExecutionError> {
        Self::sync(device)
    }
}

/// Bytes that are uploaded together.
const PIECE: usize = 32 << 20;

/// The elements of `data` on the device, in one row of its dtype. The device has all of them when this returns, and the
/// host holds no more than `data` and some megabytes until then.
///
/// # Errors
/// If the device fails.
pub fn upload<B: UploadOps, K: BasicOps<B>>(
    data: TensorData,
    device: &B::Device,
) -> Result<Tensor<B, 1, K>, ExecutionError> {
    let (size, dtype) = (data.shape.iter().product::<usize>(), data.dtype);
    recorder::uploaded(data.bytes.len());
    let each = PIECE / dtype.size();
    if size <= each {
        let all = Tensor::from_data(TensorData { shape: [size].into(), ..data }, (device, dtype));
        B::finish_uploads(device)?;
        return Ok(all);
    }
    let mut all = Tensor::<B, 1, K>::empty([size], (device, dtype));
    for (at, bytes) in data.bytes.chunks(each * dtype.size()).enumerate() {
        let (first, count) = (at * each, bytes.len() / dtype.size());
        let piece = TensorData::from_bytes_vec(bytes.to_vec(), [count], dtype);
        all = all.slice_assign(first..first + count, Tensor::from_data(piece, (device, dtype)));
        B::finish_uploads(device)?;
    }
    Ok(all)
}
