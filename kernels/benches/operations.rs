//! Every operation, forward and backward, with the bytes it must move, the operations it must compute, and the share
//! of the device's ceilings that it reaches.
//!
//! `FIRECLAY_TEST_BACKEND` names the backend (`cpu` if unset), `FIRECLAY_BENCH_DTYPE` the dtype (`f32` if unset).
//! Ceilings are measured in the same run: a copy for bytes, a large product for computation.

use std::cell::Cell;
use std::time::{Duration, Instant};

use burn::tensor::{DType, Distribution, FloatDType, Int, Tensor};
use criterion::{BenchmarkGroup, Criterion, Throughput, measurement::WallTime};
use fireclay_kernels::operands::{
    ActivateBackward, ActivateForward, Checked, EmbedBackward, HeadLossForward, LinearBackward, LinearForward,
    NormBackward, NormForward, QkvAttentionBackward, QkvAttentionForward,
};
use fireclay_kernels::{
    Activation, ActivationKind, AdamW, AdamWParameter, AttentionMask, AttentionOptions, Backend, Dropout,
    HeadLossOptions, Norm, PackedHeads, RandomKey, RotaryTable, SampledRows, Sampling, dropout, embed, head_sample,
    linear, linear_add, optimizer_step, qkv_attention, qkv_rotary, recorder,
};

/// Sizes that fill the device.
struct Scale {
    rows: usize,
    width: usize,
    vocabulary: usize,
    sequences: usize,
    seq_length: usize,
    heads: usize,
    parameters: usize,
}

/// A GPU's sizes: those of GPT-2 124M at 16 sequences of 1,024 tokens.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
const LARGE: Scale = Scale {
    rows: 65_536,
    width: 1024,
    vocabulary: 50_304,
    sequences: 16,
    seq_length: 1024,
    heads: 12,
    parameters: 124_000_000,
};

/// A processor's.
#[cfg(feature = "ndarray")]
const SMALL: Scale =
    Scale { rows: 2048, width: 384, vocabulary: 8192, sequences: 4, seq_length: 256, heads: 6, parameters: 10_000_000 };

fn main() {
    let backend = std::env::var("FIRECLAY_TEST_BACKEND").unwrap_or_else(|_| "cpu".into());
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    fireclay_kernels::devices::configure(None);
    match backend.as_str() {
        #[cfg(feature = "ndarray")]
        "cpu" => run::<burn::backend::NdArray>(&SMALL),
        #[cfg(feature = "wgpu")]
        "wgpu" | "vulkan" => run::<burn::backend::Wgpu>(&LARGE),
        #[cfg(feature = "cuda")]
        "cuda" => run::<burn::backend::Cuda>(&LARGE),
        name => panic!("backend {name} is not built into this bench"),
    }
}

/// Measures one closure after the other, and knows the ceilings once they are measured.
struct Bench<'a, B: Backend> {
    group: BenchmarkGroup<'a, WallTime>,
    device: B::Device,
    dtype: DType,
    bytes_per_second: f64,
    flops_per_second: f64,
}

impl<B: Backend> Bench<'_, B> {
    /// Seconds of one call of `op`, at best; the device is waited for once for many calls.
    fn measure<T>(&mut self, name: &str, bytes: usize, flops: f64, mut op: impl FnMut() -> T) -> f64 {
        let best = Cell::new(f64::INFINITY);
        let device = self.device.clone();
        // What is compiled at first would have few calls measured together.
        drop(op());
        B::sync(&device).expect("the device works");
        self.group.throughput(Throughput::Bytes(bytes as u64));
        self.group.bench_function(name, |bencher| {
            bencher.iter_custom(|calls| {
                B::sync(&device).expect("the device works");
                let start = Instant::now();
                for _ in 0..calls {
                    drop(op());
                }
                B::sync(&device).expect("the device works");
                let elapsed = start.elapsed();
                best.set(best.get().min(elapsed.as_secs_f64() / calls as f64));
                elapsed
            });
        });
        let seconds = best.get();
        if seconds.is_finite() && self.bytes_per_second > 0.0 {
            let floor = (bytes as f64 / self.bytes_per_second).max(flops / self.flops_per_second);
            println!(
                "{name:<32} {:>9.1} us {:>8.1} GB/s {:>7.2} TFLOP/s {:>5.0}% of its ceiling",
                seconds * 1e6,
                bytes as f64 / seconds / 1e9,
                flops / seconds / 1e12,
                100.0 * floor / seconds
            );
        }
        seconds
    }

    fn random<const D: usize>(&self, shape: [usize; D]) -> Tensor<B, D> {
        self.weights(shape).cast(self.dtype)
    }

    fn weights<const D: usize>(&self, shape: [usize; D]) -> Tensor<B, D> {
        Tensor::random(shape, Distribution::Uniform(-1.0, 1.0), &self.device)
    }

    fn tokens(&self, rows: usize, below: usize) -> Tensor<B, 1, Int> {
        let key = RandomKey::new(7);
        let draw = |row: usize| (key.uniform(row as u32, 0) * below as f64) as i32;
        Tensor::from_data(burn::tensor::TensorData::new((0..rows).map(draw).collect::<Vec<_>>(), [rows]), &self.device)
    }
}

