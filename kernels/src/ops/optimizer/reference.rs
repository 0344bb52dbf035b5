//! AdamW from basic operations.

use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

use super::{AdamWParameter, OptimizerStep, Stepped};

/// Reference of [`optimizer_step`](crate::optimizer_step()).
pub fn optimizer_step<B: Backend>(OptimizerStep { parameters, adamw }: OptimizerStep<'_, B>) -> Stepped<B> {
    let squares = parameters.iter().map(|parameter| parameter.gradient.clone().powi_scalar(2).sum());
    let norm = match squares.reduce(|sum, square| sum + square) {
        Some(sum) => sum.sqrt(),
        None => return (parameters, Tensor::zeros([1], &B::Device::default())),
    };
    // The same 1e-6 as in PyTorch's clip_grad_norm_.
    let clip = adamw.max_grad_norm.map(|max| norm.clone().add_scalar(1e-6).recip().mul_scalar(max).clamp_max(1.0));
    let step = adamw.step as i32;
    let first_bias = 1.0 - adamw.beta_1.powi(step);
    let second_bias = 1.0 - adamw.beta_2.powi(step);

    let updated = parameters.into_iter().map(|parameter| {
        let gradient = match &clip {
            Some(clip) => parameter.gradient * clip.clone(),
            None => parameter.gradient,
        };
        let first_moment =
            parameter.first_moment.mul_scalar(adamw.beta_1) + gradient.clone().mul_scalar(1.0 - adamw.beta_1);
        let second_moment = parameter.second_moment.mul_scalar(adamw.beta_2)
            + gradient.clone().powi_scalar(2).mul_scalar(1.0 - adamw.beta_2);
        let decay = if parameter.decays { adamw.learning_rate * adamw.weight_decay } else { 0.0 };
        let deviation = second_moment.clone().div_scalar(second_bias).sqrt().add_scalar(adamw.epsilon);
        let update = (first_moment.clone() / deviation).mul_scalar(adamw.learning_rate / first_bias);
        let value = parameter.value.mul_scalar(1.0 - decay) - update;
        let copy = parameter.copy.map(|copy| value.clone().cast(copy.dtype()));
        AdamWParameter { value, gradient, first_moment, second_moment, decays: parameter.decays, copy }
    });
    (updated.collect(), norm)
}
