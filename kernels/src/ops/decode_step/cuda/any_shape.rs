//! Fused decode steps for models of any shape: one launch for up to eight rows, with weights in
//! f32, bf16, f16 or INT8.

use std::sync::Mutex;

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor};
use burn_cubecl::element::BoolElement;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement};

use super::{EXCHANGE, Kept, angles, format_of, halves, integers, kept, launch_tried, matrix, packed};
use crate::cubecl::{contiguous, empty};
use crate::cuda::{self, Arguments, CudaKernel, HOPPER_SHARED_BYTES, LARGEST, NUMBERS, Tried};
use crate::multiprocessors::multiprocessors;
use crate::ops::activation::ActivationKind;
use crate::ops::cached_attention::{CachedTokens, KvStorage};
use crate::ops::decode_step::{Declined, DecodeBlock, DecodeModel, DecodePlanned, DecodeRouter, Decoded, Predicted};
use crate::ops::norm::{Norm, NormKind};
use crate::packed_heads::PackedHeads;
use crate::quant::Format;
use crate::selection::wait_seconds;
use crate::tensor::{float, primitive};

/// Addresses per layer in the table.
const POINTERS: usize = 25;
/// Maximum parameters per layer for which steps of eight rows are faster in one launch: true for
/// GPT-2's 7 million, false for Qwen2.5-0.5B's 15.
const FEW_PARAMETERS: usize = 8_000_000;
/// The row counts that the kernel is compiled for.
const ROWS: [usize; 4] = [1, 2, 4, 8];
/// Warps per block.
const WARPS: usize = 16;
/// Weight rows that a warp multiplies at a time.
const TILE: usize = 2;
/// Bytes that a lane loads at a time.
const LOAD: usize = 16;
/// Maximum experts that a token goes through: a lane of a warp chooses one.
const MOST_CHOICES: usize = 32;
/// Maximum blocks that share the keys of a kv head.
const MOST_SPLITS: usize = 16;
/// The window without a limit.
const MOST_WINDOW: usize = 1 << 30;

/// Compile-time values of the kernel, except for the rows.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Shape {
    n_layers: usize,
    d_model: usize,
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
    /// Of layers without experts; 0 if all have some.
    d_ff: usize,
    experts: Option<Experts>,
    vocab_size: usize,
    page_tokens: usize,
    window: Option<usize>,
    /// The bits of an f32.
    epsilon: u32,
    /// Time limit of waits between blocks.
    wait_seconds: u32,
    layer_norm: bool,
    activation: ActivationKind,
    gated: bool,
    /// Dtype of activations, and of weights and cache unless INT8.
    dtype: DType,
    /// Format of quantized weights.
    format: Option<Format>,
    cache_int8: bool,
    /// Blocks, one per multiprocessor.
    blocks: usize,
    /// Row strides, in elements.
    pitches: Pitches,
}

/// The mixtures of experts of a model, which are alike.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Experts {
    n_experts: usize,
    /// Experts that a token goes through.
    choices: usize,
    d_ff: usize,
    sigmoid: bool,
    normalized: bool,
    /// The bits of an f32.
    scale: u32,
}

/// Row stride of each matrix, in elements.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Pitches {
    qkv: usize,
    output: usize,
    up: usize,
    down: usize,
    experts_up: usize,
    experts_down: usize,
    embedding: usize,
    head: usize,
    positions: usize,
    angles: usize,
}

impl Shape {
    /// Weights that a lane loads at a time.
    fn together(&self) -> usize {
        if self.format == Some(Format::Int8) { LOAD } else { LOAD / self.dtype.size() }
    }

    /// Maximum number of blocks that split a kv head's keys, as in the source.
    fn splits(&self, rows: usize) -> usize {
        let chunks = (self.n_heads / self.n_kv_heads).div_ceil(4);
        (self.blocks / (rows * self.n_kv_heads * chunks)).clamp(1, MOST_SPLITS)
    }

    fn qkv_rows(&self) -> usize {
        (self.n_heads + 2 * self.n_kv_heads) * self.head_dim
    }

    /// Columns between the products of a row's feed-forward layer, of all its experts.
    fn between(&self) -> usize {
        self.d_ff.max(self.experts.as_ref().map_or(0, |experts| experts.choices * experts.d_ff))
    }

    /// Rows of the first and of the second projection.
    fn gates(&self) -> usize {
        if self.gated { 2 } else { 1 }
    }

