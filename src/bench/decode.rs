//! Decode and prefill throughput, with random weights.

use std::collections::VecDeque;
use std::time::Instant;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, FloatDType, Tensor};
use fireclay_kernels::{Backend, Download, Format, MultiStep, SampledRow, SampledRows, Sampling, download_int};
use fireclay_model::{PAGE_TOKENS, RowId, Transformer, TransformerConfig};

use super::sizes::decoder;
use super::{BenchOptions, Measurement};
use crate::backend::{OnBackend, RunContext};
use crate::ceilings::Ceilings;
use crate::failure::Failure;
use crate::precision::{CachePrecision, Precision};

/// Tokens before timing starts, and timed tokens, as in the peer.
const BEFORE: usize = 22;
pub(super) const TIMED: usize = 128;
/// Default position of the last timed token.
pub(super) const LAST: usize = BEFORE + TIMED;
/// Steps whose tokens are read together, on devices where a read blocks.
const READ_STEPS: usize = 16;
/// Tokens of the timed prompt.
const PROMPT: usize = 2048;
/// Number and length of prompts in a prefill batch: on a GPU, and on the CPU.
const PROMPTS: [usize; 2] = [32, 512];
const CPU_PROMPTS: [usize; 2] = [8, 64];

/// Decoding with some sizes; `show` receives each case when measured.
pub struct DecodeBench<S> {
    /// The options.
    pub options: BenchOptions,
    /// Receives each measurement.
    pub show: S,
}

impl<S: FnMut(Measurement) -> Result<(), Failure>> OnBackend for DecodeBench<S> {
    type Output = ();

    fn run<B: Backend>(mut self, RunContext { device, .. }: RunContext<B>) -> Result<(), Failure> {
        let cpu = B::is_synchronous();
        let own = if cpu { "llama-15m" } else { "qwen3-0.6b" };
        let sizes = if self.options.sizes.is_empty() { vec![own.to_string()] } else { self.options.sizes.clone() };
        let ceilings =
            Ceilings::measure::<B>(&self.options.device, self.options.peak, self.options.products(), &device)?;
        for name in sizes {
            let Drawn { model, bytes, expert_bytes, dtype } = Drawn::<B>::new(&name, &self.options, &device)?;
            let config = model.config();
            let batches = match self.options.batch {
                Some(batch) => vec![batch],
                None if cpu => vec![1, 8],
                None => vec![1, 8, 32],
            };
            let position = self.options.position.unwrap_or(LAST);
            if position >= config.context_length {
                let context = config.context_length;
                return Err(Failure::usage(format!(
                    "--position {position} is beyond the context of {name}, {context}"
                )));
            }
            let at = self.options.position.map_or(String::new(), |position| format!(" at {position}"));
            for batch_size in batches {
                for (case, sampling) in [("greedy", Sampling::greedy()), ("top-k 50, top-p 0.9", top_k_top_p())] {
                    let rows: Vec<Sampling> = (0..batch_size as u64).map(|row| sampling.with_seed(1, row)).collect();
                    let seconds = decode(&model, &rows, position, self.options.repeats, &device)?;
                    let values = seconds.iter().map(|seconds| batch_size as f64 / seconds).collect();
                    let what = format!("decode {name} {dtype}");
                    let case = match case {
                        "greedy" => format!("B={batch_size}{at}"),
                        _ => format!("B={batch_size}{at} {case}"),
                    };
                    let measured = Measurement::new(what, case, "tokens/s", values);
                    // Each weight is read once per step, of experts only those that the batch is
                    // expected to choose; the copy reads and writes.
                    let unread = expert_bytes as f64 * (1.0 - chosen_share(config, batch_size));
                    let floor = (bytes as f64 - unread) / ceilings.bytes_per_second;
                    let share = floor * measured.value / batch_size as f64;
                    (self.show)(measured.of(share, "a copy's speed, by the weights alone"))?;
                }
            }
            let alone = [1, self.options.length.unwrap_or(PROMPT).min(config.context_length - 1)];
            for [prompts, tokens] in [alone, if cpu { CPU_PROMPTS } else { PROMPTS }] {
                let seconds = prefill(&model, prompts, tokens, self.options.repeats, &device)?;
                let values = seconds.iter().map(|seconds| (prompts * tokens) as f64 / seconds).collect();
                let case = match prompts {
                    1 => format!("{tokens} tokens"),
                    _ => format!("{prompts} prompts of {tokens} tokens"),
                };
                (self.show)(Measurement::new(format!("prefill {name} {dtype}"), case, "tokens/s", values))?;
            }
        }
        Ok(())
    }
}

