//! Gradients of a tile of queries.

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::super::mask::{Sizes, all_seen, first_seen, keys_of, last_key};
use super::super::parts::{Place, cube_place, kept_pair};
use super::super::{CubeMask, Dims, Heads, rounds, sizes};
use super::tile::{accumulate, dots, fetch, hide, hold, load, put, store};
use super::{UNITS, Variant};
use crate::cubecl::tensor_cores::{Half, Pair, Wide, clear, zeroed};
use crate::cubecl::{array, grid, launch};
use crate::ops::attention::AttentionOptions;
use crate::random::cubecl::{Rounds, row_bits};

pub(in crate::ops::attention::cubecl) fn backward_q<R: CubeRuntime>(
    [query, key, value, grad]: [&Heads<R>; 4],
    rows: &CubeTensor<R>,
    d_query: &Heads<R>,
    dims: Dims,
    mask: &CubeMask<R>,
    options: AttentionOptions,
) {
    let variant = Variant::backward_q(dims.head_dim, mask.kind(), options.dropout.is_some());
    let ints = mask.ints(&query.tensor);
    let cubes = dims.batch_size * dims.n_heads * dims.seq_length.div_ceil(variant.rows());
    // SAFETY: all indices are below the sizes that `dims` gives, and each cube writes rows of its
    // own.
    unsafe {
        launch!(
            backward_q_kernel::BackwardQKernel,
            &query.tensor.client,
            grid(cubes),
            CubeDim::new_1d(UNITS as u32),
            [],
            [F = query.tensor.dtype, I = ints.dtype],
            [
                query: Array<Wide<backward_q_kernel::F>> = array(&query.tensor),
                key: Array<Wide<backward_q_kernel::F>> = array(&key.tensor),
                value: Array<Wide<backward_q_kernel::F>> = array(&value.tensor),
                grad: Array<Wide<backward_q_kernel::F>> = array(&grad.tensor),
                ints: Array<backward_q_kernel::I> = array(&ints),
                statistics: Array<Pair> = array(rows),
                d_query: Array<Half<backward_q_kernel::F>> = array(&d_query.tensor),
                query_place: Place = query.place(8),
                key_place: Place = key.place(8),
                value_place: Place = value.place(8),
                grad_place: Place = grad.place(8),
                d_query_place: Place = d_query.place(2),
                sizes: Sizes = sizes(dims, mask, options),
                rounds: Rounds = rounds(options),
            ],
            [variant: Variant = variant]
        );
    }
}