    /// Words exchanged between blocks, as counted in the source.
    fn words(&self, rows: usize) -> usize {
        let Self { d_model, n_heads, head_dim, blocks, .. } = *self;
        let parts = rows * n_heads * self.splits(rows);
        let of_word = if self.dtype == DType::F32 { 1 } else { 2 };
        let lines = rows * (2 * d_model + self.qkv_rows() + self.between() / of_word + 2 * blocks);
        let logits = rows * self.experts.as_ref().map_or(0, |experts| experts.n_experts);
        lines + logits.next_multiple_of(2) + parts * head_dim + parts.next_multiple_of(2)
    }

    /// Maximum weight rows per block, for `count` weights in one, distributed by `unit`.
    fn own(&self, n: usize, count: usize, unit: usize) -> usize {
        count * unit * (n / unit).div_ceil(self.blocks)
    }

    /// Partial sums of a block's `own` rows of a weight with `k` columns, as in the source: one per
    /// warp that shares a row.
    fn sums(&self, rows: usize, own: usize, k: usize) -> usize {
        self.sharers(own.div_ceil(TILE), k) * own * rows
    }

    /// Warps that share a tile of a weight with `k` columns, of so many.
    fn sharers(&self, tiles: usize, k: usize) -> usize {
        let steps = (k / self.together()).div_ceil(32);
        let taken = |split: usize| (tiles * split).div_ceil(WARPS) * (steps.div_ceil(split) + 2);
        let splits = [1, 2, 4, 8, 16].into_iter().filter(|split| *split <= WARPS.min(steps));
        splits.min_by_key(|split| taken(*split)).unwrap_or(1)
    }

    /// The same sums of experts, and the bytes in which a step's choices are.
    fn of_experts(&self, rows: usize, experts: &Experts) -> (usize, usize) {
        let Experts { n_experts, choices, d_ff, .. } = *experts;
        let (slots, of_output) = (rows * choices, self.own(self.d_model, 1, 2));
        let chosen = n_experts.min(slots);
        let mixers = self.blocks.min(self.d_model / 2);
        let of_up = |chosen: usize| self.gates() * 2 * (chosen * (d_ff / 2)).div_ceil(mixers);
        let up = of_up(chosen) * self.sharers(of_up(choices).div_ceil(TILE), self.d_model);
        let down = chosen * of_output * self.sharers(choices * of_output.div_ceil(TILE), d_ff);
        let routing = rows * n_experts + 3 * slots + 1 + 2 * chosen + rows * chosen;
        (rows * up.max(down).max(WARPS), 4 * routing)
    }

    /// Shared memory in bytes, as counted in the source.
    fn shared_bytes(&self, rows: usize) -> usize {
        let Self { d_model, n_heads, n_kv_heads, head_dim, d_ff, vocab_size, .. } = *self;
        let width = n_heads * head_dim;
        let input = rows * d_model.max(width).max(self.between()) * self.dtype.size();
        let group = n_heads / n_kv_heads;
        let heads = group.div_ceil(group.div_ceil(4));
        let attention = 4 * (heads * head_dim + 2 * head_dim + WARPS * head_dim + WARPS * 2);
        let of_up = self.own(d_ff, self.gates(), 2);
        let (of_experts, routing) = self.experts.as_ref().map_or((0, 0), |experts| self.of_experts(rows, experts));
        let of_output = self.own(d_model, 1, 2);
        let of_qkv = self.own(self.qkv_rows(), 1, 2);
        let products = [
            self.sums(rows, of_qkv, d_model),
            self.sums(rows, of_output, width),
            self.sums(rows, of_up, d_model),
            self.sums(rows, of_output, d_ff),
            self.sums(rows, self.own(vocab_size, 1, 1), d_model),
            of_experts,
        ];
        let sums = 4 * products.into_iter().fold(0, usize::max);
        let others = 4 * rows * of_output;
        let layers =
            (input.max(attention).next_multiple_of(16) + sums.next_multiple_of(16) + others).next_multiple_of(16);
        layers + 2 * 8 * POINTERS + 16 * of_qkv.max(of_output).max(of_up) + WARPS * 16 + routing
    }