fn run<B: Backend>(scale: &Scale) {
    let device = B::Device::default();
    let dtype = match std::env::var("FIRECLAY_BENCH_DTYPE").as_deref() {
        Err(_) | Ok("f32") => DType::F32,
        Ok("bf16") => DType::BF16,
        Ok("f16") => DType::F16,
        Ok(other) => panic!("FIRECLAY_BENCH_DTYPE is f32, bf16 or f16, not {other}"),
    };
    assert!(B::supports_dtype(&device, dtype), "{} has no {dtype:?}", B::name(&device));
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .without_plots()
        .configure_from_args();
    let group = criterion.benchmark_group(format!("{} {dtype:?}", B::name(&device)));
    let mut bench = Bench::<B> { group, device, dtype, bytes_per_second: 0.0, flops_per_second: 1.0 };
    ceilings(&mut bench, scale);
    rows(&mut bench, scale);
    projections(&mut bench, scale);
    heads(&mut bench, scale);
    vocabulary(&mut bench, scale);
    parameters(&mut bench, scale);
    recorder_off(&mut bench);
    bench.group.finish();
}

fn ceilings<B: Backend>(bench: &mut Bench<'_, B>, scale: &Scale) {
    let x = bench.random([scale.rows, scale.width]);
    let bytes = 2 * scale.rows * scale.width * bench.dtype.size();
    let copy = bench.measure("copy", bytes, 0.0, || x.clone().mul_scalar(1.0));
    let side = (scale.rows / 8).max(1024);
    let (a, b) = (bench.random([side, side]), bench.random([side, side]));
    let flops = 2.0 * (side as f64).powi(3);
    let product = bench.measure("product", 0, flops, || linear(a.clone(), b.clone(), None));
    (bench.bytes_per_second, bench.flops_per_second) = (bytes as f64 / copy, flops / product);
    println!("ceilings: {:.0} GB/s, {:.2} TFLOP/s", bench.bytes_per_second / 1e9, bench.flops_per_second / 1e12);
}

/// What each operation pays while nothing is recorded.
fn recorder_off<B: Backend>(bench: &mut Bench<'_, B>) {
    let x = bench.weights([2, 2]);
    bench.group.throughput(Throughput::Elements(1));
    bench.group.bench_function("recorder off, one operation", |bencher| {
        bencher.iter(|| recorder::op(std::hint::black_box("nothing"), || vec![recorder::operand(&x)]));
    });
}

