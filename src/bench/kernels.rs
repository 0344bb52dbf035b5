//! Every operation, forward and backward, as a share of the hardware's limits for the bytes it must
//! move and the products it must compute.

use burn::tensor::{DType, Distribution, FloatDType, Int, Tensor, TensorData};
use fireclay_kernels::operands::{
    ActivateBackward, ActivateForward, Checked, EmbedBackward, ExpertsBackward, ExpertsForward, FeedForwardBackward,
    FeedForwardForward, HeadLossForward, LinearBackward, LoraBackward, LoraForward, NormBackward, NormForward,
    QkvAttentionBackward, QkvAttentionForward,
};
use fireclay_kernels::{
    Activation, ActivationKind, AdamW, AdamWParameter, AttentionMask, AttentionOptions, Backend, Dropout, ExpertsLayer,
    FeedForwardLayer, HeadLossOptions, HeadLossWanted, HeadNorms, LoraLayer, LoraWanted, Norm, PackedHeads, RandomKey,
    RotaryTable, SampledRow, SampledRows, Sampling, Wanted, Weight, choose_experts, dropout, embed, head_sample,
    linear, linear_add, norm_gate_up, optimizer_step, qkv_attention, qkv_norm, qkv_rotary, recorder,
};

use super::{BenchOptions, Measurement, seconds};
use crate::backend::{OnBackend, RunContext};
use crate::ceilings::Ceilings;
use crate::failure::Failure;
use crate::precision::Precision;

/// Sizes that fill the device.
struct Scale {
    rows: usize,
    width: usize,
    vocabulary: usize,
    sequences: usize,
    seq_length: usize,
    heads: usize,
    parameters: usize,
    /// `[m, k, n]` of products `[m, k] * [k, n]`.
    products: &'static [[usize; 3]],
    /// `[batch_size, heads, seq_length, head_dim]` of causal attention.
    attention: &'static [[usize; 4]],
    /// `[tokens, d_model, d_ff, n_experts, experts_per_token]` of mixtures.
    mixtures: &'static [[usize; 5]],
}

/// A GPU's: those of GPT-2 124M at 16 sequences of 1,024 tokens.
const GPU: Scale = Scale {
    rows: 65_536,
    width: 1024,
    vocabulary: 50_304,
    sequences: 16,
    seq_length: 1024,
    heads: 12,
    parameters: 124_000_000,
    products: &[
        [8192, 8192, 8192],
        [16384, 768, 2304],
        [16384, 768, 768],
        [16384, 768, 3072],
        [16384, 3072, 768],
        [65536, 768, 3072],
        [65536, 3072, 768],
        [16384, 768, 50304],
        [768, 16384, 3072],
        [3072, 16384, 768],
    ],
    attention: &[[16, 12, 1024, 64], [64, 12, 1024, 64], [4, 16, 4096, 128], [1, 16, 16384, 128]],
    mixtures: &[[16_384, 2048, 768, 128, 8], [65_536, 768, 1536, 16, 2], [32, 2048, 768, 128, 8]],
};

/// For a CPU.
const CPU: Scale = Scale {
    rows: 2048,
    width: 384,
    vocabulary: 8192,
    sequences: 4,
    seq_length: 256,
    heads: 6,
    parameters: 10_000_000,
    products: &[[1024, 1024, 1024], [1024, 384, 1536]],
    attention: &[[4, 6, 256, 64]],
    mixtures: &[[1024, 384, 256, 16, 2]],
};

/// All operations in one dtype; `show` receives each case when measured.
pub struct KernelBench<S> {
    /// The options; sizes depend on the device.
    pub options: BenchOptions,
    /// Receives each measurement.
    pub show: S,
}

impl<S: FnMut(Measurement) -> Result<(), Failure>> OnBackend for KernelBench<S> {
    type Output = ();

