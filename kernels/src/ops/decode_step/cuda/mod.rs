//! A whole decode step for Hopper in one launch, in CUDA C++: weights in bf16, a block on each multiprocessor.

use std::any::Any;
use std::sync::Mutex;

use burn::cubecl::cuda::CudaRuntime;
use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_cubecl::element::BoolElement;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement};
use cubecl::client::ComputeClient;

use super::{Declined, DecodeBlock, DecodeModel, DecodePlanned, DecodeStep, MOST_ROWS};
use crate::checked::Checked;
use crate::cubecl::{contiguous, empty, multiprocessors};
use crate::cuda::{self, Arguments, CudaKernel, Tried};
use crate::ops::cached_attention::Held;
use crate::ops::norm::NormKind;
use crate::ops::weight::Weight;
use crate::packed_heads::PackedHeads;
use crate::tensor::{float, primitive};

/// Columns of a matrix that the warps of a block take together: rows are whole multiples of it.
const SLICE: usize = 1024;
const HEAD_DIM: usize = 128;
const PAGE_TOKENS: usize = 64;
/// Keys and values of a step's rows are shared out among this many blocks at the least.
const FEWEST_BLOCKS: usize = 128;
/// Warps that multiply.
const WARPS: usize = 16;
/// Addresses of a block in the table.
const POINTERS: usize = 10;

/// What the kernel is compiled for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct DecodeStepHopper {
    rows: usize,
    n_layers: usize,
    d_model: usize,
    n_heads: usize,
    n_kv_heads: usize,
    d_ff: usize,
    /// The bits of an f32.
    epsilon: u32,
}

impl DecodeStepHopper {
    fn finishers(&self) -> usize {
        if self.rows < 4 { self.rows } else { 2 }
    }
}

impl CudaKernel for DecodeStepHopper {
    fn threads(&self) -> u32 {
        32 * (WARPS + self.finishers() + 1) as u32
    }

    fn entry(&self) -> &'static str {
        "decode_step_hopper"
    }

    fn source(&self) -> String {
        let Self { rows, n_layers, d_model, n_heads, n_kv_heads, d_ff, epsilon } = *self;
        let defined = [
            ("BATCH", rows),
            ("N_LAYERS", n_layers),
            ("D_MODEL", d_model),
            ("N_HEADS", n_heads),
            ("N_KV_HEADS", n_kv_heads),
            ("D_FF", d_ff),
        ];
        let defined: String = defined.map(|(name, value)| format!("#define {name} {value}\n")).concat();
        let epsilon = f32::from_bits(epsilon);
        format!("{defined}#define EPSILON {epsilon:e}f\n{}", include_str!("decode_step.cu"))
    }

    fn shared_bytes(&self) -> usize {
        227 << 10
    }

    fn tried() -> &'static Tried<Self> {
        static TRIED: Tried<DecodeStepHopper> = Mutex::new(None);
        &TRIED
    }
}

/// What is ready for a model and a cache.
struct Body<R: CubeRuntime> {
    kernel: DecodeStepHopper,
    blocks: u32,
    /// Addresses of each block's tensors.
    table: CubeTensor<R>,
    embedding: CubeTensor<R>,
    final_norm: CubeTensor<R>,
    cos: CubeTensor<R>,
    sin: CubeTensor<R>,
    /// The epoch of the exchange, and whether a wait was too long.
    state: CubeTensor<R>,
    /// Words that blocks exchange.
    scratch: CubeTensor<R>,
    /// Keeps the memory at these addresses.
    _held: Vec<Box<dyn Any + Send>>,
}

/// The numbers of a kernel's exchange, as its source has them.
fn scratch_words(kernel: &DecodeStepHopper) -> usize {
    let DecodeStepHopper { rows, d_model, n_heads, n_kv_heads, d_ff, .. } = *kernel;
    let (copies, splits) = (2, 16 / rows);
    let exchanged = 2 * d_model / 2 + n_heads * HEAD_DIM / 2 + d_ff / 2;
    let qkv = (n_heads + 2 * n_kv_heads) * HEAD_DIM;
    rows * (copies * exchanged + qkv + n_heads * splits * (HEAD_DIM + 1))
}

fn half<R, F, I, BT>(weight: &Weight<CubeBackend<R, F, I, BT>>, name: &str) -> Result<CubeTensor<R>, Declined>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    match weight {
        Weight::Float(weight) if weight.dtype() == DType::BF16 => packed(primitive(weight.clone()), name),
        _ => Err(Declined::new(format!("{name} is not bf16"))),
    }
}

