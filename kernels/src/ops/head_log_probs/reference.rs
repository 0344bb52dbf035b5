//! Log-probabilities of tokens from basic operations, a chunk of rows at a time.

use std::ops::Range;

use burn::tensor::{DType, Int, Tensor};

use super::{HeadLogProbsBackward, HeadLogProbsForward, HeadLogProbsGradients};
use crate::ops::weight::WeightOps;

/// Default f32 logits per chunk: 256 MB.
const LOGITS: usize = 1 << 26;

/// The operands with the weight as floats, chunk by chunk.
struct Chunks<B: WeightOps> {
    hidden: Tensor<B, 2>,
    weight: Tensor<B, 2>,
    targets: Tensor<B, 1, Int>,
    /// 1 where a target counts, f32 `[rows]`.
    counted: Tensor<B, 1>,
    size: usize,
}

impl<B: WeightOps> Chunks<B> {
    fn of(operands: HeadLogProbsForward<B>) -> Self {
        let HeadLogProbsForward { hidden, weight, targets, chunk } = operands;
        let ([rows, _], [vocabulary, _], dtype) = (hidden.dims(), weight.dims(), hidden.dtype());
        let weight = weight.into_float(dtype.into()).cast(dtype);
        let counts = targets.clone().greater_equal_elem(0).bool_and(targets.clone().lower_elem(vocabulary as i64));
        let size = chunk.unwrap_or(LOGITS / vocabulary).clamp(1, rows.max(1));
        let targets = targets.clamp(0, vocabulary as i64 - 1);
        Self { hidden, weight, targets, counted: counts.float().cast(DType::F32), size }
    }

    fn ranges(&self) -> impl Iterator<Item = Range<usize>> + use<B> {
        let ([rows, _], size) = (self.hidden.dims(), self.size);
        (0..rows).step_by(size).map(move |start| start..rows.min(start + size))
    }

    /// The hidden states of some rows, their targets `[rows, 1]`, and the logarithms of their probabilities, f32
    /// `[rows, vocabulary]`.
    fn log_softmax(&self, rows: &Range<usize>) -> (Tensor<B, 2>, Tensor<B, 2, Int>, Tensor<B, 2>) {
        let hidden = self.hidden.clone().narrow(0, rows.start, rows.len());
        let targets = self.targets.clone().narrow(0, rows.start, rows.len()).reshape([rows.len(), 1]);
        let logits = hidden.clone().matmul(self.weight.clone().transpose()).cast(DType::F32);
        let shifted = logits.clone() - logits.max_dim(1);
        let log_sum = shifted.clone().exp().sum_dim(1).log();
        (hidden, targets, shifted - log_sum)
    }
}

/// Reference forward of [`head_log_probs`](crate::head_log_probs()).
pub(crate) fn head_log_probs_forward<B: WeightOps>(operands: HeadLogProbsForward<B>) -> Tensor<B, 1> {
    let chunks = Chunks::of(operands);
    let of_rows = chunks.ranges().map(|rows| {
        let (_, targets, log_probs) = chunks.log_softmax(&rows);
        log_probs.gather(1, targets).squeeze_dim::<1>(1)
    });
    Tensor::cat(of_rows.collect(), 0) * chunks.counted
}

/// Reference backward of [`head_log_probs`](crate::head_log_probs()).
pub(crate) fn head_log_probs_backward<B: WeightOps>(operands: HeadLogProbsBackward<B>) -> HeadLogProbsGradients<B> {
    let HeadLogProbsBackward { grad, forward, trained, sum } = operands;
    let chunks = Chunks::of(forward);
    let [vocabulary, _] = chunks.weight.dims();
    let (device, dtype) = (chunks.hidden.device(), chunks.hidden.dtype());
    let grad = grad * chunks.counted.clone();
    let tokens = Tensor::<B, 1, Int>::arange(0..vocabulary as i64, &device).reshape([1, vocabulary]);
    let (mut d_hidden, mut d_weight) = (Vec::new(), sum);
    for rows in chunks.ranges() {
        let (hidden, targets, log_probs) = chunks.log_softmax(&rows);
        let shape = [rows.len(), vocabulary];
        let hit = tokens.clone().expand(shape).equal(targets.expand(shape)).float().cast(DType::F32);
        let grad = grad.clone().narrow(0, rows.start, rows.len()).reshape([rows.len(), 1]);
        let d_logits = ((hit - log_probs.exp()) * grad).cast(dtype);
        d_hidden.push(d_logits.clone().matmul(chunks.weight.clone()));
        if trained {
            let part = d_logits.transpose().matmul(hidden).cast(DType::F32);
            d_weight = Some(match d_weight {
                Some(sum) => sum + part,
                None => part,
            });
        }
    }
    HeadLogProbsGradients { hidden: Tensor::cat(d_hidden, 0), weight: d_weight.filter(|_| trained) }
}
