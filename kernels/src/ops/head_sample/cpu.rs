//! Sampling on the CPU: a thread for each row.

use burn::tensor::{Int, Tensor, TensorData};
use burn_ndarray::NdArray;
use rayon::prelude::*;

use super::{Draw, HeadSampleOps, Penalties, SampledRow, Sampling, draws_key};
use crate::checked::Checked;
use crate::cpu::{Values, exp, integers, max_of, tensor, vectorised};
use crate::random::{RANGE, RowBits};

impl HeadSampleOps for NdArray {
    fn draw(operands: Checked<Draw<'_, Self>>) -> Tensor<Self, 1, Int> {
        draw(operands.into_inner())
    }
}

fn draw(Draw { logits, rows, positions, mut counts }: Draw<'_, NdArray>) -> Tensor<NdArray, 1, Int> {
    let device = logits.device();
    let [batch_size, vocabulary] = logits.dims();
    let mut logits = Values::rows(logits).into_vec();
    let positions = integers(positions);
    let held = counts
        .as_deref()
        .map(|counts| [&counts.prompt, &counts.written, &counts.bias].map(|x| Values::rows(x.clone())));
    let rows_of = logits.par_chunks_mut(vocabulary).zip(&rows.rows).zip(positions);
    let chosen: Vec<i64> = rows_of
        .map(|((logits, SampledRow { sampling, line }), position)| {
            if let (Some(line), Some(held)) = (line, &held) {
                penalise(logits, held.each_ref().map(|x| &x[line * vocabulary..][..vocabulary]), sampling.penalties);
            }
            match logits.iter().any(|logit| logit.is_nan()) {
                true => -1,
                false => chosen_of(logits, sampling, position as u32) as i64,
            }
        })
        .collect();
    drop(held);
    if let Some(counts) = &mut counts {
        counts.written.inplace(|written| {
            let shape = written.dims();
            let mut written = Values::rows(written).into_vec();
            for (SampledRow { line, .. }, token) in rows.rows.iter().zip(&chosen) {
                if let (Some(line), Ok(token)) = (line, usize::try_from(*token)) {
                    written[line * vocabulary + token] += 1.0;
                }
            }
            tensor(written, shape)
        });
    }
    Tensor::from_data(TensorData::new(chosen, [batch_size]), &device)
}

/// Applies biases and the penalties of a sequence's counts to logits.
fn penalise(logits: &mut [f32], [prompt, written, bias]: [&[f32]; 3], penalties: Penalties) {
    let Penalties { repetition, presence, frequency } = penalties;
    for (((logit, prompt), written), bias) in logits.iter_mut().zip(prompt).zip(written).zip(bias) {
        *logit += bias;
        if prompt + written > 0.0 {
            *logit = if *logit < 0.0 { *logit * repetition as f32 } else { *logit / repetition as f32 };
        }
        if *written > 0.0 {
            *logit -= presence as f32 + written * frequency as f32;
        }
    }
}

/// The token sampled for one row.
fn chosen_of(logits: &mut [f32], sampling: &Sampling, position: u32) -> usize {
    if sampling.temperature <= 0.0 {
        return arg_max(logits.iter().copied());
    }
    let temperature = sampling.temperature as f32;
    logits.iter_mut().for_each(|logit| *logit /= temperature);
    let max = max_of(logits);
    let mut cut = f32::NEG_INFINITY;
    if let Some(top_k) = sampling.top_k.filter(|top_k| *top_k < logits.len()) {
        let mut tokens = logits.to_vec();
        cut = *tokens.select_nth_unstable_by(top_k.max(1) - 1, |a, b| b.total_cmp(a)).1;
    }
    if let Some(top_p) = sampling.top_p.filter(|top_p| *top_p < 1.0) {
        let mut kept: Vec<f32> = logits.iter().copied().filter(|logit| *logit >= cut).collect();
        kept.sort_unstable_by(|a, b| b.total_cmp(a));
        let wanted = top_p * kept.iter().map(|logit| f64::from(exp(logit - max))).sum::<f64>();
        let mut sum = 0.0;
        let last = kept.iter().find(|logit| {
            sum += f64::from(exp(**logit - max));
            sum >= wanted
        });
        cut = last.copied().unwrap_or(cut);
    }
    if let Some(min_p) = sampling.min_p.filter(|min_p| *min_p > 0.0) {
        cut = cut.max(max + min_p.ln() as f32);
    }
    let key = draws_key();
    gumbel_max(logits, cut, key.row(key.row_word(sampling.stream) ^ position))
}