/// A tensor whose elements lie one after another from an address of 16 bytes on.
fn packed<R: CubeRuntime>(x: CubeTensor<R>, name: &str) -> Result<CubeTensor<R>, Declined> {
    let packed = x.is_contiguous() && x.handle.offset_start.unwrap_or(0).is_multiple_of(16);
    if packed { Ok(x) } else { Err(Declined::new(format!("{name} has gaps"))) }
}

/// The address of a tensor, and what keeps its memory.
fn address<R: CubeRuntime>(x: &CubeTensor<R>) -> Result<(u64, Box<dyn Any + Send>), Declined> {
    let client: &dyn Any = &x.client;
    let Some(client) = client.downcast_ref::<ComputeClient<CudaRuntime>>() else {
        return Err(Declined::new("no device of CUDA"));
    };
    let resource =
        client.get_resource(x.handle.clone()).map_err(|error| Declined::new(format!("no address: {error}")))?;
    let address = resource.resource().ptr;
    Ok((address, Box::new(resource)))
}

/// Makes the kernel ready for a model and its caches, if it is one that the kernel takes.
pub(super) fn plan<R, F, I, BT>(
    planned: Checked<DecodePlanned<'_, CubeBackend<R, F, I, BT>>>,
) -> Result<Box<dyn Any + Send>, Declined>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let planned = planned.into_inner();
    let embedding = half(&planned.model.embedding, "the embedding")?;
    if !cuda::on_hopper(&embedding) {
        return Err(Declined::new("the device is none of compute capability 9.0"));
    }
    made(planned, embedding)
}

fn made<R, F, I, BT>(
    DecodePlanned { model, caches }: DecodePlanned<'_, CubeBackend<R, F, I, BT>>,
    embedding: CubeTensor<R>,
) -> Result<Box<dyn Any + Send>, Declined>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let DecodeModel { blocks, final_norm, heads, .. } = model;
    let PackedHeads { n_heads, n_kv_heads, head_dim } = *heads;
    let d_model = embedding.meta.shape()[1];
    let first = blocks.first().ok_or_else(|| Declined::new("there are no blocks"))?;
    let d_ff = first.up.dims()[0] / 2;
    let [_, _, page_tokens, _] = caches[0].dims();
    let sizes = [
        ("d_model", d_model == SLICE),
        ("head_dim", head_dim == HEAD_DIM),
        ("n_heads", (n_heads * HEAD_DIM).is_multiple_of(SLICE) && n_heads == 2 * n_kv_heads && n_kv_heads <= 8),
        ("d_ff", d_ff.is_multiple_of(SLICE) && d_ff <= 3 * SLICE),
        ("the cache's pages", page_tokens == PAGE_TOKENS),
        ("the widths of the blocks", blocks.iter().all(|block| block.up.dims()[0] == 2 * d_ff)),
    ];
    if let Some((name, _)) = sizes.iter().find(|(_, fits)| !fits) {
        return Err(Declined::new(format!("the kernel was not written for {name}")));
    }
    let multiprocessors = multiprocessors(&embedding);
    if (multiprocessors as usize) < FEWEST_BLOCKS {
        return Err(Declined::new(format!("the device has {multiprocessors} multiprocessors, of {FEWEST_BLOCKS}")));
    }
    let epsilon = final_norm.epsilon;
    let mut addresses: Vec<u64> = Vec::new();
    let mut held = Vec::new();
    let mut hold = |x: CubeTensor<R>, name: &str| {
        let (address, kept) = address(&packed(x, name)?)?;
        addresses.push(address);
        held.push(kept);
        Ok::<(), Declined>(())
    };
    let gamma = |norm: &crate::ops::norm::Norm<CubeBackend<R, F, I, BT>>| {
        let fits = norm.kind == NormKind::RmsNorm && norm.beta.is_none() && norm.epsilon == epsilon;
        // Of 16-bit checkpoints it loses nothing.
        let halves = || primitive(norm.gamma.clone().cast(DType::BF16));
        fits.then(halves).ok_or_else(|| Declined::new("norms are not RMS norms of one epsilon"))
    };
    for (DecodeBlock { attention_norm, qkv, placement, output, feed_forward_norm, up, down }, cache) in
        blocks.iter().zip(caches)
    {
        let norms = placement.query_norm.as_ref().zip(placement.key_norm.as_ref());
        let (query_norm, key_norm) = norms.ok_or_else(|| Declined::new("queries and keys have no norms"))?;
        hold(half(qkv, "qkv")?, "qkv")?;
        hold(half(output, "output")?, "output")?;
        hold(half(up, "up")?, "up")?;
        hold(half(down, "down")?, "down")?;
        for norm in [attention_norm, feed_forward_norm, query_norm, key_norm] {
            hold(gamma(norm)?, "gamma")?;
        }
        for cached in [&cache.keys, &cache.values] {
            match cached {
                Held::Float(floats) if floats.dtype() == DType::BF16 => hold(primitive(floats.clone()), "the cache")?,
                _ => return Err(Declined::new("the cache is not bf16")),
            }
        }
    }
    debug_assert_eq!(addresses.len(), POINTERS * blocks.len());
    let table = first.placement.rotary.as_ref().ok_or_else(|| Declined::new("positions are not rotary"))?;
    let [cos, sin] = [&table.cos, &table.sin].map(|table| primitive(table.clone()));
    if cos.dtype != DType::F32 {
        return Err(Declined::new("the rotary table is not f32"));
    }
    let kernel = DecodeStepHopper {
        rows: 1,
        n_layers: blocks.len(),
        d_model,
        n_heads,
        n_kv_heads,
        d_ff,
        epsilon: (epsilon as f32).to_bits(),
    };
    let words = [1, 2, 4, MOST_ROWS].map(|rows| scratch_words(&DecodeStepHopper { rows, ..kernel.clone() }));
    let words = words.into_iter().max().unwrap_or(0);
    let words: Vec<i32> = vec![0; 2 * words];
    let device = final_norm.gamma.device();
    let integers = |values: Vec<i32>| {
        let count = values.len();
        let data = TensorData::new(values, [count]);
        Tensor::<CubeBackend<R, F, I, BT>, 1, Int>::from_data(data, (&device, DType::I32)).into_primitive()
    };
    let halves = addresses.iter().flat_map(|address| [*address as u32 as i32, (*address >> 32) as u32 as i32]);
    Ok(Box::new(Body::<R> {
        kernel,
        blocks: multiprocessors.min(256),
        table: integers(halves.collect()),
        embedding,
        final_norm: packed(gamma(final_norm)?, "gamma")?,
        cos: packed(cos, "cosines")?,
        sin: packed(sin, "sines")?,
        state: integers(vec![0; 64]),
        scratch: integers(words),
        _held: held,
    }))
}