    /// Maximum rows of a step: limited by shared memory, and by where separate operations, with
    /// tensor cores, are faster.
    fn most_rows(&self) -> Result<usize, Declined> {
        let Self { d_model, n_heads, head_dim, d_ff, .. } = *self;
        let of_layer = d_model * (self.qkv_rows() + n_heads * head_dim + d_ff * (self.gates() + 1));
        // Those of experts are multiplied by the rows that chose them.
        let most = if self.experts.is_some() || of_layer <= FEW_PARAMETERS { 8 } else { 4 };
        // The source itself needs the last 16 bytes.
        let fits = |rows: &usize| *rows <= most && self.shared_bytes(*rows) + 16 <= HOPPER_SHARED_BYTES;
        ROWS.into_iter().rfind(fits).ok_or_else(|| Declined::new("the model is too wide for shared memory"))
    }
}

/// The kernel for up to this many rows.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct DecodeStepAnyShape {
    rows: usize,
    shape: Shape,
}

impl CudaKernel for DecodeStepAnyShape {
    fn threads(&self) -> u32 {
        32 * WARPS as u32
    }

    fn entry(&self) -> &'static str {
        "decode_step_any_shape"
    }

    fn source(&self) -> String {
        let shape = &self.shape;
        let defined = [
            ("BATCH", self.rows),
            ("N_LAYERS", shape.n_layers),
            ("D_MODEL", shape.d_model),
            ("N_HEADS", shape.n_heads),
            ("N_KV_HEADS", shape.n_kv_heads),
            ("HEAD_DIM", shape.head_dim),
            ("D_FF", shape.d_ff),
            ("N_EXPERTS", shape.experts.as_ref().map_or(0, |experts| experts.n_experts)),
            ("CHOICES", shape.experts.as_ref().map_or(1, |experts| experts.choices)),
            ("EXPERT_FF", shape.experts.as_ref().map_or(16, |experts| experts.d_ff)),
            ("SIGMOID", shape.experts.as_ref().is_some_and(|experts| experts.sigmoid).into()),
            ("NORMALIZED", shape.experts.as_ref().is_some_and(|experts| experts.normalized).into()),
            ("VOCABULARY", shape.vocab_size),
            ("PAGE_TOKENS", shape.page_tokens),
            ("WINDOW", shape.window.map_or(0, |window| window.min(MOST_WINDOW))),
            ("LAYER_NORM", shape.layer_norm.into()),
            ("ACTIVATION", shape.activation.number()),
            ("GATED", shape.gated.into()),
            ("DTYPE", cuda::dtype_number(shape.dtype)),
            ("INT8", (shape.format == Some(Format::Int8)).into()),
            ("CACHE_INT8", shape.cache_int8.into()),
            ("BLOCKS", shape.blocks),
            ("QKV_PITCH", shape.pitches.qkv),
            ("OUT_PITCH", shape.pitches.output),
            ("UP_PITCH", shape.pitches.up),
            ("DOWN_PITCH", shape.pitches.down),
            ("EXPERTS_UP_PITCH", shape.pitches.experts_up),
            ("EXPERTS_DOWN_PITCH", shape.pitches.experts_down),
            ("EMBEDDING_PITCH", shape.pitches.embedding),
            ("HEAD_PITCH", shape.pitches.head),
            ("POSITION_PITCH", shape.pitches.positions),
            ("ANGLE_PITCH", shape.pitches.angles),
            ("WORDS", shape.words(self.rows)),
            ("SHARED", shape.shared_bytes(self.rows)),
            ("WAIT_SECONDS", shape.wait_seconds as usize),
        ];
        let defined = cuda::defines(defined);
        let epsilon = f32::from_bits(shape.epsilon);
        let expert_scale = shape.experts.as_ref().map_or(1.0, |experts| f32::from_bits(experts.scale));
        let headers = [
            EXCHANGE,
            LARGEST,
            NUMBERS,
            ("any_shape/inputs.cuh", include_str!("sm90/any_shape/inputs.cuh")),
            ("any_shape/attention.cuh", include_str!("sm90/any_shape/attention.cuh")),
            ("any_shape/products.cuh", include_str!("sm90/any_shape/products.cuh")),
            ("any_shape/experts.cuh", include_str!("sm90/any_shape/experts.cuh")),
            ("any_shape/greedy.cuh", include_str!("sm90/any_shape/greedy.cuh")),
        ];
        let body = cuda::included(include_str!("sm90/any_shape.cu"), &headers);
        let floats = format!("#define EPSILON {epsilon:e}f\n#define EXPERT_SCALE {expert_scale:e}f\n");
        format!("{defined}{floats}{}{body}", include_str!("sm90/watch.cuh"))
    }

    fn shared_bytes(&self) -> usize {
        HOPPER_SHARED_BYTES
    }

    fn tried() -> &'static Tried<Self> {
        static TRIED: Tried<DecodeStepAnyShape> = Mutex::new(None);
        &TRIED
    }
}

