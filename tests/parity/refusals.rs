//! Operands that do not fit: each public operation refuses each of them by name, before it launches
//! anything.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::{DType, FloatDType, Int, Tensor, TensorData};
use fireclay_kernels::operands::{Checked, LinearBackward, LoraBackward};
use fireclay_kernels::{
    Activation, ActivationKind, AdamW, AdamWParameter, AttentionMask, AttentionOptions, Backend, CacheDType, CachedRow,
    CachedTokens, DecodeBlock, DecodeModel, DecodePlan, DecodeRouter, Dropout, ExpertChoice, ExpertsLayer,
    FeedForwardLayer, Format, HeadLossOptions, HeadNorms, LayerCache, LoraLayer, LoraWanted, MultiStep, Norm,
    PackedHeads, Penalties, Placement, QuantizedWeight, RandomKey, RotaryTable, SampledRow, SampledRows, Sampling,
    StepDraw, TokenCounts, Wanted, Weight, activate, attention, attention_weights, cached_attention, choose_experts,
    compile_ahead, decode_step, dropout, embed, embed_add, expert_loads, experts, feed_forward, head_log_probs,
    head_loss, head_sample, linear, linear_add, lora, next_positions, norm, norm_gate_up, norm_linear, optimizer_step,
    qkv_attention, qkv_norm, qkv_rotary, reshape, rotary, side_loss, sink_attention,
};

use crate::backend_test;
use crate::skip::skip;

/// Asserts that `call` panics with a message that begins with `op` and contains all of `parts`.
#[track_caller]
fn refused<T>(op: &str, parts: &[&str], call: impl FnOnce() -> T) {
    let Err(panic) = catch_unwind(AssertUnwindSafe(call)) else { panic!("{op} takes what {parts:?} should name") };
    let text = panic.downcast_ref::<String>().cloned();
    let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| text.to_string())).unwrap_or_default();
    assert!(text.starts_with(&format!("{op}: ")), "{op} names itself: {text}");
    for part in parts {
        assert!(text.contains(part), "{op} names {part}: {text}");
    }
}

/// Makes operands.
struct Make<B: Backend>(B::Device);

impl<B: Backend> Make<B> {
    fn float<const D: usize>(&self, dims: [usize; D]) -> Tensor<B, D> {
        // An empty launch is an error on CUDA, and Burn makes one to fill an empty tensor.
        match dims.contains(&0) {
            true => Tensor::empty(dims, (&self.0, DType::F32)),
            false => Tensor::ones(dims, (&self.0, DType::F32)),
        }
    }

    fn ints<const D: usize>(&self, dims: [usize; D]) -> Tensor<B, D, Int> {
        if dims.contains(&0) { Tensor::empty(dims, &self.0) } else { Tensor::ones(dims, &self.0) }
    }

    /// Another float dtype that the device supports, besides f32.
    fn half(&self) -> Option<DType> {
        [DType::BF16, DType::F16].into_iter().find(|dtype| B::supports_dtype(&self.0, *dtype))
    }

    /// Another device, possibly of the same hardware, as with WGPU.
    fn elsewhere(&self) -> Option<Self> {
        #[cfg(feature = "wgpu")]
        {
            let device: Box<dyn Any> = Box::new(burn::backend::wgpu::WgpuDevice::Cpu);
            if let Ok(device) = device.downcast::<B::Device>() {
                return Some(Self(*device));
            }
        }
        let _: Option<Box<dyn Any>> = None;
        None
    }

    fn rms(&self, width: usize) -> Norm<B> {
        Norm::rms(self.float([width]), 1e-6)
    }

    fn table(&self, positions: usize, half: usize) -> RotaryTable<B> {
        RotaryTable::new(positions, &vec![0.5; half], 1.0, &self.0)
    }

    fn bytes(&self, [rows, columns]: [usize; 2]) -> QuantizedWeight<B> {
        let values = vec![1.0; rows * columns];
        QuantizedWeight::quantize(Format::Int8, &values, [rows, columns], &self.0)
            .expect("the device works")
            .expect("rows of multiples of four")
    }
}

const GATED: Activation = Activation { kind: ActivationKind::Silu, gated: true };
const PLAIN: Activation = Activation { kind: ActivationKind::Silu, gated: false };

backend_test!(norms_and_activations_refuse_what_does_not_fit::<B>(device) {
    let make = Make::<B>(device);
    let x = || make.float([3, 8]);
    refused("norm", &["gamma [7]", "x [3, 8]"], || norm(x(), &make.rms(7)));
    let layer = |beta| Norm::layer(make.float([8]), Some(make.float([beta])), 1e-5);
    refused("norm", &["beta [9]", "x [3, 8]"], || norm(x(), &layer(9)));
    refused("norm", &["x [0, 8] is empty"], || norm(make.float([0, 8]), &make.rms(8)));
    refused("norm", &["x [3, 0] is empty"], || norm(make.float([3, 0]), &make.rms(0)));
    refused("activate", &["even width", "[3, 7]"], || activate(make.float([3, 7]), GATED));
    refused("activate", &["empty"], || activate(make.float([0, 8]), PLAIN));
    let drop = Dropout { probability: 0.5, key: RandomKey::new(1) };
    refused("dropout", &["empty"], || dropout(make.float([0, 8]), drop));
    let head_norms = |query: Norm<B>, key: Norm<B>| HeadNorms { query, key };
    let packed = PackedHeads { n_heads: 2, n_kv_heads: 1, head_dim: 4 };
    let normed = |width: usize, norms: HeadNorms<B>| qkv_norm(make.float([1, 3, width]), packed, norms);
    refused("qkv_norm", &["qkv [1, 3, 15]"], || normed(15, head_norms(make.rms(4), make.rms(4))));
    refused("qkv_norm", &["gamma [5]"], || normed(16, head_norms(make.rms(4), make.rms(5))));
    let shifted = Norm::layer(make.float([4]), None, 1e-5);
    refused("qkv_norm", &["RMS norms without a shift"], || normed(16, head_norms(make.rms(4), shifted)));
    refused("side_loss", &["loss [2]"], || side_loss(x(), make.float([2])));
    refused("side_loss", &["empty"], || side_loss(make.float([0, 8]), make.float([1])));
    refused("reshape", &["[5, 5]", "[3, 8]"], || reshape(x(), [5, 5]));
    refused("reshape", &["[3, 8]"], || reshape(x(), [usize::MAX, 8, 2]));
    if let Some(other) = make.elsewhere() {
        refused("norm", &["gamma is on"], || norm(x(), &other.rms(8)));
    }
});

