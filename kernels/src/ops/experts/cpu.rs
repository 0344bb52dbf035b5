//! Mixtures of experts on the CPU: slots are sorted by expert, and each expert multiplies its own
//! rows only.

use std::ops::Range;

use burn::tensor::{Int, Tensor};
use burn_ndarray::NdArray;
use rayon::prelude::*;

use super::reference::bias_gradient;
use super::{
    ChooseExperts, ExpertLoads, ExpertsBackward, ExpertsForward, ExpertsGradients, ExpertsOps, ExpertsOutput, Sizes,
    limited, limited_gradient,
};
use crate::checked::Checked;
use crate::cpu::{
    GroupedMatrix, Inputs, Values, clamp_index, for_rows, grouped_gradient, grouped_outer, grouped_product, integers,
    new_rows, sum_of, tensor,
};
use crate::ops::activation::{ActivateBackward, activate_backward, activate_rows};

impl ExpertsOps for NdArray {
    fn experts_forward(operands: Checked<ExpertsForward<Self>>) -> ExpertsOutput<Self> {
        let operands = operands.into_inner();
        let sizes = operands.sizes();
        let ExpertsForward { x, chosen, weights, layer, keeps } = operands;
        let Sizes { k, d_model, width, d_ff, .. } = sizes;
        let order = Order::of(chosen, sizes);
        // Without a backward pass weights may be read with rounded inputs, as other projections do.
        let inputs = if keeps { Inputs::Exact } else { Inputs::Quantized };
        let [up, down] = [layer.up, layer.down].map(|weight| GroupedMatrix::of(weight, sizes.n_experts));
        let [up_bias, down_bias] = [layer.up_bias, layer.down_bias].map(|bias| bias.map(Values::rows));
        let x = order.gathered(&Values::rows(x), d_model, k);
        let inner = grouped_product(&x, &order.starts, &up, up_bias.as_deref(), inputs);
        let inner: Tensor<Self, 2> = tensor(inner, [sizes.slots(), width]);
        let hidden = activate_rows(limited(inner.clone(), layer.limit), layer.activation);
        let hidden = Values::rows(hidden);
        debug_assert_eq!(hidden.len(), sizes.slots() * d_ff, "a row for each slot");
        let outputs = grouped_product(&hidden, &order.starts, &down, down_bias.as_deref(), inputs);
        let weights = Values::rows(weights);
        let output = order.combined(&outputs, d_model, k, Some(&weights));
        let inner = keeps.then(|| tensor(order.scattered(&Values::rows(inner), width), [sizes.slots(), width]));
        ExpertsOutput { output: tensor(output, [sizes.tokens, d_model]), inner }
    }

