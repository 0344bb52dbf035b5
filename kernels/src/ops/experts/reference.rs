//! Mixtures of experts from basic operations: every expert computes every token, and what a token
//! did not choose is left out.

use burn::tensor::backend::Backend;
use burn::tensor::{Bool, DType, Int, Tensor};

use super::{
    ChooseExperts, ExpertLoads, ExpertsBackward, ExpertsForward, ExpertsGradients, ExpertsOps, ExpertsOutput, Sizes,
    limited, limited_gradient,
};
use crate::checked::{Checked, clamp_index};
use crate::ops::activation::{ActivateBackward, activate_backward, activate_rows};
use crate::ops::linear::float_weight;

/// Reference body of [`choose_experts`](crate::choose_experts()): the largest, `k` times.
pub fn choose_experts<B: Backend>(operands: ChooseExperts<B>) -> Tensor<B, 2, Int> {
    let ChooseExperts { scores, k } = operands;
    let [tokens, n_experts] = scores.dims();
    let own = Tensor::<B, 1, Int>::arange(0..n_experts as i64, &scores.device()).reshape([1, n_experts]);
    let own = own.expand([tokens, n_experts]);
    // What was chosen is below all others.
    let mut scores = scores.cast(DType::F32).clamp_min(f32::MIN);
    let chosen = (0..k).map(|_| {
        let largest = scores.clone().max_dim(1).expand([tokens, n_experts]);
        let first = own.clone().mask_fill(scores.clone().lower(largest), n_experts as i64 - 1).min_dim(1);
        let taken = own.clone().equal(first.clone().expand([tokens, n_experts]));
        scores = scores.clone().mask_fill(taken, f32::NEG_INFINITY);
        first
    });
    Tensor::cat(chosen.collect(), 1)
}

/// Reference body of [`expert_loads`](crate::expert_loads()).
pub fn expert_loads<B: Backend>(operands: ExpertLoads<B>) -> Tensor<B, 1> {
    let ExpertLoads { chosen, n_experts } = operands;
    let [tokens, k] = chosen.dims();
    let chosen = clamp_index(chosen, n_experts - 1).reshape([tokens * k, 1]).expand([tokens * k, n_experts]);
    let own = Tensor::<B, 1, Int>::arange(0..n_experts as i64, &chosen.device()).reshape([1, n_experts]);
    chosen.equal(own.expand([tokens * k, n_experts])).float().cast(DType::F32).sum_dim(0).squeeze_dim(0)
}

/// Each row of `x` `[tokens, columns]` once for each of the token's choices: `[tokens * k, columns]`.
fn repeated<B: Backend>(x: Tensor<B, 2>, k: usize) -> Tensor<B, 2> {
    let [tokens, columns] = x.dims();
    x.reshape([tokens, 1, columns]).expand([tokens, k, columns]).reshape([tokens * k, columns])
}

/// The sum of the `k` rows of each token.
fn summed<B: Backend>(x: Tensor<B, 2>, k: usize) -> Tensor<B, 2> {
    let [slots, columns] = x.dims();
    x.reshape([slots / k, k, columns]).sum_dim(1).reshape([slots / k, columns])
}

/// The slots that did not choose `expert`, `[slots, columns]`.
fn others<B: Backend>(chosen: &Tensor<B, 1, Int>, expert: usize, columns: usize) -> Tensor<B, 2, Bool> {
    let [slots] = chosen.dims();
    chosen.clone().not_equal_elem(expert as i64).reshape([slots, 1]).expand([slots, columns])
}

/// The rows `expert` of `n_experts` stacked matrices.
fn of_expert<B: Backend>(weight: &Tensor<B, 2>, expert: usize, n_experts: usize) -> Tensor<B, 2> {
    let rows = weight.dims()[0] / n_experts;
    weight.clone().narrow(0, expert * rows, rows)
}

/// `x * weight^T + bias`, with each row's own expert.
fn projected<B: Backend>(
    x: Tensor<B, 2>,
    chosen: &Tensor<B, 1, Int>,
    weight: &Tensor<B, 2>,
    bias: Option<&Tensor<B, 1>>,
    n_experts: usize,
) -> Tensor<B, 2> {
    let width = weight.dims()[0] / n_experts;
    let products = (0..n_experts).map(|expert| {
        let product = x.clone().matmul(of_expert(weight, expert, n_experts).transpose());
        let product = match bias {
            Some(bias) => {
                product.clone() + bias.clone().narrow(0, expert * width, width).cast(product.dtype()).unsqueeze()
            }
            None => product,
        };
        product.mask_fill(others(chosen, expert, width), 0.0)
    });
    products.reduce(|sum, product| sum + product).expect("an expert at least")
}

/// The experts of all slots.
fn flat<B: Backend>(chosen: Tensor<B, 2, Int>, Sizes { tokens, k, n_experts, .. }: Sizes) -> Tensor<B, 1, Int> {
    clamp_index(chosen, n_experts - 1).reshape([tokens * k])
}