/// Named kernels for one row of GPT-2, a 1B Llama with a cache in bf16 and in INT8, an INT8 Qwen2,
/// and a Qwen3 with experts. With both weights and cache in INT8 some spill 20 bytes.
pub(super) fn sources() -> impl Iterator<Item = (String, String)> {
    let gpt2 = Shape {
        n_layers: 12,
        d_model: 768,
        n_heads: 12,
        n_kv_heads: 12,
        head_dim: 64,
        d_ff: 3072,
        experts: None,
        vocab_size: 50_257,
        page_tokens: 64,
        window: None,
        epsilon: 1e-5f32.to_bits(),
        wait_seconds: 1,
        layer_norm: true,
        activation: ActivationKind::GeluTanh,
        gated: false,
        dtype: DType::BF16,
        format: None,
        cache_int8: false,
        blocks: 132,
        pitches: Pitches::default(),
    };
    let silu = |shape: Shape| Shape { layer_norm: false, activation: ActivationKind::Silu, gated: true, ..shape };
    let llama = Shape { n_layers: 16, d_model: 2048, n_heads: 32, n_kv_heads: 8, d_ff: 8192, ..silu(gpt2.clone()) };
    let qwen2 = Shape {
        d_model: 896,
        n_heads: 14,
        n_kv_heads: 2,
        d_ff: 4864,
        format: Some(Format::Int8),
        ..silu(gpt2.clone())
    };
    let bytes = Shape { cache_int8: true, ..llama.clone() };
    let experts =
        Experts { n_experts: 128, choices: 8, d_ff: 768, sigmoid: false, normalized: true, scale: 1f32.to_bits() };
    let of_experts =
        Shape { n_kv_heads: 4, head_dim: 128, d_ff: 0, experts: Some(experts), vocab_size: 151_936, ..llama.clone() };
    let all =
        [("gpt2", gpt2), ("llama", llama), ("llama-cache-int8", bytes), ("qwen2-int8", qwen2), ("experts", of_experts)];
    all.into_iter().map(|(name, shape)| {
        let [model, heads] = [shape.d_model, shape.n_heads * shape.head_dim];
        let [embedding, head, positions] = [model; 3];
        let (experts_down, angles) = (shape.experts.as_ref().map_or(0, |experts| experts.d_ff), shape.head_dim / 2);
        let (qkv, up, experts_up, down) = (model, model, model, shape.d_ff);
        let pitches =
            Pitches { qkv, output: heads, up, down, experts_up, experts_down, embedding, head, positions, angles };
        let kernel = DecodeStepAnyShape { rows: 1, shape: Shape { pitches, ..shape } };
        (format!("{}-{name}", kernel.entry()), kernel.source())
    })
}

/// The prepared state for a model and a cache.
pub(super) struct AnyShape<R: CubeRuntime> {
    shape: Shape,
    /// Addresses of each layer's tensors.
    table: CubeTensor<R>,
    /// Addresses of shared tensors, following the numbers of a step in the source.
    shared: [u64; 9],
    /// Epoch of the exchange, and whether a wait timed out.
    state: CubeTensor<R>,
    /// Exchange buffer of the blocks.
    scratch: CubeTensor<R>,
    /// Keeps the memory at these addresses alive.
    _held: Vec<Kept>,
}

/// A matrix with contiguous columns; the row stride is `pitch` storage units of `in_element`
/// elements, and equal to that of the others.
fn with_pitch<R: CubeRuntime>(
    x: CubeTensor<R>,
    name: &str,
    in_element: usize,
    pitch: &mut usize,
) -> Result<CubeTensor<R>, Declined> {
    let ([rows, columns], strides) = (x.meta.shape().dims(), x.meta.strides());
    let own = if rows == 1 { columns } else { strides[0] };
    if own < columns {
        return Err(Declined::new(format!("the rows of {name} share their memory")));
    }
    let aligned = (own * x.dtype.size()).is_multiple_of(LOAD) || rows == 1;
    if strides[1] != 1 || !aligned || (*pitch != 0 && *pitch != own * in_element) {
        return Err(Declined::new(format!("the rows of {name} have a layout that the kernel does not read")));
    }
    *pitch = own * in_element;
    Ok(x)
}