    fn run<B: Backend>(self, RunContext { device, .. }: RunContext<B>) -> Result<(), Failure> {
        let cpu = B::is_synchronous();
        let scale = if cpu { &CPU } else { &GPU };
        let half = !cpu && B::supports_dtype(&device, DType::BF16);
        let precision = self.options.precision.unwrap_or(if half { Precision::Bf16 } else { Precision::F32 });
        let dtype = DType::from(precision.activations::<B>(&device)?);
        let _products = precision.f32_products().enter();
        let ceilings =
            Ceilings::measure::<B>(&self.options.device, self.options.peak, precision.f32_products(), &device)?;
        let name = if precision == Precision::Tf32 { precision.name() } else { dtype.name() };
        let mut bench = Bench::<B, S> { device, dtype, name, ceilings, repeats: self.options.repeats, show: self.show };
        bench.rows(scale)?;
        bench.products(scale)?;
        bench.mixtures(scale)?;
        bench.heads(scale)?;
        bench.vocabulary(scale)?;
        bench.parameters(scale)?;
        bench.recorder_off()
    }
}

/// Measures one operation after the other.
struct Bench<B: Backend, S> {
    device: B::Device,
    dtype: DType,
    /// The dtype, or how f32 is multiplied.
    name: &'static str,
    ceilings: Ceilings,
    repeats: usize,
    show: S,
}

impl<B: Backend, S: FnMut(Measurement) -> Result<(), Failure>> Bench<B, S> {
    /// Measures `op`, which moves `bytes`, in GB/s.
    fn moves<T>(&mut self, name: &str, case: String, bytes: usize, mut op: impl FnMut() -> T) -> Result<(), Failure> {
        let seconds = seconds::<B, T>(&self.device, self.repeats, || Ok(op()))?;
        let values = seconds.iter().map(|seconds| bytes as f64 / seconds / 1e9).collect();
        let measured = Measurement::new(format!("{name} {}", self.name), case, "GB/s", values);
        let share = measured.value * 1e9 / self.ceilings.bytes_per_second;
        (self.show)(measured.of(share, "a copy"))
    }

    /// Measures `op`, which computes `flops`, in TFLOP/s.
    fn computes<T>(&mut self, name: &str, case: String, flops: f64, mut op: impl FnMut() -> T) -> Result<(), Failure> {
        let seconds = seconds::<B, T>(&self.device, self.repeats, || Ok(op()))?;
        let values = seconds.iter().map(|seconds| flops / seconds / 1e12).collect();
        let measured = Measurement::new(name, case, "TFLOP/s", values);
        let value = measured.value;
        (self.show)(match self.ceilings.peaks {
            Some(peaks) => measured.of(value * 1e12 / peaks.for_dtype(self.dtype), "the matrix peak"),
            None => measured,
        })
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
        Tensor::from_data(TensorData::new((0..rows).map(draw).collect::<Vec<_>>(), [rows]), &self.device)
    }

    /// The overhead of the recorder while nothing is recorded.
    fn recorder_off(&mut self) -> Result<(), Failure> {
        let x = self.weights([2, 2]);
        let name = || std::hint::black_box("nothing");
        let seconds = seconds::<B, ()>(&self.device, self.repeats, || {
            // Many at once, since one is shorter than the clock's resolution.
            (0..1000).for_each(|_| drop(recorder::op(name(), || vec![recorder::operand(&x)])));
            Ok(())
        })?;
        let values = seconds.iter().map(|seconds| seconds * 1e3).collect();
        (self.show)(Measurement::new("recorder off", "one operation", "us", values))
    }

