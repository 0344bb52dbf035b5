//! Lookup and its gradient in CubeCL.
//!
//! The table's gradient sums each token's rows in a deterministic order: along chains of rows
//! ([`chained`]), or after sorting the rows if there are few tokens or many rows per token
//! ([`sorted`]).

mod chained;
mod sorted;

use burn::tensor::{DType, Tensor};
use burn_cubecl::element::BoolElement;
use burn_cubecl::ops::reshape;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement};
use cubecl::prelude::*;

use self::chained::sum_chained;
use self::sorted::sum_sorted;
use super::{EmbedBackward, EmbedForward, EmbedOps, reference};
use crate::checked::Checked;
use crate::cubecl::{array, clamp_index, contiguous, empty, grid, rows, vector_width};
use crate::ops::weight::cubecl::{cube_quantized, quantized_embed};
use crate::quant::{Reader, Weight};
use crate::tensor::{float, primitive};

const UNITS: u32 = 256;
/// Larger vocabularies use chains, unless there are [`MANY_ROWS`] per token.
const FEW_TOKENS: usize = 512;
const MANY_ROWS: usize = 32;
/// Rows that a unit loads at once.
const LOADS: u32 = 8;
/// Vectors that a unit looks up, all before it writes the first.
const LOOKUPS: u32 = 4;

impl<R, F, I, BT> EmbedOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn embed_forward(operands: Checked<EmbedForward<Self>>) -> Tensor<Self, 3> {
        let operands = operands.into_inner();
        if operands.table.format().is_some_and(|format| !format.is_read_by(Reader::Rows)) {
            return reference::embed_forward(operands);
        }
        let EmbedForward { table, tokens, dtype, added } = operands;
        let tokens = tokens.into_primitive();
        match table {
            Weight::Float(table) => float(embed_forward(primitive(table), tokens, dtype.into(), added.map(primitive))),
            Weight::Quantized(table) => {
                let rows: Tensor<Self, 3> = float(quantized_embed(cube_quantized(table), tokens, dtype.into()));
                match added {
                    Some(x) => x + rows,
                    None => rows,
                }
            }
            stacked @ Weight::Stacked(_) => {
                let tokens = Tensor::from_primitive(tokens);
                reference::embed_forward(EmbedForward { table: stacked, tokens, dtype, added })
            }
        }
    }

    fn embed_backward(operands: Checked<EmbedBackward<Self>>) -> Tensor<Self, 2> {
        let EmbedBackward { grad, tokens, vocabulary, sum } = operands.into_inner();
        float(embed_backward(primitive(grad), tokens.into_primitive(), vocabulary, sum.map(primitive)))
    }
}

/// The rows of `table` at `tokens` `[batch_size, seq_length]`, added to `x` of the same `dtype` if
/// given: `[batch_size, seq_length, d_model]` of `dtype`.
fn embed_forward<R: CubeRuntime>(
    table: CubeTensor<R>,
    tokens: CubeTensor<R>,
    dtype: DType,
    x: Option<CubeTensor<R>>,
) -> CubeTensor<R> {
    let (table, stride) = rows(table);
    let [vocabulary, d_model] = [table.meta.shape()[0], table.meta.shape()[1]];
    let [batch_size, seq_length] = [tokens.meta.shape()[0], tokens.meta.shape()[1]];
    let out = empty(&table, [batch_size, seq_length, d_model], dtype);
    let adds = x.is_some();
    let x = x.map_or_else(|| out.clone(), contiguous);
    let vector = vector_width(&[&table, &out, &x], &[d_model, stride]);
    let units = batch_size * seq_length * d_model / vector;
    // SAFETY: each unit writes its own vectors below `units`; tokens are held within the table.
    unsafe {
        embed_kernel::launch_unchecked(
            &table.client,
            grid(units.div_ceil((UNITS * LOOKUPS) as usize)),
            CubeDim::new_1d(UNITS),
            vector,
            array(&table),
            array(&tokens),
            array(&x),
            array(&out),
            units as u32,
            (d_model / vector) as u32,
            (stride / vector) as u32,
            seq_length as u32,
            tokens.meta.strides()[0] as u32,
            tokens.meta.strides()[1] as u32,
            vocabulary as u32 - 1,
            adds,
            table.dtype.into(),
            dtype.into(),
            tokens.dtype.into(),
        );
    }
    out
}

