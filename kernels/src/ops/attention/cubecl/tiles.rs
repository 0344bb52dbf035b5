//! Attention on any device: products in f32, tile by tile through shared memory.
//!
//! A cube holds a square of units, and each unit a block of four by four of a tile: of the scores, of their gradients,
//! and of each slice of the accumulators. All three products of a tile have one of two shapes: [`dots`], of the rows
//! of two slices, and [`accumulate`], of a tile and a slice.

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::mask::{HIDDEN, MaskKind, Sizes, keys_of, last_key, queries_of, sees};
use super::parts::{OUTSIDE, Place, Rows, cube_place, kept, kept_pair};
use super::{CubeMask, Dims, Heads, rounds, sizes, width};
use crate::cubecl::{array, empty, grid, launch};
use crate::ops::attention::AttentionOptions;
use crate::random::cubecl::{Rounds, row_bits};

/// Four elements side by side.
type Quad = Vector<f32, Const<4>>;

/// What the kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Plan {
    /// A tile has four times this many rows and columns, a cube the square of it of units.
    side: usize,
    head_dim: usize,
    mask: MaskKind,
    drops: bool,
}

impl Plan {
    /// Rows and columns of a tile.
    const fn tile(&self) -> usize {
        4 * self.side
    }

    /// How many slices a head is cut into, each as wide as a tile.
    const fn slices(&self) -> usize {
        self.head_dim.div_ceil(self.tile())
    }

    fn units(&self) -> CubeDim {
        CubeDim::new_1d((self.side * self.side) as u32)
    }

    /// The largest tiles that the device has room for and a head fills.
    pub(super) fn choose<R: CubeRuntime>(
        client: &ComputeClient<R>,
        head_dim: usize,
        mask: MaskKind,
        drops: bool,
    ) -> Self {
        let plan = |side| Self { side, head_dim, mask, drops };
        let hardware = &client.properties().hardware;
        let large = plan(16);
        let fits = large.shared_bytes() <= hardware.max_shared_memory_size;
        if fits && head_dim > 32 { large } else { plan(8) }
    }

    /// Shared memory of the largest kernel: a slice of rows and one of columns, a tile, and partial sums of rows.
    const fn shared_bytes(&self) -> usize {
        16 * (2 * self.tile() * (self.side + 1) + self.tile() * self.side + self.side * self.side)
    }
}

/// Units that share a row in the kernel of row statistics, and rows of a cube.
const UNITS_OF_ROW: u32 = 8;
const ROWS: u32 = 32;

pub(super) fn forward<R: CubeRuntime>(
    [query, key, value]: [&Heads<R>; 3],
    output: &Heads<R>,
    log_sum_exp: &CubeTensor<R>,
    dims: Dims,
    mask: &CubeMask<R>,
    options: AttentionOptions,
) {
    let plan = Plan::choose(&query.tensor.client, dims.head_dim, mask.kind(), options.dropout.is_some());
    let width = width(&[query, key, value, output], dims.head_dim, 4);
    let ints = mask.ints(&query.tensor);
    let cubes = dims.batch_size * dims.n_heads * dims.seq_length.div_ceil(plan.tile());
    // SAFETY: all indices are below the sizes that `dims` gives, and each cube writes rows of its own.
    unsafe {
        launch!(
            forward_kernel::ForwardKernel,
            &query.tensor.client,
            grid(cubes),
            plan.units(),
            [N = width],
            [F = query.tensor.dtype, I = ints.dtype],
            [
                query: Array<Vector<forward_kernel::F, forward_kernel::N>> = array(&query.tensor),
                key: Array<Vector<forward_kernel::F, forward_kernel::N>> = array(&key.tensor),
                value: Array<Vector<forward_kernel::F, forward_kernel::N>> = array(&value.tensor),
                ints: Array<forward_kernel::I> = array(&ints),
                output: Array<Vector<forward_kernel::F, forward_kernel::N>> = array(&output.tensor),
                log_sum_exp: Array<f32> = array(log_sum_exp),
                query_place: Place = query.place(width),
                key_place: Place = key.place(width),
                value_place: Place = value.place(width),
                output_place: Place = output.place(width),
                sizes: Sizes = sizes(dims, mask, options),
                rounds: Rounds = rounds(options),
            ],
            [plan: Plan = plan]
        );
    }
}

