//! How routers distribute tokens, and the losses that keep them from choosing the same experts.

use std::cell::RefCell;

use burn::tensor::activation::{sigmoid, softmax};
use burn::tensor::{Int, Tensor};

use fireclay_kernels::{Backend, expert_loads, side_loss};

use crate::mixture::{ExpertsConfig, RouterScores};

/// Factors on the losses of each router, which are added to the loss that is trained.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RouterLosses {
    /// On the load-balancing loss (Fedus et al., 2021, "Switch Transformers"): the number of experts
    /// times the sum over them of their share of the choices and their mean probability. It is 1 if
    /// all experts get as many tokens, and up to the number of experts otherwise.
    pub balance: f64,
    /// On the z-loss (Zoph et al., 2022, "ST-MoE"): the mean over tokens of the squared log-sum-exp
    /// of the router's logits, which keeps these small.
    pub z: f64,
}

/// How the routers of a model distributed the tokens of a forward pass. Without gradients.
#[derive(Clone, Debug)]
pub struct Routing<B: Backend> {
    /// The mean load-balancing loss of the routers, before its factor, `[1]`.
    pub balance: Tensor<B, 1>,
    /// Their mean z-loss, before its factor, `[1]`.
    pub z: Tensor<B, 1>,
    /// How many tokens chose each expert of each layer that has any, `[layers, experts]`. Padding
    /// counts.
    pub loads: Tensor<B, 2>,
}

/// What a router says of each token.
pub(super) struct Routed<B: Backend> {
    /// f32 `[tokens, experts]`.
    pub(super) logits: Tensor<B, 2>,
    /// The experts of each token, `[tokens, experts_per_token]`.
    pub(super) chosen: Tensor<B, 2, Int>,
    /// What their outputs are multiplied by, f32 `[tokens, experts_per_token]`.
    pub(super) weights: Tensor<B, 2>,
}

/// What routers record in a forward pass, with the factors on their losses.
pub(crate) struct RoutingRecord<B: Backend> {
    losses: RouterLosses,
    layers: RefCell<Vec<Routing<B>>>,
}

impl<B: Backend> RoutingRecord<B> {
    pub(crate) fn new(losses: RouterLosses) -> Self {
        Self { losses, layers: RefCell::default() }
    }

    /// What was recorded since the last call; `None` if no layer has experts.
    pub(crate) fn take(&self) -> Option<Routing<B>> {
        let layers = self.layers.take();
        let count = layers.len();
        let [balance, z] = [|layer: &Routing<B>| layer.balance.clone(), |layer: &Routing<B>| layer.z.clone()]
            .map(|of| layers.iter().map(of).reduce(|sum, own| sum + own));
        let loads = layers.into_iter().map(|layer| layer.loads).collect();
        Some(Routing {
            balance: balance?.div_scalar(count as f64),
            z: z?.div_scalar(count as f64),
            loads: Tensor::cat(loads, 0),
        })
    }

    /// Records a layer, and adds its losses where `x`, which it reads, passes.
    pub(super) fn note(&self, x: Tensor<B, 2>, routed: &Routed<B>, config: ExpertsConfig) -> Tensor<B, 2> {
        let Routed { logits, chosen, .. } = routed;
        let ([tokens, n_experts], [_, k]) = (logits.dims(), chosen.dims());
        let loads = expert_loads(chosen.clone(), n_experts);
        let probabilities = match config.router {
            RouterScores::Softmax => softmax(logits.clone(), 1),
            RouterScores::Sigmoid => {
                let scores = sigmoid(logits.clone());
                scores.clone() / (scores.sum_dim(1) + 1e-20)
            }
        };
        let shares = loads.clone().div_scalar((tokens * k) as f64);
        let mean = column_sums(probabilities).div_scalar(tokens as f64);
        let balance = (mean * shares).sum().mul_scalar(n_experts as f64);
        let largest = logits.clone().detach().max_dim(1);
        let log_sum = (logits.clone() - largest.clone()).exp().sum_dim(1).log() + largest;
        let z = column_sums(log_sum.powi_scalar(2)).div_scalar(tokens as f64);
        let loss = balance.clone().mul_scalar(self.losses.balance) + z.clone().mul_scalar(self.losses.z);
        self.layers.borrow_mut().push(Routing {
            balance: balance.detach(),
            z: z.detach(),
            loads: loads.reshape([1, n_experts]),
        });
        match self.losses == RouterLosses::default() {
            true => x,
            false => side_loss(x, loss),
        }
    }
}

/// Rows that one thread adds up.
const SPAN: usize = 64;

/// The sums of the columns of `x` `[rows, columns]`, `[columns]`: first over spans of rows, as Burn's
/// reduction over the first dimension adds all rows of a column one after another.
fn column_sums<B: Backend>(x: Tensor<B, 2>) -> Tensor<B, 1> {
    let [rows, columns] = x.dims();
    if rows <= SPAN {
        return x.sum_dim(0).reshape([columns]);
    }
    let spans = rows / SPAN;
    let whole = if rows == spans * SPAN { x.clone() } else { x.clone().narrow(0, 0, spans * SPAN) };
    let sums = whole.reshape([spans, SPAN, columns]).sum_dim(1).reshape([spans, columns]);
    match rows - spans * SPAN {
        0 => column_sums(sums),
        rest => column_sums(sums) + x.narrow(0, spans * SPAN, rest).sum_dim(0).reshape([columns]),
    }
}

#[cfg(test)]
mod tests {
    use burn::backend::NdArray;
    use burn::tensor::{Distribution, Tensor};

    use super::column_sums;

    #[test]
    fn columns_of_any_length_are_summed_whole() {
        let device = Default::default();
        for rows in [1, 63, 64, 65, 4096, 5000] {
            let x = Tensor::<NdArray, 2>::random([rows, 3], Distribution::Uniform(0.0, 1.0), &device);
            let wanted: Vec<f32> = x.clone().sum_dim(0).into_data().to_vec().expect("they are f32");
            let sums: Vec<f32> = column_sums(x).into_data().to_vec().expect("they are f32");
            for (sum, wanted) in sums.iter().zip(&wanted) {
                assert!((sum - wanted).abs() <= 1e-5 * wanted, "{rows} rows: {sums:?}, not {wanted:?}");
            }
        }
    }
}