    /// Operations over `[rows, width]`.
    fn rows(&mut self, scale: &Scale) -> Result<(), Failure> {
        let Scale { rows, width, .. } = *scale;
        let case = || format!("{rows}x{width}");
        let once = rows * width * self.dtype.size();
        let (x, grad) = (self.random([rows, width]), self.random([rows, width]));
        let (gamma, beta) = (self.weights([width]), self.weights([width]));
        for (name, norm) in
            [("rms_norm", Norm::rms(gamma.clone(), 1e-6)), ("layer_norm", Norm::layer(gamma, Some(beta), 1e-5))]
        {
            let forward = || B::norm_forward(Checked::new(NormForward { x: x.clone(), norm: norm.clone() }));
            self.moves(&format!("{name} forward"), case(), 2 * once, forward)?;
            let saved = B::norm_forward(Checked::new(NormForward { x: x.clone(), norm: norm.clone() }));
            self.moves(&format!("{name} backward"), case(), 3 * once, || {
                B::norm_backward(Checked::new(NormBackward {
                    grad: grad.clone(),
                    x: x.clone(),
                    mean: saved.mean.clone(),
                    inverse_deviation: saved.inverse_deviation.clone(),
                    norm: norm.clone(),
                    residual: None,
                    trained: true,
                }))
            })?;
        }
        for (name, activation) in
            [("gelu", Activation::plain(ActivationKind::GeluTanh)), ("swiglu", Activation::gated(ActivationKind::Silu))]
        {
            let out = activation.output_width(2 * once) / 2;
            self.moves(&format!("{name} forward"), case(), once + out, || {
                B::activate_forward(Checked::new(ActivateForward { x: x.clone(), activation }))
            })?;
            let grad = grad.clone().narrow(1, 0, activation.output_width(width));
            self.moves(&format!("{name} backward"), case(), 2 * once + out, || {
                B::activate_backward(Checked::new(ActivateBackward { grad: grad.clone(), x: x.clone(), activation }))
            })?;
        }
        let kept = Dropout { probability: 0.1, key: RandomKey::new(1) };
        self.moves("dropout", case(), 2 * once, || dropout(x.clone(), kept))
    }

    /// Mixtures of experts with random routing, and dense products of as many multiplications.
    fn mixtures(&mut self, scale: &Scale) -> Result<(), Failure> {
        let dtype = self.name;
        for [tokens, d_model, d_ff, n_experts, k] in scale.mixtures {
            let case = || format!("{tokens}x{d_model}x{d_ff}, {k} of {n_experts}");
            let slots = tokens * k;
            let (x, up) = (self.random([*tokens, *d_model]), self.random([n_experts * 2 * d_ff, *d_model]));
            let (down, grad) = (self.random([n_experts * d_model, *d_ff]), self.random([*tokens, *d_model]));
            let chosen = choose_experts(self.random([*tokens, *n_experts]), *k);
            let weights = self.random([*tokens, *k]).cast(DType::F32);
            let layer = ExpertsLayer {
                up: Weight::Float(up),
                up_bias: None,
                activation: Activation::gated(ActivationKind::Silu),
                limit: None,
                down: Weight::Float(down),
                down_bias: None,
            };
            let flops = 2.0 * (slots * d_model * 3 * d_ff) as f64;
            let (rows, one) = (self.random([slots, *d_model]), self.random([2 * d_ff, *d_model]));
            let product = 2.0 * (slots * d_model * 2 * d_ff) as f64;
            self.computes(&format!("gemm {dtype}"), format!("{slots}x{d_model}x{}", 2 * d_ff), product, || {
                linear(rows.clone(), one.clone(), None)
            })?;
            let operands = |keeps: bool| ExpertsForward {
                x: x.clone(),
                chosen: chosen.clone(),
                weights: weights.clone(),
                layer: layer.clone(),
                keeps,
            };
            self.computes(&format!("experts {dtype}"), case(), flops, || {
                B::experts_forward(Checked::new(operands(false))).output
            })?;
            if *tokens < 1024 {
                continue;
            }
            let inner = B::experts_forward(Checked::new(operands(true))).inner.expect("what is to be saved");
            self.computes(&format!("experts backward {dtype}"), case(), 2.0 * flops, || {
                B::experts_backward(Checked::new(ExpertsBackward {
                    grad: grad.clone(),
                    x: x.clone(),
                    chosen: chosen.clone(),
                    weights: weights.clone(),
                    inner: inner.clone(),
                    layer: layer.clone(),
                    wanted: [Wanted::ALL; 2],
                    sums: [None, None],
                }))
            })?;
        }
        Ok(())
    }