/// For each row of scores, `[batch_size, n_heads, seq_length, 2]`: its log-sum-exp, and the product of its output and
/// of the output's gradient.
pub(super) fn row_statistics<R: CubeRuntime>(
    grad: &Heads<R>,
    output: &Heads<R>,
    log_sum_exp: CubeTensor<R>,
    dims: Dims,
) -> CubeTensor<R> {
    let Dims { batch_size, n_heads, seq_length, head_dim, .. } = dims;
    let width = width(&[grad, output], head_dim, 8);
    let rows = batch_size * n_heads * seq_length;
    let statistics = empty(&log_sum_exp, [batch_size, n_heads, seq_length, 2], log_sum_exp.dtype);
    // SAFETY: each row below `rows` is read and written by units of its own.
    unsafe {
        launch!(
            row_statistics_kernel::RowStatisticsKernel,
            &grad.tensor.client,
            grid(rows.div_ceil(ROWS as usize)),
            CubeDim::new_1d(ROWS * UNITS_OF_ROW),
            [N = width],
            [F = grad.tensor.dtype, O = output.tensor.dtype],
            [
                grad: Array<Vector<row_statistics_kernel::F, row_statistics_kernel::N>> = array(&grad.tensor),
                output: Array<Vector<row_statistics_kernel::O, row_statistics_kernel::N>> = array(&output.tensor),
                log_sum_exp: Array<f32> = array(&log_sum_exp),
                statistics: Array<f32> = array(&statistics),
                grad_place: Place = grad.place(width),
                output_place: Place = output.place(width),
                rows: u32 = rows as u32,
                n_heads: u32 = n_heads as u32,
                queries: u32 = seq_length as u32,
                vectors: u32 = (head_dim / width) as u32,
            ],
            []
        );
    }
    statistics
}

pub(super) fn backward_keys<R: CubeRuntime>(
    [query, key, value, grad]: [&Heads<R>; 4],
    rows: &CubeTensor<R>,
    [d_key, d_value]: [&Heads<R>; 2],
    dims: Dims,
    mask: &CubeMask<R>,
    options: AttentionOptions,
) {
    let plan = Plan::choose(&query.tensor.client, dims.head_dim, mask.kind(), options.dropout.is_some());
    let width = width(&[query, key, value, grad, d_key, d_value], dims.head_dim, 4);
    let ints = mask.ints(&query.tensor);
    let cubes = dims.batch_size * dims.n_kv_heads * dims.keys.div_ceil(plan.tile());
    // SAFETY: all indices are below the sizes that `dims` gives, and each cube writes rows of its own.
    unsafe {
        launch!(
            backward_keys_kernel::BackwardKeysKernel,
            &query.tensor.client,
            grid(cubes),
            plan.units(),
            [N = width],
            [F = query.tensor.dtype, I = ints.dtype],
            [
                query: Array<Vector<backward_keys_kernel::F, backward_keys_kernel::N>> = array(&query.tensor),
                key: Array<Vector<backward_keys_kernel::F, backward_keys_kernel::N>> = array(&key.tensor),
                value: Array<Vector<backward_keys_kernel::F, backward_keys_kernel::N>> = array(&value.tensor),
                grad: Array<Vector<backward_keys_kernel::F, backward_keys_kernel::N>> = array(&grad.tensor),
                ints: Array<backward_keys_kernel::I> = array(&ints),
                statistics: Array<f32> = array(rows),
                d_key: Array<Vector<backward_keys_kernel::F, backward_keys_kernel::N>> = array(&d_key.tensor),
                d_value: Array<Vector<backward_keys_kernel::F, backward_keys_kernel::N>> = array(&d_value.tensor),
                query_place: Place = query.place(width),
                key_place: Place = key.place(width),
                value_place: Place = value.place(width),
                grad_place: Place = grad.place(width),
                d_key_place: Place = d_key.place(width),
                d_value_place: Place = d_value.place(width),
                sizes: Sizes = sizes(dims, mask, options),
                rounds: Rounds = rounds(options),
            ],
            [plan: Plan = plan]
        );
    }
}

