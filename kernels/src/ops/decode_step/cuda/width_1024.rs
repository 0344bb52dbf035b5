//! Fused decode steps for models of 1,024 columns with heads of 128, two per key head: one launch
//! for up to 128 rows with bf16 weights and 32 with INT8; for up to four rows, the launch includes
//! the output head.

use std::any::Any;

use burn::tensor::{DType, FloatDType, Int, Tensor};
use burn_cubecl::element::BoolElement;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement};

use super::kernels::{
    BLOCKS, DRAWN_ROWS, DecodeStepFewRows, DecodeStepLargeBatch, DecodeStepManyRows, FEW_ROWS, HEAD_DIM, LARGE, MANY,
    MOST_BLOCKS, MOST_ROWS, MOST_STEPS, PAGE_TOKENS, SLICE, Sizes,
};
use super::{Draws, address, angles, format_of, halves, integers, kept, launch_tried, matrix, packed};
use crate::cubecl::{contiguous, empty};
use crate::cuda::{self, Arguments, blocks_map, grouped_map};
use crate::multiprocessors::multiprocessors;
use crate::ops::activation::{Activation, ActivationKind};
use crate::ops::cached_attention::{CachedTokens, KvStorage};
use crate::ops::decode_step::{Declined, DecodeBlock, DecodeModel, DecodePlanned, Decoded, MultiStep, Predicted};
use crate::ops::norm::{Norm, NormKind};
use crate::packed_heads::PackedHeads;
use crate::quant::Format;
use crate::selection::wait_seconds;
use crate::tensor::{float, primitive};

/// Tokens of a page loaded at a time.
const BLOCK_TOKENS: usize = 16;
/// Addresses per block in the table.
const POINTERS: usize = 10;
/// Addresses of its scales, with those of embedding and head.
const SCALES: usize = 6;

/// The prepared state for a model and a cache.
pub(super) struct Width1024<R: CubeRuntime> {
    sizes: Sizes,
    /// Format of quantized weights.
    format: Option<Format>,
    /// Maximum rows of the kernel for few rows.
    blocks: u32,
    /// Addresses of each block's tensors.
    table: CubeTensor<R>,
    /// TMA maps of the kernels for many rows and large batches.
    maps: CubeTensor<R>,
    embedding: CubeTensor<R>,
    head: CubeTensor<R>,
    /// The table of scales, if weights are quantized.
    scales: usize,
    final_norm: CubeTensor<R>,
    cos: CubeTensor<R>,
    sin: CubeTensor<R>,
    /// Epoch of the exchange, and whether a wait timed out.
    state: CubeTensor<R>,
    /// Exchange buffers: for few rows, and for each number of many rows.
    few: CubeTensor<R>,
    many: Vec<CubeTensor<R>>,
    /// Exchange buffers of large batches, read by TMA, with their maps.
    large: Vec<[CubeTensor<R>; 2]>,
    /// Keeps the memory at these addresses alive.
    _held: Vec<Box<dyn Any + Send>>,
}