    /// Matrix products, alone and in a feed-forward layer.
    fn products(&mut self, scale: &Scale) -> Result<(), Failure> {
        let dtype = self.name;
        for [m, k, n] in scale.products {
            let (x, weight) = (self.random([*m, *k]), self.random([*n, *k]));
            let flops = 2.0 * (m * k * n) as f64;
            self.computes(&format!("gemm {dtype}"), format!("{m}x{k}x{n}"), flops, || {
                linear(x.clone(), weight.clone(), None)
            })?;
        }
        let (rows, narrow) = (scale.sequences * scale.seq_length, scale.heads * 64);
        let wide = 4 * narrow;
        let case = || format!("{rows}x{narrow}x{wide}");
        let x = self.random([rows, narrow]);
        let grad = self.random([rows, wide]);
        let weight = self.random([wide, narrow]);
        let bias = self.weights([wide]);
        let flops = 2.0 * (rows * narrow * wide) as f64;
        self.computes(&format!("linear with bias {dtype}"), case(), flops, || {
            linear(x.clone(), weight.clone(), Some(bias.clone()))
        })?;
        self.computes(&format!("linear backward {dtype}"), case(), 2.0 * flops, || {
            B::linear_backward(Checked::new(LinearBackward {
                grad: grad.clone(),
                x: Some(x.clone()),
                weight: Weight::Float(weight.clone()),
                bias: Some(bias.clone()),
                wanted: Wanted::ALL,
                activation: None,
                dropout: None,
                sum: None,
            }))
        })?;
        // The rank of three modules with 16 each.
        let rank = 48;
        let layer = LoraLayer {
            weight: Weight::Float(weight.clone()),
            bias: None,
            a: Weight::Float(self.random([rank, narrow])),
            b: Weight::Float(self.random([wide, rank])),
            scale: 2.0,
            activation: None,
        };
        let operands = LoraForward { x: x.clone(), layer, residual: None, keeps: true };
        let adapted = flops + 2.0 * (rows * rank * (narrow + wide)) as f64;
        let lora_case = format!("{rows}x{narrow}x{wide}, rank {rank}");
        let inner = B::lora_forward(Checked::new(operands.clone())).inner;
        self.computes(&format!("lora {dtype}"), lora_case.clone(), adapted, || {
            B::lora_forward(Checked::new(operands.clone()))
        })?;
        self.computes(&format!("lora backward {dtype}"), lora_case, 2.0 * adapted - flops, || {
            B::lora_backward(Checked::new(LoraBackward {
                grad: grad.clone(),
                x: x.clone(),
                inner: inner.clone(),
                layer: operands.layer.clone(),
                saved: None,
                wanted: LoraWanted::ALL,
                sums: [None, None],
            }))
        })?;
        drop((inner, operands));
        let gelu = Activation::plain(ActivationKind::GeluTanh);
        self.computes(&format!("norm_gate_up, gelu {dtype}"), case(), flops, || {
            norm_gate_up(x.clone(), None, weight.clone(), Some(bias.clone()), gelu)
        })?;
        let (down, shift) = (self.random([narrow, wide]), self.weights([narrow]));
        let layer = FeedForwardLayer {
            up: Weight::Float(weight.clone()),
            up_bias: Some(bias.clone()),
            activation: gelu,
            down: Weight::Float(down.clone()),
            down_bias: Some(shift.clone()),
        };
        let operands = FeedForwardForward { x: x.clone(), norm: None, residual: x.clone(), layer, dropout: None };
        let forward = B::feed_forward_forward(Checked::new(operands.clone()));
        self.computes(&format!("feed_forward, gelu {dtype}"), case(), 2.0 * flops, || {
            B::feed_forward_forward(Checked::new(operands.clone()))
        })?;
        self.computes(&format!("feed_forward backward, gelu {dtype}"), case(), 4.0 * flops, || {
            B::feed_forward_backward(Checked::new(FeedForwardBackward {
                grad: x.clone(),
                x: Some(x.clone()),
                saved: forward.saved.clone(),
                hidden: Some(forward.hidden.clone()),
                layer: operands.layer.clone(),
                wanted: [Wanted::ALL; 2],
                dropout: None,
                sums: [None, None],
            }))
        })?;
        drop((forward, operands));
        self.computes(&format!("linear_add {dtype}"), format!("{rows}x{wide}x{narrow}"), flops, || {
            linear_add(grad.clone(), down.clone(), Some(shift.clone()), None, x.clone())
        })
    }