/// Operations over `[rows, width]`.
fn rows<B: Backend>(bench: &mut Bench<'_, B>, scale: &Scale) {
    let Scale { rows, width, .. } = *scale;
    let once = rows * width * bench.dtype.size();
    let (x, grad) = (bench.random([rows, width]), bench.random([rows, width]));
    let (gamma, beta) = (bench.weights([width]), bench.weights([width]));
    for (name, norm) in
        [("rms norm", Norm::rms(gamma.clone(), 1e-6)), ("layer norm", Norm::layer(gamma, Some(beta), 1e-5))]
    {
        bench.measure(name, 2 * once, 0.0, || {
            B::norm_forward(Checked::new(NormForward { x: x.clone(), norm: norm.clone() }))
        });
        let saved = B::norm_forward(Checked::new(NormForward { x: x.clone(), norm: norm.clone() }));
        bench.measure(&format!("{name} backward"), 3 * once, 0.0, || {
            B::norm_backward(Checked::new(NormBackward {
                grad: grad.clone(),
                x: x.clone(),
                saved: saved.clone(),
                norm: norm.clone(),
                residual: None,
            }))
        });
    }
    for (name, activation) in
        [("gelu", Activation::plain(ActivationKind::GeluTanh)), ("swiglu", Activation::gated(ActivationKind::Silu))]
    {
        let out = activation.output_width(2 * once) / 2;
        bench.measure(name, once + out, 0.0, || {
            B::activate_forward(Checked::new(ActivateForward { x: x.clone(), activation }))
        });
        let grad = grad.clone().narrow(1, 0, activation.output_width(width));
        bench.measure(&format!("{name} backward"), 2 * once + out, 0.0, || {
            B::activate_backward(Checked::new(ActivateBackward { grad: grad.clone(), x: x.clone(), activation }))
        });
    }
    let kept = Dropout { probability: 0.1, key: RandomKey::new(1) };
    bench.measure("dropout", 2 * once, 0.0, || dropout(x.clone(), kept));
}

/// Projections of a feed-forward layer.
fn projections<B: Backend>(bench: &mut Bench<'_, B>, scale: &Scale) {
    let (rows, narrow) = (scale.sequences * scale.seq_length, scale.heads * 64);
    let wide = 4 * narrow;
    let x = bench.random([rows, narrow]);
    let grad = bench.random([rows, wide]);
    let weight = bench.random([wide, narrow]);
    let bias = bench.weights([wide]);
    let flops = 2.0 * (rows * narrow * wide) as f64;
    let bytes = (rows * narrow + rows * wide + wide * narrow) * bench.dtype.size();
    bench.measure("linear", bytes, flops, || linear(x.clone(), weight.clone(), Some(bias.clone())));
    bench.measure("linear backward", 2 * bytes, 2.0 * flops, || {
        B::linear_backward(Checked::new(LinearBackward {
            grad: grad.clone(),
            x: x.clone(),
            weight: weight.clone(),
            bias: Some(bias.clone()),
            activation: None,
            dropout: None,
        }))
    });
    let gelu = Activation::plain(ActivationKind::GeluTanh);
    bench.measure("norm_gate_up", bytes, flops, || {
        B::linear_forward(Checked::new(LinearForward {
            activation: Some(gelu),
            keeps: true,
            ..LinearForward::new(x.clone(), weight.clone(), Some(bias.clone()))
        }))
    });
    let (down, shift) = (bench.random([narrow, wide]), bench.weights([narrow]));
    bench.measure("linear_add", bytes, flops, || {
        linear_add(grad.clone(), down.clone(), Some(shift.clone()), None, x.clone())
    });
}

/// Rotary embedding and causal attention over packed heads.
fn heads<B: Backend>(bench: &mut Bench<'_, B>, scale: &Scale) {
    let Scale { sequences, seq_length, heads, .. } = *scale;
    let packed = PackedHeads { n_heads: heads, n_kv_heads: heads, head_dim: 64 };
    let qkv = bench.random([sequences, seq_length, packed.width()]);
    let grad = bench.random([sequences, seq_length, heads, 64]);
    let size = bench.dtype.size();
    let once = sequences * seq_length * heads * 64 * size;

    let frequencies: Vec<f64> = (0..32).map(|pair| 1e4f64.powf(-f64::from(pair) / 32.0)).collect();
    let table = RotaryTable::<B>::new(seq_length, &frequencies, 1.0, &bench.device);
    let positions = Tensor::<B, 1, Int>::arange(0..seq_length as i64, &bench.device);
    let positions = positions.reshape([1, seq_length]).expand([sequences, seq_length]);
    bench.measure("qkv_rotary", 6 * once, 0.0, || qkv_rotary(qkv.clone(), packed, &table, positions.clone()));

    let (mask, options) = (AttentionMask::Causal { window: None }, AttentionOptions::new(64));
    // Half of the scores are hidden.
    let product = (sequences * heads * seq_length * seq_length * 64) as f64;
    bench.measure("attention", 4 * once, 2.0 * product, || qkv_attention(qkv.clone(), packed, &mask, options));
    let forward = QkvAttentionForward { qkv: qkv.clone(), heads: packed, mask: mask.clone(), options };
    let saved = B::qkv_attention_forward(Checked::new(forward));
    bench.measure("attention backward", 8 * once, 5.0 * product, || {
        B::qkv_attention_backward(Checked::new(QkvAttentionBackward {
            grad: grad.clone(),
            qkv: qkv.clone(),
            heads: packed,
            saved: saved.clone(),
            mask: mask.clone(),
            options,
        }))
    });
}