backend_test!(projections_refuse_what_does_not_fit::<B>(device) {
    let make = Make::<B>(device);
    // Skinny, and not.
    for rows in [3, 40] {
        let (x, weight, bias) = (|| make.float([rows, 8]), || make.float([16, 8]), |size| Some(make.float([size])));
        let dims = format!("x [{rows}, 8]");
        let narrow = || make.float([16, 7]);
        refused("linear", &["weight [16, 7]", &dims], || linear(x(), narrow(), None));
        refused("linear", &["bias [15]", "weight [16, 8]"], || linear(x(), weight(), bias(15)));
        refused("linear", &["weight [0, 8] is empty"], || linear(x(), make.float([0, 8]), None));
        refused("linear", &["x [0, 8] is empty"], || linear(make.float([0, 8]), weight(), None));
        refused("norm_linear", &["gamma [9]", &dims], || norm_linear(x(), Some(&make.rms(9)), weight(), None));
        refused("norm_linear", &["weight [16, 7]", &dims], || norm_linear(x(), Some(&make.rms(8)), narrow(), None));
        for (rows, columns) in [(rows - 1, 16), (rows + 1, 16), (rows, 15), (rows, 17)] {
            let residual = make.float([rows, columns]);
            let named = format!("residual [{rows}, {columns}]");
            refused("linear_add", &[&named, &dims], || linear_add(x(), weight(), None, None, residual));
        }
        refused("linear_add", &["bias [17]"], || linear_add(x(), weight(), bias(17), None, make.float([rows, 16])));
        refused("norm_gate_up", &["even width", "[15, 8]"], || {
            norm_gate_up(x(), None, make.float([15, 8]), None, GATED)
        });
        refused("norm_gate_up", &["gamma [1]"], || norm_gate_up(x(), Some(&make.rms(1)), weight(), None, PLAIN));
        refused("norm_gate_up", &["bias [8]"], || norm_gate_up(x(), None, weight(), bias(8), GATED));
        let layer = |up: [usize; 2], activation, down: [usize; 2]| FeedForwardLayer {
            up: make.float(up).into(),
            up_bias: None,
            activation,
            down: make.float(down).into(),
            down_bias: None,
        };
        let fits = || layer([16, 8], GATED, [8, 8]);
        let apply = |norm: Option<usize>, layer: FeedForwardLayer<B>, dropout| {
            feed_forward(x(), norm.map(|size| make.rms(size)).as_ref(), layer, dropout)
        };
        refused("feed_forward", &["up [16, 7]", &dims], || apply(None, layer([16, 7], GATED, [8, 8]), None));
        refused("feed_forward", &["even width", "15"], || apply(None, layer([15, 8], GATED, [8, 7]), None));
        refused("feed_forward", &["down [8, 16]", &dims], || apply(None, layer([16, 8], GATED, [8, 16]), None));
        refused("feed_forward", &["down [8, 8]", &dims], || apply(None, layer([16, 8], PLAIN, [8, 8]), None));
        refused("feed_forward", &["down [7, 8]", &dims], || apply(None, layer([16, 8], GATED, [7, 8]), None));
        refused("feed_forward", &["gamma [9]", &dims], || apply(Some(9), fits(), None));
        refused("feed_forward", &["up's bias [8]"], || {
            apply(None, FeedForwardLayer { up_bias: bias(8), ..fits() }, None)
        });
        refused("feed_forward", &["down's bias [16]"], || {
            apply(None, FeedForwardLayer { down_bias: bias(16), ..fits() }, None)
        });
        let low_rank = |weight: [usize; 2], a: [usize; 2], b: [usize; 2], activation| LoraLayer {
            weight: make.float(weight).into(),
            bias: None,
            a: make.float(a).into(),
            b: make.float(b).into(),
            scale: 1.0,
            activation,
        };
        let fitting = || low_rank([16, 8], [4, 8], [16, 4], None);
        let adapted = |layer: LoraLayer<B>, residual: Option<Tensor<B, 2>>| lora(x(), layer, residual);
        refused("lora", &["weight [16, 7]", &dims], || adapted(low_rank([16, 7], [4, 8], [16, 4], None), None));
        refused("lora", &["a [4, 7]", &dims], || adapted(low_rank([16, 8], [4, 7], [16, 4], None), None));
        refused("lora", &["b [15, 4]", &dims], || adapted(low_rank([16, 8], [4, 8], [15, 4], None), None));
        refused("lora", &["b [16, 5]", &dims], || adapted(low_rank([16, 8], [4, 8], [16, 5], None), None));
        refused("lora", &["bias [15]", &dims], || adapted(LoraLayer { bias: bias(15), ..fitting() }, None));
        refused("lora", &["even width", "15"], || adapted(low_rank([15, 8], [4, 8], [15, 4], Some(GATED)), None));
        refused("lora", &["residual [1, 16]"], || adapted(fitting(), Some(make.float([1, 16]))));
        refused("lora", &["an activation is the last part"], || {
            adapted(LoraLayer { activation: Some(PLAIN), ..fitting() }, Some(make.float([rows, 16])))
        });
        refused("lora", &["a is quantized"], || adapted(LoraLayer { a: make.bytes([4, 8]).into(), ..fitting() }, None));
        refused("lora backward", &["grad [1, 16]"], || {
            B::lora_backward(Checked::new(LoraBackward {
                grad: make.float([1, 16]),
                x: x(),
                inner: make.float([rows, 4]),
                layer: fitting(),
                saved: None,
                wanted: LoraWanted::ALL,
                sums: [None, None],
            }))
        });
        // Four experts, two for each row.
        let mixed = |chosen: [usize; 2], weights: [usize; 2], up: [usize; 2], down: [usize; 2], limit: Option<f64>| {
            let layer = ExpertsLayer {
                up: make.float(up).into(),
                up_bias: None,
                activation: if limit == Some(2.0) { PLAIN } else { GATED },
                limit,
                down: make.float(down).into(),
                down_bias: None,
            };
            experts(x(), Tensor::zeros(chosen, &make.0), make.float(weights), layer)
        };
        let (two, up, down) = ([rows, 2], [64, 8], [32, 8]);
        refused("experts", &["up [64, 7]", &dims], || mixed(two, two, [64, 7], down, None));
        refused("experts", &["up [60, 8]", &dims], || mixed(two, two, [60, 8], down, None));
        refused("experts", &["down [7, 8]", &dims], || mixed(two, two, up, [7, 8], None));
        refused("experts", &["down [33, 8]", &dims], || mixed(two, two, up, [33, 8], None));
        refused("experts", &["5 of 4 experts"], || mixed([rows, 5], [rows, 5], up, down, None));
        refused("experts", &["chosen", &dims], || mixed([rows + 1, 2], two, up, down, None));
        refused("experts", &["weights", &dims], || mixed(two, [rows, 1], up, down, None));
        refused("experts", &["limit"], || mixed(two, two, up, down, Some(0.0)));
        refused("experts", &["limit"], || mixed(two, two, [32, 8], down, Some(2.0)));
        refused("choose_experts", &["9 of 8 experts"], || choose_experts(x(), 9));
        refused("choose_experts", &["0 of 8 experts"], || choose_experts(x(), 0));
        refused("choose_experts", &["1025 experts"], || choose_experts(make.float([1, 1025]), 1));
        refused("expert_loads", &["no experts"], || {
            expert_loads(Tensor::<B, 2, Int>::zeros([1, 1], &make.0), 0)
        });
        // The same with a quantized weight.
        refused("linear", &["weight [16, 3]", &dims], || linear(x(), make.bytes([16, 12]), None));
        refused("linear", &["bias [4]"], || linear(x(), make.bytes([16, 8]), bias(4)));
        refused("norm_linear", &["gamma [12]"], || norm_linear(x(), Some(&make.rms(12)), make.bytes([16, 8]), None));
        refused("linear_add", &["residual"], || linear_add(x(), make.bytes([16, 8]), None, None, make.float([1, 16])));
        refused("linear backward", &["weight is quantized"], || {
            Checked::new(LinearBackward {
                grad: make.float([rows, 16]),
                x: Some(x()),
                weight: make.bytes([16, 8]).into(),
                bias: None,
                wanted: Wanted::ALL,
                activation: None,
                dropout: None,
                sum: None,
            })
        });
        refused("linear backward", &["x is missing"], || {
            Checked::new(LinearBackward {
                grad: make.float([rows, 16]),
                x: None,
                weight: make.float([16, 8]).into(),
                bias: None,
                wanted: Wanted::ALL,
                activation: None,
                dropout: None,
                sum: None,
            })
        });
        let mut short = make.bytes([16, 8]);
        short.scales = Some(make.float([15]));
        refused("linear", &["scales [15]", "weight [16, 2]"], || linear(x(), short, None));
        if let Some(other) = make.elsewhere() {
            refused("linear", &["weight is on"], || linear(x(), other.float([16, 8]), None));
            refused("linear", &["bias is on"], || linear(x(), weight(), Some(other.float([16]))));
            refused("linear_add", &["residual is on"], || {
                linear_add(x(), weight(), None, None, other.float([rows, 16]))
            });
        }
    }
});

