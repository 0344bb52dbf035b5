//! Sharing on the CPU: the host's memory.

use burn::tensor::DType;
use burn::tensor::backend::ExecutionError;
use burn::tensor::ops::FloatTensor;
use burn_ndarray::{NdArray, NdArrayTensor};

use super::{Held, Place, Reader, ShareOps, SharedMemory};

impl ShareOps for NdArray {
    fn share(tensor: FloatTensor<Self>) -> Result<Option<SharedMemory>, ExecutionError> {
        let NdArrayTensor::F32(storage) = &tensor else { return Ok(None) };
        let view = storage.view();
        let (address, shape, strides) = (view.as_ptr() as usize, view.shape().to_vec(), view.strides().to_vec());
        let held = Box::new(HeldTensor { _tensor: tensor });
        Ok(Some(SharedMemory { address, shape, strides, dtype: DType::F32, place: Place::Host, held }))
    }
}

/// A second reference: operations write in place only to memory with a single one.
struct HeldTensor {
    _tensor: NdArrayTensor,
}

impl Held for HeldTensor {
    fn order(&mut self, _reader: Reader) -> Result<(), ExecutionError> {
        Ok(())
    }
}
