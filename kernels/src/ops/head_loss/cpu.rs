//! The head's loss on the CPU: logits of a few rows at a time, overwritten with their gradient.

use burn::tensor::Tensor;
use burn_ndarray::NdArray;

use super::{HeadLossBackward, HeadLossForward, HeadLossGradients, HeadLossOps, HeadLossOutput, HeadLossWanted};
use crate::checked::Checked;
use crate::cpu::{
    Inputs, Matrix, QuantizedRows, Values, exp, for_rows, integers, max_of, stored_gradient, stored_product, sum_of,
    tensor, wide_product, zeros,
};

/// Default logits per chunk: 4 MB, to stay in the cache.
const LOGITS: usize = 1 << 20;

impl HeadLossOps for NdArray {
    fn head_loss_forward(operands: Checked<HeadLossForward<Self>>) -> HeadLossOutput<Self> {
        head_loss_forward(operands.into_inner())
    }

    /// Gradients are unchanged for an upstream gradient of one.
    fn head_loss_backward(operands: Checked<HeadLossBackward<Self>>) -> HeadLossGradients<Self> {
        let HeadLossBackward { grad, gradients: HeadLossGradients { hidden, weight }, sum } = operands.into_inner();
        let grad = Values::rows(grad)[0];
        let scaled = |gradient: Tensor<NdArray, 2>| {
            if grad == 1.0 {
                return gradient;
            }
            let shape = gradient.dims();
            let mut values = Values::rows(gradient).into_vec();
            for_rows(
                &mut values,
                shape[1],
                #[inline(always)]
                |_, values| values.iter_mut().for_each(|value| *value *= grad),
            );
            tensor(values, shape)
        };
        let weight = weight.map(scaled).map(|weight| match sum {
            Some(sum) => sum + weight,
            None => weight,
        });
        HeadLossGradients { hidden: scaled(hidden), weight }
    }
}

/// Source of the logits.
enum Head {
    /// Floats, `[vocabulary, d_model]`.
    Weight(Values),
    /// Quantized rows.
    Stored(Vec<QuantizedRows>, Inputs),
}