backend_test!(embeddings_refuse_what_does_not_fit::<B>(device) {
    let make = Make::<B>(device);
    let (table, tokens) = (|| make.float([5, 8]), || make.ints([2, 3]));
    for x in [[1, 3, 8], [2, 4, 8], [2, 3, 7]] {
        let named = format!("x {x:?}");
        refused("embed_add", &[&named, "tokens [2, 3]"], || embed_add(table(), tokens(), make.float(x)));
    }
    refused("embed", &["tokens [2, 0] is empty"], || embed(table(), make.ints([2, 0]), FloatDType::F32));
    refused("embed", &["table [0, 8] is empty"], || embed(make.float([0, 8]), tokens(), FloatDType::F32));
    refused("embed", &["F64"], || embed(table(), tokens(), FloatDType::F64));
    let mut short = make.bytes([5, 8]);
    short.scales = Some(make.float([4]));
    refused("embed", &["scales [4]"], || embed(short, tokens(), FloatDType::F32));
    if let Some(other) = make.elsewhere() {
        refused("embed", &["table is on"], || embed(other.float([5, 8]), tokens(), FloatDType::F32));
    }
});

backend_test!(attention_refuses_what_does_not_fit::<B>(device) {
    let make = Make::<B>(device);
    let options = AttentionOptions::new(8);
    let mask = || AttentionMask::None;
    let call = |q: [usize; 4], k: [usize; 4], v: [usize; 4], mask: AttentionMask<B>| {
        attention(make.float(q), make.float(k), make.float(v), &mask, options)
    };
    let good = [2, 4, 5, 8];
    let kv = [2, 2, 6, 8];
    for cap in [0.0, -1.0, f64::NAN] {
        let options = options.with_softcap(Some(cap));
        let capped = || attention(make.float(good), make.float(kv), make.float(kv), &mask(), options);
        refused("attention", &["softcap"], capped);
    }
    for key in [[1, 2, 6, 8], [2, 3, 6, 8], [2, 2, 6, 7]] {
        let named = format!("key {key:?}");
        refused("attention", &[&named, "query [2, 4, 5, 8]"], || call(good, key, key, mask()));
    }
    for value in [[1, 2, 6, 8], [2, 1, 6, 8], [2, 2, 5, 8], [2, 2, 7, 8], [2, 2, 6, 9]] {
        let named = format!("value {value:?}");
        refused("attention", &[&named, "key [2, 2, 6, 8]"], || call(good, kv, value, mask()));
    }
    refused("attention", &["empty"], || call([2, 4, 0, 8], kv, kv, mask()));
    let sunk = |sinks: usize, key: [usize; 4]| {
        let (query, key, value) = (make.float(good), make.float(key), make.float(kv));
        sink_attention(query, key, value, make.float([sinks]), &mask(), AttentionOptions::new(8))
    };
    refused("sink_attention", &["sinks [3]", "query [2, 4, 5, 8]"], || sunk(3, kv));
    refused("sink_attention", &["value"], || sunk(4, [2, 2, 5, 8]));
    refused("attention_weights", &["sinks [5]"], || {
        attention_weights(
            make.float(good),
            make.float(kv),
            Some(make.float([5])),
            &mask(),
            AttentionOptions::new(8),
        )
    });
    refused("attention", &["see none"], || call([2, 4, 7, 8], kv, kv, AttentionMask::Causal { window: None }));
    refused("attention", &["no keys"], || call(good, kv, kv, AttentionMask::Causal { window: Some(0) }));
    for positions in [[1, 5], [2, 4], [5, 2]] {
        let mask = AttentionMask::Positions { positions: make.ints(positions), window: None };
        let named = format!("positions {positions:?}");
        refused("attention", &[&named, "query"], || call(good, kv, kv, mask));
    }
    for starts in [[1, 6], [2, 5]] {
        let mask = AttentionMask::Documents { starts: make.ints(starts), window: None };
        refused("attention", &[&format!("starts {starts:?}"), "query"], || call([2, 4, 6, 8], kv, kv, mask));
    }
    let starts = make.ints([2, 5]);
    refused("attention", &["documents want as many"], || {
        call(good, kv, kv, AttentionMask::Documents { starts, window: None })
    });
    for lengths in [1, 3] {
        let named = format!("lengths [{lengths}]");
        refused("attention", &[&named], || call(good, kv, kv, AttentionMask::Lengths(make.ints([lengths]))));
    }
    if let Some(dtype) = make.half() {
        let key = || make.float(kv).cast(dtype);
        refused("attention", &["key is"], || attention(make.float(good), key(), key(), &mask(), options));
    }

    let heads = PackedHeads { n_heads: 4, n_kv_heads: 2, head_dim: 8 };
    let packed = |width: usize, heads, mask: AttentionMask<B>| {
        qkv_attention(make.float([2, 5, width]), heads, &mask, options)
    };
    refused("qkv_attention", &["qkv [2, 5, 63]", "n_heads: 4"], || packed(63, heads, mask()));
    refused("qkv_attention", &["divide"], || packed(80, PackedHeads { n_kv_heads: 3, ..heads }, mask()));
    refused("qkv_attention", &["divide"], || packed(32, PackedHeads { n_kv_heads: 0, ..heads }, mask()));
    let huge = PackedHeads { n_heads: 1 << 62, n_kv_heads: 1 << 62, head_dim: 8 };
    refused("qkv_attention", &["fit"], || packed(64, huge, mask()));
    refused("qkv_attention", &["lengths [3]"], || packed(64, heads, AttentionMask::Lengths(make.ints([3]))));
    if let Some(other) = make.elsewhere() {
        let lengths = AttentionMask::Lengths(other.ints([2]));
        refused("qkv_attention", &["lengths is on"], || packed(64, heads, lengths));
    }
});