/// The mixtures of a model, if there are any.
fn experts_of<B: Backend>(model: &DecodeModel<B>) -> Result<Option<Experts>, Declined> {
    let of = |block: &DecodeBlock<B>| {
        let DecodeRouter { weight, choice, .. } = block.router.as_ref()?;
        Some(Experts {
            n_experts: weight.dims()[0],
            choices: choice.experts_per_token,
            d_ff: block.down.dims()[1],
            sigmoid: choice.sigmoid,
            normalized: choice.normalized,
            scale: (choice.scale as f32).to_bits(),
        })
    };
    let mut all = model.blocks.iter().filter_map(of);
    let Some(first) = all.next() else { return Ok(None) };
    if all.any(|experts| experts != first) {
        return Err(Declined::new("experts differ between blocks"));
    }
    Ok(Some(first))
}

/// The kernel's prepared state for a model and its caches, if it supports them, with the maximum
/// rows of a step.
pub(super) fn plan<R, F, I, BT>(
    DecodePlanned { model, caches }: &DecodePlanned<'_, CubeBackend<R, F, I, BT>>,
) -> Result<(AnyShape<R>, usize), Declined>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let DecodeModel { embedding, position_embedding, head, blocks, final_norm, heads, activation, activations, window } =
        model;
    let PackedHeads { n_heads, n_kv_heads, head_dim } = *heads;
    if blocks.is_empty() {
        return Err(Declined::new("there are no blocks"));
    }
    let format = format_of(embedding)?;
    let (dtype, cache_int8) = (DType::from(*activations), matches!(&caches[0].keys, KvStorage::Int8 { .. }));
    let [vocab_size, d_model] = embedding.dims();
    let experts = experts_of(model)?;
    let mut dense = blocks.iter().filter(|block| block.router.is_none()).map(|block| block.up.dims()[0]);
    let up_width = dense.next();
    let one_width = dense.all(|width| Some(width) == up_width);
    let (epsilon, kind) = (final_norm.epsilon, final_norm.kind);
    let on_device = primitive(final_norm.gamma.clone());
    let mut shape = Shape {
        n_layers: blocks.len(),
        d_model,
        n_heads,
        n_kv_heads,
        head_dim,
        d_ff: up_width.map_or(0, |width| activation.output_width(width)),
        experts,
        vocab_size,
        page_tokens: caches[0].dims()[2],
        window: *window,
        epsilon: (epsilon as f32).to_bits(),
        wait_seconds: wait_seconds(),
        layer_norm: kind == NormKind::LayerNorm,
        activation: activation.kind,
        gated: activation.gated,
        dtype,
        format,
        cache_int8,
        blocks: multiprocessors(&on_device) as usize,
        pitches: Pitches::default(),
    };
    let columns = shape.together().max(8);
    for (name, fits) in [
        ("activations that are not f32, bf16 or f16", matches!(dtype, DType::F32 | DType::BF16 | DType::F16)),
        ("this d_model", d_model.is_multiple_of(columns)),
        ("heads of this width", head_dim.is_multiple_of(8) && head_dim <= 256),
        ("all heads together of this width", (n_heads * head_dim).is_multiple_of(columns)),
        ("this d_ff", shape.d_ff.is_multiple_of(columns)),
        ("blocks of several widths", one_width),
        (
            "experts of this width, or as many per token",
            shape.experts.as_ref().is_none_or(|experts| {
                experts.d_ff > 0 && experts.d_ff.is_multiple_of(columns) && experts.choices <= MOST_CHOICES
            }),
        ),
        ("more than 2^30 tokens", vocab_size < 1 << 30),
    ] {
        if !fits {
            return Err(Declined::new(format!("no kernel is for {name}")));
        }
    }
    let most_rows = shape.most_rows()?;
    let mut held = Vec::new();
    let mut pitches = Pitches::default();
    let mut hold = |x: Option<CubeTensor<R>>, name: &str| kept(x, name, &mut held);
    // Words hold several weights.
    let in_element = format.map_or(1, Format::in_word);
    // Vectors are small: cast to f32, whatever their storage.
    let vector = |x: &Tensor<CubeBackend<R, F, I, BT>, 1>| contiguous(primitive(x.clone().cast(DType::F32)));
    type OfNorm<R> = [Option<CubeTensor<R>>; 2];
    let of_norm = |norm: &Norm<CubeBackend<R, F, I, BT>>, of: NormKind| -> Result<OfNorm<R>, Declined> {
        if norm.kind != of || norm.epsilon != epsilon || (of == NormKind::RmsNorm && norm.beta.is_some()) {
            return Err(Declined::new("norms are not of one kind and one epsilon"));
        }
        Ok([Some(vector(&norm.gamma)), norm.beta.as_ref().map(vector)])
    };
    let mut addresses: Vec<u64> = Vec::new();
    for (block, cache) in blocks.iter().zip(*caches) {
        let DecodeBlock { attention_norm, qkv, placement, output, feed_forward_norm, up, down, .. } = block;
        let mut scales = Vec::new();
        let Pitches { qkv: of_qkv, output: of_output, up: of_up, down: of_down, experts_up, experts_down, .. } =
            &mut pitches;
        let (of_up, of_down) = if block.router.is_some() { (experts_up, experts_down) } else { (of_up, of_down) };
        for (weight, name, pitch) in
            [(qkv, "qkv", of_qkv), (output, "output", of_output), (up, "up", of_up), (down, "down", of_down)]
        {
            let (values, of_rows) = matrix(weight, name, dtype, format)?;
            addresses.push(hold(Some(with_pitch(values, name, in_element, pitch)?), name)?);
            scales.push(hold(of_rows.map(|scales| packed(scales, "scales")).transpose()?, "scales")?);
        }
        addresses.extend(scales);
        for bias in [&block.qkv_bias, &block.output_bias, &block.up_bias, &block.down_bias] {
            addresses.push(hold(bias.as_ref().map(vector), "bias")?);
        }
        for norm in [attention_norm, feed_forward_norm] {
            for part in of_norm(norm, kind)? {
                addresses.push(hold(part, "norm")?);
            }
        }
        for norm in [&placement.query_norm, &placement.key_norm] {
            let gamma = norm.as_ref().map(|norm| of_norm(norm, NormKind::RmsNorm)).transpose()?;
            addresses.push(hold(gamma.and_then(|[gamma, _]| gamma), "gamma")?);
        }
        let mut of_cache = Vec::new();
        for cached in [&cache.keys, &cache.values] {
            let (values, scales) = match cached {
                KvStorage::Float(floats) if !cache_int8 && floats.dtype() == dtype => (primitive(floats.clone()), None),
                KvStorage::Int8 { packed, scales } if cache_int8 => {
                    (packed.clone().into_primitive(), Some(primitive(scales.clone())))
                }
                _ => return Err(Declined::new("the caches are not all in INT8, or in the dtype of activations")),
            };
            addresses.push(hold(Some(packed(values, "the cache")?), "the cache")?);
            let scales = scales.map(|scales| packed(scales, "the cache's scales")).transpose()?;
            of_cache.push(hold(scales, "the cache's scales")?);
        }
        addresses.extend(of_cache);
        let router = block.router.as_ref();
        let weight = router.map(|router| contiguous(primitive(router.weight.clone().cast(DType::F32))));
        addresses.push(hold(weight, "the router")?);
        for bias in
            [router.and_then(|router| router.bias.as_ref()), router.and_then(|router| router.choice_bias.as_ref())]
        {
            addresses.push(hold(bias.map(vector), "the router's bias")?);
        }
    }
    debug_assert_eq!(addresses.len(), POINTERS * blocks.len());
    let (embedding, embedding_scales) = matrix(embedding, "the embedding", dtype, format)?;
    let embedding = with_pitch(embedding, "the embedding", in_element, &mut pitches.embedding)?;
    let (head, head_scales) = matrix(head, "the head", dtype, format)?;
    let [embedding_scales, head_scales] =
        [embedding_scales, head_scales].map(|scales| scales.map(|scales| packed(scales, "scales")).transpose());
    let (embedding_scales, head_scales) = (embedding_scales?, head_scales?);
    let head = with_pitch(head, "the head", in_element, &mut pitches.head)?;
    let [final_gamma, final_beta] = of_norm(final_norm, kind)?;
    let positions = position_embedding.as_ref().map(|table| primitive(table.clone().cast(dtype)));
    let positions = positions.map(|table| with_pitch(table, "the position embedding", 1, &mut pitches.positions));
    let positions = positions.transpose()?;
    let mut angle = |table: CubeTensor<R>| with_pitch(table, "angles", 1, &mut pitches.angles);
    let [cos, sin] = match angles(blocks)? {
        Some([cos, sin]) => [Some(angle(cos)?), Some(angle(sin)?)],
        None => [None, None],
    };
    let mut shared = [0; 9];
    let of_all = [
        (Some(embedding), "the embedding"),
        (Some(head), "the head"),
        (embedding_scales, "scales"),
        (head_scales, "scales"),
        (final_gamma, "gamma"),
        (final_beta, "beta"),
        (positions, "the position embedding"),
        (cos, "cosines"),
        (sin, "sines"),
    ];
    for (at, (x, name)) in shared.iter_mut().zip(of_all) {
        *at = hold(x, name)?;
    }
    shape.pitches = pitches;
    let words = ROWS.into_iter().filter(|rows| *rows <= most_rows).map(|rows| shape.words(rows)).max();
    let device = final_norm.gamma.device();
    let body = AnyShape {
        table: halves::<R, F, I, BT>(addresses, &device),
        shared,
        state: integers::<R, F, I, BT>(vec![0; 64], &device),
        // Epochs start at 1.
        scratch: integers::<R, F, I, BT>(vec![0; 2 * words.unwrap_or(0)], &device),
        shape,
        _held: held,
    };
    Ok((body, most_rows))
}