/// The gradient of the table, `[vocabulary, d_model]` f32, from `grad` `[rows, d_model]` and
/// `tokens` `[batch_size, seq_length]` of as many, added to the earlier `sum`, in place if it is not shared.
fn embed_backward<R: CubeRuntime>(
    grad: CubeTensor<R>,
    tokens: CubeTensor<R>,
    vocabulary: usize,
    sum: Option<CubeTensor<R>>,
) -> CubeTensor<R> {
    let (grad, stride) = rows(grad);
    let [n_rows, d_model] = [grad.meta.shape()[0], grad.meta.shape()[1]];
    let tokens = flattened(tokens);
    let adds = sum.is_some();
    let out = match sum.map(contiguous) {
        Some(sum) if sum.can_mut() => sum,
        // A copy may have padded rows.
        Some(sum) => contiguous(sum.copy()),
        None => empty(&grad, [vocabulary, d_model], DType::F32),
    };
    let vector = vector_width(&[&grad, &out], &[d_model, stride]);
    let sizes = SizesLaunch::new(n_rows as u32, vocabulary as u32, (d_model / vector) as u32, (stride / vector) as u32);
    match vocabulary <= FEW_TOKENS || n_rows > MANY_ROWS * vocabulary {
        true => sum_sorted(grad, tokens, &out, vector, sizes, adds),
        false => sum_chained(grad, tokens, &out, vector, sizes, adds),
    }
    out
}

/// Tokens `[batch_size, seq_length]` as `[rows]`. Burn's own copy of repeated rows, such as
/// positions, sends their shape to the device.
fn flattened<R: CubeRuntime>(tokens: CubeTensor<R>) -> CubeTensor<R> {
    let [batch_size, seq_length] = [tokens.meta.shape()[0], tokens.meta.shape()[1]];
    let rows = batch_size * seq_length;
    if tokens.is_contiguous() {
        return reshape(tokens, [rows].into());
    }
    let out = empty(&tokens, [rows], tokens.dtype);
    // SAFETY: a unit writes the element of its own row, from within the tokens.
    unsafe {
        flatten_kernel::launch_unchecked(
            &tokens.client,
            grid(rows.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            array(&tokens),
            array(&out),
            rows as u32,
            seq_length as u32,
            tokens.meta.strides()[0] as u32,
            tokens.meta.strides()[1] as u32,
            tokens.dtype.into(),
        );
    }
    out
}

#[cube(launch_unchecked)]
fn flatten_kernel<I: Int>(
    tokens: &Array<I>,
    out: &mut Array<I>,
    rows: u32,
    seq_length: u32,
    batch_step: u32,
    token_step: u32,
    #[define(I)] _dtype: StorageType,
) {
    let row = ABSOLUTE_POS as u32;
    if row < rows {
        out[row as usize] = tokens[(row / seq_length * batch_step + row % seq_length * token_step) as usize];
    }
}

/// The sizes of a sum; columns and row stride in vectors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    rows: u32,
    vocabulary: u32,
    columns: u32,
    stride: u32,
}