backend_test!(rotary_embeddings_refuse_what_does_not_fit::<B>(device) {
    let make = Make::<B>(device);
    let heads = PackedHeads { n_heads: 4, n_kv_heads: 2, head_dim: 8 };
    let x = || make.float([2, 4, 5, 8]);
    let qkv = || make.float([2, 5, 64]);
    refused("rotary", &["cosines [10, 5]", "x [2, 4, 5, 8]"], || rotary(x(), &make.table(10, 5), make.ints([2, 5])));
    refused("rotary", &["cosines [10, 3]"], || rotary(make.float([2, 4, 5, 7]), &make.table(10, 3), make.ints([2, 5])));
    refused("qkv_rotary", &["cosines [10, 5]"], || qkv_rotary(qkv(), heads, &make.table(10, 5), make.ints([2, 5])));
    refused("qkv_rotary", &["qkv [2, 5, 60]"], || {
        qkv_rotary(make.float([2, 5, 60]), heads, &make.table(10, 4), make.ints([2, 5]))
    });
    for positions in [[1, 5], [2, 4], [5, 2]] {
        let named = format!("positions {positions:?}");
        refused("rotary", &[&named], || rotary(x(), &make.table(10, 4), make.ints(positions)));
        refused("qkv_rotary", &[&named], || qkv_rotary(qkv(), heads, &make.table(10, 4), make.ints(positions)));
    }
    let table = RotaryTable { sin: make.float([9, 4]), ..make.table(10, 4) };
    refused("rotary", &["sines [9, 4]", "cosines [10, 4]"], || rotary(x(), &table, make.ints([2, 5])));
    refused("next_positions", &["too far"], || next_positions(make.ints([2, 1]), usize::MAX));
});

