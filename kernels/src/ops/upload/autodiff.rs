//! Uploads are independent of the graph.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::tensor::backend::ExecutionError;

use super::UploadOps;

impl<B: UploadOps, C: CheckpointStrategy> UploadOps for Autodiff<B, C> {
    fn finish_uploads(device: &Self::Device) -> Result<(), ExecutionError> {
        B::finish_uploads(device)
    }
}
