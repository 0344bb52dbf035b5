//! Decoding, in tokens a second: a prompt read at once, then a token at a time for each row, in the shapes of
//! Qwen3-0.6B on a GPU and of a Llama of 15 million parameters on a CPU. Weights are drawn at random.
//!
//! `FIRECLAY_TEST_BACKEND` names the backend (`cpu` if unset), `FIRECLAY_BENCH_OPS=1` adds what each operation took,
//! `FIRECLAY_BENCH_TOKENS` is how many tokens are timed (128 if unset).
//! The bandwidth printed is that of the weights alone, each read once a step.

use std::time::Instant;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, FloatDType, Tensor, TensorData, Transaction};
use clap::ValueEnum;
use fireclay::Failure;
use fireclay::backend::{BackendName, OnBackend};
use fireclay_kernels::recorder::Recording;
use fireclay_kernels::{Backend, RandomKey, SampledRows, Sampling};
use fireclay_model::{Transformer, TransformerConfig};
use rayon::prelude::*;

/// The program's.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Tokens that are written before the clock starts.
const BEFORE: usize = 22;
/// Steps of which the tokens are read together, as generation does it.
const READ_STEPS: usize = 16;
/// Tokens of the prompt whose reading is timed.
const PROMPT: usize = 2048;

fn main() -> Result<(), Failure> {
    let name = std::env::var("FIRECLAY_TEST_BACKEND").unwrap_or_else(|_| "cpu".into());
    BackendName::from_str(&name, true).map_err(Failure::usage)?.run(Decode)
}

struct Decode;

impl OnBackend for Decode {
    type Output = ();

    fn run<B: Backend>(self, device: B::Device) -> Result<(), Failure> {
        let gpu = !B::name(&device).contains("ndarray");
        let (name, config, batches) = if gpu {
            let config = TransformerConfig::qwen3(151_936, 4096, 1024, 28, 16, 128);
            let config = config.with_n_kv_heads(8).with_d_ff(3072).with_tied_embeddings(true);
            ("qwen3-0.6b", config, vec![1, 8, 32])
        } else {
            ("llama 15M", TransformerConfig::llama(32_000, 1024, 288, 6, 6).with_d_ff(768), vec![1, 8])
        };
        let half = gpu && B::supports_dtype(&device, DType::BF16);
        let dtype = if half { FloatDType::BF16 } else { FloatDType::F32 };
        let mut cast = Cast { dtype, bytes: 0 };
        let model = config.init::<B>(1, &device)?.map(&mut cast).with_activations(dtype);
        // Of an embedding table of its own a step reads a row.
        let table = if config.tied_embeddings { 0 } else { config.vocab_size * config.d_model };
        let bytes = cast.bytes - table * model.embedding.val().dtype().size();
        println!("{name} on {}, {dtype:?}, {:.3} GB of matrices", B::name(&device), bytes as f64 / 1e9);
        if !gpu {
            println!("memory is read at {:.1} GB/s", read_bandwidth() / 1e9);
        }
        for batch_size in batches {
            decode(&model, batch_size, bytes, &device)?;
        }
        prefill(&model, PROMPT.min(config.context_length - 1), &device)
    }
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

/// Bytes a second at which all cores together read memory, at best.
fn read_bandwidth() -> f64 {
    let words = vec![1u64; 1 << 26];
    let sum = |part: &[u64]| part.iter().fold(0u64, |sum, word| sum.wrapping_add(*word));
    let seconds = (0..8).map(|_| {
        let begun = Instant::now();
        let total: u64 = words.par_chunks(1 << 16).map(sum).sum();
        assert_eq!(total, words.len() as u64);
        begun.elapsed().as_secs_f64()
    });
    (words.len() * 8) as f64 / seconds.fold(f64::INFINITY, f64::min)
}

fn read<B: Backend>(steps: &mut Vec<Tensor<B, 1, burn::tensor::Int>>) -> Result<Vec<TensorData>, Failure> {
    let steps = std::mem::take(steps).into_iter().fold(Transaction::<B>::default(), Transaction::register);
    steps.try_execute().map_err(|error| Failure::new(format!("the device failed: {error:?}")))
}

fn decode<B: Backend>(
    model: &Transformer<B>,
    batch_size: usize,
    bytes: usize,
    device: &B::Device,
) -> Result<(), Failure> {
    let asked = std::env::var("FIRECLAY_BENCH_TOKENS").ok().and_then(|tokens| tokens.parse().ok()).unwrap_or(128);
    let timed = asked.clamp(1, model.config().context_length - BEFORE - 128);
    let streams: Vec<u32> = (0..batch_size as u32).collect();
    for (case, sampling) in [
        ("greedy", Sampling::greedy()),
        (
            "top-k 50, top-p 0.9",
            Sampling::greedy().with_temperature(0.8, RandomKey::new(1)).with_top_k(Some(50)).with_top_p(Some(0.9)),
        ),
    ] {
        let mut cache = model.cache(batch_size, BEFORE + 128 + timed);
        let mut rows = SampledRows::new(&streams, device);
        let prompts: Vec<&[u32]> = vec![&[1]; batch_size];
        let mut next = model.sample(model.prefill(&prompts, &mut cache), &sampling, &mut rows);
        let mut on_the_way = Vec::new();
        let mut begun = Instant::now();
        for step in 0..BEFORE + timed {
            if step == BEFORE {
                read(&mut on_the_way)?;
                begun = Instant::now();
            }
            next = model.sample(model.decode(next, &mut cache), &sampling, &mut rows);
            on_the_way.push(next.clone());
            if on_the_way.len() == READ_STEPS {
                read(&mut on_the_way)?;
            }
        }
        if !on_the_way.is_empty() {
            read(&mut on_the_way)?;
        }
        let seconds = begun.elapsed().as_secs_f64() / timed as f64;
        println!(
            "decode {case}, batch {batch_size}: {:.0} tokens/s, {:.3} ms a step, weights at {:.0} GB/s",
            batch_size as f64 / seconds,
            seconds * 1e3,
            bytes as f64 / seconds / 1e9
        );
        if std::env::var_os("FIRECLAY_BENCH_OPS").is_some() {
            let failed = |error| Failure::new(format!("no recording: {error}"));
            let recording = Recording::start::<B>(device).map_err(failed)?;
            for _ in 0..4 {
                next = model.sample(model.decode(next, &mut cache), &sampling, &mut rows);
            }
            B::sync(device).map_err(|error| Failure::new(format!("the device failed: {error:?}")))?;
            println!("{}", recording.stop().map_err(failed)?);
        }
    }
    Ok(())
}

fn prefill<B: Backend>(model: &Transformer<B>, tokens: usize, device: &B::Device) -> Result<(), Failure> {
    let prompt: Vec<u32> = (0..tokens as u32).map(|at| at * 7919 % 30_000).collect();
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        let mut cache = model.cache(1, tokens + 1);
        let mut rows = SampledRows::new(&[0], device);
        B::sync(device).map_err(|error| Failure::new(format!("the device failed: {error:?}")))?;
        let begun = Instant::now();
        let hidden = model.prefill(&[&prompt], &mut cache);
        read(&mut vec![model.sample(hidden, &Sampling::greedy(), &mut rows)])?;
        best = best.min(begun.elapsed().as_secs_f64());
    }
    println!("prefill of {tokens} tokens: {:.2} ms, {:.0} tokens/s", best * 1e3, tokens as f64 / best);
    Ok(())
}