backend_test!(decode_step_refuses_what_does_not_fit::<B>(device) {
    let make = Make::<B>(device);
    let heads = PackedHeads { n_heads: 4, n_kv_heads: 2, head_dim: 8 };
    let model = |heads: PackedHeads, window| {
        let weight = |rows, columns| Weight::Float(make.float([rows, columns]));
        let block = DecodeBlock {
            attention_norm: make.rms(32),
            qkv: weight(64, 32),
            qkv_bias: None,
            placement: Placement::none(),
            output: weight(32, heads.n_heads * heads.head_dim),
            output_bias: None,
            feed_forward_norm: make.rms(32),
            router: None,
            up: weight(64, 32),
            up_bias: None,
            down: weight(32, 32),
            down_bias: None,
        };
        DecodeModel {
            embedding: weight(40, 32),
            position_embedding: None,
            head: weight(40, 32),
            blocks: vec![block],
            final_norm: make.rms(32),
            heads,
            activation: GATED,
            activations: FloatDType::F32,
            window,
        }
    };
    let caches =
        |pages, heads| vec![LayerCache::<B>::new(pages, 64, heads, CacheDType::Float(FloatDType::F32), &make.0)];
    let op = "decode_step";
    let new = |other, window| DecodePlan::new(model(other, window), &caches(3, heads));
    refused(op, &["window of no keys"], || new(heads, Some(0)));
    refused(op, &["divide the query heads"], || new(PackedHeads { n_heads: 2, n_kv_heads: 3, ..heads }, None));
    refused(op, &["there are some"], || new(PackedHeads { n_heads: 8, n_kv_heads: 0, ..heads }, None));
    refused(op, &["a cache for each block"], || DecodePlan::new(model(heads, None), &[]));
    let with_router = |rows, k| {
        let mut model = model(heads, None);
        let choice = ExpertChoice { experts_per_token: k, sigmoid: false, normalized: true, scale: 1.0 };
        let weight = make.float([rows, 32]);
        model.blocks[0].router = Some(DecodeRouter { weight, bias: None, choice_bias: None, choice });
        DecodePlan::new(model, &caches(3, heads))
    };
    refused(op, &["down"], || with_router(2, 1));
    refused(op, &["2 of 1 experts per token"], || with_router(1, 2));
    // If there is a kernel.
    let mut own = caches(3, heads);
    if let Ok(plan) = DecodePlan::new(model(heads, None), &own) {
        let row = |page: u32| CachedRow { pages: [page].into(), tokens: 1, keys: 4 };
        let at = |pages: &[u32]| CachedTokens::<B>::new(pages.iter().copied().map(row).collect(), None, &make.0);
        let mut step = |at: &CachedTokens<B>, draw: Option<StepDraw<'_, B>>, steps: usize| {
            let ahead = MultiStep { steps, stop_tokens: None };
            decode_step(&plan, make.ints([at.rows().len()]), at, &mut own, draw, ahead)
        };
        refused(op, &["page 3", "cache of 3"], || step(&at(&[3]), None, 1));
        refused(op, &["page 2", "listed twice"], || step(&at(&[2, 2]), None, 1));
        let two = SampledRows::<B>::new(&vec![Sampling::greedy().into(); 2], &make.0);
        let lined = SampledRows::<B>::new(&[SampledRow { sampling: Sampling::greedy(), line: Some(2) }], &make.0);
        for (named, rows) in [("rows", &two), ("line 2 without counts", &lined)] {
            refused(op, &[named], || step(&at(&[2]), Some(StepDraw { rows, counts: None }), 1));
        }
        // More than there are positions after it on its page.
        refused(op, &["62 steps"], || step(&at(&[2]), None, 62));
        let mut rehearsed = false;
        compile_ahead::<B>(&make.0, || {
            rehearsed = true;
            refused(op, &["not in `compile_ahead`"], || step(&at(&[2]), None, 1));
        });
        assert!(rehearsed, "a device with kernels for whole steps compiles ahead");
        step(&at(&[2]), None, 1).expect("what fits is taken");
        // The kernel has the addresses of the plan's caches, and would not write to others.
        for mut others in [caches(3, heads), caches(4, heads)] {
            refused(op, &["other caches than those that the plan was made with"], || {
                decode_step(&plan, make.ints([1]), &at(&[2]), &mut others, None, MultiStep::one())
            });
        }
    } else {
        skip("no kernel for whole decode steps is for this device");
    }
});

