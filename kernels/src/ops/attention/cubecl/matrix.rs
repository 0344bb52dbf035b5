//! Attention on NVIDIA's matrix units: 16-bit products with sums in f32 (Dao, 2023).
//!
//! A cube has four planes, and each plane whole rows of a tile: scores, probabilities and accumulators stay in its
//! registers, in the order in which `mma` takes and gives them ([`matrix_units`](crate::cubecl::tensor_cores)), so that a tile of
//! probabilities is already the left side of its product with the values.

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::mask::{HIDDEN, MaskKind, Sizes, all_seen, keys_of, last_key, queries_of, sees};
use super::parts::{OUTSIDE, Place, Rows, cube_place, kept, kept_pair};
use super::{CubeMask, Dims, Heads, rounds, sizes, width};
use crate::cubecl::tensor_cores::{
    Half, Pair, Wide, clear, has_matrix_units, left_rows, multiply, right_columns, right_rows, zeroed,
};
use crate::cubecl::{array, grid, launch};
use crate::ops::attention::AttentionOptions;
use crate::random::cubecl::{Rounds, row_bits};

const PLANES: usize = 4;
const UNITS: usize = 32 * PLANES;

/// What a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct MatrixPlan {
    head_dim: usize,
    /// How many times 16 rows a plane has.
    bands: usize,
    /// Columns of a tile of scores.
    columns: usize,
    /// Whether a plane keeps its rows of the operands in registers.
    holds: bool,
    /// Whether the next tile is fetched while one is worked on.
    ahead: bool,
    /// How many cubes share the accumulators of a tile, each with as many of the head's columns.
    slices: usize,
    mask: MaskKind,
    drops: bool,
}

impl MatrixPlan {
    const fn forward(head_dim: usize, mask: MaskKind, drops: bool) -> Self {
        let bands = if head_dim <= 64 { 2 } else { 1 };
        let small = head_dim <= 128;
        let columns = if small { 64 } else { 32 };
        Self { head_dim, bands, columns, holds: small, ahead: small, slices: 1, mask, drops }
    }

    const fn backward_queries(head_dim: usize, mask: MaskKind, drops: bool) -> Self {
        let small = head_dim <= 64;
        let columns = if head_dim <= 128 { 64 } else { 32 };
        Self { head_dim, bands: 1, columns, holds: small, ahead: small, slices: 1, mask, drops }
    }

    const fn backward_keys(head_dim: usize, mask: MaskKind, drops: bool) -> Self {
        let small = head_dim <= 64;
        let columns = if small { 64 } else { 32 };
        let slices = if head_dim <= 128 { 1 } else { 2 };
        Self { head_dim, bands: 1, columns, holds: small, ahead: small, slices, mask, drops }
    }

    /// Rows of a tile.
    const fn rows(&self) -> usize {
        16 * self.bands * PLANES
    }

    /// Vectors of sixteen bytes in a row.
    const fn wide(&self) -> usize {
        self.head_dim / 8
    }

    /// The same in shared memory: an odd number, so that neighbouring rows begin at different banks.
    const fn stride(&self) -> usize {
        self.wide() + 1
    }

    /// Blocks of 16 columns in a row.
    const fn depth(&self) -> usize {
        self.head_dim / 16
    }

    /// Blocks of 16 columns in the accumulators of a cube.
    const fn width(&self) -> usize {
        self.depth().div_ceil(self.slices)
    }

    /// Vectors of a tile of `rows` rows that a unit carries.
    const fn share(&self, rows: usize) -> usize {
        (rows * self.wide()).div_ceil(UNITS)
    }
}

/// Whether the matrix kernels can run: on their device, dtype and sizes, with all rows beginning at whole vectors.
pub(super) fn supported<R: CubeRuntime>(heads: &[&Heads<R>], head_dim: usize) -> bool {
    // Shared memory of the largest kernel: four tiles of 64 rows.
    let shared = 4 * 64 * 2 * (head_dim + 8);
    has_matrix_units(&heads[0].tensor)
        && heads[0].tensor.client.properties().hardware.max_shared_memory_size >= shared
        && head_dim.is_multiple_of(16)
        && head_dim <= 256
        && width(heads, head_dim, 8) == 8
}