/// The kernels' prepared state for a model and its caches, if they support them, with the maximum
/// rows of a step.
pub(super) fn plan<R, F, I, BT>(
    DecodePlanned { model, caches }: &DecodePlanned<'_, CubeBackend<R, F, I, BT>>,
) -> Result<(Width1024<R>, usize), Declined>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let DecodeModel {
        blocks,
        final_norm,
        heads,
        embedding,
        position_embedding,
        head,
        activation,
        activations,
        window,
        ..
    } = model;
    if *activation != Activation::gated(ActivationKind::Silu) || window.is_some() || position_embedding.is_some() {
        return Err(Declined::new(
            "it is not for other activations than SiLU-gated ones, windows, or learned positions",
        ));
    }
    let format = format_of(embedding)?;
    let quantized = format.is_some();
    let [_, d_model] = embedding.dims();
    let (embedding, embedding_scales) = matrix(embedding, "the embedding", DType::BF16, format)?;
    let (head, head_scales) = matrix(head, "the head", DType::BF16, format)?;
    let PackedHeads { n_heads, n_kv_heads, head_dim } = *heads;
    let first = blocks.first().ok_or_else(|| Declined::new("there are no blocks"))?;
    let d_ff = first.up.dims()[0] / 2;
    let [_, _, page_tokens, _] = caches[0].dims();
    let sizes = [
        ("mixtures of experts", blocks.iter().all(|block| block.router.is_none())),
        ("the dtype of activations", *activations == FloatDType::BF16),
        ("d_model", d_model == SLICE),
        ("head_dim", head_dim == HEAD_DIM),
        ("n_heads", (n_heads * HEAD_DIM).is_multiple_of(SLICE) && n_heads == 2 * n_kv_heads && n_kv_heads <= 8),
        // Limited by the kernels' registers.
        ("d_ff", d_ff.is_multiple_of(SLICE) && d_ff <= 3 * SLICE),
        ("the cache's pages", page_tokens == PAGE_TOKENS),
        ("the widths of the blocks", blocks.iter().all(|block| block.up.dims()[0] == 2 * d_ff)),
    ];
    if let Some((name, _)) = sizes.iter().find(|(_, fits)| !fits) {
        return Err(Declined::new(format!("the kernel was not written for {name}")));
    }
    let multiprocessors = multiprocessors(&embedding);
    if multiprocessors < BLOCKS {
        return Err(Declined::new(format!(
            "the device has {multiprocessors} multiprocessors, and the kernel needs {BLOCKS}"
        )));
    }
    let epsilon = final_norm.epsilon;
    let mut addresses: Vec<u64> = Vec::new();
    let mut maps: Vec<u64> = Vec::new();
    let mut held = Vec::new();
    let mut hold = |x: Option<CubeTensor<R>>, name: &str| {
        let x = x.map(|x| packed(x, name)).transpose()?;
        kept(x, name, &mut held)
    };
    let embedding_scales = hold(embedding_scales, "the embedding's scales")?;
    let head_scales = hold(head_scales, "the head's scales")?;
    let mut scales_at = Vec::new();
    let no_map = |error| Declined::new(format!("no tensor map: {error}"));
    let gamma = |norm: &Norm<CubeBackend<R, F, I, BT>>| {
        let fits = norm.kind == NormKind::RmsNorm && norm.beta.is_none() && norm.epsilon == epsilon;
        // Lossless for 16-bit checkpoints.
        let halves = || primitive(norm.gamma.clone().cast(DType::BF16));
        fits.then(halves).ok_or_else(|| Declined::new("norms are not RMS norms of one epsilon"))
    };
    for (block, cache) in blocks.iter().zip(*caches) {
        let DecodeBlock { attention_norm, qkv, placement, output, feed_forward_norm, up, down, .. } = block;
        let biases = [&block.qkv_bias, &block.output_bias, &block.up_bias, &block.down_bias];
        if biases.iter().any(|bias| bias.is_some()) {
            return Err(Declined::new("it is not for biases"));
        }
        let norms = placement.query_norm.as_ref().zip(placement.key_norm.as_ref());
        let (query_norm, key_norm) = norms.ok_or_else(|| Declined::new("queries and keys have no norms"))?;
        for (weight, name) in [(qkv, "qkv"), (output, "output"), (up, "up"), (down, "down")] {
            let [rows, columns] = weight.dims();
            let (values, scales) = matrix(weight, name, DType::BF16, format)?;
            let at = hold(Some(values), name)?;
            addresses.push(at);
            scales_at.push(hold(scales, name)?);
            // Gate and up are read separately. A map is of bf16: two columns of INT8 are one of it.
            let tile = DecodeStepManyRows::weight_box(if name == "up" { rows / 2 } else { rows }, format);
            let columns = if quantized { columns / 2 } else { columns };
            maps.extend(grouped_map(at, [rows, columns], tile).map_err(no_map)?);
        }
        scales_at.extend([embedding_scales, head_scales]);
        for norm in [attention_norm, feed_forward_norm, query_norm, key_norm] {
            addresses.push(hold(Some(gamma(norm)?), "gamma")?);
        }
        let mut cached = Vec::new();
        for part in [&cache.keys, &cache.values] {
            match part {
                KvStorage::Float(floats) if floats.dtype() == DType::BF16 => {
                    let rows: usize = floats.dims()[..3].iter().product();
                    cached.push((hold(Some(primitive(floats.clone())), "the cache")?, rows));
                }
                _ => return Err(Declined::new("the cache is not bf16")),
            }
        }
        addresses.extend(cached.iter().map(|(at, _)| at));
        // The start of a page, and all of it.
        for tokens in [BLOCK_TOKENS, PAGE_TOKENS] {
            for (at, rows) in &cached {
                let map = blocks_map(*at, [*rows, HEAD_DIM], tokens / BLOCK_TOKENS);
                maps.extend(map.map_err(no_map)?);
            }
        }
    }
    debug_assert_eq!([addresses.len(), scales_at.len()], [POINTERS, SCALES].map(|each| each * blocks.len()));
    let [cos, sin] = angles(blocks)?.ok_or_else(|| Declined::new("positions are not rotary"))?;
    let sizes = Sizes {
        n_layers: blocks.len(),
        d_model,
        n_heads,
        n_kv_heads,
        d_ff,
        epsilon: (epsilon as f32).to_bits(),
        wait_seconds: wait_seconds(),
    };
    let few = [1, 2, FEW_ROWS].map(|rows| DecodeStepFewRows { rows, format, sizes: sizes.clone() }.words());
    let few: Vec<i32> = vec![0; 2 * few.into_iter().max().unwrap_or(0)];
    // A word that has not arrived yet has all bits set.
    let many = MANY.map(|rows| vec![-1; DecodeStepManyRows { rows, format, sizes: sizes.clone() }.words()]);
    let device = final_norm.gamma.device();
    let integers = |values| integers::<R, F, I, BT>(values, &device);
    let halves = |words| halves::<R, F, I, BT>(words, &device);
    let mut large = Vec::new();
    for rows in LARGE.into_iter().filter(|_| !quantized) {
        let kernel = DecodeStepLargeBatch { rows, sizes: sizes.clone() };
        let words = integers(vec![0; kernel.words()]);
        let (at, memory) = address(&words)?;
        held.push(memory);
        let mut maps = Vec::new();
        for (begin, columns) in kernel.inputs() {
            let map = grouped_map(at + 4 * begin as u64, [rows, columns], kernel.input_box());
            maps.extend(map.map_err(no_map)?);
        }
        large.push([words, halves(maps)]);
    }
    let maps = halves(maps);
    for maps in large.iter().map(|[_, maps]| maps).chain([&maps]) {
        if !address(maps)?.0.is_multiple_of(64) {
            return Err(Declined::new("tensor maps begin between two units of 64 bytes"));
        }
    }
    let mut scales = 0;
    if quantized {
        let (at, kept) = address(&halves(scales_at))?;
        scales = at as usize;
        held.push(kept);
    }
    let body = Width1024::<R> {
        sizes,
        format,
        blocks: multiprocessors.min(MOST_BLOCKS),
        table: halves(addresses),
        maps,
        embedding: packed(embedding, "the embedding")?,
        head: packed(head, "the head")?,
        scales,
        final_norm: packed(gamma(final_norm)?, "gamma")?,
        cos: packed(cos, "cosines")?,
        sin: packed(sin, "sines")?,
        state: integers(vec![0; 64]),
        few: integers(few),
        many: many.map(integers).into_iter().collect(),
        large,
        _held: held,
    };
    let most_rows = if quantized { MANY[MANY.len() - 1] } else { MOST_ROWS };
    Ok((body, most_rows))
}

