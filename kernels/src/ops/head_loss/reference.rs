//! The head's loss from basic operations, a chunk of rows at a time.

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor};

use super::{HeadLossBackward, HeadLossForward, HeadLossGradients, HeadLossOutput, HeadLossWanted};
use crate::ops::weight::WeightOps;

/// Default f32 logits per chunk: 256 MB.
const LOGITS: usize = 1 << 26;

/// Reference forward of [`head_loss`](crate::head_loss()) over `[rows, d_model]`.
pub fn head_loss_forward<B: WeightOps>(operands: HeadLossForward<B>) -> HeadLossOutput<B> {
    let HeadLossForward { hidden, weight, targets, options, wanted } = operands;
    let gradients = wanted != HeadLossWanted::Nothing;
    let device = hidden.device();
    let [rows, _] = hidden.dims();
    let [vocabulary, d_model] = weight.dims();
    let dtype = hidden.dtype();
    let weight = weight.into_float(dtype.into()).cast(dtype);
    let chunk = options.chunk.unwrap_or(LOGITS / vocabulary).clamp(1, rows);
    let smoothing = options.label_smoothing;

    let counts = targets.clone().greater_equal_elem(0).bool_and(targets.clone().lower_elem(vocabulary as i64));
    let counted = counts.float().cast(DType::F32);
    // The weight over the number of targets that count, on the device.
    let share = counted.clone().sum().clamp_min(1.0).recip().mul_scalar(options.weight);
    let tokens = Tensor::<B, 1, Int>::arange(0..vocabulary as i64, &device).reshape([1, vocabulary]);

    let mut loss = Tensor::<B, 1>::zeros([1], (&device, DType::F32));
    let mut d_hidden = Vec::new();
    let mut d_weight = None;
    for start in (0..rows).step_by(chunk) {
        let size = chunk.min(rows - start);
        let hidden = hidden.clone().narrow(0, start, size);
        let logits = hidden.clone().matmul(weight.clone().transpose()).cast(DType::F32);
        let tanh = options.softcap.map(|cap| logits.clone().div_scalar(cap).tanh());
        let logits = match (&tanh, options.softcap) {
            (Some(tanh), Some(cap)) => tanh.clone().mul_scalar(cap),
            _ => logits,
        };
        let target = targets.clone().narrow(0, start, size).clamp(0, vocabulary as i64 - 1).reshape([size, 1]);
        let weighed = counted.clone().narrow(0, start, size).reshape([size, 1]) * share.clone().reshape([1, 1]);

        let max = logits.clone().max_dim(1);
        let exponentials = (logits.clone() - max.clone()).exp();
        let sum = exponentials.clone().sum_dim(1);
        let log_sum_exp = max + sum.clone().log();
        let mut nats = log_sum_exp.clone() - logits.clone().gather(1, target.clone()).mul_scalar(1.0 - smoothing);
        if smoothing > 0.0 {
            nats = nats - logits.mean_dim(1).mul_scalar(smoothing);
        }
        // Along a dimension: a sum over all elements has no fixed order.
        loss = loss + (nats * weighed.clone()).sum_dim(0).squeeze_dim::<1>(0);

        if gradients {
            let shape = [size, vocabulary];
            let hit = tokens.clone().expand(shape).equal(target.expand(shape)).float().cast(DType::F32);
            let mut d_logits = exponentials / sum - hit.mul_scalar(1.0 - smoothing);
            if smoothing > 0.0 {
                d_logits = d_logits.sub_scalar(smoothing / vocabulary as f64);
            }
            let mut d_logits = d_logits * weighed;
            if let Some(tanh) = tanh {
                d_logits = d_logits * tanh.square().neg().add_scalar(1.0);
            }
            let d_logits = d_logits.cast(dtype);
            d_hidden.push(d_logits.clone().matmul(weight.clone()));
            if wanted == HeadLossWanted::Both {
                let part = d_logits.transpose().matmul(hidden).cast(DType::F32);
                d_weight = Some(match d_weight {
                    Some(sum) => sum + part,
                    None => part,
                });
            }
        }
    }
    let gradients = gradients.then(|| {
        let zeros = || Tensor::zeros([vocabulary, d_model], (&device, DType::F32));
        let weight = (wanted == HeadLossWanted::Both).then(|| d_weight.unwrap_or_else(zeros));
        HeadLossGradients { hidden: if d_hidden.is_empty() { hidden } else { Tensor::cat(d_hidden, 0) }, weight }
    });
    HeadLossOutput { loss, gradients }
}

/// Reference backward of [`head_loss`](crate::head_loss()).
pub fn head_loss_backward<B: Backend>(operands: HeadLossBackward<B>) -> HeadLossGradients<B> {
    let HeadLossBackward { grad, gradients: HeadLossGradients { hidden, weight }, sum } = operands;
    let scale = grad.reshape([1, 1]);
    let dtype = hidden.dtype();
    let weight = weight.map(|weight| {
        let weight = weight * scale.clone();
        match sum {
            Some(sum) => sum + weight,
            None => weight,
        }
    });
    HeadLossGradients { hidden: hidden * scale.cast(dtype), weight }
}
