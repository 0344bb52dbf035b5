//! AdamW (Loshchilov and Hutter, 2019), fused over all parameters.

use burn::tensor::Tensor;
use fireclay_kernels::{AdamW as Numbers, AdamWParameter, Backend, optimizer_step_of};

use super::{Parameter, Settings, Update};

/// Keeps the running means of the gradient and of its square.
pub(super) struct AdamW;

impl<B: Backend> Update<B> for AdamW {
    const NAME: &'static str = "adamw";
    const STATE: &'static [&'static str] = &["first", "second"];

    fn update(
        parameters: Vec<Parameter<B>>,
        settings: &Settings,
        norm: Option<Tensor<B, 1>>,
    ) -> (Vec<Parameter<B>>, Tensor<B, 1>) {
        let Settings { learning_rate, beta_1, beta_2, epsilon, weight_decay, max_grad_norm, step } = *settings;
        let numbers = Numbers { learning_rate, beta_1, beta_2, epsilon, weight_decay, max_grad_norm, step };
        let mut shapes = Vec::with_capacity(parameters.len());
        let operands = parameters.into_iter().map(|parameter| {
            let Parameter { shape, decays, value, gradient, state, copy } = parameter;
            let [first_moment, second_moment] = state.try_into().expect("as many as STATE names");
            shapes.push(shape);
            AdamWParameter { value, gradient, first_moment, second_moment, decays, copy }
        });
        let (updated, norm) = optimizer_step_of(operands.collect(), &numbers, norm);
        let parameters = updated.into_iter().zip(shapes).map(|(parameter, shape)| {
            let AdamWParameter { value, gradient, first_moment, second_moment, decays, copy } = parameter;
            Parameter { shape, decays, value, gradient, state: vec![first_moment, second_moment], copy }
        });
        (parameters.collect(), norm)
    }
}
