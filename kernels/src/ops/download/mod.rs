//! Data on its way from a device.

mod autodiff;
#[cfg(feature = "ndarray")]
mod cpu;
#[cfg(feature = "cubecl")]
mod cubecl;

use burn::tensor::backend::{Backend, ExecutionError};
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Int, Tensor, TensorData, TensorPrimitive};

use crate::mutation;

/// Numbers on their way to the host. One that has begun is waited for when it is dropped, too: the copy would write into memory that is somebody
/// else's.
#[must_use]
pub struct Download(Stage);

enum Stage {
    Later(Box<dyn FnOnce() -> Download + Send>),
    Begun(Box<dyn FnOnce() -> Result<TensorData, ExecutionError> + Send>),
    Over,
}

impl std::fmt::Debug for Download {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Download")
    }
}

impl Download {
    /// One that has begun, and that `wait` waits for.
    pub fn begun(wait: impl FnOnce() -> Result<TensorData, ExecutionError> + Send + 'static) -> Self {
        Self(Stage::Begun(Box::new(wait)))
    }

    /// One that `begin` begins.
    pub fn later(begin: impl FnOnce() -> Self + Send + 'static) -> Self {
        Self(Stage::Later(Box::new(begin)))
    }

    /// Begins, if it has not: where several are waited for, the device does all that was asked of it once for all of them.
    pub fn begin(mut self) -> Self {
        match std::mem::replace(&mut self.0, Stage::Over) {
            Stage::Later(begin) => begin(),
            begun => Self(begun),
        }
    }

    /// The numbers, once they are there.
    ///
    /// # Errors
    /// If the device fails.
    pub fn wait(mut self) -> Result<TensorData, ExecutionError> {
        match std::mem::replace(&mut self.0, Stage::Over) {
            Stage::Later(begin) => begin().wait(),
            Stage::Begun(wait) => wait(),
            Stage::Over => unreachable!("a download is over when it is gone"),
        }
    }
}

impl Drop for Download {
    fn drop(&mut self) {
        if let Stage::Begun(wait) = std::mem::replace(&mut self.0, Stage::Over) {
            // Whoever reads next is told of a device that fails.
            drop(wait());
        }
    }
}

/// Downloading from a backend.
pub trait DownloadOps: Backend {
    /// Whether a download begins at once, so that waiting for it is not waiting for what the device is asked for after it. Elsewhere it
    /// begins when it is waited for.
    fn downloads_at_once() -> bool {
        false
    }

    /// [`download_int`].
    fn download_int(tensor: IntTensor<Self>) -> Download {
        let tensor = Tensor::<Self, 1, Int>::from_primitive(tensor);
        Download::begun(move || tensor.try_into_data())
    }

    /// [`download_float`].
    fn download_float(tensor: FloatTensor<Self>) -> Download {
        let tensor = Tensor::<Self, 1>::from_primitive(TensorPrimitive::Float(tensor));
        Download::begun(move || tensor.try_into_data())
    }
}

/// Brings integers to the host, [at once](DownloadOps::downloads_at_once) where the backend can.
pub fn download_int<B: DownloadOps, const D: usize>(tensor: Tensor<B, D, Int>) -> Download {
    B::download_int(mutation::result("download_int", tensor).into_primitive())
}

/// [`download_int`] for floats.
pub fn download_float<B: DownloadOps, const D: usize>(tensor: Tensor<B, D>) -> Download {
    B::download_float(mutation::result("download_float", tensor).into_primitive().tensor())
}
