//! Decoding, in tokens a second, and reading a prompt; weights are drawn at random.

use std::time::Instant;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, FloatDType, Int, Tensor, Transaction};
use fireclay_kernels::{Backend, SampledRow, SampledRows, Sampling};
use fireclay_model::{PAGE_TOKENS, RowId, Transformer};

use super::sizes::decoder;
use super::{BenchOptions, Measurement};
use crate::backend::OnBackend;
use crate::failure::Failure;
use crate::precision::{CachePrecision, Precision};
use crate::profiling::Ceilings;

/// Tokens that are written before the clock starts, and those that it times, as the peer has them.
const BEFORE: usize = 22;
const TIMED: usize = 128;
/// Steps of which the tokens are read together, as generation does it.
const READ_STEPS: usize = 16;
/// Tokens of the prompt whose reading is timed.
const PROMPT: usize = 2048;
/// Prompts that are read together, and the tokens of each: on a device of its own, and on the CPU.
const PROMPTS: [usize; 2] = [32, 512];
const CPU_PROMPTS: [usize; 2] = [8, 64];

/// Decoding with some sizes, each case told to `show` as soon as it is measured.
pub struct DecodeBench<S> {
    /// What is asked for.
    pub options: BenchOptions,
    /// Told of each measurement.
    pub show: S,
}

impl<S: FnMut(Measurement) -> Result<(), Failure>> OnBackend for DecodeBench<S> {
    type Output = ();

