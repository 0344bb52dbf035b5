//! Sampling from basic operations, without sorting: the threshold of top-k and top-p is found by
//! bisection.

use burn::tensor::backend::Backend;
use burn::tensor::{DType, ElementConversion, IndexingUpdateOp, Int, Tensor};

use super::{Draw, HeadSampleOps, Logits, Penalties, Sampling, TokenCounts, draws_key};
use crate::masked::MASKED;
use crate::ops::linear::{LinearForward, linear_rows};
use crate::random::RANGE;
use crate::random::reference::bits_of_rows;

/// Bisection steps until the interval around the threshold is far below the spacing of f32 logits.
const HALVINGS: usize = 40;

/// Reference logits of [`head_sample`](crate::head_sample()), f32.
pub fn logits<B: HeadSampleOps>(Logits { hidden, weight }: Logits<B>) -> Tensor<B, 2> {
    linear_rows(LinearForward::new(hidden, weight, None)).cast(DType::F32)
}

/// Reference draw of [`head_sample`](crate::head_sample()), row by row.
pub fn draw<B: Backend>(Draw { logits, rows, positions, mut counts }: Draw<'_, B>) -> Tensor<B, 1, Int> {
    let chosen = rows.rows.iter().enumerate().map(|(at, row)| {
        let line = row.line.zip(counts.as_deref_mut());
        draw_row(logits.clone().narrow(0, at, 1), row.sampling, positions.clone().narrow(0, at, 1), line)
    });
    Tensor::cat(chosen.collect(), 0)
}

/// The token of a row of logits `[1, vocabulary]`: `[1]`.
fn draw_row<B: Backend>(
    mut logits: Tensor<B, 2>,
    sampling: Sampling,
    position: Tensor<B, 1, Int>,
    line: Option<(usize, &mut TokenCounts<B>)>,
) -> Tensor<B, 1, Int> {
    if let Some((line, counts)) = &line {
        let of = |x: &Tensor<B, 2>| x.clone().narrow(0, *line, 1);
        let counts = [&counts.prompt, &counts.written, &counts.bias].map(of);
        logits = penalised(logits, sampling.penalties, counts);
    }
    let [_, vocabulary] = logits.dims();
    let broken = logits.clone().is_nan().any_dim(1);
    if sampling.temperature > 0.0 {
        logits = logits.div_scalar(sampling.temperature);
        if let Some(top_k) = sampling.top_k.filter(|top_k| *top_k < vocabulary) {
            let ones = Tensor::ones_like(&logits);
            logits = keep(logits, ones, top_k.max(1) as f64);
        }
        if let Some(top_p) = sampling.top_p.filter(|top_p| *top_p < 1.0) {
            let probabilities = burn::tensor::activation::softmax(logits.clone(), 1);
            logits = keep(logits, probabilities, top_p);
        }
        if let Some(min_p) = sampling.min_p.filter(|min_p| *min_p > 0.0) {
            // Ratios of probabilities follow from differences of logits.
            let least = logits.clone().max_dim(1).add_scalar(min_p.ln());
            let below = logits.clone().lower(least.expand([1, vocabulary]));
            logits = logits.mask_fill(below, MASKED);
        }
        let key = draws_key();
        let place = position.bitwise_xor_scalar((key.row_word(sampling.stream) as i32).elem());
        let uniform = bits_of_rows(place, vocabulary, key).float().cast(DType::F32);
        let uniform = uniform.add_scalar(0.5).div_scalar(RANGE);
        logits = logits - uniform.log().neg().log();
    }
    let chosen = logits.argmax(1).clamp(0, vocabulary as i64 - 1);
    if let Some((line, counts)) = line {
        let one = Tensor::<B, 2>::ones([1, 1], (&counts.written.device(), DType::F32));
        let one = one.mask_fill(broken.clone(), 0.0);
        let own = counts.written.clone().narrow(0, line, 1).scatter(1, chosen.clone(), one, IndexingUpdateOp::Add);
        counts.written.inplace(|written| written.slice_assign([line..line + 1, 0..vocabulary], own));
    }
    chosen.mask_fill(broken, -1).squeeze_dim(1)
}

/// Logits after biases and penalties; `counts` are those of the prompt, those of the generated
/// tokens, and the biases.
fn penalised<B: Backend>(
    logits: Tensor<B, 2>,
    penalties: Penalties,
    [prompt, written, bias]: [Tensor<B, 2>; 3],
) -> Tensor<B, 2> {
    let Penalties { repetition, presence, frequency } = penalties;
    let logits = logits + bias;
    let seen = (prompt + written.clone()).greater_elem(0.0);
    let negative = logits.clone().lower_elem(0.0);
    let less = logits.clone().div_scalar(repetition).mask_where(negative, logits.clone().mul_scalar(repetition));
    let logits = logits.mask_where(seen, less);
    let present = written.clone().greater_elem(0.0).float().cast(DType::F32).mul_scalar(presence);
    logits - present - written.mul_scalar(frequency)
}

/// Keeps, in each row, the fewest largest logits (with ties) whose weights sum to at least
/// `wanted`.
fn keep<B: Backend>(logits: Tensor<B, 2>, weights: Tensor<B, 2>, wanted: f64) -> Tensor<B, 2> {
    let shape = logits.dims();
    // Logits excluded by an earlier cut are far below: start above them, or bisection would not
    // reach the rest.
    let included = logits.clone().greater_elem(MASKED / 2.0);
    let mut high = logits.clone().max_dim(1);
    let mut low = logits.clone().mask_where(included.bool_not(), high.clone().expand(shape)).min_dim(1);
    for _ in 0..HALVINGS {
        let middle = (low.clone() + high.clone()).mul_scalar(0.5);
        let below = logits.clone().lower(middle.clone().expand(shape));
        let enough = weights.clone().mask_fill(below, 0.0).sum_dim(1).greater_equal_elem(wanted);
        low = low.mask_where(enough.clone(), middle.clone());
        high = middle.mask_where(enough, high);
    }
    let below = logits.clone().lower(low.expand(shape));
    logits.mask_fill(below, MASKED)
}
