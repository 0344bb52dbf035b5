//! AdamW on the CPU: one pass over each parameter.

use burn::tensor::Tensor;
use burn_ndarray::NdArray;
use rayon::prelude::*;

use super::{AdamWParameter, GradientNorm, OptimizerOps, OptimizerStep, Stepped};
use crate::checked::Checked;
use crate::cpu::{Values, sum_of, tensor, vectorised};

/// Elements whose squares are summed together.
const PIECE: usize = 1 << 14;

impl OptimizerOps for NdArray {
    fn optimizer_step(operands: Checked<OptimizerStep<'_, Self>>) -> Stepped<Self> {
        optimizer_step(operands.into_inner())
    }

    fn gradient_norm(operands: Checked<GradientNorm<Self>>) -> Tensor<Self, 1> {
        tensor(vec![norm_of(operands.into_inner().gradients.into_iter())], [1])
    }
}

fn norm_of(gradients: impl Iterator<Item = Tensor<NdArray, 1>>) -> f32 {
    let square = |gradient: Tensor<NdArray, 1>| {
        let gradient = Values::rows(gradient);
        let sum = |piece: &[f32]| {
            f64::from(vectorised(
                #[inline(always)]
                || sum_of(piece, piece, |a, b| a * b),
            ))
        };
        let pieces: Vec<f64> = gradient.par_chunks(PIECE).map(sum).collect();
        pieces.iter().sum::<f64>()
    };
    gradients.map(square).sum::<f64>().sqrt() as f32
}

fn optimizer_step(OptimizerStep { parameters, adamw, norm }: OptimizerStep<'_, NdArray>) -> Stepped<NdArray> {
    let norm = match norm {
        Some(norm) => norm.into_scalar(),
        None => norm_of(parameters.iter().map(|parameter| parameter.gradient.clone())),
    };
    // The same 1e-6 as in PyTorch's clip_grad_norm_. NaN must propagate to the parameters, not
    // vanish in a minimum.
    let clip = adamw.max_grad_norm.map_or(1.0, |max| {
        let factor = max as f32 / (norm + 1e-6);
        if factor > 1.0 { 1.0 } else { factor }
    });
    let step = adamw.step as i32;
    let rate = (adamw.learning_rate / (1.0 - adamw.beta_1.powi(step))) as f32;
    let second_bias = (1.0 / (1.0 - adamw.beta_2.powi(step))) as f32;
    let (beta_1, beta_2, epsilon) = (adamw.beta_1 as f32, adamw.beta_2 as f32, adamw.epsilon as f32);

    let update = |parameter: AdamWParameter<NdArray>| {
        let AdamWParameter { value, gradient, first_moment, second_moment, decays, copy } = parameter;
        let kept = if decays { (1.0 - adamw.learning_rate * adamw.weight_decay) as f32 } else { 1.0 };
        let size = value.dims();
        let gradients = Values::rows(gradient.clone());
        let [mut values, mut firsts, mut seconds] =
            [value, first_moment, second_moment].map(|tensor| Values::rows(tensor).into_vec());
        let pieces = values.par_chunks_mut(PIECE).zip(firsts.par_chunks_mut(PIECE));
        let pieces = pieces.zip(seconds.par_chunks_mut(PIECE)).zip(gradients.par_chunks(PIECE));
        pieces.for_each(|(((values, firsts), seconds), gradients)| {
            let moments = firsts.iter_mut().zip(seconds);
            vectorised(
                #[inline(always)]
                || {
                    for ((value, (first, second)), gradient) in values.iter_mut().zip(moments).zip(gradients) {
                        let gradient = gradient * clip;
                        *first = beta_1 * *first + (1.0 - beta_1) * gradient;
                        *second = beta_2 * *second + (1.0 - beta_2) * gradient * gradient;
                        *value = kept * *value - rate * *first / ((*second * second_bias).sqrt() + epsilon);
                    }
                },
            );
        });
        let [value, first_moment, second_moment] =
            [values, firsts, seconds].map(|values| -> Tensor<NdArray, 1> { tensor(values, size) });
        let copy = copy.map(|copy| value.clone().cast(copy.dtype()));
        AdamWParameter { value, gradient, first_moment, second_moment, decays, copy }
    };
    (parameters.into_par_iter().with_max_len(1).map(update).collect(), tensor(vec![norm], [1]))
}
