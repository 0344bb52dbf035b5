//! Uploads to a device.

mod autodiff;
#[cfg(feature = "ndarray")]
mod cpu;
#[cfg(feature = "cubecl")]
mod cubecl;

use burn::tensor::backend::{Backend, ExecutionError};
use burn::tensor::{BasicOps, DType, Tensor, TensorData};

use crate::recorder;

/// Uploads of a backend.
pub trait UploadOps: Backend {
    /// Waits for all uploads, and frees their memory on the host.
    ///
    /// # Errors
    /// If the device fails.
    fn finish_uploads(device: &Self::Device) -> Result<(), ExecutionError> {
        Self::sync(device)
    }
}

/// Bytes per upload.
const PIECE: usize = 32 << 20;

/// `size` elements of `dtype` on the device, in one row: `read` fills consecutive pieces of bytes
/// in native order. Returns when the device has all of them; the host holds a piece of a few
/// megabytes at a time.
///
/// # Errors
/// An error of `read`, or if the device fails.
pub fn upload_pieces<B: UploadOps, K: BasicOps<B>, E: From<ExecutionError>>(
    size: usize,
    dtype: DType,
    device: &B::Device,
    mut read: impl FnMut(&mut [u8]) -> Result<(), E>,
) -> Result<Tensor<B, 1, K>, E> {
    let width = dtype.size();
    recorder::uploaded(size * width);
    let mut piece = |count: usize| {
        let mut data = match dtype {
            // Aligned, so that the CPU can use it directly.
            DType::F32 => TensorData::new(vec![0f32; count], [count]),
            _ => TensorData::from_bytes_vec(vec![0; count * width], [count], dtype),
        };
        read(&mut data.bytes)?;
        Ok::<_, E>(Tensor::<B, 1, K>::from_data(data, (device, dtype)))
    };
    let each = PIECE / width;
    if size <= each {
        let all = piece(size)?;
        B::finish_uploads(device)?;
        return Ok(all);
    }
    let mut all = Tensor::<B, 1, K>::empty([size], (device, dtype));
    for first in (0..size).step_by(each) {
        let count = each.min(size - first);
        all = all.slice_assign(first..first + count, piece(count)?);
        B::finish_uploads(device)?;
    }
    Ok(all)
}

/// The elements of `data` on the device, in one row of its dtype. Returns when the device has all
/// of them; the host holds `data` and a few more megabytes.
///
/// # Errors
/// If the device fails.
pub fn upload<B: UploadOps, K: BasicOps<B>>(
    data: TensorData,
    device: &B::Device,
) -> Result<Tensor<B, 1, K>, ExecutionError> {
    let (size, dtype) = (data.shape.iter().product::<usize>(), data.dtype);
    if size <= PIECE / dtype.size() {
        recorder::uploaded(data.bytes.len());
        let all = Tensor::from_data(TensorData { shape: [size].into(), ..data }, (device, dtype));
        B::finish_uploads(device)?;
        return Ok(all);
    }
    let mut rest = &data.bytes[..];
    upload_pieces(size, dtype, device, |piece| {
        let (own, behind) = rest.split_at(piece.len());
        piece.copy_from_slice(own);
        rest = behind;
        Ok(())
    })
}
