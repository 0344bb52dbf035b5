//! Downloads are independent of the graph.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::tensor::ops::{FloatTensor, IntTensor};

use super::{Download, DownloadOps};

impl<B: DownloadOps, C: CheckpointStrategy> DownloadOps for Autodiff<B, C> {
    fn downloads_at_once() -> bool {
        B::downloads_at_once()
    }

    fn download_int(tensor: IntTensor<Self>) -> Download {
        B::download_int(tensor)
    }

    fn download_float(tensor: FloatTensor<Self>) -> Download {
        B::download_float(tensor.primitive)
    }
}
