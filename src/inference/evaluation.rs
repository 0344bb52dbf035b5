//! Perplexity and bits per byte of a text.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use burn::tensor::{Int, Tensor, TensorData};
use fireclay_datasets::{TextSource, Tokenizer};
use fireclay_kernels::{Backend, HeadLossOptions, IGNORED_TARGET};
use fireclay_model::Transformer;

use crate::backend::{OnBackend, RunContext};
use crate::device_read::read_scalars;
use crate::failure::Failure;
use crate::inference::language_model::LanguageModel;
use crate::model_folder::ModelSource;
use crate::model_folder::assert_known;
use crate::precision::Precision;

/// Default window length, in tokens.
const CONTEXT: usize = 1024;
/// Approximate tokens per forward pass.
const BATCH_TOKENS: usize = 8192;
/// Batches whose losses are read from the device together.
const READ_EVERY: usize = 16;

/// An evaluation of a model on a text, for any backend.
#[derive(Clone, Debug)]
pub struct EvaluationRun {
    /// Where the model comes from.
    pub model: ModelSource,
    /// A text, or a folder of them.
    pub data: PathBuf,
    /// The field with the documents, for JSON, CSV, TSV or Parquet.
    pub field: String,
    /// Data type of matrices and activations.
    pub precision: Precision,
    /// Window length in tokens; `None` for the model's context, up to 1,024.
    pub context: Option<usize>,
    /// Tokens from one window to the next; `None` for half a window.
    pub stride: Option<usize>,
}

/// The result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evaluation {
    /// Mean cross entropy, in nats per token.
    pub loss: f64,
    /// Predicted tokens: all but the first.
    pub tokens: usize,
    /// Bytes of the text.
    pub bytes: usize,
    /// Total time.
    pub elapsed: Duration,
}

impl Evaluation {
    /// `e^loss`.
    pub fn perplexity(&self) -> f64 {
        self.loss.exp()
    }

    /// Bits per byte of the text, comparable between tokenizers.
    pub fn bits_per_byte(&self) -> f64 {
        self.loss * self.tokens as f64 / std::f64::consts::LN_2 / self.bytes.max(1) as f64
    }
}

/// A row of a batch: tokens `start..start + length`, of which earlier windows already predicted the
/// first `known` targets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Window {
    start: usize,
    length: usize,
    known: usize,
}

/// Windows over `tokens` tokens. Each token but the first is a target once, with at least `context
/// - stride` tokens before it where there are as many.
fn windows(tokens: usize, context: usize, stride: usize) -> Vec<Window> {
    let targets = tokens.saturating_sub(1);
    let mut windows = Vec::new();
    let (mut start, mut done) = (0, 0);
    while done < targets {
        let length = context.min(targets - start);
        windows.push(Window { start, length, known: done - start });
        done = start + length;
        start += stride;
    }
    windows
}

impl OnBackend for EvaluationRun {
    type Output = Evaluation;

    fn run<B: Backend>(self, RunContext { device, .. }: RunContext<B>) -> Result<Evaluation, Failure> {
        let LanguageModel { model, tokenizer } = LanguageModel::<B>::open(&self.model, self.precision, &device)?;
        let sizes = window_sizes(&model, self.context, self.stride)?;
        let text = TextSource::open(&self.data, &self.field)?.text()?;
        let tokens = tokenizer.encode(&text)?;
        if tokens.len() < 2 {
            return Err(too_few(tokens.len()).about(&self.data.display().to_string()));
        }
        assert_known(&tokens, model.config().vocab_size, &tokenizer)?;
        measure(&model, &tokens, text.len(), sizes, &device)
    }
}