/// Reference forward of [`experts`](crate::experts()).
pub fn experts_forward<B: ExpertsOps>(operands: ExpertsForward<B>) -> ExpertsOutput<B> {
    let sizes = operands.sizes();
    let ExpertsForward { x, chosen, weights, layer, keeps } = operands;
    let Sizes { k, n_experts, .. } = sizes;
    let dtype = x.dtype();
    let [up, down] = [layer.up, layer.down].map(|weight| float_weight(weight, &x).cast(dtype));
    let chosen = flat(chosen, sizes);
    let inner = projected(repeated(x, k), &chosen, &up, layer.up_bias.as_ref(), n_experts);
    let hidden = activate_rows(limited(inner.clone(), layer.limit), layer.activation);
    let outputs = projected(hidden, &chosen, &down, layer.down_bias.as_ref(), n_experts);
    let weights = weights.cast(dtype).reshape([sizes.slots(), 1]);
    ExpertsOutput { output: summed(outputs * weights, k), inner: keeps.then_some(inner) }
}

/// Reference backward of [`experts`](crate::experts()).
pub fn experts_backward<B: ExpertsOps>(operands: ExpertsBackward<B>) -> ExpertsGradients<B> {
    let sizes = operands.sizes();
    let ExpertsBackward { grad, x, chosen, weights, inner, layer, wanted: [up_wanted, down_wanted], sums } = operands;
    let Sizes { k, n_experts, .. } = sizes;
    let (dtype, slots) = (x.dtype(), sizes.slots());
    let [up, down] = [layer.up, layer.down].map(|weight| float_weight(weight, &x).cast(dtype));
    let chosen = flat(chosen, sizes);
    let (x, grad) = (repeated(x, k), repeated(grad, k));
    let bounded = limited(inner.clone(), layer.limit);
    let hidden = activate_rows(bounded.clone(), layer.activation);

    let outputs = projected(hidden.clone(), &chosen, &down, layer.down_bias.as_ref(), n_experts);
    let d_weights = (outputs.cast(DType::F32) * grad.clone().cast(DType::F32)).sum_dim(1);
    let d_weights = d_weights.cast(weights.dtype()).reshape([sizes.tokens, k]);

    let grad = grad * weights.cast(dtype).reshape([slots, 1]);
    let d_hidden = back(grad.clone(), &chosen, &down, n_experts);
    let operands = ActivateBackward { grad: d_hidden, x: bounded, activation: layer.activation };
    let d_inner = limited_gradient(activate_backward(Checked::new(operands)), inner, layer.limit);
    let d_x = summed(back(d_inner.clone(), &chosen, &up, n_experts), k);

    let [up_sum, down_sum] = sums;
    let up_bias = layer.up_bias.filter(|_| up_wanted.bias).map(|_| bias_gradient(&d_inner, &chosen, n_experts));
    let down_bias = layer.down_bias.filter(|_| down_wanted.bias).map(|_| bias_gradient(&grad, &chosen, n_experts));
    ExpertsGradients {
        x: d_x,
        weights: d_weights,
        up: up_wanted.weight.then(|| weight_gradient(&d_inner, &x, &chosen, n_experts, up_sum)),
        up_bias,
        down: down_wanted.weight.then(|| weight_gradient(&grad, &hidden, &chosen, n_experts, down_sum)),
        down_bias,
    }
}

/// `grad * weight`, with each row's own expert.
fn back<B: Backend>(
    grad: Tensor<B, 2>,
    chosen: &Tensor<B, 1, Int>,
    weight: &Tensor<B, 2>,
    n_experts: usize,
) -> Tensor<B, 2> {
    let columns = weight.dims()[1];
    let products = (0..n_experts).map(|expert| {
        grad.clone().matmul(of_expert(weight, expert, n_experts)).mask_fill(others(chosen, expert, columns), 0.0)
    });
    products.reduce(|sum, product| sum + product).expect("an expert at least")
}

/// `grad^T * x` over the rows of each expert, stacked, f32.
fn weight_gradient<B: Backend>(
    grad: &Tensor<B, 2>,
    x: &Tensor<B, 2>,
    chosen: &Tensor<B, 1, Int>,
    n_experts: usize,
    sum: Option<Tensor<B, 2>>,
) -> Tensor<B, 2> {
    let columns = grad.dims()[1];
    let of = |expert: usize| {
        let grad = grad.clone().mask_fill(others(chosen, expert, columns), 0.0);
        grad.transpose().matmul(x.clone()).cast(DType::F32)
    };
    let gradient = Tensor::cat((0..n_experts).map(of).collect(), 0);
    match sum {
        Some(sum) => sum + gradient,
        None => gradient,
    }
}

/// The sums of `grad` over the rows of each expert, concatenated, f32.
pub(super) fn bias_gradient<B: Backend>(
    grad: &Tensor<B, 2>,
    chosen: &Tensor<B, 1, Int>,
    n_experts: usize,
) -> Tensor<B, 1> {
    let columns = grad.dims()[1];
    let of = |expert: usize| {
        let grad = grad.clone().cast(DType::F32).mask_fill(others(chosen, expert, columns), 0.0);
        grad.sum_dim(0).reshape([columns])
    };
    Tensor::cat((0..n_experts).map(of).collect(), 0)
}