    fn experts_backward(operands: Checked<ExpertsBackward<Self>>) -> ExpertsGradients<Self> {
        let operands = operands.into_inner();
        let sizes = operands.sizes();
        let ExpertsBackward { grad, x, chosen, weights, inner, layer, wanted, sums } = operands;
        let Sizes { tokens, k, n_experts, d_model, width, d_ff } = sizes;
        let slots = sizes.slots();
        let order = Order::of(chosen, sizes);
        let [up, down] = [layer.up, layer.down].map(|weight| GroupedMatrix::of(weight, n_experts));
        let weights = Values::rows(weights);
        let own_weight = |place: usize| weights[order.slots[place]];
        let inner: Tensor<Self, 2> = tensor(order.gathered(&Values::rows(inner), width, 1), [slots, width]);
        let bounded = limited(inner.clone(), layer.limit);
        let hidden = Values::rows(activate_rows(bounded.clone(), layer.activation));
        let x = order.gathered(&Values::rows(x), d_model, k);
        let grad = order.gathered(&Values::rows(grad), d_model, k);

        // As if all weights were one: the gradient of a weight is what its expert's output, and so
        // its hidden row and bias, have in common with the gradient of the sum.
        let mut d_hidden = grouped_gradient(&grad, &order.starts, &down);
        let down_shift = layer.down_bias.as_ref().map(|bias| Values::rows(bias.clone()));
        let mut d_weights = vec![0.0; slots];
        for expert in 0..n_experts {
            for place in order.starts[expert]..order.starts[expert + 1] {
                let mut own = sum_of(&d_hidden[place * d_ff..][..d_ff], &hidden[place * d_ff..][..d_ff], |a, b| a * b);
                if let Some(shift) = &down_shift {
                    own +=
                        sum_of(&grad[place * d_model..][..d_model], &shift[expert * d_model..][..d_model], |a, b| {
                            a * b
                        });
                }
                d_weights[order.slots[place]] = own;
            }
        }
        let scale = |rows: &mut [f32], columns: usize| {
            for_rows(
                rows,
                columns,
                #[inline(always)]
                |first, rows| {
                    for (place, row) in (first..).zip(rows.chunks_exact_mut(columns)) {
                        let weight = own_weight(place);
                        row.iter_mut().for_each(|value| *value *= weight);
                    }
                },
            );
        };
        scale(&mut d_hidden, d_ff);
        let operands =
            ActivateBackward { grad: tensor(d_hidden, [slots, d_ff]), x: bounded, activation: layer.activation };
        let d_inner = limited_gradient(activate_backward(Checked::new(operands)), inner, layer.limit);
        let d_inner_values = Values::rows(d_inner.clone());
        let d_x = grouped_gradient(&d_inner_values, &order.starts, &up);
        let d_x = order.combined(&d_x, d_model, k, None);

        let [up_wanted, down_wanted] = wanted;
        let [up_sum, down_sum] = sums.map(|sum| sum.map(|sum| Values::rows(sum).into_vec()));
        let mut grad = grad;
        if down_wanted.weight || down_wanted.bias {
            scale(&mut grad, d_model);
        }
        let outer = |grad: &[f32], rows: usize, x: &[f32], columns: usize, sum: Option<Vec<f32>>| {
            tensor(grouped_outer([grad, x], [rows, columns], &order.starts, sum), [n_experts * rows, columns])
        };
        let d_up = up_wanted.weight.then(|| outer(&d_inner_values, width, &x, d_model, up_sum));
        let d_down = down_wanted.weight.then(|| outer(&grad, d_model, &hidden, d_ff, down_sum));
        let experts = order.experts();
        let up_bias = layer.up_bias.filter(|_| up_wanted.bias);
        let up_bias = up_bias.map(|_| bias_gradient(&d_inner, &experts, n_experts));
        let down_bias = layer.down_bias.filter(|_| down_wanted.bias);
        let down_bias = down_bias.map(|_| bias_gradient(&tensor(grad, [slots, d_model]), &experts, n_experts));
        ExpertsGradients {
            x: tensor(d_x, [tokens, d_model]),
            weights: tensor(d_weights, [tokens, k]),
            up: d_up,
            up_bias,
            down: d_down,
            down_bias,
        }
    }

    fn choose_experts(operands: Checked<ChooseExperts<Self>>) -> Tensor<Self, 2, Int> {
        let ChooseExperts { scores, k } = operands.into_inner();
        let [tokens, n_experts] = scores.dims();
        let scores = Values::rows(scores);
        let mut chosen = vec![0i64; tokens * k];
        chosen.par_chunks_mut(k).with_min_len(64).zip(scores.par_chunks(n_experts)).for_each(|(chosen, scores)| {
            let mut taken = [false; super::MOST_EXPERTS];
            for chosen in chosen {
                let mut best: Option<(usize, f32)> = None;
                for (expert, score) in scores.iter().enumerate().filter(|(expert, _)| !taken[*expert]) {
                    // A NaN is as low as can be.
                    let score = score.max(f32::MIN);
                    if best.is_none_or(|(_, largest)| score > largest) {
                        best = Some((expert, score));
                    }
                }
                let best = best.map_or(n_experts - 1, |(expert, _)| expert);
                taken[best] = true;
                *chosen = best as i64;
            }
        });
        Tensor::from_data(burn::tensor::TensorData::new(chosen, [tokens, k]), &Default::default())
    }