/// Maximum steps per launch.
pub(super) fn most_steps(rows: usize, draws: bool) -> usize {
    let most_rows = if draws { DRAWN_ROWS } else { FEW_ROWS };
    if rows <= most_rows { MOST_STEPS } else { 1 }
}

/// Processes one more token of each row, `steps` times.
pub(super) fn decode_step<R, F, I, BT>(
    body: &Width1024<R>,
    tokens: Tensor<CubeBackend<R, F, I, BT>, 1, Int>,
    at: &CachedTokens<CubeBackend<R, F, I, BT>>,
    draws: Draws<R>,
    MultiStep { steps, stop_tokens }: MultiStep<'_, CubeBackend<R, F, I, BT>>,
    last_position: usize,
) -> Result<Decoded<CubeBackend<R, F, I, BT>>, Declined>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let rows = at.rows.len();
    let hidden = empty(&body.embedding, [rows, body.sizes.d_model], DType::BF16);
    let tokens = contiguous(tokens.into_primitive());
    let positions = contiguous(at.positions.clone().into_primitive());
    let pages = contiguous(at.pages.clone().into_primitive());
    let model = [&body.embedding, &body.final_norm, &body.cos, &body.sin, &body.state];
    let step = [&tokens, &positions, &pages, &hidden];
    let vocab_size = body.embedding.meta.shape()[0];
    let all = |arguments, words| {
        let pointers = model.into_iter().chain([words]).chain(step);
        let arguments: Arguments = pointers.fold(arguments, Arguments::pointer);
        let arguments = arguments.word(rows).word(pages.meta.shape()[1]).word(vocab_size);
        arguments.word(body.scales).word(last_position)
    };
    let sizes = body.sizes.clone();
    // SAFETY, of all launches: the plan checked that weights are bf16 or INT8, and gammas and
    // caches bf16, without gaps, and of the sizes that the kernels are compiled for, and holds the
    // memory at the addresses in its tables. The caches are the plan's own, by the operands' check.
    // Tokens are clamped to the vocabulary, positions to the rotary table and the table of pages;
    // pages are the host's, checked against the caches, and there are no more rows than the plan
    // takes. Results have a line for each row, as has what rows draw by, whose lines of counts the
    // operands checked, too; words that blocks exchange are as many as the sources count, and
    // launches of one plan, which share them, come one after another on one stream. All blocks are
    // resident at once: one on each multiprocessor, for which there is shared memory, and clusters
    // of two on pairs of them; were they not, waits would end.
    if rows <= FEW_ROWS {
        let kernel = DecodeStepFewRows { rows: rows.next_power_of_two(), format: body.format, sizes };
        let logits = empty(&hidden, [rows, vocab_size], DType::F32);
        let [next, reached, following] = [(); 3].map(|()| empty(&tokens, [1, rows], DType::I32));
        let all_tokens = empty(&tokens, [steps, rows], DType::I32);
        let stop_tokens = stop_tokens.map(|stop_tokens| contiguous(stop_tokens.clone().into_primitive()));
        let ends_a_row = stop_tokens.as_ref().map_or(0, |stop_tokens| stop_tokens.meta.shape()[1]);
        let arguments = || {
            let arguments = all(Arguments::default().pointer(&body.table), &body.few);
            let of_head =
                [&body.head, &logits, &all_tokens, &next, &reached, &following, stop_tokens.as_ref().unwrap_or(&next)];
            let pointers = of_head.into_iter().chain(&draws.pointers);
            draws.words(pointers.fold(arguments, Arguments::pointer)).word(steps).word(ends_a_row)
        };
        launch_tried(&body.state, &kernel, || unsafe {
            cuda::launch(&hidden, kernel.clone(), body.blocks, arguments())
        })?;
        let [next, reached, following, tokens] =
            [next, reached, following, all_tokens].map(Tensor::<CubeBackend<R, F, I, BT>, 2, Int>::from_primitive);
        let next = next.reshape([rows]);
        let predicted = Predicted { logits: float(logits), next, tokens, drawn: draws.some };
        let positions = Some([reached, following]);
        return Ok(Decoded { hidden: float(hidden), predicted: Some(predicted), positions });
    }
    let tables = || Arguments::default().pointer(&body.table).pointer(&body.maps);
    if let Some(variant) = MANY.iter().position(|most| rows <= *most) {
        let kernel = DecodeStepManyRows { rows: MANY[variant], format: body.format, sizes };
        let arguments = || all(tables(), &body.many[variant]);
        launch_tried(&body.state, &kernel, || unsafe { cuda::launch(&hidden, kernel.clone(), BLOCKS, arguments()) })?;
    } else {
        let variant = LARGE.iter().position(|most| rows <= *most).unwrap_or(LARGE.len() - 1);
        let kernel = DecodeStepLargeBatch { rows: LARGE[variant], sizes };
        let [words, inputs] = &body.large[variant];
        let arguments = || all(tables().pointer(inputs), words);
        launch_tried(&body.state, &kernel, || unsafe { cuda::launch(&hidden, kernel.clone(), BLOCKS, arguments()) })?;
    }
    Ok(Decoded { hidden: float(hidden), predicted: None, positions: None })
}