/// Evaluates `model` on a text, in windows of `context` tokens (default: the model's context, up to
/// 1,024) that are `stride` tokens apart (default: half a window).
///
/// # Errors
/// If the sizes are invalid for the model, the text has fewer than two tokens or tokens that are not
/// in the vocabulary, or the device fails.
pub fn evaluate<B: Backend>(
    model: &Transformer<B>,
    tokenizer: &Tokenizer,
    text: &str,
    (context, stride): (Option<usize>, Option<usize>),
    device: &B::Device,
) -> Result<Evaluation, Failure> {
    let sizes = window_sizes(model, context, stride)?;
    let tokens = tokenizer.encode(text)?;
    if tokens.len() < 2 {
        return Err(too_few(tokens.len()).about("the text"));
    }
    assert_known(&tokens, model.config().vocab_size, tokenizer)?;
    measure(model, &tokens, text.len(), sizes, device)
}

fn too_few(tokens: usize) -> Failure {
    Failure::new(format!("{tokens} tokens are too few to evaluate"))
}

/// Length and stride of the windows.
fn window_sizes<B: Backend>(
    model: &Transformer<B>,
    context: Option<usize>,
    stride: Option<usize>,
) -> Result<(usize, usize), Failure> {
    let longest = model.config().context_length;
    let context = context.unwrap_or(longest.min(CONTEXT));
    if context == 0 || context > longest {
        return Err(Failure::usage(format!("--context {context} must be 1 to {longest}, the model's own")));
    }
    let stride = stride.unwrap_or(context.div_ceil(2));
    if stride == 0 || stride > context {
        return Err(Failure::usage(format!("--stride {stride} must be 1 to {context}, the window's length")));
    }
    Ok((context, stride))
}

fn measure<B: Backend>(
    model: &Transformer<B>,
    tokens: &[u32],
    bytes: usize,
    (context, stride): (usize, usize),
    device: &B::Device,
) -> Result<Evaluation, Failure> {
    let begun = Instant::now();
    let targets = tokens.len() - 1;
    let windows = windows(tokens.len(), context, stride);
    let mut loss = 0.0;
    let mut waiting = Vec::new();
    let rows = (BATCH_TOKENS / context).max(1);
    for batch in windows.chunks(rows) {
        let length = batch.iter().map(|window| window.length).max().unwrap_or(0);
        let mut ids = vec![0i32; batch.len() * length];
        let mut wanted = vec![IGNORED_TARGET; batch.len() * length];
        let mut counted = 0;
        for (row, window) in batch.iter().enumerate() {
            for at in 0..window.length {
                ids[row * length + at] = tokens[window.start + at] as i32;
                if at >= window.known {
                    wanted[row * length + at] = tokens[window.start + at + 1] as i32;
                    counted += 1;
                }
            }
        }
        let shape = [batch.len(), length];
        let ids = Tensor::<B, 2, Int>::from_data(TensorData::new(ids, shape), device);
        let wanted = Tensor::<B, 2, Int>::from_data(TensorData::new(wanted, shape), device);
        let hidden = model.forward(ids);
        let options = HeadLossOptions::new().with_weight(f64::from(counted) / targets as f64);
        waiting.push(model.loss(hidden, wanted, options));
        if waiting.len() == READ_EVERY {
            loss += read_scalars(std::mem::take(&mut waiting))?.iter().sum::<f64>();
        }
    }
    loss += read_scalars(waiting)?.iter().sum::<f64>();
    if !loss.is_finite() {
        return Err(Failure::new(format!(
            "the loss is {loss}: the model's weights are damaged, or its values overflow in bf16 or f16 (then \
             --precision f32 helps)"
        )));
    }
    Ok(Evaluation { loss, tokens: targets, bytes, elapsed: begun.elapsed() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_but_the_first_is_a_target_once() {
        for (tokens, context, stride) in [(2, 8, 4), (9, 8, 4), (10, 8, 4), (100, 7, 3), (100, 7, 7), (50, 64, 32)] {
            let mut seen = vec![0; tokens];
            let windows = windows(tokens, context, stride);
            for window in &windows {
                assert!(window.length <= context && window.known < window.length);
                for at in window.known..window.length {
                    seen[window.start + at + 1] += 1;
                }
            }
            assert_eq!(seen[0], 0);
            assert!(seen[1..].iter().all(|times| *times == 1), "{tokens}, {context}, {stride}: {seen:?}");
            assert!(windows.iter().skip(1).all(|window| window.known >= context - stride));
        }
    }
}