#[cube(launch_unchecked)]
fn embed_kernel<F: Float, O: Float, I: Int, N: Size>(
    table: &Array<Vector<F, N>>,
    tokens: &Array<I>,
    x: &Array<Vector<O, N>>,
    out: &mut Array<Vector<O, N>>,
    units: u32,
    columns: u32,
    stride: u32,
    seq_length: u32,
    batch_step: u32,
    token_step: u32,
    last: u32,
    #[comptime] adds: bool,
    #[define(F)] _dtype: StorageType,
    #[define(O)] _out_dtype: StorageType,
    #[define(I)] _token_dtype: StorageType,
) {
    let first = CUBE_POS as u32 * comptime!(UNITS * LOOKUPS) + UNIT_POS;
    if first >= units {
        terminate!();
    }
    let mut tokens_held = Array::<u32>::new(LOOKUPS as usize);
    #[unroll]
    for i in 0..LOOKUPS {
        let row = min(first + i * UNITS, units - 1) / columns;
        let at = row / seq_length * batch_step + row % seq_length * token_step;
        tokens_held[i as usize] = clamp_index::<I>(tokens[at as usize], last);
    }
    let mut vectors = Array::<Vector<f32, N>>::new(LOOKUPS as usize);
    #[unroll]
    for i in 0..LOOKUPS {
        let column = min(first + i * UNITS, units - 1) % columns;
        vectors[i as usize] = Vector::cast_from(table[(tokens_held[i as usize] * stride + column) as usize]);
    }
    #[unroll]
    for i in 0..LOOKUPS {
        let at = first + i * UNITS;
        if at < units {
            let mut vector = vectors[i as usize];
            if adds {
                vector += Vector::cast_from(x[at as usize]);
            }
            out[at as usize] = Vector::cast_from(vector);
        }
    }
}

/// A row's token, clamped to the vocabulary like the lookup's.
#[cube]
fn key<I: Int>(keys: &Array<I>, row: u32, last: u32) -> u32 {
    clamp_index::<I>(keys[row as usize], last)
}

/// The sum of every n-th row in a list from `start` to `end`.
#[cube]
fn listed<F: Float, N: Size>(
    grad: &Array<Vector<F, N>>,
    list: &Slice<u32>,
    start: u32,
    end: u32,
    column: u32,
    #[comptime] lanes: u32,
    sizes: &Sizes,
) -> Vector<f32, N> {
    let mut sum = Vector::<f32, N>::new(0.0);
    let mut place = start;
    while place + comptime!((LOADS - 1) * lanes) < end {
        #[unroll]
        for load in 0..LOADS {
            let row = list[(place + load * lanes) as usize];
            sum += Vector::cast_from(grad[(row * sizes.stride + column) as usize]);
        }
        place += comptime!(LOADS * lanes);
    }
    while place < end {
        sum += Vector::cast_from(grad[(list[place as usize] * sizes.stride + column) as usize]);
        place += lanes;
    }
    sum
}

/// The sum over a cube's lanes, for the first of them.
#[cube]
fn across_lanes<N: Size>(sum: Vector<f32, N>, #[comptime] lanes: u32) -> Vector<f32, N> {
    let mut sums = SharedMemory::<Vector<f32, N>>::new(UNITS as usize);
    // This may overwrite shared memory read before.
    sync_cube();
    sums[UNIT_POS as usize] = sum;
    sync_cube();
    #[unroll]
    for halving in 0..comptime!(lanes.trailing_zeros()) {
        let half = comptime!(UNITS >> (halving + 1));
        if UNIT_POS < half {
            sums[UNIT_POS as usize] = sums[UNIT_POS as usize] + sums[(UNIT_POS + half) as usize];
        }
        sync_cube();
    }
    sums[UNIT_POS as usize]
}

/// The inclusive prefix sum of a value over the units of a cube; `sums` has it for all of them
/// afterwards.
#[cube]
fn sum_up_to(sums: &mut SharedMemory<u32>, value: u32) -> u32 {
    let mut sum = value;
    // This may overwrite shared memory read before.
    sync_cube();
    sums[UNIT_POS as usize] = sum;
    sync_cube();
    #[unroll]
    for doubling in 0..comptime!(UNITS.trailing_zeros()) {
        let step = comptime!(1u32 << doubling);
        if UNIT_POS >= step {
            sum += sums[(UNIT_POS - step) as usize];
        }
        sync_cube();
        sums[UNIT_POS as usize] = sum;
        sync_cube();
    }
    sum
}