pub(super) fn forward<R: CubeRuntime>(
    [query, key, value]: [&Heads<R>; 3],
    output: &Heads<R>,
    log_sum_exp: &CubeTensor<R>,
    dims: Dims,
    mask: &CubeMask<R>,
    options: AttentionOptions,
) {
    let plan = MatrixPlan::forward(dims.head_dim, mask.kind(), options.dropout.is_some());
    let ints = mask.ints(&query.tensor);
    let cubes = dims.batch_size * dims.n_heads * dims.seq_length.div_ceil(plan.rows());
    // SAFETY: all indices are below the sizes that `dims` gives, and each cube writes rows of its own.
    unsafe {
        launch!(
            forward_kernel::ForwardKernel,
            &query.tensor.client,
            grid(cubes),
            CubeDim::new_1d(UNITS as u32),
            [],
            [F = query.tensor.dtype, I = ints.dtype],
            [
                query: Array<Wide<forward_kernel::F>> = array(&query.tensor),
                key: Array<Wide<forward_kernel::F>> = array(&key.tensor),
                value: Array<Wide<forward_kernel::F>> = array(&value.tensor),
                ints: Array<forward_kernel::I> = array(&ints),
                output: Array<Half<forward_kernel::F>> = array(&output.tensor),
                log_sum_exp: Array<f32> = array(log_sum_exp),
                query_place: Place = query.place(8),
                key_place: Place = key.place(8),
                value_place: Place = value.place(8),
                output_place: Place = output.place(2),
                sizes: Sizes = sizes(dims, mask, options),
                rounds: Rounds = rounds(options),
            ],
            [plan: MatrixPlan = plan]
        );
    }
}