/// The share of the experts that a batch of tokens is expected to choose, if all are as probable.
fn chosen_share(config: &TransformerConfig, batch_size: usize) -> f64 {
    let share = config.experts_per_token as f64 / config.experts.max(1) as f64;
    1.0 - (1.0 - share).powi(batch_size as i32)
}

/// A named decoder with random weights.
pub(super) struct Drawn<B: Backend> {
    pub(super) model: Transformer<B>,
    /// Bytes of weights read per step.
    bytes: usize,
    /// Those of all experts among them.
    expert_bytes: usize,
    /// The dtype's name.
    pub(super) dtype: String,
}

impl<B: Backend> Drawn<B> {
    pub(super) fn new(name: &str, options: &BenchOptions, device: &B::Device) -> Result<Self, Failure> {
        let (config, dtype) = decoder(name)?;
        let dtype = match options.precision {
            Some(precision) => precision.activations::<B>(device)?,
            None if B::supports_dtype(device, DType::from(dtype)) => dtype,
            None => FloatDType::F32,
        };
        let mut cast = Cast { dtype, bytes: 0 };
        let mut model = config.init_in::<B>(1, dtype, device)?.map(&mut cast).with_activations(dtype);
        let expert_bytes = model.matrix_bytes(|path| path.contains(".experts.")) as usize;
        let model = model.with_f32_products(options.products());
        // Of a separate embedding table, a step reads one row.
        let table = if config.tied_embeddings { 0 } else { config.vocab_size * config.d_model };
        let bytes = cast.bytes - table * model.embedding.val().dtype().size();
        let int8 = options.precision == Some(Precision::Int8);
        let (model, bytes, expert_bytes, dtype) = if int8 {
            // One byte per weight, and four per row for its scale, which is at most a hundredth of
            // that.
            let model = model
                .with_quantized_matrices(Format::Int8)
                .map_err(|error| Failure::new(format!("the device failed: {error:?}")))?;
            let size = DType::from(dtype).size();
            (model, bytes / size, expert_bytes / size, Precision::Int8.name().to_string())
        } else {
            (model, bytes, expert_bytes, format!("{dtype:?}").to_lowercase())
        };
        Ok(match options.cache {
            CachePrecision::Auto => Self { model, bytes, expert_bytes, dtype },
            CachePrecision::Int8 => {
                let dtype = format!("{dtype}, cache int8");
                Self { model: model.with_int8_cache(), bytes, expert_bytes, dtype }
            }
        })
    }
}

fn top_k_top_p() -> Sampling {
    Sampling::greedy().with_temperature(0.8).with_top_k(Some(50)).with_top_p(Some(0.9))
}

/// Converts matrices to a dtype, and counts the bytes read per step.
struct Cast {
    dtype: FloatDType,
    bytes: usize,
}

impl<B: Backend> ModuleMapper<B> for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        if D < 2 {
            return param;
        }
        let (id, value, _) = param.consume();
        let value = value.cast(self.dtype).detach();
        self.bytes += value.shape().num_elements() * value.dtype().size();
        Param::initialized(id, value)
    }
}

/// Waits for the tokens of all steps but the last `left`.
fn read(on_the_way: &mut VecDeque<Download>, left: usize) -> Result<(), Failure> {
    let read = on_the_way.len().saturating_sub(left);
    let begun: Vec<Download> = on_the_way.drain(..read).map(Download::begin).collect();
    for download in begun {
        let tokens = download.wait().map_err(|error| Failure::new(format!("the device failed: {error:?}")))?;
        if tokens.iter::<i64>().any(|token| token < 0) {
            return Err(Failure::new("no token can be drawn: logits are NaN"));
        }
    }
    Ok(())
}