    /// Rotary embedding, and causal attention over packed heads.
    fn heads(&mut self, scale: &Scale) -> Result<(), Failure> {
        let Scale { sequences, seq_length, heads, .. } = *scale;
        let packed = PackedHeads { n_heads: heads, n_kv_heads: heads, head_dim: 64 };
        let qkv = self.random([sequences, seq_length, packed.width()]);
        let once = sequences * seq_length * heads * 64 * self.dtype.size();
        let frequencies: Vec<f64> = (0..32).map(|pair| 1e4f64.powf(-f64::from(pair) / 32.0)).collect();
        let table = RotaryTable::<B>::new(seq_length, &frequencies, 1.0, &self.device);
        let positions = Tensor::<B, 1, Int>::arange(0..seq_length as i64, &self.device);
        let positions = positions.reshape([1, seq_length]).expand([sequences, seq_length]);
        self.moves("qkv_rotary", format!("{sequences}x{seq_length}x{heads}x64"), 6 * once, || {
            qkv_rotary(qkv.clone(), packed, &table, positions.clone())
        })?;
        let norms = HeadNorms { query: Norm::rms(self.weights([64]), 1e-6), key: Norm::rms(self.weights([64]), 1e-6) };
        self.moves("qkv_norm", format!("{sequences}x{seq_length}x{heads}x64"), 6 * once, || {
            qkv_norm(qkv.clone(), packed, norms.clone())
        })?;
        drop(qkv);
        for [batch_size, heads, seq_length, head_dim] in scale.attention {
            let packed = PackedHeads { n_heads: *heads, n_kv_heads: *heads, head_dim: *head_dim };
            let qkv = self.random([*batch_size, *seq_length, packed.width()]);
            let grad = self.random([*batch_size, *seq_length, *heads, *head_dim]);
            let (mask, options) = (AttentionMask::Causal { window: None }, AttentionOptions::new(*head_dim));
            // Half of the scores are masked.
            let product = (batch_size * heads * seq_length * seq_length * head_dim) as f64;
            let case = || format!("{batch_size}x{heads}x{seq_length}x{head_dim}");
            self.computes("attention forward causal", case(), 2.0 * product, || {
                qkv_attention(qkv.clone(), packed, &mask, options)
            })?;
            let forward = QkvAttentionForward { qkv: qkv.clone(), heads: packed, mask: mask.clone(), options };
            let saved = B::qkv_attention_forward(Checked::new(forward));
            self.computes("attention backward causal", case(), 5.0 * product, || {
                B::qkv_attention_backward(Checked::new(QkvAttentionBackward {
                    grad: grad.clone(),
                    qkv: qkv.clone(),
                    heads: packed,
                    saved: saved.clone(),
                    mask: mask.clone(),
                    options,
                }))
            })?;
        }
        Ok(())
    }

