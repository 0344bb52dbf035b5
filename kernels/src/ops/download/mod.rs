//! Asynchronous downloads from a device.

mod autodiff;
#[cfg(feature = "ndarray")]
mod cpu;
#[cfg(feature = "cubecl")]
mod cubecl;

use burn::tensor::backend::{Backend, ExecutionError};
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Int, Tensor, TensorData, TensorPrimitive};

use crate::mutation;

/// Data in transfer to the host. Dropping a started download waits for it, too: the copy would
/// otherwise write to freed memory.
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
    /// A started download, and how to wait for it.
    pub fn begun(wait: impl FnOnce() -> Result<TensorData, ExecutionError> + Send + 'static) -> Self {
        Self(Stage::Begun(Box::new(wait)))
    }

    /// A download that `begin` starts.
    pub fn later(begin: impl FnOnce() -> Self + Send + 'static) -> Self {
        Self(Stage::Later(Box::new(begin)))
    }

    /// Starts it, if need be: waiting for several started downloads synchronizes the device once.
    pub fn begin(mut self) -> Self {
        match std::mem::replace(&mut self.0, Stage::Over) {
            Stage::Later(begin) => begin(),
            begun => Self(begun),
        }
    }

    /// Waits for the data.
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
            // The next reader reports a failed device.
            drop(wait());
        }
    }
}

/// Downloads of a backend.
pub trait DownloadOps: Backend {
    /// Whether a download starts at once, so that waiting for it does not wait for later work.
    /// Otherwise it starts when waited for.
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

/// Downloads integers, [at once](DownloadOps::downloads_at_once) if the backend can.
pub fn download_int<B: DownloadOps, const D: usize>(tensor: Tensor<B, D, Int>) -> Download {
    B::download_int(mutation::result("download_int", tensor).into_primitive())
}

/// [`download_int`] for floats.
pub fn download_float<B: DownloadOps, const D: usize>(tensor: Tensor<B, D>) -> Download {
    B::download_float(mutation::result("download_float", tensor).into_primitive().tensor())
}
