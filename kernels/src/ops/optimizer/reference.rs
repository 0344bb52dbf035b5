//! AdamW from basic operations.

use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

use super::{AdamWParameter, GradientNorm, OptimizerStep, Stepped};

/// Reference of [`optimizer_step`](crate::optimizer_step()).
pub fn optimizer_step<B: Backend>(OptimizerStep { parameters, adamw, norm }: OptimizerStep<'_, B>) -> Stepped<B> {
    let own = || norm_of(parameters.iter().map(|parameter| parameter.gradient.clone()));
    let Some(norm) = norm.or_else(own) else { return (parameters, Tensor::zeros([1], &B::Device::default())) };
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

/// Reference body of [`gradient_norm`](crate::gradient_norm()).
pub fn gradient_norm<B: Backend>(GradientNorm { gradients }: GradientNorm<B>) -> Tensor<B, 1> {
    norm_of(gradients.into_iter()).expect("at least one gradient")
}

fn norm_of<B: Backend>(gradients: impl Iterator<Item = Tensor<B, 1>>) -> Option<Tensor<B, 1>> {
    let squares = gradients.map(|gradient| gradient.powi_scalar(2).sum());
    squares.reduce(|sum, square| sum + square).map(Tensor::sqrt)
}