    /// Embedding, and output head with loss or sampling.
    fn vocabulary(&mut self, scale: &Scale) -> Result<(), Failure> {
        let Scale { sequences, seq_length, heads, vocabulary, .. } = *scale;
        let (rows, d_model, size) = (sequences * seq_length, heads * 64, self.dtype.size());
        let dtype = FloatDType::from(self.dtype);
        {
            let (rows, width) = (scale.rows, scale.width);
            let tokens = self.tokens(rows, vocabulary);
            let ids = tokens.clone().reshape([1, rows]);
            let table = self.weights([vocabulary, width]);
            let case = || format!("{rows} of {vocabulary}x{width}");
            self.moves("embed", case(), rows * width * (4 + size), || embed(table.clone(), ids.clone(), dtype))?;
            let grad = self.random([rows, width]);
            self.moves("embed backward", case(), rows * width * size + vocabulary * width * 4, || {
                B::embed_backward(Checked::new(EmbedBackward {
                    grad: grad.clone(),
                    tokens: ids.clone(),
                    vocabulary,
                    sum: None,
                }))
            })?;
        }
        let tokens = self.tokens(rows, vocabulary);
        let (hidden, weight) = (self.random([rows, d_model]), self.random([vocabulary, d_model]));
        let flops = 2.0 * (rows * d_model * vocabulary) as f64;
        let loss = |wanted| {
            B::head_loss_forward(Checked::new(HeadLossForward {
                hidden: hidden.clone(),
                weight: Weight::Float(weight.clone()),
                targets: tokens.clone(),
                options: HeadLossOptions::new(),
                wanted,
            }))
        };
        let (case, dtype) = (|| format!("{rows}x{d_model}x{vocabulary}"), self.name);
        self.computes(&format!("head_loss {dtype}"), case(), flops, || loss(HeadLossWanted::Nothing))?;
        self.computes(&format!("head_loss with gradients {dtype}"), case(), 3.0 * flops, || {
            loss(HeadLossWanted::Both)
        })?;

        // A head of width 2,560 over GPT-2's vocabulary, as in decoders.
        let sampling = Sampling::greedy().with_temperature(0.8).with_top_k(Some(50)).with_top_p(Some(0.9));
        let weight = self.random([50_257, 2560]);
        for rows in [1, 32] {
            let hidden = self.random([rows, 2560]);
            let row = |row: usize| SampledRow::from(sampling.with_seed(3, row as u64));
            let drawn = SampledRows::new(&(0..rows).map(row).collect::<Vec<_>>(), &weight.device());
            let positions = Tensor::<B, 1, Int>::zeros([rows], &weight.device());
            let seconds = seconds::<B, _>(&self.device, self.repeats, || {
                Ok(head_sample(hidden.clone(), weight.clone(), &drawn, positions.clone(), None))
            })?;
            let values = seconds.iter().map(|seconds| 1e6 * seconds).collect();
            let what = "head 2560x50257 + softmax + top-k 50 + top-p 0.9 + sample";
            let measured = Measurement::new(what, format!("B={rows}"), "us", values);
            let floor = 1e6 * (50_257 * 2560 * size) as f64 / self.ceilings.bytes_per_second;
            let share = floor / measured.value;
            (self.show)(measured.of(share, "a copy's speed, by the weight alone"))?;
        }
        Ok(())
    }

    /// One optimizer step over a model's number of parameters, in matrices of a few million.
    fn parameters(&mut self, scale: &Scale) -> Result<(), Failure> {
        const MATRIX: usize = 2_359_296;
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
            value: self.weights([MATRIX]),
            gradient: self.weights([MATRIX]),
            first_moment: self.weights([MATRIX]),
            second_moment: self.weights([MATRIX]).abs(),
            decays: true,
            copy: (self.dtype != DType::F32).then(|| self.random([MATRIX])),
        };
        let mut parameters: Vec<AdamWParameter<B>> = (0..scale.parameters.div_ceil(MATRIX)).map(parameter).collect();
        // The gradient read twice, value and moments read and written, the copy written.
        let copy = if self.dtype == DType::F32 { 0 } else { self.dtype.size() };
        let bytes = parameters.len() * MATRIX * (4 * 8 + copy);
        let case = format!("{} parameters", parameters.len() * MATRIX);
        self.moves("optimizer_step", case, bytes, || {
            let norm;
            (parameters, norm) = optimizer_step(std::mem::take(&mut parameters), &adamw);
            norm
        })
    }
}