/// Processes one more token of each row.
pub(super) fn decode_step<R, F, I, BT>(
    body: &AnyShape<R>,
    tokens: Tensor<CubeBackend<R, F, I, BT>, 1, burn::tensor::Int>,
    at: &CachedTokens<CubeBackend<R, F, I, BT>>,
    last_position: usize,
) -> Result<Decoded<CubeBackend<R, F, I, BT>>, Declined>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let AnyShape { shape, table, shared, state, scratch, .. } = body;
    let rows = at.rows.len();
    let tokens = contiguous(tokens.into_primitive());
    let positions = contiguous(at.positions.clone().into_primitive());
    let pages = contiguous(at.pages.clone().into_primitive());
    let hidden = empty(scratch, [rows, shape.d_model], shape.dtype);
    let logits = empty(scratch, [rows, shape.vocab_size], DType::F32);
    let greedy = empty(&tokens, [rows], DType::I32);
    let following = empty(&positions, [1, rows], DType::I32);
    let kernel = DecodeStepAnyShape { rows: rows.next_power_of_two(), shape: shape.clone() };
    let arguments = || {
        let pointers = [table, state, scratch, &tokens, &positions, &pages, &hidden, &logits, &greedy, &following];
        let arguments = pointers.into_iter().fold(Arguments::default(), Arguments::pointer);
        let arguments = arguments.word(rows).word(pages.meta.shape()[1]).word(last_position);
        shared.iter().fold(arguments, |arguments, address| arguments.word(*address as usize))
    };
    // SAFETY: the plan checked the dtype of each matrix and cache, that their sizes and the
    // distances of their rows are those that the kernel is compiled for, and that they begin where
    // 16 bytes can be read at once; scales have no gaps; vectors and tables are f32 by a cast, or
    // checked; it holds the memory at the addresses in its table. The caches are the plan's own, by
    // the operands' check. Integers are of 32 bits; tokens are clamped to the vocabulary, positions
    // to the tables and the table of pages, and pages are the host's, checked against the caches.
    // The scratch is as large as the source says for any number of rows, and results have a line
    // for each row. All blocks are resident at once, one on each multiprocessor, for which there is
    // shared memory; were they not, waits would end. Checked by the tests of whole steps and of all
    // families on CUDA, and by compute-sanitizer.
    launch_tried(state, &kernel, || unsafe {
        cuda::launch(&hidden, kernel.clone(), shape.blocks as u32, arguments())
    })?;
    let next: Tensor<CubeBackend<R, F, I, BT>, 1, Int> = Tensor::from_primitive(greedy);
    let predicted = Predicted { logits: float(logits), tokens: next.clone().reshape([1, rows]), next, drawn: false };
    let positions = Some([at.positions.clone(), Tensor::from_primitive(following)]);
    Ok(Decoded { hidden: float(hidden), predicted: Some(predicted), positions })
}
