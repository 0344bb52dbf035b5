//! Shares the value; the graph does not extend to other libraries.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::tensor::backend::ExecutionError;
use burn::tensor::ops::FloatTensor;

use super::{ShareOps, SharedMemory};

impl<B: ShareOps, C: CheckpointStrategy> ShareOps for Autodiff<B, C> {
    fn share(tensor: FloatTensor<Self>) -> Result<Option<SharedMemory>, ExecutionError> {
        B::share(tensor.primitive)
    }
}