    fn run<B: Backend>(mut self, device: B::Device) -> Result<(), Failure> {
        let cpu = B::is_synchronous();
        let own = if cpu { "llama-15m" } else { "qwen3-0.6b" };
        let sizes = if self.options.sizes.is_empty() { vec![own.to_string()] } else { self.options.sizes.clone() };
        let ceilings = Ceilings::measure::<B>(&self.options.device, self.options.peak, &device)?;
        for name in sizes {
            let Drawn { model, bytes, dtype } = Drawn::<B>::new(&name, &self.options, &device)?;
            let config = model.config();
            let batches = match self.options.batch {
                Some(batch) => vec![batch],
                None if cpu => vec![1, 8],
                None => vec![1, 8, 32],
            };
            for batch_size in batches {
                for (case, sampling) in [("greedy", Sampling::greedy()), ("top-k 50, top-p 0.9", top_k_top_p())] {
                    let seconds = decode(&model, batch_size, &sampling, self.options.repeats, &device)?;
                    let values = seconds.iter().map(|seconds| batch_size as f64 / seconds).collect();
                    let what = format!("decode {name} {dtype}");
                    let case =
                        if case == "greedy" { format!("B={batch_size}") } else { format!("B={batch_size} {case}") };
                    let measured = Measurement::new(what, case, "tokens/s", values);
                    // Each weight is read once a step; the copy reads and writes.
                    let floor = bytes as f64 / ceilings.bytes_per_second;
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

/// A decoder by name, of weights drawn at random.
pub(super) struct Drawn<B: Backend> {
    pub(super) model: Transformer<B>,
    /// Bytes that a step reads of it.
    bytes: usize,
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
        let model = config.init::<B>(1, device)?.map(&mut cast).with_activations(dtype);
        // Of an embedding table of its own a step reads a row.
        let table = if config.tied_embeddings { 0 } else { config.vocab_size * config.d_model };
        let bytes = cast.bytes - table * model.embedding.val().dtype().size();
        let int8 = options.precision == Some(Precision::Int8);
        let (model, bytes, dtype) = if int8 {
            // A byte for each number, and a scale of four for each row, which is no more than a hundredth of that.
            let model =
                model.with_int8_matrices().map_err(|error| Failure::new(format!("the device failed: {error:?}")))?;
            (model, bytes / DType::from(dtype).size(), Precision::Int8.name().to_string())
        } else {
            (model, bytes, format!("{dtype:?}").to_lowercase())
        };
        Ok(match options.cache {
            CachePrecision::Auto => Self { model, bytes, dtype },
            CachePrecision::Int8 => {
                Self { model: model.with_int8_cache(), bytes, dtype: format!("{dtype}, cache int8") }
            }
        })
    }
}

fn top_k_top_p() -> Sampling {
    Sampling::greedy().with_temperature(0.8).with_top_k(Some(50)).with_top_p(Some(0.9))
}

/// Puts matrices in a dtype, and counts the bytes of what a step reads.
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

fn read<B: Backend>(steps: &mut Vec<Tensor<B, 1, Int>>) -> Result<(), Failure> {
    if steps.is_empty() {
        return Ok(());
    }
    let steps = std::mem::take(steps).into_iter().fold(Transaction::<B>::default(), Transaction::register);
    steps.try_execute().map(drop).map_err(|error| Failure::new(format!("the device failed: {error:?}")))
}

/// Seconds of a step, each time over [`TIMED`] of them.
fn decode<B: Backend>(
    model: &Transformer<B>,
    batch_size: usize,
    sampling: &Sampling,
    repeats: usize,
    device: &B::Device,
) -> Result<Vec<f64>, Failure> {
    let row = |row: usize| SampledRow::from(sampling.with_seed(1, row as u64));
    let sampled = SampledRows::new(&(0..batch_size).map(row).collect::<Vec<_>>(), device);
    let mut seconds = Vec::new();
    // The first time compiles.
    for _ in 0..repeats + 1 {
        let mut cache = model.cache(batch_size * (BEFORE + TIMED + 1).next_multiple_of(PAGE_TOKENS));
        let rows: Vec<RowId> = (0..batch_size).map(|_| cache.add_row()).collect();
        for row in &rows {
            cache.reserve(*row, BEFORE + TIMED + 1).map_err(|full| Failure::new(full.to_string()))?;
        }
        let prompts: Vec<(RowId, &[u32])> = rows.iter().map(|row| (*row, &[1][..])).collect();
        let hidden = model.prefill(&prompts, &mut cache);
        let mut next = model.sample(hidden, &sampled, None, &cache);
        let mut on_the_way = Vec::new();
        let mut begun = Instant::now();
        for step in 0..BEFORE + TIMED {
            if step == BEFORE {
                read(&mut on_the_way)?;
                begun = Instant::now();
            }
            let hidden = model.decode(next, &rows, &mut cache);
            next = model.sample(hidden, &sampled, None, &cache);
            on_the_way.push(next.clone());
            if on_the_way.len() == READ_STEPS {
                read(&mut on_the_way)?;
            }
        }
        read(&mut on_the_way)?;
        B::sync(device).map_err(|error| Failure::new(format!("the device failed: {error:?}")))?;
        seconds.push(begun.elapsed().as_secs_f64() / TIMED as f64);
    }
    seconds.remove(0);
    Ok(seconds)
}

/// Seconds to read prompts together and draw the token after each.
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
        let mut cache = model.cache(PAGE_TOKENS + prompts * (tokens + 1).next_multiple_of(PAGE_TOKENS));
        // Whole decode steps are planned at the first token that a cache has.
        let first = cache.add_row();
        model.prefill(&[(first, &[1])], &mut cache);
        cache.remove_row(first);
        let read_together: Vec<(RowId, &[u32])> =
            all.chunks_exact(tokens).map(|prompt| (cache.add_row(), prompt)).collect();
        let sampled = SampledRows::new(&vec![Sampling::greedy().into(); prompts], device);
        B::sync(device).map_err(|error| Failure::new(format!("the device failed: {error:?}")))?;
        let begun = Instant::now();
        let hidden = model.prefill(&read_together, &mut cache);
        read(&mut vec![model.sample(hidden, &sampled, None, &cache)])?;
        seconds.push(begun.elapsed().as_secs_f64());
    }
    seconds.remove(0);
    Ok(seconds)
}
