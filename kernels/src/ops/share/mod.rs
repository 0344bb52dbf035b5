//! Tensors that other libraries read where they are stored.

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
    /// Where `tensor` is stored, if other libraries can read that memory. No kernel writes there, nor is it given to
    /// another tensor, while what this returns exists.
    ///
    /// # Errors
    /// If the device fails.
    fn share(_tensor: FloatTensor<Self>) -> Result<Option<SharedMemory>, ExecutionError> {
        Ok(None)
    }
}

/// Lets go of shared memory whose readers are done by now, and returns how much of it is still waited for: other libraries
/// may read on after they have dropped it, until their streams are through.
pub fn reclaim_shared() -> usize {
    #[cfg(feature = "cuda")]
    return cuda::reclaim();
    #[cfg(not(feature = "cuda"))]
    0
}

/// A tensor of any backend and rank.
///
/// It holds a reference to the tensor, so that operations do not write into its memory.
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
    /// The same numbers, whatever the backend.
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

    /// Its dimensions.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// What its numbers are.
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

    /// Where it is stored, without a copy; `None` where no other library can read that memory.
    ///
    /// # Errors
    /// If the device fails.
    pub fn share(&self) -> Result<Option<SharedMemory>, ExecutionError> {
        (self.share)()
    }
}

/// Which memory an address is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The host's.
    Host,
    /// A CUDA device's, by its index.
    Cuda(i32),
}

/// When a reader may begin, and what its reads are ordered by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reader {
    /// It orders its reads itself.
    Unordered,
    /// It reads on a CUDA stream, by the driver's handle: 1 is the legacy default stream, 2 that of each thread.
    Stream(usize),
}

/// Memory with numbers that another library reads. The tensor exists for as long as this does, and, on a device, until
/// the reader's stream is through with what it was asked for before this was dropped.
pub struct SharedMemory {
    address: usize,
    shape: Vec<usize>,
    strides: Vec<isize>,
    dtype: DType,
    place: Place,
    held: Box<dyn Held>,
}

/// What keeps memory from being written to.
trait Held: Send {
    /// Has a reader wait until the numbers are there.
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

    /// Elements from one to the next along each dimension.
    pub fn strides(&self) -> &[isize] {
        &self.strides
    }

    /// What the elements are.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where the address is.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Has `reader` wait, on the device, until the numbers are there, and the memory's next use wait for the reader. Call
    /// it before the first read; the host's numbers are there already.
    ///
    /// # Errors
    /// If the driver refuses the stream.
    pub fn order(&mut self, reader: Reader) -> Result<(), ExecutionError> {
        self.held.order(reader)
    }
}