pub(super) fn backward_queries<R: CubeRuntime>(
    [query, key, value, grad]: [&Heads<R>; 4],
    rows: &CubeTensor<R>,
    d_query: &Heads<R>,
    dims: Dims,
    mask: &CubeMask<R>,
    options: AttentionOptions,
) {
    let plan = Plan::choose(&query.tensor.client, dims.head_dim, mask.kind(), options.dropout.is_some());
    let width = width(&[query, key, value, grad, d_query], dims.head_dim, 4);
    let ints = mask.ints(&query.tensor);
    let cubes = dims.batch_size * dims.n_heads * dims.seq_length.div_ceil(plan.tile());
    // SAFETY: all indices are below the sizes that `dims` gives, and each cube writes rows of its own.
    unsafe {
        launch!(
            backward_queries_kernel::BackwardQueriesKernel,
            &query.tensor.client,
            grid(cubes),
            plan.units(),
            [N = width],
            [F = query.tensor.dtype, I = ints.dtype],
            [
                query: Array<Vector<backward_queries_kernel::F, backward_queries_kernel::N>> = array(&query.tensor),
                key: Array<Vector<backward_queries_kernel::F, backward_queries_kernel::N>> = array(&key.tensor),
                value: Array<Vector<backward_queries_kernel::F, backward_queries_kernel::N>> = array(&value.tensor),
                grad: Array<Vector<backward_queries_kernel::F, backward_queries_kernel::N>> = array(&grad.tensor),
                ints: Array<backward_queries_kernel::I> = array(&ints),
                statistics: Array<f32> = array(rows),
                d_query: Array<Vector<backward_queries_kernel::F, backward_queries_kernel::N>> = array(&d_query.tensor),
                query_place: Place = query.place(width),
                key_place: Place = key.place(width),
                value_place: Place = value.place(width),
                grad_place: Place = grad.place(width),
                d_query_place: Place = d_query.place(width),
                sizes: Sizes = sizes(dims, mask, options),
                rounds: Rounds = rounds(options),
            ],
            [plan: Plan = plan]
        );
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn forward_kernel<F: Float, I: Int, N: Size>(
    query: &Array<Vector<F, N>>,
    key: &Array<Vector<F, N>>,
    value: &Array<Vector<F, N>>,
    ints: &Array<I>,
    output: &mut Array<Vector<F, N>>,
    log_sum_exp: &mut Array<f32>,
    query_place: &Place,
    key_place: &Place,
    value_place: &Place,
    output_place: &Place,
    sizes: &Sizes,
    rounds: &Rounds,
    #[comptime] plan: Plan,
    #[define(F)] _dtype: StorageType,
    #[define(I)] _int: StorageType,
) {
    let side = comptime!(plan.side as u32);
    let tile = comptime!(plan.tile() as u32);
    let slices = comptime!(plan.slices());
    let count = comptime!(slices as u32);
    let mask = comptime!(plan.mask);
    let (number, head, batch) = cube_place(sizes.queries, sizes.n_heads, sizes, tile);
    if batch >= sizes.batch_size {
        terminate!();
    }
    // Under a causal mask later queries see more keys: the longest work goes first.
    let first = (sizes.queries.div_ceil(tile) - 1 - number) * tile;
    let kv_head = head / (sizes.n_heads / sizes.n_kv_heads);
    let queries = query_place.rows(batch, head, sizes.queries);
    let keys = key_place.rows(batch, kv_head, sizes.keys);
    let values = value_place.rows(batch, kv_head, sizes.keys);
    let line = (batch * sizes.n_heads + head) * sizes.queries;

    let mut rows = SharedMemory::<Quad>::new(comptime!(plan.tile() * (plan.side + 1)));
    let mut columns = SharedMemory::<Quad>::new(comptime!(plan.tile() * (plan.side + 1)));
    let mut scores_tile = SharedMemory::<Quad>::new(comptime!(plan.tile() * plan.side));
    let mut partial = SharedMemory::<Quad>::new(comptime!(plan.side * plan.side));

    let x = UNIT_POS % side;
    let y = UNIT_POS / side;
    let mut last = Array::<i32>::new(4usize);
    let mut bits = Array::<u32>::new(4usize);
    #[unroll]
    for i in 0..4usize {
        let row = min(first + y * 4 + i as u32, sizes.queries - 1);
        last[i] = last_key::<I>(ints, batch, row, sizes, mask);
        if comptime!(plan.drops) {
            bits[i] = row_bits(line + row, rounds);
        }
    }

    let mut scores = Array::<f32>::new(16usize);
    let mut sums = zeroed(slices);
    let mut maximum = Quad::new(OUTSIDE);
    let mut total = Quad::new(0.0f32);
    if comptime!(slices == 1) {
        load::<F, N>(query, &queries, first, &mut rows, 0u32, false, plan);
    }
    let (start, end) = keys_of::<I>(ints, batch, first, sizes, tile, mask);
    for at in start / tile..end.div_ceil(tile) {
        let first_key = at * tile;
        clear(&mut scores);
        for slice in 0..count {
            sync_cube();
            if comptime!(slices > 1) {
                load::<F, N>(query, &queries, first, &mut rows, slice, false, plan);
            }
            load::<F, N>(key, &keys, first_key, &mut columns, slice, true, plan);
            sync_cube();
            dots(&rows, &columns, &mut scores, slice, plan);
        }

        let mut highest = Quad::new(OUTSIDE);
        #[unroll]
        for i in 0..4usize {
            let mut row_highest = OUTSIDE.runtime();
            #[unroll]
            for j in 0..4usize {
                let key = first_key + x * 4 + j as u32;
                let score = select(sees(key, last[i], sizes), scores[i * 4 + j] * sizes.scale, HIDDEN);
                let score = select(key < sizes.keys, score, OUTSIDE);
                scores[i * 4 + j] = score;
                row_highest = max(row_highest, score);
            }
            highest[i] = row_highest;
        }
        partial[(x * side + y) as usize] = highest;
        sync_cube();
        let mut highest = maximum;
        for other in 0..side {
            highest = max(highest, partial[(other * side + y) as usize]);
        }
        let shrink = (maximum - highest).exp();
        maximum = highest;
        total *= shrink;
        #[unroll]
        for i in 0..4usize {
            let mut probabilities = Quad::new(0.0f32);
            let mut row_total = total[i];
            #[unroll]
            for j in 0..4usize {
                let probability = (scores[i * 4 + j] - highest[i]).exp();
                row_total += probability;
                probabilities[j] = probability;
            }
            if comptime!(plan.drops) {
                #[unroll]
                for pair in 0..2usize {
                    let factors = kept_pair(bits[i], (first_key + x * 4) / 2 + pair as u32, sizes, rounds);
                    probabilities[comptime!(2 * pair)] = probabilities[comptime!(2 * pair)] * factors[0usize];
                    probabilities[comptime!(2 * pair + 1)] = probabilities[comptime!(2 * pair + 1)] * factors[1usize];
                }
            }
            total[i] = row_total;
            scores_tile[((y * 4 + i as u32) * side + x) as usize] = probabilities;
            #[unroll]
            for slice in 0..slices {
                sums[slice * 4 + i] *= Quad::new(shrink[i]);
            }
        }
        #[unroll]
        for slice in 0..slices {
            if comptime!(slice > 0) {
                sync_cube();
            }
            load::<F, N>(value, &values, first_key, &mut columns, comptime!(slice as u32), true, plan);
            sync_cube();
            accumulate(&scores_tile, &columns, &mut sums, slice, plan);
        }
    }

    sync_cube();
    partial[(x * side + y) as usize] = total;
    sync_cube();
    let mut total = Quad::new(0.0f32);
    for other in 0..side {
        total += partial[(other * side + y) as usize];
    }
    let log = maximum + total.ln();
    #[unroll]
    for i in 0..4usize {
        let row = first + y * 4 + i as u32;
        if row < sizes.queries {
            if x == 0 {
                log_sum_exp[(line + row) as usize] = log[i];
            }
            #[unroll]
            for slice in 0..slices {
                sums[slice * 4 + i] /= Quad::new(total[i]);
            }
        }
    }
    store::<F, N>(output, &output_place.rows(batch, head, sizes.queries), first, &sums, plan);
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn row_statistics_kernel<F: Float, O: Float, N: Size>(
    grad: &Array<Vector<F, N>>,
    output: &Array<Vector<O, N>>,
    log_sum_exp: &Array<f32>,
    statistics: &mut Array<f32>,
    grad_place: &Place,
    output_place: &Place,
    rows: u32,
    n_heads: u32,
    queries: u32,
    vectors: u32,
    #[define(F)] _dtype: StorageType,
    #[define(O)] _output_dtype: StorageType,
) {
    let mut partial = SharedMemory::<f32>::new(comptime!((ROWS * UNITS_OF_ROW) as usize));
    let row = CUBE_POS as u32 * ROWS + UNIT_POS / UNITS_OF_ROW;
    let lane = UNIT_POS % UNITS_OF_ROW;
    let mut sum = 0.0f32;
    if row < rows {
        let query = row % queries;
        let head = row / queries % n_heads;
        let batch = row / queries / n_heads;
        let grads = grad_place.rows(batch, head, queries);
        let outputs = output_place.rows(batch, head, queries);
        let grad_at = grads.at + query * grads.stride;
        let output_at = outputs.at + query * outputs.stride;
        for at in range_stepped(lane, vectors, UNITS_OF_ROW) {
            let product = Vector::<f32, N>::cast_from(grad[(grad_at + at) as usize])
                * Vector::<f32, N>::cast_from(output[(output_at + at) as usize]);
            #[unroll]
            for lane in 0..N::value() {
                sum += product[lane];
            }
        }
    }
    partial[UNIT_POS as usize] = sum;
    sync_cube();
    if row < rows && lane == 0 {
        let mut sum = 0.0f32;
        #[unroll]
        for unit in 0..UNITS_OF_ROW {
            sum += partial[(UNIT_POS + unit) as usize];
        }
        statistics[(row * 2) as usize] = log_sum_exp[row as usize];
        statistics[(row * 2 + 1) as usize] = sum;
    }
}

/// Gradients of the keys and values of a tile, from all queries that see any of them. The tiles of scores stand on
/// their heads here, keys down and queries across.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn backward_keys_kernel<F: Float, I: Int, N: Size>(
    query: &Array<Vector<F, N>>,
    key: &Array<Vector<F, N>>,
    value: &Array<Vector<F, N>>,
    grad: &Array<Vector<F, N>>,
    ints: &Array<I>,
    statistics: &Array<f32>,
    d_key: &mut Array<Vector<F, N>>,
    d_value: &mut Array<Vector<F, N>>,
    query_place: &Place,
    key_place: &Place,
    value_place: &Place,
    grad_place: &Place,
    d_key_place: &Place,
    d_value_place: &Place,
    sizes: &Sizes,
    rounds: &Rounds,
    #[comptime] plan: Plan,
    #[define(F)] _dtype: StorageType,
    #[define(I)] _int: StorageType,
) {
    let side = comptime!(plan.side as u32);
    let tile = comptime!(plan.tile() as u32);
    let slices = comptime!(plan.slices());
    let count = comptime!(slices as u32);
    let mask = comptime!(plan.mask);
    let (number, kv_head, batch) = cube_place(sizes.keys, sizes.n_kv_heads, sizes, tile);
    if batch >= sizes.batch_size {
        terminate!();
    }
    let first = number * tile;
    let group = sizes.n_heads / sizes.n_kv_heads;
    let keys = key_place.rows(batch, kv_head, sizes.keys);
    let values = value_place.rows(batch, kv_head, sizes.keys);

    let mut rows = SharedMemory::<Quad>::new(comptime!(plan.tile() * (plan.side + 1)));
    let mut columns = SharedMemory::<Quad>::new(comptime!(plan.tile() * (plan.side + 1)));
    let mut scores_tile = SharedMemory::<Quad>::new(comptime!(plan.tile() * plan.side));

    let x = UNIT_POS % side;
    let y = UNIT_POS / side;
    let mut scores = Array::<f32>::new(16usize);
    let mut d_scores = Array::<f32>::new(16usize);
    let mut key_sums = zeroed(slices);
    let mut value_sums = zeroed(slices);
    let (start, end) = queries_of::<I>(ints, batch, first, sizes, tile, mask);
    for head in kv_head * group..(kv_head + 1) * group {
        let queries = query_place.rows(batch, head, sizes.queries);
        let grads = grad_place.rows(batch, head, sizes.queries);
        let line = (batch * sizes.n_heads + head) * sizes.queries;
        for at in start / tile..end.div_ceil(tile) {
            let first_query = at * tile;
            clear(&mut scores);
            clear(&mut d_scores);
            for slice in 0..count {
                sync_cube();
                load::<F, N>(key, &keys, first, &mut rows, slice, false, plan);
                load::<F, N>(query, &queries, first_query, &mut columns, slice, true, plan);
                sync_cube();
                dots(&rows, &columns, &mut scores, slice, plan);
            }
            for slice in 0..count {
                sync_cube();
                load::<F, N>(value, &values, first, &mut rows, slice, false, plan);
                load::<F, N>(grad, &grads, first_query, &mut columns, slice, true, plan);
                sync_cube();
                dots(&rows, &columns, &mut d_scores, slice, plan);
            }

            #[unroll]
            for j in 0..4usize {
                let row = first_query + x * 4 + j as u32;
                let inside = row < sizes.queries;
                let row = min(row, sizes.queries - 1);
                let last = last_key::<I>(ints, batch, row, sizes, mask);
                let log = statistics[((line + row) * 2) as usize];
                let delta = statistics[((line + row) * 2 + 1) as usize];
                let mut bits = 0u32;
                if comptime!(plan.drops) {
                    bits = row_bits(line + row, rounds);
                }
                #[unroll]
                for i in 0..4usize {
                    let key = first + y * 4 + i as u32;
                    let (dropped, d_score) = score_gradient(
                        scores[i * 4 + j],
                        d_scores[i * 4 + j],
                        sees(key, last, sizes),
                        inside,
                        log,
                        delta,
                        bits,
                        key,
                        sizes,
                        rounds,
                        comptime!(plan.drops),
                    );
                    scores[i * 4 + j] = dropped;
                    d_scores[i * 4 + j] = d_score;
                }
            }

            write_tile(&scores, &mut scores_tile, plan);
            #[unroll]
            for slice in 0..slices {
                if comptime!(slices > 1) {
                    sync_cube();
                    load::<F, N>(grad, &grads, first_query, &mut columns, comptime!(slice as u32), true, plan);
                }
                sync_cube();
                accumulate(&scores_tile, &columns, &mut value_sums, slice, plan);
            }
            sync_cube();
            write_tile(&d_scores, &mut scores_tile, plan);
            #[unroll]
            for slice in 0..slices {
                if comptime!(slice > 0) {
                    sync_cube();
                }
                load::<F, N>(query, &queries, first_query, &mut columns, comptime!(slice as u32), true, plan);
                sync_cube();
                accumulate(&scores_tile, &columns, &mut key_sums, slice, plan);
            }
        }
    }
    store::<F, N>(d_key, &d_key_place.rows(batch, kv_head, sizes.keys), first, &key_sums, plan);
    store::<F, N>(d_value, &d_value_place.rows(batch, kv_head, sizes.keys), first, &value_sums, plan);
}

/// Gradients of the queries of a tile, from all keys that any of them sees.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn backward_queries_kernel<F: Float, I: Int, N: Size>(
    query: &Array<Vector<F, N>>,
    key: &Array<Vector<F, N>>,
    value: &Array<Vector<F, N>>,
    grad: &Array<Vector<F, N>>,
    ints: &Array<I>,
    statistics: &Array<f32>,
    d_query: &mut Array<Vector<F, N>>,
    query_place: &Place,
    key_place: &Place,
    value_place: &Place,
    grad_place: &Place,
    d_query_place: &Place,
    sizes: &Sizes,
    rounds: &Rounds,
    #[comptime] plan: Plan,
    #[define(F)] _dtype: StorageType,
    #[define(I)] _int: StorageType,
) {
    let side = comptime!(plan.side as u32);
    let tile = comptime!(plan.tile() as u32);
    let slices = comptime!(plan.slices());
    let count = comptime!(slices as u32);
    let mask = comptime!(plan.mask);
    let (number, head, batch) = cube_place(sizes.queries, sizes.n_heads, sizes, tile);
    if batch >= sizes.batch_size {
        terminate!();
    }
    let first = (sizes.queries.div_ceil(tile) - 1 - number) * tile;
    let kv_head = head / (sizes.n_heads / sizes.n_kv_heads);
    let queries = query_place.rows(batch, head, sizes.queries);
    let grads = grad_place.rows(batch, head, sizes.queries);
    let keys = key_place.rows(batch, kv_head, sizes.keys);
    let values = value_place.rows(batch, kv_head, sizes.keys);
    let line = (batch * sizes.n_heads + head) * sizes.queries;

    let mut rows = SharedMemory::<Quad>::new(comptime!(plan.tile() * (plan.side + 1)));
    let mut columns = SharedMemory::<Quad>::new(comptime!(plan.tile() * (plan.side + 1)));
    let mut scores_tile = SharedMemory::<Quad>::new(comptime!(plan.tile() * plan.side));

    let x = UNIT_POS % side;
    let y = UNIT_POS / side;
    let mut last = Array::<i32>::new(4usize);
    let mut log = Array::<f32>::new(4usize);
    let mut delta = Array::<f32>::new(4usize);
    let mut bits = Array::<u32>::new(4usize);
    #[unroll]
    for i in 0..4usize {
        let row = min(first + y * 4 + i as u32, sizes.queries - 1);
        last[i] = last_key::<I>(ints, batch, row, sizes, mask);
        log[i] = statistics[((line + row) * 2) as usize];
        delta[i] = statistics[((line + row) * 2 + 1) as usize];
        bits[i] = 0u32;
        if comptime!(plan.drops) {
            bits[i] = row_bits(line + row, rounds);
        }
    }

    let mut scores = Array::<f32>::new(16usize);
    let mut d_scores = Array::<f32>::new(16usize);
    let mut sums = zeroed(slices);
    let (start, end) = keys_of::<I>(ints, batch, first, sizes, tile, mask);
    for at in start / tile..end.div_ceil(tile) {
        let first_key = at * tile;
        clear(&mut scores);
        clear(&mut d_scores);
        for slice in 0..count {
            sync_cube();
            load::<F, N>(grad, &grads, first, &mut rows, slice, false, plan);
            load::<F, N>(value, &values, first_key, &mut columns, slice, true, plan);
            sync_cube();
            dots(&rows, &columns, &mut d_scores, slice, plan);
        }
        for slice in 0..count {
            sync_cube();
            load::<F, N>(query, &queries, first, &mut rows, slice, false, plan);
            load::<F, N>(key, &keys, first_key, &mut columns, slice, true, plan);
            sync_cube();
            dots(&rows, &columns, &mut scores, slice, plan);
        }

        #[unroll]
        for i in 0..4usize {
            #[unroll]
            for j in 0..4usize {
                let key = first_key + x * 4 + j as u32;
                let (_, d_score) = score_gradient(
                    scores[i * 4 + j],
                    d_scores[i * 4 + j],
                    sees(key, last[i], sizes),
                    key < sizes.keys,
                    log[i],
                    delta[i],
                    bits[i],
                    key,
                    sizes,
                    rounds,
                    comptime!(plan.drops),
                );
                d_scores[i * 4 + j] = d_score;
            }
        }
        write_tile(&d_scores, &mut scores_tile, plan);
        #[unroll]
        for slice in 0..slices {
            if comptime!(slices > 1) {
                sync_cube();
                load::<F, N>(key, &keys, first_key, &mut columns, comptime!(slice as u32), true, plan);
            }
            sync_cube();
            accumulate(&scores_tile, &columns, &mut sums, slice, plan);
        }
    }
    store::<F, N>(d_query, &d_query_place.rows(batch, head, sizes.queries), first, &sums, plan);
}

/// From a score and the gradient of its dropped probability: the dropped probability, and the score's gradient.
#[cube]
#[allow(clippy::too_many_arguments)]
fn score_gradient(
    score: f32,
    d_dropped: f32,
    visible: bool,
    inside: bool,
    log_sum_exp: f32,
    delta: f32,
    bits: u32,
    key: u32,
    sizes: &Sizes,
    rounds: &Rounds,
    #[comptime] drops: bool,
) -> (f32, f32) {
    let score = select(visible, score * sizes.scale, HIDDEN);
    let probability = select(inside, (score - log_sum_exp).exp(), 0.0f32);
    let mut dropped = probability;
    let mut d_probability = d_dropped;
    if drops {
        let factor = kept(bits, key, sizes, rounds);
        dropped *= factor;
        d_probability *= factor;
    }
    (dropped, probability * (d_probability - delta) * sizes.scale)
}

#[cube]
fn clear(scores: &mut Array<f32>) {
    #[unroll]
    for at in 0..16usize {
        scores[at] = 0.0f32;
    }
}

/// Accumulators: four rows of four elements of each slice.
#[cube]
fn zeroed(#[comptime] slices: usize) -> Array<Quad> {
    let mut sums = Array::<Quad>::new(comptime!(slices * 4));
    #[unroll]
    for at in 0..comptime!(slices * 4) {
        sums[at] = Quad::new(0.0f32);
    }
    sums
}

/// Where a row of a slice lies in shared memory. Columns of a unit's block come from four rows of a slice: spread, so
/// that neighbouring units read neighbouring rows, whose padding sends them to different banks.
#[cube]
fn slot(row: u32, #[comptime] spread: bool, #[comptime] plan: Plan) -> u32 {
    let side = comptime!(plan.side as u32);
    if spread { (row % 4 * side + row / 4) * (side + 1) } else { row * (side + 1) }
}

/// Loads a slice of a tile's rows, from row `first` on, with zeros after the last row and the head's last element.
#[cube]
#[allow(clippy::too_many_arguments)]
fn load<F: Float, N: Size>(
    from: &Array<Vector<F, N>>,
    rows: &Rows,
    first: u32,
    to: &mut SharedMemory<Quad>,
    slice: u32,
    #[comptime] spread: bool,
    #[comptime] plan: Plan,
) {
    let side = comptime!(plan.side as u32);
    let head_dim = comptime!(plan.head_dim as u32);
    let lanes = N::value();
    let width = comptime!(lanes as u32);
    let x = UNIT_POS % side;
    let y = UNIT_POS / side;
    let column = slice * comptime!(4 * side) + x * 4;
    #[unroll]
    for step in 0..4u32 {
        let row = y + step * side;
        let mut quad = Quad::new(0.0f32);
        if first + row < rows.end {
            let at = rows.at + (first + row) * rows.stride + column / width;
            #[unroll]
            for part in 0..comptime!(4 / width) {
                if column + part * width < head_dim {
                    let vector = from[(at + part) as usize];
                    #[unroll]
                    for lane in 0..width {
                        quad[comptime!((part * width + lane) as usize)] = f32::cast_from(vector[lane as usize]);
                    }
                }
            }
        }
        to[(slot(row, spread, plan) + x) as usize] = quad;
    }
}

/// Stores a tile's accumulators in its rows, from row `first` on.
#[cube]
fn store<F: Float, N: Size>(
    to: &mut Array<Vector<F, N>>,
    rows: &Rows,
    first: u32,
    sums: &Array<Quad>,
    #[comptime] plan: Plan,
) {
    let side = comptime!(plan.side as u32);
    let head_dim = comptime!(plan.head_dim as u32);
    let lanes = N::value();
    let width = comptime!(lanes as u32);
    let x = UNIT_POS % side;
    let y = UNIT_POS / side;
    #[unroll]
    for i in 0..4u32 {
        let row = first + y * 4 + i;
        if row < rows.end {
            #[unroll]
            for slice in 0..comptime!(plan.slices() as u32) {
                let column = slice * comptime!(4 * side) + x * 4;
                let at = rows.at + row * rows.stride + column / width;
                let quad = sums[comptime!((slice * 4 + i) as usize)];
                #[unroll]
                for part in 0..comptime!(4 / width) {
                    if column + part * width < head_dim {
                        let mut vector = Vector::<F, N>::empty();
                        #[unroll]
                        for lane in 0..width {
                            vector[lane as usize] = F::cast_from(quad[comptime!((part * width + lane) as usize)]);
                        }
                        to[(at + part) as usize] = vector;
                    }
                }
            }
        }
    }
}

/// Adds to a unit's block of scores the products of its rows, with the unit's columns, over a slice.
#[cube]
fn dots(
    rows: &SharedMemory<Quad>,
    columns: &SharedMemory<Quad>,
    scores: &mut Array<f32>,
    slice: u32,
    #[comptime] plan: Plan,
) {
    let side = comptime!(plan.side as u32);
    let depth = min(comptime!(plan.head_dim.div_ceil(4) as u32) - slice * side, side);
    let x = UNIT_POS % side;
    let y = UNIT_POS / side;
    let mut right = Array::<Quad>::new(4usize);
    for at in 0..depth {
        #[unroll]
        for j in 0..4usize {
            right[j] = columns[(slot(x * 4 + j as u32, true, plan) + at) as usize];
        }
        #[unroll]
        for i in 0..4usize {
            let left = rows[(slot(y * 4 + i as u32, false, plan) + at) as usize];
            #[unroll]
            for j in 0..4usize {
                let other = right[j];
                let mut sum = scores[i * 4 + j];
                #[unroll]
                for lane in 0..4usize {
                    sum += left[lane] * other[lane];
                }
                scores[i * 4 + j] = sum;
            }
        }
    }
}

/// Writes a unit's block to the tile that all units read.
#[cube]
fn write_tile(block: &Array<f32>, tile: &mut SharedMemory<Quad>, #[comptime] plan: Plan) {
    let side = comptime!(plan.side as u32);
    let x = UNIT_POS % side;
    let y = UNIT_POS / side;
    #[unroll]
    for i in 0..4usize {
        let mut quad = Quad::new(0.0f32);
        #[unroll]
        for j in 0..4usize {
            quad[j] = block[i * 4 + j];
        }
        tile[((y * 4 + i as u32) * side + x) as usize] = quad;
    }
}

/// Adds to a unit's accumulators of a slice the product of its rows of the tile with the slice.
#[cube]
fn accumulate(
    tile: &SharedMemory<Quad>,
    columns: &SharedMemory<Quad>,
    sums: &mut Array<Quad>,
    #[comptime] slice: usize,
    #[comptime] plan: Plan,
) {
    let side = comptime!(plan.side as u32);
    let x = UNIT_POS % side;
    let y = UNIT_POS / side;
    let mut left = Array::<Quad>::new(4usize);
    for at in 0..side {
        #[unroll]
        for i in 0..4usize {
            left[i] = tile[((y * 4 + i as u32) * side + at) as usize];
        }
        #[unroll]
        for j in 0..4usize {
            let right = columns[(slot(at * 4 + j as u32, true, plan) + x) as usize];
            #[unroll]
            for i in 0..4usize {
                let factors = left[i];
                sums[slice * 4 + i] += Quad::new(factors[j]) * right;
            }
        }
    }
}