    fn expert_loads(operands: Checked<ExpertLoads<Self>>) -> Tensor<Self, 1> {
        let ExpertLoads { chosen, n_experts } = operands.into_inner();
        let mut loads = vec![0.0; n_experts];
        integers(chosen).into_iter().for_each(|expert| loads[clamp_index(expert, n_experts - 1)] += 1.0);
        tensor(loads, [n_experts])
    }
}

/// The slots sorted by expert, in their own order within an expert.
struct Order {
    /// Slot of each place.
    slots: Vec<usize>,
    /// Place of each slot.
    places: Vec<usize>,
    /// First place of each expert, and the end of the last.
    starts: Vec<usize>,
}

impl Order {
    fn of(chosen: Tensor<NdArray, 2, Int>, sizes: Sizes) -> Self {
        let last = sizes.n_experts - 1;
        let experts: Vec<usize> = integers(chosen).into_iter().map(|expert| clamp_index(expert, last)).collect();
        let mut starts = vec![0; sizes.n_experts + 1];
        experts.iter().for_each(|expert| starts[expert + 1] += 1);
        for expert in 0..sizes.n_experts {
            starts[expert + 1] += starts[expert];
        }
        let mut next = starts.clone();
        let (mut slots, mut places) = (vec![0; experts.len()], vec![0; experts.len()]);
        for (slot, expert) in experts.into_iter().enumerate() {
            (slots[next[expert]], places[slot]) = (slot, next[expert]);
            next[expert] += 1;
        }
        Self { slots, places, starts }
    }

    /// The expert of each place.
    fn experts(&self) -> Tensor<NdArray, 1, Int> {
        let of = |(expert, ends): (usize, &[usize])| vec![expert as i64; ends[1] - ends[0]];
        let experts: Vec<i64> = self.starts.windows(2).enumerate().flat_map(of).collect();
        let size = experts.len();
        Tensor::from_data(burn::tensor::TensorData::new(experts, [size]), &Default::default())
    }

    /// The row of each place's slot, of rows that `k` slots share.
    fn gathered(&self, x: &[f32], columns: usize, k: usize) -> Vec<f32> {
        self.rows(columns, |place| &x[self.slots[place] / k * columns..][..columns])
    }

    /// The row of each slot, of rows by place.
    fn scattered(&self, x: &[f32], columns: usize) -> Vec<f32> {
        self.rows(columns, |slot| &x[self.places[slot] * columns..][..columns])
    }

    fn rows<'a>(&self, columns: usize, row: impl Fn(usize) -> &'a [f32] + Sync) -> Vec<f32> {
        let [out] = new_rows(
            self.slots.len(),
            [columns],
            #[inline(always)]
            |first, [out]| {
                out.chunks_exact_mut(columns).zip(first..).for_each(|(out, at)| out.copy_from_slice(row(at)));
            },
        );
        out
    }

    /// The sum of each token's `k` rows, of rows by place, each times its weight if there are any.
    fn combined(&self, x: &[f32], columns: usize, k: usize, weights: Option<&[f32]>) -> Vec<f32> {
        let of = |slots: Range<usize>, out: &mut [f32]| {
            for slot in slots {
                let weight = weights.map_or(1.0, |weights| weights[slot]);
                let row = &x[self.places[slot] * columns..][..columns];
                out.iter_mut().zip(row).for_each(|(out, value)| *out += weight * value);
            }
        };
        let [out] = new_rows(
            self.slots.len() / k,
            [columns],
            #[inline(always)]
            |first, [out]| {
                out.chunks_exact_mut(columns).zip(first..).for_each(|(out, token)| of(token * k..(token + 1) * k, out));
            },
        );
        out
    }
}