/// Gradients of the queries of a tile, from all keys that any of them sees.
#[cube(launch_unchecked, fast_math = FastMath::ReducedPrecision | FastMath::NotNaN | FastMath::NotInf)]
fn backward_q_kernel<F: Float, I: Int>(
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
    #[comptime] variant: Variant,
    #[define(F)] _dtype: StorageType,
    #[define(I)] _int: StorageType,
) {
    let tile = comptime!(variant.rows() as u32);
    let columns = comptime!(variant.columns as u32);
    let blocks = comptime!(variant.columns / 8);
    let lines = comptime!(2 * variant.bands);
    let mask = comptime!(variant.mask);
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

    let mut query_tile = SharedMemory::<Wide<F>>::new(comptime!(variant.rows() * variant.stride()));
    let mut grad_tile = SharedMemory::<Wide<F>>::new(comptime!(variant.rows() * variant.stride()));
    let mut key_tile = SharedMemory::<Wide<F>>::new(comptime!(variant.columns * variant.stride()));
    let mut value_tile = SharedMemory::<Wide<F>>::new(comptime!(variant.columns * variant.stride()));

    let plane_row = UNIT_POS / 32 * comptime!(16 * variant.bands as u32);
    let lane_row = UNIT_POS % 32 / 4;
    let lane_column = UNIT_POS % 4 * 2;
    let mut begin = Array::<i32>::new(lines);
    let mut last = Array::<i32>::new(lines);
    let mut bits = Array::<u32>::new(lines);
    let mut log = Array::<f32>::new(lines);
    let mut delta = Array::<f32>::new(lines);
    #[unroll]
    for i in 0..lines {
        let row = min(first + plane_row + lane_row + comptime!(i as u32 * 8), sizes.queries - 1);
        begin[i] = first_seen::<I>(ints, batch, row, sizes, mask);
        last[i] = last_key::<I>(ints, batch, row, sizes, mask);
        let pair = statistics[(line + row) as usize];
        log[i] = pair[0usize];
        delta[i] = pair[1usize];
        if comptime!(variant.drops) {
            bits[i] = row_bits(line + row, rounds);
        }
    }

    let (start, end) = keys_of::<I>(ints, batch, first, sizes, tile, mask);
    load::<F>(query, &queries, first, &mut query_tile, comptime!(variant.rows()), variant);
    load::<F>(grad, &grads, first, &mut grad_tile, comptime!(variant.rows()), variant);
    sync_cube();
    let held_queries = hold::<F>(&query_tile, plane_row, variant);
    let held_grads = hold::<F>(&grad_tile, plane_row, variant);

    let mut scores = Array::<Pair>::new(comptime!(variant.bands * blocks * 2));
    let mut d_scores = Array::<Pair>::new(comptime!(variant.bands * blocks * 2));
    let mut sums = zeroed(comptime!(variant.bands * variant.depth() * 4));
    let start = start / columns;
    let end = end.div_ceil(columns);
    let mut key_part = Array::<Wide<F>>::new(comptime!(variant.share(variant.columns)));
    let mut value_part = Array::<Wide<F>>::new(comptime!(variant.share(variant.columns)));
    if comptime!(variant.ahead) {
        fetch::<F>(key, &keys, start * columns, &mut key_part, comptime!(variant.columns), variant);
        fetch::<F>(value, &values, start * columns, &mut value_part, comptime!(variant.columns), variant);
    }
    for at in start..end {
        let first_key = at * columns;
        if comptime!(!variant.ahead) {
            fetch::<F>(key, &keys, first_key, &mut key_part, comptime!(variant.columns), variant);
            fetch::<F>(value, &values, first_key, &mut value_part, comptime!(variant.columns), variant);
        }
        sync_cube();
        put::<F>(&key_part, &mut key_tile, comptime!(variant.columns), variant);
        put::<F>(&value_part, &mut value_tile, comptime!(variant.columns), variant);
        if comptime!(variant.ahead) {
            fetch::<F>(key, &keys, first_key + columns, &mut key_part, comptime!(variant.columns), variant);
            fetch::<F>(value, &values, first_key + columns, &mut value_part, comptime!(variant.columns), variant);
        }
        sync_cube();

        clear(&mut scores, comptime!(variant.bands * blocks * 2));
        clear(&mut d_scores, comptime!(variant.bands * blocks * 2));
        dots::<F>(&held_queries, &query_tile, plane_row, &key_tile, &mut scores, variant);
        dots::<F>(&held_grads, &grad_tile, plane_row, &value_tile, &mut d_scores, variant);
        let scale = Pair::new(sizes.scale);
        #[unroll]
        for i in 0..comptime!(variant.bands * blocks * 2) {
            scores[i] *= scale;
        }
        if !all_seen::<I>(ints, batch, first, tile, first_key, columns, sizes, mask) {
            hide(&mut scores, &begin, &last, first_key + lane_column, sizes, variant);
        }
        #[unroll]
        for i in 0..lines {
            let row_log = Pair::new(log[i]);
            let row_delta = Pair::new(delta[i]);
            #[unroll]
            for block in 0..blocks {
                let index = comptime!(((i / 2) * blocks + block) * 2 + i % 2);
                let mut d_pair = d_scores[index];
                if comptime!(variant.drops) {
                    let key = first_key + comptime!(block as u32 * 8) + lane_column;
                    d_pair *= kept_pair(bits[i], key / 2, sizes, rounds);
                }
                d_scores[index] = (scores[index] - row_log).exp() * (d_pair - row_delta);
            }
        }
        accumulate::<F>(&d_scores, &key_tile, &mut sums, 0u32, variant);
    }

    let mut factors = Array::<f32>::new(lines);
    #[unroll]
    for i in 0..lines {
        factors[i] = sizes.scale;
    }
    let d_queries = d_query_place.rows(batch, head, sizes.queries);
    store::<F>(d_query, &d_queries, first + plane_row, &sums, &factors, 0u32, variant);
}
