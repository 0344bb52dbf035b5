//! Tensors that other libraries read in place.

mod autodiff;
#[cfg(feature = "ndarray")]
mod cpu;
#[cfg(feature = "cubecl")]
mod cubecl;
#[cfg(feature = "cuda")]
mod cuda;

use std::fmt::{Debug, Formatter, Result as Formatted};
use std::sync::Arc;

use burn::tensor::backend::{Backend, ExecutionError};
use burn::tensor::ops::FloatTensor;
use burn::tensor::{DType, Tensor, TensorData};

use crate::mutation;

/// Sharing a backend's tensors.
pub trait ShareOps: Backend {
    /// The memory of `tensor`, if other libraries can read it. While the result exists, no kernel
    /// writes to that memory, and no other tensor is allocated there.
    ///
    /// # Errors
    /// If the device fails.
    fn share(_tensor: FloatTensor<Self>) -> Result<Option<SharedMemory>, ExecutionError> {
        Ok(None)
    }
}

/// Frees shared memory whose readers have finished, and returns how many buffers are still in use:
/// a reader's stream may read after the reader has dropped the memory.
pub fn reclaim_shared() -> usize {
    #[cfg(feature = "cuda")]
    return cuda::reclaim();
    #[cfg(not(feature = "cuda"))]
    0
}

/// A tensor of any backend and rank.
///
/// It holds a reference to the tensor, so that operations do not overwrite it.
#[derive(Clone)]
pub struct DeviceTensor {
    shape: Vec<usize>,
    dtype: DType,
    read: Arc<dyn Fn() -> Result<TensorData, ExecutionError> + Send + Sync>,
    share: Arc<dyn Fn() -> Result<Option<SharedMemory>, ExecutionError> + Send + Sync>,
}

impl Debug for DeviceTensor {
    fn fmt(&self, f: &mut Formatter<'_>) -> Formatted {
        f.debug_struct("DeviceTensor").field("shape", &self.shape).field("dtype", &self.dtype).finish_non_exhaustive()
    }
}

impl DeviceTensor {
    /// Wraps a tensor of a backend.
    pub fn new<B: ShareOps, const D: usize>(tensor: Tensor<B, D>) -> Self {
        let tensor = mutation::result("share", tensor);
        let (shape, dtype, shared) = (tensor.dims().to_vec(), tensor.dtype(), tensor.clone());
        Self {
            shape,
            dtype,
            read: Arc::new(move || tensor.clone().try_into_data()),
            share: Arc::new(move || B::share(shared.clone().into_primitive().tensor())),
        }
    }

    /// Dimensions.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// A copy on the host; waits for the device.
    ///
    /// # Errors
    /// If the device fails.
    pub fn read(&self) -> Result<TensorData, ExecutionError> {
        (self.read)()
    }

    /// Its memory, without a copy; `None` if other libraries cannot read it.
    ///
    /// # Errors
    /// If the device fails.
    pub fn share(&self) -> Result<Option<SharedMemory>, ExecutionError> {
        (self.share)()
    }
}

/// The memory that an address belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The host's.
    Host,
    /// A CUDA device's, by its index.
    Cuda(i32),
}

/// How a reader orders its reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reader {
    /// It synchronizes on its own.
    Unordered,
    /// It reads on a CUDA stream, given as the driver's handle: 1 is the legacy default stream, 2
    /// the per-thread one.
    Stream(usize),
}

/// Memory that another library reads. It keeps the tensor alive and, on a device, delays reuse
/// until the reader's stream has finished the work submitted before this was dropped.
pub struct SharedMemory {
    address: usize,
    shape: Vec<usize>,
    strides: Vec<isize>,
    dtype: DType,
    place: Place,
    held: Box<dyn Held>,
}

/// Keeps memory from being overwritten.
trait Held: Send {
    /// Orders a reader after the tensor's computation.
    fn order(&mut self, reader: Reader) -> Result<(), ExecutionError>;
}

impl Debug for SharedMemory {
    fn fmt(&self, f: &mut Formatter<'_>) -> Formatted {
        f.debug_struct("SharedMemory").field("place", &self.place).field("shape", &self.shape).finish_non_exhaustive()
    }
}

impl SharedMemory {
    /// Address of the first element.
    pub fn address(&self) -> usize {
        self.address
    }

    /// Dimensions.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Strides in elements.
    pub fn strides(&self) -> &[isize] {
        &self.strides
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The memory of the address.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Orders `reader` after the tensor's computation, and the next use of the memory after the
    /// reader. Call it before the first read. On the host it does nothing.
    ///
    /// # Errors
    /// If the driver refuses the stream.
    pub fn order(&mut self, reader: Reader) -> Result<(), ExecutionError> {
        self.held.order(reader)
    }
}
