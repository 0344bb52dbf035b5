//! Language modelling: each token predicts the next.

use burn::tensor::Tensor;
use fireclay_datasets::TokenBatch;
use fireclay_kernels::{Backend, HeadLossOptions};
use fireclay_model::Transformer;

/// Mean cross entropy of a batch's predictions, `[1]` nats a token.
pub fn loss<B: Backend>(
    model: &Transformer<B>,
    batch: &TokenBatch,
    label_smoothing: f64,
    device: &B::Device,
) -> Tensor<B, 1> {
    let (inputs, targets) = batch.to_device(device);
    let hidden = model.forward(inputs, None);
    model.loss(hidden, targets, HeadLossOptions::new().with_label_smoothing(label_smoothing))
}
