//! Sampling on the CPU: a thread for each row.

use burn::tensor::{Int, Tensor, TensorData};
use burn_ndarray::NdArray;
use rayon::prelude::*;

use super::{Draw, HeadSampleOps, Penalties, Sampling};
use crate::checked::Checked;
use crate::cpu::{Values, exp, integers, max_of, tensor};

impl HeadSampleOps for NdArray {
    fn draw(operands: Checked<Draw<'_, Self>>) -> Tensor<Self, 1, Int> {
        draw(operands.into_inner())
    }
}

fn draw(Draw { logits, sampling, rows }: Draw<'_, NdArray>) -> Tensor<NdArray, 1, Int> {
    let device = logits.device();
    let [batch_size, vocabulary] = logits.dims();
    let mut logits = Values::rows(logits).into_vec();
    let streams = integers(rows.streams.clone());
    let counts = rows.counts.as_ref();
    let counts = counts.map(|counts| [&counts.prompt, &counts.written].map(|x| Values::rows(x.clone())));
    let rows_of = logits.par_chunks_mut(vocabulary).zip(&streams).enumerate();
    let chosen: Vec<i64> = rows_of
        .map(|(row, (logits, stream))| {
            if let Some(counts) = &counts {
                let [prompt, written] = counts.each_ref().map(|counts| &counts[row * vocabulary..][..vocabulary]);
                penalise(logits, prompt, written, sampling.penalties);
            }
            match logits.iter().any(|logit| logit.is_nan()) {
                true => -1,
                false => chosen_of(logits, sampling, *stream as u32) as i64,
            }
        })
        .collect();
    drop(counts);
    if let Some(counts) = &mut rows.counts {
        counts.written.inplace(|written| {
            let shape = written.dims();
            let mut written = Values::rows(written).into_vec();
            for (row, token) in chosen.iter().enumerate() {
                if let Ok(token) = usize::try_from(*token) {
                    written[row * vocabulary + token] += 1.0;
                }
            }
            tensor(written, shape)
        });
    }
    Tensor::from_data(TensorData::new(chosen, [batch_size]), &device)
}

fn penalise(logits: &mut [f32], prompt: &[f32], written: &[f32], penalties: Penalties) {
    let Penalties { repetition, presence, frequency } = penalties;
    for ((logit, prompt), written) in logits.iter_mut().zip(prompt).zip(written) {
        if prompt + written > 0.0 {
            *logit = if *logit < 0.0 { *logit * repetition as f32 } else { *logit / repetition as f32 };
        }
        if *written > 0.0 {
            *logit -= presence as f32 + written * frequency as f32;
        }
    }
}

/// The token that one row draws.
fn chosen_of(logits: &mut [f32], sampling: &Sampling, stream: u32) -> usize {
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
    let key = sampling.key;
    let noisy = logits.iter().enumerate().map(|(token, logit)| match *logit >= cut {
        true => logit - (-key.uniform(stream, token as u32).ln()).ln() as f32,
        false => f32::NEG_INFINITY,
    });
    arg_max(noisy)
}

/// The first of the largest.
fn arg_max(values: impl Iterator<Item = f32>) -> usize {
    let first = (0, f32::NEG_INFINITY);
    values.enumerate().fold(first, |best, (at, value)| if value > best.1 { (at, value) } else { best }).0
}
