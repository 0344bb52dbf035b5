//! Log-probabilities of sampled tokens, and of the top alternatives.

use burn::tensor::activation::log_softmax;
use burn::tensor::{IndexingUpdateOp, Int, Tensor, TensorData};
use fireclay_kernels::{Backend, Download, download_float, download_int};
use fireclay_model::Transformer;

use super::{OutputToken, RequestId};

/// For each row the sampled token, then the top tokens in descending order: `[rows, 1 + count]`.
pub(super) struct LogProbabilities<B: Backend> {
    pub(super) tokens: Tensor<B, 2, Int>,
    /// Their log-probabilities, in nats.
    pub(super) values: Tensor<B, 2>,
}

impl<B: Backend> LogProbabilities<B> {
    /// From sampled tokens `[rows]` and logits `[rows, vocabulary]`, with the top `count` tokens.
    pub(super) fn of(logits: Tensor<B, 2>, drawn: Tensor<B, 1, Int>, count: usize) -> Self {
        let [rows, vocabulary] = logits.dims();
        let mut left = log_softmax(logits, 1);
        let drawn = drawn.clamp(0, vocabulary as i64 - 1).reshape([rows, 1]);
        let (mut tokens, mut values) = (vec![drawn.clone()], vec![left.clone().gather(1, drawn)]);
        // One argmax per token: there are few, and a sort would run on the host.
        for _ in 0..count.min(vocabulary) {
            let best = left.clone().argmax(1);
            let value = left.clone().gather(1, best.clone());
            left = left.scatter(1, best.clone(), value.clone().neg().add_scalar(f32::MIN), IndexingUpdateOp::Add);
            tokens.push(best);
            values.push(value);
        }
        Self { tokens: Tensor::cat(tokens, 1), values: Tensor::cat(values, 1) }
    }
}

/// Prompt rows per block of logits.
const PROMPT_ROWS: usize = 256;

/// Log-probabilities of prompt tokens, each from the hidden state before it.
pub(super) struct PromptLogProbabilities {
    pub(super) id: RequestId,
    /// Whether they start the prompt.
    pub(super) begins: bool,
    count: usize,
    parts: Vec<(Download, Download)>,
}

impl PromptLogProbabilities {
    /// For `tokens` and as many hidden states `[tokens, d_model]`, with the top `count` tokens.
    /// Works in blocks, to bound the memory of the logits.
    pub(super) fn of<B: Backend>(
        model: &Transformer<B>,
        (id, count): (RequestId, usize),
        states: Tensor<B, 2>,
        tokens: &[u32],
    ) -> Self {
        let part = |(at, tokens): (usize, &[u32])| {
            let states = states.clone().narrow(0, at * PROMPT_ROWS, tokens.len());
            let tokens: Vec<i32> = tokens.iter().map(|token| *token as i32).collect();
            let shape = [tokens.len()];
            let tokens = Tensor::from_data(TensorData::new(tokens, shape), &states.device());
            let LogProbabilities { tokens, values } = LogProbabilities::of(model.f32_logits(states), tokens, count);
            (download_int(tokens).begin(), download_float(values).begin())
        };
        Self { id, begins: false, count, parts: tokens.chunks(PROMPT_ROWS).enumerate().map(part).collect() }
    }

    /// On the host: each token with its alternatives. `wait` waits for a download.
    pub(super) fn known<E>(
        self,
        mut wait: impl FnMut(Download) -> Result<TensorData, E>,
    ) -> Result<Vec<OutputToken>, E> {
        let mut all = Vec::new();
        for (tokens, values) in self.parts {
            let known = Known::new(wait(tokens)?, wait(values)?);
            all.extend(known.all.chunks_exact(known.width.max(1)).map(|row| OutputToken::of(row, self.count)));
        }
        Ok(all)
    }
}

/// [`LogProbabilities`] on the host.
pub(super) struct Known {
    all: Vec<(u32, f32)>,
    width: usize,
}

impl Known {
    pub(super) fn new(tokens: TensorData, values: TensorData) -> Self {
        let width = tokens.shape.last().copied().unwrap_or(1);
        let tokens = tokens.iter::<i64>().map(|token| token as u32).collect::<Vec<u32>>();
        Self { all: tokens.into_iter().zip(values.iter::<f32>()).collect(), width }
    }

    /// The sampled token of a row, then the top tokens.
    pub(super) fn row(&self, row: usize) -> &[(u32, f32)] {
        self.all.chunks_exact(self.width.max(1)).nth(row).unwrap_or(&[])
    }
}