/// The two ends of a language model.
fn vocabulary<B: Backend>(bench: &mut Bench<'_, B>, scale: &Scale) {
    let Scale { sequences, seq_length, heads, vocabulary, .. } = *scale;
    let (rows, d_model, size) = (sequences * seq_length, heads * 64, bench.dtype.size());
    let dtype = FloatDType::from(bench.dtype);
    {
        let (rows, width) = (scale.rows, scale.width);
        let tokens = bench.tokens(rows, vocabulary);
        let ids = tokens.clone().reshape([1, rows]);
        let table = bench.weights([vocabulary, width]);
        bench.measure("embed", rows * width * (4 + size), 0.0, || embed(table.clone(), ids.clone(), dtype));
        let grad = bench.random([rows, width]);
        bench.measure("embed backward", rows * width * size + vocabulary * width * 4, 0.0, || {
            B::embed_backward(Checked::new(EmbedBackward { grad: grad.clone(), tokens: tokens.clone(), vocabulary }))
        });
    }
    let tokens = bench.tokens(rows, vocabulary);

    let (hidden, weight) = (bench.random([rows, d_model]), bench.random([vocabulary, d_model]));
    let flops = 2.0 * (rows * d_model * vocabulary) as f64;
    let bytes = 2 * (rows + vocabulary) * d_model * size;
    let loss = |gradients| {
        B::head_loss_forward(Checked::new(HeadLossForward {
            hidden: hidden.clone(),
            weight: weight.clone(),
            targets: tokens.clone(),
            options: HeadLossOptions::new(),
            gradients,
        }))
    };
    bench.measure("head_loss", bytes, flops, || loss(false));
    bench.measure("head_loss with gradients", 2 * bytes, 3.0 * flops, || loss(true));

    // A head 2,560 wide over GPT-2's vocabulary, as decoders have them.
    let sampling = Sampling::greedy().with_temperature(0.8, RandomKey::new(3));
    let sampling = sampling.with_top_k(Some(50)).with_top_p(Some(0.9));
    let weight = bench.random([50_257, 2560]);
    for rows in [1, 32] {
        let hidden = bench.random([rows, 2560]);
        let mut drawn = SampledRows::new(&(0..rows as u32).collect::<Vec<_>>(), &weight.device());
        bench.measure(&format!("head_sample, {rows} rows"), 50_257 * 2560 * size, 0.0, || {
            head_sample(hidden.clone(), weight.clone(), &sampling, &mut drawn)
        });
    }
}

/// One step over as many parameters as a model has, in matrices of a few million.
fn parameters<B: Backend>(bench: &mut Bench<'_, B>, scale: &Scale) {
    let matrix = 2_359_296;
    let adamw = AdamW {
        learning_rate: 1e-4,
        beta_1: 0.9,
        beta_2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        max_grad_norm: Some(1.0),
        step: 10,
    };
    let parameter = |_| AdamWParameter {
        value: bench.weights([matrix]),
        gradient: bench.weights([matrix]),
        first_moment: bench.weights([matrix]),
        second_moment: bench.weights([matrix]).abs(),
        decays: true,
        copy: (bench.dtype != DType::F32).then(|| bench.random([matrix])),
    };
    let mut parameters: Vec<AdamWParameter<B>> = (0..scale.parameters.div_ceil(matrix)).map(parameter).collect();
    // The gradient twice, value and moments read and written, the copy written.
    let copy = if bench.dtype == DType::F32 { 0 } else { bench.dtype.size() };
    let bytes = parameters.len() * matrix * (4 * 8 + copy);
    bench.measure("optimizer_step", bytes, 0.0, || {
        let norm;
        (parameters, norm) = optimizer_step(std::mem::take(&mut parameters), &adamw);
        norm
    });
}