/// Tokens per step.
const TOGETHER: usize = 64;

/// The token from `cut` on with the largest sum of its logit and a Gumbel variable, `-ln(-ln(u))`
/// of a uniform `u`.
///
/// A token's sum exceeds the best so far if `-ln(u) < w`, where `w` is e to the power of its logit
/// less the best. Since `-ln(u)` exceeds `1 - u`, only tokens with `1 - u < w` need logarithms, a
/// few dozen of a vocabulary.
fn gumbel_max(logits: &[f32], cut: f32, bits: RowBits) -> usize {
    // With a margin for rounding.
    const MARGIN: f32 = 1.0 + 1e-5;
    let uniform = |bits: u32| (f64::from(bits) + 0.5) / f64::from(RANGE);
    vectorised(
        #[inline(always)]
        || {
            let mut best = (0, f32::NEG_INFINITY);
            for (first, logits) in (0..).step_by(TOGETHER).zip(logits.chunks(TOGETHER)) {
                let mut drawn = [0u32; TOGETHER];
                for (lane, drawn) in drawn.iter_mut().enumerate() {
                    *drawn = bits.bits((first + lane) as u32);
                }
                let mut above = [false; TOGETHER];
                let mut any = false;
                for ((above, logit), drawn) in above.iter_mut().zip(logits).zip(&drawn) {
                    let left = (RANGE - drawn) as f32 / RANGE as f32;
                    *above = left <= exp(logit - best.1) * MARGIN + 1.0 / RANGE as f32;
                    any |= *above;
                }
                if !any {
                    continue;
                }
                for (lane, logit) in logits.iter().enumerate().filter(|(lane, logit)| above[*lane] && **logit >= cut) {
                    let value = logit - (-uniform(drawn[lane]).ln()).ln() as f32;
                    if value > best.1 {
                        best = (first + lane, value);
                    }
                }
            }
            best.0
        },
    )
}

/// The first of the largest.
fn arg_max(values: impl Iterator<Item = f32>) -> usize {
    let first = (0, f32::NEG_INFINITY);
    values.enumerate().fold(first, |best, (at, value)| if value > best.1 { (at, value) } else { best }).0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RandomKey;

    #[test]
    fn the_draw_is_the_largest_of_all_sums() {
        for (seed, size, spread) in [
            (1, 1, 1.0f32),
            (2, 63, 0.0),
            (3, 64, 8.0),
            (4, 1000, 1.0),
            (5, 50_257, 3.0),
            (6, 20_000, 0.0),
            (7, 5000, 40.0),
        ] {
            for draw in 0..20 {
                let key = RandomKey::new(seed).fold(draw);
                let logits: Vec<f32> =
                    (0..size).map(|at| spread * (key.fold(1).uniform(0, at as u32) as f32 - 0.5) * 4.0).collect();
                let cut = if draw % 3 == 0 { spread } else { f32::NEG_INFINITY };
                let sum = |(token, logit): (usize, &f32)| match *logit >= cut {
                    true => logit - (-key.uniform(9, token as u32).ln()).ln() as f32,
                    false => f32::NEG_INFINITY,
                };
                let wanted = arg_max(logits.iter().enumerate().map(sum));
                assert_eq!(gumbel_max(&logits, cut, key.row(9)), wanted, "{size} tokens, {spread}, draw {draw}");
            }
        }
    }
}