backend_test!(cached_attention_refuses_what_does_not_fit::<B>(device) {
    let make = Make::<B>(device);
    let heads = PackedHeads { n_heads: 4, n_kv_heads: 2, head_dim: 8 };
    let new = |pages, page_tokens, heads| {
        LayerCache::<B>::new(pages, page_tokens, heads, CacheDType::Float(FloatDType::F32), &make.0)
    };
    let bare = || Placement::none();
    let row = |pages: &[u32], tokens, keys| CachedRow { pages: pages.into(), tokens, keys };
    let at = |rows: &[CachedRow]| CachedTokens::<B>::new(rows.to_vec(), None, &make.0);
    let (op, options) = ("cached_attention", AttentionOptions::new(8));
    for tokens in [1, 3] {
        let qkv = || make.float([2 * tokens, 64]);
        let call = |placement, at: CachedTokens<B>, mut cache: LayerCache<B>| {
            cached_attention(qkv(), heads, placement, options, &at, &mut cache)
        };
        let here = || at(&[row(&[0], tokens, 4), row(&[2, 1], tokens, 5)]);
        let other = PackedHeads { n_kv_heads: 1, ..heads };
        refused(op, &["cache [3, 1, 4, 8]"], || call(bare(), here(), new(3, 4, other)));
        refused(op, &["cache [3, 2, 4, 4]"], || call(bare(), here(), new(3, 4, PackedHeads { head_dim: 4, ..heads })));
        refused(op, &["page 2", "cache of 2"], || call(bare(), here(), new(2, 4, heads)));
        refused(op, &["4 keys in 1 pages of 2"], || call(bare(), here(), new(3, 2, heads)));
        refused(op, &["positions"], || call(bare(), at(&[row(&[0], tokens, 4)]), new(3, 4, heads)));
        let normed = |query: usize, key: usize| Placement {
            query_norm: Some(make.rms(query)),
            key_norm: Some(make.rms(key)),
            ..bare()
        };
        refused(op, &["gamma [7]"], || call(normed(7, 8), here(), new(3, 4, heads)));
        refused(op, &["gamma [9]"], || call(normed(8, 9), here(), new(3, 4, heads)));
        let half = Placement { key_norm: None, ..normed(8, 8) };
        refused(op, &["or none"], || call(half, here(), new(3, 4, heads)));
        let rotated = Placement { rotary: Some(make.table(10, 5)), ..bare() };
        refused(op, &["cosines [10, 5]"], || call(rotated, here(), new(3, 4, heads)));
        let sunk = Placement { sinks: Some(make.float([heads.n_heads + 1])), ..bare() };
        refused(op, &["sinks ["], || call(sunk, here(), new(3, 4, heads)));
        let with = |options| cached_attention(qkv(), heads, bare(), options, &here(), &mut new(3, 4, heads));
        refused(op, &["softcap of Some(0.0)"], || with(options.with_softcap(Some(0.0))));
        let dropped = Some(Dropout { probability: 0.5, key: RandomKey::new(1) });
        refused(op, &["dropout"], || with(options.with_dropout(dropped)));
        if let Some(dtype) = make.half() {
            let mut cache = LayerCache::<B>::new(3, 4, heads, CacheDType::Float(FloatDType::from(dtype)), &make.0);
            refused(op, &["cache is"], || cached_attention(qkv(), heads, bare(), options, &here(), &mut cache));
        }
    }
    // Pages that rows write to must be their own; full pages before these may be shared.
    let step = |rows: &[CachedRow]| {
        let tokens = rows.iter().map(|row| row.tokens).sum::<usize>();
        cached_attention(make.float([tokens, 64]), heads, bare(), options, &at(rows), &mut new(4, 4, heads))
    };
    refused(op, &["page 1", "listed twice"], || step(&[row(&[0, 1], 1, 6), row(&[1], 1, 3)]));
    refused(op, &["page 0", "listed twice"], || step(&[row(&[0, 0], 2, 6)]));
    refused(op, &["page 0", "listed twice"], || step(&[row(&[0, 1], 3, 6), row(&[0, 2], 1, 6)]));
    refused(op, &["page 2", "listed twice"], || step(&[row(&[0, 2], 1, 3), row(&[1, 2], 1, 6)]));
    step(&[row(&[0, 1], 1, 6), row(&[0, 2], 2, 6), row(&[0, 1 + 2], 1, 5)]);
    // The check stays valid as rows grow in their pages, and is repeated when pages change.
    let grown = at(&[row(&[0, 1], 1, 4), row(&[2], 1, 2)]);
    let mut cache = new(4, 4, heads);
    let mut next = |at: &CachedTokens<B>| cached_attention(make.float([2, 64]), heads, bare(), options, at, &mut cache);
    next(&grown);
    let grown = grown.next(vec![row(&[0, 1], 1, 5), row(&[2], 1, 3)]);
    next(&grown);
    refused(op, &["page 1", "listed twice"], || next(&grown.next(vec![row(&[0, 1], 1, 6), row(&[2, 1], 1, 4)])));
    compile_ahead::<B>(&make.0, || refused(op, &["not in `compile_ahead`"], || step(&[row(&[0], 1, 1)])));
    refused(op, &["no rows"], || at(&[]));
    refused(op, &["0 new tokens of 3"], || at(&[row(&[0], 0, 3)]));
    refused(op, &["4 new tokens of 3"], || at(&[row(&[0], 4, 3)]));
    refused(op, &["in 0 pages"], || at(&[row(&[], 1, 3)]));
    refused(op, &["one token more"], || at(&[row(&[0], 1, 1)]).next(vec![row(&[0], 1, 3)]));
    refused(op, &["one token more"], || at(&[row(&[0], 2, 2)]).next(vec![row(&[0], 1, 3)]));
    refused(op, &["no room"], || new(2, 0, heads));
    refused(op, &["no room"], || new(usize::MAX / 2, 4, heads));
    refused(op, &["not a power of two"], || new(2, 6, heads));
    let bytes = |heads| LayerCache::<B>::new(3, 4, heads, CacheDType::Int8, &make.0);
    refused(op, &["heads of 12", "multiple of 8"], || bytes(PackedHeads { head_dim: 12, ..heads }));
    let other = PackedHeads { head_dim: 16, ..heads };
    refused(op, &["cache [3, 2, 4, 16]"], || {
        cached_attention(make.float([1, 64]), heads, bare(), options, &at(&[row(&[0], 1, 4)]), &mut bytes(other))
    });
});