/// One token more of each row.
pub(super) fn decode_step<R, F, I, BT>(
    operands: Checked<DecodeStep<'_, CubeBackend<R, F, I, BT>>>,
) -> Result<Tensor<CubeBackend<R, F, I, BT>, 2>, Declined>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let DecodeStep { body, tokens, at, .. } = operands.into_inner();
    let Some(body) = body.downcast_ref::<Body<R>>() else { unreachable!("a plan of another backend") };
    let rows = at.rows.len();
    let kernel = DecodeStepHopper { rows: rows.next_power_of_two(), ..body.kernel.clone() };
    let hidden = empty(&body.embedding, [rows, kernel.d_model], DType::BF16);
    let tokens = contiguous(tokens.into_primitive());
    let positions = contiguous(at.positions.clone().into_primitive());
    let pages = contiguous(at.pages.clone().into_primitive());
    let width = pages.meta.shape()[1];
    let launch = || {
        let arguments = Arguments::default()
            .pointer(&body.table)
            .pointer(&body.embedding)
            .pointer(&body.final_norm)
            .pointer(&body.cos)
            .pointer(&body.sin)
            .pointer(&body.state)
            .pointer(&body.scratch)
            .pointer(&tokens)
            .pointer(&positions)
            .pointer(&pages)
            .pointer(&hidden)
            .word(rows)
            .word(width)
            .word(body.embedding.meta.shape()[0]);
        // SAFETY: the plan checked that weights, gammas and caches are bf16 matrices without gaps of the sizes that the kernel is
        // compiled for, and holds the memory at the addresses in its table. Tokens are clamped to the vocabulary, positions and
        // pages were checked by the operands. A block is resident on each multiprocessor: shared memory has room for one.
        unsafe { cuda::launch(&hidden, kernel.clone(), body.blocks, arguments) };
    };
    // The first step of its kind is the one that tells whether it runs: what it writes is what the next one would.
    let mut first = false;
    let works = cuda::works(&hidden, &kernel, "decoding runs operation by operation", || {
        first = true;
        launch();
    });
    if !works {
        return Err(Declined::new("the kernel does not run here"));
    }
    if !first {
        launch();
    }
    Ok(float(hidden))
}