fn head_loss_forward(operands: HeadLossForward<NdArray>) -> HeadLossOutput<NdArray> {
    let HeadLossForward { hidden, weight, targets, options, wanted } = operands;
    let (gradients, both) = (wanted != HeadLossWanted::Nothing, wanted == HeadLossWanted::Both);
    let [rows, d_model] = hidden.dims();
    let [vocabulary, _] = weight.dims();
    let head = match QuantizedRows::parts(weight) {
        Ok(parts) => Head::Stored(parts, if gradients { Inputs::Exact } else { Inputs::Quantized }),
        Err(weight) => Head::Weight(Values::rows(weight)),
    };
    let hidden = Values::rows(hidden);
    // The token of each target that counts.
    let token = |target: i64| usize::try_from(target).ok().filter(|token| *token < vocabulary);
    let targets: Vec<Option<usize>> = integers(targets).into_iter().map(token).collect();
    // Zero if nothing counts: the loss is then divided by infinity.
    let counted = targets.iter().flatten().count().max(1) as f32 / options.weight as f32;
    let chunk = options.chunk.unwrap_or((LOGITS / vocabulary).max(64)).clamp(1, rows);
    let (smoothing, softcap) = (options.label_smoothing as f32, options.softcap.map(|cap| cap as f32));
    let spread = smoothing / vocabulary as f32;

    let mut loss = 0.0f64;
    let mut d_hidden = zeros(if gradients { rows * d_model } else { 0 });
    let mut d_weight = zeros(if both { vocabulary * d_model } else { 0 });
    let mut logits = zeros(chunk * vocabulary);
    // Loss of each row, in nats.
    let nats: Vec<std::sync::atomic::AtomicU32> = (0..chunk).map(|_| Default::default()).collect();
    for start in (0..rows).step_by(chunk) {
        let size = chunk.min(rows - start);
        let logits = &mut logits[..size * vocabulary];
        let states = &hidden[start * d_model..][..size * d_model];
        let hidden = Matrix::of(states, d_model);
        match &head {
            // SAFETY: from `start` on, `hidden` holds at least [size, d_model]; the others
            // [vocabulary, d_model] and [size, vocabulary].
            Head::Weight(weight) => unsafe {
                let head = Matrix::of(weight, d_model).transposed();
                wide_product([size, d_model, vocabulary], Matrix::of_mut(logits, vocabulary), hidden, head, false);
            },
            Head::Stored(parts, inputs) => {
                logits.copy_from_slice(&stored_product(states, size, parts, *inputs, |_, _, _| {}));
            }
        }
        for_rows(
            logits,
            vocabulary,
            #[inline(always)]
            |first, logits| {
                for (row, logits) in (first..).zip(logits.chunks_exact_mut(vocabulary)) {
                    let set = |value: f32| nats[row].store(value.to_bits(), std::sync::atomic::Ordering::Relaxed);
                    let Some(target) = targets[start + row] else {
                        logits.fill(0.0);
                        set(0.0);
                        continue;
                    };
                    if let Some(cap) = softcap {
                        logits.iter_mut().for_each(|x| *x = cap * (*x / cap).tanh());
                    }
                    // The cap's derivative is made of the capped logits, which are overwritten
                    // below.
                    let capped = softcap.filter(|_| gradients).map(|cap| (cap, logits.to_vec()));
                    let max = max_of(logits);
                    let hit = logits[target];
                    let mean = if smoothing > 0.0 { sum_of(logits, logits, |x, _| x) / vocabulary as f32 } else { 0.0 };
                    logits.iter_mut().for_each(|x| *x = exp(*x - max));
                    let sum = sum_of(logits, logits, |x, _| x);
                    set(max + sum.ln() - (1.0 - smoothing) * hit - smoothing * mean);
                    if gradients {
                        let scale = 1.0 / sum;
                        logits.iter_mut().for_each(|x| *x = (*x * scale - spread) / counted);
                        logits[target] -= (1.0 - smoothing) / counted;
                        if let Some((cap, capped)) = capped {
                            let slope = |capped: f32| 1.0 - (capped / cap) * (capped / cap);
                            logits.iter_mut().zip(capped).for_each(|(x, capped)| *x *= slope(capped));
                        }
                    }
                }
            },
        );
        let row_nats = nats[..size].iter().map(|nats| f32::from_bits(nats.load(std::sync::atomic::Ordering::Relaxed)));
        loss += row_nats.map(f64::from).sum::<f64>();
        if gradients && let Head::Stored(parts, _) = &head {
            let gradient = stored_gradient(logits, size, parts);
            d_hidden[start * d_model..][..size * d_model].copy_from_slice(&gradient);
        }
        if gradients && let Head::Weight(weight) = &head {
            let d_logits = Matrix::of(logits, vocabulary);
            let d_hidden = Matrix::of_mut(&mut d_hidden[start * d_model..], d_model);
            let of_weight = both.then(|| Matrix::of_mut(&mut d_weight, d_model).transposed());
            let head = Matrix::of(weight, d_model);
            // SAFETY: as above; `d_hidden` holds [size, d_model] from `start` on, and `d_weight`,
            // if it is wanted, [vocabulary, d_model].
            rayon::join(
                || unsafe { wide_product([size, vocabulary, d_model], d_hidden, d_logits, head, false) },
                || {
                    if let Some(out) = of_weight {
                        unsafe { wide_product([d_model, size, vocabulary], out, hidden.transposed(), d_logits, true) }
                    }
                },
            );
        }
    }
    let gradients = gradients.then(|| HeadLossGradients {
        hidden: tensor(d_hidden, [rows, d_model]),
        weight: both.then(|| tensor(d_weight, [vocabulary, d_model])),
    });
    HeadLossOutput { loss: tensor(vec![(loss / f64::from(counted)) as f32], [1]), gradients }
}