backend_test!(losses_and_draws_refuse_what_does_not_fit::<B>(device) {
    let make = Make::<B>(device);
    let loss = |hidden: [usize; 2], weight: [usize; 2], targets: usize| {
        head_loss(make.float(hidden), make.float(weight), make.ints([targets]), HeadLossOptions::new())
    };
    refused("head_loss", &["weight [5, 7]", "hidden [3, 8]"], || loss([3, 8], [5, 7], 3));
    refused("head_loss", &["targets [4]", "hidden [3, 8]"], || loss([3, 8], [5, 8], 4));
    refused("head_loss", &["empty"], || loss([0, 8], [5, 8], 0));
    let log_probs = |hidden: [usize; 2], weight: [usize; 2], targets: usize| {
        head_log_probs(make.float(hidden), make.float(weight), make.ints([targets]), None)
    };
    refused("head_log_probs", &["weight [5, 7]", "hidden [3, 8]"], || log_probs([3, 8], [5, 7], 3));
    refused("head_log_probs", &["targets [4]", "hidden [3, 8]"], || log_probs([3, 8], [5, 8], 4));

    for rows in [3, 40] {
        let sampled = |count: usize| SampledRows::<B>::new(&vec![Sampling::greedy().into(); count], &make.0);
        let drawn = |weight: Weight<B>, sampled: SampledRows<B>| {
            head_sample(make.float([rows, 8]), weight, &sampled, make.ints([rows]), None)
        };
        let weight = || Weight::from(make.float([6, 8]));
        refused("head_sample", &["weight [6, 7]"], || drawn(make.float([6, 7]).into(), sampled(rows)));
        refused("head_sample", &["rows"], || drawn(weight(), sampled(rows - 1)));
        refused("head_sample", &["weight [6, 1]"], || drawn(Weight::Quantized(make.bytes([6, 4])), sampled(rows)));
        refused("head_sample", &["positions"], || {
            head_sample(make.float([rows, 8]), weight(), &sampled(rows), make.ints([rows - 1]), None)
        });
        let lined = |line| SampledRow { sampling: Sampling::greedy(), line };
        let lined = [vec![lined(Some(2))], vec![lined(None); rows - 1]].concat();
        let lined = SampledRows::<B>::new(&lined, &make.0);
        refused("head_sample", &["line 2 without counts"], || drawn(weight(), lined.clone()));
        for (name, broken) in [("counts of the prompts", 0), ("counts of generated tokens", 1), ("biases", 2)] {
            let line = |at: usize| make.float([3, if at == broken { 5 } else { 6 }]);
            let mut counts = TokenCounts { prompt: line(0), written: line(1), bias: line(2) };
            refused("head_sample", &[name], || {
                head_sample(make.float([rows, 8]), weight(), &lined, make.ints([rows]), Some(&mut counts))
            });
        }
        let mut few = TokenCounts::<B>::new(2, 6, &make.0);
        refused("head_sample", &["line 2 of 2"], || {
            head_sample(make.float([rows, 8]), weight(), &lined, make.ints([rows]), Some(&mut few))
        });
    }
    let rows = |rows: &[SampledRow]| SampledRows::<B>::new(rows, &make.0);
    let lined = |line| SampledRow { sampling: Sampling::greedy(), line: Some(line) };
    refused("head_sample", &["two rows have line 3"], || rows(&[lined(3), lined(0), lined(3)]));
    let plain = Sampling::greedy().with_temperature(1.0);
    let penalties = |penalties| plain.with_penalties(penalties);
    for (named, sampling) in [
        ("temperature of -1", plain.with_temperature(-1.0)),
        ("temperature of NaN", plain.with_temperature(f64::NAN)),
        ("temperature of 0.000", plain.with_temperature(1e-50)),
        ("top-p of 0", plain.with_top_p(Some(0.0))),
        ("top-p of 1.5", plain.with_top_p(Some(1.5))),
        ("min-p of 2", plain.with_min_p(Some(2.0))),
        ("min-p of NaN", plain.with_min_p(Some(f64::NAN))),
        ("penalties of 0", penalties(Penalties { repetition: 0.0, ..Penalties::default() })),
        ("and inf", penalties(Penalties { frequency: f64::INFINITY, ..Penalties::default() })),
    ] {
        refused("head_sample", &[named], || rows(&[sampling.into()]));
    }
    refused("head_sample", &["line 2 of 2"], || TokenCounts::<B>::new(2, 6, &make.0).begin(2, &[], &[], &[]));
    refused("head_sample", &["token 6", "6 tokens"], || TokenCounts::<B>::of_prompts(&[&[1, 6]], 6, &make.0));
});

backend_test!(the_optimizer_refuses_what_does_not_fit::<B>(device) {
    let make = Make::<B>(device);
    let adamw = AdamW {
        learning_rate: 1e-3,
        beta_1: 0.9,
        beta_2: 0.99,
        epsilon: 1e-8,
        weight_decay: 0.0,
        max_grad_norm: Some(1.0),
        step: 1,
    };
    let good = || AdamWParameter::<B> {
        value: make.float([6]),
        gradient: make.float([6]),
        first_moment: make.float([6]),
        second_moment: make.float([6]),
        decays: true,
        copy: None,
    };
    let step = |one: AdamWParameter<B>| optimizer_step(vec![good(), one], &adamw);
    refused("optimizer_step", &["gradient [5]", "value [6]"], || {
        step(AdamWParameter { gradient: make.float([5]), ..good() })
    });
    refused("optimizer_step", &["first moment [7]"], || {
        step(AdamWParameter { first_moment: make.float([7]), ..good() })
    });
    refused("optimizer_step", &["second moment [1]"], || {
        step(AdamWParameter { second_moment: make.float([1]), ..good() })
    });
    refused("optimizer_step", &["copy [5]"], || step(AdamWParameter { copy: Some(make.float([5])), ..good() }));
    if let Some(dtype) = make.half() {
        let value = make.float([6]).cast(dtype);
        refused("optimizer_step", &["value is"], || step(AdamWParameter { value: value.clone(), ..good() }));
        refused("optimizer_step", &["one dtype"], || {
            let copied = |copy| AdamWParameter { copy: Some(copy), ..good() };
            optimizer_step(vec![copied(value.clone()), copied(make.float([6]))], &adamw)
        });
    }
});