/// Seconds per step with these sampling parameters, several times over [`TIMED`] steps, the last of
/// which is at `position`.
pub(super) fn decode<B: Backend>(
    model: &Transformer<B>,
    rows: &[Sampling],
    position: usize,
    repeats: usize,
    device: &B::Device,
) -> Result<Vec<f64>, Failure> {
    let batch_size = rows.len();
    let sampled: Vec<SampledRow> = rows.iter().map(|sampling| SampledRow::from(*sampling)).collect();
    let sampled = SampledRows::new(&sampled, device);
    let prompt = vec![1; (position + 1).saturating_sub(LAST).max(1)];
    let tokens = prompt.len() + BEFORE + TIMED;
    let mut seconds = Vec::new();
    // The first run compiles kernels.
    for _ in 0..repeats + 1 {
        let mut cache = model.cache(batch_size * tokens.next_multiple_of(PAGE_TOKENS));
        let rows: Vec<RowId> = (0..batch_size).map(|_| cache.add_row()).collect();
        for row in &rows {
            cache.reserve(*row, tokens).map_err(|full| Failure::new(full.to_string()))?;
            // One by one: together, long prompts would need much memory.
            if prompt.len() > 1 {
                model.prefill(&[(*row, &prompt[1..])], &mut cache);
            }
        }
        let prompts: Vec<(RowId, &[u32])> = rows.iter().map(|row| (*row, &prompt[..1])).collect();
        let hidden = model.prefill(&prompts, &mut cache);
        let mut next = model.sample(hidden, &sampled, None, &cache);
        let mut on_the_way = VecDeque::new();
        let mut begun = Instant::now();
        let mut step = 0;
        while step < BEFORE + TIMED {
            if step == BEFORE {
                read(&mut on_the_way, 0)?;
                begun = Instant::now();
            }
            let most = if step < BEFORE { BEFORE - step } else { BEFORE + TIMED - step };
            let most = MultiStep { steps: most, stop_tokens: None };
            let ahead = model.decode_multi_step(next, &rows, most, &sampled, None, &mut cache);
            step += ahead.tokens.dims()[0];
            next = ahead.last;
            on_the_way.push_back(download_int(ahead.tokens));
            // As in generation: overlapped with the next step, or several steps at once.
            if B::downloads_at_once() {
                read(&mut on_the_way, 1)?;
            } else if on_the_way.len() == READ_STEPS {
                read(&mut on_the_way, 0)?;
            }
        }
        read(&mut on_the_way, 0)?;
        B::sync(device).map_err(|error| Failure::new(format!("the device failed: {error:?}")))?;
        seconds.push(begun.elapsed().as_secs_f64() / TIMED as f64);
    }
    seconds.remove(0);
    Ok(seconds)
}

/// Seconds to prefill prompts together and sample a token after each.
fn prefill<B: Backend>(
    model: &Transformer<B>,
    prompts: usize,
    tokens: usize,
    repeats: usize,
    device: &B::Device,
) -> Result<Vec<f64>, Failure> {
    let vocabulary = model.config().vocab_size as u32;
    let all: Vec<u32> = (0..(prompts * tokens) as u32).map(|at| at.wrapping_mul(7919) % vocabulary).collect();
    let mut seconds = Vec::new();
    for _ in 0..repeats + 1 {
        let mut cache = model.cache(prompts * (tokens + 1).next_multiple_of(PAGE_TOKENS));
        let read_together: Vec<(RowId, &[u32])> =
            all.chunks_exact(tokens).map(|prompt| (cache.add_row(), prompt)).collect();
        let sampled = SampledRows::new(&vec![Sampling::greedy().into(); prompts], device);
        B::sync(device).map_err(|error| Failure::new(format!("the device failed: {error:?}")))?;
        let begun = Instant::now();
        let hidden = model.prefill(&read_together, &mut cache);
        read(&mut VecDeque::from([download_int(model.sample(hidden, &sampled, None, &cache))]), 0)?;
        seconds.push(begun.elapsed().as_secs_f64());
    }
    seconds.remove(0);
    Ok(seconds)
}