pub(super) fn backward_keys<R: CubeRuntime>(
    [query, key, value, grad]: [&Heads<R>; 4],
    rows: &CubeTensor<R>,
    [d_key, d_value]: [&Heads<R>; 2],
    dims: Dims,
    mask: &CubeMask<R>,
    options: AttentionOptions,
) {
    let plan = MatrixPlan::backward_keys(dims.head_dim, mask.kind(), options.dropout.is_some());
    let ints = mask.ints(&query.tensor);
    let cubes = dims.batch_size * dims.n_kv_heads * plan.slices * dims.keys.div_ceil(plan.rows());
    // SAFETY: all indices are below the sizes that `dims` gives, and each cube writes rows of its own.
    unsafe {
        launch!(
            backward_keys_kernel::BackwardKeysKernel,
            &query.tensor.client,
            grid(cubes),
            CubeDim::new_1d(UNITS as u32),
            [],
            [F = query.tensor.dtype, I = ints.dtype],
            [
                query: Array<Wide<backward_keys_kernel::F>> = array(&query.tensor),
                key: Array<Wide<backward_keys_kernel::F>> = array(&key.tensor),
                value: Array<Wide<backward_keys_kernel::F>> = array(&value.tensor),
                grad: Array<Wide<backward_keys_kernel::F>> = array(&grad.tensor),
                ints: Array<backward_keys_kernel::I> = array(&ints),
                statistics: Array<Pair> = array(rows),
                d_key: Array<Half<backward_keys_kernel::F>> = array(&d_key.tensor),
                d_value: Array<Half<backward_keys_kernel::F>> = array(&d_value.tensor),
                query_place: Place = query.place(8),
                key_place: Place = key.place(8),
                value_place: Place = value.place(8),
                grad_place: Place = grad.place(8),
                d_key_place: Place = d_key.place(2),
                d_value_place: Place = d_value.place(2),
                sizes: Sizes = sizes(dims, mask, options),
                rounds: Rounds = rounds(options),
            ],
            [plan: MatrixPlan = plan]
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
    let plan = MatrixPlan::backward_queries(dims.head_dim, mask.kind(), options.dropout.is_some());
    let ints = mask.ints(&query.tensor);
    let cubes = dims.batch_size * dims.n_heads * dims.seq_length.div_ceil(plan.rows());
    // SAFETY: all indices are below the sizes that `dims` gives, and each cube writes rows of its own.
    unsafe {
        launch!(
            backward_queries_kernel::BackwardQueriesKernel,
            &query.tensor.client,
            grid(cubes),
            CubeDim::new_1d(UNITS as u32),
            [],
            [F = query.tensor.dtype, I = ints.dtype],
            [
                query: Array<Wide<backward_queries_kernel::F>> = array(&query.tensor),
                key: Array<Wide<backward_queries_kernel::F>> = array(&key.tensor),
                value: Array<Wide<backward_queries_kernel::F>> = array(&value.tensor),
                grad: Array<Wide<backward_queries_kernel::F>> = array(&grad.tensor),
                ints: Array<backward_queries_kernel::I> = array(&ints),
                statistics: Array<Pair> = array(rows),
                d_query: Array<Half<backward_queries_kernel::F>> = array(&d_query.tensor),
                query_place: Place = query.place(8),
                key_place: Place = key.place(8),
                value_place: Place = value.place(8),
                grad_place: Place = grad.place(8),
                d_query_place: Place = d_query.place(2),
                sizes: Sizes = sizes(dims, mask, options),
                rounds: Rounds = rounds(options),
            ],
            [plan: MatrixPlan = plan]
        );
    }
}

#[cube(launch_unchecked, fast_math = FastMath::ReducedPrecision | FastMath::NotNaN | FastMath::NotInf)]
#[allow(clippy::too_many_arguments)]
fn forward_kernel<F: Float, I: Int>(
    query: &Array<Wide<F>>,
    key: &Array<Wide<F>>,
    value: &Array<Wide<F>>,
    ints: &Array<I>,
    output: &mut Array<Half<F>>,
    log_sum_exp: &mut Array<f32>,
    query_place: &Place,
    key_place: &Place,
    value_place: &Place,
    output_place: &Place,
    sizes: &Sizes,
    rounds: &Rounds,
    #[comptime] plan: MatrixPlan,
    #[define(F)] _dtype: StorageType,
    #[define(I)] _int: StorageType,
) {
    let tile = comptime!(plan.rows() as u32);
    let columns = comptime!(plan.columns as u32);
    let blocks = comptime!(plan.columns / 8);
    let lines = comptime!(2 * plan.bands);
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

    let mut query_tile = SharedMemory::<Wide<F>>::new(comptime!(plan.rows() * plan.stride()));
    let mut key_tile = SharedMemory::<Wide<F>>::new(comptime!(plan.columns * plan.stride()));
    let mut value_tile = SharedMemory::<Wide<F>>::new(comptime!(plan.columns * plan.stride()));

    // The plane's first row in the tile, and the lane's among the plane's.
    let plane_row = UNIT_POS / 32 * comptime!(16 * plan.bands as u32);
    let lane_row = UNIT_POS % 32 / 4;
    let lane_column = UNIT_POS % 4 * 2;
    let mut last = Array::<i32>::new(lines);
    let mut bits = Array::<u32>::new(lines);
    let mut maximum = Array::<f32>::new(lines);
    let mut total = Array::<f32>::new(lines);
    #[unroll]
    for i in 0..lines {
        let row = min(first + plane_row + lane_row + comptime!(i as u32 * 8), sizes.queries - 1);
        last[i] = last_key::<I>(ints, batch, row, sizes, mask);
        if comptime!(plan.drops) {
            bits[i] = row_bits(line + row, rounds);
        }
        maximum[i] = OUTSIDE;
        total[i] = 0.0f32;
    }

    let (start, end) = keys_of::<I>(ints, batch, first, sizes, tile, mask);
    let start = start / columns;
    let end = end.div_ceil(columns);
    load::<F>(query, &queries, first, &mut query_tile, comptime!(plan.rows()), plan);
    load::<F>(key, &keys, start * columns, &mut key_tile, comptime!(plan.columns), plan);
    sync_cube();
    let held = hold::<F>(&query_tile, plane_row, plan);

    let mut scores = Array::<Pair>::new(comptime!(plan.bands * blocks * 2));
    let mut sums = zeroed(comptime!(plan.bands * plan.depth() * 4));
    let mut part = Array::<Wide<F>>::new(comptime!(plan.share(plan.columns)));
    for at in start..end {
        let first_key = at * columns;
        if comptime!(plan.ahead) {
            fetch::<F>(value, &values, first_key, &mut part, comptime!(plan.columns), plan);
        }
        clear(&mut scores, comptime!(plan.bands * blocks * 2));
        dots::<F>(&held, &query_tile, plane_row, &key_tile, &mut scores, plan);
        if comptime!(!plan.ahead) {
            fetch::<F>(value, &values, first_key, &mut part, comptime!(plan.columns), plan);
        }
        put::<F>(&part, &mut value_tile, comptime!(plan.columns), plan);
        sync_cube();
        // The tile after the last is none that anyone needs, but rows of it may be there.
        if comptime!(plan.ahead) {
            fetch::<F>(key, &keys, first_key + columns, &mut part, comptime!(plan.columns), plan);
        }

        let scale = Pair::new(sizes.scale);
        #[unroll]
        for i in 0..comptime!(plan.bands * blocks * 2) {
            scores[i] *= scale;
        }
        if !all_seen::<I>(ints, batch, first, tile, first_key, columns, sizes, mask) {
            hide(&mut scores, &last, first_key + lane_column, sizes, plan);
        }

        #[unroll]
        for i in 0..lines {
            let (band, side) = comptime!((i / 2, i % 2));
            let mut highest = maximum[i];
            #[unroll]
            for block in 0..blocks {
                let pair = scores[comptime!((band * blocks + block) * 2 + side)];
                highest = max(highest, max(pair[0usize], pair[1usize]));
            }
            highest = max(highest, plane_shuffle_xor(highest, 1));
            highest = max(highest, plane_shuffle_xor(highest, 2));
            let shrink = (maximum[i] - highest).exp();
            maximum[i] = highest;
            let mut row_total = total[i] * shrink;
            #[unroll]
            for block in 0..blocks {
                let index = comptime!((band * blocks + block) * 2 + side);
                let mut pair = (scores[index] - Pair::new(highest)).exp();
                row_total += pair[0usize] + pair[1usize];
                if comptime!(plan.drops) {
                    let key = first_key + comptime!(block as u32 * 8) + lane_column;
                    pair *= kept_pair(bits[i], key / 2, sizes, rounds);
                }
                scores[index] = pair;
            }
            total[i] = row_total;
            let shrink = Pair::new(shrink);
            #[unroll]
            for block in 0..comptime!(2 * plan.depth()) {
                sums[comptime!((band * 2 * plan.depth() + block) * 2 + side)] *= shrink;
            }
        }
        accumulate::<F>(&scores, &value_tile, &mut sums, 0u32, plan);
        if comptime!(!plan.ahead) {
            fetch::<F>(key, &keys, first_key + columns, &mut part, comptime!(plan.columns), plan);
        }
        put::<F>(&part, &mut key_tile, comptime!(plan.columns), plan);
        sync_cube();
    }

    let mut factors = Array::<f32>::new(lines);
    #[unroll]
    for i in 0..lines {
        let mut row_total = total[i];
        row_total += plane_shuffle_xor(row_total, 1);
        row_total += plane_shuffle_xor(row_total, 2);
        factors[i] = 1.0f32 / row_total;
        let row = first + plane_row + lane_row + comptime!(i as u32 * 8);
        if row < sizes.queries && lane_column == 0 {
            log_sum_exp[(line + row) as usize] = maximum[i] + row_total.ln();
        }
    }
    let outputs = output_place.rows(batch, head, sizes.queries);
    store::<F>(output, &outputs, first + plane_row, &sums, &factors, 0u32, plan);
}

/// Gradients of the keys and values of a tile, from all queries that see any of them. The tiles of scores stand on
/// their heads here, keys down and queries across.
#[cube(launch_unchecked, fast_math = FastMath::ReducedPrecision | FastMath::NotNaN | FastMath::NotInf)]
#[allow(clippy::too_many_arguments)]
fn backward_keys_kernel<F: Float, I: Int>(
    query: &Array<Wide<F>>,
    key: &Array<Wide<F>>,
    value: &Array<Wide<F>>,
    grad: &Array<Wide<F>>,
    ints: &Array<I>,
    statistics: &Array<Pair>,
    d_key: &mut Array<Half<F>>,
    d_value: &mut Array<Half<F>>,
    query_place: &Place,
    key_place: &Place,
    value_place: &Place,
    grad_place: &Place,
    d_key_place: &Place,
    d_value_place: &Place,
    sizes: &Sizes,
    rounds: &Rounds,
    #[comptime] plan: MatrixPlan,
    #[define(F)] _dtype: StorageType,
    #[define(I)] _int: StorageType,
) {
    let tile = comptime!(plan.rows() as u32);
    let columns = comptime!(plan.columns as u32);
    let blocks = comptime!(plan.columns / 8);
    let lines = comptime!(2 * plan.bands);
    let slices = comptime!(plan.slices as u32);
    let mask = comptime!(plan.mask);
    let (number, sliced_head, batch) = cube_place(sizes.keys, sizes.n_kv_heads * slices, sizes, tile);
    if batch >= sizes.batch_size {
        terminate!();
    }
    let first = number * tile;
    let kv_head = sliced_head / slices;
    let first_block = sliced_head % slices * comptime!(plan.width() as u32);
    let group = sizes.n_heads / sizes.n_kv_heads;
    let keys = key_place.rows(batch, kv_head, sizes.keys);
    let values = value_place.rows(batch, kv_head, sizes.keys);

    let mut key_tile = SharedMemory::<Wide<F>>::new(comptime!(plan.rows() * plan.stride()));
    let mut value_tile = SharedMemory::<Wide<F>>::new(comptime!(plan.rows() * plan.stride()));
    let mut query_tile = SharedMemory::<Wide<F>>::new(comptime!(plan.columns * plan.stride()));
    let mut grad_tile = SharedMemory::<Wide<F>>::new(comptime!(plan.columns * plan.stride()));
    let mut row_statistics = SharedMemory::<Pair>::new(comptime!(plan.columns));
    let mut bits = SharedMemory::<u32>::new(comptime!(plan.columns));

    let plane_row = UNIT_POS / 32 * comptime!(16 * plan.bands as u32);
    let lane_row = UNIT_POS % 32 / 4;
    let lane_column = UNIT_POS % 4 * 2;

    load::<F>(key, &keys, first, &mut key_tile, comptime!(plan.rows()), plan);
    load::<F>(value, &values, first, &mut value_tile, comptime!(plan.rows()), plan);
    sync_cube();
    let held_keys = hold::<F>(&key_tile, plane_row, plan);
    let held_values = hold::<F>(&value_tile, plane_row, plan);

    let mut scores = Array::<Pair>::new(comptime!(plan.bands * blocks * 2));
    let mut d_scores = Array::<Pair>::new(comptime!(plan.bands * blocks * 2));
    let mut key_sums = zeroed(comptime!(plan.bands * plan.width() * 4));
    let mut value_sums = zeroed(comptime!(plan.bands * plan.width() * 4));
    let (start, end) = queries_of::<I>(ints, batch, first, sizes, tile, mask);
    let start = start / columns;
    let steps = end.div_ceil(columns) - start;
    let mut query_part = Array::<Wide<F>>::new(comptime!(plan.share(plan.columns)));
    let mut grad_part = Array::<Wide<F>>::new(comptime!(plan.share(plan.columns)));
    if comptime!(plan.ahead) {
        let queries = query_place.rows(batch, kv_head * group, sizes.queries);
        let grads = grad_place.rows(batch, kv_head * group, sizes.queries);
        fetch::<F>(query, &queries, start * columns, &mut query_part, comptime!(plan.columns), plan);
        fetch::<F>(grad, &grads, start * columns, &mut grad_part, comptime!(plan.columns), plan);
    }
    for step in 0..group * steps {
        let head = kv_head * group + step / steps;
        let first_query = (start + step % steps) * columns;
        let line = (batch * sizes.n_heads + head) * sizes.queries;
        if comptime!(!plan.ahead) {
            let queries = query_place.rows(batch, head, sizes.queries);
            let grads = grad_place.rows(batch, head, sizes.queries);
            fetch::<F>(query, &queries, first_query, &mut query_part, comptime!(plan.columns), plan);
            fetch::<F>(grad, &grads, first_query, &mut grad_part, comptime!(plan.columns), plan);
        }
        sync_cube();
        put::<F>(&query_part, &mut query_tile, comptime!(plan.columns), plan);
        put::<F>(&grad_part, &mut grad_tile, comptime!(plan.columns), plan);
        if comptime!(plan.ahead) {
            let next = min(step + 1, group * steps - 1);
            let next_head = kv_head * group + next / steps;
            let next_query = (start + next % steps) * columns;
            let queries = query_place.rows(batch, next_head, sizes.queries);
            let grads = grad_place.rows(batch, next_head, sizes.queries);
            fetch::<F>(query, &queries, next_query, &mut query_part, comptime!(plan.columns), plan);
            fetch::<F>(grad, &grads, next_query, &mut grad_part, comptime!(plan.columns), plan);
        }
        if UNIT_POS < columns {
            let row = line + min(first_query + UNIT_POS, sizes.queries - 1);
            row_statistics[UNIT_POS as usize] = statistics[row as usize];
            if comptime!(plan.drops) {
                bits[UNIT_POS as usize] = row_bits(row, rounds);
            }
        }
        sync_cube();

        clear(&mut scores, comptime!(plan.bands * blocks * 2));
        clear(&mut d_scores, comptime!(plan.bands * blocks * 2));
        dots::<F>(&held_keys, &key_tile, plane_row, &query_tile, &mut scores, plan);
        dots::<F>(&held_values, &value_tile, plane_row, &grad_tile, &mut d_scores, plan);
        let scale = Pair::new(sizes.scale);
        #[unroll]
        for i in 0..comptime!(plan.bands * blocks * 2) {
            scores[i] *= scale;
        }
        if !all_seen::<I>(ints, batch, first_query, columns, first, tile, sizes, mask) {
            #[unroll]
            for block in 0..blocks {
                #[unroll]
                for j in 0..2usize {
                    let query = first_query + comptime!((block * 8 + j) as u32) + lane_column;
                    let last = last_key::<I>(ints, batch, min(query, sizes.queries - 1), sizes, mask);
                    #[unroll]
                    for i in 0..lines {
                        let index = comptime!(((i / 2) * blocks + block) * 2 + i % 2);
                        let key = first + plane_row + lane_row + comptime!(i as u32 * 8);
                        let mut pair = scores[index];
                        let score = select(sees(key, last, sizes), pair[j], HIDDEN);
                        pair[j] = select(query < sizes.queries, score, OUTSIDE);
                        scores[index] = pair;
                    }
                }
            }
        }
        #[unroll]
        for block in 0..blocks {
            #[unroll]
            for j in 0..2usize {
                let column = comptime!((block * 8 + j) as u32) + lane_column;
                let row = row_statistics[column as usize];
                #[unroll]
                for i in 0..lines {
                    let index = comptime!(((i / 2) * blocks + block) * 2 + i % 2);
                    let mut pair = scores[index];
                    let mut d_pair = d_scores[index];
                    let probability = (pair[j] - row[0usize]).exp();
                    let mut d_probability = d_pair[j];
                    if comptime!(plan.drops) {
                        let key = first + plane_row + lane_row + comptime!(i as u32 * 8);
                        let factor = kept(bits[column as usize], key, sizes, rounds);
                        pair[j] = probability * factor;
                        d_probability *= factor;
                    } else {
                        pair[j] = probability;
                    }
                    d_pair[j] = probability * (d_probability - row[1usize]);
                    scores[index] = pair;
                    d_scores[index] = d_pair;
                }
            }
        }
        accumulate::<F>(&scores, &grad_tile, &mut value_sums, first_block, plan);
        accumulate::<F>(&d_scores, &query_tile, &mut key_sums, first_block, plan);
    }

    let mut factors = Array::<f32>::new(lines);
    #[unroll]
    for i in 0..lines {
        factors[i] = 1.0f32;
    }
    let d_values = d_value_place.rows(batch, kv_head, sizes.keys);
    store::<F>(d_value, &d_values, first + plane_row, &value_sums, &factors, first_block, plan);
    #[unroll]
    for i in 0..lines {
        factors[i] = sizes.scale;
    }
    let d_keys = d_key_place.rows(batch, kv_head, sizes.keys);
    store::<F>(d_key, &d_keys, first + plane_row, &key_sums, &factors, first_block, plan);
}

/// Gradients of the queries of a tile, from all keys that any of them sees.
#[cube(launch_unchecked, fast_math = FastMath::ReducedPrecision | FastMath::NotNaN | FastMath::NotInf)]
#[allow(clippy::too_many_arguments)]
fn backward_queries_kernel<F: Float, I: Int>(
    query: &Array<Wide<F>>,
    key: &Array<Wide<F>>,
    value: &Array<Wide<F>>,
    grad: &Array<Wide<F>>,
    ints: &Array<I>,
    statistics: &Array<Pair>,
    d_query: &mut Array<Half<F>>,
    query_place: &Place,
    key_place: &Place,
    value_place: &Place,
    grad_place: &Place,
    d_query_place: &Place,
    sizes: &Sizes,
    rounds: &Rounds,
    #[comptime] plan: MatrixPlan,
    #[define(F)] _dtype: StorageType,
    #[define(I)] _int: StorageType,
) {
    let tile = comptime!(plan.rows() as u32);
    let columns = comptime!(plan.columns as u32);
    let blocks = comptime!(plan.columns / 8);
    let lines = comptime!(2 * plan.bands);
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

    let mut query_tile = SharedMemory::<Wide<F>>::new(comptime!(plan.rows() * plan.stride()));
    let mut grad_tile = SharedMemory::<Wide<F>>::new(comptime!(plan.rows() * plan.stride()));
    let mut key_tile = SharedMemory::<Wide<F>>::new(comptime!(plan.columns * plan.stride()));
    let mut value_tile = SharedMemory::<Wide<F>>::new(comptime!(plan.columns * plan.stride()));

    let plane_row = UNIT_POS / 32 * comptime!(16 * plan.bands as u32);
    let lane_row = UNIT_POS % 32 / 4;
    let lane_column = UNIT_POS % 4 * 2;
    let mut last = Array::<i32>::new(lines);
    let mut bits = Array::<u32>::new(lines);
    let mut log = Array::<f32>::new(lines);
    let mut delta = Array::<f32>::new(lines);
    #[unroll]
    for i in 0..lines {
        let row = min(first + plane_row + lane_row + comptime!(i as u32 * 8), sizes.queries - 1);
        last[i] = last_key::<I>(ints, batch, row, sizes, mask);
        let pair = statistics[(line + row) as usize];
        log[i] = pair[0usize];
        delta[i] = pair[1usize];
        if comptime!(plan.drops) {
            bits[i] = row_bits(line + row, rounds);
        }
    }

    let (start, end) = keys_of::<I>(ints, batch, first, sizes, tile, mask);
    load::<F>(query, &queries, first, &mut query_tile, comptime!(plan.rows()), plan);
    load::<F>(grad, &grads, first, &mut grad_tile, comptime!(plan.rows()), plan);
    sync_cube();
    let held_queries = hold::<F>(&query_tile, plane_row, plan);
    let held_grads = hold::<F>(&grad_tile, plane_row, plan);

    let mut scores = Array::<Pair>::new(comptime!(plan.bands * blocks * 2));
    let mut d_scores = Array::<Pair>::new(comptime!(plan.bands * blocks * 2));
    let mut sums = zeroed(comptime!(plan.bands * plan.depth() * 4));
    let start = start / columns;
    let end = end.div_ceil(columns);
    let mut key_part = Array::<Wide<F>>::new(comptime!(plan.share(plan.columns)));
    let mut value_part = Array::<Wide<F>>::new(comptime!(plan.share(plan.columns)));
    if comptime!(plan.ahead) {
        fetch::<F>(key, &keys, start * columns, &mut key_part, comptime!(plan.columns), plan);
        fetch::<F>(value, &values, start * columns, &mut value_part, comptime!(plan.columns), plan);
    }
    for at in start..end {
        let first_key = at * columns;
        if comptime!(!plan.ahead) {
            fetch::<F>(key, &keys, first_key, &mut key_part, comptime!(plan.columns), plan);
            fetch::<F>(value, &values, first_key, &mut value_part, comptime!(plan.columns), plan);
        }
        sync_cube();
        put::<F>(&key_part, &mut key_tile, comptime!(plan.columns), plan);
        put::<F>(&value_part, &mut value_tile, comptime!(plan.columns), plan);
        if comptime!(plan.ahead) {
            fetch::<F>(key, &keys, first_key + columns, &mut key_part, comptime!(plan.columns), plan);
            fetch::<F>(value, &values, first_key + columns, &mut value_part, comptime!(plan.columns), plan);
        }
        sync_cube();

        clear(&mut scores, comptime!(plan.bands * blocks * 2));
        clear(&mut d_scores, comptime!(plan.bands * blocks * 2));
        dots::<F>(&held_queries, &query_tile, plane_row, &key_tile, &mut scores, plan);
        dots::<F>(&held_grads, &grad_tile, plane_row, &value_tile, &mut d_scores, plan);
        let scale = Pair::new(sizes.scale);
        #[unroll]
        for i in 0..comptime!(plan.bands * blocks * 2) {
            scores[i] *= scale;
        }
        if !all_seen::<I>(ints, batch, first, tile, first_key, columns, sizes, mask) {
            hide(&mut scores, &last, first_key + lane_column, sizes, plan);
        }
        #[unroll]
        for i in 0..lines {
            let row_log = Pair::new(log[i]);
            let row_delta = Pair::new(delta[i]);
            #[unroll]
            for block in 0..blocks {
                let index = comptime!(((i / 2) * blocks + block) * 2 + i % 2);
                let mut d_pair = d_scores[index];
                if comptime!(plan.drops) {
                    let key = first_key + comptime!(block as u32 * 8) + lane_column;
                    d_pair *= kept_pair(bits[i], key / 2, sizes, rounds);
                }
                d_scores[index] = (scores[index] - row_log).exp() * (d_pair - row_delta);
            }
        }
        accumulate::<F>(&d_scores, &key_tile, &mut sums, 0u32, plan);
    }

    let mut factors = Array::<f32>::new(lines);
    #[unroll]
    for i in 0..lines {
        factors[i] = sizes.scale;
    }
    let d_queries = d_query_place.rows(batch, head, sizes.queries);
    store::<F>(d_query, &d_queries, first + plane_row, &sums, &factors, 0u32, plan);
}

/// Hides scores of a plane's queries: those of keys that a row, of which `last` holds the last keys, does not see, and
/// those of keys past the last one. `first_key` is that of the lane's first column.
#[cube]
fn hide(scores: &mut Array<Pair>, last: &Array<i32>, first_key: u32, sizes: &Sizes, #[comptime] plan: MatrixPlan) {
    let blocks = comptime!(plan.columns / 8);
    #[unroll]
    for i in 0..comptime!(2 * plan.bands) {
        #[unroll]
        for block in 0..blocks {
            let index = comptime!(((i / 2) * blocks + block) * 2 + i % 2);
            let mut pair = scores[index];
            #[unroll]
            for j in 0..2usize {
                let key = first_key + comptime!((block * 8 + j) as u32);
                let score = select(sees(key, last[i], sizes), pair[j], HIDDEN);
                pair[j] = select(key < sizes.keys, score, OUTSIDE);
            }
            scores[index] = pair;
        }
    }
}

/// Reads a unit's share of a tile's rows, from row `first` on, with zeros after the last row.
#[cube]
fn fetch<F: Float>(
    from: &Array<Wide<F>>,
    rows: &Rows,
    first: u32,
    part: &mut Array<Wide<F>>,
    #[comptime] count: usize,
    #[comptime] plan: MatrixPlan,
) {
    let wide = comptime!(plan.wide() as u32);
    #[unroll]
    for step in 0..comptime!(plan.share(count)) {
        let at = UNIT_POS + comptime!((step * UNITS) as u32);
        let row = first + at / wide;
        part[step] = Wide::<F>::cast_from(0.0f32);
        if row < rows.end {
            part[step] = from[(rows.at + row * rows.stride + at % wide) as usize];
        }
    }
}

/// Copies a tile from memory to shared memory.
#[cube]
fn load<F: Float>(
    from: &Array<Wide<F>>,
    rows: &Rows,
    first: u32,
    tile: &mut SharedMemory<Wide<F>>,
    #[comptime] count: usize,
    #[comptime] plan: MatrixPlan,
) {
    let mut part = Array::<Wide<F>>::new(comptime!(plan.share(count)));
    fetch::<F>(from, rows, first, &mut part, count, plan);
    put::<F>(&part, tile, count, plan);
}

/// Writes a unit's share of a tile to shared memory.
#[cube]
fn put<F: Float>(
    part: &Array<Wide<F>>,
    tile: &mut SharedMemory<Wide<F>>,
    #[comptime] count: usize,
    #[comptime] plan: MatrixPlan,
) {
    let wide = comptime!(plan.wide() as u32);
    let vectors = comptime!((count * plan.wide()) as u32);
    #[unroll]
    for step in 0..comptime!(plan.share(count)) {
        let at = UNIT_POS + comptime!((step * UNITS) as u32);
        let index = (at / wide * comptime!(plan.stride() as u32) + at % wide) as usize;
        // Every unit has its share but in the last round.
        if comptime!((step + 1) * UNITS <= vectors as usize) || at < vectors {
            tile[index] = part[step];
        }
    }
}

/// A plane's rows of a tile in registers, where they are kept there.
#[cube]
fn hold<F: Float>(tile: &SharedMemory<Wide<F>>, plane_row: u32, #[comptime] plan: MatrixPlan) -> Array<Half<F>> {
    let blocks = comptime!(if plan.holds { plan.bands * plan.depth() } else { 0 });
    let mut held = Array::<Half<F>>::new(comptime!((4 * blocks).max(1)));
    #[unroll]
    for block in 0..blocks {
        let (band, column) = comptime!((block / plan.depth(), block % plan.depth()));
        let side = left_rows::<F>(tile, plane_row + comptime!(16 * band as u32), column, comptime!(plan.stride()));
        #[unroll]
        for i in 0..4usize {
            held[comptime!(4 * block + i)] = side[i];
        }
    }
    held
}

/// Adds to a tile of scores the products of a plane's rows, held or in `left`, with the rows of `right`.
#[cube]
fn dots<F: Float>(
    held: &Array<Half<F>>,
    left: &SharedMemory<Wide<F>>,
    plane_row: u32,
    right: &SharedMemory<Wide<F>>,
    scores: &mut Array<Pair>,
    #[comptime] plan: MatrixPlan,
) {
    let mut sides = Array::<Half<F>>::new(comptime!(4 * plan.bands));
    #[unroll]
    for block in 0..comptime!(plan.depth()) {
        #[unroll]
        for band in 0..comptime!(plan.bands) {
            if comptime!(plan.holds) {
                #[unroll]
                for i in 0..4usize {
                    sides[comptime!(4 * band + i)] = held[comptime!(4 * (band * plan.depth() + block) + i)];
                }
            } else {
                let side =
                    left_rows::<F>(left, plane_row + comptime!(16 * band as u32), block, comptime!(plan.stride()));
                #[unroll]
                for i in 0..4usize {
                    sides[comptime!(4 * band + i)] = side[i];
                }
            }
        }
        #[unroll]
        for row in 0..comptime!(plan.columns / 16) {
            let rows = right_rows::<F>(right, comptime!(16 * row), block, comptime!(plan.stride()));
            #[unroll]
            for band in 0..comptime!(plan.bands) {
                multiply::<F>(&sides, &rows, scores, band, comptime!((band * plan.columns / 8 + 2 * row) * 2));
            }
        }
    }
}

/// Adds to a plane's accumulators the product of its tile of scores with the columns of `right`, from block
/// `first_block` on.
#[cube]
fn accumulate<F: Float>(
    scores: &Array<Pair>,
    right: &SharedMemory<Wide<F>>,
    sums: &mut Array<Pair>,
    first_block: u32,
    #[comptime] plan: MatrixPlan,
) {
    let mut sides = Array::<Half<F>>::new(comptime!(4 * plan.bands));
    #[unroll]
    for row in 0..comptime!(plan.columns / 16) {
        #[unroll]
        for i in 0..comptime!(4 * plan.bands) {
            let pair = scores[comptime!((i / 4 * plan.columns / 8 + 2 * row) * 2 + i % 4)];
            sides[i] = Half::<F>::cast_from(pair);
        }
        #[unroll]
        for column in 0..comptime!(plan.width()) {
            let block = first_block + comptime!(column as u32);
            // The last cube of a tile may have fewer columns.
            if comptime!(plan.width() * plan.slices == plan.depth()) || block < comptime!(plan.depth() as u32) {
                let columns = right_columns::<F>(right, comptime!(16 * row), block, comptime!(plan.stride()));
                #[unroll]
                for band in 0..comptime!(plan.bands) {
                    multiply::<F>(&sides, &columns, sums, band, comptime!((band * plan.width() + column) * 4));
                }
            }
        }
    }
}

/// Stores a plane's accumulators, each row times its factor, in the rows from `first` on and the columns from block
/// `first_block` on.
#[cube]
fn store<F: Float>(
    to: &mut Array<Half<F>>,
    rows: &Rows,
    first: u32,
    sums: &Array<Pair>,
    factors: &Array<f32>,
    first_block: u32,
    #[comptime] plan: MatrixPlan,
) {
    let lane = UNIT_POS % 32;
    #[unroll]
    for i in 0..comptime!(2 * plan.bands) {
        let (band, side) = comptime!((i / 2, i % 2));
        let row = first + lane / 4 + comptime!(i as u32 * 8);
        let factor = Pair::new(factors[i]);
        if row < rows.end {
            #[unroll]
            for block in 0..comptime!(2 * plan.width()) {
                let sum = sums[comptime!((band * 2 * plan.width() + block) * 2 + side)];
                let column = first_block * 8 + comptime!(4 * block as u32) + lane % 4;
                if column < comptime!(plan.head_dim as u32 / 2) {
                    to[(rows.at + row * rows.stride + column) as usize] = Half::<F>::cast_from(sum * factor);
                }
            }
        }
    }
}