backend_test!(ids_out_of_range_count_as_the_last::<B>(device) {
    let table =
        Tensor::<B, 2>::from_data(TensorData::new((0..15).map(|x| x as f32).collect::<Vec<_>>(), [5, 3]), &device);
    let bytes: Vec<f32> = (0..20).map(|x| x as f32).collect();
    let bytes = QuantizedWeight::<B>::quantize(Format::Int8, &bytes, [5, 4], &device)
        .expect("the device works")
        .expect("rows of multiples of four");
    let ids = |values: [i32; 4]| Tensor::<B, 2, Int>::from_data([values], &device);
    let (outside, last) = (ids([-1, 5, i32::MIN, i32::MAX]), ids([4, 4, 4, 4]));
    for table in [Weight::from(table), Weight::Quantized(bytes)] {
        let of = |ids: Tensor<B, 2, Int>| embed(table.clone(), ids, FloatDType::F32).into_data();
        assert_eq!(of(outside.clone()), of(last.clone()), "tokens");
    }
    let frequencies = [0.3, 0.7];
    let table = RotaryTable::<B>::new(5, &frequencies, 1.0, &device);
    let x = crate::compare::random::<B, 4>(1, [1, 2, 4, 4], &device);
    let of = |ids: Tensor<B, 2, Int>| rotary(x.clone(), &table, ids).into_data();
    assert_eq!(of(outside.clone()), of(last.clone()), "positions of a rotation");
    let heads = PackedHeads { n_heads: 1, n_kv_heads: 1, head_dim: 4 };
    let qkv = crate::compare::random::<B, 3>(1, [1, 4, 12], &device);
    let of = |ids: Tensor<B, 2, Int>| qkv_rotary(qkv.clone(), heads, &table, ids).into_data();
    assert_eq!(of(outside.clone()), of(last), "positions of a packed rotation");

    let key = crate::compare::random::<B, 4>(2, [1, 2, 5, 4], &device);
    let of = |mask: AttentionMask<B>| {
        attention(x.clone(), key.clone(), key.clone(), &mask, AttentionOptions::new(4)).into_data()
    };
    let positions = |positions| AttentionMask::Positions { positions, window: Some(2) };
    assert_eq!(of(positions(outside)), of(positions(ids([4, 4, 4, 4]))), "positions of a mask");
    let lengths = |length: i32| AttentionMask::Lengths(Tensor::<B, 1, Int>::from_data([length], &device));
    for (given, counted) in [(0, 1), (-7, 1), (i32::MIN, 1), (6, 5), (i32::MAX, 5)] {
        assert_eq!(of(lengths(given)), of(lengths(counted)), "a length of {given}");
    }
});

backend_test!(targets_outside_the_vocabulary_do_not_count::<B>(device) {
    let hidden = crate::compare::random::<B, 2>(1, [4, 8], &device);
    let weight = crate::compare::random::<B, 2>(2, [5, 8], &device);
    let of = |targets: [i32; 4]| {
        let targets = Tensor::<B, 1, Int>::from_data(targets, &device);
        let loss = head_loss(hidden.clone(), weight.clone(), targets, HeadLossOptions::new());
        loss.into_data().iter::<f32>().next().expect("a loss")
    };
    let wanted = of([1, -100, 4, -100]);
    for outside in [-1, 5, 6, i32::MIN, i32::MAX] {
        assert_eq!(of([1, outside, 4, -100]), wanted, "a target of {outside}");
    }
    assert_eq!(of([5, 7, -1, 9]), 0.0, "none counts");
});

backend_test!(logits_that_are_no_numbers_draw_minus_one::<B>(device) {
    for vocabulary in [3usize, 700, 9000] {
        let mut values = vec![0.25f32; 3 * vocabulary];
        values[vocabulary + 1] = f32::NAN;
        values[2 * vocabulary + 2] = 1.0;
        // One column of the hidden states per row: the logits of row `r` are its values.
        let hidden = Tensor::<B, 2>::eye(3, &device);
        let weight = Tensor::<B, 2>::from_data(TensorData::new(values, [3, vocabulary]), &device).transpose();
        let weight = {
            // NaN times zero is NaN: the other rows' logits use a separate weight.
            let rows: Vec<Tensor<B, 2>> = (0..3).map(|row| weight.clone().narrow(1, row, 1)).collect();
            rows
        };
        let draws = Sampling::greedy().with_temperature(1.0);
        let all = [
            Sampling::greedy(),
            draws,
            draws.with_top_k(Some(2)),
            draws.with_top_p(Some(0.5)),
            draws.with_top_k(Some(3)).with_top_p(Some(0.9)).with_min_p(Some(0.01)),
        ];
        for sampling in all {
            for (row, weight) in weight.iter().enumerate() {
                let hidden = hidden.clone().narrow(0, row, 1).narrow(1, row, 1);
                let mut counts = TokenCounts::<B>::of_prompts(&[&[0]], vocabulary, &device);
                let rows = SampledRows::<B>::new(&[SampledRow { sampling, line: Some(0) }], &device);
                let position = Tensor::zeros([1], &device);
                let drawn = head_sample(hidden, weight.clone(), &rows, position, Some(&mut counts));
                let drawn = drawn.into_data().iter::<i64>().next().expect("a word");
                let counted: f32 = counts.written.sum().into_data().iter::<f32>().sum();
                match row {
                    1 => assert_eq!((drawn, counted), (-1, 0.0), "{vocabulary} {sampling:?}"),
                    _ => {
                        assert!((0..vocabulary as i64).contains(&drawn) && counted == 1.0, "{vocabulary} {sampling:?}")
                    }
                }
            }
        }
    }
});
