//! Gradients of a tile of keys and of their values. Tiles of scores are transposed here: keys down,
//! queries across.

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::super::mask::{Sizes, all_seen, first_seen, last_key, queries_of, sees};
use super::super::parts::{OUTSIDE, Place, cube_place, kept};
use super::super::{CubeMask, Dims, Heads, rounds, sizes};
use super::tile::{accumulate, dots, fetch, hold, load, put, store};
use super::{UNITS, Variant};
use crate::cubecl::tensor_cores::{Half, Pair, Wide, clear, zeroed};
use crate::cubecl::{array, grid, launch};
use crate::masked::MASKED;
use crate::ops::attention::AttentionOptions;
use crate::random::cubecl::{Rounds, row_bits};

pub(in crate::ops::attention::cubecl) fn backward_kv<R: CubeRuntime>(
    [query, key, value, grad]: [&Heads<R>; 4],
    rows: &CubeTensor<R>,
    [d_key, d_value]: [&Heads<R>; 2],
    dims: Dims,
    mask: &CubeMask<R>,
    options: AttentionOptions,
) {
    let variant = Variant::backward_kv(dims.head_dim, mask.kind(), options.dropout.is_some());
    let ints = mask.ints(&query.tensor);
    let cubes = dims.batch_size * dims.n_kv_heads * variant.slices * dims.keys.div_ceil(variant.rows());
    // SAFETY: all indices are below the sizes that `dims` gives, and each cube writes rows of its
    // own.
    unsafe {
        launch!(
            backward_kv_kernel::BackwardKvKernel,
            &query.tensor.client,
            grid(cubes),
            CubeDim::new_1d(UNITS as u32),
            [],
            [F = query.tensor.dtype, I = ints.dtype],
            [
                query: Array<Wide<backward_kv_kernel::F>> = array(&query.tensor),
                key: Array<Wide<backward_kv_kernel::F>> = array(&key.tensor),
                value: Array<Wide<backward_kv_kernel::F>> = array(&value.tensor),
                grad: Array<Wide<backward_kv_kernel::F>> = array(&grad.tensor),
                ints: Array<backward_kv_kernel::I> = array(&ints),
                statistics: Array<Pair> = array(rows),
                d_key: Array<Half<backward_kv_kernel::F>> = array(&d_key.tensor),
                d_value: Array<Half<backward_kv_kernel::F>> = array(&d_value.tensor),
                query_place: Place = query.place(8),
                key_place: Place = key.place(8),
                value_place: Place = value.place(8),
                grad_place: Place = grad.place(8),
                d_key_place: Place = d_key.place(2),
                d_value_place: Place = d_value.place(2),
                sizes: Sizes = sizes(dims, mask, options),
                rounds: Rounds = rounds(options),
            ],
            [variant: Variant = variant]
        );
    }
}

/// Gradients of the keys and values of a tile, from all queries that see any of them.
#[cube(launch_unchecked, fast_math = FastMath::ReducedPrecision | FastMath::NotNaN | FastMath::NotInf)]
fn backward_kv_kernel<F: Float, I: Int>(
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
    #[comptime] variant: Variant,
    #[define(F)] _dtype: StorageType,
    #[define(I)] _int: StorageType,
) {
    let tile = comptime!(variant.rows() as u32);
    let columns = comptime!(variant.columns as u32);
    let blocks = comptime!(variant.columns / 8);
    let lines = comptime!(2 * variant.bands);
    let slices = comptime!(variant.slices as u32);
    let mask = comptime!(variant.mask);
    let (number, sliced_head, batch) = cube_place(sizes.keys, sizes.n_kv_heads * slices, sizes, tile);
    if batch >= sizes.batch_size {
        terminate!();
    }
    let first = number * tile;
    let kv_head = sliced_head / slices;
    let first_block = sliced_head % slices * comptime!(variant.width() as u32);
    let group = sizes.n_heads / sizes.n_kv_heads;
    let keys = key_place.rows(batch, kv_head, sizes.keys);
    let values = value_place.rows(batch, kv_head, sizes.keys);

    let mut key_tile = SharedMemory::<Wide<F>>::new(comptime!(variant.rows() * variant.stride()));
    let mut value_tile = SharedMemory::<Wide<F>>::new(comptime!(variant.rows() * variant.stride()));
    let mut query_tile = SharedMemory::<Wide<F>>::new(comptime!(variant.columns * variant.stride()));
    let mut grad_tile = SharedMemory::<Wide<F>>::new(comptime!(variant.columns * variant.stride()));
    let mut row_statistics = SharedMemory::<Pair>::new(comptime!(variant.columns));
    let mut bits = SharedMemory::<u32>::new(comptime!(variant.columns));

    let plane_row = UNIT_POS / 32 * comptime!(16 * variant.bands as u32);
    let lane_row = UNIT_POS % 32 / 4;
    let lane_column = UNIT_POS % 4 * 2;

    load::<F>(key, &keys, first, &mut key_tile, comptime!(variant.rows()), variant);
    load::<F>(value, &values, first, &mut value_tile, comptime!(variant.rows()), variant);
    sync_cube();
    let held_keys = hold::<F>(&key_tile, plane_row, variant);
    let held_values = hold::<F>(&value_tile, plane_row, variant);

    let mut scores = Array::<Pair>::new(comptime!(variant.bands * blocks * 2));
    let mut d_scores = Array::<Pair>::new(comptime!(variant.bands * blocks * 2));
    let mut key_sums = zeroed(comptime!(variant.bands * variant.width() * 4));
    let mut value_sums = zeroed(comptime!(variant.bands * variant.width() * 4));
    let (start, end) = queries_of::<I>(ints, batch, first, sizes, tile, mask);
    let start = start / columns;
    let steps = end.div_ceil(columns) - start;
    let mut query_part = Array::<Wide<F>>::new(comptime!(variant.share(variant.columns)));
    let mut grad_part = Array::<Wide<F>>::new(comptime!(variant.share(variant.columns)));
    if comptime!(variant.ahead) {
        let queries = query_place.rows(batch, kv_head * group, sizes.queries);
        let grads = grad_place.rows(batch, kv_head * group, sizes.queries);
        fetch::<F>(query, &queries, start * columns, &mut query_part, comptime!(variant.columns), variant);
        fetch::<F>(grad, &grads, start * columns, &mut grad_part, comptime!(variant.columns), variant);
    }
    for step in 0..group * steps {
        let head = kv_head * group + step / steps;
        let first_query = (start + step % steps) * columns;
        let line = (batch * sizes.n_heads + head) * sizes.queries;
        if comptime!(!variant.ahead) {
            let queries = query_place.rows(batch, head, sizes.queries);
            let grads = grad_place.rows(batch, head, sizes.queries);
            fetch::<F>(query, &queries, first_query, &mut query_part, comptime!(variant.columns), variant);
            fetch::<F>(grad, &grads, first_query, &mut grad_part, comptime!(variant.columns), variant);
        }
        sync_cube();
        put::<F>(&query_part, &mut query_tile, comptime!(variant.columns), variant);
        put::<F>(&grad_part, &mut grad_tile, comptime!(variant.columns), variant);
        if comptime!(variant.ahead) {
            let next = min(step + 1, group * steps - 1);
            let next_head = kv_head * group + next / steps;
            let next_query = (start + next % steps) * columns;
            let queries = query_place.rows(batch, next_head, sizes.queries);
            let grads = grad_place.rows(batch, next_head, sizes.queries);
            fetch::<F>(query, &queries, next_query, &mut query_part, comptime!(variant.columns), variant);
            fetch::<F>(grad, &grads, next_query, &mut grad_part, comptime!(variant.columns), variant);
        }
        if UNIT_POS < columns {
            let row = line + min(first_query + UNIT_POS, sizes.queries - 1);
            row_statistics[UNIT_POS as usize] = statistics[row as usize];
            if comptime!(variant.drops) {
                bits[UNIT_POS as usize] = row_bits(row, rounds);
            }
        }
        sync_cube();

        clear(&mut scores, comptime!(variant.bands * blocks * 2));
        clear(&mut d_scores, comptime!(variant.bands * blocks * 2));
        dots::<F>(&held_keys, &key_tile, plane_row, &query_tile, &mut scores, variant);
        dots::<F>(&held_values, &value_tile, plane_row, &grad_tile, &mut d_scores, variant);
        let scale = Pair::new(sizes.scale);
        #[unroll]
        for i in 0..comptime!(variant.bands * blocks * 2) {
            scores[i] *= scale;
        }
        if !all_seen::<I>(ints, batch, first_query, columns, first, tile, sizes, mask) {
            #[unroll]
            for block in 0..blocks {
                #[unroll]
                for j in 0..2usize {
                    let query = first_query + comptime!((block * 8 + j) as u32) + lane_column;
                    let row = min(query, sizes.queries - 1);
                    let begin = first_seen::<I>(ints, batch, row, sizes, mask);
                    let last = last_key::<I>(ints, batch, row, sizes, mask);
                    #[unroll]
                    for i in 0..lines {
                        let index = comptime!(((i / 2) * blocks + block) * 2 + i % 2);
                        let key = first + plane_row + lane_row + comptime!(i as u32 * 8);
                        let mut pair = scores[index];
                        let score = select(sees(key, begin, last), pair[j], MASKED);
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
                    if comptime!(variant.drops) {
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
        accumulate::<F>(&scores, &grad_tile, &mut value_sums, first_block, variant);
        accumulate::<F>(&d_scores, &query_tile, &mut key_sums, first_block, variant);
    }

    let mut factors = Array::<f32>::new(lines);
    #[unroll]
    for i in 0..lines {
        factors[i] = 1.0f32;
    }
    let d_values = d_value_place.rows(batch, kv_head, sizes.keys);
    store::<F>(d_value, &d_values, first + plane_row, &value_sums, &factors, first_block, variant);
    #[unroll]
    for i in 0..lines {
        factors[i] = sizes.scale;
    }
    let d_keys = d_key_place.rows(batch, kv_head, sizes.keys);
    store::<F>(d_key, &d_keys, first + plane_row, &key_sums, &factors, first_block, variant);
}
